"""The shape of a decoder as numbers: what every tensor, cache and stage is sized by.

Nothing here knows where the numbers come from (`backend/config.py` reads them from a checkpoint)
or what the tokens mean.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StackSpec:
    """One stack of transformer layers with an output vocabulary.

    ``hidden`` and ``ffn`` are widths, ``heads``/``kv_heads`` the query and key/value heads of
    ``head_dim`` each, ``vocab`` the number of codes that the stack's head scores.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    norm_eps: float
    rope_base: float

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads do not divide over {self.kv_heads} key/value heads")
        if self.head_dim % 2:
            raise ValueError(f"rotary embedding needs an even head_dim, got {self.head_dim}")

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        return self.q_width + 2 * self.kv_width


@dataclass(frozen=True)
class DecoderSpec:
    """A talker, its code predictor and the codes between them.

    ``groups`` codes make a frame: the talker's head scores group 0, predictor head *g - 1* group *g*.
    ``eos`` is the id of group 0 that ends an utterance; ids from ``suppress_from`` up are never
    drawn except ``eos``, and ``eos`` not before ``min_frames`` frames.
    """

    talker: StackSpec
    predictor: StackSpec
    groups: int
    eos: int
    suppress_from: int
    min_frames: int = 2

    def __post_init__(self) -> None:
        if self.groups < 2:
            raise ValueError(f"a frame needs at least 2 code groups, got {self.groups}")
        if not 0 <= self.eos < self.talker.vocab:
            raise ValueError(f"eos {self.eos} is outside the talker's vocabulary of {self.talker.vocab}")
        if not 0 < self.suppress_from <= self.talker.vocab:
            raise ValueError(f"suppress_from {self.suppress_from} is outside 1..{self.talker.vocab}")

    @property
    def projects(self) -> bool:
        """Whether predictor inputs go through a projection (talker and predictor widths differ)."""
        return self.talker.hidden != self.predictor.hidden
