"""Give all channels of a tensor the same spread, without changing what the decoder computes.

A tensor on one 8-bit grid serves its loudest channel; the others have fewer steps left. SnakeBeta
commutes with a positive scale ``s`` per channel: where ``snake(x; a, g) = x + g * sin(a * x)**2``,
``s * snake(x; a, g) = snake(s * x; a / s, g * s)``. So the scale goes into the rows of the
convolution before it, into its two constants, and out of the columns of the convolution behind it,
and no operator is added. A residual stream carries one scale through all its units.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from codecstream_export.step import (
    StepConv1d,
    StepConvTranspose1d,
    StepDecoder,
    StepResidualUnit,
    StepSnake,
    StepUpsampleBlock,
)

__all__ = ["equalize"]

MAX_FACTOR = 16.0  # a channel that was silent in the calibration must not take over the grid


def equalize(
    step: StepDecoder, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
) -> None:
    """Fold scales through ``step``, in place.

    Args:
        step: The float step module.
        inputs: Spread (standard deviation) per channel of each convolution's input, by its name.
        outputs: The same of its output.
    """
    blocks = [block for block in step.blocks if isinstance(block, StepUpsampleBlock)]
    scale = _scales(outputs["head"])
    _scale_rows(step.head, scale)
    _scale_snake(blocks[0].act, scale)
    _scale_columns(blocks[0].upsample, scale)
    for i, block in enumerate(blocks):
        units = {
            f"blocks.{i}.units.{j}": unit
            for j, unit in enumerate(block.units)
            if isinstance(unit, StepResidualUnit)
        }
        stream = _scales(torch.stack([inputs[f"{name}.conv1"] for name in units]).mean(0))
        _scale_rows(block.upsample, stream)
        for unit_name, unit in units.items():
            inner = _scales(outputs[f"{unit_name}.conv1"])
            _scale_snake(unit.act1, stream)
            _scale_columns(unit.conv1, stream)
            _scale_rows(unit.conv1, inner)
            _scale_snake(unit.act2, inner)
            _scale_columns(unit.conv2, inner)
            _scale_rows(unit.conv2, stream)
        last = i + 1 == len(blocks)
        _scale_snake(step.snake if last else blocks[i + 1].act, stream)
        _scale_columns(step.tail if last else blocks[i + 1].upsample, stream)


def _scales(spread: Tensor) -> Tensor:
    """Return factors that make the spreads equal, with a geometric mean of about 1."""
    spread = spread.clamp(min=1e-12)
    middle = spread.log().mean().exp()
    return (middle / spread).clamp(1 / MAX_FACTOR, MAX_FACTOR)


def _scale_rows(conv: StepConv1d | StepConvTranspose1d, scale: Tensor) -> None:
    if isinstance(conv, StepConvTranspose1d):  # rows are (channel, step)
        scale = scale.repeat_interleave(conv.stride)
    conv.weight.mul_(scale[:, None, None])
    conv.bias.mul_(scale)


def _scale_columns(conv: StepConv1d | StepConvTranspose1d, scale: Tensor) -> None:
    conv.weight.div_(scale[None, :, None])


def _scale_snake(snake: StepSnake, scale: Tensor) -> None:
    snake.frequency.div_(scale[None, :, None])
    snake.gain.mul_(scale[None, :, None])
