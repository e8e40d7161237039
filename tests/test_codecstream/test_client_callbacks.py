"""What calls back may call the client for threads: observers and texts, whenever they are told."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from shells import PATIENCE_S, in_thread, nothing_left, pcm_of
from speaking import CODES, replay
from support import LedgerProgram, expected_ledger

import codecstream
from codecstream import CodecStreamError, LocalProtocolError, Observer, SyncClient, UtteranceResult
from codecstream.metrics import ChunkTime
from codecstream.observe import Progress
from codecstream.testing import Peer, ScriptedServer

__all__ = ["nothing_left"]
pytestmark = pytest.mark.usefixtures("nothing_left")

WHOLE = expected_ledger(CODES)


@pytest.mark.parametrize("method", ["close", "cancel"])
@pytest.mark.parametrize(
    "moment", ["sent", "received", "disconnected", "chunk_decoded", "utterance_ended"]
)
async def test_an_observer_may_end_the_utterance_and_the_client(
    moment: str, method: str, ledger_program: LedgerProgram
) -> None:
    """Whenever it is told, also while the client is closed: no thread waits for itself."""
    called: list[str] = []

    def use() -> None:
        def end(*_: object) -> None:
            called.append(moment)
            getattr(client, method)()

        hook = Observer()
        client = codecstream.sync_connect(server.url, ledger_program, observer=hook)
        with client:
            setattr(hook, moment, end)
            list(client.speak("x"))

    async with replay(pace=0.01) as server:
        await in_thread(use)
    assert called


async def test_an_observer_cannot_wait_for_an_utterance(ledger_program: LedgerProgram) -> None:
    errors: list[CodecStreamError] = []

    class Hook(Observer):
        def chunk_decoded(self, chunk: ChunkTime, progress: Progress) -> None:
            with pytest.raises(LocalProtocolError, match="another thread") as caught:
                list(client.speak("again"))
            errors.append(caught.value)

    def use() -> None:
        with client:
            assert np.array_equal(pcm_of(client.speak("x")), WHOLE)

    async with replay() as server:
        client = codecstream.sync_connect(server.url, ledger_program, observer=Hook())
        await in_thread(use)
    assert errors


async def test_a_text_may_close_the_client_that_says_it(ledger_program: LedgerProgram) -> None:
    sending = threading.Event()

    class Hook(Observer):
        def sent(self, message: str) -> None:
            sending.set()

    def use() -> None:
        def text() -> Iterator[str]:
            yield "x"
            sending.wait(PATIENCE_S)
            client.close()

        with codecstream.sync_connect(server.url, ledger_program, observer=Hook()) as client:
            utterance = client.speak(text())
            list(utterance)
            assert utterance.result.status == "cancelled"

    async with replay() as server:
        await in_thread(use)


async def test_an_observer_that_closes_as_the_next_utterance_starts_ends_that(
    ledger_program: LedgerProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the moment it is asked whether the client is open, and the one it is known."""
    asked, closed = threading.Event(), threading.Event()
    require_open = SyncClient._require_open

    def require_slowly(self: SyncClient) -> None:
        require_open(self)
        asked.set()
        closed.wait(PATIENCE_S)

    class Hook(Observer):
        def disconnected(self, code: int, reason: str) -> None:
            if asked.wait(PATIENCE_S) and not closed.is_set():
                client.close()
                closed.set()

    async def script(peer: Peer) -> None:  # and then the connection is closed
        await peer.request()
        await peer.speak(CODES)

    def use() -> None:
        with client:
            assert np.array_equal(pcm_of(client.speak("one")), WHOLE)
            utterance = client.speak("two")
            monkeypatch.setattr(SyncClient, "_require_open", require_slowly)
            with pytest.raises(LocalProtocolError, match="not open"):
                list(utterance)

    async with ScriptedServer(script) as server:
        client = codecstream.sync_connect(server.url, ledger_program, observer=Hook())
        await in_thread(use)


@pytest.mark.parametrize("method", ["close", "cancel"])
async def test_an_observer_that_is_told_of_a_cancel_by_another_thread_may_end_it_too(
    method: str, ledger_program: LedgerProgram
) -> None:
    """While the caller waits for the server to finish what was cancelled before."""

    class Hook(Observer):
        told = 0

        def chunk_decoded(self, chunk: ChunkTime, progress: Progress) -> None:
            client.cancel()  # the first one

        def utterance_ended(self, result: UtteranceResult) -> None:
            self.told += 1
            if self.told == 2:
                getattr(client, method)()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.start()
        await peer.packets(CODES[:10], eos=False)
        await peer.receive()
        await asyncio.sleep(0.6)
        await peer.session_done(sentences=0)
        await peer.receive()

    def use() -> None:
        with client:
            list(client.speak("one"))
            canceller = threading.Timer(0.2, client.cancel)
            canceller.start()
            second = client.speak("two")
            list(second)
            canceller.join()
            assert second.result.status == "cancelled"

    hook = Hook()
    async with ScriptedServer(script) as server:
        client = codecstream.sync_connect(server.url, ledger_program, observer=hook)
        await in_thread(use)
    assert hook.told == 2


async def test_a_program_that_an_observer_ends_leaves_nothing_behind(
    ledger_program: LedgerProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hook(Observer):
        def utterance_ended(self, result: UtteranceResult) -> None:
            raise SystemExit

    def use() -> None:
        monkeypatch.setattr(threading, "main_thread", threading.current_thread)
        with (
            pytest.raises(SystemExit),
            codecstream.sync_connect(server.url, ledger_program, observer=Hook()) as client,
        ):
            next(client.speak("x"))

    async with replay(pace=0.2) as server:
        await in_thread(use)


async def test_a_client_that_is_closed_while_it_is_entered_is_not_open(
    ledger_program: LedgerProgram,
) -> None:
    class Hook(Observer):
        def connected(self, url: str) -> None:
            client.close()

    def use() -> None:
        with pytest.raises(LocalProtocolError, match="while it was entered"):
            client.__enter__()

    async with replay() as server:
        client = codecstream.sync_connect(server.url, ledger_program, observer=Hook())
        await in_thread(use)


async def test_a_late_cancel_leaves_the_next_utterance_alone(
    ledger_program: LedgerProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has given up an utterance and comes to the connection only then."""
    gave_up, go_on = threading.Event(), threading.Event()
    give_up = SyncClient._give_up

    def give_up_and_wait(self: SyncClient, utterance: codecstream.SyncUtterance) -> None:
        give_up(self, utterance)
        if threading.current_thread() is canceller:
            gave_up.set()
            go_on.wait(PATIENCE_S)

    monkeypatch.setattr(SyncClient, "_give_up", give_up_and_wait)
    canceller = threading.Thread(target=lambda: client.cancel())

    def use() -> None:
        with client:
            list(client.speak("one"))
            canceller.start()
            gave_up.wait(PATIENCE_S)
            second = client.speak("two")
            heard = [next(second).pcm]
            go_on.set()
            heard.extend(chunk.pcm for chunk in second)
            canceller.join()
            assert np.array_equal(np.concatenate(heard), WHOLE)

    async with replay(pace=0.2) as server:
        client = codecstream.sync_connect(server.url, ledger_program, drain_timeout_s=0.2)
        await in_thread(use)


async def test_a_text_of_an_utterance_that_cannot_be_taken_is_not_touched(
    ledger_program: LedgerProgram,
) -> None:
    touched: list[str] = []

    def text() -> Iterator[str]:
        touched.append("x")
        yield "x"

    def use() -> None:
        with codecstream.sync_connect(server.url, ledger_program) as client:
            utterance = client.speak(text())
        with pytest.raises(LocalProtocolError, match="not open"):
            list(utterance)

    async with replay() as server:
        await in_thread(use)
    assert touched == []
