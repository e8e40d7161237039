"""The planner against every way to cut a few frames, tried one by one."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codecstream.plan import TOLERANCE_S, earliest_due_s, latest_free_s

FRAME_S = 0.08

arrivals = st.lists(st.floats(0, 0.3), min_size=1, max_size=8).map(
    lambda gaps: list(itertools.accumulate(gaps))
)
costs = st.builds(
    lambda fixed, per_frame, most: {n: fixed + per_frame * n for n in range(1, most + 1)},
    st.floats(0, 0.2),
    st.floats(0, 0.2),
    st.integers(1, 8),
)


def cuts(frames: int, most: int) -> list[tuple[int, ...]]:
    """Return all ways to write ``frames`` as a sum of sizes up to ``most``, in order."""
    if frames == 0:
        return [()]
    return [(n, *rest) for n in range(1, min(frames, most) + 1) for rest in cuts(frames - n, most)]


def needed_due_s(
    arrivals_s: list[float], costs_s: dict[int, float], free_s: float, cut: tuple[int, ...]
) -> float:
    """Return the earliest due time of frame 0 for one way to cut."""
    end_s, due_s, first = free_s, -math.inf, 0
    for size in cut:
        end_s = max(end_s, arrivals_s[first + size - 1]) + costs_s[size]
        due_s = max(due_s, end_s - first * FRAME_S)
        first += size
    return due_s


@settings(max_examples=150, deadline=None)
@given(arrivals, costs, st.floats(0, 2))
def test_no_cut_into_chunks_is_better(
    arrivals_s: list[float], costs_s: dict[int, float], free_s: float
) -> None:
    ways = cuts(len(arrivals_s), len(costs_s))
    best_s = min(needed_due_s(arrivals_s, costs_s, free_s, cut) for cut in ways)
    found_s = earliest_due_s(arrivals_s, costs_s, FRAME_S, free_s)
    assert best_s - 1e-9 <= found_s <= best_s + TOLERANCE_S + 1e-9


@settings(max_examples=150, deadline=None)
@given(arrivals, costs, st.floats(0, 2))
def test_the_worker_is_in_time_until_then_and_not_after(
    arrivals_s: list[float], costs_s: dict[int, float], due_s: float
) -> None:
    latest_s = latest_free_s(arrivals_s, costs_s, due_s, FRAME_S)
    assert len(latest_s) == len(arrivals_s) + 1 and latest_s[-1] == math.inf
    ways = cuts(len(arrivals_s), len(costs_s))

    def in_time(free_s: float) -> bool:
        return any(needed_due_s(arrivals_s, costs_s, free_s, cut) <= due_s + 1e-9 for cut in ways)

    if math.isinf(latest_s[0]):
        assert not any(needed_due_s(arrivals_s, costs_s, -10.0, cut) < due_s - 1e-9 for cut in ways)
    else:
        assert in_time(latest_s[0])
        assert not in_time(latest_s[0] + 1e-6)


def test_no_frames() -> None:
    assert earliest_due_s([], {1: 0.1}, FRAME_S) == -math.inf
    assert latest_free_s([], {1: 0.1}, 0.0, FRAME_S) == [math.inf]


@pytest.mark.parametrize("pace", [0.5, 1.0, 1.2])
def test_one_frame_at_a_time_is_best_when_decoding_is_fast(pace: float) -> None:
    frames = 50
    arrivals_s = [(i + 1) * pace * FRAME_S for i in range(frames)]
    due_s = earliest_due_s(arrivals_s, {1: 0.01, 2: 0.015, 25: 0.1}, FRAME_S)
    expected_s = max(pace * FRAME_S, arrivals_s[-1] - (frames - 1) * FRAME_S) + 0.01
    assert due_s == pytest.approx(expected_s, abs=TOLERANCE_S)
