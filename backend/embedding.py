"""Prompts and text ids to the rows that the talker reads, ``[positions, hidden]`` float32.

The text row of an id depends on the id alone: it is projected when it is first met and remembered
(on a GPU all of them at load). Knows nothing of lanes or of what comes after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from backend.config import ModelConfig
from backend.prompt import X_VECTOR, CodecElement, Prompt
from megakernel import Decoder
from megakernel.graphs import to_device
from megakernel.linear import make_linear

_FOLD_ROWS = 4096  # ids projected at a time when the whole table is folded


class TextTable:
    """Text id to talker row: embedding, then Linear, SiLU, Linear.

    ``read(name)`` returns the tensors called ``text.…``. Every id is projected as a row of its own, so its
    row does not depend on the ids that it came with.
    """

    def __init__(
        self, config: ModelConfig, read: Callable[[str], Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.fc1 = make_linear(*(read(f"text.fc1.{part}").to(device, dtype) for part in ("weight", "bias")))
        self.fc2 = make_linear(*(read(f"text.fc2.{part}").to(device, dtype) for part in ("weight", "bias")))
        self.embedding = read("text.embedding").to(device)
        self.rows = torch.empty(config.text_vocab, config.spec.talker.hidden, device=device)
        self.known: set[int] = set()
        if device.type != "cpu":
            self._fold()

    @torch.inference_mode()
    def __call__(self, ids: Sequence[int]) -> Tensor:
        """The rows of ``ids``, ``[len(ids), hidden]`` float32."""
        new = sorted(set(ids) - self.known)
        if new:
            index = to_device(new, self.rows.device)
            self.rows[index] = self._project(self.embedding[index])
            self.known.update(new)
        return self.rows[to_device(ids, self.rows.device)]

    def _project(self, embedded: Tensor) -> Tensor:
        x = embedded.to(self.fc1.dtype)[:, None]  # [ids, 1, text_hidden]: a lane each
        return self.fc2(F.silu(self.fc1(x)))[:, 0].float()

    @torch.inference_mode()
    def _fold(self) -> None:
        for start in range(0, len(self.embedding), _FOLD_ROWS):
            x = self.embedding[start : start + _FOLD_ROWS].to(self.fc1.dtype)[None]
            self.rows[start : start + _FOLD_ROWS] = self.fc2(F.silu(self.fc1(x)))[0].float()
        self.known = set(range(len(self.embedding)))
        self.embedding = self.embedding[:0]


class PromptEmbedder:
    """A `Prompt` and, for a cloned voice, its x-vector, to the talker's input."""

    def __init__(self, table: TextTable, decoder: Decoder) -> None:
        self.table, self.decoder = table, decoder

    @torch.inference_mode()
    def __call__(self, prompt: Prompt, x_vector: Tensor | None = None) -> Tensor:
        """``[positions, hidden]`` float32: each position's text row plus its codec row."""
        embeddings = self.table(prompt.text)
        for position, element in enumerate(prompt.codec):
            if element is not None:
                embeddings[position] += self._codec_row(element, x_vector)
        return embeddings

    def _codec_row(self, element: CodecElement, x_vector: Tensor | None) -> Tensor:
        if element is X_VECTOR:
            if x_vector is None:
                raise ValueError("the prompt has a place for an x-vector and there is none")
            return x_vector.to(self.table.rows.device)
        if isinstance(element, tuple):
            return self.decoder.embed_frame(to_device(element, self.table.rows.device))
        return self.decoder.weights.embedding[element].float()
