"""Static int8 convolutions for the step module.

A quantised convolution is written as quantise and dequantise operators around a float one, with
its weights stored as int8. ``torch.export`` keeps them, ONNX Runtime runs the group as one
``QLinearConv``, XNNPACK as one convolution with a scale per channel: one module for all runtimes.

Which layers are worth it is decided in :mod:`codecstream_export.int8.sensitivity`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.ao.quantization.fx._decomposed  # registers torch.ops.quantized_decomposed
from torch import Tensor, nn
from torch.nn import functional as F

from codecstream_export.int8.rounding import (
    WEIGHT_LEVELS,
    Grid,
    choose_grid,
    choose_weight_scales,
    round_weights,
    saturation,
    windows,
)
from codecstream_export.step import StepDecoder, decode_in_chunks
from codecstream_export.step_layers import (
    Cursor,
    StepConv1d,
    StepConvTranspose1d,
    in_order,
)

__all__ = ["QuantizedConv1d", "convolutions", "observe", "quantize_layers", "replaced"]

# Above this many inputs per output the compensation takes minutes and needs a long calibration.
MAX_COMPENSATED = 4096

# Weights get a smaller range where they would otherwise add more noise than this by saturating on
# x86 without VNNI: a share of the layer's output, 55 dB; the grids cost about 37.
MAX_SATURATION = 3e-6
SATURATION_WINDOWS, SATURATION_CHANNELS = 128, 96

_OPS = torch.ops.quantized_decomposed
Convolution = StepConv1d | StepConvTranspose1d


class QuantizedConv1d(nn.Module):
    """A causal convolution with int8 weights between two int8 grids; state stays float32.

    Takes the place of a :class:`~codecstream_export.step_layers.StepConv1d` or, with a stride, of a
    :class:`~codecstream_export.step_layers.StepConvTranspose1d`.
    """

    weight: Tensor
    scales: Tensor
    zeros: Tensor
    bias: Tensor

    def __init__(
        self,
        source: Convolution,
        weight: Tensor,
        scales: Tensor,
        bias: Tensor,
        before: Grid,
        after: Grid,
    ) -> None:
        super().__init__()
        self.state = source.state
        self.stride = getattr(source, "stride", 1)
        self.dilation = getattr(source, "dilation", 1)
        self.channels = len(scales) // self.stride
        self.before, self.after = before, after
        self.register_buffer("weight", weight)
        self.register_buffer("scales", scales)
        self.register_buffer("zeros", torch.zeros(len(scales), dtype=torch.int64))
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor, cursor: Cursor) -> Tensor:
        """Convolve ``[1, cin, n]`` behind its history; see the class."""
        for item in self.state:
            x = cursor.extend(item, x)
        weight = _OPS.dequantize_per_channel(
            self.weight, self.scales, self.zeros, 0, -127, 127, torch.int8
        )
        y = F.conv1d(_through(x, self.before), weight, self.bias, dilation=self.dilation)
        y = _through(y, self.after)
        return in_order(y, self.channels) if self.stride > 1 else y


def convolutions(step: StepDecoder) -> dict[str, Convolution]:
    """Return the float convolutions of ``step`` by their dotted names, in its order."""
    return {
        name: module
        for name, module in step.named_modules()
        if isinstance(module, (StepConv1d, StepConvTranspose1d))
    }


def observe(
    step: StepDecoder, codes: Tensor, names: Sequence[str]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield each convolution's name, input with history and output: ``[channels, columns]``.

    Args:
        step: The step module.
        codes: What to decode, int64 ``[frames, codebooks]``.
        names: The convolutions, of :func:`convolutions`.
    """
    groups: dict[str, list[str]] = {}
    for name in names:  # one block's tensors at a time: all of them take gigabytes
        groups.setdefault(".".join(name.split(".")[:2]), []).append(name)
    for group in groups.values():
        seen: dict[str, tuple[Tensor, Tensor]] = {}
        layers = convolutions(step)
        with replaced(step, {name: _Watched(layers[name], seen, name) for name in group}):
            decode_in_chunks(step, codes, [len(codes)])
        for name in group:
            yield (name, *seen.pop(name))


def quantize_layers(
    step: StepDecoder, codes: Tensor, names: Sequence[str]
) -> dict[str, QuantizedConv1d]:
    """Return an int8 layer for each convolution of ``names``, calibrated on ``codes``."""
    layers = convolutions(step)
    return {name: _quantized(layers[name], x, y) for name, x, y in observe(step, codes, names)}


@contextmanager
def replaced(step: StepDecoder, layers: Mapping[str, nn.Module]) -> Iterator[None]:
    """Put ``layers`` in the place of those with the same names while the context lasts."""
    old = {name: put(step, name, layer) for name, layer in layers.items()}
    try:
        yield
    finally:
        for name, layer in old.items():
            put(step, name, layer)


def put(step: StepDecoder, name: str, layer: nn.Module) -> nn.Module:
    """Put ``layer`` in the place of the one called ``name``; return that one."""
    parent, _, leaf = name.rpartition(".")
    place = step.get_submodule(parent)
    old = place.get_submodule(leaf)
    setattr(place, leaf, layer)
    return old


def _quantized(conv: Convolution, x: Tensor, y: Tensor) -> QuantizedConv1d:
    weight = conv.weight.detach()
    dilation = conv.dilation if isinstance(conv, StepConv1d) else 1
    _, cin, taps = weight.shape
    size = cin * taps
    before = choose_grid(x)
    seen = windows(x, taps, dilation, 2 * size + 2000)
    compensate = size <= MAX_COMPENSATED and seen.shape[1] >= 1.5 * size
    levels = _levels(weight, seen[:, :SATURATION_WINDOWS], before)
    scales = choose_weight_scales(weight, levels)
    integers = round_weights(weight, scales, seen if compensate else None, levels)
    lost = (weight - integers * scales[:, None, None]).transpose(1, 2).flatten(1)
    # The mean input's share of what rounding takes away is a constant: the bias gives it back.
    bias = conv.bias.detach() + lost @ seen.mean(1)
    return QuantizedConv1d(conv, integers, scales, bias, before, choose_grid(y))


def _levels(weight: Tensor, seen: Tensor, grid: Grid) -> int:
    """Return the largest weight with which sums hardly saturate, by a sample of the channels."""
    some = weight[:: max(1, len(weight) // SATURATION_CHANNELS)]
    for levels in WEIGHT_LEVELS[:-1]:
        integers = round_weights(some, choose_weight_scales(some, levels), levels=levels)
        if saturation(integers, seen, grid) <= MAX_SATURATION:
            return levels
    return WEIGHT_LEVELS[-1]


def _through(x: Tensor, grid: Grid) -> Tensor:
    settings = (grid.scale, grid.zero_point, -128, 127, torch.int8)
    y: Tensor = _OPS.dequantize_per_tensor(_OPS.quantize_per_tensor(x, *settings), *settings)
    return y


class _Watched(nn.Module):
    """A convolution that notes what goes in, history included, and what comes out."""

    def __init__(
        self, source: Convolution, seen: dict[str, tuple[Tensor, Tensor]], name: str
    ) -> None:
        super().__init__()
        self.source = [source]  # in a list: not a part, whose state would count twice
        self.seen, self.name = seen, name

    def forward(self, x: Tensor, cursor: Cursor) -> Tensor:
        (source,) = self.source
        y: Tensor = source(x, cursor)
        joined = x
        for item in source.state:
            joined = torch.cat((torch.zeros(item.shape), x), dim=-1)
        after = y
        if isinstance(source, StepConvTranspose1d):  # back to what the convolution itself gives
            after = y.transpose(1, 2).reshape(1, -1, source.stride * source.channels)
            after = after.transpose(1, 2)
        self.seen[self.name] = (joined[0], after[0])
        return y
