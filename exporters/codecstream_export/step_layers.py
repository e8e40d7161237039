"""Layers of the step module that carry state or are folded: convolutions, upsampling, SnakeBeta.

A layer that needs what lies before its input names it in ``state`` and asks a :class:`Cursor`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from codecstream_export import eager

__all__ = [
    "Cursor",
    "StateCursor",
    "StateTensor",
    "StepConv1d",
    "StepConvTranspose1d",
    "StepInnerSnake",
    "StepLatentUpsample",
    "StepSnake",
    "StepTail",
    "constant",
    "in_order",
    "the",
]

T = TypeVar("T")

LARGEST_GAIN = 50.0  # float32 keeps half of that to 1.5e-6, which is 116 dB below 1


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One float32 tensor of a stream's state; a new stream holds zeros."""

    name: str
    shape: tuple[int, ...]


class Cursor(Protocol):
    """Gives each layer what lies before its input."""

    def extend(self, item: StateTensor, x: Tensor) -> Tensor:
        """Return a convolution's input ``[1, channels, n]`` with its history in front."""

    def recall(self, item: StateTensor, x: Tensor) -> Tensor:
        """Return frames ``[.., n, ..]`` (axis 1) with the frames in front that are kept."""


class StateCursor:
    """Carries a stream's state through one step: the layers' histories in, their successors out."""

    def __init__(self, old: Mapping[str, Tensor]) -> None:
        self._old = old
        self.new: dict[str, Tensor] = {}

    def extend(self, item: StateTensor, x: Tensor) -> Tensor:
        """See :class:`Cursor`."""
        return self._join(item, x, -1)

    def recall(self, item: StateTensor, x: Tensor) -> Tensor:
        """See :class:`Cursor`."""
        return self._join(item, x, 1)

    def _join(self, item: StateTensor, x: Tensor, dim: int) -> Tensor:
        """Put the history in front of ``x``; the newest part is the history to come.

        A layer that comes again in the same step, with its next tile, goes on where it was.
        """
        history = self.new.get(item.name, self._old[item.name])
        joined = torch.cat((history, x), dim=dim)
        self.new[item.name] = joined.narrow(dim, x.shape[dim], history.shape[dim])
        return joined


class _Scalable(nn.Module):
    """A convolution whose channels can be scaled, in place."""

    weight: nn.Parameter  # [channels out, channels in, taps]
    bias: nn.Parameter

    def scale_rows(self, scale: Tensor) -> None:
        """Let it give ``scale`` ``[channels out]`` times its output."""
        self.weight.mul_(scale[:, None, None])
        self.bias.mul_(scale)

    def scale_columns(self, scale: Tensor) -> None:
        """Let it take an input that is ``1 / scale`` ``[channels in]`` times as large."""
        self.weight.mul_(scale[None, :, None])


class StepConv1d(_Scalable):
    """A causal convolution over ``history + x``."""

    def __init__(self, source: eager.CausalConv1d, name: str) -> None:
        super().__init__()
        conv = source.conv
        self.weight, self.bias = constant(conv.weight), constant(conv.bias)
        self.dilation, self.groups = conv.dilation[0], conv.groups
        self.state = _history(name, conv.in_channels, source.history)

    def forward(self, x: Tensor, cursor: Cursor) -> Tensor:
        """Convolve ``[1, channels in, n]``."""
        for item in self.state:  # none where the kernel has one tap
            x = cursor.extend(item, x)
        return F.conv1d(x, self.weight, self.bias, dilation=self.dilation, groups=self.groups)


class StepConvTranspose1d(_Scalable):
    """A transposed convolution as a plain one to ``stride`` times the channels."""

    def __init__(self, source: eager.CausalConvTranspose1d, name: str) -> None:
        super().__init__()
        conv, stride = source.conv, source.stride
        cin, self.channels = conv.in_channels, conv.out_channels
        taps = conv.kernel_size[0] // stride
        # [cin, cout, taps * stride] -> [stride, cout, cin, taps], the oldest input's tap first.
        weight = conv.weight.view(cin, self.channels, taps, stride).permute(3, 1, 0, 2).flip(-1)
        self.weight = constant(weight.reshape(stride * self.channels, cin, taps))
        self.bias = constant(the(Tensor, conv.bias).repeat(stride))
        self.stride = stride
        self.state = _history(name, cin, taps - 1)

    def scale_rows(self, scale: Tensor) -> None:
        """Let it give ``scale`` ``[channels out]`` times its output."""
        super().scale_rows(scale.repeat(self.stride))  # rows are (step, channel)

    def forward(self, x: Tensor, cursor: Cursor) -> Tensor:
        """Return ``[1, channels out, n * stride]`` of ``[1, channels in, n]``."""
        for item in self.state:
            x = cursor.extend(item, x)
        return in_order(F.conv1d(x, self.weight, self.bias), self.channels)


def in_order(y: Tensor, channels: int) -> Tensor:
    """Put ``[1, stride * channels, n]``, whose rows are (step, channel), in the order of time.

    Two plain matrix transposes, for which runtimes have fast code, in place of one that swaps the
    inner axes of three.

    Returns:
        ``[1, channels, n * stride]``.
    """
    return y.transpose(1, 2).reshape(1, -1, channels).transpose(1, 2)


class StepTail(_Scalable):
    """The causal convolution to one channel, as what each tap makes of a column and a sum.

    A convolution with one output leaves blocked kernels idle: theirs is computed for 16 channels,
    and 15 thrown away. The products of all taps are one matrix product, and they are the history.
    """

    def __init__(self, source: eager.CausalConv1d, name: str) -> None:
        super().__init__()
        conv = source.conv
        assert conv.out_channels == conv.dilation[0] == 1
        self.taps = source.history + 1
        self.weight = constant(conv.weight.permute(2, 1, 0))  # [taps, channels, 1]
        bias = torch.zeros(self.taps)
        bias[-1] = the(Tensor, conv.bias)  # the newest column's product, never read again
        self.bias = constant(bias)
        self.state = _history(name, self.taps, source.history)

    def forward(self, x: Tensor, cursor: Cursor) -> Tensor:
        """Return ``[n]`` of ``[1, channels, n]``."""
        products = F.conv1d(x, self.weight, self.bias)
        for item in self.state:
            products = cursor.extend(item, products)
        columns = x.shape[-1]
        total = products[0, 0, :columns]
        for tap in range(1, self.taps):
            total = total + products[0, tap, tap : tap + columns]
        return total


class StepLatentUpsample(nn.Module):
    """A transposed convolution whose kernel is its stride, over ``[1, n, channels]``.

    Each input column makes ``stride`` output columns by itself: a matrix product, whose output is
    in the right order as it lies.
    """

    def __init__(self, source: eager.CausalConvTranspose1d) -> None:
        super().__init__()
        conv, stride = source.conv, source.stride
        assert conv.kernel_size[0] == stride
        self.channels = conv.out_channels
        # [cin, cout, stride] -> [stride, cout, cin]
        weight = conv.weight.permute(2, 1, 0)
        self.weight = constant(weight.reshape(stride * self.channels, conv.in_channels))
        self.bias = constant(the(Tensor, conv.bias).repeat(stride))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[1, n * stride, channels out]``; see the class."""
        return F.linear(x, self.weight, self.bias).view(1, -1, self.channels)


class StepSnake(nn.Module):
    """SnakeBeta with its two constants computed beforehand."""

    def __init__(self, source: eager.SnakeBeta) -> None:
        super().__init__()
        self.frequency = constant(source.alpha.exp()[None, :, None])
        self.gain = constant(1.0 / (source.beta.exp()[None, :, None] + eager.SNAKE_EPS))

    def scale(self, scale: Tensor) -> None:
        """Let it work on an input that is ``scale`` ``[channels]`` times as large."""
        self.frequency.div_(scale[None, :, None])
        self.gain.mul_(scale[None, :, None])

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x + gain * sin(frequency * x)**2`` of ``[1, channels, n]``."""
        s = torch.sin(x * self.frequency)
        return x + s * s * self.gain


class StepInnerSnake(nn.Module):
    """SnakeBeta between two convolutions, in fewer passes over the samples.

    ``x + g * sin(f * x)**2`` is ``(z - g * f * cos(z)) / (2 * f) + g / 2`` with ``z = 2 * f * x``.
    So the convolution in front gives ``z``, and the one behind, which has one tap and so no
    history, takes the factor into its columns and the constant into its bias: see :meth:`between`.
    """

    def __init__(self, snake: StepSnake) -> None:
        super().__init__()
        self.gain = constant(snake.gain * snake.frequency)
        self.frequency: Tensor | None = None  # of an input that was scaled again

    @classmethod
    def between(
        cls, before: StepConv1d, source: eager.SnakeBeta, behind: StepConv1d
    ) -> StepInnerSnake | StepSnake:
        """Make one, and fold its factors into its neighbours, in place.

        Where a gain is so large that the constant would take digits from the rest, this is a
        plain :class:`StepSnake`.
        """
        assert not behind.state
        snake = StepSnake(source)
        if snake.gain.max() > LARGEST_GAIN:
            return snake
        factor = 2 * snake.frequency.flatten()
        before.scale_rows(factor)
        behind.bias.add_(behind.weight.squeeze(-1) @ (snake.gain.flatten() / 2))
        behind.scale_columns(1 / factor)
        return cls(snake)

    def scale(self, scale: Tensor) -> None:
        """Let it work on an input that is ``scale`` ``[channels]`` times as large."""
        frequency = torch.ones_like(self.gain) if self.frequency is None else self.frequency
        self.frequency = constant(frequency / scale[None, :, None])
        self.gain.mul_(scale[None, :, None])

    def forward(self, x: Tensor) -> Tensor:
        """Return its part of the function for ``[1, channels, n]``; see the class."""
        angle = x if self.frequency is None else x * self.frequency
        return x - torch.cos(angle) * self.gain


def the(kind: type[T], value: object) -> T:
    """Return ``value`` with its type, which torch's containers do not tell."""
    assert isinstance(value, kind)
    return value


def constant(tensor: Tensor | None) -> nn.Parameter:
    """Return a copy of ``tensor`` as a parameter that is not trained."""
    assert tensor is not None
    return nn.Parameter(tensor.detach().clone().contiguous(), requires_grad=False)


def _history(name: str, channels: int, columns: int) -> tuple[StateTensor, ...]:
    return (StateTensor(name, (1, channels, columns)),) if columns else ()
