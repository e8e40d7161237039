"""One WebSocket connection: its socket, its protocol state, and the task that reads it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from typing import TYPE_CHECKING

from websockets.asyncio.client import connect as open_socket
from websockets.exceptions import ConnectionClosed

from codecstream.errors import CodecStreamError, LocalProtocolError
from codecstream.events import Event, UtteranceEnded, UtteranceFailed
from codecstream.options import Options
from codecstream.speech import Speech
from codecstream.transport import (
    close_code_of,
    closed_by,
    failed_to_connect,
    new_session,
    socket_options,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from websockets.asyncio.client import ClientConnection

    from codecstream import wire

__all__ = ["Connection"]

_MESSAGES_PER_TURN = 50  # then the event loop gets its turn, however fast the server sends


class Connection:
    """A socket, its protocol state, and the task that reads it.

    Attributes:
        session: The protocol's state.
        closed: Whether the socket has ended and all that it brought was delivered.
        used: Whether an utterance was asked for on it.
        last_message_s: When the last message came.
    """

    def __init__(self, socket: ClientConnection, options: Options) -> None:
        self._socket = socket
        self._options = options
        self._config: wire.SessionConfig | None = None
        self._speech: Speech | None = None
        self._on_news: Callable[[], None] = lambda: None
        self._idle = asyncio.Event()
        self._idle.set()
        self._outbox: deque[str] = deque()
        self._sender: asyncio.Task[None] | None = None
        self._ended_with = (1006, "")  # close code and reason
        self._tap = None if options.capture is None else options.capture.connected(options)
        self.session = new_session(options)
        self.closed = False
        self.used = False
        self.last_message_s = time.perf_counter()
        self._reader = asyncio.create_task(self._read(), name="codecstream-read")

    @classmethod
    async def open(cls, options: Options) -> Connection:
        """Connect and begin to read.

        Raises:
            ConnectionFailedError: The server cannot be reached or refuses the handshake.
        """
        try:
            socket = await open_socket(options.url, **socket_options(options))
        except Exception as error:
            raise failed_to_connect(options, error) from error
        options.observers.connected(options.url)
        return cls(socket, options)

    async def start(
        self, speech: Speech, config: wire.SessionConfig, on_news: Callable[[], None]
    ) -> None:
        """Send the settings where they changed, and the text as far as it is known.

        Where nobody is there any more, ``speech`` learns it as an event, now or later.

        Args:
            speech: Takes the events.
            config: Its settings.
            on_news: Called after every event.

        Raises:
            LocalProtocolError: The text cannot be encoded; the server is told to drop the rest.
        """
        now_s = time.perf_counter()
        speech.begin(fresh_connection=not self.used, now_s=now_s)
        if self.closed:  # no sooner opened than closed
            speech.lose_connection(*self._ended_with)
            on_news()
            return
        if self._config != config:
            self.session.configure(config)
            self._config = config
        self._speech, self._on_news = speech, on_news
        self._idle.clear()
        self.used = True
        try:
            speech.transmit(self.session, now_s)
        except LocalProtocolError:
            await self.withdraw(speech)
            raise
        await self.send()

    def serves(self, speech: Speech) -> bool:
        """Whether ``speech`` is what the server is still busy with."""
        return self._speech is speech

    async def withdraw(self, speech: Speech) -> None:
        """Tell the server that nothing more of ``speech`` is wanted."""
        if not self.serves(speech):
            return
        if self.session.in_utterance:
            with contextlib.suppress(LocalProtocolError):  # the socket closed just now
                self.session.cancel()
            await self._send_or_abort()
        else:  # not a word of it was sent: there is nothing to wait for
            self._release()

    async def send(self) -> None:
        """Send what the session has to send, in order.

        A caller that is cancelled here leaves no message half sent, or sent twice. A server that
        takes nothing for ``idle_timeout_s`` loses the connection.
        """
        self._outbox.extend(self.session.data_to_send())
        if self._sender is None or self._sender.done():
            if not self._outbox:
                return
            self._sender = asyncio.create_task(self._send_all(), name="codecstream-send")
        sender = self._sender
        await asyncio.wait([sender])
        if not sender.cancelled():  # as it is when the connection ends
            sender.result()

    async def _send_all(self) -> None:
        try:
            while self._outbox:
                message = self._outbox.popleft()
                self._options.observers.sent(message)
                if self._tap is not None:
                    self._tap.sent(message)
                await asyncio.wait_for(self._socket.send(message), self._options.idle_timeout_s)
        except ConnectionClosed:
            self._outbox.clear()  # the reader tells
        except asyncio.TimeoutError:
            self._outbox.clear()
            self._socket.transport.abort()

    async def _send_or_abort(self) -> None:
        try:
            await asyncio.wait_for(self.send(), self._options.drain_timeout_s)
        except asyncio.TimeoutError:  # a server that takes nothing takes no close frame either
            self._socket.transport.abort()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no utterance is in flight; return False where it takes too long."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except asyncio.TimeoutError:
            return False
        return True

    async def close(self, *, goodbye: bool) -> None:
        """Close the socket and wait for the reader: a few times ``drain_timeout_s`` at most."""
        if goodbye and not self.closed:
            self.session.close()
        await self._send_or_abort()
        self._abort_sender()
        try:
            await asyncio.wait_for(self._socket.close(), 2 * self._options.drain_timeout_s)
        except asyncio.TimeoutError:  # only where Ctrl-C struck within websockets itself
            self._socket.transport.abort()
            self._reader.cancel()
        await ended([self._reader])

    def _abort_sender(self) -> None:
        self._outbox.clear()
        if self._sender is not None:
            self._sender.cancel()

    async def _read(self) -> None:
        messages = 0
        try:
            while True:
                message = await self._socket.recv()
                self._options.observers.received(message)
                if self._tap is not None:
                    self._tap.received(message)
                self.last_message_s = time.perf_counter()
                self._deliver(self.session.receive(message))
                if self.session.has_data_to_send:
                    await self.send()
                messages += 1
                if messages % _MESSAGES_PER_TURN == 0:
                    await asyncio.sleep(0)
        except ConnectionClosed as closed:
            self._ended_with = close_code_of(closed)
            if self._tap is not None:
                self._tap.closed(*self._ended_with, closed_by(closed))
        except asyncio.CancelledError:  # the event loop is going away, and we with it
            self._socket.transport.abort()
            raise
        except Exception as error:  # a fault of this program: it must not look like the network's
            failure = CodecStreamError(f"reading from the server failed: {error!r}")
            failure.__cause__ = error
            self._deliver([UtteranceFailed(failure)])
            await self._socket.close(1011)
        finally:
            self.closed = True
            self._abort_sender()
            self._deliver(self.session.receive_eof(*self._ended_with))
            if self._speech is not None:  # nothing of it was sent yet: the session knows nothing
                self._speech.lose_connection(*self._ended_with)
                self._release()
            self._options.observers.disconnected(*self._ended_with)

    def _deliver(self, events: list[Event]) -> None:
        speech = self._speech
        for event in events:
            if speech is not None:
                speech.receive(event, self.session, time.perf_counter())
            if isinstance(event, UtteranceEnded):
                self._release()
        if events:
            self._on_news()

    def _release(self) -> None:
        self._speech = None
        self._idle.set()
        self._on_news()


async def ended(tasks: list[asyncio.Task[None]]) -> None:
    """Wait for tasks of this package. They raise nothing but Ctrl-C, which the caller has got.

    Before Python 3.11 it strikes whatever task is running, beside leaving the event loop.
    """
    if tasks:
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # counts as looked at: no warning when the task is forgotten
