"""Streams that cannot be right, over real sockets, in both shells of the client."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from shells import assert_whole, both_shells, nothing_left, say, wait_for_cancel
from speaking import CODES, replay
from support import LedgerProgram, expected_ledger, make_codes

from codecstream import (
    InvalidCodesError,
    RemoteProtocolError,
    SequenceError,
    StreamMismatchError,
)
from codecstream.testing import Fault, Peer, ScriptedServer
from codecstream.wire import Flags

__all__ = ["nothing_left"]
pytestmark = pytest.mark.usefixtures("nothing_left")

WHOLE = expected_ledger(CODES)


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
@pytest.mark.case(7)
async def test_case_7_other_sessions_are_unaffected(
    ledger_program: LedgerProgram, shell: str
) -> None:
    """Two clients of one program at once; the second utterance of each has no fault."""
    async with replay(Fault("code", packet=20, value=2150), pace=0.01) as server:
        one, other = await asyncio.gather(
            say(shell, server.url, ledger_program, "x", "y", "z", alone=False),
            say(shell, server.url, ledger_program, "x", "y", alone=False),
        )
    for bad, *good in (one, other):
        assert isinstance(bad.error, InvalidCodesError)
        assert bad.result.frames_received == 20
        for spoken in good:
            assert_whole(spoken)


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
