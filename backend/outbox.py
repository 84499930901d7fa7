"""Device tensors on their way to the host: put in any number, wait once for all of them.

On a GPU they travel through pinned memory behind the work that makes them, and the wait has an end: a device that does
not answer is a fault. On a CPU they are there already.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from megakernel import KernelFaultError

PATIENCE = 10.0  # seconds; the work of one wait takes a hundredth of that
_BRISK = 0.02  # seconds for which the device is asked without a pause: a pause is long beside a frame
_PAUSE = 0.001


class Outbox:
    """What leaves one device; used by the thread that computes there."""

    def __init__(self, device: torch.device, patience: float = PATIENCE) -> None:
        self.patience = patience
        self.event = torch.cuda.Event() if device.type == "cuda" else None

    def put(self, tensor: Tensor) -> Tensor:
        """``tensor`` on the host; on a GPU its values are there after the next `wait`."""
        if self.event is None:
            return tensor
        # torch's allocator of pinned memory hands blocks out again: after the first frames this asks no driver
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def wait(self) -> None:
        """Until everything that was put in has arrived. Raises `KernelFaultError` if the device does not answer."""
        if self.event is not None:
            self.event.record()
            wait_for(self.event, self.patience)


def wait_for(event: torch.cuda.Event, patience: float) -> None:
    """Until ``event`` has happened; not `synchronize`, which would wait for ever for a device that hangs."""
    begun = time.monotonic()
    while not event.query():
        waited = time.monotonic() - begun
        if waited > patience:
            raise KernelFaultError(f"unknown: the device has not answered for {patience:g} seconds")
        time.sleep(0 if waited < _BRISK else _PAUSE)
