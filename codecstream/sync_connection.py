"""One WebSocket connection for threads: its socket, its protocol state, its threads.

The caller's thread may be struck by Ctrl-C at any instruction, within ``websockets`` too, which
would leave its locks taken. So it never calls ``websockets``: one thread opens the connection, one
reads it, one writes to it and closes it, and the caller waits for them.
"""

from __future__ import annotations

import contextlib
import os
import socket as socket_module
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection
from websockets.sync.client import connect as open_socket

from codecstream.errors import CodecStreamError, ConnectionFailedError, LocalProtocolError
from codecstream.events import Event, UtteranceEnded, UtteranceFailed
from codecstream.monitor import Monitor, MonitoredThread
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
    """A connection being opened, which any thread may give up.

    The TCP connect itself cannot be interrupted. It takes ``open_timeout_s`` at most, for which the
    caller does not wait, but the thread does.

    Args:
        options: The client's.
        monitor: The client's.
        keep: Takes the connection that was opened, with the monitor's lock held.
    """

    def __init__(
        self, options: Options, monitor: Monitor, keep: Callable[[SyncConnection], None]
    ) -> None:
        self._options = options
        self._monitor = monitor
        self._keep = keep
        self._socket: ClientConnection | None = None
        self._failure: ConnectionFailedError | None = None
        self._given_up = False
        self._thread = MonitoredThread(monitor, "codecstream-connect", self._open)

    def run(self) -> None:
        """Connect.

        Raises:
            ConnectionFailedError: The server cannot be reached, refuses the handshake, or
                :meth:`give_up` was called.
        """
        try:
            self._thread.start()
            with self._monitor.lock:
                self._monitor.wait_for(lambda: self._thread.over or self._given_up)
        except BaseException:  # Ctrl-C
            self.give_up()
            self._wait_for_the_end()
            raise
        self._wait_for_the_end()
        if self._failure is not None:
            raise self._failure

    def give_up(self) -> None:
        """End it: :meth:`run` then fails, unless it was just done."""
        with self._monitor.lock:
            self._given_up = True
            if self._socket is not None:
                cut(self._socket)

    def _wait_for_the_end(self) -> None:
        if not self._thread.wait(self._options.drain_timeout_s):
            self._failure = ConnectionFailedError(
                f"no connection to {self._options.url}: given up", transient=False
            )

    def _open(self) -> None:
        options = {**socket_options(self._options), "create_connection": self._create}
        try:
            if self._given_up:
                raise ConnectionAbortedError("given up")
            socket = open_socket(self._options.url, **options)
            socket.__enter__()  # says that we close it ourselves; does nothing else
            connection = SyncConnection(socket, self._options, self._monitor)
            with self._monitor.lock:
                given_up = self._given_up
                if not given_up:
                    self._socket = None  # it is not ours any more
                    self._keep(connection)
            if given_up:
                connection.close(goodbye=False)
                raise ConnectionAbortedError("given up")
        except Exception as error:
            self.give_up()
            self._failure = failed_to_connect(self._options, error)
            self._failure.__cause__ = error

    def _create(self, *args: Any, **kwargs: Any) -> ClientConnection:
        with self._monitor.lock:
            self._socket = connection = ClientConnection(*args, **kwargs)
            bound_sends(connection.socket, self._options.open_timeout_s)
            if self._given_up:
                cut(connection)
            return connection


class SyncConnection:
    """A socket, its protocol state, and the threads that read and write it.

    The client's monitor guards the session and the speech that is being served; its lock is never
    held while the socket is written or read.

    Attributes:
        session: The protocol's state.
        closed: Whether the socket has ended and all that it brought was delivered.
        used: Whether an utterance was asked for on it.
        last_message_s: When the last message came.
    """

    def __init__(self, socket: ClientConnection, options: Options, monitor: Monitor) -> None:
        self._socket = socket
        self._options = options
        self._monitor = monitor
        self._config: wire.SessionConfig | None = None
        self._speech: Speech | None = None
        self._outbox: deque[str] = deque()
        self._closing = False  # nothing follows what is in the outbox
        self._all_sent = False
        self.last_message_s = time.perf_counter()
        self._ended_with = (1006, "")  # close code and reason
        self._tap = None if options.capture is None else options.capture.connected(options)
        self.session = new_session(options)
        self.closed = False
        self.used = False
        bound_sends(socket.socket, options.idle_timeout_s)
        self._reader = MonitoredThread(monitor, "codecstream-read", self._read)
        self._writer = MonitoredThread(monitor, "codecstream-write", self._write)
        options.observers.connected(options.url)
        self._reader.start()
        self._writer.start()

    def start(self, speech: Speech, config: wire.SessionConfig) -> None:
        """Send the settings where they changed, and the text as far as it is known.

        Where nobody is there any more, ``speech`` learns it as an event, now or later.

        Raises:
            LocalProtocolError: The text cannot be encoded; the server is told to drop the rest.
        """
        try:
            with self._monitor.lock:
                now_s = time.perf_counter()
                speech.begin(fresh_connection=not self.used, now_s=now_s)
                if self.closed:  # no sooner opened than closed
                    speech.lose_connection(*self._ended_with)
                    return
                if self._config != config:
                    self.session.configure(config)
                    self._config = config
                self.used = True
                try:
                    speech.transmit(self.session, now_s)
                finally:
                    # Not sooner: a signal's handler that cancels it within the lines above would
                    # find nothing to withdraw, and they go on. The caller looks after that.
                    self._speech = speech
                self._monitor.notify_all()
        except LocalProtocolError:
            self.withdraw(speech)
            raise

    def serves(self, speech: Speech) -> bool:
        """Whether ``speech`` is what the server is still busy with."""
        return self._speech is speech

    def transmit(self, speech: Speech) -> None:
        """Send what is known of the text, if it is this connection's to send.

        Raises:
            LocalProtocolError: The text cannot be encoded.
        """
        with self._monitor.lock:
            if self.serves(speech) and self.session.takes_text:
                speech.transmit(self.session, time.perf_counter())
                self._monitor.notify_all()

    def withdraw(self, speech: Speech) -> None:
        """Tell the server that nothing more of ``speech`` is wanted."""
        with self._monitor.lock:
            if not self.serves(speech):
                return
            if self.session.in_utterance:
                with contextlib.suppress(LocalProtocolError):  # cancelled already
                    self.session.cancel()
                self._monitor.notify_all()
            else:  # not a word of it was sent: there is nothing to wait for
                self._release()

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no utterance is in flight; return False where it takes too long."""
        with self._monitor.lock:
            return self._monitor.wait_for(lambda: self._speech is None, timeout_s)

    def leave(self, *, goodbye: bool) -> None:
        """Let the threads close the socket and end, and do not wait for that."""
        with self._monitor.lock:
            if goodbye and not self.closed and not self._closing:
                self.session.close()
            self._closing = True
            self._monitor.notify_all()

    def close(self, *, goodbye: bool) -> None:
        """Close the socket and wait for the threads: a few times ``drain_timeout_s`` at most."""
        limit_s = self._options.drain_timeout_s
        self.leave(goodbye=goodbye)
        bound_sends(self._socket.socket, limit_s)
        try:
            with self._monitor.lock:
                if not self._monitor.wait_for(lambda: self._all_sent, limit_s):
                    cut(self._socket)  # the writer hangs in a send, with the socket's lock
            self._writer.wait()
            self._reader.wait()
            keepalive = getattr(self._socket, "keepalive_thread", None)
            if keepalive is not None:
                keepalive.join(limit_s)
        finally:
            cut(self._socket)  # where the above was interrupted

    def _read(self) -> None:
        try:
            while True:
                message = self._socket.recv()
                self._options.observers.received(message)
                if self._tap is not None:
                    self._tap.received(message)
                with self._monitor.lock:
                    self.last_message_s = time.perf_counter()
                    self._deliver(self.session.receive(message))
        except ConnectionClosed as closed:
            self._ended_with = close_code_of(closed)
            if self._tap is not None:
                self._tap.closed(*self._ended_with, closed_by(closed))
        except Exception as error:
            self._blame("reading from", error)
        finally:
            self._options.observers.disconnected(*self._ended_with)
            with self._monitor.lock:
                self.closed = True
                self._outbox.clear()
                self._deliver(self.session.receive_eof(*self._ended_with))
                if self._speech is not None:  # nothing of it was sent yet
                    self._speech.lose_connection(*self._ended_with)
                    self._release()

    def _write(self) -> None:
        """Send what there is to send, in order, and close the socket in the end.

        A server that takes nothing for ``idle_timeout_s`` loses the connection.
        """
        try:
            while (message := self._next_message()) is not None:
                self._options.observers.sent(message)
                if self._tap is not None:
                    self._tap.sent(message)
                self._socket.send(message)
        except ConnectionClosed:
            pass  # the reader tells
        except Exception as error:
            self._blame("writing to", error)
        finally:
            with self._monitor.lock:
                self._all_sent = True
                self._monitor.notify_all()
            self._socket.close()

    def _blame(self, doing: str, error: Exception) -> None:
        """Fail the utterance by a fault of this program, which must not look like the network's."""
        failure = CodecStreamError(f"{doing} the server failed: {error!r}")
        failure.__cause__ = error
        with self._monitor.lock:
            self._deliver([UtteranceFailed(failure)])
        self._socket.close(1011)

    def _next_message(self) -> str | None:
        with self._monitor.lock:
            while True:
                self._outbox.extend(self.session.data_to_send())
                if self._outbox:
                    return self._outbox.popleft()
                if self._closing or self.closed:
                    return None
                self._monitor.wait()

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            if self._speech is not None:
                self._speech.receive(event, self.session, time.perf_counter())
            if isinstance(event, UtteranceEnded):
                self._release()
        self._monitor.notify_all()

    def _release(self) -> None:
        self._speech = None
        self._monitor.notify_all()


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
