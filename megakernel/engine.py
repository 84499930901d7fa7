"""Which engine makes the frames: the one place where the kernel or its twin is chosen."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from megakernel.decoder import Decoder
from megakernel.plan import LANES, MAX_POSITIONS, suits_tensor_cores
from megakernel.spec import DecoderSpec
from megakernel.weights import Read, pack_decoder

ENGINES = ("auto", "kernel", "twin")


def choose_engine(engine: str, device: str | torch.device) -> str:
    """``"kernel"`` or ``"twin"``; ``"auto"`` takes the kernel where it can run, but not in Triton's interpreter.

    What that says of a machine, `make_decoder` says of a model.

    Raises ``ValueError`` for an unknown name, and for a kernel that cannot run on ``device``.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine {engine!r} is not one of {', '.join(ENGINES)}")
    device = torch.device(device)
    if engine == "twin" or (engine == "auto" and device.type != "cuda"):
        return "twin"
    obstacle = _obstacle(device)
    if obstacle is None:
        return "kernel"
    if engine == "auto":
        return "twin"
    raise ValueError(f"the frame kernel cannot run here: {obstacle}; use engine='twin' or engine='auto'")


def make_decoder(
    read: Read,
    spec: DecoderSpec,
    *,
    engine: str = "auto",
    weight_format: str = "float32",
    device: str | torch.device = "cpu",
    lanes: int = 1,
    positions: int = MAX_POSITIONS,
) -> Decoder:
    """Pack the weights for the engine and build it; ``name`` says which one it is.

    The kernel takes a power of two of lanes: it gets the next one, and the others stay idle. ``"auto"`` leaves to the
    twin what tensor cores do not take, float32 and odd widths: the kernel is right there too, but takes minutes to
    compile. Raises ``ValueError`` for what the engine cannot take.
    """
    chosen = choose_engine(engine, device)
    if engine == "auto" and not suits_tensor_cores(spec, weight_format):
        chosen = "twin"
    if chosen == "twin":
        return Decoder(pack_decoder(read, spec, weight_format, device), lanes, positions)
    from megakernel.frame import KernelDecoder  # Triton is not on every machine

    enough = next((n for n in LANES if n >= lanes), None)
    if enough is None:
        raise ValueError(f"the kernel runs at most {LANES[-1]} lanes, not {lanes}")
    return KernelDecoder(pack_decoder(read, spec, weight_format, device, layout="kernel"), enough, positions)


def _obstacle(device: torch.device) -> str | None:
    """Why the kernel cannot run on ``device``, or None."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    if device.type == "cuda":
        if torch.version.hip is not None:
            return "its barrier is written for NVIDIA GPUs"
        if torch.cuda.get_device_capability(device) < (8, 0):
            return "it needs compute capability 8.0 (Ampere) or newer"
        return None
    from megakernel.barrier import INTERPRETED

    return None if INTERPRETED.value else f"the device is {device.type}, and it needs a CUDA GPU"
