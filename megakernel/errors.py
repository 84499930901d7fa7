"""What can go wrong in a decoder, beside wrong arguments."""

from __future__ import annotations


class CacheFullError(RuntimeError):
    """A lane has no cache position left; only that lane is concerned."""


class KernelFaultError(RuntimeError):
    """``stage`` gave up; nothing that the decoder holds can be trusted until it is rebuilt."""

    def __init__(self, stage: str) -> None:
        super().__init__(f"the decoder failed in stage {stage}")
        self.stage = stage
