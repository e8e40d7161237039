"""Both clients with a start policy and with a sampler, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shells import both_shells, listen, listen_in_thread, nothing_left, say
from speaking import CODES, replay
from support import LedgerProgram, expected_ledger, make_codes

import codecstream
from codecstream import PolicyError, Reconnect
from codecstream.policy import AdaptivePolicy, Decision, FixedPolicy, StartPolicy
from codecstream.sampling import UtteranceSampler, find_samples, read_sample
from codecstream.testing import Peer, Recording, ReplayServer, ScriptedServer

__all__ = ["nothing_left"]
pytestmark = pytest.mark.usefixtures("nothing_left")

WHOLE = expected_ledger(CODES)
PATIENCE_S = 20.0


async def within(coroutine: Any) -> Any:
    """A hang is a failure."""
    return await asyncio.wait_for(coroutine, PATIENCE_S)


async def speak_and_fall_silent(peer: Peer) -> None:
    """Send all frames of the utterance but the last, then nothing more."""
    await peer.request()
    await peer.start()
    await peer.packets(CODES[:-1], eos=False)
    with contextlib.suppress(Exception):
        await peer.receive()  # the client cancels, or closes


class Scripted(FixedPolicy):
    """A ramp of (3, 5) whose answers a test may replace; keeps when it was asked."""

    def __init__(
        self,
        next_chunk: Callable[[float, float | None], Decision | None] = lambda now_s, ahead_s: None,
        begin_at_s: Callable[[float], float | None] = lambda now_s: None,
    ) -> None:
        super().__init__((3, 5))
        self._answer, self._begin_answer = next_chunk, begin_at_s
        self.ahead_s: list[float | None] = []

    def next_chunk(self, now_s: float, ahead_s: float | None) -> Decision:
        self.ahead_s.append(ahead_s)
        answer = self._answer(now_s, ahead_s)
        return super().next_chunk(now_s, ahead_s) if answer is None else answer

    def begin_at_s(self, now_s: float, queued_s: float) -> float:
        answer = self._begin_answer(now_s)
        return super().begin_at_s(now_s, queued_s) if answer is None else answer


@both_shells
@pytest.mark.parametrize("pace", [0, 0.1])
async def test_utterances_are_whole_and_one_policy_serves_them_all(
    ledger_program: LedgerProgram, shell: str, pace: float
) -> None:
    policy = AdaptivePolicy()
    async with replay(pace=pace) as server:
        outcomes = await within(say(shell, server.url, ledger_program, *"abc", policy=policy))
    for outcome in outcomes:
        assert outcome.result.status == "complete"
        assert np.array_equal(outcome.pcm, WHOLE)
    assert sum(ledger_program.calls) == 3 * len(CODES)
    if pace:
        assert policy._forecast.utterances == 2, "what it learned stays"


@both_shells
async def test_the_policy_chooses_the_sizes(ledger_program: LedgerProgram, shell: str) -> None:
    ledger_program.max_frames = 7  # the default schedule would not fit, and nobody asks for it
    policy = FixedPolicy((3, 5, 7))
    async with replay() as server:
        (outcome,) = await within(say(shell, server.url, ledger_program, "x", policy=policy))
    assert ledger_program.calls == [3, 5, 7, 7, 7, 7, 7, 7, 7]
    assert [chunk.frames for chunk in outcome.chunks] == ledger_program.calls
    assert np.array_equal(outcome.pcm, WHOLE)


@both_shells
async def test_sentences_are_never_in_one_chunk(ledger_program: LedgerProgram, shell: str) -> None:
    recording = Recording(*np.split(CODES, [20, 22]))
    async with ReplayServer([recording], pace=0) as server:
        (outcome,) = await within(
            say(shell, server.url, ledger_program, "x", policy=AdaptivePolicy())
        )
    ends = [20, 22, 57]
    for chunk in outcome.chunks:
        last = chunk.first_frame + chunk.frames
        assert not any(chunk.first_frame < end < last for end in ends)
    expected = [expected_ledger(part) for part in np.split(CODES, [20, 22])]
    assert np.array_equal(outcome.pcm, np.concatenate(expected))


@both_shells
async def test_a_lost_connection_in_mid_sentence_is_made_good(
    ledger_program: LedgerProgram, shell: str
) -> None:
    policy = Scripted(begin_at_s=lambda now_s: math.inf)  # so nothing is handed out before

    async def script(peer: Peer) -> None:
        await peer.request()
        if server.connections == 1:
            await peer.start()
            await peer.packets(CODES[:9], eos=False)
            while sum(ledger_program.calls) < 8:
                await asyncio.sleep(0.005)
            peer.abort()
        else:
            await peer.speak(CODES)
            await peer.receive()

    async with ScriptedServer(script) as server:
        (outcome,) = await within(
            say(
                shell, server.url, ledger_program, "x",
                policy=policy, reconnect=Reconnect(first_delay_s=0.01),
            )
        )  # fmt: skip
    assert (outcome.result.status, outcome.result.attempts) == ("complete", 2)
    assert np.array_equal(outcome.pcm, WHOLE)


@both_shells
async def test_chunks_are_held_back_until_playback_is_to_begin_and_then_come_by_themselves(
    ledger_program: LedgerProgram, shell: str
) -> None:
    """The server says nothing any more: only the clock can wake who waits for the chunk."""
    begin_s: list[float] = []

    def begin_at_s(now_s: float) -> float:
        if ledger_program.calls[-1:] != [5] or sum(ledger_program.calls) < 53:
            return math.inf
        begin_s[:] = begin_s or [now_s + 0.3]
        return begin_s[0]

    taken_s: list[float] = []

    async def watch(client: Any) -> None:
        if shell == "asyncio":
            async with client as open_client:
                async for _ in open_client.speak("x"):
                    taken_s.append(time.perf_counter())
                    break
                await open_client.cancel()
            return

        def in_thread() -> None:
            with client as open_client:
                for _ in open_client.speak("x"):
                    taken_s.append(time.perf_counter())
                    break
                open_client.cancel()

        await asyncio.to_thread(in_thread)

    connect = codecstream.connect if shell == "asyncio" else codecstream.sync_connect
    async with ScriptedServer(speak_and_fall_silent) as server:
        policy = Scripted(begin_at_s=begin_at_s)
        client = connect(server.url, ledger_program, policy=policy)
        await within(watch(client))
    assert taken_s[0] >= begin_s[0]


@both_shells
async def test_a_policy_that_waits_is_asked_again_at_its_time(
    ledger_program: LedgerProgram, shell: str
) -> None:
    """Again, nothing else happens: it waits with all frames there that will ever come."""
    until_s: list[float] = []
    asked_s: list[float] = []

    def next_chunk(now_s: float, ahead_s: float | None) -> Decision | None:
        if policy._waiting < len(CODES) - 1 and not until_s:
            return Decision(0)
        until_s[:] = until_s or [now_s + 0.3]
        asked_s.append(now_s)
        return Decision(0, until_s[0]) if now_s < until_s[0] else None

    policy = Scripted(next_chunk)
    async with ScriptedServer(speak_and_fall_silent) as server:
        (outcome,) = await within(
            say(shell, server.url, ledger_program, "x", policy=policy, stall_timeout_s=3.0)
        )
    assert outcome.result.status == "stalled"
    assert np.array_equal(outcome.pcm, expected_ledger(CODES[:-1]))
    assert outcome.chunks[0].t_ms < 2500, "not only when the stall ended it"
    assert len(asked_s) < 200, "it is not asked without a rest"


@both_shells
@pytest.mark.parametrize("where", ["next_chunk", "begin_at_s", "too many", "ahead_s"])
async def test_a_policy_at_fault_ends_the_utterance_and_the_next_one_is_well(
    ledger_program: LedgerProgram, shell: str, where: str
) -> None:
    faults = [where]

    def fail(*now_s: Any) -> None:
        if faults and faults[0] != "too many":
            raise ZeroDivisionError(faults.pop())

    def answer(now_s: float, ahead_s: float | None) -> Decision | None:
        if where == "too many" and faults:
            faults.clear()
            return Decision(999)
        return fail() if where == "next_chunk" else None  # type: ignore[func-returns-value]

    def ahead_s() -> float | None:
        return fail() if where == "ahead_s" else None  # type: ignore[func-returns-value]

    policy = Scripted(answer, fail if where == "begin_at_s" else lambda now_s: None)
    async with replay(pace=0.1) as server:  # it is asked before all is there
        first, second = await within(
            say(shell, server.url, ledger_program, "a", "b", policy=policy, ahead_s=ahead_s)
        )
    assert first.result.status == "failed" and isinstance(first.error, PolicyError)
    assert where in str(first.error) or "999 frames" in str(first.error)
    assert second.result.status == "complete" and np.array_equal(second.pcm, WHOLE)


@both_shells
async def test_a_fault_that_strikes_the_caller_ends_the_decoding_beside_it(
    ledger_program: LedgerProgram, shell: str
) -> None:
    """The server is silent, also when it is told to stop: nothing of it wakes anybody."""
    asked_s: list[float] = []

    def begin_at_s(now_s: float) -> float:
        asked_s.append(now_s)
        return now_s + 0.5

    def ahead_s() -> float | None:
        if asked_s and time.perf_counter() > asked_s[-1] + 0.4:
            raise ZeroDivisionError("of an output")
        return None

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.start()
        await peer.packets(CODES[:-1], eos=False)
        with contextlib.suppress(Exception):
            while True:
                await peer.receive()

    async with ScriptedServer(script) as server:
        (outcome,) = await within(
            say(
                shell, server.url, ledger_program, "x",
                policy=Scripted(begin_at_s=begin_at_s), ahead_s=ahead_s, drain_timeout_s=0.2,
            )
        )  # fmt: skip
    assert isinstance(outcome.error, PolicyError) and "of an output" in str(outcome.error)
    assert outcome.chunks == []


@both_shells
async def test_the_output_is_listened_to_and_found_to_go_on_after_a_pause(
    ledger_program: LedgerProgram, shell: str
) -> None:
    """It does not say when it goes on; nor does the server say anything."""
    paused = threading.Event()
    paused.set()

    def next_chunk(now_s: float, ahead_s: float | None) -> Decision | None:
        return Decision(0) if ahead_s == math.inf else None

    def unpause() -> None:
        time.sleep(0.3)
        paused.clear()

    policy = Scripted(next_chunk)
    async with ScriptedServer(speak_and_fall_silent) as server:
        speaking = say(
            shell, server.url, ledger_program, "x",
            policy=policy, ahead_s=lambda: math.inf if paused.is_set() else 0.25,
            stall_timeout_s=3.0,
        )  # fmt: skip
        later = asyncio.create_task(asyncio.to_thread(unpause))
        (outcome,) = await within(speaking)
        await later
    # The last frames are left for more that could make up a chunk, until none come.
    assert np.array_equal(outcome.pcm, expected_ledger(CODES[:-1]))
    heard = [ahead_s for ahead_s in policy.ahead_s if ahead_s != math.inf]
    assert heard and all(ahead_s is not None and ahead_s >= 0.25 for ahead_s in heard)
    chunk_ms = outcome.chunks[0].t_ms
    assert chunk_ms < 2500, "not only when the stall ended it"


@both_shells
async def test_cancel_while_chunks_are_held_back(ledger_program: LedgerProgram, shell: str) -> None:
    held, cancelled = threading.Event(), threading.Event()

    def begin_at_s(now_s: float) -> float | None:
        held.set()
        return None if cancelled.is_set() else math.inf

    async def use_asyncio(url: str, policy: StartPolicy) -> list[Any]:
        async with codecstream.connect(url, ledger_program, policy=policy) as client:
            listening = asyncio.ensure_future(listen(client.speak("x")))
            await asyncio.to_thread(held.wait, PATIENCE_S)
            await client.cancel()
            cancelled.set()
            return [await listening, await listen(client.speak("y"))]

    def use_threads(url: str, policy: StartPolicy) -> list[Any]:
        with codecstream.sync_connect(url, ledger_program, policy=policy) as client:
            heard: list[Any] = []
            thread = threading.Thread(
                target=lambda: heard.append(listen_in_thread(client.speak("x")))
            )
            thread.start()
            assert held.wait(PATIENCE_S)
            client.cancel()
            cancelled.set()
            thread.join(PATIENCE_S)
            return [*heard, listen_in_thread(client.speak("y"))]

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.start()
        await peer.packets(CODES[:8], eos=False)
        await peer.receive()
        await peer.session_done()
        await peer.request()
        await peer.speak(CODES, 1)
        await peer.receive()

    async with ScriptedServer(script) as server:
        policy = Scripted(begin_at_s=begin_at_s)
        if shell == "asyncio":
            first, second = await within(use_asyncio(server.url, policy))
        else:
            first, second = await within(asyncio.to_thread(use_threads, server.url, policy))
    assert server.failures == []
    assert (first.result.status, first.chunks) == ("cancelled", [])
    assert second.result.status == "complete" and np.array_equal(second.pcm, WHOLE)


@both_shells
@pytest.mark.parametrize("policy", [None, AdaptivePolicy()])
async def test_samples_are_written_at_the_end_of_each_sentence(
    ledger_program: LedgerProgram, shell: str, policy: StartPolicy | None, tmp_path: Path
) -> None:
    sampler = UtteranceSampler(tmp_path, every=1)
    async with ReplayServer([Recording(CODES[:20], CODES[20:])], pace=0) as server:
        outcomes = await within(
            say(shell, server.url, ledger_program, "a", "b", policy=policy, sampler=sampler)
        )
    assert [outcome.result.status for outcome in outcomes] == ["complete", "complete"]
    assert (sampler.written, sampler.failed) == (4, 0)
    samples = [read_sample(path) for path in find_samples(tmp_path)]
    for sample, codes in zip(samples, [CODES[:20], CODES[20:]] * 2, strict=True):
        assert sample.about["complete"]
        assert np.array_equal(sample.codes, codes)
        assert np.array_equal(sample.pcm, expected_ledger(codes))


@both_shells
@pytest.mark.parametrize("frames", [2, 6, 7])
async def test_a_sample_is_written_wherever_the_last_chunk_ends(
    ledger_program: LedgerProgram, shell: str, frames: int, tmp_path: Path
) -> None:
    """A ramp of 2, 4: all is decoded before the end is known, or not."""
    codes = make_codes(frames)
    sampler = UtteranceSampler(tmp_path, every=1)
    async with ReplayServer([Recording(codes)], pace=0) as server:
        await within(say(shell, server.url, ledger_program, "a", schedule=(2, 4), sampler=sampler))
    (sample,) = [read_sample(path) for path in find_samples(tmp_path)]
    assert sample.about["complete"] and np.array_equal(sample.codes, codes)


@both_shells
@pytest.mark.parametrize(
    ("left_s", "played"),
    [(None, 57), (0.0, 57), (0.08, 56), (0.3, 53), (99.0, 0), (math.inf, None), (math.nan, None)],
)
async def test_the_result_says_how_far_the_listener_came(
    ledger_program: LedgerProgram, shell: str, left_s: float | None, played: int | None
) -> None:
    asked: list[float] = []

    def ahead_s() -> float | None:
        asked.append(0.0)
        return left_s

    async with replay(pace=0) as server:
        (said,) = await within(say(shell, server.url, ledger_program, "a", ahead_s=ahead_s))
    assert said.result.status == "complete" and said.result.frames_handed_out == 57
    assert [said.result.frames_played, said.result.frames_played] == [played, played]
    assert len(asked) == 1  # at its end: later, the next utterance plays


@both_shells
async def test_nobody_knows_what_is_played_of_an_output_that_does_not_say(
    ledger_program: LedgerProgram, shell: str
) -> None:
    def broken() -> float:
        raise ZeroDivisionError

    async with replay(pace=0) as server:
        for options in ({}, {"ahead_s": broken}):
            (said,) = await within(say(shell, server.url, ledger_program, "a", **options))
            assert said.result.status == "complete" and said.result.frames_played is None
