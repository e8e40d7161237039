"""A proxy between a client and a server that does what networks, and broken servers, do.

::

    link = Link(latency_ms=40, jitter_ms=20, cut_after_bytes=1500)
    async with FaultProxy(server_url, [link]) as proxy:
        async with codecstream.connect(proxy.url, program, reconnect=Reconnect()) as client:
            ...                                  # the second connection has no fault
    print(proxy.fired)

A :class:`Link` says what one connection suffers: faults of bytes, as they are, and faults of
whole WebSocket messages (:class:`MessageFault`), for which the proxy ends the WebSocket and begins
another. All of them are in the server's direction; what the client sends is late at most.

The protocol has no checksum: TLS has one. A flipped bit that makes another valid code is a fault
that no client can see, so ``corrupt`` takes the byte and the bits to flip.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import socket as socket_module
import struct
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from codecstream import wire
from codecstream.errors import WireError
from codecstream.testing import close_with

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection
    from websockets.asyncio.server import Server, ServerConnection

__all__ = ["FaultProxy", "Link", "MessageFault"]

MessageFaultKind = Literal[
    "drop", "duplicate", "swap", "corrupt", "truncate", "replace", "insert", "close", "stall"
]


@dataclass(frozen=True, slots=True)
class MessageFault:
    """What happens to one message of the server.

    Attributes:
        kind: ``drop`` or ``duplicate`` it; ``swap`` it with the next one; ``corrupt``: flip the
            bits ``value`` of byte ``offset`` (of a text, replace that character by a brace);
            ``truncate`` it to half; ``replace`` it by ``payload``; ``insert`` ``payload`` before
            it; ``close`` the WebSocket with code ``value`` instead of it (1005 and 1006 as
            :meth:`codecstream.testing.Peer.close`); ``stall``: pass it after ``seconds``.
        message: Which one: index among the server's messages since the client's request;
            ``input.cancelled``, which answers no request, is not counted.
        request: Index of that request, counted by ``input.done``, on this connection.
        offset: For ``corrupt``.
        value: For ``corrupt`` and ``close``.
        payload: For ``replace`` and ``insert``.
        seconds: For ``stall``.
    """

    kind: MessageFaultKind
    message: int = 0
    request: int = 0
    offset: int = 0
    value: int = 0xFF
    payload: str | bytes = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Link:
    """What one connection suffers; without arguments, nothing.

    Bytes are counted from the server to the client, the handshake's included.

    Attributes:
        latency_ms: How late everything is, each way.
        jitter_ms: How much later it may be, at random; the order is kept.
        bytes_per_s: Most bytes per second, each way; None for no limit.
        piece_bytes: Most bytes that arrive at once; None as they come.
        refuse: The connection is reset when it is made.
        cut_after_bytes: The connection ends behind so many bytes, in the midst of whatever it is.
        reset: Whether that end is a reset (RST), which may overtake what was sent, or a FIN.
        stall_after_bytes: Nothing comes for ``stall_s`` behind so many bytes.
        stall_s: How long that takes.
        half_open_after_bytes: Behind so many bytes nothing comes any more, nothing that the
            client sends arrives, and nobody is told.
        messages: Faults of whole messages.

    Raises:
        ValueError: A number is negative, or a size is 0.
    """

    latency_ms: float = 0.0
    jitter_ms: float = 0.0
    bytes_per_s: float | None = None
    piece_bytes: int | None = None
    refuse: bool = False
    cut_after_bytes: int | None = None
    reset: bool = False
    stall_after_bytes: int | None = None
    stall_s: float = 0.0
    half_open_after_bytes: int | None = None
    messages: Sequence[MessageFault] = ()

    def __post_init__(self) -> None:
        for name in ("latency_ms", "jitter_ms", "stall_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}")
        for name in ("bytes_per_s", "piece_bytes"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be above 0, or None, not {value}")


class FaultProxy:
    """Passes connections on to a server, each with the faults of its link.

    Args:
        url: The server's address, ``ws://``: TLS would have to end here.
        links: One per connection, in turn; later ones have no fault.
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        seed: Seed of the jitter.

    Attributes:
        connections: Connections accepted so far.
        fired: Faults that struck: connection, and what it was.
        failures: Exceptions of the proxy itself; a test should find this empty.

    Raises:
        ValueError: The URL is not one that it can pass on to.
    """

    def __init__(
        self,
        url: str,
        links: Iterable[Link] = (),
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        seed: int = 0,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme != "ws" or parts.hostname is None:
            raise ValueError(f"the server's URL must start with ws://, not {url!r}")
        self._target = parts
        self._links = list(links)
        self._host, self._port = host, port
        self._seed = seed
        self._server: asyncio.Server | None = None
        self._relay: Server | None = None
        self._passing: set[asyncio.Task[None]] = set()
        self._by_port: dict[int, tuple[int, Link]] = {}  # of connections to the relay
        self.connections = 0
        self.fired: list[tuple[int, str]] = []
        self.failures: list[Exception] = []

    @property
    def url(self) -> str:
        """Where a client should connect to."""
        assert self._server is not None, "the proxy is not running"
        port = self._server.sockets[0].getsockname()[1]
        return self._target._replace(netloc=f"{self._host}:{port}").geturl()

    async def __aenter__(self) -> FaultProxy:
        from websockets.asyncio.server import serve

        self._relay = await serve(
            self._pass_messages, "127.0.0.1", 0, compression=None, max_size=None,
            ping_interval=None, close_timeout=1.0,
        )  # fmt: skip
        self._server = await asyncio.start_server(self._accept, self._host, self._port)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._server is not None and self._relay is not None
        self._server.close()
        for task in self._passing:
            task.cancel()
        if self._passing:
            await asyncio.wait(self._passing)
        self._relay.close()
        await self._relay.wait_closed()

    # Bytes

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        index = self.connections
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._passing.add(task)
        try:
            await self._pass_bytes(index, reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # somebody left, or the proxy ends
        except Exception as error:
            self.failures.append(error)
        finally:
            self._passing.discard(task)
            writer.transport.abort()

    async def _pass_bytes(
        self, index: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        link = self._links[index] if index < len(self._links) else Link()
        if link.refuse:
            self.fired.append((index, "refuse"))
            _reset(writer)
            return
        server_reader, server_writer = await self._reach(index, link)
        up = _Pump(link, reader, server_writer, random.Random(f"{self._seed} {index} up"))
        down = _DownPump(link, server_reader, writer, random.Random(f"{self._seed} {index} down"))
        tasks = [asyncio.ensure_future(pump.run()) for pump in (up, down)]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if down.half_open:
                tasks[0].cancel()
                await asyncio.wait(tasks)
                server_writer.transport.abort()
                while await reader.read(65536):
                    pass  # into the void, until the client gives up
            elif tasks[1].done() and not down.was_reset:
                await _finish(writer)
        finally:
            self.fired += [(index, fault) for fault in down.fired]
            server_writer.transport.abort()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def _reach(
        self, index: int, link: Link
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if not link.messages:
            return await asyncio.open_connection(self._target.hostname, self._target.port or 80)
        assert self._relay is not None
        port = next(iter(self._relay.sockets)).getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        self._by_port[writer.get_extra_info("sockname")[1]] = (index, link)
        return reader, writer

    # Messages

    async def _pass_messages(self, client: ServerConnection) -> None:
        from websockets.asyncio.client import connect
        from websockets.exceptions import ConnectionClosed

        index, link = self._by_port.pop(client.remote_address[1])
        assert client.request is not None
        url = self._target._replace(path=client.request.path, query="").geturl()
        headers = {
            name: value
            for name, value in client.request.headers.raw_items()
            if name.lower() not in ("host", "connection", "upgrade")
            and not name.lower().startswith("sec-websocket")
        }
        async with connect(
            url, additional_headers=headers, compression=None, max_size=None, proxy=None,
            ping_interval=None, close_timeout=1.0,
        ) as server:  # fmt: skip
            messages = _Messages(link.messages)
            up = asyncio.ensure_future(messages.pass_up(client, server))
            down = asyncio.ensure_future(messages.pass_down(server, client))
            try:
                await asyncio.wait([up, down], return_when=asyncio.FIRST_COMPLETED)
                if down.done() and not up.done():
                    await close_with(client, server.close_code or 1006, server.close_reason or "")
            finally:
                self.fired += [(index, fault) for fault in messages.fired]
                for task in (up, down):
                    task.cancel()
                await asyncio.wait([up, down])
                for task in (up, down):
                    if not task.cancelled():
                        error = task.exception()
                        if isinstance(error, Exception) and not isinstance(error, ConnectionClosed):
                            self.failures.append(error)


class _Pump:
    """Passes bytes one way, late and in pieces."""

    def __init__(
        self,
        link: Link,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        generator: random.Random,
    ) -> None:
        self._link = link
        self._reader = reader
        self._writer = writer
        self._random = generator
        self._late: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(1000)

    async def run(self) -> None:
        """Pass bytes until the sender ends."""
        filling = asyncio.ensure_future(self._fill())
        try:
            async for piece in self._pieces():
                if not await self.put(piece):
                    return
        finally:
            filling.cancel()
            await asyncio.wait([filling])
            if not filling.cancelled():
                filling.exception()  # a reset by the sender is its end

    async def put(self, piece: bytes) -> bool:
        """Write a piece; return False where it was the last one."""
        self._writer.write(piece)
        await self._writer.drain()
        return True

    async def _fill(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = 0.0
        data = b"?"
        while data:
            try:
                data = await self._reader.read(65536)
            except OSError:
                data = b""
            late_ms = self._link.latency_ms + self._random.uniform(0, self._link.jitter_ms)
            due_s = max(due_s, loop.time() + late_ms / 1000)
            await self._late.put((due_s, data))

    async def _pieces(self) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        while True:
            due_s, data = await self._late.get()
            if not data:
                return
            if due_s > loop.time():
                await asyncio.sleep(due_s - loop.time())
            size = self._link.piece_bytes or len(data)
            for start in range(0, len(data), size):
                piece = data[start : start + size]
                if self._link.bytes_per_s is not None:
                    await asyncio.sleep(len(piece) / self._link.bytes_per_s)
                elif start:
                    await asyncio.sleep(0)  # so that it is a piece of its own
                yield piece


class _DownPump(_Pump):
    """Passes the server's bytes, up to where a fault is due."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        link = self._link
        due = {
            "stall": link.stall_after_bytes,
            "cut": link.cut_after_bytes,
            "half-open": link.half_open_after_bytes,
        }
        self._due = sorted((at, fault) for fault, at in due.items() if at is not None)
        self._passed = 0
        self.fired: list[str] = []
        self.half_open = False
        self.was_reset = False

    async def put(self, piece: bytes) -> bool:
        while self._due and self._passed + len(piece) >= self._due[0][0]:
            at, fault = self._due.pop(0)
            room = max(0, at - self._passed)
            await self._write(piece[:room])
            piece = piece[room:]
            self.fired.append(fault)
            if fault == "stall":
                await asyncio.sleep(self._link.stall_s)
                continue
            if fault == "half-open":
                self.half_open = True
            elif self._link.reset:
                self.was_reset = True
                _reset(self._writer)
            return False
        await self._write(piece)
        return True

    async def _write(self, piece: bytes) -> None:
        self._passed += len(piece)
        await super().put(piece)


class _Messages:
    """Passes messages through the faults of one connection."""

    def __init__(self, faults: Sequence[MessageFault]) -> None:
        self._faults = faults
        self._request = -1
        self._message = 0
        self.fired: list[str] = []

    async def pass_up(self, client: ServerConnection, server: ClientConnection) -> None:
        """Pass the client's messages, and count its requests."""
        async for message in client:
            if isinstance(message, str):
                with contextlib.suppress(WireError):
                    if isinstance(wire.decode_client_message(message), wire.InputDone):
                        self._request += 1
                        self._message = 0
            await server.send(message)

    async def pass_down(self, server: ClientConnection, client: ServerConnection) -> None:
        """Pass the server's messages, or what becomes of them."""
        held: list[str | bytes] = []
        async for message in server:
            out, hold = [message], False
            for fault in () if _is_answer_to_cancel(message) else self._due():
                self.fired.append(fault.kind)
                if fault.kind == "close":
                    await close_with(client, fault.value)
                    return
                if fault.kind == "stall":
                    await asyncio.sleep(fault.seconds)
                elif fault.kind == "swap":
                    hold = True
                else:
                    out = _altered(out[0], fault)
            if hold:
                held += out
                continue
            for passed in (*out, *held):
                await client.send(passed)
            held.clear()

    def _due(self) -> list[MessageFault]:
        at = (self._request, self._message)
        self._message += 1
        return [fault for fault in self._faults if (fault.request, fault.message) == at]


def _is_answer_to_cancel(message: str | bytes) -> bool:
    if isinstance(message, str):
        with contextlib.suppress(WireError):
            return isinstance(wire.decode_message(message), wire.InputCancelled)
    return False


def _altered(message: str | bytes, fault: MessageFault) -> list[str | bytes]:
    """Return what is passed instead of ``message``."""
    if fault.kind == "drop":
        return []
    if fault.kind == "duplicate":
        return [message, message]
    if fault.kind == "replace":
        return [fault.payload]
    if fault.kind == "insert":
        return [fault.payload, message]
    if fault.kind == "truncate":
        return [message[: len(message) // 2]]
    at = fault.offset % max(1, len(message))
    if isinstance(message, str):
        return [f"{message[:at]}}}{message[at + 1 :]}"]
    return [message[:at] + bytes([message[at] ^ fault.value]) + message[at + 1 :]]


async def _finish(writer: asyncio.StreamWriter) -> None:
    """End a connection so that what was written still arrives."""
    with contextlib.suppress(OSError):
        writer.close()
        await writer.wait_closed()


def _reset(writer: asyncio.StreamWriter) -> None:
    """End a connection with a reset."""
    raw = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        raw.setsockopt(socket_module.SOL_SOCKET, socket_module.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
