"""The causal layers of the codec's decoder with the state that makes them stream exactly.

Everything is time-major, ``[lanes, time, channels]``. A layer that looks back keeps, for every lane,
the inputs that it will look back at (``history``); a lane that starts has zeros there, which is what
causal padding means. `Histories` owns those tensors, so that one lane can be reset, kept or put back.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel.linear import make_linear

Read = Callable[[str], Tensor]
_PACKED_FOR = 256  # time steps that a packed convolution's blocked layout is chosen for


class Histories:
    """The state tensors of all layers, ``[lanes, ...]`` each, zero for a lane that starts."""

    def __init__(self, lanes: int, device: torch.device) -> None:
        self.lanes, self.device = lanes, device
        self.tensors: list[Tensor] = []

    def add(self, *shape: int) -> Tensor:
        tensor = torch.zeros(self.lanes, *shape, device=self.device)
        self.tensors.append(tensor)
        return tensor

    def reset(self, lane: int) -> None:
        _zero([tensor[lane] for tensor in self.tensors])

    def clear(self) -> None:
        """Start every lane afresh."""
        _zero(self.tensors)

    def take(self, lane: int) -> list[Tensor]:
        """A copy of the lane's state."""
        return [tensor[lane].clone() for tensor in self.tensors]

    def put(self, lane: int, state: list[Tensor]) -> None:
        for tensor, kept in zip(self.tensors, state, strict=True):
            tensor[lane] = kept


def _zero(tensors: list[Tensor]) -> None:
    if tensors:  # on a GPU all together in a few launches
        torch._foreach_zero_(tensors)  # pyright: ignore[reportPrivateImportUsage]


class Convolution:
    """A convolution without padding, ``[lanes, time, in]`` to ``[lanes, time - reach, out]``.

    ``weight`` is ``[out, in / groups, kernel]``. On a CPU it is reordered once by oneDNN: the plain
    operator reorders at every call, which for one frame costs as much as the convolution.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, dilation: int = 1, groups: int = 1) -> None:
        self.bias, self.dilation, self.groups = bias, dilation, groups
        plane = weight.unsqueeze(2)
        self.packed = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
        self.weight = self._pack(plane) if self.packed else plane.contiguous(memory_format=torch.channels_last)

    def _pack(self, plane: Tensor) -> Tensor:
        reach = (plane.shape[3] - 1) * self.dilation
        shape = [1, plane.shape[1] * self.groups, 1, _PACKED_FOR + reach]
        return torch._C._nn.mkldnn_reorder_conv2d_weight(  # pyright: ignore[reportAttributeAccessIssue]
            plane.to_mkldnn(), [0, 0], [1, 1], [1, self.dilation], self.groups, shape
        )

    def __call__(self, x: Tensor) -> Tensor:
        plane = x.transpose(1, 2).unsqueeze(2)  # [lanes, channels, 1, time] with channels last in memory
        if self.packed:
            y = torch.ops.mkldnn._convolution_pointwise(
                plane, self.weight, self.bias, [0, 0], [1, 1], [1, self.dilation], self.groups, "none", [], ""
            )
        else:
            y = F.conv2d(plane, self.weight, self.bias, dilation=(1, self.dilation), groups=self.groups)
        return y.squeeze(2).transpose(1, 2)


class CausalConv:
    """A causal convolution: its history is the last ``reach`` inputs. One of kernel 1 is a matrix."""

    def __init__(
        self, histories: Histories, weight: Tensor, bias: Tensor | None, dilation: int = 1, groups: int = 1
    ) -> None:
        self.reach = (weight.shape[2] - 1) * dilation
        if self.reach:
            self.history = histories.add(self.reach, weight.shape[1] * groups)
            self.convolution: Callable[[Tensor], Tensor] = Convolution(weight, bias, dilation, groups)
        else:
            self.convolution = make_linear(weight.squeeze(2), bias)

    def __call__(self, x: Tensor, lanes: Tensor) -> Tensor:
        if not self.reach:
            return self.convolution(x)
        joined = torch.cat([self.history[lanes], x], dim=1)
        self.history[lanes] = joined[:, -self.reach :]
        return self.convolution(joined)


class CausalUpsample:
    """A causal transposed convolution of kernel ``taps * rate`` and stride ``rate``.

    Output *j* of the ``rate`` that belong to one input is a weighted sum of that input and the ones
    before it, so the layer is a causal convolution over ``taps`` inputs with ``rate`` times the channels,
    read row by row; no tail of half-finished output is carried.
    """

    def __init__(self, histories: Histories, weight: Tensor, bias: Tensor, rate: int) -> None:
        inputs, outputs, kernel = weight.shape
        taps = weight.view(inputs, outputs, kernel // rate, rate)  # output j of tap i comes from input t - i
        dense = taps.flip(2).permute(3, 1, 0, 2).reshape(rate * outputs, inputs, kernel // rate)
        self.conv = CausalConv(histories, dense.contiguous(), bias.repeat(rate))
        self.rate, self.outputs, self.reach = rate, outputs, self.conv.reach

    def __call__(self, x: Tensor, lanes: Tensor) -> Tensor:
        y = self.conv(x, lanes)  # [lanes, time, rate * outputs]
        return y.reshape(len(y), -1, self.outputs)


class SnakeBeta:
    """``x + sin(exp(alpha) x)^2 / exp(beta)``, by channel. Source: Ziyin et al. 2020; BigVGAN's form."""

    def __init__(self, alpha: Tensor, beta: Tensor) -> None:
        self.frequency = alpha.exp()
        self.height = 1.0 / (beta.exp() + 1e-9)

    def __call__(self, x: Tensor) -> Tensor:
        wave = (x * self.frequency).sin_()
        return torch.addcmul(x, wave.mul_(wave), self.height)


class ResidualUnit:
    def __init__(self, histories: Histories, read: Read, prefix: str, dilation: int) -> None:
        self.snake1 = SnakeBeta(read(f"{prefix}.snake1.alpha"), read(f"{prefix}.snake1.beta"))
        self.conv1 = CausalConv(histories, read(f"{prefix}.conv1.weight"), read(f"{prefix}.conv1.bias"), dilation)
        self.snake2 = SnakeBeta(read(f"{prefix}.snake2.alpha"), read(f"{prefix}.snake2.beta"))
        self.conv2 = CausalConv(histories, read(f"{prefix}.conv2.weight"), read(f"{prefix}.conv2.bias"))
        self.reach = self.conv1.reach

    def __call__(self, x: Tensor, lanes: Tensor) -> Tensor:
        return self.conv2(self.snake2(self.conv1(self.snake1(x), lanes)), lanes).add_(x)


class UpsampleBlock:
    """Snake, transposed convolution by ``rate``, three residual units."""

    def __init__(self, histories: Histories, read: Read, prefix: str, rate: int) -> None:
        self.snake = SnakeBeta(read(f"{prefix}.snake.alpha"), read(f"{prefix}.snake.beta"))
        weight, bias = read(f"{prefix}.transposed.weight"), read(f"{prefix}.transposed.bias")
        self.upsample = CausalUpsample(histories, weight, bias, rate)
        self.units = [ResidualUnit(histories, read, f"{prefix}.units.{j}", 3**j) for j in range(3)]

    def __call__(self, x: Tensor, lanes: Tensor) -> Tensor:
        x = self.upsample(self.snake(x), lanes)
        for unit in self.units:
            x = unit(x, lanes)
        return x

    def frames_back(self, time_per_frame: float) -> float:
        """How many frames the block looks back, given its input's time steps per frame."""
        units = sum(unit.reach for unit in self.units)
        return self.upsample.reach / time_per_frame + units / (time_per_frame * self.upsample.rate)


class ConvNeXtUpsample:
    """Transposed convolution by ``rate``, then a ConvNeXt block."""

    NORM_EPS = 1e-6

    def __init__(self, histories: Histories, read: Read, prefix: str, rate: int) -> None:
        self.upsample = CausalUpsample(
            histories, read(f"{prefix}.transposed.weight"), read(f"{prefix}.transposed.bias"), rate
        )
        depthwise = read(f"{prefix}.depthwise.weight")
        self.depthwise = CausalConv(histories, depthwise, read(f"{prefix}.depthwise.bias"), groups=len(depthwise))
        self.norm = read(f"{prefix}.norm.weight"), read(f"{prefix}.norm.bias")
        self.expand = make_linear(read(f"{prefix}.expand.weight"), read(f"{prefix}.expand.bias"))
        gamma = read(f"{prefix}.gamma")
        contract = read(f"{prefix}.contract.weight") * gamma.unsqueeze(1)
        self.contract = make_linear(contract, read(f"{prefix}.contract.bias") * gamma)

    def __call__(self, x: Tensor, lanes: Tensor) -> Tensor:
        x = self.upsample(x, lanes)
        h = F.layer_norm(self.depthwise(x, lanes), x.shape[-1:], *self.norm, self.NORM_EPS)
        return self.contract(F.gelu(self.expand(h))).add_(x)

    def frames_back(self, time_per_frame: float) -> float:
        return (self.upsample.reach + self.depthwise.reach / self.upsample.rate) / time_per_frame
