"""What the kernel is measured beside, on a GPU: the twin under a CUDA graph draws what the twin draws."""

from __future__ import annotations

import pytest
import torch

from benchmarks.drawn import SPECS
from benchmarks.gpu_engines import draw_weights, start
from benchmarks.graphed_twin import GraphedTwin, record
from megakernel import Decoder

PROMPT = 5


@pytest.mark.parametrize("lanes", [1, 4])
def test_a_replayed_frame_is_the_twins(card, lanes) -> None:
    decoder = Decoder(draw_weights(SPECS["small"], "float32", card), lanes, PROMPT + 1)
    text = start(decoder, PROMPT)
    twin = GraphedTwin(decoder)
    length = twin.begin()
    replay = record(lambda: twin.step(length))
    for _ in range(2):
        twin.begin()  # recording has moved the frame on
        twin.codes.fill_(-1)
        codes = replay().clone()
    assert torch.equal(codes, decoder.step(list(range(lanes)), text))
