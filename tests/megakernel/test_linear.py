"""Weight matrices: a lane's rows are the same bits alone and in company, and the right numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megakernel.linear import (
    SMALL,
    LanewiseLinear,
    Linear,
    PackedLinear,
    RowsLinear,
    WidenedLinear,
    make_linear,
    matrix_bytes,
)
from megakernel.q8 import dequantize, quantize

LANES = 16
COMPANIES = (2, 3, 4, 5, 8, 16)
RELEASED = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (3072, 1024), (2048, 1024)]
ODD = [(37, 53), (515, 777), (1001, 300), (1, 7)]
BLOCKS = [(6144, 1024), (37, 32), (515, 768), (1, 64)]
MATRICES = [
    (PackedLinear, torch.float32),
    (LanewiseLinear, torch.float32),
    (LanewiseLinear, torch.bfloat16),
    (RowsLinear, torch.float32),
    (RowsLinear, torch.bfloat16),
]
LARGEST = [(12288, 2048)]  # gate and up of the 1.7B talker


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def random_matrix(out: int, width: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(out * 10007 + width)
    weight = torch.randn(out, width, generator=generator) / width**0.5
    return weight.to(dtype), torch.randn(out, generator=generator).to(dtype)


def random_rows(lanes: int, width: int, dtype: torch.dtype, positions: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(width)
    return torch.randn(lanes, positions, width, generator=generator).to(dtype)


def assert_company_changes_nothing(linear: Linear, x: Tensor) -> None:
    """``x`` ``[LANES, positions, in]``: each lane alone against every company size and place in it."""
    alone = [linear(x[lane : lane + 1])[0] for lane in range(LANES)]
    for size in COMPANIES:
        for start in {0, LANES - size, 1 if size < LANES else 0}:
            together = linear(x[start : start + size])
            for place, row in enumerate(together):
                lane = start + place
                assert torch.equal(row, alone[lane]), f"lane {lane} at place {place} of {size} is not as alone"


@pytest.mark.parametrize("shape", [*RELEASED, *ODD, *LARGEST], ids=str)
def test_packed_rows_are_the_same_in_any_company(shape, threads) -> None:
    weight, bias = random_matrix(*shape)
    assert_company_changes_nothing(PackedLinear(weight, bias), random_rows(LANES, shape[1], torch.float32))


@pytest.mark.parametrize("implementation", [LanewiseLinear, RowsLinear])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [*RELEASED[:2], *ODD], ids=str)
def test_lanewise_rows_are_the_same_in_any_company(shape: tuple[int, int], dtype, implementation, threads) -> None:
    weight, bias = random_matrix(*shape, dtype)
    assert_company_changes_nothing(implementation(weight, bias), random_rows(LANES, shape[1], dtype))


def quantized_rows(weight: Tensor, bias: Tensor | None = None) -> RowsLinear:
    numbers, scales = quantize(weight)
    return RowsLinear(numbers, bias, scales)


def coarse_matrix(out: int, width: int) -> tuple[Tensor, Tensor]:
    """One weight in each block is so large that the others lose most of their bits in 8."""
    weight, bias = random_matrix(out, width)
    weight[:, ::32] *= 40
    return weight, bias


@pytest.mark.parametrize("positions", [1, 9])
@pytest.mark.parametrize("shape", BLOCKS, ids=str)
@pytest.mark.parametrize("make", [WidenedLinear, quantized_rows])
def test_quantised_rows_are_the_same_in_any_company(make, shape: tuple[int, int], positions, threads) -> None:
    weight, bias = random_matrix(*shape)
    assert_company_changes_nothing(make(weight, bias), random_rows(LANES, shape[1], torch.bfloat16, positions))


@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", BLOCKS, ids=str)
@pytest.mark.parametrize("make", [WidenedLinear, quantized_rows])
def test_a_quantised_matrix_multiplies_its_values_and_rounds_once(make, shape: tuple[int, int], with_bias) -> None:
    weight, bias = coarse_matrix(*shape)
    linear = make(weight, bias if with_bias else None)
    values = dequantize(*quantize(weight)).double()
    for lanes, positions in ((1, 1), (1, 9), (3, 2)):
        x = random_rows(lanes, shape[1], torch.bfloat16, positions)
        y = linear(x)
        expected = x.double() @ values.T + (bias.double() if with_bias else 0.0)
        assert y.dtype == linear.dtype == torch.bfloat16
        torch.testing.assert_close(y.double(), expected, atol=1e-4, rtol=2.0**-8)


def test_rows_are_not_copied() -> None:
    weight, bias = random_matrix(64, 96)
    for linear, x in (
        (RowsLinear(weight, bias), random_rows(1, 96, torch.float32)),
        (quantized_rows(weight, bias), random_rows(1, 96, torch.bfloat16)),
    ):
        linear.rows.zero_()
        assert torch.equal(linear(x)[0, 0], bias.to(linear.dtype))


def test_bytes_of_a_matrix() -> None:
    for weight_format, expected in (("float32", 4 * 6400), ("bfloat16", 2 * 6400), ("q8_0", 200 * 34)):
        assert matrix_bytes(6400, weight_format) == expected, weight_format


@pytest.mark.parametrize("positions", [2, 3, 7, 8, 30])
@pytest.mark.parametrize(("implementation", "dtype"), MATRICES)
def test_lanes_of_many_positions_are_the_same_in_any_company(implementation, dtype, positions, threads) -> None:
    weight, bias = random_matrix(515, 777, dtype)
    assert_company_changes_nothing(implementation(weight, bias), random_rows(LANES, 777, dtype, positions))


@pytest.mark.parametrize("place", range(5))
def test_a_row_does_not_see_its_neighbours(place) -> None:
    weight, bias = random_matrix(600, 512)
    x = random_rows(5, 512, torch.float32)
    others = torch.full_like(x, float("nan"))
    others[place] = x[place]
    for implementation in (PackedLinear, LanewiseLinear):
        linear = implementation(weight, bias)
        assert torch.equal(linear(others)[place], linear(x)[place]), implementation.__name__


@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", [RELEASED[1], *ODD], ids=str)
@pytest.mark.parametrize(("implementation", "dtype"), MATRICES)
def test_values_are_those_of_float64(implementation, shape: tuple[int, int], dtype, with_bias) -> None:
    weight, bias = random_matrix(*shape, dtype)
    linear = implementation(weight, bias if with_bias else None)
    for lanes, positions in ((1, 1), (1, 9), (2, 1), (3, 2)):
        x = random_rows(lanes, shape[1], dtype, positions)
        y = linear(x)
        expected = x.double() @ weight.double().T + (bias.double() if with_bias else 0.0)
        assert y.dtype == linear.dtype == dtype
        tolerance = 2e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(y.double(), expected, atol=tolerance, rtol=tolerance)


def test_an_input_that_is_a_view_is_taken_by_its_values() -> None:
    weight, bias = random_matrix(600, 512)
    wide = random_rows(4, 1024, torch.float32)
    for implementation in (PackedLinear, LanewiseLinear):
        linear = implementation(weight, bias)
        for view in (wide[..., 512:], wide[:1, :, ::2]):
            assert torch.equal(linear(view), linear(view.clone())), implementation.__name__


def test_a_packed_matrix_does_not_change_with_the_tensor_it_was_made_from() -> None:
    weight, _ = random_matrix(600, 512)
    x = random_rows(2, 512, torch.float32)
    for implementation in (PackedLinear, LanewiseLinear):
        source = weight.clone()
        linear = implementation(source)
        before = linear(x)
        source.zero_()
        assert torch.equal(linear(x), before), implementation.__name__


def test_only_large_float32_matrices_are_packed() -> None:
    side = int(SMALL**0.5)
    at_limit, above = torch.zeros(side, side), torch.zeros(side + 1, side)
    assert isinstance(make_linear(above), PackedLinear)
    assert isinstance(make_linear(at_limit), LanewiseLinear)
    assert isinstance(make_linear(above.bfloat16()), LanewiseLinear)
    assert isinstance(make_linear(above, torch.zeros(side + 1)), PackedLinear)


def test_without_onednn_every_matrix_is_lanewise(monkeypatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert isinstance(make_linear(torch.zeros(1024, 1024)), LanewiseLinear)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_matrix_takes_and_gives_its_own_type(dtype) -> None:
    weight, bias = random_matrix(600, 512, dtype)
    linear = make_linear(weight, bias)
    assert linear.dtype == dtype == linear(random_rows(2, 512, dtype)).dtype
