"""Figures to a table on the screen and to JSON lines: the one schema of everything in `results/`.

A line is one figure: ``benchmark`` and its ``question``; ``figure`` (which one), ``value``, ``unit`` and
``spread`` (p5, p95, least, most, count); ``ceiling`` (a value in the same unit, and what it is); ``setting``
(model, dtype, lanes, …); ``conditions`` (`benchmarks/conditions.py`). Knows nothing of what is measured.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.conditions import RESULTS, ROOT, Conditions, Machine


@dataclass(frozen=True)
class Ceiling:
    """The best that a figure can be, or the bound it has to keep, in the figure's unit, and why."""

    value: float
    basis: str


@dataclass(frozen=True)
class Spread:
    p5: float
    p95: float
    least: float
    most: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        p5, p95 = np.percentile(values, [5, 95]).tolist()
        return cls(p5, p95, min(values), max(values), len(values))


@dataclass(frozen=True)
class Figure:
    """One number; ``value`` is None where there is nothing to measure."""

    name: str
    value: float | None
    unit: str
    spread: Spread | None
    ceiling: Ceiling | None
    setting: dict[str, Any]

    def __str__(self) -> str:
        value = "none" if self.value is None else f"{self.value:.4g}"
        parts = [f"  {self.name:34} {value:>9} {self.unit}"]
        if self.spread is not None:
            parts.append(f"({self.spread.p5:.4g} .. {self.spread.p95:.4g}, n={self.spread.count})")
        if self.ceiling is not None:
            parts.append(f"| {self.ceiling.value:.4g} {self.ceiling.basis}")
        return " ".join(parts)


class Measured(Protocol):
    """The conditions of a run: what its machine can do, and a record of it all, made after the run."""

    machine: Machine

    def record(self) -> dict[str, Any]: ...


class Report:
    """Collects the figures of one benchmark; on leaving without an error it appends them to ``out``.

    ``out`` None is ``benchmarks/results/<benchmark>.jsonl``; ``dry`` writes nothing; ``conditions`` None are
    measured on entering.
    """

    def __init__(
        self,
        benchmark: str,
        question: str,
        out: Path | None = None,
        dry: bool = False,
        conditions: Measured | None = None,
    ) -> None:
        self.benchmark, self.question, self.dry, self._given = benchmark, question, dry, conditions
        self.out = out or ROOT / RESULTS / f"{benchmark}.jsonl"
        self.figures: list[Figure] = []
        self._written = 0

    def __enter__(self) -> Report:
        print(f"{self.benchmark}: {self.question}")
        self.conditions: Measured = self._given or Conditions()
        print(_speed(self.machine))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.write()

    @property
    def machine(self) -> Machine:
        return self.conditions.machine

    def title(self, **setting: Any) -> None:
        """Announce the figures of one setting."""
        print(", ".join(f"{name} {value}" for name, value in setting.items()))

    def add(self, name: str, value: float | None, unit: str, ceiling: Ceiling | None = None, **setting: Any) -> Figure:
        """A single number."""
        return self._add(Figure(name, value, unit, None, ceiling, setting))

    def add_many(
        self, name: str, values: Sequence[float], unit: str, ceiling: Ceiling | None = None, **setting: Any
    ) -> Figure:
        """The median of several measurements, with their spread; None if there are none."""
        if not values:
            return self.add(name, None, unit, ceiling, **setting)
        return self._add(Figure(name, float(np.median(values)), unit, Spread.of(values), ceiling, setting))

    def lines(self) -> list[dict[str, Any]]:
        """The figures as the records that are written."""
        return self._lines(self.figures)

    def write(self) -> None:
        """Append the figures that have not been written yet."""
        lines = self._lines(self.figures[self._written :])
        if self.dry or not lines:
            return
        self.out.parent.mkdir(parents=True, exist_ok=True)
        with self.out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        self._written = len(self.figures)
        print(f"appended {len(lines)} lines to {self.out}")

    def _lines(self, figures: Sequence[Figure]) -> list[dict[str, Any]]:
        conditions = self.conditions.record()
        return [
            {
                "benchmark": self.benchmark,
                "question": self.question,
                "figure": figure.name,
                "value": figure.value,
                "unit": figure.unit,
                "spread": figure.spread and asdict(figure.spread),
                "ceiling": figure.ceiling and asdict(figure.ceiling),
                "setting": figure.setting,
                "conditions": conditions,
            }
            for figure in figures
        ]

    def _add(self, figure: Figure) -> Figure:
        self.figures.append(figure)
        print(figure)
        return figure


def _speed(machine: Machine) -> str:
    peaks = ", ".join(f"{peak / 1e9:.0f} GFLOP/s in {dtype}" for dtype, peak in machine.peak.items())
    return f"this machine, measured now: reads {machine.bandwidth / 1e9:.1f} GB/s; {peaks}"
