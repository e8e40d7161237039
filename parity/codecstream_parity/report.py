"""A verdict on an output: every figure, every floor that it missed, and what looks wrong.

>>> import numpy as np
>>> from codecstream_parity import compare
>>> reference = np.sin(np.arange(19_200) / 7).astype(np.float32)
>>> report = compare(reference, reference * np.float32(0.5))
>>> report.passed, round(report.snr_db, 2), round(report.gain_db, 2)
(False, 6.02, -6.02)
>>> report.reasons[0]
'the output is 6.02 dB quieter than the reference'
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from codecstream_parity.floors import FLOORS, Floors
from codecstream_parity.measures import Measured, Seam, Signals, level_dbfs

__all__ = ["Report", "Slice", "compare", "judge", "seams_of"]

Wrong = tuple[str, str]  # a figure's name, and the reason in words

QUIET_DBFS = -55.0  # below it a slice's SNR says nothing: its level is compared instead
MIN_REFERENCE_RMS = 1e-4
EDGE_S = 0.16  # onset and tail
MINUTE_S = 60.0
ALIKE = 0.9  # correlation above which a shift, a gain or a polarity is what is wrong
RELATED = 0.5  # correlation below which a lag means nothing
# Transposed convolutions of kernel 2s and stride s, s = 8, 5, 4, 3, whose tails were not cut:
# ((8 * 5 + 5) * 4 + 4) * 3 + 3.
UNTRIMMED_SAMPLES = 555

AT_LEAST = (
    "snr_db",
    "worst_slice_snr_db",
    "slice_p1_snr_db",
    "onset_snr_db",
    "tail_snr_db",
    "drift_db",
)
AT_MOST = (
    "max_abs_error",
    "quiet_level_db",
    "gain_db",
    "dc_offset",
    "log_spectral_distance_db",
    "lag_samples",
)


@dataclass(frozen=True, slots=True)
class Slice:
    """One codec frame's time, 80 ms: its index, where it begins, and its SNR."""

    frame: int
    time_s: float
    snr_db: float


@dataclass(frozen=True, slots=True)
class Report:
    """How close an output is to its reference.

    SNR figures are ``inf`` where nothing differs. A figure that could not be measured is None, and
    ``not_measured`` says why.

    Attributes:
        passed: Whether no floor was missed.
        reasons: Why not: what looks wrong first, then each floor missed with its figure.
        missed: Names of the figures that these reasons are about.
        exact: Whether both signals are equal, sample by sample.
        reference_samples: Length of the reference.
        output_samples: Length of the output; all else is of the part that both have.
        snr_db: Signal-to-noise ratio of the whole.
        worst_slice: The slice with the lowest SNR, of those that are not quiet.
        slice_p1_snr_db: 1 % of those slices have no more (nearest rank).
        onset_snr_db: SNR of the first 160 ms.
        tail_snr_db: SNR of the last 160 ms.
        max_abs_error: Largest difference of a sample; full scale is 1.
        seams: Chunk boundaries that were looked at.
        worst_seam: The boundary where the difference jumps most above what is usual.
        quiet_slices: Slices of the reference below -55 dBFS.
        quiet_level_db: The largest change of level among them, either way.
        gain_db: Level of the output's part that is the reference, least squares.
        dc_offset: Change of the mean; full scale is 1.
        log_spectral_distance_db: Mean over spectra of 40 ms.
        lag_samples: By how much the output is late, negative for early.
        correlation: With the reference at that lag, -1 to 1.
        nonfinite_samples: Samples of the output that are NaN or Inf.
        first_minute_snr_db: SNR of the first minute, of two or more.
        last_minute_snr_db: SNR of the last minute.
        drift_db: The difference of these two; negative where it gets worse.
        floors: What it had to reach.
        not_measured: Names of figures that are None, each with the reason.
        samples_per_frame: Length of a slice.
        sample_rate_hz: Of both signals.
        slice_snr_db: SNR of each slice, quiet ones included, for plots.
        seam_frames: First frames behind the chunk boundaries, for plots.
    """

    passed: bool
    reasons: tuple[str, ...]
    missed: tuple[str, ...]
    exact: bool
    reference_samples: int
    output_samples: int
    snr_db: float | None
    worst_slice: Slice | None
    slice_p1_snr_db: float | None
    onset_snr_db: float | None
    tail_snr_db: float | None
    max_abs_error: float | None
    seams: int
    worst_seam: Seam | None
    quiet_slices: int
    quiet_level_db: float | None
    gain_db: float | None
    dc_offset: float | None
    log_spectral_distance_db: float | None
    lag_samples: int | None
    correlation: float | None
    nonfinite_samples: int
    first_minute_snr_db: float | None
    last_minute_snr_db: float | None
    drift_db: float | None
    floors: Floors
    not_measured: dict[str, str]
    samples_per_frame: int
    sample_rate_hz: int
    slice_snr_db: NDArray[np.float64] = field(repr=False, compare=False)
    seam_frames: NDArray[np.int64] = field(repr=False, compare=False)

    @property
    def worst_slice_snr_db(self) -> float | None:
        """SNR of the worst slice."""
        return None if self.worst_slice is None else self.worst_slice.snr_db

    @property
    def frames(self) -> int:
        """Whole codec frames of the reference."""
        return self.reference_samples // self.samples_per_frame

    def to_json(self) -> dict[str, Any]:
        """Return all figures but the plots' for JSON.

        JSON has no infinite numbers: an infinite ratio is null, and ``null_because`` has the
        reason of every figure that is null. A null among the floors is no limit.
        """
        left_out = ("slice_snr_db", "seam_frames", "not_measured")
        fields = {
            item.name: getattr(self, item.name)
            for item in dataclasses.fields(self)
            if item.name not in left_out
        }
        fields["frames"] = self.frames
        fields["worst_slice_snr_db"] = self.worst_slice_snr_db
        because = dict(self.not_measured)
        for name, value in fields.items():
            if isinstance(value, float) and not math.isfinite(value):
                fields[name] = None
                because[name] = (
                    "nothing differs" if value > 0 else "not finite, or sound where none should be"
                )
            elif dataclasses.is_dataclass(value) and not isinstance(value, type):
                fields[name] = {
                    key: None if isinstance(item, float) and not math.isfinite(item) else item
                    for key, item in dataclasses.asdict(value).items()
                }
        fields["reasons"], fields["missed"] = list(self.reasons), list(self.missed)
        fields["null_because"] = because
        return fields


def seams_of(chunks: Sequence[int]) -> NDArray[np.int64]:
    """Return the first frames behind the boundaries of chunks of these sizes in frames."""
    ends: NDArray[np.int64] = np.cumsum(np.asarray(chunks, np.int64))
    return ends[:-1]


def compare(
    reference: NDArray[np.float32],
    output: NDArray[np.float32],
    *,
    chunks: Sequence[int] = (),
    floors: Floors = FLOORS["fp32"],
    samples_per_frame: int = 1920,
    sample_rate_hz: int = 24_000,
) -> Report:
    """Compare two signals.

    Args:
        reference: float32 ``[samples]``, what should be heard.
        output: float32 ``[samples]``, what a device makes.
        chunks: Frames per chunk in which the output was decoded; the boundaries between them are
            where clicks would be.
        floors: What the output must reach.
        samples_per_frame: Length of a codec frame.
        sample_rate_hz: Of both signals.

    Raises:
        ValueError: A signal has another shape.
    """
    signals = Signals(samples_per_frame)
    signals.push_reference(reference)
    signals.push_output(output)
    return judge(signals.finish(), seams_of(chunks), floors, sample_rate_hz)


def judge(
    measured: Measured,
    seams: Iterable[int] | NDArray[np.int64],
    floors: Floors,
    sample_rate_hz: int = 24_000,
) -> Report:
    """Return the report on what was measured; see :func:`compare`."""
    audible_db = -math.inf if floors.seam_step_db is None else floors.seam_step_db
    seam = measured.worst_seam(np.asarray(seams, np.int64), audible_db)
    figures = _figures(measured, np.asarray(seams, np.int64), seam, sample_rate_hz)
    wrong = [*_looks_wrong(measured, figures, floors), *_missed(figures, floors)]
    return Report(
        passed=not wrong,
        reasons=tuple(reason for _, reason in wrong),
        missed=tuple(dict.fromkeys(figure for figure, _ in wrong)),
        floors=floors,
        samples_per_frame=measured.slice_samples,
        sample_rate_hz=sample_rate_hz,
        **figures,
    )


def _figures(
    measured: Measured, seams: NDArray[np.int64], seam: Seam | None, rate_hz: int
) -> dict[str, Any]:
    """Return the fields of a report, without its verdict."""
    samples, slices = measured.slice_samples, len(measured.signal)
    by_slice = measured.slices_snr_db()
    levels = level_dbfs(measured.signal / samples)
    loud = np.flatnonzero(levels >= QUIET_DBFS)
    quiet = np.flatnonzero(levels < QUIET_DBFS)
    missing: dict[str, str] = {}

    def unless(problem: str | None, name: str, value: float) -> float | None:
        if problem is None:
            return value
        missing[name] = problem
        return None

    worst: Slice | None = None
    no_slices = None if loud.size else "no slice of the reference is above -55 dBFS"
    if loud.size:
        at = int(loud[np.argmin(by_slice[loud])])
        worst = Slice(at, at * samples / rate_hz, float(by_slice[at]))
    else:
        missing["worst_slice"] = missing["worst_slice_snr_db"] = no_slices or ""
    # Nearest rank: the smallest value that at least 1 % of the slices do not exceed.
    rank = max(0, math.ceil(0.01 * loud.size) - 1)
    p1 = float(np.sort(by_slice[loud])[rank]) if loud.size else 0.0

    edge = max(1, round(EDGE_S * rate_hz / samples))
    total = np.array([measured.signal.sum(), measured.heard.sum(), measured.product.sum()])
    nothing = None if slices else "there is nothing to compare"
    silent = nothing or (None if total[0] else "the reference is silent")
    audible = silent or (None if total[2] > 0 else "the output has nothing of the reference")
    change = np.abs(level_dbfs(measured.heard / samples) - levels)[quiet]
    if seam is None:
        missing["worst_seam"] = "there is no boundary between chunks"
    minute = round(MINUTE_S * rate_hz / samples)
    short = None if slices >= 2 * minute else "it takes at least two minutes"
    first_minute, last_minute = measured.snr_db(0, minute), measured.snr_db(slices - minute)
    alignment = measured.alignment
    if alignment is None:
        missing["lag_samples"] = missing["correlation"] = nothing or (
            "one of the signals is silent, or not finite"
        )
    elif abs(alignment.correlation) < RELATED:
        missing["lag_samples"] = "the signals are not alike at any lag"
    drift = last_minute - first_minute
    return {
        "exact": measured.exact and slices > 0,
        "reference_samples": measured.reference_samples,
        "output_samples": measured.output_samples,
        "snr_db": unless(nothing, "snr_db", measured.snr_db()),
        "worst_slice": worst,
        "slice_p1_snr_db": unless(
            None if loud.size >= 100 else "it takes at least 100 slices", "slice_p1_snr_db", p1
        ),
        "onset_snr_db": unless(
            nothing or _quiet_edge(levels[:edge]), "onset_snr_db", measured.snr_db(0, edge)
        ),
        "tail_snr_db": unless(
            nothing or _quiet_edge(levels[-edge:]),
            "tail_snr_db",
            measured.snr_db(max(0, slices - edge)),
        ),
        "max_abs_error": unless(nothing, "max_abs_error", measured.max_abs_error),
        "seams": int(np.count_nonzero((seams > 0) & (seams < slices))),
        "worst_seam": seam,
        "quiet_slices": int(quiet.size),
        "quiet_level_db": unless(
            None if quiet.size else "no slice of the reference is below -55 dBFS",
            "quiet_level_db",
            float(change.max(initial=0.0)),
        ),
        "gain_db": unless(
            audible, "gain_db", 0.0 if audible else 20 * math.log10(total[2] / total[0])
        ),
        "dc_offset": unless(
            nothing, "dc_offset", float(measured.offset.sum() / max(1, measured.samples))
        ),
        "log_spectral_distance_db": unless(
            nothing,
            "log_spectral_distance_db",
            float(measured.spectral_db.mean()) if slices else 0.0,
        ),
        "lag_samples": None
        if alignment is None or "lag_samples" in missing
        else alignment.lag_samples,
        "correlation": None if alignment is None else alignment.correlation,
        "nonfinite_samples": measured.nonfinite_samples,
        "first_minute_snr_db": unless(short, "first_minute_snr_db", first_minute),
        "last_minute_snr_db": unless(short, "last_minute_snr_db", last_minute),
        "drift_db": unless(
            short or (None if math.isfinite(drift) else "a minute differs in nothing, or in all"),
            "drift_db",
            drift,
        ),
        "not_measured": missing,
        "slice_snr_db": by_slice,
        "seam_frames": seams,
    }


def _quiet_edge(levels: NDArray[np.float64]) -> str | None:
    if levels.size and levels.max() >= QUIET_DBFS:
        return None
    return "the reference is below -55 dBFS there: quiet_level_db has it"


def _looks_wrong(measured: Measured, figures: dict[str, Any], floors: Floors) -> Iterable[Wrong]:
    """Yield what is wrong whatever the floors are, and what it looks like."""
    if max(measured.reference_samples, measured.output_samples) == 0:
        yield "length", "there is nothing to compare: zero frames"
        return
    if measured.reference_samples != measured.output_samples:
        yield "length", _wrong_length(measured)
    if not len(measured.signal):
        if measured.reference_samples == measured.output_samples:
            yield "snr_db", "nothing was compared: no codec frame is left of a shift"
        return
    if not measured.reference_finite:
        yield "snr_db", "the reference has NaN or Inf"
    if measured.nonfinite_samples:
        yield (
            "nonfinite_samples",
            f"{_samples(measured.nonfinite_samples)} of the output: NaN or Inf, first at "
            f"{measured.first_nonfinite_sample}",
        )
    samples = max(1, measured.samples)
    rms = math.sqrt(float(measured.signal.sum()) / samples)
    if rms < MIN_REFERENCE_RMS:
        yield (
            "snr_db",
            f"the reference is silent (RMS {rms:.1e}): any quiet output would agree with it",
        )
        return
    if not measured.heard.any():
        yield "snr_db", "the output is silent"
        return
    alignment, gain_db = measured.alignment, figures["gain_db"]
    if alignment is None:
        return
    if alignment.correlation < -ALIKE:
        text = f"the polarity is swapped (correlation {alignment.correlation:.3f})"
        yield "correlation", text
    lag, allowed = alignment.lag_samples, floors.lag_samples
    if lag and allowed is not None and abs(lag) > allowed and abs(alignment.correlation) > ALIKE:
        yield (
            "lag_samples",
            f"the output is {_samples(abs(lag))} {'late' if lag > 0 else 'early'} (correlation "
            f"{alignment.correlation:.3f} there, {alignment.correlation_unshifted:.3f} without)",
        )
    elif gain_db is not None and alignment.correlation > ALIKE and abs(gain_db) >= 1.0:
        what = "louder" if gain_db > 0 else "quieter"
        yield "gain_db", f"the output is {abs(gain_db):.2f} dB {what} than the reference"


def _samples(count: int) -> str:
    return f"{count} sample{'s' if count != 1 else ''}"


def _wrong_length(measured: Measured) -> str:
    more = measured.output_samples - measured.reference_samples
    hint = ""
    frames, rest = divmod(abs(more), measured.slice_samples)
    if not rest:
        hint = f", {frames} frame{'s' if frames > 1 else ''}: lost, repeated or left over"
    elif abs(more) == UNTRIMMED_SAMPLES:
        hint = ", the tails of the four transposed convolutions"
    return (
        f"the output has {measured.output_samples} samples, the reference "
        f"{measured.reference_samples}: {abs(more)} {'more' if more > 0 else 'fewer'}{hint}"
    )


def _missed(figures: dict[str, Any], floors: Floors) -> Iterable[Wrong]:
    """Yield each floor that a figure misses."""
    worst: Slice | None = figures["worst_slice"]
    values = {**figures, "worst_slice_snr_db": None if worst is None else worst.snr_db}
    for name in AT_LEAST:
        value, floor = values[name], getattr(floors, name)
        if value is not None and floor is not None and not value >= floor:
            at = f" at {worst.time_s:.2f} s" if worst and name == "worst_slice_snr_db" else ""
            yield name, f"{name} is {value:.2f}{at}, at least {floor:g} needed"
    for name in AT_MOST:
        value, limit = values[name], getattr(floors, name)
        if value is not None and limit is not None and not abs(value) <= limit:
            yield name, f"{name} is {value:.3g}, at most {limit:g} allowed"
    seam: Seam | None = figures["worst_seam"]
    limit, audible = floors.seam_excess_db, floors.seam_step_db
    if seam is None or limit is None:
        return
    if seam.excess_db > limit and (audible is None or seam.step_db > audible):
        yield (
            "worst_seam",
            f"a step at the boundary before frame {seam.frame}: {seam.step_db:.1f} dB over the "
            f"level around it, {seam.excess_db:.1f} dB above what is usual elsewhere, at most "
            f"{limit:g} allowed",
        )
