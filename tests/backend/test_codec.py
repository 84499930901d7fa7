"""The streaming codec against the reference decoder: whole, in any split, in any lane, from any start."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from backend.checkpoint import CODEC_FILE, Checkpoint, tensor_table
from backend.codec import Codec
from backend.config import CodecConfig, ModelConfig
from backend.random_weights import DEAD_ENTRY, random_values
from tests.megakernel.recording import recorded_on_cpu
from tests.reference import qwen_tts
from tests.released import codec_config, write_configs

TOLERANCE = 1e-5
LANES = 4
FRAMES = 60  # five windows of the tiny codec


@dataclass
class Pair:
    """The weights of one codec, as ours are read and in the reference's decoder."""

    config: CodecConfig
    read: Callable[[str], Tensor]
    reference: Any

    def codec(self, lanes: int = 1) -> Codec:
        return Codec(self.config, self.read, lanes)

    def decode(self, codes: Tensor) -> Tensor:
        """``[lanes, frames, groups]`` to ``[lanes, samples]`` by the reference."""
        with torch.inference_mode():
            return self.reference(codes.transpose(1, 2))[:, 0]


@pytest.fixture(scope="module")
def tiny_pair(tiny) -> Pair:
    """Both codecs from the files of the tiny checkpoint."""
    checkpoint = Checkpoint(tiny("custom_voice"))
    tokenizer = qwen_tts.Qwen3TTSTokenizer.from_pretrained(str(tiny("custom_voice") / "speech_tokenizer"))
    return Pair(checkpoint.config.codec, checkpoint.read, tokenizer.model.decoder.eval())


@pytest.fixture(scope="module")
def varied(tiny, tmp_path_factory) -> Callable[..., Pair]:
    """`varied(window=…, …)`: the tiny codec with other numbers in its decoder's configuration."""
    tiny_configs = {
        part: json.loads((tiny("custom_voice") / file).read_text())
        for part, file in (("model", "config.json"), ("codec", "speech_tokenizer/config.json"))
    }

    def make(**changes: Any) -> Pair:
        configs = copy.deepcopy(tiny_configs)
        configs["codec"]["decoder_config"] |= changes
        return random_pair(write_configs(tmp_path_factory.mktemp("codec"), **configs))

    return make


def random_pair(directory: Path) -> Pair:
    """Random weights for the codec whose configuration lies in ``directory``; the names as in a checkpoint."""
    model = ModelConfig.read(directory)
    modeling = qwen_tts.core.tokenizer_12hz.modeling_qwen3_tts_tokenizer_v2
    foreign = json.loads((directory / "speech_tokenizer/config.json").read_text())["decoder_config"]
    reference = modeling.Qwen3TTSTokenizerV2Decoder._from_config(modeling.Qwen3TTSTokenizerV2DecoderConfig(**foreign))
    tensors, renamed = {}, {}
    for name, entry in tensor_table(model).items():
        if entry.file == CODEC_FILE and name.startswith("codec."):
            tensors[name] = torch.cat(list(random_values(model, name, entry.shape, seed=0)))
            renamed[entry.foreign.removeprefix("decoder.")] = tensors[name]
    reference.load_state_dict(renamed, strict=True)
    return Pair(model.codec, tensors.__getitem__, reference.eval())


def random_codes(lanes: int, frames: int, config: CodecConfig, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, config.codebook_size, (lanes, frames, config.groups), generator=generator)


def stream(codec: Codec, codes: Tensor, splits: list[int], lane: int = 0) -> Tensor:
    """The samples of ``codes`` ``[frames, groups]`` decoded in chunks of ``splits`` frames, the rest at once."""
    parts = [part for part in codes.tensor_split(splits_to_ends(splits)) if len(part)]
    return torch.cat([codec.decode(part[None], [lane])[0] for part in parts])


def splits_to_ends(splits: list[int]) -> list[int]:
    return [sum(splits[: i + 1]) for i in range(len(splits))]


def assert_near(mine: Tensor, theirs: Tensor, config: CodecConfig, tolerance: float = TOLERANCE) -> None:
    assert mine.shape == theirs.shape
    error = (mine - theirs).abs().flatten()
    worst = int(error.argmax())
    assert error[worst] <= tolerance, (
        f"{error[worst]:.2e} apart at sample {worst}, in frame {worst // config.samples_per_frame}"
    )


# Whole.


@pytest.mark.parametrize("frames", [1, 2, 5, 13, FRAMES])
def test_whole_equals_the_reference(tiny_pair, frames) -> None:
    codes = random_codes(2, frames, tiny_pair.config, seed=frames)
    expected = tiny_pair.decode(codes)
    assert expected.std() > 0.02, "the reference says next to nothing"
    samples = tiny_pair.codec(2).decode(codes, [0, 1])
    assert samples.dtype == torch.float32 and samples.shape == (2, frames * tiny_pair.config.samples_per_frame)
    assert_near(samples, expected, tiny_pair.config)


def test_ours_is_about_as_near_to_float64_as_the_reference(tiny) -> None:
    checkpoint = Checkpoint(tiny("custom_voice"))
    reference = qwen_tts.Qwen3TTSTokenizer.from_pretrained(str(checkpoint.directory / "speech_tokenizer"))
    pair = Pair(checkpoint.config.codec, checkpoint.read, reference.model.decoder)
    codes = random_codes(1, 30, pair.config)
    theirs = pair.decode(codes)
    pair.reference = copy.deepcopy(pair.reference).double()
    exact = pair.decode(codes)
    own_error = (theirs - exact).abs().max().item()
    assert_near(pair.codec().decode(codes, [0]), exact, pair.config, tolerance=2 * own_error)


def test_a_codebook_entry_that_was_never_used_equals_the_reference(tiny_pair) -> None:
    codes = torch.full((1, 3, tiny_pair.config.groups), DEAD_ENTRY)
    assert_near(tiny_pair.codec().decode(codes, [0]), tiny_pair.decode(codes), tiny_pair.config)


def test_loud_samples_are_clipped_as_by_the_reference(tiny_pair) -> None:
    loud = copy.deepcopy(tiny_pair.reference)
    with torch.no_grad():
        loud.decoder[-1].conv.weight.mul_(8)
    pair = Pair(tiny_pair.config, lambda n: tiny_pair.read(n) * (8 if n == "codec.conv_out.weight" else 1), loud)
    codes = random_codes(1, 6, pair.config)
    samples, expected = pair.codec().decode(codes, [0]), pair.decode(codes)
    assert samples.max() == 1 and samples.min() == -1, "nothing was clipped"
    assert_near(samples, expected, pair.config, 8 * TOLERANCE)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 4, "num_key_value_heads": 4},
        {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8},
        {"num_attention_heads": 3, "num_key_value_heads": 1},
        {"sliding_window": 1},
        {"sliding_window": 2},
        {"rope_theta": 1000, "rms_norm_eps": 1e-2},
        {"upsample_rates": [6, 5, 4, 2], "upsampling_ratios": [4, 2]},
        {"upsample_rates": [4, 8, 5, 3], "upsampling_ratios": [4]},
        {"num_quantizers": 16, "codebook_dim": 20, "latent_dim": 30, "hidden_size": 18, "decoder_dim": 48},
    ],
    ids=str,
)
def test_other_shapes_equal_the_reference_whole_and_streamed(varied, changes) -> None:
    pair = varied(**changes)
    codes = random_codes(1, 20, pair.config)
    expected = pair.decode(codes)
    assert_near(pair.codec().decode(codes, [0]), expected, pair.config)
    assert_near(stream(pair.codec(), codes[0], [1, 2, 4, 1])[None], expected, pair.config)


def test_without_onednn_the_samples_are_the_same(tiny_pair, monkeypatch) -> None:
    """What a device without it runs."""
    codes = random_codes(2, 9, tiny_pair.config)
    expected = tiny_pair.decode(codes)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    codec = tiny_pair.codec(2)
    assert not codec.waves.conv_in.convolution.packed
    samples = [codec.decode(part, [0, 1]) for part in codes.split([4, 5], dim=1)]
    assert_near(torch.cat(samples, dim=1), expected, tiny_pair.config)


# Streamed.


@pytest.fixture(scope="module")
def whole(tiny_pair) -> tuple[Tensor, Tensor]:
    """Codes ``[FRAMES, groups]`` and the reference's samples of them."""
    codes = random_codes(1, FRAMES, tiny_pair.config, seed=8)
    return codes[0], tiny_pair.decode(codes)[0]


@settings(max_examples=25, deadline=None)
@given(splits=st.lists(st.integers(1, 20), max_size=20))
def test_streamed_in_any_split_equals_whole(tiny_pair, whole, splits) -> None:
    codes, expected = whole
    assert len(codes) > 4 * tiny_pair.config.window
    assert_near(stream(tiny_pair.codec(), codes, splits), expected, tiny_pair.config)


@pytest.mark.parametrize("size", [1, 7])
def test_streamed_in_equal_chunks_equals_whole(tiny_pair, whole, size) -> None:
    codes, expected = whole
    assert_near(stream(tiny_pair.codec(), codes, [size] * (FRAMES // size)), expected, tiny_pair.config)


@pytest.mark.parametrize("frame", [1, 20, FRAMES - 1])
def test_later_codes_change_no_earlier_sample(tiny_pair, whole, frame) -> None:
    codes, config = whole[0], tiny_pair.config
    other = codes.clone()
    other[frame:] = random_codes(1, FRAMES - frame, config, seed=99)[0]
    first, second = (tiny_pair.codec().decode(c[None], [0])[0] for c in (codes, other))
    border = frame * config.samples_per_frame
    differ = (first != second).nonzero().flatten()
    assert differ[0] >= border, f"sample {differ[0]} of frame {differ[0] // config.samples_per_frame} changed"
    assert differ[0] < border + 10, "the frame's first samples do not depend on its codes"


def test_re_decoding_with_25_frames_of_context_is_not_exact(varied) -> None:
    """The window of a released codec against upstream's `chunked_decode`: what carried state is for."""
    pair = varied(sliding_window=72)
    codes = random_codes(1, 120, pair.config)
    expected = pair.decode(codes)
    with torch.inference_mode():
        windowed = pair.reference.chunked_decode(codes.transpose(1, 2), chunk_size=8, left_context_size=25)[:, 0]
    assert (windowed - expected).abs().max() > 1000 * TOLERANCE
    assert_near(stream(pair.codec(), codes[0], [8] * 15)[None], expected, pair.config)


# Lanes.


@dataclass
class Speech:
    """An utterance in a lane, with the chunks it was decoded in."""

    codes: Tensor
    lane: int
    splits: list[int] = field(default_factory=list)
    samples: list[Tensor] = field(default_factory=list)

    @property
    def left(self) -> int:
        return len(self.codes) - sum(self.splits)


def histories(codec: Codec, lanes: list[int]) -> list[Tensor]:
    """The lanes' state as integers, so that NaN equals NaN."""
    states = [tensor[lanes].view(torch.int32).clone() for tensor in codec.histories.tensors]
    return [*states, torch.tensor([codec.position[lane] for lane in lanes])]


def assert_untouched(codec: Codec, lanes: list[int], before: list[Tensor]) -> None:
    for number, (now, then) in enumerate(zip(histories(codec, lanes), before, strict=True)):
        assert torch.equal(now, then), f"history {number} of lanes {lanes} changed"


def poison(codec: Codec) -> None:
    for tensor in codec.histories.tensors:
        tensor.fill_(float("nan"))
    codec.position[:] = [12345] * len(codec.position)


@pytest.mark.parametrize("seed", range(3))
def test_an_utterance_is_the_same_bits_in_any_lane_and_company(tiny_pair, seed) -> None:
    """Utterances join and leave lanes at any frame, in calls of any lanes in any order; memory starts as NaN."""
    for number, speech in enumerate(speak_in_company(tiny_pair, random.Random(seed))):
        alone = stream(tiny_pair.codec(), speech.codes, speech.splits)
        wrong = (torch.cat(speech.samples) != alone).nonzero().flatten()
        assert not len(wrong), f"utterance {number}, lane {speech.lane}: sample {wrong[0]}"


@pytest.mark.parametrize("threads", [1, 2])
def test_lanes_of_one_call_are_the_same_bits_alone(tiny_pair, threads) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_company_changes_nothing(tiny_pair, frames=2, companies=[[2, 0, 1]])
    finally:
        torch.set_num_threads(before)


def assert_company_changes_nothing(pair: Pair, frames: int, companies: list[list[int]]) -> None:
    lanes = sorted({lane for company in companies for lane in company})
    codec, codes = pair.codec(len(lanes)), random_codes(len(lanes), frames, pair.config)
    alone = [codec.decode(codes[lane : lane + 1], [lane])[0] for lane in lanes]
    for company in companies:
        for lane in company:
            codec.reset(lane)
        for lane, samples in zip(company, codec.decode(codes[company], company), strict=True):
            assert torch.equal(samples, alone[lane]), f"lane {lane} of {company}, {frames} frames"


def speak_in_company(pair: Pair, chance: random.Random, utterances: int = 9) -> list[Speech]:
    codec, active, said = pair.codec(LANES), [], []
    poison(codec)
    while len(said) < utterances or active:
        free = sorted(set(range(LANES)) - {speech.lane for speech in active})
        if len(said) < utterances and free and (not active or chance.random() < 0.7):
            said.append(Speech(random_codes(1, chance.randint(3, 30), pair.config, len(said))[0], chance.choice(free)))
            codec.reset(said[-1].lane)
            active.append(said[-1])
        decode_together(codec, chance.sample(active, chance.randint(1, len(active))), chance)
        active = [speech for speech in active if speech.left]
    return said


def decode_together(codec: Codec, speeches: list[Speech], chance: random.Random) -> None:
    frames = chance.randint(1, min(8, *(speech.left for speech in speeches), 8))
    lanes = [speech.lane for speech in speeches]
    idle = [lane for lane in range(LANES) if lane not in lanes]
    before = histories(codec, idle)
    chunk = torch.stack([speech.codes[sum(speech.splits) :][:frames] for speech in speeches])
    for speech, samples in zip(speeches, codec.decode(chunk, lanes), strict=True):
        speech.splits.append(frames)
        speech.samples.append(samples)
    assert_untouched(codec, idle, before)


def test_reset_cleans_its_lane_and_no_other(tiny_pair) -> None:
    codes = random_codes(1, 15, tiny_pair.config)
    expected = tiny_pair.codec().decode(codes, [0])
    codec = tiny_pair.codec(3)
    poison(codec)
    before = histories(codec, [0, 2])
    codec.reset(1)
    assert torch.equal(codec.decode(codes, [1]), expected)
    assert_untouched(codec, [0, 2], before)


def test_a_state_put_back_goes_on_where_it_was_taken(tiny_pair) -> None:
    codes = random_codes(1, 40, tiny_pair.config)
    codec = tiny_pair.codec(3)
    codec.decode(codes[:, :17], [0])
    state = codec.take(0)
    expected = codec.decode(codes[:, 17:], [0])
    codec.decode(random_codes(1, 5, tiny_pair.config, seed=1), [2])
    before = histories(codec, [0, 1])
    for _ in range(2):  # the state is a copy, so it serves twice
        codec.put(2, state)
        assert torch.equal(codec.decode(codes[:, 17:], [2]), expected)
    assert_untouched(codec, [0, 1], before)


# Primed.


@pytest.mark.parametrize("primed", [1, 2, 5, 10, 11, 12, 13, 30, FRAMES - 1])
def test_a_primed_lane_goes_on_as_if_it_had_decoded(tiny_pair, whole, primed) -> None:
    codes, expected = whole
    codec = tiny_pair.codec(2)
    before = histories(codec, [0])
    codec.prime(codes[:primed], 1)
    border = primed * tiny_pair.config.samples_per_frame
    assert_near(stream(codec, codes[primed:], [3, 9], lane=1), expected[border:], tiny_pair.config)
    assert_untouched(codec, [0], before)


@pytest.mark.parametrize("cut", [1, 14, 29])
def test_a_lane_may_be_primed_in_pieces(tiny_pair, whole, cut) -> None:
    codes, expected = whole
    codec = tiny_pair.codec()
    for part in (codes[:cut], codes[cut:30]):
        codec.prime(part, 0)
    assert_near(stream(codec, codes[30:], []), expected[30 * tiny_pair.config.samples_per_frame :], tiny_pair.config)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"upsampling_ratios": [4, 2], "upsample_rates": [6, 5, 4, 2]},
        {"upsampling_ratios": [2], "upsample_rates": [8, 6, 5, 4]},
    ],
    ids=str,
)
def test_frames_back_is_as_far_as_the_convolutions_look(varied, changes) -> None:
    """Found by changing one frame of their input at a time and looking at the samples of the last."""
    pair = varied(**changes)
    frames, claimed = 24, pair.codec().waves.frames_back
    hidden = torch.randn(1, frames, pair.config.latent, generator=torch.Generator().manual_seed(0))

    def last_samples(x: Tensor) -> Tensor:
        with torch.inference_mode():
            return pair.codec().waves(x, torch.tensor([0]))[:, -pair.config.samples_per_frame :]

    expected, needed = last_samples(hidden), 0
    for back in range(1, frames):
        changed = hidden.clone()
        changed[:, -1 - back] += 1.0
        if not torch.equal(last_samples(changed), expected):
            needed = back
    assert 0 < needed <= claimed <= needed + 2, f"{needed} frames are looked back at, {claimed} are kept"


# The size of a released codec.


@pytest.mark.full
def test_the_released_codec_equals_the_reference(tmp_path) -> None:
    pair = random_pair(write_configs(tmp_path, codec=codec_config()))
    codes = random_codes(1, 100, pair.config)
    expected = pair.decode(codes)
    assert pair.config.window < 100 and expected.std() > 0.02
    tolerance = TOLERANCE * expected.abs().max().item()
    codec = pair.codec(3)
    assert_near(codec.decode(codes, [0]), expected, pair.config, tolerance)
    ramp = stream(codec, codes[0], [1, 2, 4, 8, 8, 8, 8], lane=1)
    assert_near(ramp[None], expected, pair.config, tolerance)
    codec.prime(codes[0, :80], 2)
    primed = codec.decode(codes[:, 80:], [2])
    assert_near(primed, expected[:, 80 * pair.config.samples_per_frame :], pair.config, tolerance)


@pytest.mark.full
def test_lanes_of_the_released_codec_are_the_same_bits_in_company(tmp_path) -> None:
    pair = random_pair(write_configs(tmp_path, codec=codec_config()))
    for frames in (1, 2, 4, 8):
        assert_company_changes_nothing(pair, frames, [[4, 0], [1, 2, 3], [0, 1, 2, 3, 4]])


# Captured.


@pytest.fixture(params=["padded", "recorded"])
def capturing(request) -> Iterator[None]:
    """Steps on the ladder's buffers: called on them, and recorded and replayed as on a GPU."""
    with recorded_on_cpu() if request.param == "recorded" else nullcontext():
        yield


def captured(pair: Pair, lanes: int = 1) -> Codec:
    """Every lane poisoned, also the spare one: whatever it holds, nobody hears it."""
    codec = Codec(pair.config, pair.read, lanes, captured=True)
    poison(codec)
    return codec


@pytest.mark.usefixtures("capturing")
@pytest.mark.parametrize("splits", [[1, 2, 4, 8, 8, 8, 8], [3, 5, 7, 9, 20], []])
def test_steps_on_the_ladder_make_the_same_samples(tiny_pair, whole, splits) -> None:
    """In any split: what is on no rung goes in pieces."""
    codes, expected = whole
    codec = captured(tiny_pair, 3)
    codec.reset(1)
    assert_near(stream(codec, codes, splits, lane=1), expected, tiny_pair.config)
    assert codec.position == [12345, FRAMES, 12345]


@pytest.mark.usefixtures("capturing")
@pytest.mark.parametrize("company", [[2], [0, 4], [3, 0, 1], [4, 2, 0, 3, 1]])
def test_lanes_that_fill_a_rung_up_change_nobody(tiny_pair, company) -> None:
    codec, plain = captured(tiny_pair, 5), tiny_pair.codec(5)
    idle = [lane for lane in range(5) if lane not in company]
    for lane in company:
        codec.reset(lane)
    for number, frames in enumerate((1, 4, 2)):
        codes = random_codes(len(company), frames, tiny_pair.config, seed=number)
        before = histories(codec, idle)
        assert_near(codec.decode(codes, company), plain.decode(codes, company), tiny_pair.config)
        assert_untouched(codec, idle, before)
    for mine, theirs in zip(codec.histories.tensors, plain.histories.tensors, strict=True):
        torch.testing.assert_close(mine[company], theirs[company], atol=1e-4, rtol=0)


@pytest.mark.usefixtures("capturing")
def test_more_lanes_than_a_rung_go_in_parts(tiny_pair, monkeypatch) -> None:
    monkeypatch.setattr("backend.codec.LANE_RUNGS", (1, 2))
    codec, codes = captured(tiny_pair, 5), random_codes(5, 3, tiny_pair.config)
    assert codec.ladder is not None and codec.ladder.sizes[-1] == (8, 2)
    codec.rebuild()
    assert_near(codec.decode(codes, [4, 1, 0, 2, 3]), tiny_pair.codec(5).decode(codes, [0, 1, 2, 3, 4]), codec.config)
    assert codec.position == [3] * 5


@pytest.mark.parametrize(
    ("lanes", "rungs"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 4]), (16, [1, 2, 4, 8, 16]), (20, [1, 2, 4, 8, 16])]
)
def test_the_ladder_goes_up_to_the_lanes(tiny_pair, lanes, rungs) -> None:
    codec = Codec(tiny_pair.config, tiny_pair.read, lanes, captured=True)
    assert codec.ladder is not None
    assert codec.ladder.sizes == [(frames, rung) for frames in (1, 2, 4, 8) for rung in rungs]
    assert tiny_pair.codec(lanes).ladder is None, "without a GPU nothing is padded"


def test_warming_up_captures_every_rung_and_leaves_every_lane_alone(tiny_pair) -> None:
    with recorded_on_cpu() as recorder:
        codec, said = captured(tiny_pair, 3), []
        before = histories(codec, [0, 1, 2])
        codec.warm_up(said.append)
        assert_untouched(codec, [0, 1, 2], before)
        assert len(said) == len(set(said)) == recorder.recorded == 12 and said[0] == "codec: 8 frames of 4 lanes"
        codec.decode(random_codes(3, 15, tiny_pair.config), [0, 1, 2])
        assert (recorder.recorded, recorder.replayed) == (12, 4), "a step was not captured beforehand"
    plain = tiny_pair.codec()
    plain.warm_up(said.append)
    assert len(said) == 12


@pytest.mark.parametrize("end", [-1, 64, 2150])
def test_a_frame_of_codes_outside_the_codebook_changes_nothing_before_it(tiny_pair, end) -> None:
    codes = random_codes(1, 4, tiny_pair.config)
    ended = codes.clone()
    ended[0, 3, 0] = end
    samples = tiny_pair.codec().decode(ended, [0])
    assert samples.isfinite().all()
    border = 3 * tiny_pair.config.samples_per_frame
    assert torch.equal(samples[:, :border], tiny_pair.codec().decode(codes, [0])[:, :border])


def test_rebuilt_every_lane_starts_afresh(tiny_pair) -> None:
    codes, codec = random_codes(2, 15, tiny_pair.config), tiny_pair.codec(2)
    expected = codec.decode(codes, [0, 1])
    poison(codec)
    codec.rebuild()
    assert torch.equal(codec.decode(codes, [0, 1]), expected)
