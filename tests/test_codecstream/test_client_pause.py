"""Interrupting: pause, resume and cancel; and three loops that never wait for each other."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from shells import both_shells, listen, listen_in_thread, nothing_left
from speaking import CODES, replay
from support import SAMPLES, LedgerProgram, expected_ledger, make_codes

import codecstream
from codecstream import Reconnect, ServerError
from codecstream.testing import Peer, Recording, ReplayServer, ScriptedServer
from codecstream.wire import Flags, InputCancel

__all__ = ["nothing_left"]
pytestmark = pytest.mark.usefixtures("nothing_left")

WHOLE = expected_ledger(CODES)
PATIENCE_S = 20.0


async def until(condition: Callable[[], bool]) -> None:
    """Wait, within reason, until ``condition`` holds."""
    deadline_s = time.perf_counter() + PATIENCE_S
    while not condition():
        assert time.perf_counter() < deadline_s, "it did not come to pass"
        await asyncio.sleep(0.005)


class Speaker:
    """One client of either shell, whose utterances are listened to beside the test.

    Calls on the threads' client are made from threads other than the listener's.
    """

    def __init__(self, shell: str, client: Any) -> None:
        self._shell = shell
        self.client = client

    def speak(self, text: str) -> tuple[Any, Awaitable[Any]]:
        """Begin to listen; return the utterance and what becomes of it."""
        utterance = self.client.speak(text)
        if self._shell == "asyncio":
            return utterance, asyncio.ensure_future(listen(utterance))
        return utterance, asyncio.ensure_future(asyncio.to_thread(listen_in_thread, utterance))

    async def cancel(self) -> None:
        if self._shell == "asyncio":
            await asyncio.wait_for(self.client.cancel(), PATIENCE_S)
        else:
            await asyncio.wait_for(asyncio.to_thread(self.client.cancel), PATIENCE_S)


@contextlib.asynccontextmanager
async def speaker(shell: str, url: str, program: Any, **options: Any) -> Any:
    if shell == "asyncio":
        async with codecstream.connect(url, program, **options) as client:
            yield Speaker(shell, client)
    else:
        client = codecstream.sync_connect(url, program, **options)
        await asyncio.to_thread(client.__enter__)
        try:
            yield Speaker(shell, client)
        finally:
            await asyncio.to_thread(client.close)


@both_shells
async def test_paused_frames_are_received_and_decoding_stops_at_the_bound(
    ledger_program: LedgerProgram, shell: str
) -> None:
    codes = make_codes(400)
    async with (
        ReplayServer([Recording(codes)], pace=0) as server,
        speaker(shell, server.url, ledger_program, max_ahead_s=4) as one,
    ):
        utterance, heard = one.speak("x")
        utterance.pause()
        assert utterance.paused
        # 2, 4, 8, 16 are 30 frames: less than 50; with 25 more it is full.
        await until(lambda: sum(ledger_program.calls) >= 55)
        await until(lambda: utterance.speech.frames_received == 400)
        await asyncio.sleep(0.1)
        assert sum(ledger_program.calls) == 55
        assert utterance.speech.pipeline.frames_taken == 0
        one.client.resume()
        spoken = await asyncio.wait_for(heard, PATIENCE_S)
    assert spoken.result.status == "complete"
    assert np.array_equal(spoken.pcm, expected_ledger(codes))


@both_shells
async def test_pausing_again_and_again_loses_and_repeats_nothing(
    ledger_program: LedgerProgram, shell: str
) -> None:
    async with (
        replay(pace=0.02) as server,
        speaker(shell, server.url, ledger_program, schedule=(1,)) as one,
    ):
        utterance, heard = one.speak("x")
        random = np.random.default_rng(7)
        while not heard.done():
            utterance.pause()
            await asyncio.sleep(float(random.uniform(0, 0.01)))
            taken = utterance.speech.pipeline.frames_taken
            await asyncio.sleep(0.002)
            # One that was on its way when the pause began may still arrive, and no more.
            assert utterance.speech.pipeline.frames_taken <= taken + 1
            utterance.resume()
            await asyncio.sleep(float(random.uniform(0, 0.01)))
        spoken = await heard
    assert spoken.result.status == "complete"
    assert np.array_equal(spoken.pcm, WHOLE)


@both_shells
async def test_cancel_ends_what_is_paused_and_the_next_is_not_paused(
    ledger_program: LedgerProgram, shell: str
) -> None:
    async with (
        replay() as server,
        speaker(shell, server.url, ledger_program) as one,
    ):
        one.client.pause()  # nothing in flight: nothing happens
        utterance, heard = one.speak("x")
        utterance.pause()
        await until(lambda: sum(ledger_program.calls) == 57)
        await one.cancel()
        spoken = await asyncio.wait_for(heard, PATIENCE_S)
        assert (spoken.result.status, spoken.chunks) == ("cancelled", [])
        _, heard = one.speak("y")
        spoken = await asyncio.wait_for(heard, PATIENCE_S)
    assert np.array_equal(spoken.pcm, WHOLE)
    assert server.connections == 1


@both_shells
async def test_a_failure_reaches_a_paused_caller(ledger_program: LedgerProgram, shell: str) -> None:
    paused = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.start()
        await peer.packet(0, CODES[:6])
        await paused.wait()
        await peer.error("out of memory")
        await peer.done(error=True)
        await peer.session_done()
        await peer.receive()

    async with (
        ScriptedServer(script) as server,
        speaker(shell, server.url, ledger_program) as one,
    ):
        utterance, heard = one.speak("x")
        utterance.pause()
        await until(lambda: sum(ledger_program.calls) == 6)
        paused.set()
        spoken = await asyncio.wait_for(heard, PATIENCE_S)
    assert isinstance(spoken.error, ServerError)
    assert spoken.chunks == []


@both_shells
async def test_a_stall_behind_a_paused_caller_is_told_after_the_audio(
    ledger_program: LedgerProgram, shell: str
) -> None:
    """However long it stays paused; and it is not asked for again, though nothing was taken."""
    cancelled = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.start()
        await peer.packets(CODES[:10], eos=False)
        while not isinstance(await peer.receive(), InputCancel):
            pass
        cancelled.set()
        await peer.receive()  # and never another word

    async with (
        ScriptedServer(script) as server,
        speaker(
            shell,
            server.url,
            ledger_program,
            stall_timeout_s=0.2,
            idle_timeout_s=0.4,
            drain_timeout_s=0.1,
            max_ahead_s=0,
            reconnect=Reconnect(),
        ) as one,
    ):
        utterance, heard = one.speak("x")
        utterance.pause()
        await asyncio.wait_for(cancelled.wait(), PATIENCE_S)
        await asyncio.sleep(0.6)
        assert not utterance.over
        utterance.resume()
        spoken = await asyncio.wait_for(heard, PATIENCE_S)
    assert np.array_equal(spoken.pcm, WHOLE[: 10 * SAMPLES])
    assert (spoken.result.status, spoken.result.attempts) == ("stalled", 1)
    assert server.connections == 1


@both_shells
@pytest.mark.case(10)
async def test_case_10_cancel_with_seconds_of_audio_queued_and_packets_in_flight(
    ledger_program: LedgerProgram, shell: str
) -> None:
    """3 s are decoded and wait; 20 packets more come after input.cancel and are not decoded."""
    codes = make_codes(100)
    swallowed = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.start()
        await peer.packets(codes[:80], eos=False)
        while not isinstance(await peer.receive(), InputCancel):
            pass
        await peer.packets(codes[80:], first_seq=80, eos=False)
        await peer.packet(100, flags=Flags.EOS)
        await peer.done(total_frames=100, seq_last=100, cancelled=True)
        await peer.session_done()
        swallowed.set()
        await peer.request()
        await peer.speak(CODES, 1)
        await peer.receive()

    async with (
        ScriptedServer(script) as server,
        speaker(shell, server.url, ledger_program, max_ahead_s=3) as one,
    ):
        utterance, heard = one.speak("x")
        utterance.pause()  # so that all that is decoded waits
        await until(lambda: sum(ledger_program.calls) == 55)
        await until(lambda: utterance.speech.frames_received == 80)
        await one.cancel()
        assert swallowed.is_set()  # cancel() returns when the connection is free
        spoken = await asyncio.wait_for(heard, PATIENCE_S)
        assert (spoken.result.status, spoken.error, spoken.chunks) == ("cancelled", None, [])
        assert spoken.result.frames_received == 80
        assert sum(ledger_program.calls) == 55
        _, heard = one.speak("y")
        spoken = await asyncio.wait_for(heard, PATIENCE_S)
        assert np.array_equal(spoken.pcm, WHOLE)
        assert spoken.result.notices == ()
    assert (server.connections, server.failures) == (1, [])


@both_shells
@pytest.mark.case(10)
async def test_case_10_cancel_at_any_moment_leaves_the_next_utterance_clean(
    ledger_program: LedgerProgram, shell: str
) -> None:
    """Against a server that answers as the real one does, at its own pace."""
    random = np.random.default_rng(10)
    async with (
        replay(pace=0.02) as server,
        speaker(shell, server.url, ledger_program) as one,
    ):
        statuses = set()
        for _ in range(12):
            _, heard = one.speak("x")
            await asyncio.sleep(float(random.uniform(0, 0.12)))
            await one.cancel()
            spoken = await asyncio.wait_for(heard, PATIENCE_S)
            statuses.add(spoken.result.status)
            assert np.array_equal(spoken.pcm, WHOLE[: spoken.pcm.size])
            _, heard = one.speak("y")
            spoken = await asyncio.wait_for(heard, PATIENCE_S)
            assert spoken.result.status == "complete"
            assert np.array_equal(spoken.pcm, WHOLE)
        assert "cancelled" in statuses
    assert (server.connections, server.failures) == (1, [])


# Three loops


@both_shells
@pytest.mark.case(50)
async def test_case_50_frames_are_received_while_a_chunk_is_decoded(
    ledger_program: LedgerProgram, shell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first chunk's decoding does not end before every frame has come."""
    plain = ledger_program.step
    gate = threading.Event()

    def slow(codes: NDArray[np.int64], state: int) -> tuple[NDArray[np.float32], int]:
        assert gate.wait(PATIENCE_S)
        return plain(codes, state)

    monkeypatch.setattr(ledger_program, "step", slow)
    async with (
        replay() as server,
        speaker(shell, server.url, ledger_program) as one,
    ):
        utterance, heard = one.speak("x")
        await until(lambda: utterance.speech.frames_received == 57)
        assert ledger_program.calls == []
        gate.set()
        spoken = await asyncio.wait_for(heard, PATIENCE_S)
    assert np.array_equal(spoken.pcm, WHOLE)


@both_shells
@pytest.mark.case(50)
async def test_case_50_pings_are_answered_while_a_chunk_is_decoded(
    ledger_program: LedgerProgram, shell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No chunk's decoding ends before the server has had answers to three pings: no clock."""
    plain = ledger_program.step
    decoding, answered = threading.Event(), threading.Semaphore(0)
    threads: set[str] = set()

    def slow(codes: NDArray[np.int64], state: int) -> tuple[NDArray[np.float32], int]:
        threads.add(threading.current_thread().name)
        decoding.set()
        assert answered.acquire(timeout=PATIENCE_S), "no answer to a ping while decoding"
        return plain(codes, state)

    monkeypatch.setattr(ledger_program, "step", slow)

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.speak(CODES)
        for _ in range(6):  # chunks
            while not decoding.is_set():
                await asyncio.sleep(0.001)
            decoding.clear()
            for _ in range(3):
                await asyncio.wait_for(await peer.socket.ping(), PATIENCE_S)
            answered.release()
        await peer.receive()

    async with (
        ScriptedServer(script) as server,
        speaker(shell, server.url, ledger_program) as one,
    ):
        _, heard = one.speak("x")
        spoken = await asyncio.wait_for(heard, PATIENCE_S)
    assert np.array_equal(spoken.pcm, WHOLE)
    assert len(spoken.chunks) == 6
    assert all(name.startswith("codecstream-decode") for name in threads)
    assert (server.connections, server.failures) == (1, [])


@both_shells
@pytest.mark.case(51)
async def test_case_51_a_slow_caller_bounds_audio_not_the_socket(
    ledger_program: LedgerProgram, shell: str
) -> None:
    """300 s of speech at once: all is received and pings are answered while nothing is taken."""
    codes = make_codes(3750)
    pings = 0

    async def script(peer: Peer) -> None:
        nonlocal pings
        await peer.request()
        await peer.speak(codes)
        while pings < 5:
            await asyncio.wait_for(await peer.socket.ping(), PATIENCE_S)
            pings += 1
        await peer.receive()

    async with (
        ScriptedServer(script, ping_interval=0.2, ping_timeout=5) as server,
        speaker(shell, server.url, ledger_program, max_ahead_s=10) as one,
    ):
        utterance, heard = one.speak("x")
        utterance.pause()
        await until(lambda: pings == 5 and utterance.speech.frames_received == 3750)
        await until(lambda: sum(ledger_program.calls) >= 125)
        ahead_s = sum(ledger_program.calls) * SAMPLES / 24_000
        assert 10 <= ahead_s < 12  # the bound, and less than one chunk of 2 s beyond it
        utterance.resume()
        spoken = await asyncio.wait_for(heard, PATIENCE_S)
    assert spoken.result.status == "complete"
    assert np.array_equal(spoken.pcm, expected_ledger(codes))
    assert (server.connections, server.failures) == (1, [])
