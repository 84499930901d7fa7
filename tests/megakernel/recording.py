"""Capture on a CPU: what a CUDA graph would hold, recorded operator by operator, and replayed on the same memory.

A function that asks for a number while it is recorded, or makes a tensor of the host's numbers, is refused: in a
graph the first breaks the capture, and the second is a constant for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megakernel import graphs

aten = torch.ops.aten
REFUSED = {
    *(aten.item.default, aten._local_scalar_dense.default, aten.is_nonzero.default),
    *(aten.resolve_neg.default, aten.nonzero.default, aten.equal.default),  # the first: `tolist` and `numpy`
    *(aten.lift_fresh.default, aten.masked_select.default),
}
INDEXING = {aten.index.Tensor, aten.index_put_.default}


class Recording(TorchDispatchMode):
    """The operators of one run, with the memory that they read and wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict, list]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        masks = [i for i in args[1] if i is not None and i.dtype == torch.bool] if func in INDEXING else []
        assert func not in REFUSED and not masks, f"{func} cannot be captured"
        results = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, tree_leaves(results)))
        return results

    def replay(self) -> None:
        for func, args, kwargs, results in self.calls:
            for then, now in zip(results, tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(then, Tensor) and then.data_ptr() != now.data_ptr():
                    then.copy_(now)


class Recorder:
    """In the place of ``megakernel.graphs``' own; ``recorded`` says how many graphs there are, ``replayed`` runs."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def capture(self, _: Any, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Callable[[], Tensor]:
        for _ in range(graphs._WARM_UPS):
            function(*inputs)
        with Recording() as recording:
            output = function(*inputs)
        self.recorded += 1

        def replay() -> Tensor:
            self.replayed += 1
            recording.replay()
            return output

        return replay


@contextmanager
def recorded_on_cpu() -> Iterator[Recorder]:
    """Every ladder records and replays instead of calling its function."""
    recorder = Recorder()

    def record(self: Any, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Callable[[], Tensor]:
        return recorder.capture(self, function, inputs)

    with patch.object(graphs.Recorder, "__call__", record):
        yield recorder
