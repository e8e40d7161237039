"""Measures of how far one signal is from another; numpy only."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

__all__ = ["slice_snr_db", "snr_db"]


def snr_db(reference: NDArray[np.float32], output: NDArray[np.float32]) -> float:
    """Return the signal-to-noise ratio in dB; ``inf`` where both are equal.

    Raises:
        ValueError: The lengths differ.
    """
    if reference.size == output.size == 0:
        return math.inf
    return float(slice_snr_db(reference, output, max(1, reference.size))[0])


def slice_snr_db(
    reference: NDArray[np.float32], output: NDArray[np.float32], slice_samples: int
) -> NDArray[np.float64]:
    """Return the ratio in dB of each slice of ``slice_samples`` samples; NaN counts as -inf."""
    if reference.shape != output.shape or reference.size % slice_samples:
        raise ValueError(f"cannot compare {reference.shape} with {output.shape} samples")
    signal = reference.astype(np.float64).reshape(-1, slice_samples)
    error = output.astype(np.float64).reshape(-1, slice_samples) - signal
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio: NDArray[np.float64] = 10 * np.log10((signal**2).sum(axis=1) / (error**2).sum(axis=1))
    ratio[~np.isfinite(error).all(axis=1)] = -np.inf
    ratio[(error == 0).all(axis=1)] = np.inf
    return ratio
