"""What the policies promise, in simulated time; see also benchmarks/start_policy.py."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import SAMPLES, LedgerProgram, expected_ledger, make_codes

from codecstream import StreamDecoder
from codecstream.forecast import ArrivalForecast
from codecstream.policy import AdaptivePolicy, Decision, FixedPolicy, StartPolicy
from codecstream.schedule import Ramp
from codecstream.simulate import (
    Packet,
    Playback,
    clairvoyant_start_s,
    ramp_start_s,
    simulate,
)

FRAME_S = 0.08
SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 25)
SAME_S = 0.002


def make_cost(share: float, fixed_frames: float = 0.8) -> Callable[[int], float]:
    """Return what n frames cost when 25 take ``share`` of their duration."""
    per_frame_s = share * FRAME_S * 25 / (25 + fixed_frames)
    return lambda frames: per_frame_s * (frames + fixed_frames)


def warm_up(cost: Callable[[int], float]) -> dict[int, float]:
    return {n: cost(n) for n in (1, 2, 4, 8, 16, 25)}


def paced(frames: int, pace: float, late_s: list[float] | None = None) -> list[Packet]:
    packets, last_s = [], 0.0
    for i in range(frames):
        last_s = max(last_s, (i + 1) * pace * FRAME_S + (late_s[i] if late_s else 0.0))
        packets.append((last_s, 1))
    return packets


def allowed(past: list[Packet], frames: int, start_s: float, shares: list[float]) -> list[Packet]:
    """Return an utterance in which no frames in a row take longer than as many did in the past.

    Each frame comes after that share, 0 to 1, of the longest time that it may take; 1 is the
    slowest utterance that the past allows.
    """
    past_s = [time_s for time_s, _ in past]
    longest_s = [
        max(past_s[i + lag] - past_s[i] for i in range(len(past_s) - lag))
        for lag in range(len(past_s) // 2 + 1)
    ]
    times_s = [start_s]
    while len(times_s) < frames:
        latest_s = min(time_s + longest_s[len(times_s) - j] for j, time_s in enumerate(times_s))
        share = shares[len(times_s) % len(shares)]
        times_s.append(times_s[-1] + share * (latest_s - times_s[-1]))
    return [(time_s, 1) for time_s in times_s]


jitters = st.one_of(
    st.just([0.0] * 250),
    st.builds(
        lambda seed, often, most_s: [
            most_s * rng.random() if rng.random() < often else 0.0
            for rng in [random.Random(seed)]
            for _ in range(250)
        ],
        st.integers(0, 999),
        st.floats(0, 0.5),
        st.floats(0, 0.4),
    ),
    st.integers(1, 10).map(lambda size: [(size - 1 - i % size) * FRAME_S for i in range(250)]),
)


# The claims


@settings(max_examples=60, deadline=None)
@given(
    pace=st.floats(0.3, 1.2),
    late_s=jitters,
    share=st.floats(0.05, 0.9),
    shares=st.lists(st.floats(0, 1), min_size=1, max_size=10),
    first_s=st.floats(0, 0.5),
)
def test_no_underrun_while_frames_keep_to_the_past(
    pace: float, late_s: list[float], share: float, shares: list[float], first_s: float
) -> None:
    """Chunks cost what they cost at warm-up, and no run of frames is slower than in the past."""
    cost = make_cost(share)
    past = paced(250, pace, late_s)
    policy = AdaptivePolicy(warm_up(cost))
    simulate(policy, past, cost)
    packets = allowed(past, 120, first_s, shares)
    run = simulate(policy, packets, cost, offset_s=1000.0)
    assert (run.underruns, run.stall_s) == (0, 0.0)
    assert sum(chunk.frames for chunk in run.chunks) == 120


@settings(max_examples=40, deadline=None)
@given(pace=st.floats(0.3, 1.0), late_s=jitters, share=st.floats(0.05, 0.9))
def test_never_later_than_a_ramp_with_a_prebuffer_for_what_may_come(
    pace: float, late_s: list[float], share: float
) -> None:
    """The prebuffer has to be enough if every frame comes as late as is forecast at the first."""
    cost = make_cost(share)
    past = paced(250, pace, late_s)
    policy = AdaptivePolicy(warm_up(cost))
    simulate(policy, past, cost)
    forecast = ArrivalForecast()
    for time_s, frames in past:
        forecast.arrived(time_s, frames)
    forecast.begin()
    forecast.arrived(1000.2, 1)
    latest_s = forecast.bounds_s(1000.2, 124)
    assert latest_s is not None
    packets = [(0.2, 1), *((time_s - 1000, 1) for time_s in latest_s)]
    run = simulate(policy, packets, cost, offset_s=1000.0)
    assert run.start_s is not None
    assert run.start_s <= ramp_start_s(packets, cost, Ramp().split(125)) + SAME_S


@pytest.mark.parametrize("pace", [0.5, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.7])
@pytest.mark.parametrize("size", [1, 4])
def test_an_even_stream_begins_when_the_clairvoyant_would(
    pace: float, share: float, size: int
) -> None:
    cost = make_cost(share)
    policy = AdaptivePolicy(warm_up(cost))
    packets = [((i + 1) * pace * FRAME_S * size, size) for i in range(120 // size)]
    simulate(policy, packets, cost)
    run = simulate(policy, packets, cost, offset_s=1000.0)
    assert run.underruns == 0 and run.start_s is not None
    assert run.start_s <= 1.1 * clairvoyant_start_s(packets, cost)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("pace", [1.05, 1.2])
def test_slower_than_real_time_is_safe_for_what_it_was_told_to_protect(
    share: float, pace: float
) -> None:
    cost = make_cost(share)
    policy = AdaptivePolicy(warm_up(cost), protect_s=4.8)  # 60 frames
    for index in range(2):
        run = simulate(policy, paced(60, pace), cost, offset_s=100.0 * index)
        assert run.underruns == 0
    longer = simulate(policy, paced(120, pace), cost, offset_s=1000.0)
    assert 0 < longer.underruns <= 4  # nobody can know; but then it waits, and does not stutter


@pytest.mark.parametrize("frames", [20, 60, 120])
def test_a_length_that_is_told_is_what_is_protected(frames: int) -> None:
    class Told(AdaptivePolicy):
        def begin(self) -> None:
            super().begin()
            self.expect(frames)

    cost = make_cost(0.3)
    policy = Told(warm_up(cost))
    packets = paced(frames, 1.2)
    simulate(policy, paced(120, 1.2), cost)
    run = simulate(policy, packets, cost, offset_s=1000.0)
    assert run.underruns == 0 and run.start_s is not None
    assert run.start_s <= 1.1 * clairvoyant_start_s(packets, cost)


def test_an_utterance_that_ends_is_played_at_once() -> None:
    """Two frames of a slow talker: when the second is there, nothing more is waited for."""
    cost = make_cost(0.5)
    run = simulate(AdaptivePolicy(warm_up(cost)), [(1.0, 1), (3.0, 1)], cost)
    assert run.start_s == pytest.approx(3.0) and run.underruns == 0


def test_chunks_grow_when_there_is_time_and_stay_small_when_there_is_not() -> None:
    cost = make_cost(0.2)
    fast = simulate(AdaptivePolicy(warm_up(cost)), paced(200, 0.4), cost)
    assert max(chunk.frames for chunk in fast.chunks) == 25
    policy = AdaptivePolicy(warm_up(cost))
    simulate(policy, paced(200, 1.0), cost)
    just = simulate(policy, paced(200, 1.0), cost, offset_s=100.0)
    assert {chunk.frames for chunk in just.chunks} == {1}


@pytest.mark.parametrize("pace", [0.5, 0.9])
def test_a_device_that_just_keeps_up_does_not_use_up_its_slack(pace: float) -> None:
    """Decoding takes 0.9 of real time, varying by 5 %: the largest chunk that is in time is not
    the one to take."""
    for seed in range(3):
        rng = random.Random(seed)
        exact = make_cost(0.9)

        def cost(frames: int, exact: Any = exact, rng: Any = rng) -> float:
            return float(exact(frames) * rng.uniform(0.95, 1.05))

        policy = AdaptivePolicy(warm_up(cost))
        for index in range(4):
            run = simulate(policy, paced(120, pace), cost, offset_s=100.0 * index)
            assert run.underruns == 0


# Whatever happens


packet_lists = st.lists(st.tuples(st.floats(0, 1.5), st.integers(0, 20)), min_size=0, max_size=15)


def cumulated(gaps: list[tuple[float, int]]) -> list[Packet]:
    packets, now_s = [], 0.0
    for gap_s, frames in gaps:
        now_s += gap_s
        packets.append((now_s, frames))
    return packets


@settings(max_examples=30, deadline=None)
@given(
    sessions=st.lists(packet_lists, min_size=1, max_size=3),
    share=st.floats(0, 2.5),
    prior=st.booleans(),
    most=st.one_of(st.none(), st.integers(1, 30)),
    noise=st.floats(0, 1),
)
def test_every_frame_is_decoded_once_in_sizes_that_the_program_takes(
    sessions: list[list[tuple[float, int]]],
    share: float,
    prior: bool,
    most: int | None,
    noise: float,
) -> None:
    rng = random.Random(0)
    exact = make_cost(share)
    policy = AdaptivePolicy(warm_up(exact) if prior else None, max_frames=most)
    for index, gaps in enumerate(sessions):
        packets = cumulated(gaps)
        run = simulate(
            policy,
            packets,
            lambda frames: exact(frames) * (1 + noise * rng.random()),
            offset_s=1000.0 * index,
        )
        total = sum(frames for _, frames in packets)
        assert sum(chunk.frames for chunk in run.chunks) == total
        assert all(1 <= chunk.frames <= (most or 25) for chunk in run.chunks)
        assert (run.start_s is None) == (total == 0)
        assert run.stall_s >= 0 and not math.isnan(run.stall_s)


@pytest.mark.parametrize("frames", [0, 1])
@pytest.mark.parametrize("prior", [None, {1: 0.0, 2: 0.0}, {4: 0.1}])
def test_no_frame_and_one_frame(frames: int, prior: dict[int, float] | None) -> None:
    policy = AdaptivePolicy(prior)
    for index in range(4):
        run = simulate(policy, [(0.1, 1)] * frames, lambda n: 0.05, offset_s=index)
        expected = Playback((), None, 0, 0.0) if not frames else None
        assert expected is None or run == expected
        if frames:
            assert run.start_s == pytest.approx(0.15)


class JumpingClock:
    """Has the clock of a policy, and of what it answers, jump back and forth, then stay."""

    def __init__(self, policy: StartPolicy, jumps_s: list[float]) -> None:
        self.policy, self.jumps_s, self.calls = policy, jumps_s, 0

    def back_s(self) -> float:
        self.calls += 1
        return self.jumps_s[min(self.calls, len(self.jumps_s)) - 1]

    def begin(self) -> None:
        self.policy.begin()

    def arrived(self, now_s: float, frames: int) -> None:
        self.policy.arrived(now_s - self.back_s(), frames)

    def ended(self, now_s: float) -> None:
        self.policy.ended(now_s - self.back_s())

    def decoded(self, now_s: float, frames: int, cost_s: float) -> None:
        self.policy.decoded(now_s - self.back_s(), frames, cost_s - self.back_s())

    def next_chunk(self, now_s: float, ahead_s: float | None) -> Decision:
        back_s = self.back_s()
        decision = self.policy.next_chunk(now_s - back_s, ahead_s)
        assert decision.ask_again_s > now_s - back_s  # a caller never spins
        return Decision(decision.frames, decision.ask_again_s + back_s)

    def begin_at_s(self, now_s: float, queued_s: float) -> float:
        back_s = self.back_s()
        return self.policy.begin_at_s(now_s - back_s, queued_s) + back_s


@settings(max_examples=15, deadline=None)
@given(
    jumps_s=st.lists(st.floats(0, 5), min_size=1, max_size=60),
    pace=st.floats(0, 1.3),
    share=st.floats(0, 1),
)
def test_a_clock_that_jumps_back_loses_no_frame(
    jumps_s: list[float], pace: float, share: float
) -> None:
    policy = AdaptivePolicy()
    told = JumpingClock(policy, jumps_s)
    cost = make_cost(share)
    for _ in range(2):
        run = simulate(told, paced(40, pace), cost, offset_s=10.0)
        assert sum(chunk.frames for chunk in run.chunks) == 40


@pytest.mark.parametrize("policy", [AdaptivePolicy(), FixedPolicy((1,))])
def test_no_answer_lies_before_what_was_told(policy: StartPolicy) -> None:
    policy.begin()
    policy.arrived(10.0, 1)
    policy.ended(10.0)
    assert policy.next_chunk(10.0, None) == Decision(1)
    policy.decoded(10.1, 1, 0.1)
    assert policy.begin_at_s(3.0, FRAME_S) == 10.1


@pytest.mark.parametrize("cost_s", [-1.0, math.nan])
def test_a_cost_of_a_clock_that_jumped_is_left_out(cost_s: float) -> None:
    policy = AdaptivePolicy({1: 0.05, 2: 0.08})
    policy.begin()
    for i in range(4):
        policy.arrived(0.04 * i, 1)
    assert policy.next_chunk(0.2, None).frames
    policy.decoded(0.1, 1, cost_s)
    assert policy.begin_at_s(0.2, 0.08) == 0.2


def test_while_everything_waits_the_latest_moment_is_named() -> None:
    """Lots of audio is queued: a larger chunk pays, and what is there is decoded in time."""
    cost = make_cost(0.5)
    policy = AdaptivePolicy(warm_up(cost))
    simulate(policy, paced(200, 0.8), cost)
    policy.begin()
    policy.arrived(100.0, 3)
    decision = policy.next_chunk(100.0, ahead_s=1.0)
    assert decision.frames == 0
    assert 100.0 < decision.ask_again_s <= 101.0 - cost(3)
    late = policy.next_chunk(decision.ask_again_s, ahead_s=101.0 - decision.ask_again_s)
    assert 1 <= late.frames <= 3


def test_nothing_plays_before_anything_is_known() -> None:
    policy = AdaptivePolicy()
    policy.begin()
    policy.arrived(0.1, 1)
    assert policy.begin_at_s(0.1, 0.0) == math.inf
    assert policy.next_chunk(0.1, None) == Decision(1)
    policy.decoded(0.15, 1, 0.05)
    assert policy.begin_at_s(0.15, FRAME_S) == math.inf  # when does the next packet come?
    assert policy.next_chunk(0.15, None) == Decision(0)
    policy.arrived(0.18, 1)
    assert policy.begin_at_s(0.18, FRAME_S) < math.inf


# The fixed policy


@given(
    st.integers(1, 100),
    st.floats(0.01, 1.3),
    st.floats(0.01, 1),
    st.lists(st.integers(1, 30), min_size=1),
)
def test_the_fixed_policy_is_the_ramp(
    frames: int, pace: float, share: float, sizes: list[int]
) -> None:
    run = simulate(FixedPolicy(sizes), paced(frames, pace), make_cost(share))
    assert [chunk.frames for chunk in run.chunks] == Ramp(tuple(sizes)).split(frames)
    assert run.start_s == pytest.approx(run.chunks[0].end_s)


def test_a_prebuffer_counts_from_the_first_audio_and_ends_with_the_utterance() -> None:
    cost = make_cost(0.5)
    run = simulate(FixedPolicy((2, 4), prebuffer_s=0.5), paced(30, 1.0), cost)
    assert run.start_s == pytest.approx(0.16 + cost(2) + 0.5)
    short = simulate(FixedPolicy((2, 4), prebuffer_s=5.0), paced(3, 1.0), cost)
    assert short.start_s == pytest.approx(max(0.24, 0.16 + cost(2)) + cost(1))


# Settings


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FixedPolicy(prebuffer_s=-0.1), "a prebuffer is 0 or more seconds, not -0.1"),
        (lambda: FixedPolicy(prebuffer_s=math.nan), "a prebuffer is 0 or more seconds, not nan"),
        (lambda: FixedPolicy(()), "a schedule is one or more positive whole numbers"),
        (lambda: AdaptivePolicy(max_frames=0), "a chunk has at least one frame, not 0"),
        (lambda: AdaptivePolicy(protect_s=0), "protect_s is a positive number of seconds, not 0"),
        (lambda: AdaptivePolicy(protect_s=math.inf), "protect_s is a positive number"),
        (lambda: AdaptivePolicy({1: -0.1}), "a chunk of 1 frames in -0.1 s is no cost"),
        (lambda: AdaptivePolicy().expect(0), "an utterance has at least one frame, not 0"),
    ],
)
def test_settings_that_make_no_sense(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# With a decoder


@settings(max_examples=30, deadline=None)
@given(gaps=packet_lists, most=st.integers(1, 25), share=st.floats(0.05, 1))
def test_a_decoder_that_is_told_by_a_policy_makes_the_same_audio(
    gaps: list[tuple[float, int]], most: int, share: float
) -> None:
    packets = cumulated(gaps)
    program = LedgerProgram()
    program.max_frames = most
    policy = AdaptivePolicy(max_frames=program.max_frames)
    run = simulate(policy, packets, make_cost(share))
    codes = make_codes(sum(frames for _, frames in packets))
    decoder = StreamDecoder(program, (1,))
    decoder.push(codes)
    pcm = [decoder.decode(chunk.frames) for chunk in run.chunks]
    assert decoder.frames_pending == 0
    assert np.array_equal(np.concatenate([*pcm, np.empty(0, np.float32)]), expected_ledger(codes))
    assert sum(part.size for part in pcm) == len(codes) * SAMPLES


@pytest.mark.parametrize(("max_frames", "calls"), [(None, [1, 1, 8, 8]), (4, [1, 1])])
def test_a_policy_for_a_program_knows_what_it_takes_and_what_that_costs(
    max_frames: int | None, calls: list[int]
) -> None:
    program = LedgerProgram()
    program.max_frames = max_frames
    policy = AdaptivePolicy.for_program(program)
    assert program.calls == calls, "the second call of each size counts"
    assert policy._cost.known and policy._cost._largest == calls[-1]
    policy.begin()
    policy.arrived(0.0, 500)
    policy.ended(0.0)
    sizes = set()
    for second in range(60):
        decision = policy.next_chunk(float(second), 100.0)
        policy.decoded(second + 0.5, decision.frames, 0.01)
        sizes.add(decision.frames)
    assert max(sizes) == (max_frames or 25)


def test_arrivals_that_are_told_late_count_from_when_they_came() -> None:
    """A packet that came while a chunk was being decoded is told after it."""
    policies = [AdaptivePolicy({1: 0.05, 25: 0.5}) for _ in range(2)]
    for policy in policies:
        policy.begin()
    for i in range(20):
        policies[0].arrived(0.04 * (i + 1), 1)
    policies[1].arrived(0.04, 1)
    assert policies[1].next_chunk(0.9, None).frames == 1
    policies[1].decoded(0.95, 1, 0.05)
    for i in range(1, 20):
        policies[1].arrived(0.04 * (i + 1), 1)
    told, late = (policy._forecast.bounds_s(1.0, 25) for policy in policies)
    assert told is not None and late == pytest.approx(told)
