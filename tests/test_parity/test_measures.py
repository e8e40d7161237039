"""The measures of parity, against values that can be computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from codecstream_parity import slice_snr_db, snr_db


def samples(*values: float) -> NDArray[np.float32]:
    return np.array(values, np.float32)


@pytest.mark.parametrize(
    ("reference", "output", "expected"),
    [
        ((1, 1, 1, 1), (1.5, 0.5, 1.5, 0.5), 10 * math.log10(4)),  # error half the signal
        ((1, -1), (0.875, -0.875), 20 * math.log10(8)),
        ((3, 4), (3, 3), 10 * math.log10(25)),  # 25 / 1
        ((1, 0, 0, 0), (1, 1, 0, 0), 0.0),  # as much error as signal
        ((1, 1), (-1, -1), -10 * math.log10(4)),  # inverted
        ((1, 1), (0, 0), 0.0),  # silence
        ((0, 0), (1, 1), -math.inf),  # sound where there should be none
        ((0, 0), (0, 0), math.inf),
        ((0.25, -0.5), (0.25, -0.5), math.inf),
    ],
)
def test_values_computed_by_hand(
    reference: tuple[float, ...], output: tuple[float, ...], expected: float
) -> None:
    assert snr_db(samples(*reference), samples(*output)) == pytest.approx(expected, abs=1e-9)


def test_nothing_equals_nothing() -> None:
    assert snr_db(samples(), samples()) == math.inf


@settings(deadline=None)
@given(
    level_db=st.floats(-20, 100),
    gain=st.floats(0.001, 1),
    seed=st.integers(0, 1000),
    frames=st.integers(1, 4),
)
def test_noise_of_known_level_is_measured(
    level_db: float, gain: float, seed: int, frames: int
) -> None:
    source = np.random.default_rng(seed)
    signal, noise = source.standard_normal((2, frames * 1920))
    signal *= gain
    noise *= 10 ** (-level_db / 20) * np.linalg.norm(signal) / np.linalg.norm(noise)
    # Double precision: the level, not float32's own noise, is what is under test.
    assert snr_db(signal, signal + noise) == pytest.approx(level_db, abs=0.1)
    assert snr_db(signal.astype(np.float32), (signal + noise).astype(np.float32)) == pytest.approx(
        level_db, abs=0.1
    )


def test_one_bad_slice_shows_in_its_own_slice_only() -> None:
    reference = np.ones(4 * 1920, np.float32)
    output = reference.copy()
    output[1920 : 2 * 1920] = 0.5
    expected = [math.inf, 20 * math.log10(2), math.inf, math.inf]
    assert slice_snr_db(reference, output, 1920).tolist() == pytest.approx(expected)
    assert snr_db(reference, output) == pytest.approx(10 * math.log10(4 / 0.25))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("reference", [0.0, 1.0])
def test_what_is_not_a_number_is_as_bad_as_can_be(value: float, reference: float) -> None:
    expected = np.full(4, reference, np.float32)
    output = expected.copy()
    output[1] = value
    assert snr_db(expected, output) == -math.inf
    assert slice_snr_db(expected, output, 2).tolist() == [-math.inf, math.inf]


def test_a_reference_that_is_not_a_number_is_no_match_for_itself() -> None:
    reference = samples(1, np.nan)
    assert snr_db(reference, reference) == -math.inf


@pytest.mark.parametrize(("reference", "output"), [(4, 3), (3, 4), (0, 1), (1920, 1919)])
def test_lengths_must_agree(reference: int, output: int) -> None:
    with pytest.raises(ValueError, match=rf"cannot compare \({reference},\) with \({output},\)"):
        snr_db(np.ones(reference, np.float32), np.ones(output, np.float32))


def test_slices_must_divide_the_length() -> None:
    with pytest.raises(ValueError, match="cannot compare"):
        slice_snr_db(np.ones(10, np.float32), np.ones(10, np.float32), 3)
