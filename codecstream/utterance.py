"""One spoken text, as an asynchronous iterator of its audio."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from codecstream import wire
from codecstream.connection import Connection, Options, Text
from codecstream.errors import (
    CodecStreamError,
    IncompleteError,
    LocalProtocolError,
    ServerError,
    StreamMismatchError,
)
from codecstream.events import Event, Notice, UtteranceFailed
from codecstream.metrics import ChunkTime, Metrics, summarise
from codecstream.pipeline import AudioChunk, DecodePipeline
from codecstream.protocol import Session
from codecstream.states import ClientState

__all__ = ["Utterance", "UtteranceResult"]

Status = Literal["complete", "cancelled", "refused", "failed", "incomplete"]


@dataclass(frozen=True, slots=True)
class UtteranceResult:
    """How an utterance ended.

    Attributes:
        status: ``complete`` only when the server's own counts match what arrived.
        error: What was raised, or None.
        frames_received: Valid frames that arrived.
        frames_decoded: Frames whose audio was decoded.
        sentences: Sentences that began.
        notices: Oddities that were tolerated.
        metrics: Latency figures.
        timeline: When each chunk was ready.
    """

    status: Status
    error: CodecStreamError | None
    frames_received: int
    frames_decoded: int
    sentences: int
    notices: tuple[str, ...]
    metrics: Metrics
    timeline: tuple[ChunkTime, ...]


class Utterance:
    """One spoken text: an asynchronous iterator of :class:`AudioChunk`, for one task.

    Iteration ends after the last chunk of a complete utterance, or at once when it is cancelled.
    Any other end raises an error of :mod:`codecstream.errors`. A failure that the server reports,
    or a packet that cannot be right, raises at once and drops the audio not yet taken; counts
    that do not add up raise after the last chunk.
    """

    def __init__(
        self,
        text: Text,
        config: wire.SessionConfig,
        pipeline: DecodePipeline,
        options: Options,
        start: Callable[[Utterance], Awaitable[Connection]],
    ) -> None:
        self.text = text
        self.config = config
        self._pipeline = pipeline
        self._options = options
        self._start = start
        self._begin_task: asyncio.Task[None] | None = None
        self._connection: Connection | None = None
        self._helpers: list[asyncio.Task[None]] = []
        self._early: list[Event] = []
        self._frames_received = 0
        self._utterance_index: int | None = None
        self._cancelled = False
        self._failed_remotely = False
        self._notices: list[str] = []

    @property
    def over(self) -> bool:
        """Whether it has ended, well or not, and the last chunk was taken."""
        return self._pipeline.over

    @property
    def result(self) -> UtteranceResult:
        """How it ended.

        Raises:
            LocalProtocolError: It has not ended yet.
        """
        if not self.over:
            raise LocalProtocolError("the utterance has no result before it has ended")
        pipeline = self._pipeline
        geometry = self._options.program.geometry
        return UtteranceResult(
            status=_status(pipeline.error, self._cancelled),
            error=pipeline.error,
            frames_received=self._frames_received,
            frames_decoded=pipeline.frames_decoded,
            sentences=pipeline.sentences,
            notices=tuple(self._notices),
            metrics=summarise(pipeline.timeline, geometry.sample_rate_hz),
            timeline=tuple(pipeline.timeline),
        )

    def __aiter__(self) -> AsyncIterator[AudioChunk]:
        return self

    async def __anext__(self) -> AudioChunk:
        if self._begin_task is None and not self.over:
            # A task of its own: a caller that is cancelled here leaves no half request behind.
            self._begin_task = asyncio.create_task(self._begin(), name="codecstream-begin")
        chunk = await self._pipeline.get()
        if chunk is None:
            if not self._cancelled:  # else whoever cancelled it does that
                await self.settle()
            if self._pipeline.error is not None:
                raise self._pipeline.error
            raise StopAsyncIteration
        return chunk

    async def _begin(self) -> None:
        try:
            connection = await self._start(self)
        except CodecStreamError as error:
            self._pipeline.stop(error)
            return
        except Exception as error:
            failure = CodecStreamError(f"the utterance could not start: {error!r}")
            failure.__cause__ = error
            self._pipeline.stop(failure)
            return
        self._connection = connection
        early, self._early = self._early, []
        for event in early:
            self._pipeline.feed(event)
        if self.over:  # cancelled meanwhile: settle() tells the server
            return
        self._pipeline.start()
        self._helpers.append(asyncio.create_task(self._watch(connection), name="codecstream-watch"))
        if not isinstance(self.text, str):
            pieces = self._send_pieces(connection, self.text)
            self._helpers.append(asyncio.create_task(pieces, name="codecstream-text"))

    async def _send_pieces(self, connection: Connection, pieces: AsyncIterable[str]) -> None:
        try:
            async for piece in pieces:
                if not connection.serves(self):
                    return  # it ended before its text did; what follows belongs to nothing
                connection.session.send_text(piece)
                await connection.send()
            if connection.serves(self):
                connection.session.flush()
                connection.expect_answer()
                await connection.send()
        except LocalProtocolError:
            pass  # cancelled before its text was complete
        except Exception as error:  # the caller's iterator failed: the caller gets it
            failure = CodecStreamError(f"the text's iterator failed: {error!r}")
            failure.__cause__ = error
            self._pipeline.stop(failure)
        finally:
            close = getattr(pieces, "aclose", None)
            if close is not None:
                await close()

    async def _watch(self, connection: Connection) -> None:
        """End the utterance when its text is complete and the server stays silent for too long."""
        limit_s = self._options.idle_timeout_s
        while connection.serves(self):
            silent_s = time.perf_counter() - connection.last_message_s
            if silent_s < limit_s or connection.session.client_state is not ClientState.FLUSHED:
                await asyncio.sleep(max(limit_s - silent_s, limit_s / 10))
            elif not self._pipeline.waiting_for_frames:
                await asyncio.sleep(limit_s / 10)  # the caller first gets what has come
            else:
                error = IncompleteError(
                    f"nothing came from the server for {limit_s:g} s "
                    f"after {self._frames_received} frames",
                    utterance_index=self._utterance_index,
                    frames_received=self._frames_received,
                )
                self._pipeline.stop(error)
                return

    def restart_clock(self) -> None:
        """Count times from now: the request is being sent."""
        self._pipeline.restart_clock()

    def receive(self, event: Event, session: Session) -> None:
        """Take an event from the connection's reader. Never waits."""
        self._frames_received = session.frames_received
        self._utterance_index = session.utterance_index
        if isinstance(event, Notice):
            self._notices.append(event.text)
            return
        if isinstance(event, UtteranceFailed):
            self._failed_remotely = True
        if self._connection is None:
            self._early.append(event)
        else:
            self._pipeline.feed(event)

    def forget_early_events(self) -> None:
        """The request did not go out: the end of that connection is not this utterance's."""
        self._early.clear()
        self._notices.clear()
        self._failed_remotely = False

    def stop_now(self) -> None:
        """Hand out nothing more; :meth:`settle` tells the server."""
        if not self.over:
            self._cancelled = self._pipeline.error is None
            self._pipeline.stop()

    async def settle(self) -> None:
        """Stop what still works for this utterance, here and on the server."""
        if self._begin_task is not None and not self._begin_task.done():
            await asyncio.wait([self._begin_task])
        for task in self._helpers:
            task.cancel()
        if self._helpers:
            await asyncio.wait(self._helpers)
        connection = self._connection
        if connection is not None and connection.serves(self) and not self._failed_remotely:
            with contextlib.suppress(LocalProtocolError):  # the socket closed just now
                connection.session.cancel()
            await connection.send()
        await self._pipeline.join()


def _status(error: CodecStreamError | None, cancelled: bool) -> Status:
    if error is None:
        return "cancelled" if cancelled else "complete"
    if isinstance(error, IncompleteError):
        return "incomplete"
    if isinstance(error, StreamMismatchError):
        return "refused"
    if isinstance(error, ServerError) and error.refused:
        return "refused"
    return "failed"
