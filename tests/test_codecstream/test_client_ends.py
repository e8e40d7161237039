"""Every end of an utterance, told apart, over real sockets, in both shells of the client."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from shells import Outcome, both_shells, nothing_left, say
from speaking import CODES, replay
from support import SAMPLES, LedgerProgram, expected_ledger, make_codes

from codecstream import (
    IncompleteError,
    InvalidCodesError,
    RemoteProtocolError,
    SequenceError,
    ServerError,
    StalledError,
    StreamMismatchError,
    TooLongError,
)
from codecstream.testing import Fault, Peer, Recording, ReplayServer, ScriptedServer
from codecstream.wire import Flags, InputCancel, InputCancelled, SessionConfig

__all__ = ["nothing_left"]
pytestmark = pytest.mark.usefixtures("nothing_left")

WHOLE = expected_ledger(CODES)


def assert_whole(outcome: Outcome, codes: NDArray[Any] = CODES) -> None:
    """The utterance came through as if nothing had been before it."""
    result = outcome.result
    assert (result.status, result.error, result.notices) == ("complete", None, ())
    assert result.frames_received == result.frames_handed_out == len(codes)
    assert np.array_equal(outcome.pcm, expected_ledger(codes))
    assert not outcome.chunks or outcome.chunks[0].frames == min(2, len(codes))


async def wait_for_cancel(peer: Peer) -> None:
    while not isinstance(await peer.receive(), InputCancel):
        pass


@both_shells
@pytest.mark.case(1)
async def test_case_1_second_utterance_starts_fresh(
    ledger_program: LedgerProgram, shell: str
) -> None:
    first, second = make_codes(40, seed=1), make_codes(40, seed=2)
    recordings = [Recording(first, text="first"), Recording(second, text="second")]
    async with ReplayServer(recordings, pace=0) as server:
        one, two = await say(shell, server.url, ledger_program, "first", "second")
    assert_whole(one, first)
    assert_whole(two, second)
    assert (server.connections, server.failures) == (1, [])


@both_shells
@pytest.mark.case(1)
async def test_case_1_each_sentence_starts_fresh_too(
    ledger_program: LedgerProgram, shell: str
) -> None:
    one, two = make_codes(9, seed=1), make_codes(31, seed=2)
    async with ReplayServer([Recording(one, two)], pace=0) as server:
        (spoken,) = await say(
            shell, server.url, ledger_program, "x", settings={"split_granularity": "sentence"}
        )
    assert spoken.result.status == "complete"
    assert [chunk.sentence_index for chunk in spoken.chunks] == [0, 0, 0, 1, 1, 1, 1, 1]
    assert np.array_equal(spoken.pcm, np.concatenate([expected_ledger(one), expected_ledger(two)]))


@both_shells
@pytest.mark.case(2)
async def test_case_2_server_failure_is_one_error_and_the_connection_lives(
    ledger_program: LedgerProgram, shell: str
) -> None:
    fault = Fault("error", packet=10, message="out of memory")
    async with replay(fault) as server:
        failed, next_one = await say(shell, server.url, ledger_program, "x", "y")
    assert isinstance(failed.error, ServerError)
    assert "out of memory" in failed.result.reason
    assert (failed.error.utterance_index, failed.error.frames_received) == (0, 10)
    assert failed.result.status == "failed"
    assert_whole(next_one)
    assert server.connections == 1


@both_shells
@pytest.mark.case(3)
async def test_case_3_eos_in_every_shape(ledger_program: LedgerProgram, shell: str) -> None:
    for options in ({"eos": "last"}, {"eos": "alone"}, {"frames_per_packet": 56}):
        async with replay(**options) as server:
            (spoken,) = await say(shell, server.url, ledger_program, "x")
        assert spoken.pcm.size == 109_440
        assert_whole(spoken)


@both_shells
@pytest.mark.case(3)
@pytest.mark.parametrize(
    ("counts", "numbers"),
    [
        ({"total_frames": 58, "seq_last": 56}, (58, 57)),
        ({"total_frames": 57, "seq_last": 60}, (60, 56)),
    ],
)
async def test_case_3_counts_that_do_not_match_are_incomplete(
    ledger_program: LedgerProgram, shell: str, counts: dict[str, int], numbers: tuple[int, int]
) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.start()
        await peer.packets(CODES)
        await peer.done(**counts)
        await peer.session_done()
        await peer.request()
        await peer.speak(CODES, 1)
        await peer.receive()

    async with ScriptedServer(script) as server:
        odd, next_one = await say(shell, server.url, ledger_program, "x", "y")
    assert isinstance(odd.error, IncompleteError)
    assert (odd.error.expected, odd.error.received) == numbers
    assert not odd.error.connection_lost
    assert odd.result.status == "incomplete"
    assert np.array_equal(odd.pcm, WHOLE)  # all that came is handed out before the error
    assert_whole(next_one)


@both_shells
@pytest.mark.case(4)
async def test_case_4_short_utterances_are_heard_in_full(
    ledger_program: LedgerProgram, shell: str
) -> None:
    lengths = [1, 2, 3, 5, 6, 13, 29, 30, 54, 55, 56]
    recordings = [Recording(make_codes(n, seed=n), text=str(n)) for n in lengths]
    async with ReplayServer(recordings, pace=0) as server:
        outcomes = await say(shell, server.url, ledger_program, *map(str, lengths))
    assert [spoken.pcm.size for spoken in outcomes] == [n * SAMPLES for n in lengths]
    for length, spoken in zip(lengths, outcomes, strict=True):
        assert_whole(spoken, make_codes(length, seed=length))


@both_shells
@pytest.mark.case(5)
async def test_case_5_audio_that_starts_again_is_no_success(
    ledger_program: LedgerProgram, shell: str
) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.start()
        for seq in (0, 1, 2, 2):
            await peer.packet(seq, CODES[seq : seq + 1])
        await peer.packet(3, CODES[:4], Flags.EOS)
        await peer.done(total_frames=4, seq_last=3)
        await peer.session_done()
        await peer.receive()

    async with ScriptedServer(script) as server:
        (odd,) = await say(shell, server.url, ledger_program, "x")
    assert isinstance(odd.error, RemoteProtocolError)
    assert odd.result.status == "failed"
    assert [n for n in odd.result.notices if "came again" in n] == [
        "packet 2 came again and was dropped"
    ]
    assert odd.result.frames_received == 7


@both_shells
@pytest.mark.case(6)
async def test_case_6_nothing_behind_a_gap_is_decoded(
    ledger_program: LedgerProgram, shell: str
) -> None:
    async with replay(Fault("drop", packet=2)) as server:
        gap, next_one = await say(shell, server.url, ledger_program, "x", "y")
        assert isinstance(gap.error, SequenceError)
        assert (gap.error.expected, gap.error.received) == (2, 3)
        assert gap.result.frames_decoded <= gap.result.frames_received == 2
        assert_whole(next_one)
        (going_on,) = await say(shell, server.url, ledger_program, "x", on_gap="reset")
    parts = [expected_ledger(CODES[:2]), expected_ledger(CODES[3:])]
    assert np.array_equal(going_on.pcm, np.concatenate(parts))
    assert isinstance(going_on.error, SequenceError)


@both_shells
@pytest.mark.case(7)
@pytest.mark.parametrize("codebook", [0, 15])
@pytest.mark.parametrize("value", [2048, 2150, 32767, -1])
async def test_case_7_codes_outside_the_codebook_are_not_decoded(
    ledger_program: LedgerProgram, shell: str, value: int, codebook: int
) -> None:
    codes = make_codes(3).astype(np.int16)
    codes[2, codebook] = value

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.start()
        await peer.packet(0, CODES[:1])
        await peer.packet(1, codes)
        await wait_for_cancel(peer)
        await peer.done(total_frames=4, seq_last=1, cancelled=True)
        await peer.session_done()
        await peer.request()
        await peer.speak(CODES, 1)
        await peer.receive()

    async with ScriptedServer(script) as server:
        bad, next_one = await say(shell, server.url, ledger_program, "x", "y")
    error = bad.error
    assert isinstance(error, InvalidCodesError)
    assert (error.seq, error.frame, error.codebook, error.value) == (1, 2, codebook, value)
    assert bad.result.status == "failed"
    assert bad.result.frames_received == 1
    assert_whole(next_one)
    assert (server.connections, server.failures) == (1, [])


@both_shells
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
    ledger_program: LedgerProgram, shell: str, field: str, offered: object
) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.start(**{field: offered})
        await peer.packets(CODES)
        await wait_for_cancel(peer)
        await peer.done(cancelled=True)
        await peer.session_done()
        await peer.request()
        await peer.start(1, decoder_id=None)
        await peer.packets(CODES)
        await peer.done(1, total_frames=57, seq_last=56)
        await peer.session_done(1)
        await peer.receive()

    async with ScriptedServer(script) as server:
        other, unnamed = await say(shell, server.url, ledger_program, "x", "y")
    assert isinstance(other.error, StreamMismatchError)
    assert (other.error.field, other.error.offered) == (field, offered)
    assert (other.result.status, other.result.frames_decoded) == ("refused", 0)
    assert (unnamed.result.status, len(unnamed.result.notices)) == ("complete", 1)
    assert "no decoder_id" in unnamed.result.notices[0]


MALFORMED = {
    "no header": b"\0" * 6,
    "nothing": b"",
    "one byte short": b"\0\0\0\0\1\0\0" + bytes(31),
    "one byte long": b"\0\0\0\0\1\0\0" + bytes(33),
    "65535 frames, no body": b"\0\0\0\0\xff\xff\0",
    "a body of no frames": b"\0\0\0\0\0\0\0" + bytes(32),
}


@both_shells
@pytest.mark.case(9)
@pytest.mark.parametrize("kind", MALFORMED)
async def test_case_9_a_malformed_packet_is_a_protocol_error_with_byte_counts(
    ledger_program: LedgerProgram, shell: str, kind: str
) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.start()
        await peer.send(MALFORMED[kind])
        await wait_for_cancel(peer)
        await peer.done(total_frames=0, cancelled=True)
        await peer.session_done()
        await peer.request()
        await peer.speak(CODES, 1)
        await peer.receive()

    async with ScriptedServer(script) as server:
        bad, next_one = await say(shell, server.url, ledger_program, "x", "y")
    assert type(bad.error) is RemoteProtocolError
    assert "bytes" in str(bad.error)
    assert bad.result.status == "failed"
    assert_whole(next_one)
    assert (server.connections, server.failures) == (1, [])


IDLE = "Idle timeout: no message received"


@both_shells
@pytest.mark.case(11)
@pytest.mark.parametrize("crossing", ["nothing", "close", "error and close"])
async def test_case_11_idle_connection_is_replaced(
    ledger_program: LedgerProgram, shell: str, crossing: str
) -> None:
    """Also where the server's error or close was on its way when the next request went out."""
    requests = 0

    async def script(peer: Peer) -> None:
        nonlocal requests
        assert isinstance(await peer.receive(), SessionConfig)  # again, on each connection
        await peer.request()
        requests += 1
        await peer.speak(CODES)
        if server.connections > 1:
            await peer.receive()
            return
        if crossing != "nothing":
            await peer.request()
            requests += 1
        if crossing != "close":
            await peer.error(IDLE)

    async with ScriptedServer(script) as server:
        if crossing == "nothing":
            outcomes = await say(shell, server.url, ledger_program, "x", "y", pause_s=0.1)
        else:
            outcomes = await say(shell, server.url, ledger_program, "x", "y")
    assert [spoken.result.status for spoken in outcomes] == ["complete"] * 2
    assert all(np.array_equal(spoken.pcm, WHOLE) for spoken in outcomes)
    assert [spoken.result.attempts for spoken in outcomes] == [1, requests - 1]
    assert requests == (2 if crossing == "nothing" else 3)
    assert (server.connections, server.failures) == (2, [])


@both_shells
async def test_a_refusal_on_a_used_connection_is_a_refusal_at_once(
    ledger_program: LedgerProgram, shell: str
) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.speak(CODES)
        await peer.request()
        await peer.error("voice 'nobody' is not known")
        await peer.session_done(1, sentences=0)
        await peer.request()
        await peer.error("and not a word after it")
        await peer.receive()

    async with ScriptedServer(script) as server:
        whole, refused, bare = await say(
            shell,
            server.url,
            ledger_program,
            *("x", "y", "z"),
            idle_timeout_s=0.3,
            drain_timeout_s=0.1,
        )
    assert_whole(whole)
    for spoken, text in ((refused, "not known"), (bare, "not a word after it")):
        assert isinstance(spoken.error, ServerError) and spoken.error.refused
        assert text in spoken.result.reason
        assert (spoken.result.status, spoken.result.attempts) == ("refused", 1)
    assert server.connections == 1


@both_shells
async def test_mode_not_supported_is_refused(ledger_program: LedgerProgram, shell: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.error("codec_tokens is not supported by this model")
        await peer.session_done(sentences=0)
        await peer.request()
        await peer.speak(CODES, 1)
        await peer.receive()

    async with ScriptedServer(script) as server:
        refused, next_one = await say(shell, server.url, ledger_program, "x", "y")
    assert isinstance(refused.error, ServerError) and refused.error.refused
    assert refused.result.status == "refused"
    assert_whole(next_one)
    assert server.connections == 1


@both_shells
async def test_a_server_that_talks_but_sends_no_frame_has_stalled(
    ledger_program: LedgerProgram, shell: str
) -> None:
    """Its socket is alive and messages come; what came before is heard, and the next is clean."""

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.start()
        await peer.packets(CODES[:10], eos=False)
        cancel = asyncio.create_task(wait_for_cancel(peer))
        while not cancel.done():
            await peer.send('{"type": "codec.heartbeat"}')
            await asyncio.sleep(0.02)
        await peer.packet(10, flags=Flags.EOS)
        await peer.done(total_frames=10, seq_last=10, cancelled=True)
        await peer.session_done()
        await peer.request()
        await peer.speak(CODES, 1)
        await peer.receive()

    async with ScriptedServer(script) as server:
        stalled, next_one = await say(
            shell,
            server.url,
            ledger_program,
            "x",
            "y",
            stall_timeout_s=0.5,
            idle_timeout_s=0.4,
        )
    assert isinstance(stalled.error, StalledError)
    assert stalled.result.status == "stalled"
    assert 0.5 <= stalled.error.waited_s < 60
    assert stalled.error.frames_received == 10
    assert np.array_equal(stalled.pcm, WHOLE[: 10 * SAMPLES])
    assert_whole(next_one)
    assert (server.connections, server.failures) == (1, [])


@both_shells
async def test_a_silent_server_is_incomplete_and_what_came_is_heard(
    ledger_program: LedgerProgram, shell: str
) -> None:
    async with replay(Fault("stall", packet=5, seconds=60)) as server:
        (silent,) = await say(
            shell, server.url, ledger_program, "x", idle_timeout_s=0.3, drain_timeout_s=0.1
        )
    assert isinstance(silent.error, IncompleteError) and silent.error.connection_lost
    assert "nothing came from the server for 0.3 s after 5 frames" in silent.result.reason
    assert silent.result.status == "incomplete"
    assert np.array_equal(silent.pcm, WHOLE[: 5 * SAMPLES])


@both_shells
@pytest.mark.parametrize("frames_per_packet", [1, 7, 57])
async def test_an_utterance_that_is_too_long_is_cut_off_at_the_limit(
    ledger_program: LedgerProgram, shell: str, frames_per_packet: int
) -> None:
    short = make_codes(20, seed=3)
    recordings = [Recording(CODES, text="long"), Recording(short, text="short")]
    async with ReplayServer(recordings, pace=0, frames_per_packet=frames_per_packet) as server:
        cut, next_one = await say(
            shell, server.url, ledger_program, "long", "short", max_audio_s=2.45
        )
    assert isinstance(cut.error, TooLongError)
    assert (cut.result.status, cut.error.limit_frames) == ("too_long", 30)
    assert np.array_equal(cut.pcm, WHOLE[: 30 * SAMPLES])
    assert_whole(next_one, short)
    assert (server.connections, server.failures) == (1, [])


@both_shells
async def test_an_utterance_of_just_the_limit_is_complete(
    ledger_program: LedgerProgram, shell: str
) -> None:
    async with replay() as server:
        (spoken,) = await say(shell, server.url, ledger_program, "x", max_audio_s=57 * 0.08)
    assert_whole(spoken)


@both_shells
async def test_input_cancelled_out_of_the_blue_is_a_notice(
    ledger_program: LedgerProgram, shell: str
) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(InputCancelled())
        await peer.speak(CODES)
        await peer.receive()

    async with ScriptedServer(script) as server:
        (spoken,) = await say(shell, server.url, ledger_program, "x")
    assert np.array_equal(spoken.pcm, WHOLE)
    assert len(spoken.result.notices) == 1
