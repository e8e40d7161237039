"""What is forecast of arrivals and costs."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from codecstream.forecast import ArrivalForecast, DecodeCost

FRAME_S = 0.08


def feed(forecast: ArrivalForecast, times_s: list[float]) -> None:
    for time_s in times_s:
        forecast.arrived(time_s, 1)


def paced(frames: int, pace: float, start_s: float = 0.0) -> list[float]:
    return [start_s + (i + 1) * pace * FRAME_S for i in range(frames)]


# Arrivals


def test_nothing_is_known_before_the_second_packet() -> None:
    forecast = ArrivalForecast()
    assert forecast.bounds_s(0.0, 5) is None
    forecast.arrived(1.0, 4)
    forecast.arrived(1.004, 4)  # sent together with the first
    assert forecast.bounds_s(1.0, 5) is None and forecast.frames == 8
    forecast.arrived(1.3, 4)
    assert forecast.bounds_s(1.3, 5) is not None


def test_no_frames_are_no_news() -> None:
    forecast = ArrivalForecast()
    for frames in (0, 0):
        forecast.arrived(1.0, frames)
    forecast.begin()
    assert (forecast.frames, forecast.utterances) == (0, 0)
    feed(forecast, paced(3, 1.0))
    assert forecast.bounds_s(0.24, 0) == []


@given(st.floats(0.2, 2.0), st.integers(3, 60))
def test_an_even_pace_goes_on_in_the_first_utterance(pace: float, frames: int) -> None:
    """Not sooner than it does, and the more was seen, the less later."""
    forecast = ArrivalForecast()
    times_s = paced(frames, pace)
    feed(forecast, times_s)
    bounds_s = forecast.bounds_s(times_s[-1], 50)
    assert bounds_s is not None
    excess_s = np.array(bounds_s) - paced(frames + 50, pace)[frames:]
    doubt_s = 0.010 / (frames - 1) * np.arange(1, 51)
    assert np.allclose(excess_s, 0.040 + doubt_s)


@given(st.floats(0.2, 2.0), st.integers(2, 6))
def test_a_server_that_sends_packets_goes_on_so(pace: float, size: int) -> None:
    """The next frame comes with the next packet, and no frame is forecast to come sooner."""
    forecast = ArrivalForecast()
    times_s = [times for time_s in paced(8, pace * size) for times in [time_s] * size]
    feed(forecast, times_s[: 4 * size])
    bounds_s = forecast.bounds_s(times_s[4 * size - 1], 4 * size)
    assert bounds_s is not None
    late_s = np.array(bounds_s) - times_s[4 * size :]
    assert late_s.min() > -1e-9
    assert late_s[0] < 0.02 + 0.06  # unseen jitter, and doubt about the pace


@given(
    st.lists(st.floats(0, 0.3), min_size=8, max_size=60),
    st.lists(st.floats(0, 1), min_size=1, max_size=30),
)
def test_what_was_no_slower_than_the_past_is_within_the_forecast(
    past_gaps_s: list[float], luck: list[float]
) -> None:
    """An utterance in which no run of frames takes longer than the longest of the past."""
    past_s = list(np.cumsum(past_gaps_s))
    longest_s = [
        max(past_s[i + lag] - past_s[i] for i in range(len(past_s) - lag))
        for lag in range(len(past_s) // 2 + 1)
    ]
    forecast = ArrivalForecast()
    feed(forecast, past_s)
    forecast.begin()
    if not forecast.utterances:
        return  # it all came together
    times_s = [100.0]
    for share in luck[: len(longest_s) - 1]:
        latest_s = min(time_s + longest_s[len(times_s) - j] for j, time_s in enumerate(times_s))
        times_s.append(times_s[-1] + share * (latest_s - times_s[-1]))
    for known in range(1, len(times_s)):
        forecast.begin()
        feed(forecast, times_s[:known])
        bounds_s = forecast.bounds_s(times_s[known - 1], len(times_s) - known)
        assert bounds_s is not None
        assert all(
            time_s <= bound_s + 1e-6
            for time_s, bound_s in zip(times_s[known:], bounds_s, strict=True)
        )
        forecast = ArrivalForecast()
        feed(forecast, past_s)


def test_an_even_past_is_forecast_without_doubt_from_the_first_frame() -> None:
    forecast = ArrivalForecast()
    feed(forecast, paced(60, 0.9))
    forecast.begin()
    forecast.arrived(50.0, 1)
    assert forecast.bounds_s(50.0, 200) == pytest.approx(paced(200, 0.9, 50.0))


def test_the_worst_of_the_past_counts_until_it_is_long_ago() -> None:
    forecast = ArrivalForecast()
    late_s = paced(60, 0.5)
    late_s[20:] = [time_s + 0.2 for time_s in late_s[20:]]  # once, for 200 ms
    feed(forecast, late_s)
    for quiet in range(9):
        forecast.begin()
        forecast.arrived(500.0, 1)
        bounds_s = forecast.bounds_s(500.0, 1)
        assert bounds_s is not None
        assert (bounds_s[0] > 500.0 + 0.04 + 0.2 - 1e-9) == (quiet < 8)
        feed(forecast, paced(60, 0.5, 500.0)[1:])


def test_an_utterance_that_is_clearly_slower_than_the_past_is_believed() -> None:
    forecast = ArrivalForecast()
    feed(forecast, paced(60, 0.5))
    forecast.begin()
    feed(forecast, paced(20, 1.2, 100.0))
    bounds_s = forecast.bounds_s(100 + 20 * 1.2 * FRAME_S, 50)
    assert bounds_s == pytest.approx(paced(70, 1.2, 100.0)[20:], abs=0.01)


def test_an_overdue_frame_moves_what_follows() -> None:
    forecast = ArrivalForecast()
    feed(forecast, paced(60, 1.0))
    forecast.begin()
    feed(forecast, paced(10, 1.0, 50.0))
    assert forecast.bounds_s(53.0, 3) == pytest.approx([53.0, 53.08, 53.16])
    forecast.arrived(53.0, 1)  # later than ever: counted from here
    assert forecast.bounds_s(53.0, 3) == pytest.approx([53.08, 53.16, 53.24], abs=0.01)


def test_a_long_utterance_takes_no_more_memory_and_follows_the_present() -> None:
    forecast = ArrivalForecast()
    times_s = paced(3000, 0.5)
    times_s += paced(3000, 1.1, times_s[-1])
    feed(forecast, times_s)
    assert forecast.frames == 6000 and len(forecast._times_s) <= 1000 >= len(forecast._groups)
    bounds_s = forecast.bounds_s(times_s[-1], 10)
    assert bounds_s == pytest.approx(paced(10, 1.1, times_s[-1]), abs=0.05)
    forecast.begin()
    feed(forecast, paced(2000, 1.1, 1000.0))
    bounds_s = forecast.bounds_s(1000 + 2000 * 1.1 * FRAME_S, 10)
    assert bounds_s == pytest.approx(paced(2010, 1.1, 1000.0)[2000:], abs=0.05)


# Costs


def test_nothing_is_known_of_costs_at_first() -> None:
    cost = DecodeCost()
    assert not cost.known and cost.expected_s(25) == 0 and cost.reserve_s == 0
    assert cost.planned_s([1, 2]) == {1: 0, 2: 0}


@given(st.floats(0, 0.1), st.floats(0.001, 0.1), st.sets(st.integers(1, 25), min_size=2))
def test_a_straight_line_is_found(fixed_s: float, per_frame_s: float, sizes: set[int]) -> None:
    cost = DecodeCost({n: fixed_s + per_frame_s * n for n in sizes})
    for frames in range(min(sizes), max(sizes) + 1):
        assert cost.expected_s(frames) == pytest.approx(fixed_s + per_frame_s * frames)


def test_sizes_never_seen_are_bounded_by_those_that_were() -> None:
    one = DecodeCost({4: 0.4})
    assert [one.expected_s(n) for n in (1, 2, 4, 8)] == pytest.approx([0.4, 0.4, 0.4, 0.8])
    two = DecodeCost({2: 0.3, 4: 0.4})  # 0.2 + 0.05 n
    assert two.expected_s(1) == pytest.approx(0.3)
    assert two.expected_s(8) == pytest.approx(0.4 + 4 * 0.05 * 1.1)
    assert DecodeCost({1: 0.1, 4: 0.4}).expected_s(8) == pytest.approx(
        0.8
    )  # no more than in proportion


@given(st.dictionaries(st.integers(1, 25), st.floats(0, 2), min_size=1))
def test_costs_are_never_negative_and_never_fall_with_size(seen: dict[int, float]) -> None:
    planned_s = list(DecodeCost(seen).planned_s(range(1, 40)).values())
    assert min(planned_s) >= 0
    assert all(b >= a - 1e-9 for a, b in itertools.pairwise(planned_s))


def test_one_slow_chunk_changes_neither_the_line_nor_the_reserve_for_ever() -> None:
    cost = DecodeCost()
    for _ in range(10):
        for frames in (1, 4, 8):
            cost.decoded(frames, 0.03 + 0.02 * frames, after_idle=True)
    before_s = cost.reserve_s
    cost.decoded(4, 1.0, after_idle=True)
    assert cost.expected_s(8) == pytest.approx(0.19)
    assert cost.reserve_s == pytest.approx(1.5 * 0.89)
    assert cost.planned_s([8])[8] == pytest.approx(0.19)
    for _ in range(64):
        cost.decoded(4, 0.11, after_idle=True)
    assert cost.reserve_s == pytest.approx(before_s)


def test_chunks_without_a_rest_fall_behind_together() -> None:
    def reserve_s(after_idle: bool) -> float:
        cost = DecodeCost({1: 0.1, 2: 0.2})
        for _ in range(16):
            cost.decoded(1, 0.1, after_idle=True)
        for _ in range(3):
            cost.decoded(1, 0.15, after_idle)
        return cost.reserve_s

    assert reserve_s(after_idle=True) == pytest.approx(1.5 * 0.05)
    assert reserve_s(after_idle=False) == pytest.approx(1.5 * 0.15)


def test_the_plan_covers_the_mean_of_noisy_chunks() -> None:
    rng = random.Random(0)
    missed = 0
    for _ in range(200):
        cost = DecodeCost()
        for _ in range(40):
            frames = rng.choice((1, 2, 4, 8))
            cost.decoded(frames, (0.02 + 0.03 * frames) * rng.uniform(0.9, 1.1), after_idle=True)
        missed += cost.planned_s([4])[4] < 0.14
    assert missed <= 40  # without the doubt, about half would be


@pytest.mark.parametrize("cost_s", [-0.1, math.nan, math.inf])
def test_times_that_are_none(cost_s: float) -> None:
    cost = DecodeCost({1: 0.1})
    cost.decoded(1, cost_s, after_idle=True)  # of a clock that was set: left out
    assert cost.expected_s(1) == 0.1
    with pytest.raises(ValueError, match=r"a chunk of 1 frames in .* s is no cost"):
        DecodeCost({1: cost_s})
    with pytest.raises(ValueError, match=r"a chunk of 0 frames"):
        DecodeCost({0: 0.1})
