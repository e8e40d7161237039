"""The simulator, where the outcome can be worked out by hand or by other code of the package."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codecstream.metrics import ChunkTime, summarise
from codecstream.policy import Decision, FixedPolicy
from codecstream.schedule import Ramp
from codecstream.simulate import (
    Packet,
    Playback,
    clairvoyant_start_s,
    ramp_start_s,
    simulate,
)

FRAME_S = 0.08


def paced(frames: int, pace: float = 1.0) -> list[Packet]:
    return [((i + 1) * pace * FRAME_S, 1) for i in range(frames)]


@given(
    st.lists(st.tuples(st.floats(0, 0.4), st.integers(1, 9)), min_size=1, max_size=12),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.floats(0.001, 0.2),
)
def test_a_ramp_without_prebuffer_stalls_as_the_metrics_say(
    gaps: list[tuple[float, int]], sizes: list[int], per_frame_s: float
) -> None:
    """codecstream.metrics computes the same from the chunks' times, in another way."""
    packets, now_s = [], 0.0
    for gap_s, frames in gaps:
        now_s += gap_s
        packets.append((now_s, frames))
    run = simulate(FixedPolicy(sizes), packets, lambda frames: per_frame_s * frames)
    chunks = [ChunkTime(chunk.end_s * 1000, chunk.frames * 1920) for chunk in run.chunks]
    figures = summarise(chunks, 24000)
    assert run.start_s is not None and figures.ttfa_ms is not None
    assert run.start_s * 1000 == pytest.approx(figures.ttfa_ms)
    assert run.stall_s * 1000 == pytest.approx(figures.stall_at_ttfa_ms, abs=1e-3)
    assert (run.underruns > 0) == (run.stall_s > 1e-9)
    total = sum(frames for _, frames in packets)
    assert [chunk.frames for chunk in run.chunks] == Ramp(tuple(sizes)).split(total)


@given(st.integers(1, 80), st.floats(0.3, 1.3), st.floats(0, 0.07))
def test_a_ramp_begins_without_underrun_at_its_own_start_and_not_sooner(
    frames: int, pace: float, per_frame_s: float
) -> None:
    packets = paced(frames, pace)
    sizes = Ramp().split(frames)
    start_s = ramp_start_s(packets, lambda n: per_frame_s * n, sizes)
    first_s = ramp_start_s(packets[: sizes[0]], lambda n: per_frame_s * n, sizes[:1])
    in_time = FixedPolicy(prebuffer_s=start_s - first_s + 1e-6)
    assert simulate(in_time, packets, lambda n: per_frame_s * n).underruns == 0
    if start_s - first_s > 0.02 and len(sizes) > 1:
        early = FixedPolicy(prebuffer_s=start_s - first_s - 0.01)
        run = simulate(early, packets, lambda n: per_frame_s * n)
        ended_s = packets[-1][0] + per_frame_s * sizes[-1]
        assert run.underruns or run.start_s == pytest.approx(ended_s, abs=0.1)


def test_times_are_counted_by_hand() -> None:
    """Chunks of 2 are ready at 260, 420, 580 ms; played from 260 to 420, 580 and 740 ms."""
    run = simulate(FixedPolicy((2,)), paced(6), lambda n: 0.05 * n)
    assert [round(chunk.begin_s, 3) for chunk in run.chunks] == [0.16, 0.32, 0.48]
    assert [round(chunk.end_s, 3) for chunk in run.chunks] == [0.26, 0.42, 0.58]
    assert (run.start_s, run.underruns, run.stall_s) == (pytest.approx(0.26), 0, 0.0)
    slower = simulate(FixedPolicy((2,)), paced(6), lambda n: 0.1 * n)
    assert slower.underruns == 2 and slower.stall_s == pytest.approx(0.08)


@pytest.mark.parametrize("prebuffer_s", [0.0, 0.1])
def test_nothing_to_play(prebuffer_s: float) -> None:
    nothing = Playback((), None, 0, 0.0)
    assert simulate(FixedPolicy(prebuffer_s=prebuffer_s), [], lambda n: 0.1) == nothing


def test_the_clock_of_the_policy_may_show_any_time() -> None:
    here = simulate(FixedPolicy(prebuffer_s=0.3), paced(40), lambda n: 0.03 * n)
    there = simulate(FixedPolicy(prebuffer_s=0.3), paced(40), lambda n: 0.03 * n, offset_s=5000)
    assert here.start_s == pytest.approx(there.start_s) and here.underruns == there.underruns


def test_the_clairvoyant_counts_frames_of_one_packet_each() -> None:
    packets = [(0.5, 4), (1.0, 4)]
    assert clairvoyant_start_s(packets, lambda n: 0.01) == pytest.approx(1.01 - 4 * FRAME_S)
    assert clairvoyant_start_s(packets, lambda n: 0.01 * n) == pytest.approx(0.69, abs=0.001)
    one = clairvoyant_start_s(packets, lambda n: 0.3 + 0.01 * n, max_frames=1)
    assert one == pytest.approx(0.5 + 8 * 0.31 - 7 * FRAME_S, abs=0.001)


def test_sizes_must_add_up() -> None:
    with pytest.raises(ValueError, match="add up to 6 frames, not 7"):
        ramp_start_s(paced(7), lambda n: 0.0, (2, 4))


@dataclass
class Stubborn(FixedPolicy):
    """Decides the same thing for ever."""

    decision: Decision

    def __post_init__(self) -> None:
        super().__init__()

    def next_chunk(self, now_s: float, ahead_s: float | None) -> Decision:
        return self.decision


@pytest.mark.parametrize(
    ("decision", "message"),
    [
        (Decision(0), "the policy waits for nothing"),
        (Decision(3), "the policy asks for 3 frames: not there"),
    ],
)
def test_a_policy_that_makes_no_sense_is_found_out(decision: Decision, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        simulate(Stubborn(decision), paced(2), lambda n: 0.1)


def test_waiting_ends_when_the_policy_said() -> None:
    asked_s = []

    class Patient(FixedPolicy):
        def next_chunk(self, now_s: float, ahead_s: float | None) -> Decision:
            asked_s.append(now_s)
            if now_s < 0.5:
                return Decision(0, 0.5)
            return super().next_chunk(now_s, ahead_s)

    run = simulate(Patient((1,)), [(0.1, 1)], lambda n: 0.1)
    assert run.start_s == pytest.approx(0.6) and asked_s == [0.1, 0.5, pytest.approx(0.6)]
    assert not math.isnan(run.stall_s)
