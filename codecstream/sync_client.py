"""The client for programs without asyncio: the same calls and results, in threads.

::

    program = codecstream.load_program("decoder-onnx")
    with codecstream.sync_connect("ws://host:8000/v1/audio/speech/stream", program) as client:
        for chunk in client.speak("Hello.", voice="vivian"):
            robot.play(chunk.pcm)                    # float32 [samples] at 24 kHz

One thread reads the socket for as long as the connection lives, one decodes, and the caller's own
thread asks, waits and takes chunks. ``cancel``, ``pause`` and ``resume`` may be called from any
thread. Ctrl-C leaves the ``with`` block like any error, which closes everything.
"""

from __future__ import annotations

import atexit
import ssl as ssl_module
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Literal

from codecstream import wire
from codecstream.errors import CodecStreamError, ConnectionFailedError, LocalProtocolError
from codecstream.options import Options, Reconnect
from codecstream.pipeline import AudioChunk
from codecstream.runtimes import Program
from codecstream.schedule import DEFAULT_RAMP, Ramp
from codecstream.speech import Speech, UtteranceResult
from codecstream.sync_connection import Opening, SyncConnection

__all__ = ["SyncClient", "SyncUtterance", "sync_connect"]

_WAIT_S = 1.0  # a wait without a limit cannot be interrupted on every system


def sync_connect(
    url: str,
    program: Program,
    *,
    schedule: Ramp | Iterable[int] = DEFAULT_RAMP,
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
        )
    )


class SyncUtterance:
    """One spoken text: an iterator of :class:`AudioChunk`, for one thread.

    It ends as :class:`codecstream.Utterance` does: after the last chunk, at once when it is
    cancelled, and else with an error of :mod:`codecstream.errors`.
    """

    def __init__(
        self, text: str | Iterable[str], config: wire.SessionConfig, client: SyncClient
    ) -> None:
        self._text = text
        self._client = client
        self._changed = client._changed
        self._begun = False
        self._text_thread: threading.Thread | None = None
        self.speech = Speech(config, client._options)
        self.connection: SyncConnection | None = None

    @property
    def over(self) -> bool:
        """Whether it has ended, well or not, and the last chunk was taken."""
        return self.speech.over

    @property
    def result(self) -> UtteranceResult:
        """How it ended.

        Raises:
            LocalProtocolError: It has not ended yet.
        """
        with self._changed:
            return self.speech.result

    @property
    def paused(self) -> bool:
        """Whether :meth:`pause` was called, and :meth:`resume` was not yet."""
        return self.speech.pipeline.paused

    def pause(self) -> None:
        """Hand out no chunk until :meth:`resume`. Nothing is lost and nothing comes twice.

        Frames are still received. Decoding stops when ``max_ahead_s`` of audio wait. An error or
        a cancel ends the iteration all the same.
        """
        with self._changed:
            self.speech.pipeline.paused = True

    def resume(self) -> None:
        """Hand out chunks again, from where it was paused."""
        with self._changed:
            self.speech.pipeline.paused = False
            self._changed.notify_all()

    def __iter__(self) -> Iterator[AudioChunk]:
        return self

    def __next__(self) -> AudioChunk:
        if not self._begun and not self.over:
            self._begun = True
            self._say()
            self._request()
        while True:
            with self._changed:
                chunk = self.speech.take()
                if chunk is not None:
                    self._changed.notify_all()  # there is room
                    return chunk
                if self.over:
                    break
                if self.speech.retry_delay_s is None and self._wait():
                    continue
            self._request_again()
        if not self.speech.cancelled:  # else whoever cancelled it does that
            self.settle()
        error = self.speech.pipeline.error
        if error is not None:
            raise error
        raise StopIteration

    def stop_now(self) -> None:
        """Hand out nothing more; :meth:`settle` tells the server."""
        with self._changed:
            self.speech.stop()
            self._changed.notify_all()

    def settle(self) -> None:
        """Stop what the server still does for this utterance."""
        if self.connection is not None and not self.speech.failed_remotely:
            self.connection.withdraw(self.speech)

    def join_text(self, timeout_s: float) -> None:
        """Wait for the text's thread, which may be waiting for the next piece of it."""
        if self._text_thread is not None:
            self._text_thread.join(timeout_s)

    def _wait(self) -> bool:
        """Wait for news, and look after the server's silence; return False where to ask again."""
        speech, connection = self.speech, self.connection
        wait_s = _WAIT_S
        if connection is not None and connection.serves(speech) and not speech.pipeline.finished:
            now_s = time.perf_counter()
            failure, until_s = speech.check_silence(
                connection.session, connection.last_message_s, now_s
            )
            if failure is not None:
                speech.give_up_waiting(failure, now_s)
                self._changed.notify_all()
                return False
            wait_s = min(wait_s, until_s)
        self._changed.wait(wait_s)
        return True

    def _request(self) -> None:
        """Send the request; an error ends the utterance, or makes another attempt due."""
        speech = self.speech
        try:
            self._client._start(self)
        except ConnectionFailedError as error:
            with self._changed:
                speech.lose(error)
        except CodecStreamError as error:
            with self._changed:
                speech.stop(error)

    def _request_again(self) -> None:
        """Ask once more after a loss; tell the server where it is given up instead."""
        speech, connection = self.speech, self.connection
        delay_s = speech.retry_delay_s
        if delay_s is None:
            self.settle()  # it was silent for too long
            return
        if connection is not None:
            connection.close(goodbye=False)
        with self._changed:
            self._changed.wait_for(lambda: speech.over, delay_s)
            if speech.over:
                return
            speech.begin_again()
        self._request()

    # The text

    def _say(self) -> None:
        if isinstance(self._text, str):
            self.speech.say(self._text)
            self.speech.complete_text()
        else:  # it may block: its pieces come from a thread of their own
            self._text_thread = threading.Thread(
                target=self._take_text, args=[self._text], name="codecstream-text", daemon=True
            )
            self._text_thread.start()

    def _take_text(self, pieces: Iterable[str]) -> None:
        speech = self.speech
        failure: CodecStreamError | None = None
        try:
            for piece in pieces:
                with self._changed:
                    if speech.pipeline.finished or speech.failed_remotely:
                        break  # it ended before its text did; what follows belongs to nothing
                    speech.say(piece)
                self._transmit()
            else:
                with self._changed:
                    speech.complete_text()
                self._transmit()
            close = getattr(pieces, "close", None)
            if close is not None:
                close()
        except CodecStreamError as error:
            failure = error
        except Exception as error:  # the caller's iterator failed: the caller gets it
            failure = CodecStreamError(f"the text's iterator failed: {error!r}")
            failure.__cause__ = error
        if failure is not None:
            with self._changed:
                speech.stop(failure)
                self._changed.notify_all()

    def _transmit(self) -> None:
        """Send what is known of the text, where a connection is there to take it."""
        if self.connection is not None:
            self.connection.transmit(self.speech)


class SyncClient:
    """A connection to a talker server that speaks utterances one after another, for threads.

    When the server closed the connection between utterances, as it does after 30 idle seconds,
    the next utterance opens a new one.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._changed = threading.Condition(threading.RLock())
        self._starting = threading.Lock()  # one utterance at a time asks for the connection
        self._connection: SyncConnection | None = None
        self._utterance: SyncUtterance | None = None
        self._opening: Opening | None = None
        self._worker: threading.Thread | None = None
        self._open = False

    def __enter__(self) -> SyncClient:
        """Connect.

        Raises:
            ConnectionFailedError: The server cannot be reached or refuses the handshake.
            LocalProtocolError: The client is open already.
        """
        if self._open:
            raise LocalProtocolError("the client is open already: make another one")
        try:
            self._connection = self._connect()
            self._open = True
            # A daemon: a program that forgets to close the client must be able to end.
            worker = threading.Thread(target=self._decode, name="codecstream-decode", daemon=True)
            worker.start()
            self._worker = worker
            _open_clients.add(self)
        except BaseException:  # Ctrl-C: nobody else will close what is open by now
            self.close()
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
        return SyncUtterance(text, config, self)

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
        connection is free again; does nothing where no utterance is in flight.
        """
        utterance = self._utterance
        if utterance is not None:
            self._give_up(utterance)
            with self._starting:
                if self._connection is not None:
                    self._release(self._connection)

    def close(self) -> None:
        """End the utterance in flight, say goodbye and close. May be called twice.

        An iterator of text that waits for its next piece cannot be interrupted: it is waited for
        ``drain_timeout_s`` at most.
        """
        with self._changed:
            self._open = False
            self._changed.notify_all()
        if self._utterance is not None:
            self._give_up(self._utterance)
        with self._starting:  # a start in flight sees that the client is closed
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close(goodbye=True)
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.join()  # its current chunk, at most
        if self._utterance is not None:
            self._utterance.join_text(self._options.drain_timeout_s)
        _open_clients.discard(self)

    def _give_up(self, utterance: SyncUtterance) -> None:
        utterance.stop_now()
        opening = self._opening
        if opening is not None:
            opening.give_up()
        utterance.settle()

    def _require_open(self) -> None:
        if not self._open:
            raise LocalProtocolError("the client is not open: use it inside 'with'")

    def _connect(self) -> SyncConnection:
        self._opening = Opening(self._options)
        try:
            return SyncConnection(self._opening.run(), self._options, self._changed)
        finally:
            self._opening = None

    def _start(self, utterance: SyncUtterance) -> None:
        """Send the request of ``utterance``, on a new connection where there is none.

        Raises:
            LocalProtocolError: Another utterance is in flight, or the client was closed.
            ConnectionFailedError: The server cannot be reached.
        """
        with self._starting:
            self._require_open()
            previous = self._utterance
            if previous is not None and previous is not utterance:
                if not previous.over:
                    raise LocalProtocolError(
                        "an utterance is still in flight: "
                        "iterate it to its end or cancel() it first"
                    )
                previous.settle()
            self._utterance = utterance
            if self._connection is not None:
                self._release(self._connection)
            if utterance.over:
                return  # cancelled meanwhile
            if self._connection is None:
                self._connection = self._connect()
            if utterance.over:
                return
            utterance.connection = self._connection
            self._connection.start(utterance.speech, utterance.speech.config)
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
            with self._changed:
                while True:
                    if not self._open:
                        return
                    utterance = self._utterance
                    speech = None if utterance is None else utterance.speech
                    job = None if speech is None else speech.pipeline.next_job()
                    if speech is not None and job is not None:
                        break
                    self._changed.notify_all()  # it may have ended
                    self._changed.wait()
            started_s = time.perf_counter()
            try:
                pcm = job.run()
            except Exception as error:
                with self._changed:
                    speech.pipeline.fail_job(job, error)
                    self._changed.notify_all()
                continue
            now_s = time.perf_counter()
            with self._changed:
                speech.pipeline.finish_job(
                    job, pcm, speech.elapsed_ms(now_s), (now_s - started_s) * 1000
                )
                self._changed.notify_all()


_open_clients: weakref.WeakSet[SyncClient] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Say goodbye for a program that ends without closing its clients."""
    for client in list(_open_clients):
        client.close()
