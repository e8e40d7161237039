"""The client for threads: what is its own beside the ends, which test_client_ends.py shows."""

from __future__ import annotations

import asyncio
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import trustme
from numpy.typing import NDArray
from shells import (
    PATIENCE_S,
    in_thread,
    leftovers,
    listen_in_thread,
    nothing_left,
    pcm_of,
    raw_server,
)
from speaking import CODES, replay
from support import SAMPLES, LedgerProgram, expected_ledger
from websockets.sync.client import ClientConnection

import codecstream
from codecstream import (
    CodecStreamError,
    ConnectionFailedError,
    DecoderError,
    LocalProtocolError,
    Observer,
    OutputError,
    SyncClient,
    sync_client,
)
from codecstream.metrics import ChunkTime
from codecstream.observe import Progress
from codecstream.protocol import Session
from codecstream.sync_connection import Opening, SyncConnection
from codecstream.testing import Peer, ScriptedServer
from codecstream.wire import SessionClose, SessionConfig

__all__ = ["nothing_left"]
pytestmark = pytest.mark.usefixtures("nothing_left")

WHOLE = expected_ledger(CODES)


async def test_a_robots_loop(ledger_program: LedgerProgram) -> None:
    configs: list[SessionConfig] = []

    async def script(peer: Peer) -> None:
        for index in range(3):
            message = await peer.receive()
            if isinstance(message, SessionConfig):
                configs.append(message)
            await peer.request()
            await peer.speak(CODES, index)
        assert isinstance(await peer.receive(), SessionClose)

    def use() -> None:
        config = SessionConfig(language="en")
        with codecstream.sync_connect(server.url, ledger_program, config=config) as client:
            for settings in ({}, {"voice": "vivian"}, {"voice": "vivian"}):
                utterance = client.speak("Hello.", **settings)
                assert np.array_equal(pcm_of(utterance), WHOLE)
                result = utterance.result
                assert (result.status, result.frames_handed_out, result.notices) == (
                    "complete",
                    57,
                    (),
                )
                assert result.metrics.audio_s == pytest.approx(4.56)
                assert all(chunk.t_ms >= chunk.arrival_ms >= 0 for chunk in result.timeline)

    async with ScriptedServer(script) as server:
        await in_thread(use)
    assert [(c.language, c.voice) for c in configs] == [("en", None), ("en", "vivian")]
    assert (server.connections, server.failures) == (1, [])


async def test_wss_with_a_certificate_of_ones_own(ledger_program: LedgerProgram) -> None:
    authority = trustme.CA()
    server_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(server_tls)
    client_tls = ssl.create_default_context()
    authority.configure_trust(client_tls)

    def use() -> None:
        with codecstream.sync_connect(server.url, ledger_program, ssl=client_tls) as client:
            assert np.array_equal(pcm_of(client.speak("x")), WHOLE)
        with pytest.raises(ConnectionFailedError, match="certificate") as caught:
            codecstream.sync_connect(server.url, ledger_program).__enter__()
        assert not caught.value.transient

    async with replay(ssl=server_tls) as server:
        await in_thread(use)


async def test_misuse_is_refused_with_what_to_do(ledger_program: LedgerProgram) -> None:
    def use() -> None:
        client = codecstream.sync_connect(server.url, ledger_program)
        with pytest.raises(LocalProtocolError, match="not open: use it inside 'with'"):
            client.speak("too early")
        with client:
            with pytest.raises(LocalProtocolError, match="open already"):
                client.__enter__()
            with pytest.raises(LocalProtocolError, match=r"volume.*settings are.*voice"):
                client.speak("x", volume=11)
            with pytest.raises(LocalProtocolError, match="no Unicode"):
                pcm_of(client.speak("a\ud800"))
            first = client.speak("x")
            next(first)
            with pytest.raises(LocalProtocolError, match="no result before"):
                _ = first.result
            with pytest.raises(LocalProtocolError, match="still in flight"):
                next(client.speak("y"))
            assert not first.over
            late = client.speak("z")
        assert first.result.status == "cancelled"
        with pytest.raises(LocalProtocolError, match="not open"):
            client.speak("too late")
        with pytest.raises(LocalProtocolError, match="not open"):
            next(late)
        client.close()  # again

    async with replay(pace=0.2) as server:
        await in_thread(use)
    assert server.connections == 1


async def test_leaving_the_loop_early_and_going_on(ledger_program: LedgerProgram) -> None:
    def use() -> None:
        with codecstream.sync_connect(server.url, ledger_program) as client:
            for _ in range(3):
                utterance = client.speak("x")
                for chunk in utterance:
                    if chunk.first_frame + chunk.frames >= 6:
                        break
                client.cancel()
                assert list(utterance) == []
                assert utterance.result.status == "cancelled"
                assert utterance.result.frames_handed_out == 6
            assert np.array_equal(pcm_of(client.speak("x")), WHOLE)
            client.cancel()  # nothing in flight: nothing happens

    async with replay(pace=0.05) as server:
        await in_thread(use)
    assert (server.connections, server.failures) == (1, [])


async def test_cancel_from_many_threads_at_once(ledger_program: LedgerProgram) -> None:
    """Each call returns, the loop ends once, and the next utterance is whole; again and again."""

    def use() -> None:
        random = np.random.default_rng(3)
        with codecstream.sync_connect(server.url, ledger_program) as client:
            for _ in range(10):
                delays = random.uniform(0, 0.1, 4)
                cancellers = [threading.Timer(float(delay), client.cancel) for delay in delays]
                for canceller in cancellers:
                    canceller.start()
                spoken = listen_in_thread(client.speak("x"))
                for canceller in cancellers:
                    canceller.join()
                assert spoken.result.status in ("cancelled", "complete")
                assert np.array_equal(spoken.pcm, WHOLE[: spoken.pcm.size])
                spoken = listen_in_thread(client.speak("y"))
                assert np.array_equal(spoken.pcm, WHOLE)

    async with replay(pace=0.02) as server:
        await in_thread(use)
    assert (server.connections, server.failures) == (1, [])


async def test_cancel_while_a_new_connection_opens(ledger_program: LedgerProgram) -> None:
    """The handshake never ends: the loop does, and so does cancel()."""
    gate, waiting = asyncio.Event(), threading.Event()
    gate.set()

    async def slow_to_accept(connection: object, request: object) -> None:
        if not gate.is_set():
            waiting.set()
        await gate.wait()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.speak(CODES)  # and then the server closes

    loop = asyncio.get_running_loop()

    def use() -> None:
        with codecstream.sync_connect(server.url, ledger_program, open_timeout_s=600) as client:
            pcm_of(client.speak("one"))
            loop.call_soon_threadsafe(gate.clear)
            canceller = threading.Thread(target=lambda: (waiting.wait(), client.cancel()))
            canceller.start()
            utterance = client.speak("two")
            assert list(utterance) == []
            assert utterance.result.status == "cancelled"
            canceller.join()
            loop.call_soon_threadsafe(gate.set)
            assert np.array_equal(pcm_of(client.speak("three")), WHOLE)

    options: dict[str, Any] = {"process_request": slow_to_accept, "open_timeout": None}
    async with ScriptedServer(script, **options) as server:
        await in_thread(use)


async def test_cancel_before_a_new_connection_is_asked_for(
    ledger_program: LedgerProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes between the last look at the utterance and the connection that never opens."""

    class Late(Opening):
        def __init__(self, *args: Any) -> None:
            if clients:
                clients[0].cancel()
            super().__init__(*args)

    clients: list[SyncClient] = []
    monkeypatch.setattr(sync_client, "Opening", Late)

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.speak(CODES)  # and then the server closes

    async def at_first_only(connection: object, request: object) -> None:
        if clients:
            await asyncio.sleep(3600)

    def use() -> None:
        with codecstream.sync_connect(server.url, ledger_program, open_timeout_s=600) as client:
            pcm_of(client.speak("one"))
            connection = client._connection
            assert connection is not None
            connection.close(goodbye=False)
            clients.append(client)
            utterance = client.speak("two")
            assert list(utterance) == []
            assert utterance.result.status == "cancelled"

    options: dict[str, Any] = {"process_request": at_first_only, "open_timeout": None}
    async with ScriptedServer(script, **options) as server:
        await in_thread(use)


async def test_giving_up_what_is_open_by_now_leaves_it_open(
    ledger_program: LedgerProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    openings: list[Opening] = []

    class Kept(Opening):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            openings.append(self)

    monkeypatch.setattr(sync_client, "Opening", Kept)

    def use() -> None:
        with codecstream.sync_connect(server.url, ledger_program) as client:
            openings[0].give_up()  # as a cancel does that comes a moment too late
            assert np.array_equal(pcm_of(client.speak("x")), WHOLE)

    async with replay() as server:
        await in_thread(use)
    assert server.connections == 1


async def test_close_from_another_thread_ends_the_loop(ledger_program: LedgerProgram) -> None:
    def use() -> None:
        with codecstream.sync_connect(server.url, ledger_program) as client:
            utterance = client.speak("x")
            next(utterance)
            closer = threading.Thread(target=client.close)
            closer.start()
            list(utterance)
            closer.join()
            assert utterance.result.status == "cancelled"
            with pytest.raises(LocalProtocolError, match="not open"):
                client.speak("x")

    async with replay(pace=0.5) as server:
        await in_thread(use)


async def test_close_within_a_handshake_that_never_answers(ledger_program: LedgerProgram) -> None:
    async def first_only(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.set()
        await asyncio.sleep(3600)

    reached = threading.Event()

    def use() -> None:
        client = codecstream.sync_connect(url, ledger_program, open_timeout_s=600)
        entering = threading.Thread(target=enter, args=[client])
        entering.start()
        assert reached.wait(PATIENCE_S)
        client._opening.give_up()  # type: ignore[union-attr]
        entering.join()
        client.close()

    def enter(client: SyncClient) -> None:
        with pytest.raises(ConnectionFailedError):
            client.__enter__()

    async with raw_server(first_only) as url:
        await in_thread(use)


# Text in pieces


async def test_text_may_come_in_pieces_while_sound_is_coming(
    ledger_program: LedgerProgram,
) -> None:
    heard = threading.Event()

    async def script(peer: Peer) -> None:
        await peer.receive()  # session.config
        await peer.receive()  # the first piece
        await peer.start()
        await peer.packets(CODES[:10], eos=False)
        assert await peer.request() == "lo."
        await peer.packets(CODES[10:], first_seq=10)
        await peer.done(total_frames=57, seq_last=56)
        await peer.session_done()
        await peer.receive()

    def pieces() -> Iterator[str]:
        yield "Hel"
        assert heard.wait(PATIENCE_S)
        yield "lo."

    def use() -> None:
        with codecstream.sync_connect(server.url, ledger_program) as client:
            utterance = client.speak(pieces())
            first = next(utterance)
            heard.set()
            assert np.array_equal(np.concatenate([first.pcm, pcm_of(utterance)]), WHOLE)

    async with ScriptedServer(script) as server:
        await in_thread(use)
    assert server.failures == []


@pytest.mark.parametrize("kind", [RuntimeError, SystemExit])
async def test_a_failing_text_iterator_reaches_the_caller(
    kind: type[BaseException], ledger_program: LedgerProgram
) -> None:
    def pieces() -> Iterator[str]:
        yield "Hel"
        raise kind("the language model went away")

    def use() -> None:
        with codecstream.sync_connect(server.url, ledger_program) as client:
            utterance = client.speak(pieces())
            with pytest.raises(CodecStreamError, match="language model went away") as caught:
                next(utterance)
            assert isinstance(caught.value.__cause__, kind)
            assert utterance.result.status == "failed"
            assert np.array_equal(pcm_of(client.speak("x")), WHOLE)

    async with replay() as server:
        await in_thread(use)
    assert server.connections == 1


@pytest.mark.parametrize("wrong", [None, 7, b"x"])
@pytest.mark.parametrize("wrap", [lambda text: text, lambda text: ["Hel", text]])
async def test_text_that_is_no_text_reaches_the_caller(
    wrong: Any, wrap: Callable[[Any], Any], ledger_program: LedgerProgram
) -> None:
    def use() -> None:
        with codecstream.sync_connect(server.url, ledger_program) as client:
            with pytest.raises(CodecStreamError, match="text"):
                list(client.speak(wrap(wrong)))
            assert np.array_equal(pcm_of(client.speak("x")), WHOLE)

    async with replay() as server:
        await in_thread(use)


async def test_a_text_iterator_left_early_is_closed(ledger_program: LedgerProgram) -> None:
    closed = threading.Event()

    def endless() -> Iterator[str]:
        try:
            while True:
                yield "word "
                time.sleep(0.01)
        finally:
            closed.set()

    def use() -> None:
        with codecstream.sync_connect(server.url, ledger_program) as client:
            threading.Timer(0.1, client.cancel).start()
            utterance = client.speak(endless())
            assert list(utterance) == []
            assert utterance.result.status == "cancelled"
            assert closed.wait(PATIENCE_S)
            assert np.array_equal(pcm_of(client.speak("x")), WHOLE)

    async with replay() as server:
        await in_thread(use)
    assert server.connections == 1


async def test_closing_waits_for_the_text_of_earlier_utterances(
    ledger_program: LedgerProgram,
) -> None:
    """Each of them is about to end: that it takes its time is no reason to leave it behind."""
    ended: list[int] = []

    def slow(index: int) -> Iterator[str]:
        try:
            yield "x"
            time.sleep(0.5)
        finally:
            ended.append(index)

    def use() -> None:
        with codecstream.sync_connect(server.url, ledger_program, max_audio_s=None) as client:
            for index in range(3):
                utterance = client.speak(slow(index))
                threading.Timer(0.05, client.cancel).start()
                assert list(utterance) == []
        assert sorted(ended) == [0, 1, 2]
        assert leftovers() == set()

    async with replay() as server:
        await in_thread(use)


async def test_a_text_iterator_that_never_goes_on_does_not_hold_up_the_rest(
    ledger_program: LedgerProgram,
) -> None:
    """Cancelling it before its first piece does not cost the connection either."""
    forever = threading.Event()

    def stuck() -> Iterator[str]:
        forever.wait()
        yield "x"

    def use() -> None:
        with codecstream.sync_connect(server.url, ledger_program, drain_timeout_s=0.2) as client:
            utterance = client.speak(stuck())
            threading.Timer(0.1, client.cancel).start()
            assert list(utterance) == []
            assert np.array_equal(pcm_of(client.speak("x")), WHOLE)
            unheard = client.speak(stuck())
            threading.Timer(0.1, client.cancel).start()
            assert list(unheard) == []
        assert leftovers() == {"codecstream-text"}
        forever.set()
        while leftovers():
            time.sleep(0.01)

    async with replay() as server:
        await in_thread(use)
    assert server.connections == 1


# Faults of this side


async def test_decoder_failure_reaches_the_caller_and_stops_the_server(
    ledger_program: LedgerProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(codes: NDArray[np.int64], state: int) -> tuple[NDArray[np.float32], int]:
        return np.full(len(codes) * SAMPLES, np.nan, np.float32), state

    def use() -> None:
        with codecstream.sync_connect(server.url, ledger_program) as client:
            with monkeypatch.context() as patch:
                patch.setattr(ledger_program, "step", broken)
                utterance = client.speak("x")
                with pytest.raises(OutputError):
                    next(utterance)
                assert utterance.result.status == "failed"
            assert np.array_equal(pcm_of(client.speak("x")), WHOLE)

    async with replay(pace=0.05) as server:
        await in_thread(use)
    assert (server.connections, server.failures) == (1, [])


@pytest.mark.parametrize(("part", "method"), [(Session, "receive"), (ClientConnection, "send")])
async def test_a_fault_of_this_program_does_not_look_like_the_networks(
    part: type, method: str, ledger_program: LedgerProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: object, message: object) -> None:
        raise ZeroDivisionError

    def use() -> None:
        with codecstream.sync_connect(server.url, ledger_program) as client:
            with monkeypatch.context() as patch:
                patch.setattr(part, method, broken)
                with pytest.raises(CodecStreamError, match="ZeroDivisionError") as caught:
                    pcm_of(client.speak("x"))
                assert isinstance(caught.value.__cause__, ZeroDivisionError)
            assert np.array_equal(pcm_of(client.speak("x")), WHOLE)

    async with replay() as server:
        await in_thread(use)


async def test_exits_within_a_program_or_a_hook_end_no_thread(
    ledger_program: LedgerProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hook(Observer):
        def chunk_decoded(self, chunk: ChunkTime, progress: Progress) -> None:
            raise SystemExit

    def exits(codes: object, state: object) -> None:
        raise SystemExit

    def use() -> None:
        with codecstream.sync_connect(server.url, ledger_program, observer=Hook()) as client:
            assert np.array_equal(pcm_of(client.speak("x")), WHOLE)
            with monkeypatch.context() as patch:
                patch.setattr(ledger_program, "step", exits)
                with pytest.raises(DecoderError, match="SystemExit"):
                    pcm_of(client.speak("x"))
            assert np.array_equal(pcm_of(client.speak("x")), WHOLE)

    async with replay() as server:
        await in_thread(use)


@pytest.mark.parametrize(
    ("part", "method"),
    [(SyncClient, "_decode"), (SyncConnection, "_deliver"), (SyncConnection, "_next_message")],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_closing_does_not_wait_for_a_thread_that_has_failed(
    part: type, method: str, ledger_program: LedgerProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exits(self: object, *_: object) -> None:
        raise SystemExit

    monkeypatch.setattr(part, method, exits)

    def use() -> None:
        with codecstream.sync_connect(server.url, ledger_program, drain_timeout_s=0.2):
            pass

    async with replay() as server:
        await in_thread(use)


async def test_two_clients_share_a_program(ledger_program: LedgerProgram) -> None:
    def use() -> None:
        with (
            codecstream.sync_connect(server.url, ledger_program) as one,
            codecstream.sync_connect(server.url, ledger_program) as other,
        ):
            first, second = one.speak("x"), other.speak("x")
            pairs = list(zip(first, second, strict=True))
        for index in range(2):
            pcm = np.concatenate([pair[index].pcm for pair in pairs])
            assert np.array_equal(pcm, WHOLE)

    async with replay(pace=0.01) as server:
        await in_thread(use)
    assert server.connections == 2
