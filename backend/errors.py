"""What can go wrong, in three kinds: the caller's request, the files of the model, the engine itself.

Knows nothing of HTTP or Pipecat; the service layer maps these to its own replies.
"""

from __future__ import annotations


class RequestError(ValueError):
    """The request cannot be served as asked; `param` names the field at fault, if one is."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class CheckpointError(ValueError):
    """The model's files are missing, damaged or of another model; the message says which and what to do."""


class EngineError(RuntimeError):
    """The engine failed while it was generating; no utterance of it can go on."""
