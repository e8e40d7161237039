"""The transport under faults, over real sockets: dead peers, cuts, floods, sizes, proxies."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from shells import (
    CuttingProxy,
    Outcome,
    accept_by_hand,
    both_shells,
    leftovers,
    listen,
    listen_in_thread,
    nothing_left,
    raw_server,
    say,
    try_to_enter,
)
from speaking import CODES, replay
from support import SAMPLES, LedgerProgram, expected_ledger, make_codes

import codecstream
from codecstream import ConnectionFailedError, IncompleteError
from codecstream.testing import Peer, Recording, ReplayServer, ScriptedServer
from codecstream.wire import MAX_PACKET_BYTES, Flags, encode_packet

__all__ = ["nothing_left"]
pytestmark = pytest.mark.usefixtures("nothing_left")

WHOLE = expected_ledger(CODES)
LONG_S = 20.0  # far more than any of these may take, far less than a hang


async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(3600)


async def half_open(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Accept, take the request, and be gone without a word, as when the Wi-Fi drops."""
    await accept_by_hand(reader, writer)
    while await reader.read(65536):
        pass


async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Accept, and never take another byte, nor send one."""
    await accept_by_hand(reader, writer)
    writer.transport.pause_reading()
    await asyncio.sleep(3600)


# A server that is not there


@both_shells
async def test_nobody_listening(ledger_program: LedgerProgram, shell: str) -> None:
    with pytest.raises(ConnectionFailedError, match="no connection to ws://") as caught:
        await try_to_enter(shell, "ws://127.0.0.1:9/x", ledger_program)
    assert caught.value.transient


@both_shells
async def test_a_handshake_that_never_answers_is_given_up(
    ledger_program: LedgerProgram, shell: str
) -> None:
    async with raw_server(silence) as url:
        with pytest.raises(ConnectionFailedError, match="timed out") as caught:
            await asyncio.wait_for(
                try_to_enter(shell, url, ledger_program, open_timeout_s=0.2), LONG_S
            )
    assert caught.value.transient


@both_shells
async def test_what_is_no_websocket_server_is_told(
    ledger_program: LedgerProgram, shell: str
) -> None:
    async def http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        await reader.read()

    async with raw_server(http) as url:
        with pytest.raises(ConnectionFailedError, match="404") as caught:
            await try_to_enter(shell, url, ledger_program)
    assert not caught.value.transient


@both_shells
async def test_pings_find_a_half_open_socket(
    ledger_program: LedgerProgram, shell: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with raw_server(half_open) as url:
        (lost,) = await asyncio.wait_for(
            say(
                shell,
                url,
                ledger_program,
                "x",
                ping_interval_s=0.1,
                ping_timeout_s=0.2,
                drain_timeout_s=0.2,
            ),
            LONG_S,
        )
    assert isinstance(lost.error, IncompleteError)
    assert lost.result.status == "incomplete"
    assert "ping timeout" in lost.result.reason
    assert not caplog.records  # the result says it: no traceback on the console as well


@both_shells
async def test_without_pings_the_idle_time_finds_a_half_open_socket(
    ledger_program: LedgerProgram, shell: str
) -> None:
    async with raw_server(half_open) as url:
        (lost,) = await asyncio.wait_for(
            say(
                shell,
                url,
                ledger_program,
                "x",
                ping_interval_s=None,
                idle_timeout_s=0.3,
                drain_timeout_s=0.1,
            ),
            LONG_S,
        )
    assert lost.result.status == "incomplete"
    assert "nothing came from the server for 0.3 s" in lost.result.reason


@both_shells
async def test_a_server_that_takes_nothing_does_not_hold_the_client_up(
    ledger_program: LedgerProgram, shell: str
) -> None:
    """More text than the buffers hold: the send itself hangs, and pings and the close behind it."""
    async with raw_server(deaf) as url:
        (lost,) = await asyncio.wait_for(
            say(
                shell,
                url,
                ledger_program,
                "word " * 4_000_000,
                idle_timeout_s=0.5,
                drain_timeout_s=0.2,
            ),
            LONG_S,
        )
    assert lost.result.status == "incomplete"
    assert lost.chunks == []


@both_shells
async def test_closing_does_not_wait_for_a_server_that_takes_nothing(
    ledger_program: LedgerProgram, shell: str
) -> None:
    """Though a send may take ten minutes, by the options, and no ping tells that it is dead."""
    text = "word " * 4_000_000
    options: dict[str, Any] = {
        "idle_timeout_s": 600,
        "drain_timeout_s": 0.2,
        "ping_interval_s": None,
    }
    async with raw_server(deaf) as url:
        if shell == "asyncio":
            client = codecstream.connect(url, ledger_program, **options)
            await client.__aenter__()
            listening = asyncio.create_task(listen(client.speak(text)))
            await asyncio.sleep(0.5)
            await asyncio.wait_for(client.close(), LONG_S)
            spoken = await asyncio.wait_for(listening, LONG_S)
        else:

            def use() -> Outcome:
                with codecstream.sync_connect(url, ledger_program, **options) as client:
                    threading.Timer(0.5, client.close).start()
                    return listen_in_thread(client.speak(text))

            spoken = await asyncio.wait_for(asyncio.to_thread(use), LONG_S)
    assert spoken.result.status in ("cancelled", "incomplete")
    assert leftovers() == set()


# Cuts


@both_shells
@pytest.mark.case(53)
async def test_case_53_a_cut_at_any_byte_gives_what_came_or_nothing(
    ledger_program: LedgerProgram, shell: str
) -> None:
    """The audio is a prefix, whatever the byte; complete only where the proof had come."""
    async with replay() as server:
        proxy = CuttingProxy(server.url, [None])
        async with raw_server(proxy.handle) as url:
            await say(shell, url, ledger_program, "x")
        total = proxy.passed[0]
        rng = np.random.default_rng(53)
        cuts = sorted({*rng.integers(150, total, 12).tolist(), total - 90, total - 40, total - 5})
        statuses = []
        for cut in cuts:
            proxy = CuttingProxy(server.url, [cut])
            async with raw_server(proxy.handle) as url:
                try:
                    (spoken,) = await say(shell, url, ledger_program, "x", drain_timeout_s=0.5)
                except ConnectionFailedError:  # within the handshake
                    assert cut < 300
                    continue
            statuses.append(spoken.result.status)
            assert np.array_equal(spoken.pcm, WHOLE[: spoken.pcm.size])
            if spoken.result.status == "complete":
                assert spoken.pcm.size == WHOLE.size
            else:
                assert isinstance(spoken.error, IncompleteError)
                assert spoken.error.close_code == 1006
                assert spoken.result.frames_received * 39 < cut
    assert statuses == sorted(statuses, key=lambda status: status == "complete")
    assert {"incomplete", "complete"} == set(statuses)


CLOSES = [1000, 1001, 1005, 1006, 1011, 1012]


async def close_with(peer: Peer, code: int) -> None:
    if code == 1005:  # a close frame without a code
        peer.socket.transport.write(b"\x88\x00")
        await peer.socket.wait_closed()
    elif code == 1006:  # no close frame
        await asyncio.sleep(0.05)  # let the data leave first
        peer.abort()
    else:
        await peer.socket.close(code)


@both_shells
@pytest.mark.case(53)
@pytest.mark.parametrize("code", CLOSES)
@pytest.mark.parametrize("when", ["in mid-stream", "after EOS", "after codec.done", "at the end"])
async def test_case_53_an_early_close_is_no_success(
    ledger_program: LedgerProgram, shell: str, code: int, when: str
) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.start()
        await peer.packets(CODES[:10], eos=when != "in mid-stream")
        if when in ("after codec.done", "at the end"):
            await peer.done(total_frames=10, seq_last=9)
        if when == "at the end":
            await peer.session_done()
        await close_with(peer, code)

    async with ScriptedServer(script) as server:
        (spoken,) = await say(shell, server.url, ledger_program, "x")
    if when in ("after codec.done", "at the end"):
        assert spoken.result.status == "complete"
        assert np.array_equal(spoken.pcm, WHOLE[: 10 * SAMPLES])
    else:
        assert isinstance(spoken.error, IncompleteError)
        assert spoken.error.close_code == code
        assert f"code {code}" in spoken.result.reason
        assert spoken.error.frames_received == 10
        assert spoken.result.status == "incomplete"
    assert server.connections == 1  # and it was not asked for again


# Floods and sizes


async def flood(peer: Peer) -> None:
    """Send good packets without end, as fast as they are taken, whatever the client says."""
    codes = make_codes(1)
    await peer.request()
    await peer.start()
    for seq in itertools.count():
        await peer.packet(seq, codes)
        if seq % 50 == 0:
            await asyncio.sleep(0.001)  # the test has other things to do


@both_shells
async def test_closing_under_a_flood(ledger_program: LedgerProgram, shell: str) -> None:
    async with ScriptedServer(flood) as server:
        if shell == "asyncio":
            async with codecstream.connect(
                server.url, ledger_program, drain_timeout_s=0.3
            ) as client:
                utterance = client.speak("x")
                await anext(utterance)
                for _ in range(20):  # the event loop has time for others
                    await asyncio.sleep(0.001)
                closing_s = time.perf_counter()
            result = utterance.result
        else:

            def use() -> tuple[Any, float]:
                with codecstream.sync_connect(
                    server.url, ledger_program, drain_timeout_s=0.3
                ) as client:
                    utterance = client.speak("x")
                    next(utterance)
                    time.sleep(0.1)
                    closing_s = time.perf_counter()
                return utterance.result, closing_s

            result, closing_s = await asyncio.to_thread(use)
        assert time.perf_counter() - closing_s < LONG_S
        assert result.status == "cancelled"
        assert leftovers() == set()
    assert server.failures == []


@both_shells
async def test_cancel_under_a_flood_costs_the_connection_only(
    ledger_program: LedgerProgram, shell: str
) -> None:
    async def script(peer: Peer) -> None:
        if server.connections == 1:
            await flood(peer)
        await peer.request()
        await peer.speak(CODES)
        await peer.receive()

    async with ScriptedServer(script) as server:
        if shell == "asyncio":
            async with codecstream.connect(
                server.url, ledger_program, drain_timeout_s=0.2
            ) as client:
                first = client.speak("x")
                await anext(first)
                await asyncio.wait_for(client.cancel(), LONG_S)
                after = [chunk.pcm async for chunk in client.speak("y")]
        else:

            def use() -> list[NDArray[np.float32]]:
                with codecstream.sync_connect(
                    server.url, ledger_program, drain_timeout_s=0.2
                ) as client:
                    next(client.speak("x"))
                    client.cancel()
                    return [chunk.pcm for chunk in client.speak("y")]

            after = await asyncio.wait_for(asyncio.to_thread(use), LONG_S)
    assert np.array_equal(np.concatenate(after), WHOLE)
    assert server.connections == 2


@both_shells
@pytest.mark.case(52)
async def test_case_52_the_largest_packet_is_accepted(
    ledger_program: LedgerProgram, shell: str
) -> None:
    codes = make_codes(65_535)
    assert len(encode_packet(0, codes, Flags.EOS)) == MAX_PACKET_BYTES == 2_097_127

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.start()
        await peer.packet(0, codes, Flags.EOS)
        await peer.done(total_frames=65_535, seq_last=0)
        await peer.session_done()
        await peer.receive()

    async with ScriptedServer(script) as server:
        # Cut off soon: that it is taken, is the point here.
        (spoken,) = await say(shell, server.url, ledger_program, "x", max_audio_s=4.0)
    assert spoken.result.frames_received == 65_535
    assert spoken.result.status == "too_long"
    assert np.array_equal(spoken.pcm, expected_ledger(codes[:50]))


@both_shells
@pytest.mark.case(52)
@pytest.mark.parametrize(
    ("size", "options"),
    [
        (64 * 1024 * 1024, {}),
        (MAX_PACKET_BYTES + 1, {}),
        (2000, {"max_message_bytes": 1999}),
    ],
)
async def test_case_52_a_message_beyond_the_limit_is_refused(
    ledger_program: LedgerProgram, shell: str, size: int, options: dict[str, Any]
) -> None:
    """It comes in fragments, so that neither side holds it, and is refused before it is whole."""

    def fragments() -> Iterator[bytes]:
        for start in range(0, size, 65_536):
            yield bytes(min(65_536, size - start))

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.start()
        await peer.socket.send(fragments())
        await peer.receive()

    async with ScriptedServer(script) as server:
        tracemalloc.start()
        try:
            (spoken,) = await say(shell, server.url, ledger_program, "x", **options)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert isinstance(spoken.error, IncompleteError)
    assert spoken.error.close_code == 1009
    assert "limit" in spoken.result.reason or "big" in spoken.result.reason
    assert peak < 20e6


# What the environment and the handshake say


@both_shells
@pytest.mark.case(54)
async def test_case_54_the_environments_proxy_is_left_alone_unless_asked(
    ledger_program: LedgerProgram, shell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    async def script(peer: Peer) -> None:
        seen.append(peer.headers["Authorization"])
        await peer.receive()

    nobody = "127.0.0.1:9"
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "WS_PROXY", "WSS_PROXY"):
        for variable in (name, name.lower()):
            monkeypatch.setenv(variable, f"http://{nobody}")
    for variable in ("ALL_PROXY", "all_proxy", "SOCKS_PROXY", "socks_proxy"):
        monkeypatch.setenv(variable, f"socks5://{nobody}")
    for variable in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(variable, raising=False)
    headers = {"Authorization": "Bearer secret"}
    async with ScriptedServer(script) as server:
        await try_to_enter(shell, server.url, ledger_program, headers=headers)
        assert seen == ["Bearer secret"]
        for proxy in (True, f"http://{nobody}"):
            with pytest.raises(ConnectionFailedError):
                await try_to_enter(shell, server.url, ledger_program, proxy=proxy)
    assert server.connections == 1


@both_shells
async def test_a_proxy_that_is_asked_for_is_used(ledger_program: LedgerProgram, shell: str) -> None:
    asked: list[bytes] = []

    async def http_proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[0])
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await CuttingProxy(server.url, []).handle(reader, writer)

    async with replay() as server, raw_server(http_proxy) as proxy_url:
        proxy = proxy_url.replace("ws://", "http://").split("/v1")[0]
        (spoken,) = await say(shell, server.url, ledger_program, "x", proxy=proxy)
        host = server.url.split("/")[2]
    assert asked == [f"CONNECT {host} HTTP/1.1".encode()]
    assert np.array_equal(spoken.pcm, WHOLE)


@both_shells
@pytest.mark.case(55)
async def test_case_55_compression_is_offered_only_when_asked(
    ledger_program: LedgerProgram, shell: str
) -> None:
    class Listening(ReplayServer):
        offers: list[str | None]

        async def _handle(self, socket: Any) -> None:
            self.offers.append(socket.request.headers.get("Sec-WebSocket-Extensions"))
            used = [type(extension).__name__ for extension in socket.protocol.extensions]
            self.offers += used
            await super()._handle(socket)

    recordings = [Recording(CODES)]
    heard = []
    async with Listening(recordings, pace=0, compression="deflate") as server:
        server.offers = []
        for compression in (None, "deflate"):
            (spoken,) = await say(shell, server.url, ledger_program, "x", compression=compression)
            heard.append(spoken.pcm)
    plain, offered, used = server.offers
    assert plain is None
    assert offered is not None and "permessage-deflate" in offered
    assert used == "PerMessageDeflate"
    assert np.array_equal(heard[0], WHOLE) and np.array_equal(heard[1], WHOLE)
