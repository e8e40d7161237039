"""The client at awkward moments: several callers, cancelled callers, lost servers, late closes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import numpy as np
import pytest
from numpy.typing import NDArray
from shells import leftovers
from speaking import CODES, collect, fails, replay
from support import SAMPLES, LedgerProgram, expected_ledger, make_codes

import codecstream
from codecstream import (
    CodecStreamError,
    ConnectionFailedError,
    IncompleteError,
    LocalProtocolError,
    OutputError,
)
from codecstream.protocol import Session
from codecstream.testing import Peer, Recording, ReplayServer, ScriptedServer
from codecstream.wire import InputCancel


@pytest.mark.case(10)
async def test_case_10_cancel_drops_audio_that_was_decoded_already(
    ledger_program: LedgerProgram,
) -> None:
    async with replay() as server, codecstream.connect(server.url, ledger_program) as client:
        utterance = client.speak("x")
        await anext(utterance)
        while sum(ledger_program.calls) < len(CODES):  # all is decoded, the server has finished
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        with pytest.raises(LocalProtocolError, match="no result before"):
            _ = utterance.result
        with pytest.raises(LocalProtocolError, match="still in flight"):
            await anext(client.speak("y"))
        await client.cancel()
        assert [chunk async for chunk in utterance] == []
        assert utterance.result.status == "cancelled"
        assert (await collect(client.speak("x"))).size == len(CODES) * SAMPLES


async def test_of_two_that_start_at_once_one_speaks_and_one_is_refused(
    ledger_program: LedgerProgram,
) -> None:
    first, second = make_codes(20, seed=1), make_codes(20, seed=2)
    recordings = [
        Recording(CODES, text="x"),
        Recording(first, text="a"),
        Recording(second, text="b"),
    ]
    async with (
        ReplayServer(recordings, pace=0) as server,
        codecstream.connect(server.url, ledger_program) as client,
    ):
        await collect(client.speak("x"))
        results = await asyncio.gather(
            collect(client.speak("a")), collect(client.speak("b")), return_exceptions=True
        )
    assert isinstance(results[1], LocalProtocolError)
    assert isinstance(results[0], np.ndarray)
    assert np.array_equal(results[0], expected_ledger(first))


async def test_a_server_that_is_away_for_a_while_does_no_lasting_harm(
    ledger_program: LedgerProgram,
) -> None:
    async with replay() as server:
        port = int(server.url.split(":")[2].split("/")[0])
        client = codecstream.connect(server.url, ledger_program)
        await client.__aenter__()
        await collect(client.speak("x"))
    utterance = client.speak("x")
    with pytest.raises(ConnectionFailedError):
        await collect(utterance)
    assert utterance.result.status == "incomplete"
    async with replay(port=port):
        assert (await collect(client.speak("x"))).size == len(CODES) * SAMPLES
        await client.close()
    assert leftovers() == set()


async def test_a_text_that_cannot_be_sent_does_no_lasting_harm(
    ledger_program: LedgerProgram,
) -> None:
    async with replay() as server, codecstream.connect(server.url, ledger_program) as client:
        with pytest.raises(LocalProtocolError, match="no Unicode"):
            await collect(client.speak("a\ud800"))
        assert (await collect(client.speak("x"))).size == len(CODES) * SAMPLES
    assert server.connections == 1


async def test_a_closed_client_does_not_speak(ledger_program: LedgerProgram) -> None:
    async with replay() as server:
        client = codecstream.connect(server.url, ledger_program)
        with pytest.raises(LocalProtocolError, match="not open"):
            client.speak("too early")
        async with client:
            utterance = client.speak("x")
        with pytest.raises(LocalProtocolError, match="not open"):
            client.speak("too late")
        with pytest.raises(LocalProtocolError, match="not open"):
            await anext(utterance)
    assert server.connections == 1


async def test_close_and_cancel_while_a_new_connection_opens(
    ledger_program: LedgerProgram,
) -> None:
    """The server closes after each utterance and takes its time to accept the next connection."""
    gate = asyncio.Event()
    gate.set()
    said: list[str] = []

    async def slow_to_accept(connection: object, request: object) -> None:
        await gate.wait()

    async def script(peer: Peer) -> None:
        said.append(await peer.request())
        await peer.speak(CODES)

    async with ScriptedServer(script, process_request=slow_to_accept) as server:
        async with codecstream.connect(server.url, ledger_program) as client:
            await collect(client.speak("one"))
            await asyncio.sleep(0.05)
            gate.clear()
            utterance = client.speak("two")
            task = asyncio.create_task(collect(utterance))
            await asyncio.sleep(0.05)
            cancelling = asyncio.create_task(client.cancel())
            assert (await asyncio.wait_for(task, 1)).size == 0
            gate.set()
            await cancelling
            assert utterance.result.status == "cancelled"
            assert (await collect(client.speak("three"))).size == len(CODES) * SAMPLES
            await asyncio.sleep(0.05)
            gate.clear()
            task = asyncio.create_task(collect(client.speak("four")))
            await asyncio.sleep(0.05)
            asyncio.get_running_loop().call_later(0.1, gate.set)
        await asyncio.wait_for(task, 1)
        assert leftovers() == set()
    assert said[0] == "one" and "three" in said


@pytest.mark.parametrize("steps", range(6))
async def test_a_cancelled_caller_is_cancelled_and_loses_no_chunk(
    ledger_program: LedgerProgram, steps: int
) -> None:
    async with replay() as server, codecstream.connect(server.url, ledger_program) as client:
        utterance = client.speak("x")
        parts: list[NDArray[np.float32]] = []

        async def listen() -> None:
            async for chunk in utterance:
                parts.append(chunk.pcm)

        while not utterance.over:
            task = asyncio.create_task(listen())
            for _ in range(steps):
                await asyncio.sleep(0)
            cancelled = task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            assert task.cancelled() or not cancelled or utterance.over
            await asyncio.sleep(0.002)
            if len(parts) >= 3:
                await listen()
            elif steps < 2:
                parts.append((await anext(utterance)).pcm)
        assert np.array_equal(np.concatenate(parts), expected_ledger(CODES))


async def test_slow_text_is_not_the_servers_silence(ledger_program: LedgerProgram) -> None:
    """Nor does it shorten the time that the server has once the text is complete."""

    async def slow() -> AsyncIterator[str]:
        yield "x"
        await asyncio.sleep(1.2)

    async def script(peer: Peer) -> None:
        await peer.request()
        await asyncio.sleep(0.25)
        await peer.speak(CODES)
        await peer.receive()

    async with (
        ScriptedServer(script) as server,
        codecstream.connect(server.url, ledger_program, idle_timeout_s=0.5) as client,
    ):
        assert (await collect(client.speak(slow()))).size == len(CODES) * SAMPLES


async def test_a_text_iterator_left_early_is_closed(ledger_program: LedgerProgram) -> None:
    closed = asyncio.Event()

    async def endless() -> AsyncIterator[str]:
        try:
            while True:
                yield "word "
                await asyncio.sleep(0.01)
        finally:
            closed.set()

    async with replay() as server, codecstream.connect(server.url, ledger_program) as client:
        task = asyncio.create_task(collect(client.speak(endless())))
        await asyncio.sleep(0.1)
        await client.cancel()
        await task
        assert closed.is_set()


async def test_cancel_before_the_first_piece_of_text_keeps_the_connection(
    ledger_program: LedgerProgram,
) -> None:
    async def never() -> AsyncIterator[str]:
        await asyncio.Event().wait()
        yield "x"

    async with replay() as server, codecstream.connect(server.url, ledger_program) as client:
        for _ in range(2):
            task = asyncio.create_task(collect(client.speak(never())))
            await asyncio.sleep(0.05)
            await asyncio.wait_for(client.cancel(), 1)  # nothing to wait for
            assert (await task).size == 0
        assert (await collect(client.speak("x"))).size == len(CODES) * SAMPLES
    assert server.connections == 1


async def test_a_fault_of_this_program_does_not_look_like_the_networks(
    ledger_program: LedgerProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Session, message: object) -> list[object]:
        raise ZeroDivisionError

    async with replay() as server, codecstream.connect(server.url, ledger_program) as client:
        with monkeypatch.context() as patch:
            patch.setattr(Session, "receive", broken)
            with pytest.raises(CodecStreamError, match="ZeroDivisionError") as caught:
                await collect(client.speak("x"))
            assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert (await collect(client.speak("x"))).size == len(CODES) * SAMPLES


async def test_audio_of_an_earlier_utterance_is_refused(ledger_program: LedgerProgram) -> None:
    """A server that goes on with a cancelled utterance cannot pass it off as the next one."""

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.start(0)
        await peer.packet(0, CODES[:6])
        while not isinstance(await peer.receive(), InputCancel):
            pass
        await peer.done(0, total_frames=6, seq_last=0, cancelled=True)
        await peer.session_done(0)
        await peer.request()
        await peer.start(0, 1)
        await peer.packets(CODES)
        await peer.done(0, 1, total_frames=57, seq_last=56)
        await peer.session_done(0)
        await peer.receive()

    async with (
        ScriptedServer(script) as server,
        codecstream.connect(server.url, ledger_program) as client,
    ):
        first = client.speak("x")
        await anext(first)
        await client.cancel()
        second = client.speak("y")
        with pytest.raises(CodecStreamError, match="utterance 0"):
            await collect(second)
        assert second.result.frames_decoded == 0


async def test_an_answer_without_a_sentence_is_no_success(ledger_program: LedgerProgram) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.session_done(0, 0)
        await peer.receive()

    async with (
        ScriptedServer(script) as server,
        codecstream.connect(server.url, ledger_program) as client,
    ):
        with pytest.raises(IncompleteError, match="no sentence"):
            await collect(client.speak("Hello."))


@pytest.mark.parametrize("url", ["http://x", "x", "ws://127.0.0.1:99999/x", "ws://a..b/x"])
async def test_bad_addresses(ledger_program: LedgerProgram, url: str) -> None:
    with pytest.raises((ValueError, ConnectionFailedError)):
        async with codecstream.connect(url, ledger_program):
            pass


async def test_decoder_failure_reaches_the_caller_and_stops_the_server(
    ledger_program: LedgerProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(codes: NDArray[np.int64], state: int) -> tuple[NDArray[np.float32], int]:
        return np.full(len(codes) * SAMPLES, np.nan, np.float32), state

    async with (
        replay(pace=0.05) as server,
        codecstream.connect(server.url, ledger_program) as client,
    ):
        with monkeypatch.context() as patch:
            patch.setattr(ledger_program, "step", broken)
            await fails(client.speak("x"), OutputError)
        assert np.array_equal(await collect(client.speak("x")), expected_ledger(CODES))
    assert server.connections == 1
