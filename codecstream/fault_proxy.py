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
import random
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from codecstream.faults import DownPump, Link, MessageFault, Messages, Pump, finish, reset
from codecstream.testing import close_with

if TYPE_CHECKING:
    from websockets.asyncio.server import Server, ServerConnection

__all__ = ["FaultProxy", "Link", "MessageFault"]


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

    @property
    def open_connections(self) -> int:
        """Connections that are not over, as when a client forgets to close one."""
        return len(self._passing)

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
            reset(writer)
            return
        server_reader, server_writer = await self._reach(index, link)
        up = Pump(link, reader, server_writer, random.Random(f"{self._seed} {index} up"))
        down = DownPump(link, server_reader, writer, random.Random(f"{self._seed} {index} down"))
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
                await finish(writer)
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
            messages = Messages(link.messages)
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
