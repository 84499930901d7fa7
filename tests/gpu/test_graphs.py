"""What is captured on the card against the same uncaptured, and that nothing in float32 is rounded to TF32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="the kernel is written in Triton")

from backend.checkpoint import Checkpoint
from backend.codec import Codec
from megakernel import Decoder
from megakernel.prefill import CapturedPrefill
from tests.gpu.parity import DEVICE, DRY, WIDE, drawn
from tests.megakernel.kernel_ladder import relative
from tests.megakernel.random_decoder import Script

# ||captured - uncaptured|| / ||uncaptured||: a padded prompt may be multiplied by another algorithm
CLOSE = {"float32": 1e-5, "bfloat16": 2e-2, "q8_0": 2e-2}
LENGTHS = (17, 1, 16) if DRY else (100, 1, 16, 17, 64)
LANES = 3


def read(decoder: Decoder, prompt: Tensor) -> dict[str, Tensor]:
    """Everything that a prompt leaves of lane 1."""
    decoder.begin(1, seed=3)
    decoder.prefill(1, prompt)
    state, end = decoder.state, len(prompt)
    own = {"keys": state.cache.k[:, 1, :, :end], "values": state.cache.v[:, 1, :, :end]}
    return {
        name: tensor.clone() for name, tensor in (own | {"hidden": state.hidden[1], "logits": state.logits[1]}).items()
    }


@pytest.mark.parametrize("weight_format", CLOSE)
def test_a_captured_prompt_is_the_prompt(weight_format) -> None:
    """One decoder for all lengths, so that each finds the last one's rows in its buffers; frames follow."""
    weights = drawn(WIDE, weight_format)
    captured, eager = Decoder(weights, 2, 128), Decoder(weights, 2, 128)
    captured.prompts, eager.prompts = CapturedPrefill(weights, captured.cos, captured.sin), None
    for length in LENGTHS:
        script = Script(WIDE.talker.hidden, length, length, frames=2)
        mine, right = (read(decoder, script.prompt.to(DEVICE)) for decoder in (captured, eager))
        for name in right:
            error = relative(mine[name], right[name])
            assert error < CLOSE[weight_format], f"{length} positions: {name} is {error:.1e} away"
        if weight_format == "float32":
            for row in script.text.to(DEVICE):
                assert torch.equal(captured.step([1], row[None]), eager.step([1], row[None])), f"{length} positions"


@pytest.fixture(scope="module")
def codecs(tiny) -> tuple[Codec, Codec]:
    """Captured, and not."""
    checkpoint = Checkpoint(tiny("custom_voice"))
    captured, eager = (
        Codec(checkpoint.config.codec, checkpoint.read, LANES, DEVICE, captured=way) for way in (True, False)
    )
    captured.warm_up()
    return captured, eager


def test_a_captured_codec_makes_the_same_samples(codecs) -> None:
    """Chunks of all sizes for lanes that come and go; a lane that begins afresh."""
    captured, eager = codecs
    draw, config = torch.Generator().manual_seed(3), eager.config
    plan = (
        [(1, [0]), (3, [0, 1]), (7, [2, 0, 1])]
        if DRY
        else [(1, [0]), (2, [0, 1]), (15, [2, 0, 1]), (8, [1]), (4, [2, 0])]
    )
    for frames, lanes in plan:
        codes = torch.randint(config.codebook_size, (len(lanes), frames, config.groups), generator=draw).to(DEVICE)
        mine, right = (codec.decode(codes, lanes) for codec in codecs)
        assert mine.isfinite().all() and (error := relative(mine, right)) < 1e-4, f"{frames} frames of {lanes}: {error}"
    for codec in codecs:
        codec.reset(1)
    codes = torch.zeros(1, 2, config.groups, dtype=torch.int64, device=DEVICE)
    assert relative(captured.decode(codes, [1]), eager.decode(codes, [1])) < 1e-4


def test_nothing_in_float32_is_rounded_to_tf32(codecs) -> None:
    """After the codec was made, which sees to it."""
    generator = torch.Generator(DEVICE).manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE)

    a, b, x, kernel = random(256, 512), random(512, 128), random(2, 64, 200), random(64, 64, 7)
    q, k, v = (random(1, 4, 70, 32) for _ in range(3))
    for what, function, inputs in (
        ("product", torch.matmul, (a, b)),
        ("linear", F.linear, (a, b.T.contiguous())),
        ("convolution", F.conv1d, (x, kernel)),
        ("transposed convolution", lambda x, w: F.conv_transpose1d(x, w, stride=2), (x, kernel)),
        ("attention", F.scaled_dot_product_attention, (q, k, v)),
    ):
        error = relative(function(*inputs), function(*(tensor.double() for tensor in inputs)))
        assert error < 5e-5, f"{what}: {error:.1e} from float64's"
