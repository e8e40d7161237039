"""Share a grid fairly between channels, without changing what the decoder computes.

A tensor on one 8-bit grid serves its loudest channel; the others have fewer steps left. SnakeBeta
commutes with a positive scale ``s`` per channel: where ``snake(x; a, g) = x + g * sin(a * x)**2``,
``s * snake(x; a, g) = snake(s * x; a / s, g * s)``. So the scale goes into the rows of the
convolution before it, into its two constants, and out of the columns of the convolution behind it,
and no operator is added. A residual stream carries one scale through all its units.

With level ``r`` and a column of norm ``w`` behind it, a channel's noise counts ``(w / s)**2`` and
its share of the range ``(r * s)**2``. The product of both sums is least at ``s**2 = w / r``. Equal
levels, ``s = 1 / r``, would be wrong: they spend steps on quiet channels that nobody listens to,
which cost a trained decoder 20 dB in its last block.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from codecstream_export.step import StepDecoder, StepResidualUnit, StepUpsampleBlock
from codecstream_export.step_layers import StepConv1d, StepConvTranspose1d, StepTail

__all__ = ["equalize"]

MAX_FACTOR = 16.0  # a channel that was silent in the calibration must not take over the grid


def equalize(
    step: StepDecoder, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
) -> None:
    """Fold scales through ``step``, in place.

    Args:
        step: The float step module.
        inputs: Level (root mean square) per channel of each convolution's input, by its name.
        outputs: The same of its output.
    """
    blocks = [block for block in step.blocks if isinstance(block, StepUpsampleBlock)]
    scale = _scales(outputs["head"], _column_norms(blocks[0].upsample))
    step.head.scale_rows(scale)
    blocks[0].act.scale(scale)
    blocks[0].upsample.scale_columns(1 / scale)
    for i, block in enumerate(blocks):
        units = {
            f"blocks.{i}.units.{j}": unit
            for j, unit in enumerate(block.units)
            if isinstance(unit, StepResidualUnit)
        }
        last = i + 1 == len(blocks)
        after = step.tail if last else blocks[i + 1].upsample
        levels = torch.stack([inputs[f"{name}.conv1"] for name in units])
        readers = [*(unit.conv1 for unit in units.values()), after]
        shares = torch.stack([_shares(_column_norms(reader)) for reader in readers])
        stream = _scales(_mean_square(levels), _mean_square(shares))
        block.upsample.scale_rows(stream)
        for unit_name, unit in units.items():
            inner = _scales(outputs[f"{unit_name}.conv1"], _column_norms(unit.conv2))
            unit.act1.scale(stream)
            unit.conv1.scale_columns(1 / stream)
            unit.conv1.scale_rows(inner)
            unit.act2.scale(inner)
            unit.conv2.scale_columns(1 / inner)
            unit.conv2.scale_rows(stream)
        (step.snake if last else blocks[i + 1].act).scale(stream)
        after.scale_columns(1 / stream)


def _scales(levels: Tensor, columns: Tensor) -> Tensor:
    """Return the factors of the channels, with a geometric mean of about 1."""
    scale = (columns.clamp(min=1e-12) / levels.clamp(min=1e-12)).sqrt()
    scale = scale / scale.log().mean().exp()
    return scale.clamp(1 / MAX_FACTOR, MAX_FACTOR)


def _column_norms(conv: StepConv1d | StepConvTranspose1d | StepTail) -> Tensor:
    return conv.weight.square().sum((0, 2)).sqrt()


def _shares(norms: Tensor) -> Tensor:
    return norms / norms.square().sum().sqrt().clamp(min=1e-12)


def _mean_square(values: Tensor) -> Tensor:
    return values.square().mean(0).sqrt()
