"""Frame time against its floor, as a picture: a bar for every engine, size, format and number of lanes.

Reads the JSON lines in `results/`, of each bar the newest line, and draws nothing that is not in them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.conditions import RESULTS, ROOT

FIGURE = "frame"
SIZES = {"0b6": "0.6b", "1b7": "1.7b"}  # as a checkpoint says it: as a benchmark does
ENGINES = ("kernel", "graphed twin", "twin", "faster-qwen3-tts", "qwen-tts")
Line = dict[str, Any]


@dataclass(frozen=True)
class Bar:
    """Milliseconds of a frame; ``least`` and ``most`` are the 5th and the 95th percentile."""

    engine: str
    group: str  # the size, format and lanes that bars side by side share
    value: float
    least: float
    most: float
    floor: float | None
    device: str


def read(paths: Iterable[Path]) -> list[Line]:
    return [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines() if line]


def bars(lines: Sequence[Line], device: str | None = None) -> list[Bar]:
    """The newest figure of every engine and group on ``device``: that of the newest line unless named."""
    found = [line for line in lines if line["figure"] == FIGURE and line["value"] is not None]
    found.sort(key=lambda line: line["conditions"]["date"])
    if not found:
        return []
    chosen = device or device_of(found[-1])
    newest = {(bar.engine, bar.group): bar for bar in map(_bar, found) if bar.device == chosen}
    return list(newest.values())


def device_of(line: Line) -> str:
    return line["conditions"].get("gpu") or line["conditions"]["cpu"]


def _bar(line: Line) -> Bar:
    where, spread, ceiling = line["setting"], line["spread"] or {}, line["ceiling"]
    size = SIZES.get(where["size"], where["size"])
    return Bar(
        engine=where["engine"],
        group=f"{size}\n{where['dtype']}\n{where['lanes']} lane{'s' if where['lanes'] > 1 else ''}",
        value=line["value"],
        least=spread.get("p5", line["value"]),
        most=spread.get("p95", line["value"]),
        floor=ceiling and ceiling["value"],
        device=device_of(line),
    )


def draw(found: Sequence[Bar], out: Path) -> None:
    """Bars in groups, on a logarithmic scale; a black line across a group is its floor. The suffix is the format."""
    import matplotlib as mpl

    mpl.use("Agg")  # no screen
    from matplotlib import pyplot, ticker

    groups = list(dict.fromkeys(bar.group for bar in found))
    engines = sorted({bar.engine for bar in found}, key=_rank)
    figure, axes = pyplot.subplots(figsize=(max(6.0, 1.3 * len(groups) + 2), 4.5), layout="constrained")
    width = 0.8 / len(engines)
    for number, engine in enumerate(engines):
        mine = [bar for bar in found if bar.engine == engine]
        places = [groups.index(bar.group) + (number - (len(engines) - 1) / 2) * width for bar in mine]
        errors = [[bar.value - bar.least for bar in mine], [bar.most - bar.value for bar in mine]]
        axes.bar(places, [bar.value for bar in mine], width, yerr=errors, label=engine, error_kw={"linewidth": 0.8})
    for number, group in enumerate(groups):
        floors = [bar.floor for bar in found if bar.group == group and bar.floor]
        if floors:
            axes.hlines(min(floors), number - 0.45, number + 0.45, color="black", label="" if number else "floor")
    axes.set(yscale="log", ylabel="milliseconds a frame", title=found[0].device)
    axes.set_ylim(bottom=min(bar.floor or bar.value for bar in found) / 2)
    axes.yaxis.set_major_formatter(ticker.ScalarFormatter())
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    axes.set_xticks(range(len(groups)), groups, fontsize=8)
    axes.legend(fontsize=8)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)
    pyplot.close(figure)


def _rank(engine: str) -> tuple[int, str]:
    return (ENGINES.index(engine) if engine in ENGINES else len(ENGINES), engine)


def main(arguments: list[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--results", nargs="+", type=Path, metavar="FILE", help="JSON lines (benchmarks/results/*)")
    options.add_argument("--device", help="the GPU or CPU to show, as its name is recorded; the last measured")
    options.add_argument("--out", type=Path, default=ROOT / RESULTS / "frame.svg", metavar="FILE", help="SVG or PNG")
    given = options.parse_args(arguments)
    # figures that parity did not prove are shown to whoever names their file
    paths = given.results or [p for p in sorted((ROOT / RESULTS).glob("*.jsonl")) if "unproved" not in p.name]
    found = bars(read(paths), given.device)
    if not found:
        raise SystemExit("no frame was measured: make gpu, or make bench")
    draw(found, given.out)
    print(f"{len(found)} bars of {found[0].device} in {given.out}")


if __name__ == "__main__":
    main()
