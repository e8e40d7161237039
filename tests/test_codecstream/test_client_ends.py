"""Every end of an utterance, told apart, over real sockets, in both shells of the client."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from shells import assert_whole, both_shells, nothing_left, say, wait_for_cancel
from speaking import CODES, replay
from support import SAMPLES, LedgerProgram, expected_ledger, make_codes

from codecstream import (
    IncompleteError,
    ServerError,
    StalledError,
    TooLongError,
)
from codecstream.testing import Fault, Peer, Recording, ReplayServer, ScriptedServer
from codecstream.wire import Flags, InputCancelled, SessionConfig

__all__ = ["nothing_left"]
pytestmark = pytest.mark.usefixtures("nothing_left")

WHOLE = expected_ledger(CODES)


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
@pytest.mark.case(2)
async def test_case_2_error_without_session_done_costs_the_connection_only(
    ledger_program: LedgerProgram, shell: str
) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        if server.connections == 1:
            await peer.start()
            await peer.error("lost")
            await peer.receive()  # and never another word
        await peer.speak(CODES)
        await peer.receive()

    async with ScriptedServer(script) as server:
        failed, next_one = await say(
            shell, server.url, ledger_program, "x", "y", drain_timeout_s=0.1
        )
    assert isinstance(failed.error, ServerError) and not failed.error.refused
    assert_whole(next_one)
    assert server.connections == 2


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
