"""One spoken text, as an iterator of its audio, for threads."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator

from codecstream import wire
from codecstream.errors import CodecStreamError, ConnectionFailedError
from codecstream.monitor import Monitor
from codecstream.observe import Progress
from codecstream.options import Options
from codecstream.pipeline import AudioChunk
from codecstream.speech import Speech, UtteranceResult
from codecstream.sync_connection import SyncConnection

__all__ = ["SyncUtterance"]


class SyncUtterance:
    """One spoken text: an iterator of :class:`AudioChunk`, for one thread.

    It ends as :class:`codecstream.Utterance` does: after the last chunk, at once when it is
    cancelled, and else with an error of :mod:`codecstream.errors`.

    Attributes:
        speech: What has come of it so far, for those who watch it.
    """

    def __init__(
        self,
        text: str | Iterable[str],
        config: wire.SessionConfig,
        options: Options,
        monitor: Monitor,
        start: Callable[[SyncUtterance], None],
        in_thread: Callable[[Callable[[], None]], None],
    ) -> None:
        self._text = text
        self._monitor = monitor  # the client's: guards what is shared, and tells of changes
        self._start = start
        self._in_thread = in_thread
        self._begun = False
        self.speech = Speech(config, options)
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
        with self._monitor.lock:
            return self.speech.result

    @property
    def progress(self) -> Progress:
        """How far it is."""
        with self._monitor.lock:
            return self.speech.progress(time.perf_counter())

    @property
    def paused(self) -> bool:
        """Whether :meth:`pause` was called, and :meth:`resume` was not yet."""
        return self.speech.pipeline.paused

    def pause(self) -> None:
        """Hand out no chunk until :meth:`resume`. Nothing is lost and nothing comes twice.

        Frames are still received. Decoding stops when ``max_ahead_s`` of audio wait. An error or
        a cancel ends the iteration all the same.
        """
        with self._monitor.lock:
            self.speech.pipeline.paused = True

    def resume(self) -> None:
        """Hand out chunks again, from where it was paused."""
        with self._monitor.lock:
            self.speech.pipeline.paused = False
            self._monitor.notify_all()

    def __iter__(self) -> Iterator[AudioChunk]:
        return self

    def __next__(self) -> AudioChunk:
        if not self._begun and not self.over:
            self._request()
        while True:
            with self._monitor.lock:
                chunk = self.speech.take(time.perf_counter())
                if chunk is not None:
                    self._monitor.notify_all()  # there is room, and it is heard from now on
                    return chunk
                if self.over:
                    break
                if self.speech.retry_delay_s is None and self._wait():
                    continue
            self._request_again()
        with self._monitor.lock:
            result = self.speech.take_report()
        self.speech.report(result)
        if not self.speech.cancelled:  # else whoever cancelled it does that
            self.settle()
        error = self.speech.pipeline.error
        if error is not None:
            raise error
        raise StopIteration

    def stop_now(self) -> None:
        """Hand out nothing more; :meth:`settle` tells the server."""
        with self._monitor.lock:
            self.speech.stop()
            result = self.speech.take_report()
            self._monitor.notify_all()
        self.speech.report(result)

    def settle(self) -> None:
        """Stop what the server still does for this utterance."""
        if self.connection is not None and not self.speech.failed_remotely:
            self.connection.withdraw(self.speech)

    def _wait(self) -> bool:
        """Wait for news, and look after the server's silence; return False where to ask again."""
        speech, connection = self.speech, self.connection
        wait_s = math.inf
        if connection is not None and connection.serves(speech) and not speech.pipeline.finished:
            now_s = time.perf_counter()
            failure, until_s = speech.check_silence(
                connection.session, connection.last_message_s, now_s
            )
            if failure is not None:
                speech.give_up_waiting(failure, now_s)
                self._monitor.notify_all()
                return False
            wait_s = min(wait_s, until_s)
        until_begin_s = speech.pipeline.begin_s - time.perf_counter()
        self._monitor.wait(max(0.0, min(wait_s, until_begin_s)))
        return True

    def _request(self) -> None:
        """Send the request; an error ends the utterance, or makes another attempt due."""
        speech = self.speech
        try:
            if not self._begun:
                self._begun = True
                self._say()
            self._start(self)
        except ConnectionFailedError as error:
            with self._monitor.lock:
                speech.lose(error)
        except CodecStreamError as error:
            with self._monitor.lock:
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
        with self._monitor.lock:
            self._monitor.wait_for(lambda: speech.over, delay_s)
            if speech.over:
                return
            speech.begin_again()
        self._request()

    # The text

    def _say(self) -> None:
        text = self._text
        if isinstance(text, str):
            self.speech.say(text)
            self.speech.complete_text()
        else:  # it may block: its pieces come from a thread of their own
            self._in_thread(lambda: self._take_text(text))

    def _take_text(self, pieces: Iterable[str]) -> None:
        speech = self.speech
        failure: CodecStreamError | None = None
        try:
            for piece in pieces:
                with self._monitor.lock:
                    if speech.pipeline.finished or speech.failed_remotely:
                        break  # it ended before its text did; what follows belongs to nothing
                    speech.say(piece)
                self._transmit()
            else:
                with self._monitor.lock:
                    speech.complete_text()
                self._transmit()
            close = getattr(pieces, "close", None)
            if close is not None:
                close()
        except CodecStreamError as error:
            failure = error
        except BaseException as error:  # the caller's iterator failed: the caller gets it
            failure = CodecStreamError(f"the text's iterator failed: {error!r}")
            failure.__cause__ = error
        if failure is not None:
            with self._monitor.lock:
                speech.stop(failure)
                self._monitor.notify_all()

    def _transmit(self) -> None:
        """Send what is known of the text, where a connection is there to take it."""
        if self.connection is not None:
            self.connection.transmit(self.speech)
