"""What a connection can suffer: faults of bytes and of whole messages, and what passes them on.

:class:`codecstream.fault_proxy.FaultProxy` puts these between a client and a server.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import socket as socket_module
import struct
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from codecstream import wire
from codecstream.errors import WireError
from codecstream.testing import close_with

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection
    from websockets.asyncio.server import ServerConnection

__all__ = ["DownPump", "Link", "MessageFault", "Messages", "Pump", "finish", "reset"]

MessageFaultKind = Literal[
    "drop", "duplicate", "swap", "corrupt", "truncate", "replace", "insert", "close", "stall"
]


@dataclass(frozen=True, slots=True)
class MessageFault:
    """What happens to one message of the server.

    Attributes:
        kind: ``drop`` or ``duplicate`` it; ``swap`` it with the next one, for which it waits;
            ``corrupt``: flip the bits ``value`` of byte ``offset`` (of a text, replace that
            character by a brace);
            ``truncate`` it to half; ``replace`` it by ``payload``; ``insert`` ``payload`` before
            it; ``close`` the WebSocket with code ``value`` instead of it (1005 and 1006 as
            :meth:`codecstream.testing.Peer.close`); ``stall``: pass it, and what follows, after
            ``seconds``.
        message: Which one: index among the server's messages since the client's request;
            ``input.cancelled``, which answers no request, is not counted.
        request: Index of that request, counted by ``input.done``, on this connection.
        offset: For ``corrupt``.
        value: For ``corrupt`` and ``close``.
        payload: For ``replace`` and ``insert``.
        seconds: For ``stall``.

    Raises:
        ValueError: There is no such fault, or a number is out of its range.
    """

    kind: MessageFaultKind
    message: int = 0
    request: int = 0
    offset: int = 0
    value: int = 0xFF
    payload: str | bytes = ""
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(MessageFaultKind):
            allowed = ", ".join(get_args(MessageFaultKind))
            raise ValueError(f"kind must be one of {allowed}, not {self.kind!r}")
        if min(self.message, self.request, self.offset, self.seconds) < 0:
            raise ValueError("message, request, offset and seconds must be 0 or more")
        if self.kind == "corrupt" and not 1 <= self.value <= 0xFF:
            raise ValueError(f"the bits to flip must be 1 to 255, not {self.value}")


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


class Pump:
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


class DownPump(Pump):
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
        """Write a piece, up to a fault; return False where nothing follows."""
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
                reset(self._writer)
            return False
        await self._write(piece)
        return True

    async def _write(self, piece: bytes) -> None:
        self._passed += len(piece)
        await super().put(piece)


class Messages:
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
                    out = [passed for whole in out for passed in _altered(whole, fault)]
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
    if not message:
        return [message]  # there is nothing to corrupt
    at = fault.offset % len(message)
    if isinstance(message, str):
        return [f"{message[:at]}}}{message[at + 1 :]}"]
    return [message[:at] + bytes([message[at] ^ fault.value]) + message[at + 1 :]]


async def finish(writer: asyncio.StreamWriter) -> None:
    """End a connection so that what was written still arrives."""
    with contextlib.suppress(OSError):
        writer.close()
        await writer.wait_closed()


def reset(writer: asyncio.StreamWriter) -> None:
    """End a connection with a reset."""
    raw = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        raw.setsockopt(socket_module.SOL_SOCKET, socket_module.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
