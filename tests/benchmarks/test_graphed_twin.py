"""The twin as it is put under a graph: frame by frame what the twin draws, and nothing that needs the host."""

from __future__ import annotations

import pytest
import torch

from benchmarks.drawn import SPECS, DrawnWeights
from benchmarks.graphed_twin import GraphedTwin
from megakernel import Decoder, DrawParams, pack_decoder

PROMPT, FRAMES = 6, 8
CPU = torch.device("cpu")


def decoder(lanes: int, draw: DrawParams | None = None, weight_format: str = "float32") -> Decoder:
    """A prefilled one; every lane has a seed and a prompt of its own."""
    spec = SPECS["small"]
    weights = pack_decoder(DrawnWeights(spec, CPU, torch.float32), spec, weight_format, layout="kernel")
    made = Decoder(weights, lanes, PROMPT + FRAMES)
    for lane in range(lanes):
        made.begin(lane, 5 + lane, draw, draw, penalty=1.3)
        made.prefill(lane, rows(PROMPT, lane))
    return made


def rows(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, SPECS["small"].talker.hidden, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("draw", [DrawParams(), DrawParams(1.2, 0, 0.8), DrawParams(greedy=True)], ids=str)
@pytest.mark.parametrize("lanes", [1, 3])
def test_its_codes_are_the_twins(lanes, draw) -> None:
    twin = decoder(lanes, draw)
    graphed = GraphedTwin(twin, draw)
    length = graphed.begin()
    assert length == PROMPT
    for frame in range(FRAMES):
        text = rows(lanes, 100 + frame)
        graphed.text.copy_(text)
        expected = twin.step(list(range(lanes)), text)
        assert torch.equal(graphed.step(length + frame), expected), f"frame {frame}"
        assert torch.allclose(graphed.state.logits, twin.state.logits, atol=1e-4)


def test_beginning_again_repeats_the_frame() -> None:
    graphed = GraphedTwin(decoder(2))
    length = graphed.begin()
    first = graphed.step(length).clone()
    assert not torch.equal(graphed.step(length + 1), first)
    graphed.begin()
    assert torch.equal(graphed.step(length), first)


def test_it_shares_the_memory_of_the_weights() -> None:
    twin = decoder(1)
    head = GraphedTwin(twin).weights.head
    assert head.weight.data_ptr() == twin.weights.head.rows.data_ptr()  # type: ignore[attr-defined]


def test_quantised_weights_and_lanes_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="layout"):
        GraphedTwin(decoder(1, weight_format="q8_0"))
    uneven = decoder(2)
    uneven.begin(0)
    uneven.prefill(0, rows(3, 0))
    with pytest.raises(ValueError, match="unpack"):
        GraphedTwin(uneven).begin()
