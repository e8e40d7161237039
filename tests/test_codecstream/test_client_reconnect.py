"""Asking again after a lost connection: only while nothing was heard, and never for ever."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shells import (
    CuttingProxy,
    accept_by_hand,
    both_shells,
    listen,
    listen_in_thread,
    nothing_left,
    raw_server,
    say,
)
from speaking import CODES, replay
from support import LedgerProgram, expected_ledger

import codecstream
from codecstream import ConnectionFailedError, IncompleteError, Reconnect, ServerError
from codecstream.testing import Fault, Peer, ScriptedServer
from codecstream.wire import InputDone, InputText, SessionConfig

__all__ = ["nothing_left"]
pytestmark = pytest.mark.usefixtures("nothing_left")

WHOLE = expected_ledger(CODES)
SOON = Reconnect(attempts=3, first_delay_s=0.01, max_delay_s=0.02)


@both_shells
@pytest.mark.parametrize("loss", ["before codec.start", "before a chunk", "within the handshake"])
async def test_an_utterance_of_which_nothing_was_heard_is_asked_for_again(
    ledger_program: LedgerProgram, shell: str, loss: str
) -> None:
    """With session.config first, and the same text; what came of the lost attempts is forgotten."""
    requests: list[list[Any]] = []

    async def script(peer: Peer) -> None:
        if loss == "within the handshake" and server.connections in (2, 3):
            peer.abort()
            return
        messages: list[Any] = []
        while not (messages and isinstance(messages[-1], InputDone)):
            messages.append(await peer.receive())
        requests.append(messages)
        if server.connections <= 3:
            if loss == "before a chunk":
                await peer.start()
                await peer.packet(0, CODES[40:41])  # not even the first frame of what is heard
                await asyncio.sleep(0.05)
            peer.abort()
        else:
            await peer.speak(CODES)
            await peer.receive()

    async with ScriptedServer(script) as server:
        (spoken,) = await say(
            shell,
            server.url,
            ledger_program,
            "Hello.",
            settings={"voice": "vivian"},
            reconnect=SOON,
        )
    assert spoken.result.status == "complete"
    assert np.array_equal(spoken.pcm, WHOLE)
    assert spoken.result.frames_received == spoken.result.frames_handed_out == 57
    assert spoken.chunks[0].frames == 2
    lost = [notice for notice in spoken.result.notices if "was lost" in notice]
    assert len(lost) == len(spoken.result.notices) == 3
    assert spoken.result.attempts == 4
    assert len(requests) == (2 if loss == "within the handshake" else 4)
    config = SessionConfig(voice="vivian")
    assert all(sent == [config, InputText("Hello."), InputDone()] for sent in requests)


@both_shells
async def test_what_was_heard_is_not_asked_for_again(
    ledger_program: LedgerProgram, shell: str
) -> None:
    heard = threading.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.start()
        await peer.packets(CODES[:2], eos=False)
        while not heard.is_set():
            await asyncio.sleep(0.005)
        peer.abort()

    async with ScriptedServer(script) as server:
        if shell == "asyncio":
            async with codecstream.connect(server.url, ledger_program, reconnect=SOON) as client:
                utterance = client.speak("x")
                await anext(utterance)
                heard.set()
                with pytest.raises(IncompleteError) as caught:
                    await anext(utterance)
                result = utterance.result
        else:

            def use() -> Any:
                with codecstream.sync_connect(server.url, ledger_program, reconnect=SOON) as client:
                    utterance = client.speak("x")
                    next(utterance)
                    heard.set()
                    with pytest.raises(IncompleteError) as caught:
                        next(utterance)
                    return caught, utterance.result

            caught, result = await asyncio.to_thread(use)
    assert (result.status, result.attempts, result.frames_handed_out) == ("incomplete", 1, 2)
    assert caught.value.close_code == 1006
    assert server.connections == 1


@both_shells
async def test_tries_are_counted_per_utterance_and_end(
    ledger_program: LedgerProgram, shell: str
) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.socket.close(1012, "restarting")

    async with ScriptedServer(script) as server:
        outcomes = await say(shell, server.url, ledger_program, "x", "y", reconnect=SOON)
    for spoken in outcomes:
        assert isinstance(spoken.error, IncompleteError)
        assert spoken.error.close_code == 1012
        assert spoken.result.status == "incomplete"
        assert (spoken.result.attempts, len(spoken.result.notices)) == (4, 3)
    assert server.connections == 8


@both_shells
async def test_a_server_that_is_away_for_a_while(ledger_program: LedgerProgram, shell: str) -> None:
    """The connection is refused until the server is back, which is within the tries."""
    gone = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        if server.connections == 1:
            await peer.speak(CODES)
        await peer.socket.close(1012)
        gone.set()

    async with ScriptedServer(script) as server:
        url = server.url
        port = int(url.split(":")[2].split("/")[0])
        many = Reconnect(attempts=400, first_delay_s=0.02, factor=1, jitter=0)
        speaking = asyncio.create_task(say(shell, url, ledger_program, "x", "y", reconnect=many))
        await gone.wait()
    await asyncio.sleep(0.2)
    async with replay(port=port):
        first, second = await speaking
    assert first.result.status == second.result.status == "complete"
    assert np.array_equal(second.pcm, WHOLE)
    assert len(second.result.notices) > 1


@both_shells
@pytest.mark.parametrize("status", [401, 404])
async def test_what_waiting_does_not_mend_is_not_tried_again(
    ledger_program: LedgerProgram, shell: str, status: int
) -> None:
    asked = 0

    def refuse(connection: Any, request: Any) -> Any:
        nonlocal asked
        asked += 1
        return connection.respond(status, "no") if asked > 1 else None

    async def script(peer: Peer) -> None:
        await peer.request()

    async with ScriptedServer(script, process_request=refuse) as server:
        (spoken,) = await say(shell, server.url, ledger_program, "x", reconnect=SOON)
    assert isinstance(spoken.error, ConnectionFailedError)
    assert str(status) in spoken.result.reason
    assert asked == 2


@both_shells
async def test_failures_of_the_server_itself_are_not_tried_again(
    ledger_program: LedgerProgram, shell: str
) -> None:
    async with replay(Fault("error", packet=1)) as server:
        (spoken,) = await say(shell, server.url, ledger_program, "x", reconnect=SOON)
    assert isinstance(spoken.error, ServerError)
    assert (spoken.result.attempts, server.connections) == (1, 1)


@both_shells
async def test_without_reconnect_a_loss_is_final(ledger_program: LedgerProgram, shell: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        peer.abort()

    async with ScriptedServer(script) as server:
        (spoken,) = await say(shell, server.url, ledger_program, "x")
    assert spoken.result.status == "incomplete"
    assert (spoken.result.attempts, server.connections) == (1, 1)


@both_shells
async def test_a_half_open_connection_is_replaced(
    ledger_program: LedgerProgram, shell: str
) -> None:
    async def silent_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        if connections == 1:
            await accept_by_hand(reader, writer)
            while await reader.read(65536):
                pass
        else:
            await CuttingProxy(server.url, []).handle(reader, writer)

    connections = 0
    async with replay() as server, raw_server(silent_once) as url:
        (spoken,) = await say(
            shell,
            url,
            ledger_program,
            "x",
            reconnect=SOON,
            idle_timeout_s=0.3,
            drain_timeout_s=0.1,
        )
    assert spoken.result.status == "complete"
    assert (spoken.result.attempts, connections) == (2, 2)
    assert np.array_equal(spoken.pcm, WHOLE)


@both_shells
async def test_pieces_of_text_that_were_said_are_said_again(
    ledger_program: LedgerProgram, shell: str
) -> None:
    texts: list[str] = []
    lost = threading.Event()

    async def script(peer: Peer) -> None:
        if server.connections == 1:
            await peer.receive()  # session.config
            for _ in range(2):
                message = await peer.receive()
                assert isinstance(message, InputText)
            peer.abort()
            lost.set()
        else:
            texts.append(await peer.request())
            await peer.speak(CODES)
            await peer.receive()

    def wait_until_lost() -> None:
        assert lost.wait(20)

    def pieces() -> Iterator[str]:
        yield from ("One ", "two ")
        wait_until_lost()
        yield from ("three ", "four.")

    async def pieces_of_asyncio() -> AsyncIterator[str]:
        for index, piece in enumerate(("One ", "two ", "three ", "four.")):
            if index == 2:
                await asyncio.to_thread(wait_until_lost)
            yield piece

    async with ScriptedServer(script) as server:
        if shell == "asyncio":
            async with codecstream.connect(server.url, ledger_program, reconnect=SOON) as client:
                spoken = await listen(client.speak(pieces_of_asyncio()))
        else:

            def use() -> Any:
                with codecstream.sync_connect(server.url, ledger_program, reconnect=SOON) as client:
                    return listen_in_thread(client.speak(pieces()))

            spoken = await asyncio.to_thread(use)
    assert texts == ["One two three four."]
    assert np.array_equal(spoken.pcm, WHOLE)
    assert server.failures == []


@both_shells
async def test_a_connection_that_ends_before_the_texts_first_piece_is_told(
    ledger_program: LedgerProgram, shell: str
) -> None:
    gone = threading.Event()

    async def script(peer: Peer) -> None:
        await peer.receive()  # session.config
        await peer.socket.close(1012)
        gone.set()

    def late() -> Iterator[str]:
        gone.wait(20)
        time.sleep(0.05)
        yield "x"

    async def late_of_asyncio() -> AsyncIterator[str]:
        await asyncio.to_thread(gone.wait, 20)
        await asyncio.sleep(0.05)
        yield "x"

    async with ScriptedServer(script) as server:
        if shell == "asyncio":
            async with codecstream.connect(server.url, ledger_program) as client:
                spoken = await asyncio.wait_for(listen(client.speak(late_of_asyncio())), 20)
        else:

            def use() -> Any:
                with codecstream.sync_connect(server.url, ledger_program) as client:
                    return listen_in_thread(client.speak(late()))

            spoken = await asyncio.to_thread(use)
    assert isinstance(spoken.error, IncompleteError)
    assert "before anything of the text was sent" in spoken.result.reason


@both_shells
async def test_cancel_ends_the_wait_for_the_next_try(
    ledger_program: LedgerProgram, shell: str
) -> None:
    lost = threading.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        peer.abort()
        lost.set()

    later = Reconnect(first_delay_s=3600, max_delay_s=3600)
    async with ScriptedServer(script) as server:
        if shell == "asyncio":
            async with codecstream.connect(server.url, ledger_program, reconnect=later) as client:
                utterance: Any = client.speak("x")
                task = asyncio.create_task(listen(utterance))
                await asyncio.to_thread(lost.wait)
                await asyncio.sleep(0.05)
                await asyncio.wait_for(client.cancel(), 20)
                spoken = await asyncio.wait_for(task, 20)
        else:

            def use() -> Any:
                with codecstream.sync_connect(
                    server.url, ledger_program, reconnect=later
                ) as client:
                    utterance = client.speak("x")
                    canceller = threading.Thread(
                        target=lambda: (lost.wait(20), time.sleep(0.05), client.cancel())
                    )
                    canceller.start()
                    spoken = listen_in_thread(utterance)
                    canceller.join()
                    return spoken

            spoken = await asyncio.wait_for(asyncio.to_thread(use), 20)
    assert spoken.result.status == "cancelled"
    assert server.connections == 1


# The waits


@given(
    st.integers(1, 12),
    st.floats(0, 100),
    st.floats(1, 10),
    st.floats(0, 100),
    st.floats(0, 1),
    st.integers(),
)
def test_waits_grow_up_to_a_limit_and_vary(
    attempts: int, first: float, factor: float, most: float, jitter: float, seed: int
) -> None:
    settings = Reconnect(attempts, first, factor, most, jitter)
    delays = list(settings.delays_s(random.Random(seed)))
    full = [min(first * factor**n, most) for n in range(attempts)]
    assert len(delays) == attempts
    for delay, longest in zip(delays, full, strict=True):
        assert longest * (1 - jitter) * 0.999 - 1e-9 <= delay <= longest * 1.001 + 1e-9


def test_clients_of_one_server_do_not_come_back_together() -> None:
    firsts = {next(Reconnect().delays_s(random.Random(seed))) for seed in range(20)}
    assert len(firsts) == 20
    assert all(0.125 <= delay <= 0.25 for delay in firsts)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"attempts": 0}, "attempts must be 1 or more, not 0"),
        ({"first_delay_s": -1}, "first_delay_s must be 0 or more"),
        ({"factor": 0.5}, "factor must be 1 or more"),
        ({"max_delay_s": float("inf")}, "max_delay_s must be 0 or more"),
        ({"jitter": 1.5}, "jitter must be from 0 to 1, not 1.5"),
    ],
)
def test_waits_that_make_no_sense_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Reconnect(**changes)
