"""The house's floors: imports point down only, and a floor loads nothing that belongs above it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = {"megakernel": 0, "backend": 1, "service": 2, "inference_server": 3, "pipecat_tts_service": 3}
OUTSIDE = {"tests", "benchmarks"}

# What each floor may name from outside the house, anywhere in its files; the standard library is free to all.
FOREIGN = {
    "megakernel": {"torch", "triton", "numpy"},
    "backend": {
        *("torch", "numpy", "safetensors", "tokenizers", "huggingface_hub", "tqdm"),
        *("qwen_tts", "transformers", "torchaudio", "soxr", "librosa"),
    },
}
SERVERS = {"fastapi", "starlette", "uvicorn", "websockets", "pydantic", "pipecat", "typer"}
REFERENCE = {"qwen_tts", "transformers", "torchaudio", "librosa"}


def sources(name: str) -> list[Path]:
    package = ROOT / name
    return sorted(package.rglob("*.py")) if package.is_dir() else [ROOT / f"{name}.py"]


FILES = [pytest.param(floor, path, id=str(path.relative_to(ROOT))) for floor in FLOORS for path in sources(floor)]


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and top-level package of every import of a file, wherever in the file it stands."""
    package = path.relative_to(ROOT).parts[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, (node.module or "").split(".")[0] if node.level == 0 else package


def module_names(package: str) -> list[str]:
    parts = [path.relative_to(ROOT).with_suffix("").parts for path in sources(package)]
    return [".".join(part for part in names if part != "__init__") for names in parts]


def loaded_by(*modules: str) -> set[str]:
    """The top-level packages that a fresh interpreter has loaded after importing ``modules``."""
    lines = ["import sys", *(f"import {name}" for name in modules)]
    lines.append("print(*sorted({name.split('.')[0] for name in sys.modules}))")
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(("floor", "path"), FILES)
def test_imports_point_down(floor: str, path: Path) -> None:
    for line, name in imports(path):
        where = f"{path.relative_to(ROOT)}:{line}"
        assert name not in OUTSIDE, f"{where} imports {name}, which no part of the house may"
        if name in FLOORS and name != floor:
            assert FLOORS[name] < FLOORS[floor], f"{where} imports {name}, which is not below {floor}"


@pytest.mark.parametrize(("floor", "path"), [case for case in FILES if case.values[0] in FOREIGN])
def test_the_core_names_only_what_it_may(floor: str, path: Path) -> None:
    allowed = FOREIGN[floor] | set(FLOORS) | sys.stdlib_module_names
    for line, name in imports(path):
        assert name in allowed, f"{path.relative_to(ROOT)}:{line} imports {name}"


def test_service_is_empty_at_its_door() -> None:
    assert (ROOT / "service" / "__init__.py").read_bytes() == b""


@pytest.mark.parametrize("package", ["megakernel", "backend"])
def test_the_core_loads_neither_servers_nor_the_reference(package: str) -> None:
    loaded = loaded_by(*module_names(package))
    assert package in loaded
    assert loaded & (SERVERS | REFERENCE) == set()


def test_megakernel_loads_nothing_of_ours() -> None:
    assert loaded_by(*module_names("megakernel")) & set(FLOORS) == {"megakernel"}


def test_the_pipecat_door_loads_no_torch() -> None:
    loaded = loaded_by("pipecat_tts_service")
    assert "pipecat" in loaded
    assert loaded & {"torch", "backend", "megakernel"} == set()
