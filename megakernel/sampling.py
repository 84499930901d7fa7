"""Logits to codes: repetition penalty, suppression, temperature, top-k, top-p and the draw.

The draw is Gumbel-max: the code with the largest ``logit + noise`` wins, where the noise of every
code comes from Philox4x32-10 counted by (code, group, frame) and keyed by the utterance's seed. So
a draw depends on nothing but the logits and the seed: not on the lane, the batch, the order of a
sum over the vocabulary or the number of programs that share it. Greedy is the same path with the
noise switched off.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
NO_LIMIT = 0  # top_k that keeps every code


@dataclass(frozen=True)
class DrawParams:
    """How one head's codes are drawn; ``top_k`` 0 keeps all, ``greedy`` takes the largest logit."""

    temperature: float = 0.9
    top_k: int = 50
    top_p: float = 1.0
    greedy: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"temperature must be positive, got {self.temperature}; for no randomness use greedy")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or positive, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Philox4x32-10: four 32-bit words of counter and two of key to four random words.

    All tensors are int64 holding unsigned 32-bit values and broadcast together. Source: Salmon et
    al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for round_ in range(_ROUNDS):
        if round_:
            k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        # the product wraps as signed 64 bits; shift and mask still give its unsigned high word
        c0, c1, c2, c3 = (p1 >> 32) & _MASK ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) & _MASK ^ c3 ^ k1, p0 & _MASK
    return [c0, c1, c2, c3]


def uniform(words: Tensor) -> Tensor:
    """32-bit words to float32 in (0, 1): the top 23 bits at the middle of their interval."""
    return ((words >> 9).float() + 0.5) * 2.0**-23


def gumbel_noise(seed: Tensor, frame: Tensor, group: Tensor, vocab: int) -> Tensor:
    """Standard Gumbel noise ``[lanes, groups, vocab]``, float32.

    ``seed`` and ``frame`` are ``[lanes]`` int64, ``group`` ``[groups]`` int64. Code *i* takes word
    ``i % 4`` of the Philox block counted by ``(i // 4, group, frame, 0)``.
    """
    blocks = torch.arange(-(-vocab // 4), device=seed.device)
    pairs = torch.cartesian_prod(group, blocks)
    return gumbel_blocks(seed, frame, pairs[:, 0], pairs[:, 1]).view(len(seed), len(group), -1)[..., :vocab]


def gumbel_blocks(seed: Tensor, frame: Tensor, group: Tensor, block: Tensor) -> Tensor:
    """The noise of four codes for each pair of ``group`` and ``block`` ``[blocks]``: ``[lanes, 4 * blocks]``."""
    zero = torch.zeros_like(block)
    key = (seed & _MASK).view(-1, 1), ((seed >> 32) & _MASK).view(-1, 1)
    words = philox((block, group, frame.view(-1, 1), zero), key)
    u = uniform(torch.stack(words, dim=-1).flatten(1))
    return u.log_().neg_().log_().neg_()


def penalize(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Repetition penalty: codes ``seen`` so far have positive logits divided, negative multiplied.

    ``logits`` ``[lanes, vocab]``, ``seen`` bool alike, ``penalty`` ``[lanes, 1]``.
    """
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def keep_top_k(logits: Tensor, top_k: Tensor, largest: int) -> Tensor:
    """All but each lane's ``top_k`` largest logits to -inf; ties with the last one stay.

    ``top_k`` ``[lanes, 1]`` int64 counts from 1, ``largest`` is its maximum, known to the host.
    """
    threshold = logits.topk(largest, dim=-1).values.gather(-1, top_k - 1)
    return logits.masked_fill(logits < threshold, float("-inf"))


def keep_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """The least likely codes whose probabilities sum to at most ``1 - top_p`` to -inf; ties with the last one stay.

    So a code stays if all codes at most as likely sum to more. ``top_p`` ``[lanes, 1]`` float64; the most likely
    code always stays.
    """
    ordered = logits.sort(dim=-1).values
    dropped = ordered.softmax(dim=-1).cumsum(dim=-1) <= (1 - top_p).to(logits.dtype)
    dropped[..., -1] = False
    threshold = ordered.masked_fill(dropped, float("inf")).amin(dim=-1, keepdim=True)
    return logits.masked_fill(logits < threshold, float("-inf"))


class DrawTable:
    """The draw parameters of every lane for one head, on the device and (for choices) on the host."""

    def __init__(self, lanes: int, vocab: int, device: torch.device) -> None:
        self.vocab = vocab
        self.params = [DrawParams() for _ in range(lanes)]
        self.temperature = torch.ones(lanes, 1, device=device)
        self.top_k = torch.ones(lanes, 1, dtype=torch.int64, device=device)
        self.top_p = torch.ones(lanes, 1, dtype=torch.float64, device=device)  # so that 1 - top_p is rounded once
        self.stochastic = torch.zeros(lanes, 1, device=device)

    def set(self, lane: int, params: DrawParams) -> None:
        if params.greedy:  # temperature could round two logits to one, and only beside lanes that draw
            params = replace(params, temperature=1.0, top_p=1.0)
        self.params[lane] = params
        self.temperature[lane] = params.temperature
        self.top_k[lane] = self.kept(params)
        self.top_p[lane] = params.top_p
        self.stochastic[lane] = 0.0 if params.greedy else 1.0

    def kept(self, params: DrawParams) -> int:
        return self.vocab if params.top_k == NO_LIMIT else min(params.top_k, self.vocab)

    def take(self, lanes: list[int], index: Tensor) -> Draw:
        """The parameters of the active ``lanes``; ``index`` is the same on the device."""
        chosen = [self.params[lane] for lane in lanes]
        return Draw(
            self.temperature[index],
            self.top_k[index],
            self.top_p[index],
            self.stochastic[index],
            largest=0 if all(p.top_k == NO_LIMIT for p in chosen) else max(self.kept(p) for p in chosen),
            nucleus=any(p.top_p < 1 for p in chosen),
            greedy=all(p.greedy for p in chosen),
        )


@dataclass
class Draw:
    """Draw parameters of the active lanes, ``[lanes, 1]`` each, and what the host knows of them.

    ``largest`` is the largest top-k, 0 when no lane has one; ``nucleus`` says that some lane has a
    top-p, ``greedy`` that every lane is greedy.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    stochastic: Tensor
    largest: int
    nucleus: bool
    greedy: bool

    def filter(self, logits: Tensor) -> Tensor:
        """The distribution before the draw, as logits: temperature, then top-k, then top-p."""
        logits = logits / self.temperature
        if self.largest:
            logits = keep_top_k(logits, self.top_k, self.largest)
        return keep_top_p(logits, self.top_p) if self.nucleus else logits

    def sample(self, logits: Tensor, noise: Tensor | None) -> Tensor:
        """One code a lane, ``[lanes]`` int64, from ``logits`` ``[lanes, vocab]``.

        ``noise`` is ``[lanes, vocab]``, or None when every lane is greedy.
        """
        if noise is None:
            return logits.argmax(dim=-1)
        return (self.filter(logits) + noise * self.stochastic).argmax(dim=-1)
