"""A fault that one client met, served again from its capture to another."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
from shells import Outcome, accept_by_hand, both_shells, listen, raw_server, say
from speaking import CODES, example_server, replay
from support import LedgerProgram

import codecstream
from codecstream import CaptureError, Program, demo
from codecstream.capture import CaptureFile, read_capture
from codecstream.replay import CaptureServer
from codecstream.testing import Fault, Peer, Recording, ReplayServer, ScriptedServer

ROOT = Path(__file__).parents[2]

FAULTS = {
    "none": [],
    "drop": [Fault("drop", packet=20, utterance=1)],
    "repeat": [Fault("repeat", packet=20, utterance=1)],
    "truncate": [Fault("truncate", packet=20, utterance=1)],
    "code": [Fault("code", packet=20, utterance=1, value=2150)],
    "error": [Fault("error", packet=20, utterance=1)],
    "count": [Fault("count", utterance=1, value=1)],
    "close": [Fault("close", packet=20, utterance=1, value=1012)],
    "abort": [Fault("abort", packet=20, utterance=1)],
}


def same(replayed: Outcome, original: Outcome) -> None:
    """Fail where the two did not end alike, or did not sound alike bit for bit."""
    for name in ("status", "reason", "frames_received", "sentences", "attempts", "notices"):
        assert getattr(replayed.result, name) == getattr(original.result, name)
    assert type(replayed.error) is type(original.error)
    # A failure drops what is not taken yet, and how much that is hangs on the moment.
    for ours, theirs in zip(replayed.chunks, original.chunks, strict=False):
        assert ours.first_frame == theirs.first_frame
        assert np.array_equal(ours.pcm, theirs.pcm)


@both_shells
@pytest.mark.parametrize("fault", list(FAULTS))
async def test_a_captured_fault_ends_the_same_way_in_both_shells(
    shell: str, fault: str, ledger_program: LedgerProgram, tmp_path: Path
) -> None:
    path = tmp_path / "fault.jsonl"
    texts = ("First.", "Second.", "Third.")
    async with replay(*FAULTS[fault], pace=0.02) as server:
        original = await say(shell, server.url, ledger_program, *texts, capture=path)
    assert [o.result.status == "complete" for o in original] == [True, fault == "none", True]
    capture = read_capture(path)
    for other in ("asyncio", "threads"):
        async with CaptureServer(capture) as server:
            replayed = await say(other, server.url, ledger_program, *"abc")
        assert server.failures == []
        assert server.connections == len(capture.connections())
        for ours, theirs in zip(replayed, original, strict=True):
            same(ours, theirs)
            if ours.result.status == "complete" or fault in ("count", "repeat"):
                assert ours.result.frames_handed_out == theirs.result.frames_handed_out == 57


async def test_a_real_decoder_sounds_the_same_bit_for_bit(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="the demo needs: pip install 'codecstream[onnx]'")
    program = codecstream.load_program(demo.artifact_dir(), threads=1)
    recordings = [Recording(said.codes) for said in demo.utterances()]
    path = tmp_path / "fault.jsonl"
    fault = Fault("count", utterance=1, value=2)  # told at the end: all audio is heard before
    async with ReplayServer(
        recordings, pace=0, faults=[fault], decoder_id=demo.DECODER_ID
    ) as server:
        original = await say("threads", server.url, program, *"abc", capture=path)
    assert [o.result.status for o in original] == ["complete", "incomplete", "complete"]
    for shell in ("asyncio", "threads"):
        async with CaptureServer(read_capture(path), pace=0) as server:
            replayed = await say(shell, server.url, program, *"abc")
        for ours, theirs in zip(replayed, original, strict=True):
            same(ours, theirs)
            assert np.array_equal(ours.pcm, theirs.pcm)
            assert ours.pcm.size > 50_000


async def captured(
    script: Callable[[Peer], Awaitable[None]],
    program: Program,
    path: Path,
    *texts: str,
    **options: object,
) -> tuple[list[Outcome], CaptureFile]:
    async with ScriptedServer(script) as server:
        outcomes = await say("asyncio", server.url, program, *texts, capture=path, **options)
    assert server.failures == []
    return outcomes, read_capture(path)


@pytest.mark.parametrize("code", [1000, 1001, 1005, 1006, 1011, 1012, 4000])
async def test_closes_come_back_with_their_code(
    code: int, ledger_program: LedgerProgram, tmp_path: Path
) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.start()
        await peer.packets(CODES[:10], eos=False)
        await peer.close(code, "so it is")

    (original,), capture = await captured(script, ledger_program, tmp_path / "c.jsonl", "x")
    assert f"code {code} after 10 frames" in original.result.reason
    async with CaptureServer(capture, pace=0) as server:
        (replayed,) = await say("threads", server.url, ledger_program, "x")
    assert server.failures == []
    assert (replayed.result.status, replayed.result.reason) == (
        "incomplete",
        original.result.reason,
    )


async def test_a_complaint_of_the_client_is_served_as_that_close(
    ledger_program: LedgerProgram, tmp_path: Path
) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"\0" * 5000)
        await peer.socket.wait_closed()

    path = tmp_path / "c.jsonl"
    limit = {"max_message_bytes": 4000}
    (original,), capture = await captured(script, ledger_program, path, "x", **limit)
    assert "code 1009" in original.result.reason
    async with CaptureServer(capture) as server:
        (replayed,) = await say("asyncio", server.url, ledger_program, "x")
    assert "code 1009 after 0 frames" in replayed.result.reason


async def test_a_silent_network_is_silent_again(
    ledger_program: LedgerProgram, tmp_path: Path
) -> None:
    path = tmp_path / "c.jsonl"
    pings = {"ping_interval_s": 0.1, "ping_timeout_s": 0.2, "drain_timeout_s": 0.1}

    async def dead(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await accept_by_hand(reader, writer)
        await asyncio.sleep(60)

    async with raw_server(dead) as url:
        (original,) = await say("asyncio", url, ledger_program, "x", capture=path, **pings)
    async with CaptureServer(read_capture(path)) as server:
        (replayed,) = await say("threads", server.url, ledger_program, "x", **pings)
    assert original.result.reason == replayed.result.reason
    assert "keepalive ping timeout" in replayed.result.reason


async def test_times_are_the_originals_times_the_pace(
    ledger_program: LedgerProgram, tmp_path: Path
) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.start()
        await peer.packets(CODES[:2], eos=False)
        await asyncio.sleep(0.6)
        await peer.packets(CODES[2:6], first_seq=2)
        await peer.done(total_frames=6, seq_last=5)
        await peer.session_done()
        await peer.receive()

    _, capture = await captured(script, ledger_program, tmp_path / "c.jsonl", "x")
    for pace in (1.0, 0.0):
        async with (
            CaptureServer(capture, pace=pace) as server,
            codecstream.connect(server.url, ledger_program) as client,
        ):
            await asyncio.sleep(0.3)  # the request comes later than it did: times count from it
            outcome = await listen(client.speak("x"))
        first, second = (chunk.arrival_ms for chunk in outcome.chunks)
        if pace:
            assert second - first > 550
        else:
            assert second - first < 550


async def test_a_cancel_is_waited_for_but_not_for_ever(
    ledger_program: LedgerProgram, tmp_path: Path
) -> None:
    path = tmp_path / "c.jsonl"
    async with (
        replay(pace=0.2) as server,
        codecstream.connect(server.url, ledger_program, capture=path) as client,
    ):
        utterance = client.speak("x")
        await anext(utterance)
        await client.cancel()
        await listen(client.speak("y"))
    async with CaptureServer(read_capture(path), cancel_patience_s=20.0) as server:
        async with codecstream.connect(server.url, ledger_program) as client:
            utterance = client.speak("x")
            await anext(utterance)
            await client.cancel()
            assert (await listen(client.speak("y"))).result.status == "complete"
        assert server.connections == 1
    async with CaptureServer(read_capture(path), cancel_patience_s=0.1) as server:
        cancelled, complete = await say("threads", server.url, ledger_program, "x", "y")
    assert "the server cancelled" in cancelled.result.reason
    assert complete.result.status == "complete"


async def test_a_request_that_the_capture_does_not_answer_is_told_so(
    ledger_program: LedgerProgram, tmp_path: Path
) -> None:
    path = tmp_path / "c.jsonl"
    async with replay() as server:
        await say("asyncio", server.url, ledger_program, "x", capture=path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-2]))  # as a program leaves it that died
    async with CaptureServer(read_capture(path)) as server:
        answered, not_answered = await say("asyncio", server.url, ledger_program, "x", "y")
    assert answered.result.status == "complete"
    assert not_answered.result.status == "refused"
    assert "the capture ends here" in not_answered.result.reason
    assert server.connections == 1


async def test_captures_that_cannot_be_served_are_refused() -> None:
    with pytest.raises(CaptureError, match="has no connection"):
        CaptureServer(CaptureFile((), False, False))
    with pytest.raises(ValueError, match="pace -1"):
        CaptureServer(CaptureFile((), False, False), pace=-1)


async def test_the_example_serves_a_capture(ledger_program: LedgerProgram, tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    async with replay(Fault("error", packet=20)) as server:
        (original,) = await say("asyncio", server.url, ledger_program, "x", capture=path)
    with example_server("--capture", path) as url:
        for shell in ("asyncio", "threads"):  # the capture begins again for the next client
            (replayed,) = await say(shell, url, ledger_program, "x")
            same(replayed, original)


def test_the_example_says_what_is_wrong_with_a_capture(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text("nonsense")
    command = [sys.executable, "examples/replay_server.py", "--capture", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {path} is no capture of codecstream")
