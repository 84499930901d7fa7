"""The reference implementation, importable beside any torch: `from tests.reference import qwen_tts`."""

from __future__ import annotations

from backend.cloning import import_qwen_tts

qwen_tts = import_qwen_tts()

__all__ = ["qwen_tts"]
