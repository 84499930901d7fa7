"""The engines that are timed side by side over one set of weights: the frame kernel, the twin under a graph, the twin.

All take the weights in the kernel's layout, from the same memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchmarks.drawn import SPECS, DrawnWeights
from benchmarks.graphed_twin import GraphedTwin, record
from megakernel import Decoder, DecoderSpec, DecoderWeights, pack_decoder
from megakernel.engine import choose_engine

if TYPE_CHECKING:
    from megakernel.frame import KernelDecoder
    from megakernel.plan import Launch

KERNEL, GRAPHED, TWIN = "kernel", "graphed twin", "twin"
FRAME, TALKER, PREDICTOR = "frame", "talker", "predictor"
Work = Callable[[], object]


def why_no_kernel(device: torch.device) -> str | None:
    """Why the frame kernel cannot run on ``device``; None if it can."""
    try:
        choose_engine("kernel", device)
    except ValueError as error:
        return str(error)
    return None


def kernel_decoder(weights: DecoderWeights, lanes: int, positions: int, launch: Launch | None = None) -> KernelDecoder:
    """``launch`` None is the one that the kernel plans for itself."""
    from megakernel.frame import KernelDecoder  # Triton is not on every machine

    return KernelDecoder(weights, lanes, positions, launch)


def draw_weights(size: str | DecoderSpec, weight_format: str, device: torch.device) -> DecoderWeights:
    """Random weights of a released size, or of any shape."""
    spec = SPECS[size] if isinstance(size, str) else size
    return pack_decoder(DrawnWeights(spec, device), spec, weight_format, device, layout="kernel")


def start(decoder: Decoder, prompt: int) -> Tensor:
    """Begin an utterance after ``prompt`` random positions in every lane; text rows ``[lanes, hidden]`` to follow."""
    device, hidden = decoder.weights.device, decoder.spec.talker.hidden
    rows = torch.randn(prompt, hidden, generator=torch.Generator(device).manual_seed(1), device=device)
    for lane in range(decoder.state.lanes):
        decoder.begin(lane, seed=lane)
        decoder.prefill(lane, rows)
    return rows.new_zeros(decoder.state.lanes, hidden)


def check(decoder: Decoder) -> None:
    """Raises what the decoder raises for a fault that its device has noted; waits for the device."""
    if decoder.fault is not None:
        decoder.check(int(decoder.fault.item()))


@dataclass
class Engine:
    """``frame`` makes the next frame of all lanes and returns its codes; ``parts`` are what it consists of, if they
    can be run alone; ``finish`` raises if anything went wrong.
    """

    name: str
    frame: Callable[[], Tensor]
    parts: dict[str, Work] = field(default_factory=dict)
    finish: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Case:
    """What is stepped: ``lanes`` utterances after a prompt of ``prompt`` of their ``positions``.

    A kernel is compiled for a number of positions, so sections that share one name the same.
    """

    weights: DecoderWeights
    lanes: int
    prompt: int
    positions: int

    def kernel(self, launch: Launch | None = None) -> Engine:
        decoder = kernel_decoder(self.weights, self.lanes, self.positions, launch)
        parts: dict[str, Work] = {
            TALKER: lambda: decoder.run(predictor=False),
            PREDICTOR: lambda: decoder.run(talker=False),
        }
        return Engine(KERNEL, self._stepping(decoder), parts, lambda: check(decoder))

    def twin(self) -> Engine:
        return Engine(TWIN, self._stepping(Decoder(self.weights, self.lanes, self.positions)))

    def graphed(self) -> Engine:
        """A frame at the prompt's length, over and over; on a CPU, which has no graphs, step by step."""
        decoder = Decoder(self.weights, self.lanes, self.prompt + 1)
        start(decoder, self.prompt)
        twin = GraphedTwin(decoder)
        length = twin.begin()
        works: dict[str, Callable[[], Tensor]] = {
            FRAME: lambda: twin.step(length),
            TALKER: lambda: twin.score(twin.talk(twin.text, length), twin.weights.head),
            PREDICTOR: twin.draw_frame,
        }
        if self.weights.device.type == "cuda":
            works = {part: record(work) for part, work in works.items()}
        return Engine(GRAPHED, works.pop(FRAME), dict(works))

    def _stepping(self, decoder: Decoder) -> Callable[[], Tensor]:
        text, every = start(decoder, self.prompt), list(range(self.lanes))
        return lambda: decoder.step(every, text)
