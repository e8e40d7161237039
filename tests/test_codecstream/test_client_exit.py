"""How programs end: Ctrl-C, cancelled tasks, clients that nobody closed. Nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from shells import leftovers, nothing_left, raw_server
from speaking import CODES, collect, replay
from support import SAMPLES, LedgerProgram

import codecstream
from codecstream.testing import Peer, ScriptedServer
from codecstream.wire import SessionClose

__all__ = ["nothing_left"]
pytestmark = pytest.mark.usefixtures("nothing_left")

PATIENCE_S = 30.0

PREAMBLE = """
import asyncio, signal, sys, threading
import numpy as np
import codecstream

signal.signal(signal.SIGINT, signal.default_int_handler)  # which a background job inherits ignored

class Silent:
    geometry, max_frames, decoder_id = codecstream.CodecGeometry(), None, None
    def initial_state(self):
        return None
    def step(self, codes, state):
        return np.zeros(len(codes) * 1920, np.float32), state

def say(*words):
    print(*words, flush=True)

url = sys.argv[1]
"""

THREADS_LOOP = """
try:
    say("connecting")
    with codecstream.sync_connect(url, Silent(), max_audio_s=None) as client:
        say("speaking")
        for chunk in client.speak("x"):
            if chunk.idx == 0:
                say("heard", chunk.frames)
except KeyboardInterrupt:
    say("interrupted")
say("left", sorted(thread.name for thread in threading.enumerate()))
"""

ASYNCIO_LOOP = """
async def main():
    say("connecting")
    async with codecstream.connect(url, Silent(), max_audio_s=None) as client:
        say("speaking")
        async for chunk in client.speak("x"):
            if chunk.idx == 0:
                say("heard", chunk.frames)
try:
    asyncio.run(main())
except KeyboardInterrupt:
    say("interrupted")
say("left", sorted(thread.name for thread in threading.enumerate()))
"""

THREADS_LEFT_OPEN = """
client = codecstream.sync_connect(url, Silent())
client.__enter__()
utterance = client.speak("x")
say("heard", next(utterance).frames)
"""

ASYNCIO_LEFT_OPEN = """
async def main():
    global client, utterance
    client = codecstream.connect(url, Silent())
    await client.__aenter__()
    utterance = client.speak("x")
    say("heard", (await anext(utterance)).frames)
asyncio.run(main())
"""

FORKED = """
import os, warnings
warnings.simplefilter("ignore")  # a process with threads that forks: just what is tried
with codecstream.sync_connect(url, Silent(), drain_timeout_s=0.2) as client:
    utterance = client.speak("x")
    next(utterance)
    child = os.fork()
    if child == 0:
        sys.exit(0)
    os.waitpid(child, 0)
    say(2 + sum(chunk.frames for chunk in utterance), utterance.result.status)
"""

NEVER_ENTERED = """
clients = codecstream.connect(url, Silent()), codecstream.sync_connect(url, Silent())
say("made")
"""

LOOPS = {"threads": THREADS_LOOP, "asyncio": ASYNCIO_LOOP}
LEFT_OPEN = {"threads": THREADS_LEFT_OPEN, "asyncio": ASYNCIO_LEFT_OPEN}


async def run(
    code: str,
    url: str,
    *,
    interrupt_at: str | None = None,
    reached: asyncio.Event | None = None,
) -> list[str]:
    """Run a program in another interpreter, with every warning an error; return what it says.

    Ctrl-C comes when it says ``interrupt_at``, and ``reached`` is set.
    """
    root = Path(codecstream.__file__).parents[1]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "error", "-c", PREAMBLE + code, url),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=root,
    )
    assert process.stdout is not None and process.stderr is not None
    said: list[str] = []
    try:
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(lambda: process.returncode is None and process.kill())
            while line := await asyncio.wait_for(process.stdout.readline(), PATIENCE_S):
                said.append(line.decode().strip())
                if interrupt_at is not None and said[-1].startswith(interrupt_at):
                    interrupt_at = None
                    if reached is not None:
                        await asyncio.wait_for(reached.wait(), PATIENCE_S)
                    await asyncio.sleep(0.1)
                    process.send_signal(signal.SIGINT)
            errors = (await process.stderr.read()).decode()
            code_of_exit = await asyncio.wait_for(process.wait(), PATIENCE_S)
    finally:
        process._transport.close()  # type: ignore[attr-defined]  # pipes that asyncio keeps
    # Before Python 3.11, Ctrl-C strikes within whatever the event loop is at, which tells of it.
    assert errors == "" or (sys.version_info < (3, 11) and "KeyboardInterrupt" in errors)
    assert code_of_exit == 0
    return said


async def endless(peer: Peer) -> None:
    """Speak without end, in real time."""
    await peer.request()
    await peer.start()
    for seq in itertools.count():
        await peer.packet(seq, CODES[:2])
        await asyncio.sleep(0.01)


async def wordless(peer: Peer) -> None:
    """Take the request and say nothing."""
    await peer.request()
    with contextlib.suppress(Exception):
        while True:
            await peer.receive()


async def flood(peer: Peer) -> None:
    """Speak without end, as fast as it is taken."""
    await peer.request()
    await peer.start()
    for seq in itertools.count():
        await peer.packet(seq, CODES[:2])
        if seq % 50 == 0:
            await asyncio.sleep(0.001)  # the test has other things to do


@pytest.mark.parametrize("shell", LOOPS)
@pytest.mark.parametrize("script", [endless, wordless, flood])
async def test_ctrl_c_in_the_loop_leaves_nothing_behind(shell: str, script: Any) -> None:
    async with ScriptedServer(script) as server:
        at = "speaking" if script is wordless else "heard"
        said = await run(LOOPS[shell], server.url, interrupt_at=at)
    assert said[-2:] == ["interrupted", "left ['MainThread']"]
    assert server.failures == []


@pytest.mark.parametrize("shell", LOOPS)
async def test_ctrl_c_within_the_handshake_leaves_nothing_behind(shell: str) -> None:
    async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.set()
        await asyncio.sleep(3600)

    reached = asyncio.Event()
    async with raw_server(silence) as url:
        said = await run(LOOPS[shell], url, interrupt_at="connecting", reached=reached)
    assert said == ["connecting", "interrupted", "left ['MainThread']"]


@pytest.mark.parametrize("shell", LEFT_OPEN)
@pytest.mark.parametrize("script", [endless, flood])
async def test_a_program_may_end_without_closing_its_client(shell: str, script: Any) -> None:
    async with ScriptedServer(script) as server:
        assert await run(LEFT_OPEN[shell], server.url) == ["heard 2"]
    assert server.failures == []


async def test_threads_left_open_still_say_goodbye() -> None:
    goodbye = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.start()
        await peer.packet(0, CODES[:2])
        while not isinstance(await peer.receive(), SessionClose):
            pass
        goodbye.set()

    async with ScriptedServer(script) as server:
        await run(THREADS_LEFT_OPEN, server.url)
        assert goodbye.is_set()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is none on this system")
async def test_a_forked_child_leaves_its_parents_connection_alone() -> None:
    async with replay(pace=0.1) as server:
        assert await run(FORKED, server.url) == [f"{len(CODES)} complete"]


async def test_a_client_that_is_never_entered_is_nothing() -> None:
    assert await run(NEVER_ENTERED, "ws://127.0.0.1:9/x") == ["made"]


async def one_each(peer: Peer) -> None:
    """Speak once, and close the connection."""
    await peer.request()
    await peer.speak(CODES)


MODES = {"enter": 30, "loop": 30, "again": 30, "close": 10, "handler": 30, "ending": 10}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lasting", [True, False])
async def test_a_signal_at_any_moment_leaves_nothing_behind(mode: str, lasting: bool) -> None:
    """Also with a server that closes after each utterance, so that the next one connects anew."""
    async with replay() if lasting else ScriptedServer(one_each) as server:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "tests/interrupted.py", server.url, mode, "7"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
        said, errors = await asyncio.wait_for(process.communicate(), 4 * PATIENCE_S)
    *faults, tried = said.decode().splitlines() or [""]
    assert (faults, process.returncode) == ([], 0), errors.decode()
    assert int(tried) >= MODES[mode]
    assert server.failures == []


# Cancelled tasks


@pytest.mark.parametrize("steps", [*range(0, 40, 3), 60, 100, 200])
async def test_a_task_cancelled_at_any_step_leaves_nothing_behind(
    ledger_program: LedgerProgram, steps: int
) -> None:
    async def whole_life(url: str) -> None:
        async with codecstream.connect(url, ledger_program) as client:
            while True:
                await collect(client.speak("x"))

    async with replay() as server:
        task = asyncio.create_task(whole_life(server.url))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, PATIENCE_S)
        assert leftovers() == set()
    assert server.failures == []


async def test_closing_goes_on_when_its_caller_is_cancelled(
    ledger_program: LedgerProgram,
) -> None:
    async with ScriptedServer(wordless) as server:
        client = codecstream.connect(server.url, ledger_program)
        await client.__aenter__()
        listening = asyncio.create_task(collect(client.speak("x")))
        await asyncio.sleep(0.05)
        closing = asyncio.create_task(client.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert (await asyncio.wait_for(listening, PATIENCE_S)).size == 0
        await asyncio.wait_for(client.close(), PATIENCE_S)
        assert leftovers() == set()


async def test_a_timeout_around_an_utterance_costs_that_utterance_only(
    ledger_program: LedgerProgram,
) -> None:
    async with (
        replay(pace=0.1) as server,
        codecstream.connect(server.url, ledger_program) as client,
    ):
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(collect(client.speak("x")), 0.1)
        await client.cancel()
        assert (await collect(client.speak("x"))).size == len(CODES) * SAMPLES
    assert server.connections == 1
