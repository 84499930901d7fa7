"""The decoder whose frames are one launch: `KernelDecoder` has the face of the twin and the kernel behind it.

The host keeps lengths and frame counts and sends them with every frame; codes stay on the device until
somebody asks for them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megakernel.barrier import FAULT, STAGES, SYNC_WORDS
from megakernel.decoder import Decoder
from megakernel.drawing import DRAW_WORDS
from megakernel.errors import KernelFaultError
from megakernel.graphs import Recorder
from megakernel.kernel import CachePointers, Scratch, Utterances, frame_kernel
from megakernel.packed import PackedDecoder
from megakernel.plan import FrameShape, Launch, plan_launch, shape_frame
from megakernel.sampling import DrawParams, DrawTable
from megakernel.weights import DecoderWeights

logger = logging.getLogger(__name__)

_CONTROL = 1  # word of control before the lanes': the active ones as bits
_SENT = 8  # frames whose control words may be under way at a time


class KernelDecoder(Decoder):
    """The frame kernel as an engine; ``weights`` are packed with ``layout="kernel"``.

    ``launch`` overrides how a frame is dealt to programs. Raises ``ValueError`` for sizes that the kernel does not
    take.
    """

    name = "kernel"

    def __init__(
        self, weights: DecoderWeights, lanes: int = 1, positions: int = 4096, launch: Launch | None = None
    ) -> None:
        if weights.packed is None:
            raise ValueError('the kernel needs weights packed with layout="kernel"')
        super().__init__(weights, lanes, positions)
        self.packed: PackedDecoder = weights.packed
        self.launch = launch or plan_launch(weights.device, lanes, weights.format)
        self.shape: FrameShape = shape_frame(self.spec, weights.format, lanes, positions, self.launch)
        self.scratch = self._make_scratch()
        self.utterances = self._make_utterances()
        self.caches = self._cache_pointers()
        self.controls = _Controls(_CONTROL + 3 * lanes, weights.device)
        self.fault = self.scratch.sync[FAULT : FAULT + 1]
        self.frame: Callable[[], Tensor] = self._run_frame

    def begin(
        self,
        lane: int,
        seed: int = 0,
        talker: DrawParams | None = None,
        predictor: DrawParams | None = None,
        penalty: float = 1.05,
    ) -> None:
        super().begin(lane, seed, talker, predictor, penalty)
        state = self.state
        self.utterances.seed[lane] = state.seed[lane]
        words = [_draw_words(table, lane) for table in (state.talker_draw, state.predictor_draw)]
        self.utterances.draws[lane] = torch.tensor(words).to(self.weights.device, non_blocking=True)

    @torch.inference_mode()
    def prefill(self, lane: int, embeddings: Tensor) -> None:
        super().prefill(lane, embeddings)
        hidden = self.state.hidden[lane]
        projection = self.weights.projection
        if projection is not None:
            hidden = projection(hidden[None, None].to(projection.dtype))[0, 0].float()
        self.state.predictor_input[lane] = hidden

    @torch.inference_mode()
    def step(self, lanes: list[int], text: Tensor, forced: Tensor | None = None) -> Tensor:
        """One frame of the active ``lanes``, in one launch; see `Decoder.step`.

        Returns without waiting: the codes are on the device, and whether the launch went well says `fault`.
        """
        for lane in lanes:
            self._require_room(lane, 1)
        u, count = self.utterances, len(lanes)
        self.controls.send(self._control_words(lanes), u.control)
        u.text[:count].copy_(text)
        if forced is not None:
            u.forced[:count].copy_(forced)
        codes = self.frame()
        if forced is not None:
            u.forced.fill_(-1)
        for lane in lanes:
            self.state.length[lane] += 1
            self.state.frame[lane] += 1
        return codes[:count].clone()

    def run(self, talker: bool = True, predictor: bool = True) -> None:
        """Launch the kernel, or one of its halves, on what `Utterances` hold."""
        cooperative = {"launch_cooperative_grid": True} if self.weights.device.type == "cuda" else {}
        launch: Any = frame_kernel[(self.launch.programs,)]
        launch(
            self.packed,
            *self.caches,
            self.scratch,
            self.utterances,
            S=self.shape,
            TALKER=talker,
            PREDICTOR=predictor,
            num_warps=self.launch.warps,
            **cooperative,
        )

    def _run_frame(self) -> Tensor:
        self.run()
        return self.utterances.codes

    def check(self, fault: int) -> None:
        if fault:
            raise KernelFaultError(STAGES[fault - 1])

    def rebuild(self) -> None:
        self.scratch.sync.zero_()
        super().rebuild()

    def warm_up(self, progress: Callable[[str], None] | None = None) -> None:
        """Compile the kernel (or find it in the cache) with a frame of no lanes, and capture its launch."""
        super().warm_up(progress)
        if progress is not None:
            progress("frame kernel")
        self.controls.send(self._control_words([]), self.utterances.control)
        self._run_frame()
        try:
            self.frame = Recorder(self.weights.device)(self._run_frame, ())
        except RuntimeError as error:  # not every driver captures a cooperative launch; it only saves the host's time
            logger.warning("frames are launched one by one: their launch could not be captured (%s)", error)

    def _control_words(self, lanes: list[int]) -> list[int]:
        count, state = self.state.lanes, self.state
        rows = [0] * count
        for row, lane in enumerate(lanes):
            rows[lane] = row
        active = sum(1 << lane for lane in lanes)
        return [active, *state.length, *state.frame, *rows]

    def _make_scratch(self) -> Scratch:
        talker, predictor = self.spec.talker, self.spec.predictor
        columns, splits = 2 * self.state.lanes, self.shape.talker.splits
        device = self.weights.device

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, device=device)

        steps = torch.arange(self.spec.groups, dtype=torch.int32, device=device)
        q_width, heads = max(talker.q_width, predictor.q_width), max(talker.heads, predictor.heads)
        return Scratch(
            x=empty(columns, max(talker.hidden, predictor.hidden)),
            qkv=empty(columns, max(talker.qkv_width, predictor.qkv_width)),
            attention=empty(splits, columns, q_width),
            weight=empty(splits, columns, heads),
            ffn=empty(columns, max(talker.ffn, predictor.ffn)).to(self.weights.dtype),
            position=steps[:, None].repeat(1, self.state.lanes),
            sync=torch.zeros(SYNC_WORDS, dtype=torch.int32, device=device),
        )

    def _make_utterances(self) -> Utterances:
        state, device = self.state, self.weights.device
        lanes, groups = state.lanes, self.spec.groups
        return Utterances(
            control=torch.zeros(_CONTROL + 3 * lanes, dtype=torch.int32, device=device),
            seed=torch.zeros(lanes, dtype=torch.int64, device=device),
            draws=torch.zeros(lanes, 2, DRAW_WORDS, device=device),
            penalty=state.penalty,
            seen=state.seen.view(torch.uint8),
            text=torch.zeros(lanes, self.spec.talker.hidden, device=device),
            forced=torch.full((lanes, groups), -1, dtype=torch.int64, device=device),
            codes=torch.zeros(lanes, groups, dtype=torch.int64, device=device),
            hidden=state.hidden,
            predictor_input=state.predictor_input,
            logits=state.logits,
            predictor_logits=state.predictor_logits,
        )

    def _cache_pointers(self) -> tuple[CachePointers, CachePointers]:
        talker, predictor = self.state.cache, self.state.predictor_cache
        return (
            CachePointers(talker.k, talker.v, self.cos, self.sin),
            CachePointers(predictor.k, predictor.v, self.predictor_cos, self.predictor_sin),
        )


class _Controls:
    """Sends a frame's control words: through pinned memory on a GPU, where several frames may be under way."""

    def __init__(self, words: int, device: torch.device) -> None:
        self.pinned = device.type == "cuda"
        self.slots = torch.zeros(_SENT, words, dtype=torch.int32, pin_memory=self.pinned)
        self.read = [torch.cuda.Event() for _ in range(_SENT)] if self.pinned else []
        self.sent = 0

    def send(self, words: list[int], control: Tensor) -> None:
        slot = self.sent % _SENT
        self.sent += 1
        if self.pinned:
            self.read[slot].synchronize()
        self.slots[slot] = torch.tensor(words, dtype=torch.int32)
        control.copy_(self.slots[slot], non_blocking=True)
        if self.pinned:
            self.read[slot].record()


def _draw_words(table: DrawTable, lane: int) -> list[float]:
    """What `megakernel.drawing.draw` reads of a lane's parameters."""
    params = table.params[lane]
    return [params.temperature, float(table.kept(params)), 1.0 - params.top_p, 0.0 if params.greedy else 1.0]
