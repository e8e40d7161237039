"""One WebSocket connection: its socket, its protocol state, and the task that reads it."""

from __future__ import annotations

import asyncio
import ssl as ssl_module
import time
from collections import deque
from collections.abc import AsyncIterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from codecstream import wire
from codecstream.errors import CodecStreamError, ConnectionFailedError
from codecstream.events import Event, UtteranceEnded, UtteranceFailed
from codecstream.protocol import Session
from codecstream.runtimes import Program
from codecstream.schedule import Ramp

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

__all__ = ["Connection", "Options", "Receiver", "Text"]

Text = str | AsyncIterable[str]


@dataclass(frozen=True, slots=True)
class Options:
    """What ``codecstream.connect`` was given; see there."""

    url: str
    program: Program
    schedule: Ramp
    config: wire.SessionConfig
    headers: Mapping[str, str]
    ssl: ssl_module.SSLContext | None
    on_gap: str
    open_timeout_s: float
    idle_timeout_s: float
    drain_timeout_s: float
    max_ahead_s: float
    max_message_bytes: int


class Receiver(Protocol):
    """What a connection needs of the utterance that it serves."""

    @property
    def text(self) -> Text:
        """What to say."""

    @property
    def config(self) -> wire.SessionConfig:
        """The settings to say it with."""

    def restart_clock(self) -> None:
        """The request goes out now."""

    def receive(self, event: Event, session: Session) -> None:
        """Take an event. Never waits."""

    def forget_early_events(self) -> None:
        """The request did not go out: the end of that connection is not this utterance's."""


class Connection:
    """A socket, its protocol state, and the task that reads it."""

    def __init__(self, socket: ClientConnection, options: Options) -> None:
        self._socket = socket
        self._config: wire.SessionConfig | None = None
        self._receiver: Receiver | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._outbox: deque[str] = deque()
        self._sending = asyncio.Lock()
        self.session = Session(
            options.program.geometry, options.program.decoder_id, on_gap=options.on_gap
        )
        self.closed = False
        self.last_message_s = time.perf_counter()
        self._reader = asyncio.create_task(self._read(), name="codecstream-read")

    @classmethod
    async def open(cls, options: Options) -> Connection:
        """Connect and begin to read.

        Raises:
            ConnectionFailedError: The server cannot be reached or refuses the handshake.
        """
        from websockets.asyncio.client import connect as open_socket
        from websockets.exceptions import WebSocketException

        tls: dict[str, Any] = {} if options.ssl is None else {"ssl": options.ssl}
        try:
            socket = await open_socket(
                options.url,
                additional_headers=options.headers,
                open_timeout=options.open_timeout_s,
                max_size=options.max_message_bytes,
                compression=None,  # small packets of nearly random codes do not compress
                proxy=None,
                close_timeout=options.drain_timeout_s,
                **tls,
            )
        except (OSError, asyncio.TimeoutError, WebSocketException, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise ConnectionFailedError(f"no connection to {options.url}: {reason}") from error
        return cls(socket, options)

    async def start(self, utterance: Receiver) -> bool:
        """Send the settings where they changed, and the text; return False where nobody is there.

        Text that comes in pieces is the utterance's own to send.
        """
        if self._config != utterance.config:
            self.session.configure(utterance.config)
        if isinstance(utterance.text, str):
            self.session.send_text(utterance.text)
            self.session.flush()
        self._receiver = utterance
        self._idle.clear()
        self.expect_answer()
        utterance.restart_clock()
        if not await self.send():
            self._receiver = None
            utterance.forget_early_events()
            return False
        self._config = utterance.config
        return True

    def expect_answer(self) -> None:
        """Count the server's silence from now: it is its turn."""
        self.last_message_s = time.perf_counter()

    def serves(self, utterance: Receiver) -> bool:
        """Whether ``utterance`` is the one that the server is still busy with."""
        return self._receiver is utterance

    async def send(self) -> bool:
        """Send what the session has to send, in order; return False where the socket is closed."""
        from websockets.exceptions import ConnectionClosed

        async with self._sending:
            self._outbox.extend(self.session.data_to_send())
            try:
                while self._outbox:
                    await self._socket.send(self._outbox[0])
                    self._outbox.popleft()  # only now: a cancelled send is made up for later
            except ConnectionClosed:
                self._outbox.clear()
                return False
        return True

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no utterance is in flight; return False where it takes too long."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except asyncio.TimeoutError:
            return False
        return True

    async def close(self, *, goodbye: bool) -> None:
        """Close the socket and wait for the reader."""
        if goodbye and not self.closed:
            self.session.close()
            await self.send()
        await self._socket.close()
        await asyncio.wait([self._reader])

    async def _read(self) -> None:
        from websockets.exceptions import ConnectionClosed

        code, reason = 1006, ""
        try:
            while True:
                message = await self._socket.recv()
                self.last_message_s = time.perf_counter()
                self._deliver(self.session.receive(message))
                await self.send()
        except ConnectionClosed as closed:
            frame = closed.rcvd or closed.sent
            if frame is not None:
                code, reason = frame.code, frame.reason
        except Exception as error:  # a fault of this program: it must not look like the network's
            failure = CodecStreamError(f"reading from the server failed: {error!r}")
            failure.__cause__ = error
            self._deliver([UtteranceFailed(failure)])
            await self._socket.close(1011)
        finally:
            self.closed = True
            self._deliver(self.session.receive_eof(code, reason))
            self._idle.set()

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            receiver = self._receiver
            if isinstance(event, UtteranceEnded):
                self._receiver = None
                self._idle.set()
            if receiver is not None:
                receiver.receive(event, self.session)
