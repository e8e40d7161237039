"""The client over real sockets, against scripted and replaying servers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support import SAMPLES, LedgerProgram, expected_ledger, make_codes

import codecstream
from codecstream import (
    AudioChunk,
    CodecStreamError,
    ConnectionFailedError,
    IncompleteError,
    InvalidCodesError,
    LocalProtocolError,
    OutputError,
    Program,
    RemoteProtocolError,
    SequenceError,
    ServerError,
    StreamMismatchError,
    Utterance,
)
from codecstream.testing import Fault, Peer, Recording, ReplayServer, ScriptedServer
from codecstream.wire import Flags, InputCancel, SessionConfig

CODES = make_codes(57)


async def collect(utterance: Utterance) -> NDArray[np.float32]:
    """Take all chunks; check their bookkeeping on the way."""
    parts: list[NDArray[np.float32]] = []
    frames = 0
    async for chunk in utterance:
        assert (chunk.idx, chunk.first_frame) == (len(parts), frames)
        assert chunk.pcm.size == chunk.frames * SAMPLES
        assert chunk.t_ms >= chunk.arrival_ms >= 0
        frames += chunk.frames
        parts.append(chunk.pcm)
    return np.concatenate(parts) if parts else np.empty(0, np.float32)


async def fails(utterance: Utterance, kind: type[CodecStreamError]) -> Any:
    """Return the error that the utterance ends with, and what was heard before."""
    heard: list[AudioChunk] = []
    with pytest.raises(kind) as caught:
        async for chunk in utterance:
            heard.append(chunk)
    assert type(caught.value) is kind
    assert utterance.result.error is caught.value
    assert utterance.result.status != "complete"
    return caught.value


def replay(*faults: Fault, **options: Any) -> ReplayServer:
    return ReplayServer([Recording(CODES)], faults=faults, **{"pace": 0, **options})


# Whole utterances


async def test_speaks_several_utterances_on_one_connection(ledger_program: LedgerProgram) -> None:
    recordings = [Recording(make_codes(n, seed=n), text=str(n)) for n in (1, 57, 130)]
    async with (
        ReplayServer(recordings, pace=0) as server,
        codecstream.connect(server.url, ledger_program) as client,
    ):
        for frames in (57, 1, 130):
            utterance = client.speak(str(frames))
            pcm = await collect(utterance)
            assert np.array_equal(pcm, expected_ledger(make_codes(frames, seed=frames)))
            result = utterance.result
            assert (result.status, result.frames_decoded, result.notices) == (
                "complete",
                frames,
                (),
            )
    assert (server.connections, server.failures) == (1, [])


@pytest.mark.case(1)
async def test_case_1_second_utterance_starts_fresh(tiny_program: Program) -> None:
    first, second = make_codes(40, seed=1), make_codes(40, seed=2)
    recordings = [Recording(first, text="first"), Recording(second, text="second")]
    async with ReplayServer(recordings, pace=0) as server:
        async with codecstream.connect(server.url, tiny_program) as client:
            await collect(client.speak("first"))
            again = [chunk async for chunk in client.speak("second")]
        async with codecstream.connect(server.url, tiny_program) as client:
            alone = await collect(client.speak("second"))
    assert again[0].frames == 2
    assert np.array_equal(np.concatenate([chunk.pcm for chunk in again]), alone)


@pytest.mark.case(4)
@pytest.mark.parametrize("frames", [1, 2, 3, 5, 6, 13, 29, 30, 54, 55, 56])
async def test_case_4_short_utterances_are_heard_in_full(
    ledger_program: LedgerProgram, frames: int
) -> None:
    async with (
        ReplayServer([Recording(make_codes(frames))], pace=0) as server,
        codecstream.connect(server.url, ledger_program) as client,
    ):
        assert (await collect(client.speak("x"))).size == frames * SAMPLES


@pytest.mark.case(3)
async def test_case_3_eos_alone_or_riding_sounds_the_same(tiny_program: Program) -> None:
    heard = []
    for options in ({"eos": "last"}, {"eos": "alone"}, {"frames_per_packet": 7}):
        async with (
            replay(**options) as server,
            codecstream.connect(server.url, tiny_program) as client,
        ):
            heard.append(await collect(client.speak("x")))
    assert {pcm.size for pcm in heard} == {109_440}
    assert all(np.array_equal(pcm, heard[0]) for pcm in heard)


async def test_sentences_each_start_with_a_fresh_decoder(tiny_program: Program) -> None:
    one, two = make_codes(9, seed=1), make_codes(31, seed=2)
    async with (
        ReplayServer([Recording(one, two), Recording(one), Recording(two)], pace=0) as server,
        codecstream.connect(server.url, tiny_program) as client,
    ):
        utterance = client.speak("both", split_granularity="sentence")
        chunks = [chunk async for chunk in utterance]
        apart = [await collect(client.speak(text)) for text in ("one", "two")]
    assert [chunk.sentence_index for chunk in chunks] == [0, 0, 0, 1, 1, 1, 1, 1]
    assert utterance.result.sentences == 2
    assert np.array_equal(np.concatenate([c.pcm for c in chunks]), np.concatenate(apart))


async def test_blank_text_is_a_complete_utterance_without_sound(
    ledger_program: LedgerProgram,
) -> None:
    async with replay() as server, codecstream.connect(server.url, ledger_program) as client:
        utterance = client.speak("  ")
        assert (await collect(utterance)).size == 0
        assert utterance.result.status == "complete"
        assert utterance.result.metrics.ttfa_ms is None


async def test_text_may_come_in_pieces(ledger_program: LedgerProgram) -> None:
    async def pieces() -> AsyncIterator[str]:
        for piece in ("Hel", "lo."):
            await asyncio.sleep(0)
            yield piece

    recordings = [Recording(make_codes(3), text="Bye."), Recording(CODES, text="Hello.")]
    async with (
        ReplayServer(recordings, pace=0) as server,
        codecstream.connect(server.url, ledger_program) as client,
    ):
        assert (await collect(client.speak(pieces()))).size == len(CODES) * SAMPLES


async def test_a_failing_text_iterator_reaches_the_caller(ledger_program: LedgerProgram) -> None:
    async def pieces() -> AsyncIterator[str]:
        yield "Hel"
        raise RuntimeError("the language model went away")

    async with replay() as server, codecstream.connect(server.url, ledger_program) as client:
        error = await fails(client.speak(pieces()), CodecStreamError)
        assert "language model went away" in str(error)
        assert (await collect(client.speak("x"))).size == len(CODES) * SAMPLES
    assert server.connections == 1


async def test_reset_flag_starts_a_fresh_state_in_mid_stream(tiny_program: Program) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.start()
        await peer.packet(0, CODES[:10])
        await peer.packet(1, CODES[10:], Flags.RESET | Flags.EOS)
        await peer.done(total_frames=57, seq_last=1)
        await peer.session_done()
        await peer.request()

    recordings = [Recording(CODES[:10]), Recording(CODES[10:])]
    async with (
        ScriptedServer(script) as scripted,
        ReplayServer(recordings, pace=0) as plain,
        codecstream.connect(scripted.url, tiny_program) as client,
        codecstream.connect(plain.url, tiny_program) as reference,
    ):
        pcm = await collect(client.speak("x"))
        parts = [await collect(reference.speak("x")) for _ in recordings]
    # The ramp restarts with the state, so even the chunks are the same.
    assert np.array_equal(pcm, np.concatenate(parts))


async def test_settings_are_sticky_and_sent_again_only_when_they_change(
    ledger_program: LedgerProgram,
) -> None:
    configs: list[SessionConfig] = []

    async def script(peer: Peer) -> None:
        for index in range(4):
            message = await peer.receive()
            if isinstance(message, SessionConfig):
                configs.append(message)
            await peer.request()
            await peer.speak(CODES[:1], index)
        await peer.receive()

    async with (
        ScriptedServer(script) as server,
        codecstream.connect(
            server.url, ledger_program, config=SessionConfig(language="en")
        ) as client,
    ):
        for settings in ({}, {}, {"voice": "vivian"}, {}):
            await collect(client.speak("x", **settings))
    assert [(c.language, c.voice) for c in configs] == [
        ("en", None),
        ("en", "vivian"),
        ("en", None),
    ]


async def test_unknown_settings_are_refused_with_the_list(ledger_program: LedgerProgram) -> None:
    async with replay() as server, codecstream.connect(server.url, ledger_program) as client:
        with pytest.raises(LocalProtocolError, match=r"volume.*settings are.*voice"):
            client.speak("x", volume=11)


async def test_headers_reach_the_server(ledger_program: LedgerProgram) -> None:
    seen: list[str] = []

    async def script(peer: Peer) -> None:
        seen.append(peer.headers["Authorization"])
        await peer.receive()

    headers = {"Authorization": "Bearer secret"}
    async with (
        ScriptedServer(script) as server,
        codecstream.connect(server.url, ledger_program, headers=headers),
    ):
        pass
    assert seen == ["Bearer secret"]


@pytest.mark.case(9)
async def test_case_9_largest_packet_is_decoded_in_small_steps(
    ledger_program: LedgerProgram,
) -> None:
    codes = make_codes(65_535)

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.start()
        await peer.packet(0, codes, Flags.EOS)
        await peer.done(total_frames=65_535, seq_last=0)
        await peer.session_done()
        await peer.receive()

    async with (
        ScriptedServer(script) as server,
        codecstream.connect(server.url, ledger_program) as client,
    ):
        frames = 0
        async for chunk in client.speak("x"):
            expected = (
                expected_ledger(codes)[
                    chunk.first_frame * SAMPLES : (chunk.first_frame + chunk.frames) * SAMPLES
                ]
                if chunk.idx % 500 == 0
                else None
            )
            assert expected is None or np.array_equal(chunk.pcm, expected)
            frames += chunk.frames
    assert frames == 65_535
    assert max(ledger_program.calls) == 25


# Failures of the stream


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


# Cancelling


@pytest.mark.case(10)
async def test_case_10_cancel_ends_at_once_and_the_next_utterance_is_clean(
    ledger_program: LedgerProgram,
) -> None:
    swallowed = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.start()
        await peer.packets(CODES[:40], eos=False)
        while not isinstance(await peer.receive(), InputCancel):
            pass
        await peer.packets(CODES[40:], first_seq=40, eos=False)
        await peer.packet(57, flags=Flags.EOS)
        await peer.done(total_frames=57, seq_last=57, cancelled=True)
        await peer.session_done()
        swallowed.set()
        await peer.request()
        await peer.speak(CODES, 1)
        await peer.receive()

    async with (
        ScriptedServer(script) as server,
        codecstream.connect(server.url, ledger_program) as client,
    ):
        utterance = client.speak("x")
        heard = 0
        async for chunk in utterance:
            heard += chunk.frames
            if heard == 6:
                await client.cancel()
        assert swallowed.is_set()  # cancel() returns when the connection is free
        assert utterance.result.status == "cancelled"
        assert utterance.result.error is None
        assert (heard, utterance.result.frames_received) == (6, 40)
        assert sum(ledger_program.calls) <= 40
        assert np.array_equal(await collect(client.speak("x")), expected_ledger(CODES))
    assert (server.connections, server.failures) == (1, [])


async def test_cancel_from_another_task_ends_a_waiting_iteration(
    ledger_program: LedgerProgram,
) -> None:
    async with (
        replay(pace=1.0) as server,
        codecstream.connect(server.url, ledger_program) as client,
    ):
        utterance = client.speak("x")
        task = asyncio.create_task(collect(utterance))
        await asyncio.sleep(0.3)
        await client.cancel()
        await asyncio.wait_for(task, 1)
        assert utterance.result.status == "cancelled"
        await client.cancel()  # nothing in flight: nothing happens


async def test_cancel_before_the_text_is_complete(ledger_program: LedgerProgram) -> None:
    async def endless() -> AsyncIterator[str]:
        while True:
            yield "word "
            await asyncio.sleep(0.01)

    async with replay() as server, codecstream.connect(server.url, ledger_program) as client:
        utterance = client.speak(endless())
        task = asyncio.create_task(collect(utterance))
        await asyncio.sleep(0.1)
        await client.cancel()
        await asyncio.wait_for(task, 1)
        assert utterance.result.status == "cancelled"
        assert (await collect(client.speak("x"))).size == len(CODES) * SAMPLES
    assert server.connections == 1


async def test_two_utterances_at_once_are_refused(ledger_program: LedgerProgram) -> None:
    async with (
        replay(pace=0.5) as server,
        codecstream.connect(server.url, ledger_program) as client,
    ):
        first = client.speak("x")
        await anext(first)
        with pytest.raises(LocalProtocolError, match="still in flight"):
            await anext(client.speak("y"))
        assert first.over is False


# The connection


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
    with pytest.raises(ConnectionFailedError, match="no connection to ws://127.0.0.1:9"):
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
