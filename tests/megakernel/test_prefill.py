"""Prompts on the ladder against prompts as they are: padded, captured, one after the other."""

from __future__ import annotations

import pytest
import torch

from megakernel import Decoder
from megakernel.prefill import RUNGS, CapturedPrefill
from tests.megakernel.random_decoder import ALL_SPECS, KINDS, SPECS, Script, random_weights
from tests.megakernel.recording import recorded_on_cpu

TOLERANCE = {"float32": 1e-5, "bfloat16": 0.1, "q8_0": 0.1}


def decoder(weights, lanes: int = 2, positions: int = 80, captured: bool = True) -> Decoder:
    """All memory that is not written is NaN."""
    made = Decoder(weights, lanes, positions)
    if captured:
        made.prompts = CapturedPrefill(weights, made.cos, made.sin)
    caches = [made.state.cache, *([made.prompts.staging] if made.prompts else [])]
    for tensor in (t for cache in caches for t in (cache.k, cache.v)):
        tensor.fill_(float("nan"))
    made.state.hidden.fill_(float("nan"))
    return made


def read(into: Decoder, prompt: torch.Tensor, lane: int = 1) -> dict[str, torch.Tensor]:
    into.begin(lane, seed=3)
    into.prefill(lane, prompt)
    state = into.state
    assert state.length[lane] == len(prompt)
    own = {"keys": state.cache.k, "values": state.cache.v}
    return {name: cache[:, lane, :, : len(prompt)].clone() for name, cache in own.items()} | {
        "hidden": state.hidden[lane].clone(),
        "logits": state.logits[lane].clone(),
    }


@pytest.mark.parametrize("recorded", [False, True], ids=["padded", "recorded"])
@pytest.mark.parametrize(("name", "weight_format", "layout"), KINDS)
def test_a_padded_prompt_is_the_prompt(name, weight_format, layout, recorded) -> None:
    """One decoder for all lengths, so that each finds the last one's rows in its buffers."""
    weights = random_weights(ALL_SPECS[name], weight_format, layout)

    def compare() -> None:
        padded = decoder(weights)
        for length in (64, 1, 16, 17, 5, 63, 33):
            prompt = Script(weights.spec.talker.hidden, length, positions=length).prompt
            expected = read(decoder(weights, captured=False), prompt)
            for part, got in read(padded, prompt).items():
                message = f"{length} positions: {part} differ"
                torch.testing.assert_close(
                    got, expected[part], atol=TOLERANCE[weight_format], rtol=0, msg=lambda m, say=message: f"{say}: {m}"
                )

    if recorded:
        with recorded_on_cpu() as recorder:
            compare()
        assert recorder.recorded == 3 and recorder.replayed == 7, "16, 32 and 64 positions are captured once each"
    else:
        compare()


def test_the_cache_beyond_the_prompt_and_other_lanes_are_left_alone() -> None:
    padded = decoder(random_weights(SPECS["one width"]))
    read(padded, Script(26, 1, positions=5).prompt)
    for cache in (padded.state.cache.k, padded.state.cache.v):
        assert cache[:, 1, :, 5:].isnan().all() and cache[:, 0].isnan().all()
        assert not cache[:, 1, :, :5].isnan().any()


def test_a_broken_prompt_does_not_break_the_next_one() -> None:
    weights = random_weights(SPECS["one width"])
    padded, prompt = decoder(weights), Script(26, 1, positions=5).prompt
    expected = read(padded, prompt)
    read(padded, torch.full((16, 26), float("nan")))
    for part, got in read(padded, prompt).items():
        assert torch.equal(got, expected[part]), part


def test_frames_follow_a_padded_prompt() -> None:
    weights = random_weights(SPECS["projected"])
    script = Script(26, 5, positions=9)
    codes = []
    for captured in (False, True):
        one = decoder(weights, captured=captured)
        read(one, script.prompt)
        codes.append([one.step([1], row[None]) for row in script.text])
    assert torch.equal(torch.cat(codes[0]), torch.cat(codes[1]))


@pytest.mark.parametrize(("past", "positions"), [(3, 5), (0, 70)])
def test_a_second_piece_and_a_prompt_beyond_the_ladder_are_read_as_they_are(past, positions) -> None:
    weights = random_weights(SPECS["one width"])
    prompt = Script(26, 1, positions=past + positions).prompt
    expected = read(decoder(weights, captured=False), prompt)
    pieces = decoder(weights)
    assert pieces.prompts is not None and not pieces.prompts.fits(65)
    pieces.begin(1)
    for piece in (prompt[:past], prompt[past:]):
        if len(piece):
            pieces.prefill(1, piece)
    assert pieces.state.length[1] == past + positions
    torch.testing.assert_close(pieces.state.logits[1], expected["logits"], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("positions", "rungs"), [(8, []), (40, [16, 32]), (2000, list(RUNGS))])
def test_rungs_are_those_that_the_cache_holds(positions, rungs) -> None:
    weights = random_weights(SPECS["one width"])
    made = Decoder(weights, 1, positions)
    assert made.prompts is None, "without a GPU nothing is padded"
    assert [size[0] for size in CapturedPrefill(weights, made.cos, made.sin).ladder.sizes] == rungs


def test_warming_up_reads_every_rung_and_touches_no_lane() -> None:
    made, said = decoder(random_weights(SPECS["one width"])), []
    made.warm_up(said.append)
    assert said == [f"prompt of {rung} positions" for rung in (64, 32, 16)]
    assert made.state.cache.k.isnan().all() and made.state.hidden.isnan().all()
