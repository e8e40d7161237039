"""The measures of parity, against values that can be computed by hand."""

from __future__ import annotations

import dataclasses
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from codecstream_parity import align, slice_snr_db, snr_db
from codecstream_parity.measures import Measured, Signals


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


# Piece by piece


def noise(samples: int, seed: int = 0, level: float = 0.1) -> NDArray[np.float32]:
    return (level * np.random.default_rng(seed).standard_normal(samples)).astype(np.float32)


def measure(reference: NDArray[np.float32], output: NDArray[np.float32]) -> Measured:
    signals = Signals()
    signals.push_reference(reference)
    signals.push_output(output)
    return signals.finish()


def pieces(total: int, source: random.Random) -> list[int]:
    sizes = []
    while total > 0:
        sizes.append(min(source.choice([1, 79, 480, 1919, 1920, 1921, 5000, 40_000]), total))
        total -= sizes[-1]
    return sizes


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.tuples(st.integers(0, 30_000), st.integers(0, 30_000)),
    bad=st.booleans(),
)
def test_how_signals_come_in_pieces_changes_no_figure(
    seed: int, lengths: tuple[int, int], bad: bool
) -> None:
    source = random.Random(seed)
    reference, output = (noise(length, seed + i) for i, length in enumerate(lengths))
    if bad and output.size:
        output[source.randrange(output.size)] = np.nan
    whole = measure(reference, output)
    signals = Signals()
    sides = [(signals.push_reference, reference), (signals.push_output, output)]
    steps = [(i, size) for i in (0, 1) for size in pieces(lengths[i], source)]
    source.shuffle(steps)
    given_away = [0, 0]
    for which, size in steps:
        push, signal = sides[which]
        push(signal[given_away[which] : given_away[which] + size])
        given_away[which] += size
    streamed = signals.finish()
    for field in dataclasses.fields(Measured):
        have, want = getattr(streamed, field.name), getattr(whole, field.name)
        assert np.array_equal(have, want) if isinstance(want, np.ndarray) else have == want


def test_a_caller_may_use_its_array_again() -> None:
    reference, signals = noise(3 * 1920), Signals()
    buffer = np.empty(1000, np.float32)
    for start in range(0, 3000, 1000):
        buffer[:] = reference[start : start + 1000]
        signals.push_output(buffer)
    buffer[:] = 0
    signals.push_reference(reference[:3000])
    assert signals.finish().exact


def test_sums_by_hand() -> None:
    reference = np.full(2 * 1920, 0.5, np.float32)
    output = reference.copy()
    output[1920:] = 0.25
    found = measure(reference, output)
    assert found.signal.tolist() == [480, 480]
    assert found.noise.tolist() == [0, 120]
    assert found.heard.tolist() == [480, 120]
    assert found.product.tolist() == [480, 240]
    assert found.offset.tolist() == [0, -480]
    assert found.max_abs_error == 0.25
    assert found.slices_snr_db().tolist() == [math.inf, pytest.approx(10 * math.log10(4))]
    assert found.snr_db() == pytest.approx(10 * math.log10(8))
    assert found.snr_db(0, 1) == math.inf


@pytest.mark.parametrize("shape", [(10, 1), ()])
def test_a_signal_has_one_dimension(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="a signal is float32"):
        Signals().push_output(np.zeros(shape, np.float32))


@pytest.mark.parametrize("samples", [0, -1920, 100])
def test_slices_hold_whole_spectra(samples: int) -> None:
    with pytest.raises(ValueError, match="multiple of 480"):
        Signals(samples)


# Lag


@pytest.mark.parametrize("lag", [0, 1, 7, 555, 1920, 4000])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("late", [True, False])
def test_a_lag_is_found(lag: int, sign: int, late: bool) -> None:
    signal = noise(20_000)
    shifted = np.concatenate((noise(lag, 1), signal))
    pair = (signal, sign * shifted) if late else (shifted, sign * signal)
    found = align(*pair)
    assert found is not None
    assert found.lag_samples == (lag if late else -lag)
    assert found.correlation == pytest.approx(sign, abs=1e-6)


def test_a_lag_beyond_the_largest_is_not_found() -> None:
    signal = noise(20_000)
    found = align(signal, np.concatenate((noise(4001, 1), signal)))
    assert found is not None
    assert abs(found.correlation) < 0.1


def test_of_equal_lags_the_smallest_counts() -> None:
    tone = np.sin(2 * np.pi * np.arange(24_000) / 100).astype(np.float32)
    found = align(tone, tone)
    assert found is not None
    assert (found.lag_samples, found.correlation) == (0, pytest.approx(1))


def test_correlation_by_hand() -> None:
    """Half of one signal is the other, half is as loud and has nothing to do with it."""
    same, other = np.array([1, 1, -1, -1]), np.array([1, -1, 1, -1])
    found = align(np.tile(same, 100), np.tile(same + other, 100), max_lag_samples=0)
    assert found is not None
    assert found.correlation == pytest.approx(1 / math.sqrt(2))


@pytest.mark.parametrize("bad", [np.zeros(100), np.full(100, np.nan), np.empty(0)])
def test_there_is_no_lag_to_silence(bad: NDArray[np.float32]) -> None:
    assert align(bad.astype(np.float32), noise(100)) is None
    assert align(noise(100), bad.astype(np.float32)) is None


# Seams


def test_a_seam_by_hand() -> None:
    """A constant 0.5 with a step of 0.05 in the difference: 20 dB below the level around it."""
    reference = np.full(10 * 1920, 0.5, np.float32)
    output = reference.copy()
    output[3 * 1920 :] += 0.05
    seam = measure(reference, output).worst_seam(np.array([2, 3, 7]))
    assert seam is not None
    assert seam.frame == 3
    assert seam.step_db == pytest.approx(-20, abs=1e-3)
    assert seam.usual_db == pytest.approx(-180)
    assert seam.excess_db == pytest.approx(160, abs=1e-3)


def test_a_step_away_from_seams_is_what_is_usual() -> None:
    """The same step in every window: no seam is worse than the rest."""
    reference = np.full(20 * 1920, 0.5, np.float32)
    steps = np.zeros(20 * 24)
    steps[::2] = 0.05
    output = reference + np.repeat(steps, 80).astype(np.float32)
    seam = measure(reference, output).worst_seam(np.arange(1, 20))
    assert seam is not None
    assert seam.excess_db == pytest.approx(0, abs=1e-6)


@settings(deadline=None, max_examples=30)
@given(step=st.floats(0.005, 0.3), frame=st.integers(1, 39), length=st.integers(2, 800))
def test_a_click_at_a_seam_stands_out_of_noise(step: float, frame: int, length: int) -> None:
    """Also where its end is away from any seam, and so a part of what is usual there."""
    reference = noise(40 * 1920)
    output = reference + noise(reference.size, 1, level=1e-4)
    click = slice(frame * 1920, frame * 1920 + length)
    output[click] += np.float32(step)
    seam = measure(reference, output).worst_seam(np.arange(1, 40))
    assert seam is not None
    assert seam.frame == frame
    assert seam.excess_db > 10
    assert seam.step_db == pytest.approx(20 * math.log10(step / 0.1), abs=2)


@pytest.mark.parametrize("at", [-80, -40, -2, -1, 0, 1, 79, 100, 158])
def test_a_click_of_one_sample_beside_a_seam_is_its_seams(at: int) -> None:
    """Before it as well: the end of a chunk whose kernels look ahead."""
    reference = noise(40 * 1920)
    output = reference + noise(reference.size, 1, level=1e-3)
    output[17 * 1920 + at] += np.float32(0.04)
    seam = measure(reference, output).worst_seam(np.arange(1, 40, 4))
    assert seam is not None
    assert seam.frame == 17
    assert seam.excess_db > 10


@settings(deadline=None, max_examples=5)
@given(seed=st.integers(0, 1000), every=st.integers(1, 25))
def test_seams_of_noise_are_as_usual(seed: int, every: int) -> None:
    reference = noise(600 * 1920)
    output = reference + noise(reference.size, seed + 1, level=1e-3)
    seam = measure(reference, output).worst_seam(np.arange(every, 600, every))
    assert seam is not None
    assert seam.excess_db < 3


@pytest.mark.parametrize("seams", [[], [0], [10], [-1, 99]])
def test_boundaries_outside_are_none(seams: list[int]) -> None:
    reference = noise(10 * 1920)
    assert measure(reference, reference).worst_seam(np.array(seams, np.int64)) is None


def test_the_end_is_no_step() -> None:
    """A signal that ends within a slice is filled up with zeros: that is no click."""
    reference = np.full(10 * 1920 + 700, 0.5, np.float32)
    found = measure(reference, reference * np.float32(1.1))
    assert found.steps[10 * 24 :].max() == 0


# Spectra


def test_log_spectral_distance_by_hand() -> None:
    """Twice as loud is 6 dB in every bin that is not below the floor in both."""
    reference = noise(20 * 1920)
    found = measure(reference, 2 * reference)
    assert found.spectral_db.mean() == pytest.approx(20 * math.log10(2), abs=1e-3)


def test_what_is_too_quiet_to_hear_has_no_spectrum() -> None:
    found = measure(noise(20 * 1920, level=1e-7), np.zeros(20 * 1920, np.float32))
    assert found.spectral_db.max() == 0


def test_an_hour_takes_little_memory() -> None:
    """Four minutes, as what is kept per slice is the same for all."""
    signals, slice_ = Signals(), noise(1920)
    for _ in range(3000):
        signals.push_reference(slice_)
        signals.push_output(slice_)
    found = signals.finish()
    kept = sum(
        value.nbytes
        for field in dataclasses.fields(Measured)
        if isinstance(value := getattr(found, field.name), np.ndarray)
    )
    assert kept / 3000 * 45_000 < 25e6
