"""Measures of how far one signal is from another; numpy only.

:class:`Comparison` takes both signals piece by piece and keeps a few numbers per 80 ms, so an hour
costs megabytes. Its figures do not depend on the pieces.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "MAX_LAG_SAMPLES",
    "Alignment",
    "Measured",
    "Seam",
    "Signals",
    "align",
    "level_dbfs",
    "ratio_db",
    "slice_snr_db",
    "snr_db",
]

Signal = NDArray[np.float32]
Values = NDArray[np.float64]
Flags = NDArray[np.bool_]

MAX_LAG_SAMPLES = 4000
_ALIGN_SAMPLES = 1 << 20  # 44 s at 24 kHz are enough to find a lag
WINDOW_SAMPLES = 80  # 3.3 ms: where steps are looked for
_LOCAL_WINDOWS = 6  # on either side of a step, for the level around it: 20 ms
MIN_LOCAL_RMS = 1e-3  # -60 dBFS: a step in near silence is held against this
_MIN_STEP = 1e-9  # relative; below it a step is none
QUIET_RMS = 10 ** (-55 / 20)
_MIN_USUAL_WINDOWS = 100  # of a kind; of fewer, all windows say what is usual
_USUAL_PERCENTILE = 99.9
_INAUDIBLE_DB = 1000.0  # more than any excess
_STFT_SAMPLES, _STFT_HOP = 960, 480  # 40 ms, Hann, at 24 kHz
_MIN_BIN_POWER = 1e-10  # -100 dB below a full-scale sine: what is quieter in both is equal
_MIN_POWER = 1e-9  # -90 dBFS, about the last bit of 16


def snr_db(reference: Signal, output: Signal) -> float:
    """Return the signal-to-noise ratio in dB; ``inf`` where both are equal.

    Raises:
        ValueError: The lengths differ.
    """
    if reference.size == output.size == 0:
        return math.inf
    return float(slice_snr_db(reference, output, max(1, reference.size))[0])


def slice_snr_db(reference: Signal, output: Signal, slice_samples: int) -> Values:
    """Return the ratio in dB of each slice of ``slice_samples`` samples; NaN counts as -inf."""
    if reference.shape != output.shape or reference.size % slice_samples:
        raise ValueError(f"cannot compare {reference.shape} with {output.shape} samples")
    signal = reference.astype(np.float64).reshape(-1, slice_samples)
    error = output.astype(np.float64).reshape(-1, slice_samples) - signal
    finite: Flags = np.logical_and.reduce(np.isfinite(error), axis=1)
    with np.errstate(invalid="ignore"):
        return ratio_db((signal**2).sum(axis=1), (error**2).sum(axis=1), finite)


def ratio_db(signal: Values, noise: Values, finite: Flags) -> Values:
    """Return ``10 log10(signal / noise)``; inf without noise, -inf where not ``finite``."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio: Values = 10 * np.log10(signal / noise)
    ratio[noise == 0] = np.inf
    ratio[~finite] = -np.inf
    return ratio


def level_dbfs(power: Values) -> Values:
    """Return mean powers as dB of full scale, not below -90."""
    level: Values = 10 * np.log10(power + _MIN_POWER)
    return level


@dataclass(frozen=True, slots=True)
class Alignment:
    """By how many samples the output is late, and how alike both are then.

    Attributes:
        lag_samples: Positive where the output comes later than the reference.
        correlation: Normalised cross-correlation at that lag, from -1 to 1.
        correlation_unshifted: The same without a shift.
    """

    lag_samples: int
    correlation: float
    correlation_unshifted: float


def align(
    reference: Signal, output: Signal, max_lag_samples: int = MAX_LAG_SAMPLES
) -> Alignment | None:
    """Return the lag at which the output is most like the reference or its negative.

    The first 44 s decide. Of equal lags, as a tone has them, the smallest counts.

    Returns:
        None where one of both is silent or not finite.
    """
    x, y = (signal[:_ALIGN_SAMPLES].astype(np.float64) for signal in (reference, output))
    if not (np.isfinite(x).all() and np.isfinite(y).all() and x.any() and y.any()):
        return None
    largest = min(max_lag_samples, min(x.size, y.size) - 1)
    size = 1 << (x.size + y.size - 1).bit_length()
    product = np.fft.irfft(np.conj(np.fft.rfft(x, size)) * np.fft.rfft(y, size), size)
    lags = np.arange(-largest, largest + 1)
    # At lag k, x[i] stands beside y[i + k]: only what overlaps counts.
    x_energy, y_energy = (np.concatenate(([0.0], np.cumsum(s**2))) for s in (x, y))
    first, last = np.maximum(0, -lags), np.minimum(x.size, y.size - lags)
    energy = (x_energy[last] - x_energy[first]) * (y_energy[last + lags] - y_energy[first + lags])
    # Rounding of the transform must not make a match of next to nothing.
    floor = 1e-12 * x_energy[-1] * y_energy[-1]
    correlation = np.where(energy > floor, product[lags] / np.sqrt(np.maximum(energy, floor)), 0.0)
    best = int(np.argmax(np.abs(correlation) - 1e-9 * np.abs(lags)))
    return Alignment(
        int(lags[best]), float(np.clip(correlation[best], -1, 1)), float(correlation[largest])
    )


@dataclass(frozen=True, slots=True)
class Seam:
    """The difference's step at a chunk boundary.

    Attributes:
        frame: First frame behind the boundary.
        step_db: Largest step between neighbouring samples of the difference from 3.3 ms before the
            boundary to 6.7 ms behind it, over the reference's RMS in the 40 ms around it.
        usual_db: The same away from boundaries; 99.9 % of all places have less, of those that are
            as quiet (below -55 dBFS) or as loud as this one.
        excess_db: ``step_db - usual_db``.
    """

    frame: int
    step_db: float
    usual_db: float
    excess_db: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What :class:`Signals` keeps: totals, and one value per slice or per 3.3 ms window.

    Attributes:
        slice_samples: Length of a slice, a codec frame.
        reference_samples: Length of the reference.
        output_samples: Length of the output; everything below is of the common part.
        signal: Sum of the reference's squares, per slice.
        noise: Sum of the squared difference, per slice.
        heard: Sum of the output's squares, per slice.
        product: Sum of reference times output, per slice.
        offset: Sum of the difference, per slice.
        finite: Whether both signals are finite, per slice.
        spectral_db: Log-spectral distance, per slice.
        steps: Largest step of the difference, per window.
        window_signal: Sum of the reference's squares, per window.
        max_abs_error: Largest difference of a sample, of those that are finite.
        reference_finite: Whether the reference is finite.
        nonfinite_samples: Samples of the output that are NaN or Inf.
        first_nonfinite_sample: Where, or None.
        alignment: See :func:`align`.
    """

    slice_samples: int
    reference_samples: int
    output_samples: int
    signal: Values
    noise: Values
    heard: Values
    product: Values
    offset: Values
    finite: Flags
    spectral_db: Values
    steps: Values
    window_signal: Values
    max_abs_error: float
    reference_finite: bool
    nonfinite_samples: int
    first_nonfinite_sample: int | None
    alignment: Alignment | None

    @property
    def samples(self) -> int:
        """Samples that both signals have."""
        return min(self.reference_samples, self.output_samples)

    @property
    def exact(self) -> bool:
        """Whether both signals are equal, sample by sample."""
        same = self.reference_samples == self.output_samples
        return same and bool(self.finite.all()) and not self.noise.any()

    def snr_db(self, first: int = 0, last: int | None = None) -> float:
        """Return the SNR in dB of the slices from ``first`` to before ``last``."""
        part = slice(first, last)
        if not self.finite[part].all():
            return -math.inf
        signal, noise = float(self.signal[part].sum()), float(self.noise[part].sum())
        if noise == 0:
            return math.inf
        return 10 * math.log10(signal / noise) if signal else -math.inf

    def slices_snr_db(self) -> Values:
        """Return the SNR in dB of each slice."""
        return ratio_db(self.signal, self.noise, self.finite)

    def worst_seam(self, seams: NDArray[np.int64], audible_db: float = -math.inf) -> Seam | None:
        """Return the chunk boundary where the difference jumps most above what is usual.

        Args:
            seams: First frames behind the boundaries; those outside of the signals do not count.
            audible_db: One with a larger step counts before any other.

        Returns:
            None where no boundary is left.
        """
        per_slice = self.slice_samples // WINDOW_SAMPLES
        seams = seams[(seams > 0) & (seams < len(self.signal))]
        if not seams.size:
            return None
        scores, rms = self._step_scores()
        # What a seam leaves is not only behind it: a kernel that looks ahead errs before it.
        at = (seams * per_slice)[:, np.newaxis] + np.array((-1, 0, 1))
        away = np.ones(len(scores), bool)
        away[at] = False
        # The noise of a pause is large over its level: it must not hide a click in a vowel.
        quiet = rms < QUIET_RMS
        usual = np.zeros(len(scores))
        for alike in (quiet, ~quiet):
            among = away & alike
            if np.count_nonzero(among) < _MIN_USUAL_WINDOWS:
                among = away
            if among.any():
                usual[alike] = np.percentile(scores[among], _USUAL_PERCENTILE)
        steps_db, usual_db = (
            20 * np.log10(np.maximum(values[at], _MIN_STEP)) for values in (scores, usual)
        )
        excess_db = steps_db - usual_db
        order = np.where(steps_db > audible_db, excess_db, excess_db - _INAUDIBLE_DB)
        worst, window = np.unravel_index(np.argmax(order), order.shape)
        return Seam(
            int(seams[worst]),
            float(steps_db[worst, window]),
            float(usual_db[worst, window]),
            float(excess_db[worst, window]),
        )

    def _step_scores(self) -> tuple[Values, Values]:
        """Return each window's largest step over the reference's level around it, and the level."""
        energy = np.concatenate(([0.0], np.cumsum(self.window_signal)))
        at = np.arange(len(self.steps))
        first = np.maximum(at - _LOCAL_WINDOWS, 0)
        last = np.minimum(at + _LOCAL_WINDOWS, len(self.steps))
        rms = np.sqrt((energy[last] - energy[first]) / ((last - first) * WINDOW_SAMPLES))
        scores: Values = self.steps / np.maximum(rms, MIN_LOCAL_RMS)
        return scores, rms


class Signals:
    """Takes a reference and an output piece by piece, in any order, and measures both.

    Args:
        slice_samples: Length of a slice; a multiple of 480, a codec frame by default.
    """

    def __init__(self, slice_samples: int = 1920) -> None:
        if slice_samples <= 0 or slice_samples % _STFT_HOP:
            raise ValueError(f"a slice must be a multiple of {_STFT_HOP} samples: {slice_samples}")
        self._slice = slice_samples
        self._waiting: tuple[deque[Signal], deque[Signal]] = (deque(), deque())
        self._received = [0, 0]
        self._compared = 0
        self._rows: dict[str, list[NDArray[np.generic]]] = {}
        self._start: tuple[list[Signal], list[Signal]] = ([], [])
        self._before = np.zeros((2, _STFT_HOP))  # what the next spectrum begins with
        self._error_before = 0.0
        self._max_abs_error = 0.0
        self._reference_finite = True
        self._nonfinite = 0
        self._first_nonfinite: int | None = None
        window = np.hanning(_STFT_SAMPLES + 1)[:-1]
        self._window = window * (2 / window.sum())  # a full-scale sine has magnitude 1

    def push_reference(self, pcm: Signal) -> None:
        """Append float32 ``[samples]`` to the reference."""
        self._push(0, pcm)

    def push_output(self, pcm: Signal) -> None:
        """Append float32 ``[samples]`` to the output."""
        self._push(1, pcm)

    def finish(self) -> Measured:
        """Return what was measured over the part that both signals have."""
        left = min(self._received) - self._compared
        if left > 0:  # the end of the shorter signal, filled up with zeros
            rest = self._take(left)
            self._measure(np.pad(rest, ((0, 0), (0, self._slice - left))), left)
        reference, output = (
            np.concatenate([np.empty(0, np.float32), *parts]) for parts in self._start
        )
        columns = {name: np.concatenate(rows) for name, rows in self._rows.items()}
        empty = np.empty(0)
        return Measured(
            slice_samples=self._slice,
            reference_samples=self._received[0],
            output_samples=self._received[1],
            signal=columns.get("signal", empty),
            noise=columns.get("noise", empty),
            heard=columns.get("heard", empty),
            product=columns.get("product", empty),
            offset=columns.get("offset", empty),
            finite=columns.get("finite", empty.astype(bool)),
            spectral_db=columns.get("spectral_db", empty),
            steps=columns.get("steps", empty),
            window_signal=columns.get("window_signal", empty),
            max_abs_error=self._max_abs_error,
            reference_finite=self._reference_finite,
            nonfinite_samples=self._nonfinite,
            first_nonfinite_sample=self._first_nonfinite,
            alignment=align(reference, output),
        )

    def _push(self, which: int, pcm: Signal) -> None:
        if pcm.ndim != 1:
            raise ValueError(f"a signal is float32 [samples], not {list(pcm.shape)}")
        # A copy: what is kept must not change when the caller uses its array again.
        pcm = np.array(pcm, np.float32)
        room = _ALIGN_SAMPLES + MAX_LAG_SAMPLES - self._received[which]
        if room > 0:
            self._start[which].append(pcm[:room])
        self._waiting[which].append(pcm)
        self._received[which] += pcm.size
        ready = min(self._received) - self._compared
        if ready >= self._slice:
            self._measure(self._take(ready - ready % self._slice))

    def _take(self, samples: int) -> Values:
        """Remove the next ``samples`` of both signals; return float64 ``[2, samples]``."""
        taken = np.empty((2, samples))
        for row, waiting in zip(taken, self._waiting, strict=True):
            filled = 0
            while filled < samples:
                part = waiting.popleft()
                used = part[: samples - filled]
                row[filled : filled + used.size] = used
                filled += used.size
                if used.size < part.size:
                    waiting.appendleft(part[used.size :])
        return taken

    def _measure(self, both: Values, samples: int | None = None) -> None:
        """Measure whole slices, float64 ``[2, slices * slice_samples]``."""
        finite = np.isfinite(both)
        self._reference_finite = self._reference_finite and bool(finite[0].all())
        bad = ~finite[1]
        if bad.any():
            self._nonfinite += int(np.count_nonzero(bad))
            if self._first_nonfinite is None:
                self._first_nonfinite = self._compared + int(np.argmax(bad))
        both = np.where(finite, both, 0.0)  # the slice is marked; the rest is measured without
        reference, output = both
        error = output - reference
        self._max_abs_error = max(self._max_abs_error, float(np.abs(error).max()))
        steps = np.abs(np.diff(error, prepend=self._error_before))
        if samples is not None:
            steps[samples:] = 0.0  # from the end into the filling is no step
        self._error_before = float(error[-1])

        def rows(values: Values, length: int = self._slice) -> Values:
            return values.reshape(-1, length)

        self._keep("signal", rows(reference**2).sum(axis=1))
        self._keep("noise", rows(error**2).sum(axis=1))
        self._keep("heard", rows(output**2).sum(axis=1))
        self._keep("product", rows(reference * output).sum(axis=1))
        self._keep("offset", rows(error).sum(axis=1))
        rows_finite = (finite[0] & finite[1]).reshape(-1, self._slice)
        self._keep("finite", np.logical_and.reduce(rows_finite, axis=1))
        self._keep("steps", rows(steps, WINDOW_SAMPLES).max(axis=1))
        self._keep("window_signal", rows(reference**2, WINDOW_SAMPLES).sum(axis=1))
        distance = self._spectral_distance(both)
        self._keep("spectral_db", rows(distance, self._slice // _STFT_HOP).mean(axis=1))
        self._compared += both.shape[1] if samples is None else samples

    def _spectral_distance(self, both: Values) -> Values:
        """Return the distance in dB of each pair of spectra, one per hop."""
        extended = np.concatenate((self._before, both), axis=1)
        self._before = extended[:, -_STFT_HOP:].copy()
        frames = np.lib.stride_tricks.sliding_window_view(extended, _STFT_SAMPLES, axis=1)
        parts = []
        for first in range(0, both.shape[1] // _STFT_HOP, 1024):  # in bounded memory
            chosen = frames[:, first * _STFT_HOP : (first + 1024) * _STFT_HOP : _STFT_HOP]
            power = np.abs(np.fft.rfft(chosen * self._window, axis=-1)) ** 2
            bins_db = 10 * np.log10(np.maximum(power, _MIN_BIN_POWER))
            parts.append(np.sqrt(np.mean((bins_db[1] - bins_db[0]) ** 2, axis=-1)))
        return np.concatenate(parts)

    def _keep(self, name: str, values: NDArray[np.generic]) -> None:
        self._rows.setdefault(name, []).append(values)
