"""Figures and the conditions they hold under: one question a file, JSON lines in `results/`."""
