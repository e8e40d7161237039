"""A policy in the pipeline: what is decoded when, what is handed out when; all on a fake clock."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from one_clock import (
    FRAME_S,
    REQUEST_S,
    Recorded,
    Rig,
    Timed,
    cost,
    ended,
    paced,
    reset_at,
    sentence_of,
    talk,
)
from support import GEOMETRY, LedgerProgram, expected_ledger, make_codes

from codecstream import PolicyError, StreamDecoder
from codecstream.errors import StalledError
from codecstream.events import UtteranceFailed
from codecstream.pacing import PATIENCE_S, Pacing, Playhead
from codecstream.policy import AdaptivePolicy, Decision, FixedPolicy


class Whimsical(FixedPolicy):
    """Allowed answers, but any of them: sizes, waits and beginnings by a list of numbers."""

    def __init__(self, whims: list[int], max_frames: int | None) -> None:
        super().__init__((1,))
        self.whims, self.asked, self.most = whims, 0, max_frames or 10**9
        self.there = 0
        self.waited = False

    def whim(self) -> int:
        self.asked += 1
        return self.whims[self.asked % len(self.whims)]

    def begin(self) -> None:
        self.there = 0

    def arrived(self, now_s: float, frames: int) -> None:
        self.there += frames

    def next_chunk(self, now_s: float, ahead_s: float | None) -> Decision:
        least = int(self.waited)  # twice in a row would soon be a policy that waits for nothing
        frames = min(self.there, max(least, self.whim() % 9), self.most)
        self.waited = not frames
        self.there -= frames
        return Decision(frames, now_s + 0.05)

    def begin_at_s(self, now_s: float, queued_s: float) -> float:
        return now_s + self.whim() / 20 if self.whim() % 3 else math.inf


# Whatever the policy, what is heard is the same

sentences = st.lists(
    st.lists(st.tuples(st.integers(1, 9), st.floats(0, 0.5)), min_size=1, max_size=8),
    min_size=1,
    max_size=3,
)


@settings(deadline=None, max_examples=150)
@given(
    sentences,
    st.lists(st.integers(0, 20), min_size=3, max_size=9),
    st.sampled_from([None, 3]),
    st.sampled_from(["whimsical", "adaptive", "fixed"]),
    st.booleans(),
    st.sampled_from([3600.0, 0.0, 0.3]),
)
def test_no_frame_is_lost_repeated_or_across_sentences_and_the_audio_is_the_ramps(
    said: list[list[tuple[int, float]]],
    whims: list[int],
    max_frames: int | None,
    kind: str,
    reset: bool,
    max_ahead_s: float,
) -> None:
    events: list[Timed] = []
    expected, ends, now_s = [], [0], 0.0
    for index, packets in enumerate(said):
        sizes, times_s = [size for size, _ in packets], []
        for _, gap_s in packets:
            now_s += gap_s
            times_s.append(now_s)
        codes = make_codes(sum(sizes), seed=index)
        events += sentence_of(codes, times_s, sizes)
        first = sizes[0] if reset and len(sizes) > 1 else 0
        if first:  # in mid-sentence, the decoder starts anew
            events.insert(len(events) - len(sizes), reset_at(times_s[0]))
            ends.append(ends[-1] + first)
        ends.append(ends[-1] + len(codes) - (first if first else 0))
        expected += [expected_ledger(codes[:first]), expected_ledger(codes[first:])]
    policy = {
        "whimsical": Whimsical(whims, max_frames),
        "adaptive": AdaptivePolicy(max_frames=max_frames),
        "fixed": FixedPolicy((1, 3)),
    }[kind]
    run = Rig(ended(events), policy, cost, max_frames=max_frames, max_ahead_s=max_ahead_s).run()
    ramp = Rig(ended(events), None, cost, schedule=(2, 3), max_ahead_s=max_ahead_s).run()
    assert run.pipeline.error is None
    assert np.array_equal(run.pcm, np.concatenate(expected))
    assert np.array_equal(run.pcm, ramp.pcm)
    chunks = [chunk for _, chunk in run.heard]
    assert all(1 <= chunk.frames <= (max_frames or 10**9) for chunk in chunks)
    for chunk in chunks:
        assert not any(
            chunk.first_frame < end < chunk.first_frame + chunk.frames for end in ends
        ), "a chunk across sentences, or across a reset"
        assert chunk.t_ms >= chunk.arrival_ms
    first_frames = np.cumsum([0, *(chunk.frames for chunk in chunks)])
    assert [chunk.first_frame for chunk in chunks] == first_frames[:-1].tolist()
    assert [chunk.idx for chunk in chunks] == list(range(len(chunks)))
    assert [c.sentence_index for c in chunks] == sorted(c.sentence_index for c in chunks)
    assert chunks[-1].sentence_index == len(said) - 1


def test_a_chunk_came_when_the_packet_of_its_last_frame_did() -> None:
    events = ended(sentence_of(make_codes(9), [0.1, 0.2, 0.3], [3, 3, 3]))
    run = Rig(events, FixedPolicy((2, 4, 3)), cost).run()
    assert [chunk.frames for _, chunk in run.heard] == [2, 4, 3]
    assert [chunk.arrival_ms for _, chunk in run.heard] == pytest.approx([100, 200, 300])


# What the policy is told and asked


def test_the_policy_is_told_what_came_and_what_it_cost_each_sentence_by_itself() -> None:
    first = sentence_of(make_codes(30), paced(30), [1] * 30)
    second = sentence_of(make_codes(20), paced(20, begin_s=2.6), [1] * 20)
    policy = Recorded()
    Rig(ended(first + second), policy, cost).run()
    marks = [call[0] for call in policy.calls if call[0] in ("begin", "ended")]
    assert marks == ["begin", "ended", "begin", "ended"]
    arrived = [call for call in policy.calls if call[0] == "arrived"]
    came_s = [REQUEST_S + time_s for time_s in paced(30) + paced(20, begin_s=2.6)]
    assert [call[1] for call in arrived] == pytest.approx(came_s)
    decoded = [call for call in policy.calls if call[0] == "decoded"]
    asked = [call for call in policy.calls if call[0] == "next_chunk" and call[3]]
    assert [call[2] for call in decoded] == [call[3] for call in asked]
    for ready, begun in zip(decoded, asked, strict=True):
        assert ready[1] == pytest.approx(begun[1] + cost(ready[2]))
        assert ready[3] == pytest.approx(cost(ready[2]))


def test_frames_of_the_next_sentence_that_came_before_its_turn_keep_their_times() -> None:
    """Else a talker that is ahead of the decoder would look like one that sends all at once."""

    def slow(frames: int) -> float:
        return 0.075 * frames

    first = sentence_of(make_codes(30), paced(30, 0.5), [1] * 30)
    second = sentence_of(make_codes(30), paced(30, 0.5, begin_s=1.2), [1] * 30)
    policy = Recorded()
    Rig(ended(first + second), policy, slow).run()
    begun = [i for i, call in enumerate(policy.calls) if call[0] == "begin"][1]
    came = [call[1] for call in policy.calls[begun:] if call[0] == "arrived"]
    assert came == pytest.approx([REQUEST_S + t for t in paced(30, 0.5, begin_s=1.2)])
    assert policy.calls[begun - 1][1] > came[0] + 0.5, "the first sentence took until then"
    policy.begin()
    assert policy._forecast._past[-1].frame_s == pytest.approx(0.04, rel=0.01)


def test_arrivals_reach_the_policy_while_the_worker_is_busy() -> None:
    """When playback begins depends on them."""
    policy = Recorded(costs_s={1: 0.03, 25: 1.0})
    rig = Rig(talk(12), policy, lambda frames: 0.5)
    seen: list[int] = []
    rig.at = [(0.45, lambda rig: seen.append(sum(c[0] == "arrived" for c in policy.calls)))]
    rig.run()
    assert rig.heard[0][1].frames == 1 and rig.heard[0][1].t_ms == pytest.approx(580)
    told = [call[1] - REQUEST_S for call in policy.calls if call[0] == "arrived"]
    assert told == pytest.approx(paced(12))


def test_the_policy_is_asked_when_playback_runs_dry() -> None:
    """Nothing else happens then: all frames have come, and it has named no time."""

    class OnlyWhenDry(FixedPolicy):
        def next_chunk(self, now_s: float, ahead_s: float | None) -> Decision:
            return Decision(0) if ahead_s is not None else super().next_chunk(now_s, ahead_s)

    events = ended(sentence_of(make_codes(6), [0.1], [6]))
    rig = Rig(events, OnlyWhenDry((2,)), cost).run()
    # Two chunks before anything plays; 0.32 s of audio from 0.15 s on; then the third.
    heard_s = [0.1 + cost(2), 0.1 + 2 * cost(2), 0.15 + 4 * FRAME_S + cost(2)]
    assert [time_s for time_s, _ in rig.heard] == pytest.approx(heard_s)


def test_to_the_policy_a_client_that_is_paused_has_all_the_time_there_is() -> None:
    def hold(paused: bool) -> Callable[[Rig], None]:
        return lambda rig: setattr(rig.pipeline, "paused", paused)

    policy = Recorded(costs_s={1: cost(1), 25: cost(25)})
    rig = Rig(talk(60), policy, cost)
    rig.at = [(1.0, hold(True)), (2.0, hold(False))]
    rig.run()
    asked = [call for call in policy.calls if call[0] == "next_chunk"]
    during = [call[2] for call in asked if 1.0 < call[1] - REQUEST_S < 1.99]
    assert during and set(during) == {math.inf}
    assert math.inf not in [call[2] for call in asked if call[1] - REQUEST_S > 2.01]
    assert not [time_s for time_s, _ in rig.heard if 1.0 < time_s < 2.0]
    assert np.array_equal(rig.pcm, expected_ledger(make_codes(60)))


# Where the policy, or the output, answers nonsense


class Nonsense(FixedPolicy):
    """Does as it is told to by the test, in one of its answers."""

    def __init__(self, **answers: Any) -> None:
        super().__init__((2, 4))
        self.answers = answers

    def next_chunk(self, now_s: float, ahead_s: float | None) -> Decision:
        if "next_chunk" in self.answers:
            answer: Decision = self.answers["next_chunk"](now_s)
            return answer
        return super().next_chunk(now_s, ahead_s)

    def begin_at_s(self, now_s: float, queued_s: float) -> float:
        if "begin_at_s" in self.answers:
            answer: float = self.answers["begin_at_s"](now_s)
            return answer
        return super().begin_at_s(now_s, queued_s)

    def decoded(self, now_s: float, frames: int, cost_s: float) -> None:
        self.answers.get("decoded", lambda now_s: None)(now_s)
        super().decoded(now_s, frames, cost_s)

    def arrived(self, now_s: float, frames: int) -> None:
        self.answers.get("arrived", lambda now_s: None)(now_s)
        super().arrived(now_s, frames)


def fault(now_s: float) -> Any:
    raise ZeroDivisionError("of a policy")


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        ({"next_chunk": lambda now_s: Decision(1000)}, "chunk of 1000 frames: 1 are there"),
        ({"next_chunk": lambda now_s: Decision(-1)}, "chunk of -1 frames"),
        ({"next_chunk": lambda now_s: Decision(1.5)}, "TypeError"),
        ({"next_chunk": lambda now_s: None}, "AttributeError"),
        ({"next_chunk": fault}, r"the start policy failed: ZeroDivisionError\('of a policy'\)"),
        ({"begin_at_s": fault}, "the start policy failed: ZeroDivisionError"),
        ({"begin_at_s": lambda now_s: "soon"}, "the start policy failed: ValueError"),
        ({"decoded": fault}, "the start policy failed: ZeroDivisionError"),
        ({"arrived": fault}, "the start policy failed: ZeroDivisionError"),
        ({"next_chunk": lambda now_s: Decision(0)}, "waits for nothing: it has left 20 frames"),
        ({"next_chunk": lambda now_s: Decision(0, now_s)}, "waits for nothing"),
        ({"next_chunk": lambda now_s: Decision(0, math.nan)}, "waits for nothing"),
        ({"next_chunk": lambda now_s: Decision(0, now_s - 1)}, "waits for nothing"),
    ],
)
def test_a_policy_that_answers_nonsense_ends_in_an_error_that_says_so(
    answers: dict[str, Callable[[float], Any]], told: str
) -> None:
    rig = Rig(talk(20), Nonsense(**answers), cost).run()
    assert isinstance(rig.pipeline.error, PolicyError)
    with pytest.raises(PolicyError, match=told):
        raise rig.pipeline.error
    assert rig.now_s <= 20 * FRAME_S + PATIENCE_S + 0.1
    assert rig.turns < 2000, "nor does it keep the processor busy"


def test_a_chunk_larger_than_the_program_takes_is_not_asked_of_it() -> None:
    rig = Rig(talk(20), FixedPolicy((2, 8)), cost, max_frames=4).run()
    assert isinstance(rig.pipeline.error, PolicyError)
    assert "8 frames: 8 are there, the program takes at most 4" in str(rig.pipeline.error)
    assert rig.program.calls == [2]


@pytest.mark.parametrize("never", [math.inf, math.nan, 1e12])
def test_a_policy_that_never_begins_is_overruled_when_the_sentence_is_decoded(
    never: float,
) -> None:
    rig = Rig(talk(20), Nonsense(begin_at_s=lambda now_s: never), cost).run()
    assert rig.pipeline.error is None
    assert np.array_equal(rig.pcm, expected_ledger(make_codes(20)))
    assert rig.heard[0][0] <= 20 * FRAME_S + cost(4)


def test_a_sentence_does_not_wait_for_the_next_one_to_be_heard() -> None:
    """The policy knows nothing of the next one, and can say nothing, when its first frame came."""
    first = sentence_of(make_codes(5), paced(5), [1] * 5)
    second = sentence_of(make_codes(9, 1), paced(9, begin_s=0.4), [1] * 9)
    slow = [(time_s + 30.0 if time_s > 0.49 else time_s, event) for time_s, event in second]
    policy = Nonsense(begin_at_s=lambda now_s: math.inf)
    rig = Rig(ended(first + slow), policy, lambda frames: 0.3).run()
    ended_s = max(chunk.t_ms / 1000 for _, chunk in rig.heard if chunk.sentence_index == 0)
    assert all(time_s == pytest.approx(ended_s) for time_s, c in rig.heard if c.sentence_index == 0)
    assert ended_s < 2.0


def test_a_policy_that_never_begins_is_overruled_when_there_is_no_room() -> None:
    rig = Rig(talk(200), Nonsense(begin_at_s=lambda now_s: math.inf), cost, max_ahead_s=1.0).run()
    assert np.array_equal(rig.pcm, expected_ledger(make_codes(200)))
    assert rig.heard[0][0] == pytest.approx(14 * FRAME_S + cost(4))  # 2 + 4 + 4 + 4 are 1.12 s


def test_what_came_before_a_silence_is_heard_though_the_policy_still_waits() -> None:
    events = talk(20)[:12]
    failure = StalledError("no frame", waited_s=20.0)
    events.append((30.0, UtteranceFailed(failure, after_audio=True)))
    rig = Rig(events, AdaptivePolicy(), cost).run()
    assert rig.pipeline.error is failure
    assert np.array_equal(rig.pcm, expected_ledger(make_codes(20)[:11]))


@pytest.mark.parametrize("answer", [-1.0, math.nan, "much"])
def test_an_output_that_answers_nonsense_is_named(answer: Any) -> None:
    rig = Rig(talk(5), AdaptivePolicy(), cost)
    rig.pipeline._pacing = Pacing(AdaptivePolicy(), None, lambda: answer)
    rig.run()
    assert isinstance(rig.pipeline.error, PolicyError)
    assert str(rig.pipeline.error).startswith("ahead_s failed")


# An attempt that is made again


def test_what_is_asked_for_again_begins_anew_for_the_policy() -> None:
    policy = Recorded()
    rig = Rig(talk(20), policy, cost)
    pipeline = rig.pipeline
    for time_s, event in talk(9)[:-2]:
        pipeline.feed(event, time_s * 1000)
    job = pipeline.next_job(REQUEST_S + 1.0)
    assert job is not None
    pipeline.restart()
    pipeline.finish_job(job, job.run(), 1100.0, 100.0)
    assert pipeline.next_job(REQUEST_S + 1.2) is None
    assert [call[0] for call in policy.calls].count("decoded") == 0
    rig.events = talk(20, begin_s=2.0)
    rig.run()
    assert np.array_equal(rig.pcm, expected_ledger(make_codes(20)))
    assert [call[0] for call in policy.calls].count("begin") == 2


def test_a_decoder_of_its_own_ramp_is_left_as_it_was() -> None:
    """Without a policy there is neither a clock nor a wait."""
    program = LedgerProgram()
    rig = Rig(talk(57), None, cost)
    rig.pipeline._new_decoder = lambda: StreamDecoder(program)
    rig.pipeline.restart()
    rig.run()
    assert program.calls == [2, 4, 8, 16, 25, 2]
    assert (rig.pipeline.ask_again_s, rig.pipeline.begin_s) == (math.inf, math.inf)
    assert [t for t, _ in rig.heard] == [c.t_ms / 1000 for _, c in rig.heard]
    assert GEOMETRY.seconds(1) == FRAME_S


# How much is still to be heard


def test_without_word_from_the_output_the_passing_of_time_tells() -> None:
    head = Playhead(None)
    assert head.ahead_s(5.0, more=True) is None
    head.handed_out(10.0, 0.5)
    assert head.ahead_s(10.2, more=False) == pytest.approx(0.3)
    head.handed_out(10.2, 0.5)
    assert head.ahead_s(10.9, more=True) == pytest.approx(0.1)
    assert head.ahead_s(11.1, more=True) == 0.0, "its caller has not come for what there is"
    assert head.ahead_s(11.1, more=False) is None
    assert head.ahead_s(11.1, more=True) is None, "it ran dry before there was more"
    head.handed_out(12.0, 0.5)
    assert head.ahead_s(12.0, more=False) == pytest.approx(0.5)


@given(st.floats(0, 3), st.none() | st.floats(0, 3), st.floats(0, 3), st.booleans(), st.booleans())
def test_what_the_caller_has_in_hand_counts_once(
    audio_s: float, said_s: float | None, passed_s: float, back: bool, twice: bool
) -> None:
    said: list[float | None] = [said_s]
    head = Playhead(lambda: said[0])
    head.handed_out(7.0, audio_s)
    if back:
        head.back()
    for _ in range(1 + twice):  # asking changes nothing
        ahead_s = head.ahead_s(7.0 + passed_s, more=False)
    least_s = said_s or 0.0
    assert (ahead_s or 0.0) >= least_s
    assert (ahead_s or 0.0) <= least_s + (0.0 if back else audio_s) + 1e-9
    if said_s is not None:
        assert ahead_s is not None
    if back:
        assert ahead_s == said_s
    elif said_s is None and passed_s < audio_s - 1e-9:
        assert ahead_s == pytest.approx(audio_s - passed_s)


def test_a_chunk_in_hand_is_counted_before_and_after_it_is_written() -> None:
    said: list[float | None] = [None]
    head = Playhead(lambda: said[0])
    head.handed_out(0.0, 0.4)
    assert head.ahead_s(0.1, more=False) == pytest.approx(0.3)
    said[0] = 0.4  # now the player has it, a little late
    assert head.ahead_s(0.1, more=False) == pytest.approx(0.4)
    said[0] = 0.2
    assert head.ahead_s(0.3, more=False) == pytest.approx(0.2)
    said[0] = math.inf
    assert head.ahead_s(0.3, more=False) == math.inf
    said[0] = None
    assert head.ahead_s(0.6, more=False) is None
