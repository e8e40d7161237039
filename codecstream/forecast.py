"""By when the next frames will have come, and what the next chunk will take, from those so far.

- :class:`ArrivalForecast` keeps, for utterances of the past, the longest time that any ``m``
  frames in a row took to arrive (network calculus calls that an arrival curve). Pace, jitter,
  pauses and packets of several frames are all in it. While there is no past, it takes the pace
  since the utterance began, and how uncertain that still is.
- :class:`DecodeCost` fits ``fixed + per_frame * n`` to the medians of what chunks took, and keeps
  how far a run of chunks ever fell behind that.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["ArrivalForecast", "DecodeCost"]

PAST_UTTERANCES = 8
LONGEST_LAG_FRAMES = 125
KEPT_FRAMES = 500

TOGETHER_S = 0.010
"""Frames that come within this time of each other were sent together."""

UNSEEN_JITTER_S = 0.040
"""Jitter that is taken for possible in the first utterance, before any was seen."""

UNSEEN_SHARE = 0.5
"""Part of the worst that was seen by which the next may be worse; for jitter, over the number of
utterances in which it was seen."""

UNSEEN_EXCESS = 0.1
"""Part of a one-frame chunk's cost by which chunks may exceed what is expected of them."""


class ArrivalForecast:
    """By when the next frames will have arrived, going by what came so far.

    Times are seconds of any clock that does not run backwards.
    """

    def __init__(self) -> None:
        self._past: deque[_Curve] = deque(maxlen=PAST_UTTERANCES)
        self._curve: NDArray[np.float64] | None = None  # of all the past together, by lag
        self._jitter_s = 0.0  # in the past
        self._forget()

    def _forget(self) -> None:
        self._times_s: list[float] = []  # of this utterance's frames, the last of a long one
        self._dropped = 0  # frames before those
        self._groups: list[tuple[float, int]] = []  # when each packet began, and frames before it
        self._first_valid = 0  # frames before this one have seen the curve broken

    @property
    def frames(self) -> int:
        """Frames of this utterance that have arrived."""
        return self._dropped + len(self._times_s)

    @property
    def utterances(self) -> int:
        """Past utterances that the forecast rests on."""
        return len(self._past)

    def begin(self) -> None:
        """Begin a new utterance; the one before becomes part of the past."""
        if len(self._groups) > 2:
            self._past.append(_Curve(np.array(self._times_s), self._ends()))
            lags = np.arange(LONGEST_LAG_FRAMES + 1)
            curves_s = np.array([curve.at(lags) for curve in self._past])
            self._jitter_s = max(curve.unsure_s for curve in self._past)
            # The next utterance may be the worst so far, the sooner the fewer there were.
            margin_s = self._jitter_s * UNSEEN_SHARE / len(self._past)
            self._curve = curves_s.max(axis=0) + margin_s
            self._pace_s = max(curve.frame_s for curve in self._past)
        self._forget()

    def arrived(self, now_s: float, frames: int) -> None:
        """Take note that ``frames`` frames have arrived together."""
        if frames < 1:
            return
        if self._curve is not None and self._times_s and now_s > self._from_past(1)[0]:
            self._first_valid = self.frames  # later than ever before: count from here
        if not self._groups or now_s - self._groups[-1][0] >= TOGETHER_S:
            self._groups.append((now_s, self.frames))
        self._times_s += [now_s] * frames
        if len(self._times_s) > 2 * KEPT_FRAMES:
            self._dropped += len(self._times_s) - KEPT_FRAMES
            del self._times_s[:-KEPT_FRAMES]
            self._groups = [group for group in self._groups if group[1] >= self._dropped]

    def bounds_s(self, now_s: float, frames: int) -> list[float] | None:
        """Return by when each of the next ``frames`` frames will have arrived, or None.

        None while there is nothing to go by: no frame, or no past and no second packet.
        """
        if not self._times_s:
            return None
        ahead: NDArray[np.float64] = np.arange(1.0, frames + 1)
        bounds_s: NDArray[np.float64]
        line = self._line()
        if self._curve is not None:
            bounds_s = self._from_past(frames)
            if line is not None:  # the past holds until this utterance is clearly slower
                surely_s = line.frame_s - (line.doubt_s + self._jitter_s) / line.seen
                bounds_s = np.maximum(bounds_s, line.last_s + surely_s * ahead)
        elif line is not None:
            possibly_s = line.frame_s + (line.doubt_s + TOGETHER_S) / line.seen
            bounds_s = line.last_s + max(line.late_s, UNSEEN_JITTER_S) + possibly_s * ahead
        else:
            return None
        overdue_s = max(0.0, now_s - float(bounds_s[0])) if frames else 0.0
        return [float(bound_s) for bound_s in bounds_s + overdue_s]

    def _from_past(self, frames: int) -> NDArray[np.float64]:
        """The curve, counted from whichever frame of this utterance bounds most tightly."""
        assert self._curve is not None
        first = max(self._first_valid, self.frames - LONGEST_LAG_FRAMES, self._dropped)
        lags = np.arange(self.frames, self.frames + frames)[:, None] - np.arange(first, self.frames)
        beyond_s = np.maximum(0, lags - LONGEST_LAG_FRAMES) * self._pace_s
        curve_s = self._curve[np.minimum(lags, LONGEST_LAG_FRAMES)] + beyond_s
        bounds: NDArray[np.float64] = (
            np.array(self._times_s[first - self._dropped :]) + curve_s
        ).min(axis=1)
        return bounds

    def _line(self) -> _Line | None:
        """This utterance alone, or None while only one packet came.

        What was sent together with the first frame was made before: it says nothing about pace.
        """
        if len(self._groups) < 2:
            return None
        seen = self.frames - self._groups[1][1]
        frame_s = (self._groups[-1][0] - self._groups[0][0]) / seen
        late_s = np.array(self._times_s) - frame_s * np.arange(len(self._times_s))
        early_s = float(late_s.min())
        ends = self._ends()
        return _Line(
            last_s=early_s + frame_s * (len(late_s) - 1),
            frame_s=frame_s,
            late_s=float(late_s.max()) - early_s,
            doubt_s=float(late_s[ends].max()) - early_s,
            seen=seen,
        )

    def _ends(self) -> NDArray[np.int64]:
        """The last frame of each packet, among those that are kept."""
        ends = [before for _, before in self._groups[1:]] + [self.frames]
        return np.array(ends) - self._dropped - 1


@dataclass(frozen=True, slots=True)
class _Line:
    """The present utterance as a straight line that no frame came before.

    Attributes:
        last_s: The line at the last frame.
        frame_s: Its slope.
        late_s: How far frames came after it, at the most.
        doubt_s: The same for the last frame of each packet: by how much the line may be off.
        seen: Frames that it rests on.
    """

    last_s: float
    frame_s: float
    late_s: float
    doubt_s: float
    seen: int


class _Curve:
    """The longest time that any ``lag`` frames in a row of one utterance took.

    Lags of more than half the utterance were seen too seldom to have met the worst. Beyond that,
    what holds is the tighter of: the pace and the worst that any lag was above it; and that
    ``a + b`` frames take no longer than ``a`` and ``b``.

    Args:
        times_s: Arrival of each frame.
        ends: Index of the last frame of each packet.
    """

    def __init__(self, times_s: NDArray[np.float64], ends: NDArray[np.int64]) -> None:
        last = min(len(times_s) // 2, LONGEST_LAG_FRAMES)
        self._curve_s = np.zeros(last + 1)
        for lag in range(1, last + 1):
            self._curve_s[lag] = (times_s[lag:] - times_s[:-lag]).max()
        self.frame_s = float(np.polyfit(ends, times_s[ends], 1)[0])
        self._most_above_s = float((self._curve_s - self.frame_s * np.arange(last + 1)).max())
        late_s = times_s[ends] - self.frame_s * ends
        self.unsure_s = float(late_s.max() - late_s.min())  # the packets' size is not in it

    def at(self, lags: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the times in seconds for these lags."""
        last = len(self._curve_s) - 1
        whole, rest = np.divmod(lags, last)
        added_s = whole * self._curve_s[last] + self._curve_s[rest]
        beyond_s = np.minimum(added_s, self.frame_s * lags + self._most_above_s)
        return np.where(lags <= last, self._curve_s[np.minimum(lags, last)], beyond_s)


RECENT_CHUNKS = 16
RUN_CHUNKS = 64
FEW_CHUNKS = 6


class DecodeCost:
    """How long a chunk of so many frames takes: ``fixed + per_frame * n``, learned as it goes.

    Args:
        prior_s: Seconds that chunks of some sizes took before, such as at warm-up.

    Raises:
        ValueError: The prior holds a size below 1, or a time that is negative or not finite.
    """

    def __init__(self, prior_s: Mapping[int, float] | None = None) -> None:
        self._recent: dict[int, deque[float]] = {}  # seconds by size
        self._run: deque[tuple[int, float, bool]] = deque(maxlen=RUN_CHUNKS)
        self._fixed_s = self._per_frame_s = 0.0
        self._smallest = self._largest = 0
        for frames, cost_s in (prior_s or {}).items():
            if frames < 1 or not 0 <= cost_s < math.inf:
                raise ValueError(f"a chunk of {frames} frames in {cost_s} s is no cost")
            self._remember(frames, cost_s)

    @property
    def known(self) -> bool:
        """Whether there is anything to go by."""
        return bool(self._recent)

    def decoded(self, frames: int, cost_s: float, after_idle: bool) -> None:
        """Take note of what a chunk took.

        Args:
            frames: Its size.
            cost_s: Its time; one below zero, of a clock set back, is left out.
            after_idle: Whether the worker had caught up before it.
        """
        if frames < 1 or not 0 <= cost_s < math.inf:
            return
        self._run.append((frames, cost_s, after_idle))
        self._remember(frames, cost_s)

    def expected_s(self, frames: int) -> float:
        """Return what a chunk of ``frames`` frames will likely take; 0 while nothing is known.

        Of a size larger than all that were seen, what is above the largest of them counts with a
        tenth more, though never with more per frame than that one took.
        """
        if frames > self._largest > 0:
            largest_s = self.expected_s(self._largest)
            more_s = self._per_frame_s * (frames - self._largest) * (1 + UNSEEN_EXCESS)
            return min(largest_s + more_s, largest_s * frames / self._largest)
        return self._fixed_s + self._per_frame_s * max(frames, self._smallest)

    def planned_s(self, sizes: Iterable[int]) -> dict[int, float]:
        """Return, by size, :meth:`expected_s` and as much more as its mean may be above it.

        That is three times the median deviation over the root of the count, two standard errors
        where it is normal: what one chunk takes by chance evens out over many, that the estimate
        is off does not.
        """
        factor = self._factor()
        return {size: factor * self.expected_s(size) for size in sizes}

    def _factor(self) -> float:
        run = [(cost_s, self.expected_s(frames)) for frames, cost_s, _ in self._run]
        ratios = [cost_s / expected_s for cost_s, expected_s in run if expected_s > 0]
        if len(ratios) < FEW_CHUNKS:
            return 1 + UNSEEN_EXCESS / 2
        middle = statistics.median(ratios)
        spread = statistics.median(abs(ratio - middle) for ratio in ratios)
        return max(1.0, middle) + 3 * spread / math.sqrt(len(ratios))

    @property
    def reserve_s(self) -> float:
        """By how much the worker ever fell behind what is planned, over chunks without a rest.

        A chunk that took long by chance counts once, and not for every chunk to come. Half as
        much again is added, as the next may be the worst, and a tenth of a small chunk is taken
        for possible in any case.
        """
        worst_s = behind_s = 0.0
        factor = self._factor()
        for frames, cost_s, after_idle in self._run:
            before_s = 0.0 if after_idle else max(0.0, behind_s)
            behind_s = before_s + cost_s - factor * self.expected_s(frames)
            worst_s = max(worst_s, behind_s)
        return max((1 + UNSEEN_SHARE) * worst_s, UNSEEN_EXCESS * self.expected_s(1))

    def _remember(self, frames: int, cost_s: float) -> None:
        self._recent.setdefault(frames, deque(maxlen=RECENT_CHUNKS)).append(cost_s)
        self._smallest, self._largest = min(self._recent), max(self._recent)
        sizes = np.array(sorted(self._recent), dtype=float)
        seen = [self._recent[int(n)] for n in sizes]
        medians_s = np.array([float(np.median(times_s)) for times_s in seen])
        if len(sizes) == 1:
            self._fixed_s, self._per_frame_s = 0.0, float(medians_s[0] / sizes[0])
            return
        weights = np.sqrt([len(times_s) for times_s in seen])
        slope, offset = np.polyfit(sizes, medians_s, 1, w=weights)
        self._fixed_s, self._per_frame_s = float(offset), float(slope)
        if slope < 0:
            self._fixed_s, self._per_frame_s = float(medians_s.max()), 0.0
        elif offset < 0:
            self._fixed_s, self._per_frame_s = 0.0, float(medians_s @ sizes / (sizes @ sizes))
