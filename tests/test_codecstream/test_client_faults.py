"""The client over real sockets: servers that fail, streams that do not fit, lost connections."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest
from numpy.typing import NDArray
from speaking import CODES, collect, fails, replay
from support import SAMPLES, LedgerProgram, expected_ledger, make_codes

import codecstream
from codecstream import (
    ConnectionFailedError,
    IncompleteError,
    InvalidCodesError,
    OutputError,
    RemoteProtocolError,
    SequenceError,
    ServerError,
    StreamMismatchError,
    Utterance,
)
from codecstream.testing import Fault, Peer, Recording, ReplayServer, ScriptedServer
from codecstream.wire import Flags, InputCancel


@pytest.mark.case(2)
async def test_case_2_server_failure_is_one_error_and_the_connection_lives(
    ledger_program: LedgerProgram,
) -> None:
    fault = Fault("error", packet=10, message="out of memory")
    async with (
        replay(fault) as server,
        codecstream.connect(server.url, ledger_program) as client,
    ):
        error = await fails(client.speak("x"), ServerError)
        assert "out of memory" in str(error)
        assert (error.utterance_index, error.frames_received) == (0, 10)
        assert np.array_equal(await collect(client.speak("x")), expected_ledger(CODES))
    assert server.connections == 1


@pytest.mark.case(2)
async def test_case_2_error_without_session_done_costs_the_connection_only(
    ledger_program: LedgerProgram,
) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        if server.connections == 1:
            await peer.start()
            await peer.send('{"type": "error", "message": "lost"}')
            await peer.receive()  # and never another word
        else:
            await peer.speak(CODES)
        await peer.receive()

    async with (
        ScriptedServer(script) as server,
        codecstream.connect(server.url, ledger_program, drain_timeout_s=0.1) as client,
    ):
        await fails(client.speak("x"), ServerError)
        assert np.array_equal(await collect(client.speak("x")), expected_ledger(CODES))
    assert server.connections == 2


@pytest.mark.case(3)
async def test_case_3_counts_that_do_not_add_up_are_incomplete(
    ledger_program: LedgerProgram,
) -> None:
    async with (
        replay(Fault("count", value=1)) as server,
        codecstream.connect(server.url, ledger_program) as client,
    ):
        utterance = client.speak("x")
        heard = 0
        with pytest.raises(IncompleteError) as caught:
            async for chunk in utterance:
                heard += chunk.frames
    assert (caught.value.expected, caught.value.received) == (58, 57)
    assert heard == 57
    assert utterance.result.status == "incomplete"


@pytest.mark.case(5)
async def test_case_5_audio_that_starts_again_is_no_success(ledger_program: LedgerProgram) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.start()
        for seq in (0, 1, 2, 2):
            await peer.packet(seq, CODES[seq : seq + 1])
        await peer.packet(3, CODES[:4], Flags.EOS)
        await peer.done(total_frames=4, seq_last=3)
        await peer.session_done()
        await peer.receive()

    async with (
        ScriptedServer(script) as server,
        codecstream.connect(server.url, ledger_program) as client,
    ):
        utterance = client.speak("x")
        with pytest.raises(RemoteProtocolError):
            await collect(utterance)
    assert any("packet 2 came again" in notice for notice in utterance.result.notices)
    assert utterance.result.frames_received == 7


@pytest.mark.case(6)
async def test_case_6_nothing_behind_a_gap_is_decoded(ledger_program: LedgerProgram) -> None:
    async with (
        replay(Fault("drop", packet=2)) as server,
        codecstream.connect(server.url, ledger_program) as client,
    ):
        error = await fails(client.speak("x"), SequenceError)
        assert (error.expected, error.received, error.frames_received) == (2, 3, 2)
        assert sum(ledger_program.calls) <= 2
        assert np.array_equal(await collect(client.speak("x")), expected_ledger(CODES))
    assert server.connections == 1


@pytest.mark.case(6)
async def test_case_6_on_gap_reset_goes_on_and_fails_at_the_end(
    ledger_program: LedgerProgram,
) -> None:
    async with (
        replay(Fault("drop", packet=30)) as server,
        codecstream.connect(server.url, ledger_program, on_gap="reset") as client,
    ):
        utterance = client.speak("x")
        parts = []
        with pytest.raises(SequenceError):
            async for chunk in utterance:
                parts.append(chunk.pcm)
    expected = [expected_ledger(CODES[:30]), expected_ledger(CODES[31:])]
    assert np.array_equal(np.concatenate(parts), np.concatenate(expected))


@pytest.mark.case(7)
@pytest.mark.parametrize("value", [2048, 2150, 32767, -1])
async def test_case_7_codes_outside_the_codebook_are_not_decoded(
    ledger_program: LedgerProgram, value: int
) -> None:
    async with (
        replay(Fault("code", packet=20, value=value)) as server,
        codecstream.connect(server.url, ledger_program) as client,
        codecstream.connect(server.url, ledger_program) as other,
    ):
        error, pcm = await asyncio.gather(
            fails(client.speak("x"), InvalidCodesError),
            collect_second(other),
        )
    assert (error.seq, error.frame, error.codebook, error.value) == (20, 0, 0, value)
    assert np.array_equal(pcm, expected_ledger(CODES))


async def collect_second(client: codecstream.Client) -> NDArray[np.float32]:
    """Return the second utterance, which has no fault."""
    await fails(client.speak("x"), InvalidCodesError)
    return await collect(client.speak("x"))


@pytest.mark.case(8)
@pytest.mark.parametrize(
    ("field", "offered"),
    [
        ("codebooks", 8),
        ("codebooks", 32),
        ("codebook_size", 4096),
        ("sample_rate", 16_000),
        ("frame_rate_hz", 25.0),
        ("version", 2),
        ("header_format", "<IHH"),
        ("decoder_id", "another"),
    ],
)
async def test_case_8_a_stream_for_another_decoder_is_refused(
    ledger_program: LedgerProgram, field: str, offered: object
) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.start(**{field: offered})
        await peer.packets(CODES)
        while not isinstance(await peer.receive(), InputCancel):
            pass
        await peer.done(cancelled=True)
        await peer.session_done()
        await peer.receive()

    async with (
        ScriptedServer(script) as server,
        codecstream.connect(server.url, ledger_program) as client,
    ):
        utterance = client.speak("x")
        error = await fails(utterance, StreamMismatchError)
    assert (error.field, error.offered) == (field, offered)
    assert utterance.result.status == "refused"
    assert ledger_program.calls == []


async def test_mode_not_supported_is_refused(ledger_program: LedgerProgram) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.error("codec_tokens is not supported by this model")
        await peer.session_done(sentences=0)
        await peer.request()
        await peer.speak(CODES, 1)
        await peer.receive()

    async with (
        ScriptedServer(script) as server,
        codecstream.connect(server.url, ledger_program) as client,
    ):
        utterance = client.speak("x")
        error = await fails(utterance, ServerError)
        assert error.refused and utterance.result.status == "refused"
        assert (await collect(client.speak("x"))).size == len(CODES) * SAMPLES


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


@pytest.mark.case(11)
async def test_case_11_idle_connection_is_replaced(ledger_program: LedgerProgram) -> None:
    async with (
        replay(idle_timeout_s=0.2) as server,
        codecstream.connect(server.url, ledger_program) as client,
    ):
        first = client.speak("x")
        await collect(first)
        await asyncio.sleep(0.5)
        assert first.result.status == "complete"
        assert np.array_equal(await collect(client.speak("x")), expected_ledger(CODES))
    assert server.connections == 2


CLOSES = [1000, 1001, 1011, 1012, None]  # None: the TCP connection is cut


@pytest.mark.case(53)
@pytest.mark.parametrize("code", CLOSES)
@pytest.mark.parametrize("when", ["in mid-stream", "after EOS", "after codec.done", "at the end"])
async def test_case_53_an_early_close_is_no_success(
    ledger_program: LedgerProgram, code: int | None, when: str
) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.start()
        await peer.packets(CODES[:10], eos=when != "in mid-stream")
        if when in ("after codec.done", "at the end"):
            await peer.done(total_frames=10, seq_last=9)
        if when == "at the end":
            await peer.session_done()
        if code is None:
            await asyncio.sleep(0.05)  # let the data leave first
            peer.abort()
        else:
            await peer.socket.close(code)

    async with (
        ScriptedServer(script) as server,
        codecstream.connect(server.url, ledger_program) as client,
    ):
        utterance = client.speak("x")
        if when in ("after codec.done", "at the end"):
            assert (await collect(utterance)).size == 10 * SAMPLES
            assert utterance.result.status == "complete"
        else:
            error = await fails(utterance, IncompleteError)
            assert error.close_code == (code or 1006)
            assert error.frames_received == 10


async def test_a_silent_server_is_noticed(ledger_program: LedgerProgram) -> None:
    async with (
        replay(Fault("stall", packet=5, seconds=60)) as server,
        codecstream.connect(server.url, ledger_program, idle_timeout_s=0.3) as client,
    ):
        error = await fails(client.speak("x"), IncompleteError)
        assert "nothing came from the server for 0.3 s after 5 frames" in str(error)


async def test_nobody_listening(ledger_program: LedgerProgram) -> None:
    with pytest.raises(ConnectionFailedError, match="no connection to ws://"):
        async with codecstream.connect("ws://127.0.0.1:9/x", ledger_program):
            pass


@pytest.mark.case(50)
async def test_case_50_decoding_never_blocks_the_event_loop(
    ledger_program: LedgerProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = ledger_program.step
    loop_thread = threading.get_ident()
    decoded_on: set[int] = set()

    def slow(codes: NDArray[np.int64], state: int) -> tuple[NDArray[np.float32], int]:
        decoded_on.add(threading.get_ident())
        time.sleep(1.5)
        return plain(codes, state)

    monkeypatch.setattr(ledger_program, "step", slow)
    async with (
        replay(ping_interval=0.3, ping_timeout=0.3) as server,
        codecstream.connect(server.url, ledger_program, schedule=(29,)) as client,
    ):
        assert np.array_equal(await collect(client.speak("x")), expected_ledger(CODES))
    assert loop_thread not in decoded_on
    assert server.connections == 1


@pytest.mark.case(51)
async def test_case_51_a_slow_caller_bounds_audio_not_the_socket(
    ledger_program: LedgerProgram,
) -> None:
    codes = make_codes(3750)
    async with (
        ReplayServer([Recording(codes)], pace=0, ping_interval=0.2, ping_timeout=0.2) as server,
        codecstream.connect(server.url, ledger_program, max_ahead_s=10) as client,
    ):
        utterance = client.speak("x")
        await anext(utterance)
        await asyncio.sleep(1.0)
        assert sum(ledger_program.calls) * 0.08 <= 10 + 2 * 2 + 1  # ahead, in hand, in the ramp
        rest = await collect_rest(utterance)
    assert rest == 3748
    assert utterance.result.status == "complete"


async def collect_rest(utterance: Utterance) -> int:
    return sum([chunk.frames async for chunk in utterance])


@pytest.mark.case(52)
async def test_case_52_a_message_beyond_the_limit_is_refused(
    ledger_program: LedgerProgram,
) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.start()
        await peer.send(bytes(64 * 1024 * 1024))
        await peer.receive()

    async with (
        ScriptedServer(script) as server,
        codecstream.connect(server.url, ledger_program) as client,
    ):
        error = await fails(client.speak("x"), IncompleteError)
    assert error.close_code == 1009


async def test_closing_leaves_nothing_behind(ledger_program: LedgerProgram) -> None:
    async with replay(pace=0.2) as server:
        async with codecstream.connect(server.url, ledger_program) as client:
            utterance = client.speak("x")
            await anext(utterance)
        assert utterance.over and utterance.result.status == "cancelled"
        await client.close()  # again
        left = {task.get_name() for task in asyncio.all_tasks()}
        assert not any(name.startswith("codecstream") for name in left)
    names = {thread.name for thread in threading.enumerate()}
    assert not any(name.startswith("codecstream") for name in names)
