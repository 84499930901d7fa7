"""Prompt embeddings to frames: ``prefill`` takes many positions of one lane, ``step`` one frame of many.

A frame is drawn from what the talker said last: group 0 from its head, groups 1 and up from the
predictor, which starts afresh; then the sum of the frame's embeddings and the next text row go
through the talker. Nothing here knows what a code sounds like or where a text row comes from.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel import reference as twin
from megakernel.errors import CacheFullError
from megakernel.linear import Linear
from megakernel.prefill import CapturedPrefill
from megakernel.sampling import DrawParams, gumbel_blocks, penalize
from megakernel.state import LaneState
from megakernel.weights import DecoderWeights


class Decoder:
    """The twin as an engine: ``lanes`` utterances over one set of weights.

    ``positions`` is the capacity of a lane's cache: prompt positions plus frames.
    """

    name = "twin"
    fault: Tensor | None = None  # int32 [1] on the device that `check` takes the value of, where launches can fail

    def __init__(self, weights: DecoderWeights, lanes: int = 1, positions: int = 4096) -> None:
        if lanes < 1 or positions < 2:
            raise ValueError(f"a decoder needs at least 1 lane and 2 positions, got {lanes} and {positions}")
        self.weights, self.spec = weights, weights.spec
        device = weights.device
        self.state = LaneState(self.spec, lanes, positions, weights.dtype, device)
        self.cos, self.sin = twin.rope_table(self.spec.talker, positions, device)
        # without a GPU there is nothing to capture, and padding would only cost
        self.prompts = CapturedPrefill(weights, self.cos, self.sin) if device.type == "cuda" else None
        self.predictor_cos, self.predictor_sin = twin.rope_table(self.spec.predictor, self.spec.groups, device)
        self.groups = torch.arange(self.spec.groups, device=device)
        self.noise_sizes, self.noise_blocks = self._noise_layout(device)
        self.suppressed = torch.arange(self.spec.talker.vocab, device=device) >= self.spec.suppress_from
        self.suppressed[self.spec.eos] = False
        self.suppressed_early = self.suppressed.clone()
        self.suppressed_early[self.spec.eos] = True

    def begin(
        self,
        lane: int,
        seed: int = 0,
        talker: DrawParams | None = None,
        predictor: DrawParams | None = None,
        penalty: float = 1.05,
    ) -> None:
        """Give ``lane`` to a new utterance."""
        self.state.reset(lane, seed, talker or DrawParams(), predictor or DrawParams(), penalty)

    @torch.inference_mode()
    def prefill(self, lane: int, embeddings: Tensor) -> None:
        """Append prompt positions ``[positions, talker.hidden]`` to the lane's cache.

        Raises `CacheFullError` when they do not fit.
        """
        past, positions = self.state.length[lane], len(embeddings)
        self._require_room(lane, positions)
        captured = self.prompts if past == 0 and self.prompts is not None and self.prompts.fits(positions) else None
        if captured is not None:
            hidden = captured(embeddings, self.state.cache, lane)
        else:
            hidden = self.read_prompt(lane, past, embeddings)
        self.state.length[lane] = past + positions
        self.state.hidden[lane] = hidden[0]
        self.state.logits[lane] = self.score(hidden, self.weights.head)[0]

    def read_prompt(self, lane: int, past: int, embeddings: Tensor) -> Tensor:
        """Prompt positions from ``past`` on into the lane's cache; the last one's final norm ``[1, talker.hidden]``."""
        end = past + len(embeddings)
        window = self.state.cache.window(slice(lane, lane + 1), past, end)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return twin.attend_causal(q, *window.store(layer, k, v))

        cos, sin = self.cos[past:end, None], self.sin[past:end, None]
        return twin.run_stack(embeddings[None].float(), self.weights.talker, cos, sin, attend)

    @torch.inference_mode()
    def step(self, lanes: list[int], text: Tensor, forced: Tensor | None = None) -> Tensor:
        """One frame of the active ``lanes``.

        ``text`` ``[len(lanes), talker.hidden]`` is the text row that follows each lane's frame.
        Returns the codes ``[len(lanes), groups]`` int64, which later frames leave alone; a frame whose group 0
        is ``spec.eos`` ends its utterance and is no audio. With ``forced`` (codes of the same shape) the codes
        are taken from there instead of drawn. Raises `CacheFullError` before anything is changed.
        """
        for lane in lanes:
            self._require_room(lane, 1)
        index = torch.tensor(lanes, device=self.weights.device)
        codes = self.draw_frame(lanes, index, forced)
        hidden = self.talk(lanes, self.embed_frame(codes) + text.float())
        self.state.hidden[index] = hidden
        self.state.logits[index] = self.score(hidden, self.weights.head)
        for lane in lanes:
            self.state.frame[lane] += 1
        return codes

    def check(self, fault: int) -> None:
        """Raise `KernelFaultError` if ``fault``, the value of `fault` after a frame, says that it failed."""

    def rebuild(self) -> None:
        """Make the decoder usable after a fault: every lane is empty again."""
        self.state.clear()

    def warm_up(self, progress: Callable[[str], None] | None = None) -> None:
        """Do now what the first utterance would wait for; ``progress`` hears what it is."""
        if self.prompts is not None:
            self.prompts.capture(progress)

    def draw_frame(self, lanes: list[int], index: Tensor, forced: Tensor | None = None) -> Tensor:
        """The codes ``[len(lanes), groups]`` of the next frame, drawn from the talker's last output."""
        state, weights = self.state, self.weights
        talker, predictor = state.talker_draw.take(lanes, index), state.predictor_draw.take(lanes, index)
        noise = self.noise(lanes) if not (talker.greedy and predictor.greedy) else [None] * self.spec.groups
        code = talker.sample(self.talker_logits(lanes, index), noise[0])
        codes = [code if forced is None else forced[:, 0]]
        state.seen[index, codes[0]] = True
        x = torch.stack([state.hidden[index], F.embedding(codes[0], weights.embedding).float()], dim=1)
        scores = []
        for group in range(1, self.spec.groups):
            hidden = self.predict(x, start=0 if group == 1 else group)
            logits = self.score(hidden, weights.predictor_heads[group - 1])
            code = predictor.sample(logits, noise[group])
            codes.append(code if forced is None else forced[:, group])
            scores.append(logits)
            x = F.embedding(codes[group], weights.predictor_embedding[group - 1]).float()[:, None]
        state.predictor_logits[index] = torch.stack(scores, dim=1)
        return torch.stack(codes, dim=1)

    def noise(self, lanes: list[int]) -> list[Tensor]:
        """The Gumbel noise of the lanes' next frame, one ``[len(lanes), vocab]`` a group."""
        device = self.weights.device
        seed = torch.tensor([self.state.seed[lane] for lane in lanes], device=device)
        frame = torch.tensor([self.state.frame[lane] for lane in lanes], device=device)
        groups = gumbel_blocks(seed, frame, *self.noise_blocks).split_with_sizes(self.noise_sizes, dim=1)
        predictor = self.spec.predictor.vocab
        return [groups[0][:, : self.spec.talker.vocab], *(noise[:, :predictor] for noise in groups[1:])]

    def talker_logits(self, lanes: list[int], index: Tensor) -> Tensor:
        """The talker's last logits with repetition penalty and suppression, ``[len(lanes), vocab]``."""
        logits = penalize(self.state.logits[index], self.state.seen[index], self.state.penalty[index])
        early = [self.state.frame[lane] < self.spec.min_frames for lane in lanes]
        mask = torch.stack([self.suppressed_early if e else self.suppressed for e in early])
        return logits.masked_fill(mask, float("-inf"))

    def predict(self, x: Tensor, start: int) -> Tensor:
        """Predictor positions from ``start``: ``x`` ``[rows, positions, talker.hidden]`` to the last one's final norm.

        The cache lives for one frame, so it is kept by row of the batch and not by lane.
        """
        end = start + x.shape[1]
        window = self.state.predictor_cache.window(slice(0, x.shape[0]), start, end)
        if self.weights.projection is not None:
            x = self.weights.projection(x.to(self.weights.dtype)).float()

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = window.store(layer, k, v)
            if start == 0:
                return twin.attend_causal(q, keys, values)
            return twin.attend_cache(q[:, 0], keys, values)[:, None]

        cos, sin = self.predictor_cos[start:end, None], self.predictor_sin[start:end, None]
        return twin.run_stack(x, self.weights.predictor, cos, sin, attend)

    def embed_frame(self, codes: Tensor) -> Tensor:
        """The sum of the embeddings of frames ``[..., groups]``, ``[..., talker.hidden]`` float32."""
        later = self.weights.predictor_embedding[self.groups[1:] - 1, codes[..., 1:]]
        return self.weights.embedding[codes[..., 0]].float() + later.float().sum(dim=-2)

    def talk(self, lanes: list[int], x: Tensor) -> Tensor:
        """One talker position a lane: ``x`` ``[len(lanes), hidden]`` to the final norm, the caches grow by one."""
        cache, length = self.state.cache, self.state.length
        windows = [cache.window(slice(lane, lane + 1), length[lane], length[lane] + 1) for lane in lanes]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            rows = zip(windows, q.unbind(1)[0].chunk(len(lanes)), k.chunk(len(lanes)), v.chunk(len(lanes)), strict=True)
            return torch.stack([twin.attend_cache(q, *window.store(layer, k, v)) for window, q, k, v in rows])

        index = torch.tensor([length[lane] for lane in lanes], device=x.device)
        cos, sin = self.cos[index, None, None], self.sin[index, None, None]
        hidden = twin.run_stack(x[:, None], self.weights.talker, cos, sin, attend)
        for lane in lanes:
            length[lane] += 1
        return hidden

    def score(self, hidden: Tensor, head: Linear) -> Tensor:
        """Logits ``[lanes, vocab]`` float32 of final-norm ``hidden`` ``[lanes, width]``."""
        return head(hidden[:, None].to(head.dtype))[:, 0].float()

    def _noise_layout(self, device: torch.device) -> tuple[list[int], tuple[Tensor, Tensor]]:
        """How many codes of noise a frame takes for each group, in blocks of four; each block's group and number."""
        vocabs = [self.spec.talker.vocab] + [self.spec.predictor.vocab] * (self.spec.groups - 1)
        blocks = [torch.arange(-(-vocab // 4), device=device) for vocab in vocabs]
        groups = [torch.full_like(block, group) for group, block in enumerate(blocks)]
        return [4 * len(block) for block in blocks], (torch.cat(groups), torch.cat(blocks))

    def _require_room(self, lane: int, positions: int) -> None:
        if self.state.length[lane] + positions > self.state.positions:
            raise CacheFullError(
                f"lane {lane} needs {self.state.length[lane] + positions} cache positions of {self.state.positions}"
            )
