"""The bookkeeping of one utterance: what was said, what came of it, how it ended.

It is the same for asyncio and for threads, and decides whether to ask again after a loss.
Nothing here waits and no clock is read: whoever calls says what time it is. With threads, every
call is made under the client's lock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from codecstream import wire
from codecstream.errors import (
    CodecStreamError,
    ConnectionFailedError,
    IncompleteError,
    LocalProtocolError,
    ServerError,
    StalledError,
    StreamMismatchError,
    TooLongError,
)
from codecstream.events import Event, Frames, Notice, UtteranceEnded, UtteranceFailed
from codecstream.metrics import ChunkTime, Metrics, summarise
from codecstream.observe import Progress
from codecstream.options import Options
from codecstream.pipeline import AudioChunk, Job
from codecstream.protocol import Session
from codecstream.states import ClientState

__all__ = ["Speech", "Status", "UtteranceResult", "status_of"]

WHOLE_FRAME = 1e-6  # what rounding may take from the last frame heard

Status = Literal["complete", "cancelled", "failed", "incomplete", "refused", "stalled", "too_long"]


@dataclass(frozen=True, slots=True)
class UtteranceResult:
    """How an utterance ended.

    Attributes:
        status: One of

            - ``complete``: the server's own counts match what arrived;
            - ``cancelled``: this program cancelled it, or closed the client;
            - ``failed``: the server reported a failure or broke the protocol, or this side could
              not decode;
            - ``incomplete``: the connection was lost or silent, or not all came that was announced;
            - ``refused``: the server does not support the mode, or its stream is not for this
              decoder artifact;
            - ``stalled``: no frame came for ``stall_timeout_s``;
            - ``too_long``: cut off at ``max_audio_s``.
        reason: The same in a sentence.
        error: What was raised, or None.
        frames_received: Valid frames that arrived.
        frames_decoded: Frames whose audio was decoded.
        frames_handed_out: Frames whose audio the caller took.
        frames_played: Frames that had been heard when the utterance ended, by what the client's
            ``ahead_s`` said then; after a cancel, how far the listener came. None where there is
            no ``ahead_s``, or where it could not say (a paused output does not).
        sentences: Sentences that began to arrive.
        attempts: Requests sent: above 1, the connection was lost and it was asked for again.
        notices: Oddities that were tolerated, and losses that a new attempt made good.
        metrics: Latency figures.
        timeline: When each chunk was ready.
        frames_waiting_max: The most frames that were received and not decoded at a time.
        audio_ready_max_s: The most audio that was decoded and not taken at a time, in seconds.
    """

    status: Status
    reason: str
    error: CodecStreamError | None
    frames_received: int
    frames_decoded: int
    frames_handed_out: int
    frames_played: int | None
    sentences: int
    attempts: int
    notices: tuple[str, ...]
    metrics: Metrics
    timeline: tuple[ChunkTime, ...]
    frames_waiting_max: int
    audio_ready_max_s: float


def status_of(error: CodecStreamError | None, cancelled: bool) -> Status:
    """Return which of the ends this one is."""
    if error is None:
        return "cancelled" if cancelled else "complete"
    if isinstance(error, StreamMismatchError) or (isinstance(error, ServerError) and error.refused):
        return "refused"
    if isinstance(error, StalledError):
        return "stalled"
    if isinstance(error, TooLongError):
        return "too_long"
    if isinstance(error, (IncompleteError, ConnectionFailedError)):
        return "incomplete"
    return "failed"


class Speech:
    """One utterance, from its text to its end.

    Args:
        config: The settings to say it with.
        options: The client's.

    Attributes:
        pipeline: What came of it, and its audio.
        frames_received: Valid frames that arrived so far.
        cancelled: Whether this program cancelled it.
        retry_delay_s: How long to wait before asking again, while that is due; else None.
        failed_remotely: Whether the server itself ended it: there is nothing to cancel there.
    """

    def __init__(self, config: wire.SessionConfig, options: Options) -> None:
        self.config = config
        self.pipeline = options.new_pipeline()
        self._options = options
        self._pieces: list[str] = []
        self._pieces_sent = 0
        self._text_complete = False
        self._flushed = False
        self._request_s: float | None = None  # when the first request went out
        self._awaited_s = 0.0  # since when a frame is awaited
        self._attempts = 0
        self._fresh_connection = True
        self._heard = False  # whether anything came of this attempt
        self._held: UtteranceFailed | None = None  # see _stale
        self._ending = False  # it has failed, and at most its last audio is to be heard
        self._delays_s: Iterator[float] = (
            iter(()) if options.reconnect is None else options.reconnect.delays_s()
        )
        self.frames_received = 0
        self._frames_waiting_max = 0
        self._end_reported = False
        self._utterance_index: int | None = None
        self._notices: list[str] = []
        self.cancelled = False
        self.retry_delay_s: float | None = None
        self.failed_remotely = False

    @property
    def over(self) -> bool:
        """Whether it has ended, well or not, and the last chunk was taken."""
        return self.pipeline.over

    @property
    def result(self) -> UtteranceResult:
        """How it ended.

        Raises:
            LocalProtocolError: It has not ended yet.
        """
        if not self.over:
            raise LocalProtocolError("the utterance has no result before it has ended")
        pipeline = self.pipeline
        status = status_of(pipeline.error, self.cancelled)
        reason = {
            "complete": f"all {self.frames_received} frames that the server counted have come",
            "cancelled": f"this program ended it after {self.frames_received} frames",
        }.get(status, str(pipeline.error))
        return UtteranceResult(
            status=status,
            reason=reason,
            error=pipeline.error,
            frames_received=self.frames_received,
            frames_decoded=pipeline.frames_decoded,
            frames_handed_out=pipeline.frames_taken,
            frames_played=self._frames_played,
            sentences=pipeline.sentences,
            attempts=self._attempts,
            notices=tuple(self._notices),
            metrics=summarise(pipeline.timeline, self._options.program.geometry.sample_rate_hz),
            timeline=tuple(pipeline.timeline),
            frames_waiting_max=self._frames_waiting_max,
            audio_ready_max_s=pipeline.audio_ready_max_s,
        )

    @cached_property
    def _frames_played(self) -> int | None:
        """See :class:`UtteranceResult`; asked once, as the next utterance plays afterwards."""
        if self._options.ahead_s is None:
            return None
        with suppress(Exception):  # somebody's code, or no number: a policy has told of that
            ahead_s = self._options.ahead_s() or 0.0
            if not math.isinf(ahead_s):
                waiting = ahead_s * self._options.program.geometry.frame_rate_hz
                return max(0, math.floor(self.pipeline.frames_taken - waiting + WHOLE_FRAME))
        return None

    def progress(self, now_s: float) -> Progress:
        """Return how far it is."""
        pipeline = self.pipeline
        decode_ms, audio_ms = pipeline.decode_ms_total, pipeline.audio_ms_total
        return Progress(
            elapsed_ms=self.elapsed_ms(now_s),
            frames_received=self.frames_received,
            frames_decoded=pipeline.frames_decoded,
            frames_handed_out=pipeline.frames_taken,
            frames_waiting=max(0, self.frames_received - pipeline.frames_decoded),
            audio_ready_s=pipeline.audio_ready_s,
            decode_ms_total=decode_ms,
            decode_rtf=decode_ms / audio_ms if audio_ms else None,
        )

    def finish_job(
        self, job: Job, pcm: NDArray[np.float32], started_s: float, now_s: float
    ) -> None:
        """Take the audio of ``job``, which was decoded from ``started_s`` to ``now_s``."""
        chunks = len(self.pipeline.timeline)
        self.pipeline.finish_job(job, pcm, self.elapsed_ms(now_s), (now_s - started_s) * 1000)
        for chunk in self.pipeline.timeline[chunks:]:
            self._options.observers.chunk_decoded(chunk, self.progress(now_s))

    def take_report(self) -> UtteranceResult | None:
        """Return how it ended, once, for :meth:`report`."""
        if not self.over or self._end_reported:
            return None
        self._end_reported = True
        return self.result

    def report(self, result: UtteranceResult | None) -> None:
        """Tell the observers, which may call the client: hold no lock."""
        if result is not None:
            self._options.observers.utterance_ended(result)

    # The text

    def say(self, piece: str) -> None:
        """Take a piece of the text; :meth:`transmit` sends it.

        Raises:
            LocalProtocolError: It is no string.
        """
        if not isinstance(piece, str):
            raise LocalProtocolError(f"text comes in strings, not {type(piece).__name__}")
        self._pieces.append(piece)

    def complete_text(self) -> None:
        """Take note that no piece follows."""
        self._text_complete = True

    def transmit(self, session: Session, now_s: float) -> None:
        """Put what was not sent of the text into ``session``; the server's turn counts from now.

        Raises:
            LocalProtocolError: The text cannot be encoded, or the session is closed or cancelled.
        """
        while self._pieces_sent < len(self._pieces):
            session.send_text(self._pieces[self._pieces_sent])
            self._pieces_sent += 1
        if self._text_complete and not self._flushed:
            session.flush()
            self._flushed = True
            self._awaited_s = now_s

    # An attempt

    def begin(self, *, fresh_connection: bool, now_s: float) -> None:
        """Take note that the request goes out now, on a connection of its own or a used one."""
        self._attempts += 1
        self._fresh_connection = fresh_connection
        if self._request_s is None:
            self._request_s = self.pipeline.request_s = now_s
        self._awaited_s = now_s

    def begin_again(self) -> None:
        """Prepare the next attempt: all of the text is to be sent again."""
        self.retry_delay_s = None
        self._pieces_sent = 0
        self._flushed = False
        self._heard = False
        self._held = None
        self.frames_received = 0
        self._utterance_index = None

    def receive(self, event: Event, session: Session, now_s: float) -> None:
        """Take an event of the connection that serves it."""
        if self._ending or self.retry_delay_s is not None:
            return  # it has failed, or this attempt was given up
        self.frames_received = session.frames_received
        waiting = self.frames_received - self.pipeline.frames_decoded
        self._frames_waiting_max = max(self._frames_waiting_max, waiting)
        self._utterance_index = session.utterance_index
        if isinstance(event, Notice):
            self._notices.append(event.text)
            return
        if self._held is not None and isinstance(event, UtteranceEnded):
            if session.client_state is ClientState.CLOSED and self._will_retry(
                IncompleteError(str(self._held.error), connection_lost=True)
            ):
                return
            self._fail(self._held, now_s)
        elif isinstance(event, UtteranceFailed):
            if self._stale and isinstance(event.error, ServerError):
                self._held = event
            elif not self._will_retry(event.error):
                self._fail(event, now_s)
            return
        elif not isinstance(event, UtteranceEnded):
            self._heard = True
        if isinstance(event, Frames):
            self._awaited_s = now_s
        self.pipeline.feed(event, self.elapsed_ms(now_s))

    def _fail(self, failure: UtteranceFailed, now_s: float) -> None:
        self.failed_remotely = True
        self._end(failure, now_s)

    def _end(self, failure: UtteranceFailed, now_s: float) -> None:
        self._ending = True
        self.pipeline.feed(failure, self.elapsed_ms(now_s))

    @property
    def _stale(self) -> bool:
        """Whether the server may have closed this connection before it saw the request.

        It does so with idle ones, after an ``error``. A refusal looks the same up to there, so the
        error is held until ``session.done`` says that it is one, or the connection's end that it
        is none.
        """
        return not self._fresh_connection and not self._heard

    def lose(self, error: CodecStreamError) -> None:
        """Take note that an attempt failed: ask again if that is allowed, else end with it."""
        if self.retry_delay_s is None and not self._will_retry(error):
            self.stop(error)

    def give_up_waiting(self, failure: UtteranceFailed, now_s: float) -> None:
        """Take note of a silence: ask again if that is allowed, else end after what has come."""
        if self._held is not None:
            self._fail(self._held, now_s)
        elif not self._will_retry(failure.error):
            self._end(failure, now_s)

    def lose_connection(self, code: int, reason: str) -> None:
        """Take note that the connection ended before anything of the text was sent."""
        why = f": {reason}" if reason else ""
        error = IncompleteError(
            f"the connection closed with code {code} before anything of the text was sent{why}",
            close_code=code,
        )
        self.lose(error)

    def _will_retry(self, error: CodecStreamError) -> bool:
        """Decide whether to ask again after ``error``, and when: only while nothing was heard."""
        lost = (isinstance(error, IncompleteError) and error.connection_lost) or (
            isinstance(error, ConnectionFailedError) and error.transient
        )
        pipeline = self.pipeline
        over = self.cancelled or self._ending or pipeline.finished
        if not lost or over or pipeline.frames_taken:
            return False
        delay_s = 0.0 if self._stale else next(self._delays_s, None)  # the first is not counted
        if delay_s is None:
            return False
        self._fresh_connection = True
        self._notices.append(f"attempt {max(1, self._attempts)} was lost: {error}")
        pipeline.restart()  # at once: nothing of it may be taken any more
        self.retry_delay_s = delay_s
        return True

    def check_silence(
        self, session: Session, last_message_s: float, now_s: float
    ) -> tuple[UtteranceFailed | None, float]:
        """Return a failure if the server has been silent for too long, and when to look again.

        The server's turn begins when its text is complete. Audio that came before the silence is
        good and is handed out before the failure is raised.
        """
        idle_limit_s = self._options.idle_timeout_s
        stall_limit_s = self._options.stall_timeout_s
        if self._ending or session.client_state is not ClientState.FLUSHED:
            return None, min(idle_limit_s, stall_limit_s or idle_limit_s)
        silent_s = now_s - max(last_message_s, self._awaited_s)
        stalled_s = now_s - self._awaited_s
        progress = {
            "utterance_index": self._utterance_index,
            "frames_received": self.frames_received,
        }
        error: CodecStreamError | None = None
        if silent_s >= idle_limit_s:
            error = IncompleteError(
                f"nothing came from the server for {idle_limit_s:g} s "
                f"after {self.frames_received} frames",
                connection_lost=True,
                **progress,
            )
        elif stall_limit_s is not None and stalled_s >= stall_limit_s:
            error = StalledError(
                f"no frame came for {stall_limit_s:g} s after {self.frames_received} frames, "
                f"though the last message of any kind is {now_s - last_message_s:.1f} s old",
                waited_s=stalled_s,
                **progress,
            )
        wait_s = idle_limit_s - silent_s
        if stall_limit_s is not None:
            wait_s = min(wait_s, stall_limit_s - stalled_s)
        failure = None if error is None else UtteranceFailed(error, after_audio=True)
        return failure, max(wait_s, 0.0)

    # The caller

    def take(self, now_s: float = 0.0) -> AudioChunk | None:
        """Return the next chunk; None where none is to be had for now, or any more."""
        return None if self.retry_delay_s is not None else self.pipeline.take(now_s)

    def stop(self, error: CodecStreamError | None = None) -> None:
        """Hand out nothing more; without ``error``, because this program cancels it."""
        if not self.over:
            if error is None:
                self.cancelled = self.pipeline.error is None
            self.pipeline.stop(error)
            self.retry_delay_s = None

    def elapsed_ms(self, now_s: float) -> float:
        """Return the time since the request was sent."""
        return 0.0 if self._request_s is None else (now_s - self._request_s) * 1000
