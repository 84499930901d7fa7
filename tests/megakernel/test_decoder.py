"""The decoder's twin: equal to a decoder without caches, and a lane's bits never depend on its company."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from megakernel import CacheFullError, Decoder, DecoderSpec, DecoderWeights, DrawParams, StackSpec, pack_decoder
from megakernel.linear import PackedLinear
from megakernel.sampling import gumbel_noise
from tests.megakernel.naive_decoder import NaiveDecoder
from tests.megakernel.random_decoder import (
    ALL_SPECS,
    EOS,
    KINDS,
    SPECS,
    SUPPRESS_FROM,
    Script,
    random_tensors,
    random_weights,
    scripts,
    tensor_shapes,
)

POSITIONS = 24
GREEDY = DrawParams(greedy=True)
FORMATS = ["float32", "bfloat16"]


@pytest.fixture(scope="module")
def weights():
    """`weights(name, weight_format, layout)`: packed random weights, made once."""
    made: dict[tuple[str, str, str], DecoderWeights] = {}

    def make(name: str = "projected", weight_format: str = "float32", layout: str = "twin") -> DecoderWeights:
        kind = name, weight_format, layout
        if kind not in made:
            made[kind] = random_weights(ALL_SPECS[name], weight_format, layout)
        return made[kind]

    return make


def poisoned(weights: DecoderWeights, lanes: int = 1, positions: int = POSITIONS) -> Decoder:
    """A decoder whose memory holds NaN wherever nothing has been written."""
    decoder = Decoder(weights, lanes, positions)
    fill(decoder, float("nan"))
    return decoder


def memory(decoder: Decoder) -> dict[str, Tensor]:
    """Everything that a lane owns, lanes first."""
    state = decoder.state
    return {
        "keys": state.cache.k.transpose(0, 1),
        "values": state.cache.v.transpose(0, 1),
        "hidden": state.hidden,
        "logits": state.logits,
        "predictor logits": state.predictor_logits,
        "seen": state.seen,
        "penalty": state.penalty,
        "length and frame": torch.tensor([state.length, state.frame]).T,
    }


def fill(decoder: Decoder, value: float) -> None:
    predictor = decoder.state.predictor_cache
    for tensor in [*memory(decoder).values(), predictor.k, predictor.v]:
        if tensor.dtype.is_floating_point:
            tensor.fill_(value)


def bits(tensor: Tensor) -> Tensor:
    """The tensor as integers, so that NaN equals NaN."""
    tensor = tensor.contiguous()
    return tensor.view(torch.uint8) if tensor.dtype.is_floating_point else tensor


def snapshot(decoder: Decoder, lanes: list[int]) -> dict[str, Tensor]:
    return {name: bits(tensor[lanes]).clone() for name, tensor in memory(decoder).items()}


def assert_untouched(decoder: Decoder, lanes: list[int], before: dict[str, Tensor]) -> None:
    for name, now in snapshot(decoder, lanes).items():
        assert torch.equal(now, before[name]), f"{name} of lanes {lanes} changed"


@dataclass
class Take:
    """What a lane showed after one frame."""

    codes: Tensor
    hidden: Tensor
    logits: Tensor
    predictor_logits: Tensor


@dataclass
class Performance:
    """A script in a lane of a decoder."""

    script: Script
    lane: int
    takes: list[Take] = field(default_factory=list)

    def begin(self, decoder: Decoder) -> None:
        script = self.script
        decoder.begin(self.lane, script.seed, script.talker, script.predictor, script.penalty)
        decoder.prefill(self.lane, script.prompt)

    @property
    def text(self) -> Tensor:
        return self.script.text[len(self.takes)]

    @property
    def finished(self) -> bool:
        return len(self.takes) == self.script.frames

    def record(self, decoder: Decoder, codes: Tensor) -> None:
        state, lane = decoder.state, self.lane
        self.takes.append(
            Take(codes, state.hidden[lane].clone(), state.logits[lane].clone(), state.predictor_logits[lane].clone())
        )


def step(decoder: Decoder, performances: list[Performance], forced: Tensor | None = None) -> None:
    text = torch.stack([performance.text for performance in performances])
    codes = decoder.step([performance.lane for performance in performances], text, forced)
    for row, performance in enumerate(performances):
        performance.record(decoder, codes[row])


def perform(decoder: Decoder, script: Script, lane: int = 0) -> list[Take]:
    performance = Performance(script, lane)
    performance.begin(decoder)
    while not performance.finished:
        step(decoder, [performance])
    return performance.takes


def codes_of(takes: list[Take]) -> Tensor:
    return torch.stack([take.codes for take in takes])


def assert_same_takes(takes: list[Take], expected: list[Take], where: str) -> None:
    for frame, (take, other) in enumerate(zip(takes, expected, strict=True)):
        for name in ("codes", "hidden", "logits", "predictor_logits"):
            mine, theirs = getattr(take, name), getattr(other, name)
            assert torch.equal(mine, theirs), (
                f"{where}: frame {frame}, {name} at {(mine != theirs).nonzero()[:1].tolist()}"
            )


def assert_finite(takes: list[Take]) -> None:
    for frame, take in enumerate(takes):
        for name in ("hidden", "logits", "predictor_logits"):
            assert getattr(take, name).isfinite().all(), f"frame {frame}: {name} read memory that was never written"


# Values.


@pytest.mark.parametrize("positions", [1, 2, 5])
@pytest.mark.parametrize("name", ["one width", "projected"])
def test_codes_and_logits_are_those_of_a_decoder_without_caches(weights, name, positions) -> None:
    spec = SPECS[name]
    script = Script(spec.talker.hidden, 7, positions, frames=5, talker=GREEDY, predictor=GREEDY, penalty=1.7)
    naive = NaiveDecoder(spec, random_tensors(spec), script.penalty)
    expected = naive.frames(script.prompt.double().numpy(), script.text.double().numpy())
    performance, decoder = Performance(script, 0), poisoned(weights(name))
    performance.begin(decoder)
    for frame, (codes, logits, predicted) in enumerate(expected):
        np.testing.assert_allclose(decoder.state.logits[0], logits, atol=1e-5, err_msg=f"frame {frame}")
        step(decoder, [performance])
        take = performance.takes[-1]
        np.testing.assert_allclose(take.predictor_logits, predicted, atol=1e-5, err_msg=f"frame {frame}")
        assert take.codes.tolist() == codes.tolist(), f"frame {frame}"
    assert len({tuple(codes) for codes, *_ in expected}) > 1, "the frames are all the same and prove little"


@pytest.mark.parametrize("name", ["one width", "projected"])
def test_bfloat16_stays_near_a_decoder_without_caches(weights, name) -> None:
    """Teacher-forced, on the weights as they are after rounding."""
    spec = SPECS[name]
    tensors = {n: t if n.endswith("norm") else t.bfloat16().float() for n, t in random_tensors(spec).items()}
    script = Script(spec.talker.hidden, 7, positions=3, frames=4, talker=GREEDY, predictor=GREEDY)
    forced = torch.randint(0, 29, (4, spec.groups), generator=torch.Generator().manual_seed(0))
    naive = NaiveDecoder(spec, tensors, script.penalty)
    expected = naive.frames(script.prompt.double().numpy(), script.text.double().numpy(), forced.numpy())
    performance, decoder = Performance(script, 0), poisoned(weights(name, "bfloat16"))
    performance.begin(decoder)
    for frame, (_, logits, predicted) in enumerate(expected):
        np.testing.assert_allclose(decoder.state.logits[0], logits, atol=0.15, err_msg=f"frame {frame}")
        step(decoder, [performance], forced[frame : frame + 1])
        np.testing.assert_allclose(performance.takes[-1].predictor_logits, predicted, atol=0.15)


@pytest.mark.parametrize(("name", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.1)])
@pytest.mark.parametrize("cut", [1, 3, 8])
def test_a_prompt_in_two_pieces_is_one_prompt(weights, cut, name, tolerance) -> None:
    packed = weights("projected", name)
    prompt = Script(26, 3, positions=9).prompt
    whole, pieces = poisoned(packed), poisoned(packed)
    for decoder, parts in ((whole, [prompt]), (pieces, [prompt[:cut], prompt[cut:]])):
        decoder.begin(0)
        for part in parts:
            decoder.prefill(0, part)
    assert pieces.state.length == whole.state.length == [9]
    for mine, theirs in zip(memory(pieces).values(), memory(whole).values(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["one width", "projected"])
def test_frames_are_prompt_positions_made_by_oneself(weights, name) -> None:
    """A prompt followed by frames ends where a prompt that holds those frames ends."""
    packed = weights(name)
    script = Script(26, 5, positions=3, frames=6)
    stepped = poisoned(packed)
    takes = perform(stepped, script)
    whole = poisoned(packed)
    whole.begin(0)
    whole.prefill(0, torch.cat([script.prompt, whole.embed_frame(codes_of(takes)) + script.text]))
    assert whole.state.length == stepped.state.length == [9]
    for field_name in ("hidden", "logits", "keys", "values"):
        mine, theirs = memory(stepped)[field_name], memory(whole)[field_name]
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0, equal_nan=True)


def test_a_frame_is_embedded_as_the_sum_of_its_codes(weights) -> None:
    tensors, decoder = random_tensors(SPECS["projected"]), poisoned(weights())
    codes = torch.randint(0, 29, (2, 3, 5), generator=torch.Generator().manual_seed(1))
    expected = tensors["talker.embedding"][codes[..., 0]]
    for group in range(1, 5):
        expected = expected + tensors[f"predictor.embeddings.{group - 1}"][codes[..., group]]
    torch.testing.assert_close(decoder.embed_frame(codes), expected)


# Lanes.


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS, ids=", ".join)
def test_an_utterance_is_the_same_bits_in_any_lane_and_company(weights, kind, seed) -> None:
    """Utterances join free lanes at any frame, step in any order, wait and leave; memory starts as NaN."""
    packed, chance, lanes = weights(*kind), random.Random(seed), 3
    waiting = [(script, perform(poisoned(packed), script)) for script in scripts(packed.spec, 8)]
    chance.shuffle(waiting)
    decoder = poisoned(packed, lanes)
    active: list[tuple[Performance, list[Take]]] = []
    while waiting or active:
        free = sorted(set(range(lanes)) - {performance.lane for performance, _ in active})
        if waiting and free and (not active or chance.random() < 0.6):
            script, expected = waiting.pop()
            performance = Performance(script, chance.choice(free))
            others = [lane for lane in range(lanes) if lane != performance.lane]
            before = snapshot(decoder, others)
            performance.begin(decoder)
            assert_untouched(decoder, others, before)
            active.append((performance, expected))
        stepping = chance.sample(active, chance.randint(1, len(active)))
        idle = sorted(set(range(lanes)) - {performance.lane for performance, _ in stepping})
        before = snapshot(decoder, idle)
        step(decoder, [performance for performance, _ in stepping])
        assert_untouched(decoder, idle, before)
        for performance, expected in [one for one in active if one[0].finished]:
            assert_finite(performance.takes)
            assert_same_takes(performance.takes, expected, f"seed {performance.script.seed}, lane {performance.lane}")
        active = [one for one in active if not one[0].finished]


def test_the_wide_decoder_runs_on_packed_weights(weights) -> None:
    """Or the test above has not seen them."""
    packed = weights("wide")
    assert isinstance(packed.head, PackedLinear)
    assert isinstance(packed.talker.layers[0].gate_up, PackedLinear)
    assert isinstance(packed.predictor.layers[0].down, PackedLinear)
    assert isinstance(packed.predictor_heads[0], PackedLinear)


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("lane", range(4))
def test_noise_in_all_other_memory_changes_nothing(weights, lane, weight_format) -> None:
    packed = weights("projected", weight_format)
    script = scripts(SPECS["projected"], 4)[lane]
    expected = perform(poisoned(packed), script)
    noisy = Decoder(packed, 4, POSITIONS)
    fill(noisy, 1e4)
    assert_same_takes(perform(noisy, script, lane), expected, f"lane {lane}")


def test_a_step_writes_one_position_of_its_lane(weights) -> None:
    decoder = poisoned(weights())
    performance = Performance(Script(26, 1, positions=3, frames=4), 0)
    performance.begin(decoder)
    for length in range(3, 7):
        before = snapshot(decoder, [0])
        step(decoder, [performance])
        after = snapshot(decoder, [0])
        for name in ("keys", "values"):
            changed = (before[name] != after[name]).any(-1).nonzero()[:, -1].unique()
            assert changed.tolist() == [length], f"{name}: positions {changed.tolist()} written at length {length}"


def test_a_lane_keeps_nothing_of_the_utterance_before(weights) -> None:
    decoder = poisoned(weights(), 2)
    first, second = scripts(SPECS["projected"], 2)
    expected = perform(poisoned(weights()), second)
    perform(decoder, replace(first, positions=9, frames=12), lane=1)
    assert_same_takes(perform(decoder, second, lane=1), expected, "after a longer utterance")
    Performance(first, 1).begin(decoder)  # and left before its first frame
    assert_same_takes(perform(decoder, second, lane=1), expected, "after an abandoned one")


# Draws.


def test_the_noise_of_every_group_is_that_of_its_number(weights) -> None:
    decoder, spec = poisoned(weights(), 3), SPECS["projected"]
    for lane, seed in enumerate((5, -6, 1 << 70)):
        decoder.begin(lane, seed)
        decoder.state.frame[lane] = 10 * lane
    seeds, frames = torch.tensor([decoder.state.seed[lane] for lane in (2, 0)]), torch.tensor([20, 0])
    noise = decoder.noise([2, 0])
    assert len(noise) == spec.groups
    for group, got in enumerate(noise):
        vocab = spec.talker.vocab if group == 0 else spec.predictor.vocab
        expected = gumbel_noise(seeds, frames, torch.tensor([group]), vocab)[:, 0]
        assert torch.equal(got, expected), f"group {group}"


def test_seeds_differ_in_their_low_64_bits_alone(weights) -> None:
    script = Script(26, 3, frames=3, predictor=DrawParams(top_k=0))

    def drawn(seed: int) -> list[list[int]]:
        decoder, performance = poisoned(weights()), Performance(script, 0)
        decoder.begin(0, seed, script.talker, script.predictor, script.penalty)
        decoder.prefill(0, script.prompt)
        while not performance.finished:
            step(decoder, [performance])
        return codes_of(performance.takes).tolist()

    for seed, same in ((-1, (1 << 64) - 1), (3, 3 + (1 << 64)), (-(1 << 63), 1 << 63), (7, 7 - (1 << 200))):
        assert drawn(seed) == drawn(same), f"{seed} and {same}"
    for seed, other in ((1, -1), (3, 3 + (1 << 32)), (3, 3 + (1 << 63)), (0, 1)):
        assert drawn(seed) != drawn(other), f"{seed} and {other}"


@pytest.mark.parametrize("weight_format", FORMATS)
def test_forced_codes_are_taken_as_if_drawn(weights, weight_format) -> None:
    packed = weights("one width", weight_format)
    script = Script(26, 3, frames=5)
    expected = perform(poisoned(packed), script)
    decoder, performance = poisoned(packed), Performance(replace(script, seed=99, talker=GREEDY, predictor=GREEDY), 0)
    performance.script.prompt, performance.script.text = script.prompt, script.text
    performance.begin(decoder)
    for take in expected:
        step(decoder, [performance], take.codes[None])
    assert_same_takes(performance.takes, expected, "forced")
    assert decoder.state.seen[0].nonzero().flatten().tolist() == codes_of(expected)[:, 0].unique().tolist()


def wish(decoder: Decoder, lane: int, **logits: float) -> None:
    """Sets the talker's last logits: 0, but those named by their code (``c5=1.0``)."""
    decoder.state.logits[lane] = 0.0
    for code, logit in logits.items():
        decoder.state.logits[lane, int(code[1:])] = logit


def first_codes(decoder: Decoder, lanes: list[int]) -> list[int]:
    return decoder.step(lanes, torch.zeros(len(lanes), decoder.spec.talker.hidden))[:, 0].tolist()


@pytest.mark.parametrize("draw", [GREEDY, DrawParams(), DrawParams(top_k=0, top_p=0.9)], ids=str)
def test_eos_is_drawn_only_after_the_first_frames(weights, draw) -> None:
    """Counted by each lane for itself: lane 1 begins two frames later."""
    decoder, prompt = poisoned(weights(), 2), Script(26, 0).prompt
    ended = {0: [], 1: []}
    for frame in range(5):
        lanes = [0] if frame < 2 else [1, 0]
        if frame in (0, 2):
            decoder.begin(lanes[0], seed=frame, talker=draw)
            decoder.prefill(lanes[0], prompt)
        for lane in lanes:
            wish(decoder, lane, **{f"c{EOS}": 50.0})
        for lane, code in zip(lanes, first_codes(decoder, lanes), strict=True):
            ended[lane].append(code == EOS)
    assert ended == {0: [False, False, True, True, True], 1: [False, False, True]}


@pytest.mark.parametrize("eos", [EOS, 3])
@pytest.mark.parametrize("draw", [GREEDY, DrawParams(), DrawParams(top_k=0)], ids=str)
def test_suppressed_codes_are_never_drawn(draw, eos) -> None:
    spec = replace(SPECS["projected"], eos=eos, min_frames=1)
    decoder = poisoned(random_weights(spec))
    decoder.begin(0, seed=1, talker=draw)
    decoder.prefill(0, Script(26, 0).prompt)
    likely = {f"c{code}": 60.0 for code in range(SUPPRESS_FROM, spec.talker.vocab) if code != eos}
    for frame in range(12):
        wish(decoder, 0, **likely)
        code = first_codes(decoder, [0])[0]
        assert code < SUPPRESS_FROM or code == eos, f"frame {frame} drew {code}"
        assert frame > 0 or code != eos
    wish(decoder, 0, **likely, **{f"c{eos}": 50.0})
    assert first_codes(decoder, [0]) == [eos]


def test_the_last_code_that_is_not_suppressed_can_be_drawn(weights) -> None:
    decoder = poisoned(weights())
    decoder.begin(0, talker=GREEDY)
    decoder.prefill(0, Script(26, 0).prompt)
    wish(decoder, 0, **{f"c{SUPPRESS_FROM - 1}": 1.0})
    assert first_codes(decoder, [0]) == [SUPPRESS_FROM - 1]


def test_the_repetition_penalty_sees_all_codes_of_its_lane_so_far(weights) -> None:
    decoder, prompt = poisoned(weights(), 2), Script(26, 0).prompt
    logits = {"c7": 5.0, "c8": 4.9, "c9": 4.8, "c10": 4.7}

    def drawn(frames: int) -> tuple[list[int], list[int]]:
        both = []
        for _ in range(frames):
            for lane in (0, 1):
                wish(decoder, lane, **logits)
            both.append(first_codes(decoder, [0, 1]))
        return tuple(zip(*both, strict=True))  # pyright: ignore[reportReturnType]

    for lane, penalty in ((0, 1.5), (1, 1.0)):
        decoder.begin(lane, talker=GREEDY, penalty=penalty)
        decoder.prefill(lane, prompt)
    penalized, free = drawn(6)
    assert penalized == (7, 8, 9, 10, 7, 7), "5 / 1.5 beats the others again once all four are seen"
    assert free == (7,) * 6
    decoder.begin(0, talker=GREEDY, penalty=1.5)
    decoder.prefill(0, prompt)
    assert drawn(2)[0] == (7, 8), "a new utterance remembers the codes of the one before"


def test_the_repetition_penalty_lowers_negative_logits_too(weights) -> None:
    decoder = poisoned(weights())
    decoder.begin(0, talker=GREEDY, penalty=2.0)
    decoder.prefill(0, Script(26, 0).prompt)
    drawn = []
    for _ in range(2):
        decoder.state.logits[0] = -3.0
        decoder.state.logits[0, 5], decoder.state.logits[0, 6] = -1.0, -1.5
        drawn += first_codes(decoder, [0])
    assert drawn == [5, 6]


# The end of the cache.


def test_the_last_position_is_used_and_one_more_changes_nothing(weights) -> None:
    decoder = poisoned(weights(), 3, positions=8)
    full, roomy = Performance(Script(26, 1, positions=6, frames=9), 1), Performance(Script(26, 2, frames=9), 2)
    expected = perform(poisoned(weights()), roomy.script)
    for performance in (full, roomy):
        performance.begin(decoder)
    for _ in range(2):
        step(decoder, [full, roomy])
    assert decoder.state.length == [0, 8, 6]
    unlimited = perform(poisoned(weights()), full.script)
    assert_same_takes(full.takes, unlimited[:2], "up to the last position")

    before = snapshot(decoder, [0, 1, 2])
    for pair in ([roomy, full], [full, roomy], [full]):
        with pytest.raises(CacheFullError, match="lane 1 needs 9 cache positions of 8"):
            step(decoder, pair)
        assert_untouched(decoder, [0, 1, 2], before)
    for _ in range(2):
        step(decoder, [roomy])
    assert_same_takes(roomy.takes, expected[:4], "beside a full lane")

    full.takes.clear()
    full.begin(decoder)
    step(decoder, [full])
    assert_same_takes(full.takes, unlimited[:1], "the full lane begun again")


@pytest.mark.parametrize("filled", [0, 3])
def test_a_prompt_that_does_not_fit_changes_nothing(weights, filled) -> None:
    decoder, prompt = poisoned(weights(), 2, positions=8), Script(26, 1, positions=9).prompt
    decoder.begin(0)
    if filled:
        decoder.prefill(0, prompt[:filled])
    before = snapshot(decoder, [0, 1])
    with pytest.raises(CacheFullError, match=f"lane 0 needs {filled + 9} cache positions of 8"):
        decoder.prefill(0, prompt)
    assert_untouched(decoder, [0, 1], before)
    decoder.prefill(0, prompt[filled:8])
    assert decoder.state.length == [8, 0] and decoder.state.logits[0].isfinite().all()
    with pytest.raises(CacheFullError):
        first_codes(decoder, [0])


# Weights and specs.


@pytest.mark.parametrize(
    ("name", "weight_format", "layout"), [kind for kind in KINDS if "wide" not in kind[0]], ids=str
)
def test_every_tensor_is_read_once_and_let_go(name, weight_format, layout) -> None:
    """For the twin a stage stacks at most three tensors, and no more of the originals live at a time."""
    import weakref

    spec, most = ALL_SPECS[name], {"twin": 3, "kernel": 0}[layout]
    tensors = {n: t.half() for n, t in random_tensors(spec).items()}
    read: list[str] = []
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()

    def reader(tensor_name: str) -> Tensor:
        assert len(alive) <= most, f"before {tensor_name}: {len(alive)} tensors are kept"
        tensor = tensors[tensor_name].clone()
        read.append(tensor_name)
        alive.add(tensor)
        return tensor

    packed = pack_decoder(reader, spec, weight_format, layout=layout)
    assert sorted(read) == sorted(tensor_shapes(spec))
    assert packed.dtype == packed.embedding.dtype == packed.predictor_embedding.dtype == packed.head.dtype
    assert packed.talker.norm.dtype == packed.talker.layers[0].qk_norm.dtype == torch.float32
    assert packed.format == weight_format and (packed.packed is None) == (layout == "twin")
    assert (packed.projection is None) == (name in ("one width", "one width of blocks"))


def test_an_unknown_weight_format_or_layout_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'int3' is not one of float32, bfloat16, q8_0"):
        random_weights(SPECS["projected"], "int3")
    with pytest.raises(ValueError, match="'column' is not one of twin, kernel"):
        random_weights(SPECS["projected"], layout="column")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 72}, "hidden is 72"),
        ({"ffn": 40}, "ffn is 40"),
        ({"head_dim": 6}, "q_width is (24|48)"),
    ],
)
@pytest.mark.parametrize("stack", ["talker", "predictor"])
def test_widths_that_are_not_whole_blocks_are_refused_before_anything_is_read(stack, change, message) -> None:
    def read(name: str) -> Tensor:
        raise AssertionError(f"{name} was read")

    spec = ALL_SPECS["projected blocks"]
    wrong = replace(spec, **{stack: replace(getattr(spec, stack), **change)})
    for layout in ("twin", "kernel"):
        with pytest.raises(ValueError, match=rf"^{stack}\.{message}: q8_0 needs a multiple of 32"):
            pack_decoder(read, wrong, "q8_0", layout=layout)


@pytest.mark.parametrize(("lanes", "positions"), [(0, 8), (-1, 8), (1, 1)])
def test_a_decoder_without_room_is_refused(weights, lanes, positions) -> None:
    with pytest.raises(ValueError, match=f"got {lanes} and {positions}"):
        Decoder(weights(), lanes, positions)


@pytest.mark.parametrize("penalty", [0.0, -1.0])
def test_a_penalty_that_is_not_positive_is_refused(weights, penalty) -> None:
    with pytest.raises(ValueError, match="repetition_penalty"):
        poisoned(weights()).begin(0, penalty=penalty)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "layers must be at least 1"),
        ({"hidden": 0}, "hidden must be at least 1"),
        ({"ffn": -3}, "ffn must be at least 1"),
        ({"heads": 0}, "heads must be at least 1"),
        ({"kv_heads": 0}, "kv_heads must be at least 1"),
        ({"vocab": 0}, "vocab must be at least 1"),
        ({"heads": 6, "kv_heads": 4}, "6 query heads do not divide over 4"),
        ({"head_dim": 5}, "even head_dim, got 5"),
    ],
)
def test_a_stack_of_impossible_shape_is_refused(change, message) -> None:
    good = {"layers": 2, "hidden": 8, "ffn": 8, "heads": 4, "kv_heads": 2, "head_dim": 4, "vocab": 9}
    with pytest.raises(ValueError, match=message):
        StackSpec(**(good | change), norm_eps=1e-6, rope_base=1e4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups": 1}, "at least 2 code groups, got 1"),
        ({"eos": 43}, "eos 43 is outside the talker's vocabulary of 43"),
        ({"eos": -1}, "eos -1 is outside"),
        ({"suppress_from": 0}, "suppress_from 0 is outside 1..43"),
        ({"suppress_from": 44}, "suppress_from 44 is outside 1..43"),
    ],
)
def test_a_decoder_of_impossible_shape_is_refused(change, message) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SPECS["projected"], **change)


def test_a_spec_derives_its_widths() -> None:
    spec: DecoderSpec = SPECS["projected"]
    assert (spec.talker.group, spec.talker.q_width, spec.talker.kv_width, spec.talker.qkv_width) == (4, 48, 12, 72)
    assert spec.projects and not SPECS["one width"].projects
