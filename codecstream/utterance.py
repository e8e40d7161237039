"""One spoken text, as an asynchronous iterator of its audio."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import Executor
from typing import Any

from codecstream import wire
from codecstream.connection import Connection, ended
from codecstream.errors import CodecStreamError, ConnectionFailedError
from codecstream.observe import Progress
from codecstream.options import Options
from codecstream.pipeline import AudioChunk
from codecstream.speech import Speech, UtteranceResult

__all__ = ["Text", "Utterance"]

Text = str | AsyncIterable[str]


class Utterance:
    """One spoken text: an asynchronous iterator of :class:`AudioChunk`, for one task.

    Iteration ends after the last chunk of a complete utterance, or at once when it is cancelled.
    Any other end raises an error of :mod:`codecstream.errors`. A failure that the server reports,
    a lost connection, or a packet that cannot be right, raises at once and drops the audio not
    yet taken. Counts that do not add up, a silent server and an utterance that is too long raise
    after the last chunk.

    Attributes:
        speech: What has come of it so far, for those who watch it.
    """

    def __init__(
        self,
        text: Text,
        config: wire.SessionConfig,
        options: Options,
        worker: Executor,
        start: Callable[[Utterance], Awaitable[None]],
    ) -> None:
        self.text = text
        self.speech = Speech(config, options)
        self.connection: Connection | None = None  # the one that the request goes out on
        self._worker = worker
        self._start = start
        self._tasks: list[asyncio.Task[None]] = []
        self._news = asyncio.Event()  # for the caller
        self._work = asyncio.Event()  # for the decoding task
        self._change = asyncio.Event()  # for the task that watches over the request

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
        return self.speech.result

    @property
    def progress(self) -> Progress:
        """How far it is."""
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
        self.speech.pipeline.paused = True

    def resume(self) -> None:
        """Hand out chunks again, from where it was paused."""
        self.speech.pipeline.paused = False
        self.wake()

    def __aiter__(self) -> AsyncIterator[AudioChunk]:
        return self

    async def __anext__(self) -> AudioChunk:
        if not self._tasks and not self.over:
            # Tasks of their own: a caller that is cancelled here leaves no half request behind.
            self._spawn(self._request(), "codecstream-request")
            self._spawn(self._decode(), "codecstream-decode")
        while True:
            chunk = self.speech.take(time.perf_counter())
            if chunk is not None:
                self._work.set()  # there is room, and it is heard from now on
                return chunk
            if self.over:
                break
            self._news.clear()
            await _set_by(self._news, self.speech.pipeline.begin_s)
        self.speech.report(self.speech.take_report())
        self.wake()  # where it ended here
        if not self.speech.cancelled:  # else whoever cancelled it does that
            await self.settle()
        error = self.speech.pipeline.error
        if error is not None:
            raise error
        raise StopAsyncIteration

    def stop_now(self) -> None:
        """Hand out nothing more; :meth:`settle` tells the server."""
        self.speech.stop()
        self.speech.report(self.speech.take_report())
        self.wake()

    async def settle(self) -> None:
        """Stop what still works for this utterance, here and on the server."""
        decoding = [task for task in self._tasks if task.get_name() == "codecstream-decode"]
        for task in self._tasks:
            if task not in decoding:  # that one ends by itself, after its current chunk
                task.cancel()
        connection = self.connection
        if connection is not None and not self.speech.failed_remotely:
            await connection.withdraw(self.speech)
        await ended(self._tasks)

    def wake(self) -> None:
        """Tell the tasks and the caller that something has changed."""
        self._news.set()
        self._work.set()
        self._change.set()

    def _spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        self._tasks.append(asyncio.create_task(coroutine, name=name))

    # The network's side

    async def _request(self) -> None:
        """Ask for the utterance, and again as long as that is allowed."""
        speech = self.speech
        if isinstance(self.text, str):
            speech.say(self.text)
            speech.complete_text()
        else:
            self._spawn(self._take_text(self.text), "codecstream-text")
        try:
            while not speech.pipeline.finished:
                try:
                    await self._start(self)
                except ConnectionFailedError as error:
                    speech.lose(error)
                else:
                    await self._watch()
                if speech.retry_delay_s is None:
                    break
                await asyncio.sleep(speech.retry_delay_s)
                speech.begin_again()
        except CodecStreamError as error:
            speech.stop(error)
        except Exception as error:
            failure = CodecStreamError(f"the utterance could not start: {error!r}")
            failure.__cause__ = error
            speech.stop(failure)
        finally:
            self.wake()

    async def _watch(self) -> None:
        """Wait until the server is done with it, or silent for too long."""
        connection, speech = self.connection, self.speech
        assert connection is not None
        while connection.serves(speech) and not speech.pipeline.finished:
            now_s = time.perf_counter()
            failure, wait_s = speech.check_silence(
                connection.session, connection.last_message_s, now_s
            )
            if failure is not None:
                speech.give_up_waiting(failure, now_s)
                self.wake()
                break
            self._change.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._change.wait(), wait_s)
        if speech.retry_delay_s is not None:
            await connection.close(goodbye=False)
        elif not speech.failed_remotely:
            await connection.withdraw(speech)  # where it ended here, before it did there

    async def _take_text(self, pieces: AsyncIterable[str]) -> None:
        speech = self.speech
        try:
            async for piece in pieces:
                if speech.pipeline.finished or speech.failed_remotely:
                    return  # it ended before its text did; what follows belongs to nothing
                speech.say(piece)
                await self._transmit()
            speech.complete_text()
            await self._transmit()
        except CodecStreamError as error:
            speech.stop(error)
        except Exception as error:  # the caller's iterator failed: the caller gets it
            failure = CodecStreamError(f"the text's iterator failed: {error!r}")
            failure.__cause__ = error
            speech.stop(failure)
        finally:
            self.wake()
            close = getattr(pieces, "aclose", None)
            if close is not None:
                await close()

    async def _transmit(self) -> None:
        """Send what is known of the text, where a connection is there to take it."""
        connection = self.connection
        if connection is None or not connection.serves(self.speech):
            return  # a later connection gets all of it
        if connection.session.takes_text:
            self.speech.transmit(connection.session, time.perf_counter())
            await connection.send()

    # The worker's side

    async def _decode(self) -> None:
        loop = asyncio.get_running_loop()
        speech = self.speech
        pipeline = speech.pipeline
        while True:
            job = pipeline.next_job(time.perf_counter())
            if pipeline.finished:
                self.wake()
                return
            if job is None:
                self._work.clear()
                await _set_by(self._work, pipeline.ask_again_s)
                continue
            started_s = time.perf_counter()
            try:
                pcm = await loop.run_in_executor(self._worker, job.run)
            except Exception as error:
                pipeline.fail_job(job, error)
            else:
                speech.finish_job(job, pcm, started_s, time.perf_counter())
            self._news.set()


async def _set_by(event: asyncio.Event, until_s: float) -> None:
    """Wait until ``event`` is set, or until that time."""
    if math.isinf(until_s):
        await event.wait()
        return
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(event.wait(), max(0.0, until_s - time.perf_counter()))
