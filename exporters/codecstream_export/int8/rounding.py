"""Numbers on eight bits: where a grid lies, and which of its points a weight gets.

Activations share one asymmetric grid per tensor, weights have one symmetric scale per output
channel. Ranges are chosen by the least mean squared error, which clips rare peaks, instead of by
the extremes.

x86 without VNNI multiplies unsigned by signed bytes with ``vpmaddubsw``, which adds neighbouring
products in *saturating* 16-bit arithmetic. Weights of at most 64, seven bits, cannot saturate:
``255 * (64 + 64) = 32640``. They cost 6 dB of the weights' precision, though, and how often larger
weights saturate depends on what they meet: :func:`saturation` measures it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = [
    "WEIGHT_LEVELS",
    "Grid",
    "choose_grid",
    "choose_weight_scales",
    "round_weights",
    "saturation",
    "windows",
]

WEIGHT_LEVELS = (127, 112, 96, 84, 74, 64)  # largest weight; 255 * (64 + 64) < 2**15
GRID_BINS = 8192
DAMPING = 0.01  # of the mean variance: keeps the compensation from trusting rare directions
BLOCK = 64  # columns whose corrections are applied together


@dataclass(frozen=True, slots=True)
class Grid:
    """``value = (integer - zero_point) * scale`` with integers from -128 to 127."""

    scale: float
    zero_point: int


def choose_grid(values: Tensor) -> Grid:
    """Return the grid with the least squared error for ``values`` of any shape."""
    low, high = min(float(values.min()), 0.0), max(float(values.max()), 0.0)
    if low == high:
        return Grid(1.0, 0)
    counts = torch.histc(values, GRID_BINS, low, high)  # of all values: rare peaks matter here
    width = (high - low) / GRID_BINS
    x = low + width * (torch.arange(GRID_BINS) + 0.5)
    best = (math.inf, Grid(1.0, 0))
    at_low = at_high = 1.0
    for reach, steps in ((0.45, 10), (0.045, 4), (0.01, 3)):  # coarse, then around the best
        centre_low, centre_high = at_low, at_high
        for i in range(-steps, steps + 1):
            for j in range(-steps, steps + 1):
                factor_low = centre_low + reach * i / steps
                factor_high = centre_high + reach * j / steps
                if not (0.3 <= factor_low <= 1.0 and 0.3 <= factor_high <= 1.0):
                    continue
                grid = _grid_over(low * factor_low, high * factor_high)
                error = float((counts * (_on_grid(x, grid) - x).square()).sum())
                if error < best[0]:
                    best = (error, grid)
                    at_low, at_high = factor_low, factor_high
    return best[1]


def _grid_over(low: float, high: float) -> Grid:
    scale = (high - low) / 255
    return Grid(scale, max(-128, min(127, round(-128 - low / scale))))


def _on_grid(x: Tensor, grid: Grid) -> Tensor:
    integers = torch.clamp(torch.round(x / grid.scale) + grid.zero_point, -128, 127)
    return (integers - grid.zero_point) * grid.scale


def choose_weight_scales(weight: Tensor, levels: int = WEIGHT_LEVELS[0]) -> Tensor:
    """Return the scale of each output channel with the least squared error.

    Args:
        weight: Float ``[cout, cin, taps]``.
        levels: The largest integer.
    """
    rows = weight.flatten(1)
    largest = rows.abs().amax(1).clamp(min=1e-12) / levels
    best = torch.full_like(largest, math.inf)
    scales = largest.clone()
    for factor in torch.linspace(0.6, 1.0, 11).tolist():
        candidate = (largest * factor)[:, None]
        rounded = (rows / candidate).round_().clamp_(-levels, levels)
        error = rounded.mul_(candidate).sub_(rows).square_().sum(1)
        better = error < best
        best = torch.where(better, error, best)
        scales = torch.where(better, candidate[:, 0], scales)
    return scales


def round_weights(
    weight: Tensor, scales: Tensor, inputs: Tensor | None = None, levels: int = WEIGHT_LEVELS[0]
) -> Tensor:
    """Return int8 weights ``[cout, cin, taps]``.

    With ``inputs``, each weight's rounding error is made up for by the weights that are still to
    be rounded, as far as their inputs go together (Frantar et al., "GPTQ", 2022).

    Args:
        weight: Float ``[cout, cin, taps]``.
        scales: One per output channel.
        inputs: What the weights get to see, ``[taps * cin, samples]``; see :func:`windows`.
        levels: The largest integer.
    """
    cout, cin, taps = weight.shape
    rows = weight.transpose(1, 2).flatten(1).to(torch.double, copy=True)
    size = rows.shape[1]
    step = scales.double()
    if inputs is None:
        integers = (rows / step[:, None]).round().clamp(-levels, levels)
        return integers.to(torch.int8).view(cout, taps, cin).transpose(1, 2).contiguous()
    spread = _compensation(inputs)
    integers = torch.zeros_like(rows)
    for start in range(0, size, BLOCK):
        stop = min(start + BLOCK, size)
        errors = torch.zeros(cout, stop - start, dtype=torch.double)
        for j in range(start, stop):
            rounded = (rows[:, j] / step).round().clamp(-levels, levels)
            integers[:, j] = rounded
            error = (rows[:, j] - rounded * step) / spread[j, j]
            errors[:, j - start] = error
            rows[:, j:stop] -= error[:, None] * spread[j, j:stop]
        rows[:, stop:] -= errors @ spread[start:stop, stop:]
    return integers.to(torch.int8).view(cout, taps, cin).transpose(1, 2).contiguous()


def windows(x: Tensor, taps: int, dilation: int, most: int) -> Tensor:
    """Return up to ``most`` seeded windows of ``x`` ``[cin, columns]``: ``[taps * cin, count]``."""
    count = x.shape[1] - (taps - 1) * dilation
    chosen = torch.randperm(count, generator=torch.Generator().manual_seed(0))[:most]
    return torch.cat([x[:, chosen + tap * dilation] for tap in range(taps)])


def saturation(integers: Tensor, inputs: Tensor, grid: Grid) -> float:
    """Return the noise of saturating 16-bit sums, as a share of the outputs' variance.

    Emulates ``vpmaddubsw``: entries ``2 i`` and ``2 i + 1`` of the order (tap, input channel) are
    multiplied as unsigned input by signed weight and added in 16 bits.

    Args:
        integers: Int8 weights ``[cout, cin, taps]``.
        inputs: What they meet, float ``[taps * cin, samples]``; see :func:`windows`.
        grid: The grid of the inputs.
    """
    rows = integers.transpose(1, 2).flatten(1).to(torch.float32)
    unsigned = torch.clamp(torch.round(inputs / grid.scale) + grid.zero_point + 128, 0, 255)
    if len(unsigned) % 2:  # the kernels fill up with zeros
        rows, unsigned = F.pad(rows, (0, 1)), F.pad(unsigned, (0, 0, 0, 1))
    noise = torch.zeros(len(rows), unsigned.shape[1])
    for i in range(0, len(unsigned), 2):  # float32 holds these integers exactly
        pair = rows[:, i : i + 2] @ unsigned[i : i + 2]
        noise += pair - pair.clamp(-(2**15), 2**15 - 1)
    power = (rows @ (unsigned - grid.zero_point - 128)).var(1)
    return float((noise.square().mean(1) / power.clamp(min=1e-12)).mean())


def _compensation(inputs: Tensor) -> Tensor:
    """Upper Cholesky factor of the inverse covariance: how an error spreads to later columns."""
    centred = inputs - inputs.mean(1, keepdim=True)  # the bias takes care of the mean
    covariance = (centred @ centred.T).double() / centred.shape[1]
    damping = DAMPING * covariance.diagonal().mean().clamp(min=1e-12)
    covariance += damping * torch.eye(len(covariance), dtype=torch.double)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(covariance))
    spread: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return spread
