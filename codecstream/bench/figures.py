"""The arithmetic of the bench: percentiles, what a player would have heard, the verdict.

Nothing here measures: times come in, figures go out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from codecstream.geometry import CodecGeometry
from codecstream.metrics import ChunkTime, summarise
from codecstream.policy import AdaptivePolicy
from codecstream.schedule import Ramp
from codecstream.simulate import simulate

__all__ = [
    "Playback",
    "PolicyPlayback",
    "SizeFigures",
    "Verdict",
    "intervals",
    "judge",
    "nearest_rank",
    "rtf_by_interval",
    "share_of_product",
    "simulate_playback",
    "simulate_policy",
    "summarise_size",
]


def nearest_rank(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least ``percent`` of all values do not exceed.

    Raises:
        ValueError: There is none, or ``percent`` is not above 0 and up to 100.
    """
    if not values or not 0 < percent <= 100:
        raise ValueError(f"no {percent} % of {len(values)} values")
    return sorted(values)[math.ceil(percent / 100 * len(values)) - 1]


@dataclass(frozen=True, slots=True)
class SizeFigures:
    """What decoding chunks of one size takes.

    Attributes:
        frames: The size.
        count: How many were timed.
        min_ms: The fastest.
        p50_ms: Median (all percentiles by nearest rank).
        p90_ms: Nine of ten take no longer.
        p99_ms: 99 of 100 take no longer; the maximum, where fewer than 100 were timed.
        max_ms: The slowest.
        rtf: Median over the audio's duration.
        budget_ms: The audio's duration: 80 ms per frame.
        fits: Whether 99 % of the chunks are decoded in less time than they play.
    """

    frames: int
    count: int
    min_ms: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float
    rtf: float
    budget_ms: float
    fits: bool


def summarise_size(frames: int, times_ms: Sequence[float], frame_ms: float) -> SizeFigures:
    """Return the figures of one chunk size."""
    budget_ms = frames * frame_ms
    p50_ms, p99_ms = nearest_rank(times_ms, 50), nearest_rank(times_ms, 99)
    return SizeFigures(
        frames=frames,
        count=len(times_ms),
        min_ms=min(times_ms),
        p50_ms=p50_ms,
        p90_ms=nearest_rank(times_ms, 90),
        p99_ms=p99_ms,
        max_ms=max(times_ms),
        rtf=p50_ms / budget_ms,
        budget_ms=budget_ms,
        fits=p99_ms < budget_ms,
    )


@dataclass(frozen=True, slots=True)
class Playback:
    """An utterance as a player with a fixed delay would have played it, had chunks taken so long.

    Attributes:
        pace: The talker's time per frame over the frame's duration.
        audio_s: Length of the utterance.
        ttfa_ms: When the first chunk is ready; frames begin to come at 0.
        playback_start_ms: The earliest start without an underrun.
        start_ms: When this player starts: a fixed time after the first chunk.
        underruns: Times that it runs dry.
        silence_ms: How long, together.
        unavoidable_ms: The same for a device that decodes in no time.
    """

    pace: float
    audio_s: float
    ttfa_ms: float
    playback_start_ms: float
    start_ms: float
    underruns: int
    silence_ms: float
    unavoidable_ms: float


def simulate_playback(
    cost_ms: Mapping[int, float],
    schedule: Sequence[int],
    pace: float,
    frames: int,
    frame_ms: float,
    prebuffer_ms: float,
) -> Playback:
    """Play an utterance whose frames come evenly, decoded by one worker.

    Args:
        cost_ms: Time to decode a chunk, by its size in frames; sizes between are interpolated.
        schedule: Frames per chunk; the last size repeats.
        pace: The talker's time per frame over the frame's duration.
        frames: Length of the utterance.
        frame_ms: Duration of a frame.
        prebuffer_ms: From the first chunk to the start of playback.
    """
    chunks = _timeline(cost_ms, schedule, pace, frames, frame_ms)
    instant = _timeline({1: 0.0}, schedule, pace, frames, frame_ms)
    # One sample per microsecond of audio, so that sizes stay whole numbers.
    figures = summarise(chunks, sample_rate_hz=1_000_000)
    assert figures.ttfa_ms is not None and figures.playback_start_ms is not None
    start_ms = figures.ttfa_ms + prebuffer_ms
    underruns, silence_ms = _play(chunks, start_ms)
    return Playback(
        pace=pace,
        audio_s=frames * frame_ms / 1000,
        ttfa_ms=figures.ttfa_ms,
        playback_start_ms=figures.playback_start_ms,
        start_ms=start_ms,
        underruns=underruns,
        silence_ms=silence_ms,
        unavoidable_ms=_play(instant, instant[0].t_ms + prebuffer_ms)[1],
    )


@dataclass(frozen=True, slots=True)
class PolicyPlayback:
    """The same with an ``AdaptivePolicy``, which chooses sizes and the start by what it measures.

    Attributes:
        start_ms: When playback starts; frames begin to come at 0.
        underruns: Times that it runs dry.
        silence_ms: How long, together.
    """

    start_ms: float
    underruns: int
    silence_ms: float


def simulate_policy(
    cost_ms: Mapping[int, float],
    max_frames: int | None,
    pace: float,
    frames: int,
    geometry: CodecGeometry,
) -> PolicyPlayback:
    """Play the same utterance as :func:`simulate_playback` with an ``AdaptivePolicy``.

    Args:
        cost_ms: See there; the policy knows them from the start.
        max_frames: The largest chunk that the program takes; None for any.
        pace: See there.
        frames: See there.
        geometry: The decoder's.
    """
    frame_s = 1 / geometry.frame_rate_hz
    costs_s = {size: ms / 1000 for size, ms in cost_ms.items()}
    policy = AdaptivePolicy(costs_s, max_frames=max_frames, geometry=geometry)
    packets = [((index + 1) * frame_s * pace, 1) for index in range(frames)]
    played = simulate(policy, packets, lambda size: _cost(costs_s, size), frame_s=frame_s)
    assert played.start_s is not None
    return PolicyPlayback(played.start_s * 1000, played.underruns, played.stall_s * 1000)


def _timeline(
    cost_ms: Mapping[int, float],
    schedule: Sequence[int],
    pace: float,
    frames: int,
    frame_ms: float,
) -> list[ChunkTime]:
    chunks: list[ChunkTime] = []
    done, free_ms = 0, 0.0
    for size in Ramp.of(schedule).split(frames):
        done += size
        arrival_ms = done * frame_ms * pace
        free_ms = max(free_ms, arrival_ms) + _cost(cost_ms, size)
        samples = round(size * frame_ms * 1000)
        chunks.append(ChunkTime(t_ms=free_ms, samples=samples, arrival_ms=arrival_ms))
    return chunks


def _cost(costs: Mapping[int, float], size: int) -> float:
    """Return the cost of a size, on a line between those that were measured."""
    if size in costs:
        return costs[size]
    known = sorted(costs)
    below = max((k for k in known if k < size), default=None)
    above = min((k for k in known if k > size), default=None)
    if below is None or above is None:
        nearest = known[0] if below is None else known[-1]
        return costs[nearest] * max(1.0, size / nearest)
    share = (size - below) / (above - below)
    return costs[below] + share * (costs[above] - costs[below])


def _play(chunks: Sequence[ChunkTime], start_ms: float) -> tuple[int, float]:
    """Return how often a player that starts then runs dry, and for how long together."""
    underruns, silence_ms, audio_ms = 0, 0.0, 0.0
    for chunk in chunks:
        late_ms = chunk.t_ms - (start_ms + silence_ms + audio_ms)
        # Less than a microsecond is rounding of this sum.
        if late_ms > 1e-3:
            underruns += audio_ms > 0
            silence_ms += late_ms if audio_ms > 0 else 0.0
            start_ms += late_ms if audio_ms == 0 else 0.0
        audio_ms += chunk.samples / 1000
    return underruns, silence_ms


def share_of_product(turns: Sequence[tuple[float, float]], flop: int) -> float:
    """Return what decoding reaches of a matrix product's speed: the median of all turns.

    Args:
        turns: GFLOP/s of the product and ms of the chunk behind it. On a shared machine both move
            by a third, and only what is timed together can be compared.
        flop: Of a chunk.
    """
    return statistics.median(flop / (ms * 1e6) / gflops for gflops, ms in turns)


def intervals(ends_s: Sequence[float], interval_s: float) -> list[range]:
    """Return which chunks of a sustained run belong to each interval of it.

    Args:
        ends_s: When each chunk was ready, from the start of the run.
        interval_s: Length of an interval. What is left at the end is one of its own where it is
            at least half as long, and otherwise belongs to the last.
    """
    found: list[range] = []
    first, begin_s = 0, 0.0
    for index, end_s in enumerate(ends_s):
        rest_s = ends_s[-1] - end_s
        if end_s - begin_s >= interval_s and (rest_s == 0 or rest_s >= interval_s / 2):
            found.append(range(first, index + 1))
            first, begin_s = index + 1, end_s
    if first < len(ends_s):
        found.append(range(first, len(ends_s)))
    return found


def rtf_by_interval(ends_s: Sequence[float], audio_s: float, interval_s: float) -> list[float]:
    """Return the real-time factor of each interval of a sustained run.

    Args:
        ends_s: See :func:`intervals`.
        audio_s: Audio of a chunk.
        interval_s: See :func:`intervals`.
    """
    factors: list[float] = []
    begin_s = 0.0
    for chunks in intervals(ends_s, interval_s):
        end_s = ends_s[chunks[-1]]
        factors.append((end_s - begin_s) / (audio_s * len(chunks)))
        begin_s = end_s
    return factors


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the device keeps up.

    Attributes:
        real_time: Whether it does: 99 % of the chunks of the schedule's largest size, and the
            slowest interval of the sustained run, take less time than they play.
        spare_percent: What is left of the time in the worse of these two; negative where it is
            not enough.
        fits: Chunk sizes of which 99 % are decoded in time.
        text: The same in words.
    """

    real_time: bool
    spare_percent: float
    fits: list[int]
    text: str


def judge(sizes: Sequence[SizeFigures], largest: int, sustained_rtf: Sequence[float]) -> Verdict:
    """Return the verdict on a device.

    Args:
        sizes: Figures by chunk size.
        largest: The schedule's last size, in which most of an utterance is decoded.
        sustained_rtf: By interval; may be empty.

    Raises:
        ValueError: The largest size was not measured.
    """
    by_size = {item.frames: item for item in sizes}
    if largest not in by_size:
        raise ValueError(f"chunks of {largest} frames were not measured")
    worst = by_size[largest].p99_ms / by_size[largest].budget_ms
    worst = max([worst, *sustained_rtf])
    spare = (1 - worst) * 100
    fits = [item.frames for item in sizes if item.fits]
    misses = [item.frames for item in sizes if not item.fits]
    if worst < 1:
        text = f"real-time, with {spare:.0f} % to spare"
    else:
        text = f"NOT real-time: it takes {worst:.2f} times as long as the sound lasts"
    if misses:
        text += f"; chunks of {_listed(fits)} fit, {_listed(misses)} do not"
    else:
        text += "; all chunk sizes fit"
    return Verdict(worst < 1, spare, fits, text)


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes)) + " frames" if sizes else "no size"
