"""Every layer of the codec alone: against plain PyTorch, causal, streamed equal to whole, each lane by itself."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from backend.codec_layers import (
    CausalConv,
    CausalUpsample,
    ConvNeXtUpsample,
    Histories,
    ResidualUnit,
    SnakeBeta,
    UpsampleBlock,
)

CPU = torch.device("cpu")
LANE = torch.tensor([0])
TIME = 24


def random_tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def read(shapes: dict[str, tuple[int, ...]]):
    """A reader of random tensors of these shapes; a name ends in the key."""

    def tensor(name: str) -> Tensor:
        key = next(key for key in sorted(shapes, key=len, reverse=True) if name.endswith(key))
        return random_tensor(*shapes[key], seed=len(name) + 7 * sum(name.encode())) * 0.3

    return tensor


SNAKES = {"snake.alpha": (6,), "snake.beta": (6,)} | {
    f"snake{n}.{part}": (4,) for n in (1, 2) for part in ("alpha", "beta")
}
UNIT = {"conv1.weight": (4, 4, 7), "conv1.bias": (4,), "conv2.weight": (4, 4, 1), "conv2.bias": (4,)}
CONVNEXT = {
    "transposed.weight": (6, 6, 2),
    "transposed.bias": (6,),
    "depthwise.weight": (6, 1, 7),
    "depthwise.bias": (6,),
    "norm.weight": (6,),
    "norm.bias": (6,),
    "expand.weight": (24, 6),
    "expand.bias": (24,),
    "contract.weight": (6, 24),
    "contract.bias": (6,),
    "gamma": (6,),
}
BLOCK = SNAKES | UNIT | {"transposed.weight": (6, 4, 6), "transposed.bias": (4,)}
LAYERS = {
    "convolution": lambda h: CausalConv(h, random_tensor(5, 6, 7), random_tensor(5)),
    "dilated": lambda h: CausalConv(h, random_tensor(5, 6, 7), random_tensor(5), dilation=3),
    "depthwise": lambda h: CausalConv(h, random_tensor(6, 1, 7), random_tensor(6), groups=6),
    "kernel of 1": lambda h: CausalConv(h, random_tensor(5, 6, 1), random_tensor(5)),
    "upsample, one tap": lambda h: CausalUpsample(h, random_tensor(6, 3, 4), random_tensor(3), rate=4),
    "upsample, two taps": lambda h: CausalUpsample(h, random_tensor(6, 3, 10), random_tensor(3), rate=5),
    "convnext": lambda h: ConvNeXtUpsample(h, read(CONVNEXT), "upsample.0", 2),
    "block": lambda h: UpsampleBlock(h, read(BLOCK), "blocks.0", 3),
}


def conv_whole(x: Tensor, weight: Tensor, bias: Tensor, dilation: int = 1, groups: int = 1) -> Tensor:
    padded = F.pad(x.transpose(1, 2), ((weight.shape[2] - 1) * dilation, 0))
    return F.conv1d(padded, weight, bias, dilation=dilation, groups=groups).transpose(1, 2)


@pytest.mark.parametrize("dilation", [1, 3, 9])
@pytest.mark.parametrize(("kernel", "groups"), [(1, 1), (3, 1), (7, 1), (7, 6), (2, 3)])
def test_a_causal_convolution_is_a_convolution_padded_with_zeros_on_the_left(kernel, groups, dilation) -> None:
    weight, bias = random_tensor(12, 6 // groups, kernel), random_tensor(12)
    x = random_tensor(2, TIME, 6, seed=1)
    layer = CausalConv(Histories(2, CPU), weight, bias, dilation, groups)
    expected = conv_whole(x, weight, bias, dilation, groups)
    torch.testing.assert_close(layer(x, torch.tensor([0, 1])), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rate", [1, 2, 5, 8])
@pytest.mark.parametrize("taps", [1, 2, 3])
def test_a_causal_upsampling_is_a_transposed_convolution_cut_on_the_right(taps, rate) -> None:
    weight, bias = random_tensor(6, 4, taps * rate), random_tensor(4)
    x = random_tensor(2, TIME, 6, seed=1)
    layer = CausalUpsample(Histories(2, CPU), weight, bias, rate)
    expected = F.conv_transpose1d(x.transpose(1, 2), weight, bias, stride=rate)[..., : TIME * rate].transpose(1, 2)
    torch.testing.assert_close(layer(x, torch.tensor([0, 1])), expected, atol=1e-5, rtol=1e-5)


def test_a_snake_is_its_formula() -> None:
    alpha, beta, x = random_tensor(6), random_tensor(6, seed=2), random_tensor(2, TIME, 6, seed=1)
    before = x.clone()
    expected = x + torch.sin(alpha.exp() * x) ** 2 / (beta.exp() + 1e-9)
    torch.testing.assert_close(SnakeBeta(alpha, beta)(x), expected)
    assert torch.equal(x, before), "the input was written to, which a residual unit still needs"


def test_a_residual_unit_adds_what_its_convolutions_make() -> None:
    tensors = read(SNAKES | UNIT)
    unit = ResidualUnit(Histories(1, CPU), tensors, "u", dilation=3)
    x = random_tensor(1, TIME, 4, seed=1)
    h = SnakeBeta(tensors("u.snake1.alpha"), tensors("u.snake1.beta"))(x)
    h = conv_whole(h, tensors("u.conv1.weight"), tensors("u.conv1.bias"), dilation=3)
    h = SnakeBeta(tensors("u.snake2.alpha"), tensors("u.snake2.beta"))(h)
    h = conv_whole(h, tensors("u.conv2.weight"), tensors("u.conv2.bias"))
    torch.testing.assert_close(unit(x, LANE), x + h, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_later_input_changes_no_earlier_output(name) -> None:
    x = random_tensor(1, TIME, 6, seed=1)
    other = x.clone()
    other[:, TIME // 2 :] += 1
    first, second = (LAYERS[name](Histories(1, CPU))(one, LANE) for one in (x, other))
    rate = first.shape[1] // TIME
    differ = (first != second).any(-1).nonzero()[:, 1]
    assert TIME // 2 * rate <= differ[0] < (TIME // 2 + 1) * rate, f"output {differ[0]} changed first, of {rate} a step"


@pytest.mark.parametrize("name", LAYERS)
@settings(max_examples=15, deadline=None)
@given(cuts=st.lists(st.integers(1, TIME - 1), max_size=6, unique=True))
def test_streamed_in_any_split_equals_whole(name, cuts) -> None:
    x = random_tensor(1, TIME, 6, seed=1)
    whole = LAYERS[name](Histories(1, CPU))(x, LANE)
    layer = LAYERS[name](Histories(1, CPU))
    streamed = torch.cat([layer(part, LANE) for part in x.tensor_split(sorted(cuts), dim=1)], dim=1)
    torch.testing.assert_close(streamed, whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_lanes_are_the_same_bits_in_any_company_and_idle_ones_keep_their_state(name) -> None:
    x = random_tensor(4, TIME, 6, seed=1)
    alone = [LAYERS[name](Histories(1, CPU))(x[lane : lane + 1], LANE)[0] for lane in range(4)]
    histories = Histories(4, CPU)
    layer = LAYERS[name](histories)
    for lane in range(4):
        for tensor in histories.tensors:
            tensor[lane] = float("nan")
    for lanes in ([3, 1], [0, 2, 3], [2]):
        idle = [lane for lane in range(4) if lane not in lanes]
        before = [tensor[idle].view(torch.int32).clone() for tensor in histories.tensors]
        for lane in lanes:
            histories.reset(lane)
        together = layer(x[lanes], torch.tensor(lanes))
        for row, lane in enumerate(lanes):
            assert torch.equal(together[row], alone[lane]), f"lane {lane} of {lanes}"
        for tensor, kept in zip(histories.tensors, before, strict=True):
            assert torch.equal(tensor[idle].view(torch.int32), kept), f"lanes {idle} changed while {lanes} ran"


def test_a_taken_state_is_a_copy() -> None:
    histories = Histories(2, CPU)
    tensor = histories.add(3, 2)
    tensor[0] = 1.0
    state = histories.take(0)
    tensor[0] = 2.0
    histories.put(1, state)
    assert (tensor[1] == 1.0).all() and (tensor[0] == 2.0).all()
    tensor[1] = 3.0
    histories.put(0, state)
    assert (tensor[0] == 1.0).all()
    with pytest.raises(ValueError, match="zip"):
        histories.put(0, [])
