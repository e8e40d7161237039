"""The client in both its shells, asyncio and threads, behind one coroutine for the tests."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray
from speaking import CODES
from support import expected_ledger

import codecstream
from codecstream import AudioChunk, CodecStreamError, Program, UtteranceResult
from codecstream.testing import Peer
from codecstream.wire import InputCancel

PATIENCE_S = 20.0
T = TypeVar("T")
both_shells = pytest.mark.parametrize("shell", ["asyncio", "threads"])


@dataclass(frozen=True)
class Outcome:
    """What a caller has of an utterance: its chunks, its result, and what was raised."""

    chunks: list[AudioChunk]
    result: UtteranceResult
    error: CodecStreamError | None

    @property
    def pcm(self) -> NDArray[np.float32]:
        return np.concatenate([np.empty(0, np.float32), *(chunk.pcm for chunk in self.chunks)])


async def in_thread(function: Callable[[], T]) -> T:
    """Run the test's own part beside the server; a hang is a failure."""
    return await asyncio.wait_for(asyncio.to_thread(function), PATIENCE_S)


def pcm_of(utterance: Any) -> NDArray[np.float32]:
    """Take all chunks of an utterance for threads."""
    return np.concatenate([np.empty(0, np.float32), *(chunk.pcm for chunk in utterance)])


def outcome(chunks: list[AudioChunk], result: UtteranceResult, error: Any) -> Outcome:
    assert result.error is error
    assert (result.status in ("complete", "cancelled")) == (error is None)
    assert error is None or result.reason == str(error)
    assert result.reason
    assert result.frames_handed_out == sum(chunk.frames for chunk in chunks)
    assert result.frames_handed_out <= result.frames_decoded <= result.frames_received
    assert [chunk.idx for chunk in chunks] == list(range(len(chunks)))
    first_frames = np.cumsum([0, *(chunk.frames for chunk in chunks)])
    assert [chunk.first_frame for chunk in chunks] == first_frames[:-1].tolist()
    return Outcome(chunks, result, error)


async def listen(utterance: Any, on_chunk: Callable[[AudioChunk], Any] | None = None) -> Outcome:
    """Take what comes of an asyncio utterance."""
    chunks: list[AudioChunk] = []
    error: CodecStreamError | None = None
    try:
        async for chunk in utterance:
            chunks.append(chunk)
            if on_chunk is not None:
                await on_chunk(chunk)
    except CodecStreamError as caught:
        error = caught
    return outcome(chunks, utterance.result, error)


def listen_in_thread(utterance: Any) -> Outcome:
    """Take what comes of a threads' utterance."""
    chunks: list[AudioChunk] = []
    error: CodecStreamError | None = None
    try:
        for chunk in utterance:
            chunks.append(chunk)
    except CodecStreamError as caught:
        error = caught
    return outcome(chunks, utterance.result, error)


async def say(
    shell: str,
    url: str,
    program: Program,
    *texts: str,
    settings: Any = None,
    pause_s: float = 0.0,
    alone: bool = True,
    **options: Any,
) -> list[Outcome]:
    """Speak ``texts`` one after another through one client; return what became of each.

    With ``alone``, no other client is there, and nothing may be left of this one.
    """
    outcomes: list[Outcome] = []
    if shell == "asyncio":
        async with codecstream.connect(url, program, **options) as client:
            for text in texts:
                outcomes.append(await listen(client.speak(text, **settings or {})))
                await asyncio.sleep(pause_s)
        assert not (alone and leftovers())
        return outcomes

    def in_thread() -> list[Outcome]:
        with codecstream.sync_connect(url, program, **options) as client:
            for text in texts:
                outcomes.append(listen_in_thread(client.speak(text, **settings or {})))
                time.sleep(pause_s)
        assert not (alone and leftovers())
        return outcomes

    return await asyncio.to_thread(in_thread)


def assert_whole(outcome: Outcome, codes: NDArray[Any] = CODES) -> None:
    """The utterance came through as if nothing had been before it."""
    result = outcome.result
    assert (result.status, result.error, result.notices) == ("complete", None, ())
    assert result.frames_received == result.frames_handed_out == len(codes)
    assert np.array_equal(outcome.pcm, expected_ledger(codes))
    assert not outcome.chunks or outcome.chunks[0].frames == min(2, len(codes))


async def wait_for_cancel(peer: Peer) -> None:
    """Read what a client sends up to ``input.cancel``."""
    while not isinstance(await peer.receive(), InputCancel):
        pass


async def try_to_enter(shell: str, url: str, program: Program, **options: Any) -> None:
    """Connect and close again."""
    await say(shell, url, program, **options)


def leftovers() -> set[str]:
    """Return the names of tasks and threads that a client should not have left."""
    names = {thread.name for thread in threading.enumerate()}
    with contextlib.suppress(RuntimeError):  # no event loop in this thread
        names |= {task.get_name() for task in asyncio.all_tasks()}
    threads_of_websockets = {name for name in names if "recv_events" in name or "keepalive" in name}
    return {name for name in names if name.startswith("codecstream")} | threads_of_websockets


@pytest.fixture
async def nothing_left() -> AsyncIterator[None]:
    """Fail where the test left a task, a thread or an open file behind."""
    process = pytest.importorskip("psutil").Process()
    count_files = getattr(process, "num_fds", lambda: 0)
    before = count_files()
    yield
    assert leftovers() == set()
    until_s = time.monotonic() + 5.0
    while count_files() > before and time.monotonic() < until_s:
        await asyncio.sleep(0.02)  # an event loop closes the sockets that it has lost a bit later
    assert count_files() <= before


@asynccontextmanager
async def raw_server(
    handle: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any],
) -> AsyncIterator[str]:
    """Serve TCP on loopback, below any protocol; yields the URL that a client would be given."""
    tasks: set[asyncio.Task[None]] = set()

    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await handle(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(run, "127.0.0.1", 0)
    try:
        port = server.sockets[0].getsockname()[1]
        yield f"ws://127.0.0.1:{port}/v1/audio/speech/stream"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await asyncio.sleep(0)


async def accept_by_hand(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer a WebSocket handshake, and nothing more."""
    import base64
    import hashlib

    request = (await reader.readuntil(b"\r\n\r\n")).decode()
    key = next(
        line.split(":")[1].strip()
        for line in request.splitlines()
        if line.lower().startswith("sec-websocket-key")
    )
    digest = hashlib.sha1(f"{key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11".encode()).digest()
    writer.write(
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Accept: " + base64.b64encode(digest) + b"\r\n\r\n"
    )
    await writer.drain()


class CuttingProxy:
    """Passes bytes between a client and a server, and cuts the connection after so many.

    Args:
        url: The server's.
        limits: Bytes from the server after which connection 0, 1, ... is cut; None never.
    """

    def __init__(self, url: str, limits: list[int | None]) -> None:
        self._port = int(url.split(":")[2].split("/")[0])
        self._limits = limits
        self.connections = 0
        self.passed: list[int] = []

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        index = self.connections
        self.connections += 1
        self.passed.append(0)
        limit = self._limits[index] if index < len(self._limits) else None
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._port)
        upstream = asyncio.create_task(self._pump(reader, server_writer))
        try:
            while data := await server_reader.read(256):
                room = len(data) if limit is None else limit - self.passed[index]
                writer.write(data[:room])
                await writer.drain()
                self.passed[index] += min(room, len(data))
                if limit is not None and self.passed[index] >= limit:
                    writer.close()  # not abort: what was passed on shall arrive
                    await writer.wait_closed()
                    return
        finally:
            server_writer.transport.abort()
            upstream.cancel()
            await asyncio.wait([upstream])

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
