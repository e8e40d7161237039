"""The client for programs without asyncio: the same calls and results, in threads.

::

    program = codecstream.load_program("decoder-onnx")
    with codecstream.sync_connect("ws://host:8000/v1/audio/speech/stream", program) as client:
        for chunk in client.speak("Hello.", voice="vivian"):
            robot.play(chunk.pcm)                    # float32 [samples] at 24 kHz

One thread reads the socket for as long as the connection lives, one writes to it, one decodes, and
the caller's own thread asks, waits and takes chunks. ``cancel``, ``pause`` and ``resume`` may be
called from any thread and from a signal's handler. An observer and the text's iterator may call
``cancel`` and ``close``, too, which do not wait in one of these threads. Ctrl-C leaves the ``with``
block like any error, which closes everything.

With a policy, playback begins as early as it can without running dry::

    policy = AdaptivePolicy.for_program(program)         # keep it: it learns
    with Player(24_000) as player:
        with sync_connect(url, program, policy=policy, ahead_s=player.ahead_s) as client:
            for chunk in client.speak("Hello."):         # from when playback is to begin
                player.write(chunk.pcm)
            player.drain()
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import ssl as ssl_module
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Literal

from codecstream import wire
from codecstream.capture import Capture
from codecstream.errors import CodecStreamError, LocalProtocolError
from codecstream.monitor import Monitor, MonitoredThread, new_lock
from codecstream.observe import Observer, Observers
from codecstream.options import Options, Reconnect
from codecstream.pacing import Ahead
from codecstream.policy import StartPolicy
from codecstream.runtimes import Program
from codecstream.sampling import UtteranceSampler
from codecstream.schedule import DEFAULT_RAMP, Ramp
from codecstream.sync_connection import Opening, SyncConnection
from codecstream.sync_utterance import SyncUtterance

__all__ = ["SyncClient", "SyncUtterance", "sync_connect"]


def sync_connect(
    url: str,
    program: Program,
    *,
    schedule: Ramp | Iterable[int] = DEFAULT_RAMP,
    policy: StartPolicy | None = None,
    ahead_s: Ahead | None = None,
    config: wire.SessionConfig | None = None,
    headers: Mapping[str, str] | None = None,
    ssl: ssl_module.SSLContext | None = None,
    proxy: str | Literal[True] | None = None,
    compression: Literal["deflate"] | None = None,
    on_gap: Literal["stop", "reset"] = "stop",
    open_timeout_s: float = 10.0,
    idle_timeout_s: float = 30.0,
    stall_timeout_s: float | None = 20.0,
    drain_timeout_s: float = 2.0,
    ping_interval_s: float | None = 20.0,
    ping_timeout_s: float | None = 20.0,
    reconnect: Reconnect | None = None,
    max_audio_s: float | None = 7200.0,
    max_ahead_s: float = 10.0,
    max_message_bytes: int = wire.MAX_PACKET_BYTES,
    observer: Observer | None = None,
    capture: Capture | str | os.PathLike[str] | None = None,
    sampler: UtteranceSampler | None = None,
) -> SyncClient:
    """Return a client that connects when it is entered with ``with``.

    Args and errors are those of :func:`codecstream.connect`.
    """
    return SyncClient(
        Options(
            url=url,
            program=program,
            schedule=Ramp.of(schedule),
            config=config or wire.SessionConfig(),
            headers=dict(headers or {}),
            ssl=ssl,
            proxy=proxy,
            compression=compression,
            on_gap=on_gap,
            open_timeout_s=open_timeout_s,
            idle_timeout_s=idle_timeout_s,
            stall_timeout_s=stall_timeout_s,
            drain_timeout_s=drain_timeout_s,
            ping_interval_s=ping_interval_s,
            ping_timeout_s=ping_timeout_s,
            reconnect=reconnect,
            max_audio_s=max_audio_s,
            max_ahead_s=max_ahead_s,
            max_message_bytes=max_message_bytes,
            observers=Observers(observer),
            capture=Capture.of(capture),
            policy=policy,
            ahead_s=ahead_s,
            sampler=sampler,
        )
    )


class SyncClient:
    """A connection to a talker server that speaks utterances one after another, for threads.

    When the server closed the connection between utterances, as it does after 30 idle seconds,
    the next utterance opens a new one.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._monitor = Monitor()
        self._starting = new_lock()  # one thread at a time asks for the connection
        self._connection: SyncConnection | None = None
        self._utterance: SyncUtterance | None = None
        self._opening: Opening | None = None
        self._pid = os.getpid()
        self._worker: MonitoredThread | None = None
        self._text_threads: list[MonitoredThread] = []
        self._open = False
        self._close_asked = False  # perhaps while it is entered

    def __enter__(self) -> SyncClient:
        """Connect.

        Raises:
            ConnectionFailedError: The server cannot be reached or refuses the handshake.
            LocalProtocolError: The client is open already, or was closed meanwhile.
            OSError: The capture's file cannot be written, or exists.
        """
        if self._open:
            raise LocalProtocolError("the client is open already: make another one")
        self.close()  # what an observer's close() may have left
        self._pid = os.getpid()
        self._close_asked = False
        if self._options.capture is not None:
            self._options.capture.open()
        try:
            self._connect()
            with self._monitor.lock:
                self._open = not self._close_asked
            self._require_open()
            self._worker = MonitoredThread(self._monitor, "codecstream-decode", self._decode)
            self._worker.start()
            _open_clients.add(self)
        except BaseException as error:  # Ctrl-C: nobody else will close what is open by now
            closed = self._close_asked
            self.close()
            if closed and isinstance(error, CodecStreamError):
                raise LocalProtocolError("the client was closed while it was entered") from error
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def speak(self, text: str | Iterable[str], **settings: Any) -> SyncUtterance:
        """Return an utterance to iterate over; the request is sent when iteration starts.

        An utterance that is left before its end must be cancelled before the next one starts.

        Args:
            text: The text, or an iterable of its pieces, such as a generator. It is iterated in a
                thread of its own, so that it may wait for its pieces while sound is coming.
            **settings: Fields of :class:`codecstream.wire.SessionConfig` for this utterance,
                such as ``voice="vivian"``.

        Raises:
            LocalProtocolError: A setting is not a field of the session's config, or the client
                is not open.
        """
        config = self._options.configured(settings)
        self._require_open()
        return SyncUtterance(
            text, config, self._options, self._monitor, self._start, self._in_thread
        )

    def pause(self) -> None:
        """Hand out no chunk of the utterance in flight until :meth:`resume`; see there.

        Frames are still received, and decoded until ``max_ahead_s`` of audio wait. Nothing is
        lost and nothing comes twice. Does nothing where no utterance is in flight; the next
        utterance is not paused.
        """
        if self._utterance is not None:
            self._utterance.pause()

    def resume(self) -> None:
        """Hand out chunks again, from where it was paused."""
        if self._utterance is not None:
            self._utterance.resume()

    def cancel(self) -> None:
        """Stop the utterance in flight, from any thread: nothing more of it is handed out.

        Its iteration ends at once, with ``result.status == "cancelled"``. Returns when the
        connection is free again, but at once in a thread of the client's own; does nothing where
        no utterance is in flight.
        """
        utterance = self._utterance
        if utterance is None:
            return
        self._give_up(utterance)
        if not self._monitor.in_own_thread():
            with self._starting:  # another one may have started meanwhile
                if self._utterance is utterance and self._connection is not None:
                    self._release(self._connection)

    def close(self) -> None:
        """End the utterance in flight, say goodbye and close. May be called twice.

        Called by an observer or the text's iterator, it returns before all has ended: leaving the
        ``with`` block waits for that.

        An iterator of text that waits for its next piece cannot be interrupted: it is waited for
        ``drain_timeout_s`` at most.
        """
        if os.getpid() != self._pid:
            return  # the copy of a fork: connection and threads are its parent's
        with self._monitor.lock:
            self._open = False
            self._close_asked = True
            self._monitor.notify_all()
        utterance = self._utterance
        try:
            if utterance is not None:
                self._give_up(utterance)
        finally:  # it tells an observer, which may end the program
            self._close()

    def _close(self) -> None:
        self._give_up_opening()
        if self._monitor.in_own_thread():
            connection = self._connection
            if connection is not None:
                connection.leave(goodbye=True)
            return
        with self._starting:  # a start in flight sees that the client is closed
            if self._connection is not None:
                self._connection.close(goodbye=True)
                self._connection = None
        worker = self._worker  # another thread may be closing, too
        if worker is not None:
            worker.wait()  # its current chunk, at most
            self._worker = None
        until_s = time.perf_counter() + self._options.drain_timeout_s
        for thread in self._text_threads:
            thread.wait(max(0.0, until_s - time.perf_counter()))
        if self._options.capture is not None:
            self._options.capture.release()
        _open_clients.discard(self)

    def _give_up(self, utterance: SyncUtterance) -> None:
        try:
            utterance.stop_now()
        finally:
            self._give_up_opening()
            utterance.settle()

    def _give_up_opening(self) -> None:
        opening = self._opening
        if opening is not None:
            opening.give_up()

    def _in_thread(self, take_text: Callable[[], None]) -> None:
        """Take the pieces of an utterance's text beside its caller.

        Raises:
            LocalProtocolError: See :meth:`_start`.
        """
        self._require_ready()
        thread = MonitoredThread(self._monitor, "codecstream-text", take_text)
        self._text_threads = [old for old in self._text_threads if old.is_alive()]
        self._text_threads.append(thread)
        thread.start()

    def _require_open(self) -> None:
        if not self._open:
            raise LocalProtocolError("the client is not open: use it inside 'with'")

    def _require_ready(self) -> None:
        self._require_open()
        if self._monitor.in_own_thread():
            raise LocalProtocolError(
                "an observer or a text's iterator cannot take an utterance of the same client: "
                "let another thread do it"
            )

    def _connect(self, unwanted: Callable[[], bool] = lambda: False) -> None:
        self._opening = Opening(self._options, self._monitor, self._keep)
        try:
            if not unwanted():  # asked only now, where it can be given up
                self._opening.run()
        finally:
            self._opening = None

    def _keep(self, connection: SyncConnection) -> None:
        self._connection = connection

    def _start(self, utterance: SyncUtterance) -> None:
        """Send the request of ``utterance``, on a new connection where there is none.

        Raises:
            LocalProtocolError: Another utterance is in flight, the client was closed, or an
                observer asks, which would wait for the thread that it is called in.
            ConnectionFailedError: The server cannot be reached.
        """
        self._require_ready()
        with self._starting:
            previous = self._utterance
            if previous is not None and previous is not utterance:
                if not previous.over:
                    raise LocalProtocolError(
                        "an utterance is still in flight: "
                        "iterate it to its end or cancel() it first"
                    )
                previous.settle()
            self._utterance = utterance
            self._require_open()  # only now: what close() ends is the utterance that it sees
            if self._connection is not None:
                self._release(self._connection)
            if utterance.over:
                return  # cancelled meanwhile
            if self._connection is None:
                self._connect(lambda: utterance.over)
            connection = self._connection
            if utterance.over or connection is None:
                return
            utterance.connection = connection
            connection.start(utterance.speech, utterance.speech.config)
            if utterance.over:  # cancelled in this very moment: nobody else tells the server
                utterance.settle()

    def _release(self, connection: SyncConnection) -> None:
        """Let the server finish what it was sending; give up the connection where it does not."""
        free = connection.wait_idle(self._options.drain_timeout_s)
        if connection.closed or not free:
            connection.close(goodbye=False)
            if self._connection is connection:
                self._connection = None

    def _decode(self) -> None:
        """Decode, chunk by chunk, whatever utterance is in flight, until the client is closed."""
        while True:
            with self._monitor.lock:
                while True:
                    if not self._open:
                        return
                    utterance = self._utterance
                    speech = None if utterance is None else utterance.speech
                    wait_s = None
                    if speech is not None:
                        now_s = time.perf_counter()
                        job = speech.pipeline.next_job(now_s)
                        if job is not None:
                            break
                        again_s = speech.pipeline.ask_again_s
                        wait_s = None if math.isinf(again_s) else max(0.0, again_s - now_s)
                    self._monitor.notify_all()  # it may have ended
                    self._monitor.wait(wait_s)
            started_s = time.perf_counter()
            try:
                pcm = job.run()
            except BaseException as error:  # SystemExit would end this thread, and no one knew
                with self._monitor.lock:
                    speech.pipeline.fail_job(job, error)
                    self._monitor.notify_all()
                continue
            now_s = time.perf_counter()
            with self._monitor.lock:
                speech.finish_job(job, pcm, started_s, now_s)
                self._monitor.notify_all()


_open_clients: weakref.WeakSet[SyncClient] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Say goodbye for a program that ends without closing its clients."""
    for client in list(_open_clients):
        with contextlib.suppress(SystemExit):  # an observer's; the program ends anyway
            client.close()
