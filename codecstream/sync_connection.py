"""One WebSocket connection for threads: its socket, its protocol state, its reading thread."""

from __future__ import annotations

import contextlib
import os
import socket as socket_module
import struct
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection
from websockets.sync.client import connect as open_socket

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
    from codecstream import wire

__all__ = ["Opening", "SyncConnection"]


class Opening:
    """A connection being opened, which another thread may give up.

    The TCP connect itself cannot be interrupted from outside; it takes ``open_timeout_s`` at most.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._socket: ClientConnection | None = None
        self._given_up = False

    def run(self) -> ClientConnection:
        """Connect.

        Raises:
            ConnectionFailedError: The server cannot be reached, refuses the handshake, or
                :meth:`give_up` was called.
        """
        arguments = {**socket_options(self._options), "create_connection": self._keep}
        try:
            socket: ClientConnection = open_socket(self._options.url, **arguments)
        except BaseException as error:  # KeyboardInterrupt: websockets leaves its socket behind
            self.give_up()
            if isinstance(error, Exception):
                raise failed_to_connect(self._options, error) from error
            if self._socket is not None:
                self._socket.recv_events_thread.join(self._options.drain_timeout_s)
            raise
        return socket.__enter__()  # says that we close it ourselves; does nothing else

    def give_up(self) -> None:
        """End it from another thread: :meth:`run` then fails, unless it was just done."""
        with self._lock:
            self._given_up = True
            if self._socket is not None:
                cut(self._socket)

    def _keep(self, *args: Any, **kwargs: Any) -> ClientConnection:
        with self._lock:
            self._socket = ClientConnection(*args, **kwargs)
            if self._given_up:
                cut(self._socket)
            return self._socket


class SyncConnection:
    """A socket, its protocol state, and the thread that reads it.

    ``changed`` is the client's condition. Its lock guards the session and the speech that is being
    served; it is never held while the socket is written or read.

    Attributes:
        session: The protocol's state.
        closed: Whether the socket has ended and all that it brought was delivered.
        used: Whether an utterance was asked for on it.
        last_message_s: When the last message came.
    """

    def __init__(
        self, socket: ClientConnection, options: Options, changed: threading.Condition
    ) -> None:
        self._socket = socket
        self._options = options
        self._changed = changed
        self._config: wire.SessionConfig | None = None
        self._speech: Speech | None = None
        self._outbox: deque[str] = deque()
        self._sending = threading.Lock()
        self.last_message_s = time.perf_counter()
        self._ended_with = (1006, "")  # close code and reason
        self._tap = None if options.capture is None else options.capture.connected(options)
        self.session = new_session(options)
        self.closed = False
        self.used = False
        bound_sends(socket.socket, options.idle_timeout_s)
        # A daemon: a program that forgets to close the client must be able to end.
        self._reader = threading.Thread(target=self._read, name="codecstream-read", daemon=True)
        options.observers.connected(options.url)
        self._reader.start()

    def start(self, speech: Speech, config: wire.SessionConfig) -> None:
        """Send the settings where they changed, and the text as far as it is known.

        Where nobody is there any more, ``speech`` learns it as an event, now or later.

        Raises:
            LocalProtocolError: The text cannot be encoded; the server is told to drop the rest.
        """
        try:
            with self._changed:
                now_s = time.perf_counter()
                speech.begin(fresh_connection=not self.used, now_s=now_s)
                if self.closed:  # no sooner opened than closed
                    speech.lose_connection(*self._ended_with)
                    return
                if self._config != config:
                    self.session.configure(config)
                    self._config = config
                self._speech = speech
                self.used = True
                speech.transmit(self.session, now_s)
        except LocalProtocolError:
            self.withdraw(speech)
            raise
        self.send()

    def serves(self, speech: Speech) -> bool:
        """Whether ``speech`` is what the server is still busy with."""
        return self._speech is speech

    def transmit(self, speech: Speech) -> None:
        """Send what is known of the text, if it is this connection's to send.

        Raises:
            LocalProtocolError: The text cannot be encoded.
        """
        with self._changed:
            if self.serves(speech) and self.session.takes_text:
                speech.transmit(self.session, time.perf_counter())
        self.send()

    def withdraw(self, speech: Speech) -> None:
        """Tell the server that nothing more of ``speech`` is wanted."""
        with self._changed:
            if not self.serves(speech):
                return
            if self.session.in_utterance:
                with contextlib.suppress(LocalProtocolError):  # cancelled already
                    self.session.cancel()
            else:  # not a word of it was sent: there is nothing to wait for
                self._release()
        self._send_or_cut()

    def send(self) -> None:
        """Send what the session has to send, in order.

        A server that takes nothing for ``idle_timeout_s`` loses the connection.
        """
        while True:
            with self._sending:  # one thread after another, so that the order is kept
                with self._changed:
                    self._outbox.extend(self.session.data_to_send())
                    if not self._outbox:
                        return
                    message = self._outbox.popleft()
                self._options.observers.sent(message)
                if self._tap is not None:
                    self._tap.sent(message)
                try:
                    self._socket.send(message)
                except ConnectionClosed:
                    return  # the reader tells

    def _send_or_cut(self) -> None:
        if self._sending.acquire(timeout=self._options.drain_timeout_s):
            self._sending.release()
            self.send()
        else:  # another thread hangs in a send, with the socket's lock: only this frees it
            cut(self._socket)

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no utterance is in flight; return False where it takes too long."""
        with self._changed:
            return self._changed.wait_for(lambda: self._speech is None, timeout_s)

    def close(self, *, goodbye: bool) -> None:
        """Close the socket and wait for the reader: a few times ``drain_timeout_s`` at most."""
        with self._changed:
            if goodbye and not self.closed:
                self.session.close()
        bound_sends(self._socket.socket, self._options.drain_timeout_s)
        try:
            self._send_or_cut()
            self._socket.close()
            self._reader.join()
            self._join_keepalive()
        finally:
            cut(self._socket)  # where the above was interrupted

    def _join_keepalive(self) -> None:
        keepalive = getattr(self._socket, "keepalive_thread", None)
        if keepalive is not None:
            keepalive.join(self._options.drain_timeout_s)

    def _read(self) -> None:
        try:
            while True:
                message = self._socket.recv()
                self._options.observers.received(message)
                if self._tap is not None:
                    self._tap.received(message)
                with self._changed:
                    self.last_message_s = time.perf_counter()
                    self._deliver(self.session.receive(message))
                    answer = self.session.has_data_to_send
                if answer:
                    self.send()
        except ConnectionClosed as closed:
            self._ended_with = close_code_of(closed)
            if self._tap is not None:
                self._tap.closed(*self._ended_with, closed_by(closed))
        except Exception as error:  # a fault of this program: it must not look like the network's
            failure = CodecStreamError(f"reading from the server failed: {error!r}")
            failure.__cause__ = error
            with self._changed:
                self._deliver([UtteranceFailed(failure)])
            self._socket.close(1011)
        finally:
            self._options.observers.disconnected(*self._ended_with)
            with self._changed:
                self.closed = True
                self._outbox.clear()
                self._deliver(self.session.receive_eof(*self._ended_with))
                if self._speech is not None:  # nothing of it was sent yet
                    self._speech.lose_connection(*self._ended_with)
                    self._release()

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            if self._speech is not None:
                self._speech.receive(event, self.session, time.perf_counter())
            if isinstance(event, UtteranceEnded):
                self._release()
        self._changed.notify_all()

    def _release(self) -> None:
        self._speech = None
        self._changed.notify_all()


def cut(connection: ClientConnection) -> None:
    """End the TCP connection now, whatever another thread is doing with it."""
    raw = connection.socket
    with contextlib.suppress(OSError):  # it has ended already
        if isinstance(raw, socket_module.socket):  # of TLS, too: not its own shutdown, which waits
            socket_module.socket.shutdown(raw, socket_module.SHUT_RDWR)
        else:  # TLS within a proxy's TLS
            raw.shutdown(socket_module.SHUT_RDWR)


def bound_sends(raw: socket_module.socket, limit_s: float) -> None:
    """Let a send that the peer does not take fail after ``limit_s``, rather than never.

    Neither pings nor a close frame help there: they would wait behind that send.
    """
    if os.name == "nt":
        value: int | bytes = max(1, int(limit_s * 1000))
    else:
        value = struct.pack("@ll", int(limit_s), int(limit_s % 1 * 1e6))
    with contextlib.suppress(OSError, AttributeError):  # a system without it has none
        raw.setsockopt(socket_module.SOL_SOCKET, socket_module.SO_SNDTIMEO, value)
