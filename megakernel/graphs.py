"""Functions of tensors as captured CUDA graphs, one for each of a ladder of sizes.

A graph reads and writes fixed memory, so every size has buffers of its own: what is given is copied into them, and what
it does not fill holds blanks that harm nobody. On a device without CUDA the same function runs uncaptured on the
same buffers, so that padding is proved where nothing can be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

Size = tuple[int, ...]
Progress = Callable[[str], None]
_WARM_UPS = 2  # libraries choose their algorithms and allocate their workspaces in the first calls


class Ladder:
    """``function`` of tensors whose shapes follow from a size, for the ``sizes`` of the ladder.

    ``blank(size)`` makes inputs of that size with which the function does no harm: it is run on them before it is
    captured. ``title`` is formatted with the size, for whoever watches. Everything that the function reads besides
    its inputs has to stay where it is; all calls come from one thread.
    """

    def __init__(
        self,
        title: str,
        function: Callable[..., Tensor],
        blank: Callable[[Size], tuple[Tensor, ...]],
        sizes: Iterable[Size],
        device: torch.device,
    ) -> None:
        self.title, self.function, self.blank, self.sizes = title, function, blank, sorted(sizes)
        self.record = Recorder(device)
        self.rungs: dict[Size, _Rung] = {}

    def fit(self, *wanted: int) -> Size | None:
        """The first size that is nowhere smaller than ``wanted``; None beyond the ladder."""
        return next((size for size in self.sizes if all(s >= w for s, w in zip(size, wanted, strict=True))), None)

    @torch.inference_mode()
    def capture(self, progress: Progress | None = None) -> None:
        """Make every rung, the largest first, so that the memory of the others lies within its own."""
        for size in reversed(self.sizes):
            self._rung(size)
            if progress is not None:
                progress(self.title.format(*size))

    @torch.inference_mode()
    def __call__(self, size: Size, *inputs: Tensor) -> Tensor:
        """What the function returns for ``inputs``, each of which may be smaller than the rung's in any dimension.

        The result is of the rung's size and the caller's own. A rung that was not captured before is so now.
        """
        rung = self._rung(size)
        for given, buffer, blank in zip(inputs, rung.inputs, rung.blanks, strict=True):
            if given.shape != buffer.shape:
                buffer.copy_(blank)
            buffer[tuple(slice(length) for length in given.shape)].copy_(given)
        return rung.run().clone()  # the graphs share their memory: the next one to run may write over it

    def _rung(self, size: Size) -> _Rung:
        if size not in self.rungs:
            self.rungs[size] = _Rung(self.record, self.function, self.blank(size))
        return self.rungs[size]


class _Rung:
    """The buffers of one size, and what runs on them."""

    def __init__(self, record: Recorder, function: Callable[..., Tensor], blanks: tuple[Tensor, ...]) -> None:
        self.blanks = blanks
        self.inputs = tuple(blank.clone() for blank in blanks)
        self.run = record(function, self.inputs)


class Recorder:
    """Captures on one stream into one pool of memory: graphs that never run at the same time can share both."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.captures = device, device.type == "cuda"
        if self.captures:
            self.stream, self.pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Callable[[], Tensor]:
        """``function(*inputs)`` again and again, for whatever ``inputs`` hold by then."""
        return self._capture(function, inputs) if self.captures else partial(function, *inputs)

    def _capture(self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Callable[[], Tensor]:
        with torch.cuda.device(self.device):
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                for _ in range(_WARM_UPS):
                    function(*inputs)
            torch.cuda.current_stream().wait_stream(self.stream)
            graph = torch.cuda.CUDAGraph()
            # only this thread's: another synthesizer of the process may allocate meanwhile
            with torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode="thread_local"):
                output = function(*inputs)

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay


def to_device(numbers: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Whole numbers as an int64 tensor, without waiting for what the device still has to do."""
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=torch.int64, device=device)
    # torch's allocator of pinned memory keeps the block until the copy has been made
    return torch.tensor(numbers, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)


def enter_device(device: torch.device) -> None:
    """Make ``device`` the calling thread's own: a kernel is launched there, wherever its tensors lie."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
