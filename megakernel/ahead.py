"""The frame kernel compiled for a GPU that is not here: what it takes of one, read from the machine code.

Triton brings NVIDIA's assembler and its tools along, so all of this runs on a CPU. A launch infers from its arguments
what
has to be said here by hand: the types of all pointers and that they are multiples of 16 bytes, without which there is
not one 16-byte load and the figures are those of another kernel.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megakernel.plan import MAX_POSITIONS, Launch, launch_for, shape_frame
from megakernel.spec import DecoderSpec

REGISTER_FILE = 65536  # 32-bit registers of a multiprocessor, on every target


@dataclass(frozen=True)
class Target:
    """A GPU to compile for: its compute capability times ten, and what a program may take of a multiprocessor."""

    capability: int
    example: str
    multiprocessors: int
    shared_bytes: int


# Shared memory: CUDA C++ programming guide, "Technical specifications per compute capability", for one block.
TARGETS = {
    target.capability: target
    for target in (
        Target(80, "A100", 108, 163 << 10),
        Target(89, "RTX 4090", 128, 99 << 10),
        Target(90, "H100", 132, 227 << 10),
        Target(100, "B200", 148, 227 << 10),
        Target(120, "RTX 5090", 170, 99 << 10),
    )
}


@dataclass(frozen=True)
class Compiled:
    """One compiled kernel: what every thread and program takes, and what its machine code holds.

    ``stack`` is bytes a thread, ``spills`` instructions that store or load it, ``wide_loads`` loads of 16 bytes from
    global memory, and ``requested`` how many of those stand right before a barrier's arrival: the weights of the next
    stage.
    """

    capability: int
    programs: int
    warps: int
    registers: int
    stack: int
    spills: int
    shared_bytes: int
    instructions: int
    wide_loads: int
    requested: int
    barriers: int


def compile_ahead(
    spec: DecoderSpec,
    weight_format: str,
    lanes: int,
    capability: int,
    positions: int = MAX_POSITIONS,
    launch: Launch | None = None,
) -> Compiled:
    """Compile the frame kernel for one of `TARGETS`. Raises what Triton raises if it cannot be compiled."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megakernel.kernel import frame_kernel

    target = TARGETS[capability]
    launch = launch or launch_for(target.multiprocessors, lanes, weight_format)
    signature = _signature(weight_format)
    shape = shape_frame(spec, weight_format, lanes, positions, launch)
    names = list(signature)
    constants = {"S": shape, "TALKER": True, "PREDICTOR": True}
    aligned = [place for i, name in enumerate(names) for place in _pointers(signature[name], (i,))]
    source = ASTSource(
        frame_kernel,
        signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={place: [["tt.divisibility", 16]] for place in aligned},
    )
    options = {"num_warps": launch.warps, "launch_cooperative_grid": True}
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    usage, code = _inspect(kernel.asm["cubin"])
    return Compiled(
        capability=capability,
        programs=launch.programs,
        warps=launch.warps,
        registers=usage["REG"],
        stack=usage["STACK"],
        shared_bytes=kernel.metadata.shared,
        **_count(code),
    )


def _signature(weight_format: str) -> dict[str, Any]:
    """The types of the kernel's arguments, nested as they are."""
    from megakernel.kernel import CachePointers, Scratch, Utterances
    from megakernel.packed import Matrix, PackedDecoder, PackedStack

    weights = {"float32": "*fp32", "bfloat16": "*bf16", "q8_0": "*i8"}[weight_format]
    scales = "*fp16" if weight_format == "q8_0" else weights
    narrow = "*fp32" if weight_format == "float32" else "*bf16"
    f32: Any = "*fp32"
    matrix: Any = Matrix(weights, scales)  # type: ignore[arg-type]
    stack = PackedStack(f32, matrix, f32, matrix, f32, matrix, matrix, f32)
    act: Any = narrow
    cache = CachePointers(narrow, narrow, "*fp32", "*fp32")
    return {
        "w": PackedDecoder(stack, stack, matrix, f32, matrix, act, act, act, act),
        "talker_cache": cache,
        "predictor_cache": cache,
        "s": Scratch(x=f32, qkv=f32, attention=f32, weight=f32, ffn=act, position="*i32", sync="*i32"),
        "u": Utterances(
            control="*i32", seed="*i64", draws=f32, penalty=f32, seen="*u8", text=f32, forced="*i64",
            codes="*i64", hidden=f32, predictor_input=f32, logits=f32, predictor_logits=f32,
        ),
        "S": "constexpr",
        "TALKER": "constexpr",
        "PREDICTOR": "constexpr",
    }  # fmt: skip


def _pointers(kind: Any, place: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The places of all pointers in a nested type."""
    if isinstance(kind, tuple):
        for i, inner in enumerate(kind):
            yield from _pointers(inner, (*place, i))
    elif kind.startswith("*"):
        yield place


def _inspect(cubin: bytes) -> tuple[dict[str, int], str]:
    """Resource usage and disassembly of machine code."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _run(tools / "cuobjdump", "-res-usage", file.name)
        code = _run(tools / "nvdisasm", "-c", file.name)
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK):(\d+)", usage)}, code


def _run(*command: str | Path) -> str:
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout


def _count(code: str) -> dict[str, int]:
    """What the disassembly holds; a barrier's arrival is its atomic addition."""
    counts = {"instructions": 0, "spills": 0, "wide_loads": 0, "requested": 0, "barriers": 0}
    waiting = 0  # 16-byte loads since anything was stored to or loaded from shared memory
    for instruction in re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", code, re.MULTILINE):
        counts["instructions"] += 1
        counts["spills"] += bool(re.search(r"\b(STL|LDL)\b", instruction))
        if re.search(r"\bLDG\.E\S*\.128\b", instruction):
            counts["wide_loads"] += 1
            waiting += 1
        elif re.search(r"\b(STS|LDS|LDSM)\b", instruction):
            waiting = 0
        elif re.search(r"\bATOM\w*\.E\.ADD", instruction):
            counts["barriers"] += 1
            counts["requested"] += waiting
            waiting = 0
    return counts
