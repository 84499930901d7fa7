"""A decoder written to be believed: float64, one position and one head at a time, no caches, nothing batched.

Every frame starts again from the prompt. Greedy; the weights come as a mapping from name to tensor.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from megakernel.spec import DecoderSpec, StackSpec

Array = np.ndarray


class NaiveDecoder:
    def __init__(self, spec: DecoderSpec, tensors: Mapping[str, torch.Tensor], penalty: float) -> None:
        self.spec, self.penalty = spec, penalty
        self.weights = {name: tensor.double().numpy() for name, tensor in tensors.items()}

    def frames(self, prompt: Array, text: Array, forced: Array | None = None) -> list[tuple[Array, Array, Array]]:
        """Of each frame its codes, the talker's logits it was drawn from, and the predictor's logits.

        ``prompt`` ``[positions, hidden]``; one frame for each row of ``text`` ``[frames, hidden]``.
        """
        rows, frames = [*prompt], []
        history: list[int] = []
        for number, text_row in enumerate(text):
            hidden = self.stack("talker", self.spec.talker, rows)[-1]
            logits = self.weights["talker.head"] @ hidden
            chosen = None if forced is None else forced[number]
            code = self.first_code(logits, history, number) if chosen is None else int(chosen[0])
            history.append(code)
            codes, predicted = self.later_codes(hidden, code, chosen)
            frames.append((np.array(codes), logits, np.array(predicted)))
            rows.append(sum((self.embed(group, code) for group, code in enumerate(codes)), start=text_row))
        return frames

    def first_code(self, logits: Array, history: list[int], frame: int) -> int:
        scores = {}
        for code, logit in enumerate(logits):
            allowed = frame >= self.spec.min_frames if code == self.spec.eos else code < self.spec.suppress_from
            if code in history:
                logit = logit / self.penalty if logit > 0 else logit * self.penalty
            if allowed:
                scores[code] = logit
        return max(scores, key=lambda code: scores[code])

    def later_codes(self, hidden: Array, code: int, chosen: Array | None) -> tuple[list[int], list[Array]]:
        codes, predicted = [code], []
        rows = [self.project(hidden), self.project(self.embed(0, code))]
        for group in range(1, self.spec.groups):
            last = self.stack("predictor", self.spec.predictor, rows)[-1]
            logits = self.weights[f"predictor.heads.{group - 1}"] @ last
            predicted.append(logits)
            codes.append(int(logits.argmax() if chosen is None else chosen[group]))
            rows.append(self.project(self.embed(group, codes[-1])))
        return codes, predicted

    def embed(self, group: int, code: int) -> Array:
        name = "talker.embedding" if group == 0 else f"predictor.embeddings.{group - 1}"
        return self.weights[name][code]

    def project(self, row: Array) -> Array:
        if not self.spec.projects:
            return row
        return self.weights["predictor.projection.weight"] @ row + self.weights["predictor.projection.bias"]

    def stack(self, name: str, spec: StackSpec, rows: list[Array]) -> list[Array]:
        for layer in range(spec.layers):
            rows = self.layer(f"{name}.layers.{layer}.", spec, rows)
        return [norm(row, self.weights[f"{name}.norm"], spec) for row in rows]

    def layer(self, prefix: str, spec: StackSpec, rows: list[Array]) -> list[Array]:
        w = {name.removeprefix(prefix): value for name, value in self.weights.items() if name.startswith(prefix)}
        normed = [norm(row, w["input_norm"], spec) for row in rows]
        queries = [heads(w["q"] @ row, w["q_norm"], spec, place) for place, row in enumerate(normed)]
        keys = [heads(w["k"] @ row, w["k_norm"], spec, place) for place, row in enumerate(normed)]
        values = [(w["v"] @ row).reshape(spec.kv_heads, spec.head_dim) for row in normed]
        out = []
        for place, row in enumerate(rows):
            seen = place + 1
            row = row + w["o"] @ attention(queries[place], keys[:seen], values[:seen], spec)
            h = norm(row, w["post_norm"], spec)
            gate = w["gate"] @ h
            out.append(row + w["down"] @ (gate / (1 + np.exp(-gate)) * (w["up"] @ h)))
        return out


def norm(row: Array, weight: Array, spec: StackSpec) -> Array:
    return row / np.sqrt((row * row).mean() + spec.norm_eps) * weight


def heads(row: Array, weight: Array, spec: StackSpec, place: int) -> Array:
    """Heads normed and turned: a head's two halves are the parts of complex numbers, turned by place x frequency."""
    half = spec.head_dim // 2
    turn = np.exp(1j * place * spec.rope_base ** (-np.arange(half) / half))
    out = []
    for head in row.reshape(-1, spec.head_dim):
        head = norm(head, weight, spec)
        turned = (head[:half] + 1j * head[half:]) * turn
        out.append(np.concatenate([turned.real, turned.imag]))
    return np.array(out)


def attention(queries: Array, keys: list[Array], values: list[Array], spec: StackSpec) -> Array:
    out = []
    for head, query in enumerate(queries):
        shared = head // spec.group
        scores = np.exp([query @ key[shared] / np.sqrt(spec.head_dim) for key in keys])
        out.append(sum(s * value[shared] for s, value in zip(scores / scores.sum(), values, strict=True)))
    return np.concatenate(out)
