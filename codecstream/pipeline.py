"""Protocol events in, decoded chunks out: the part of an utterance that works beside the caller."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from codecstream.decoder import StreamDecoder
from codecstream.errors import CodecStreamError, DecoderError
from codecstream.events import (
    DecoderReset,
    Event,
    Frames,
    SentenceEnded,
    SentenceStarted,
    UtteranceEnded,
    UtteranceFailed,
)
from codecstream.geometry import CodecGeometry
from codecstream.metrics import ChunkTime

__all__ = ["AudioChunk", "DecodePipeline"]


@dataclass(frozen=True, slots=True)
class AudioChunk:
    """Decoded audio. Times count from the moment the request was sent.

    Attributes:
        pcm: float32 ``[samples]`` in [-1, 1].
        frames: Codec frames in this chunk.
        first_frame: Index of its first frame within the utterance.
        idx: Index of the chunk within the utterance.
        sentence_index: Index of its sentence within the utterance.
        arrival_ms: When the message that completed it had arrived: the packet of its last frame
            or, for the last chunk of a sentence, ``codec.done``.
        t_ms: When it was decoded.
        decode_ms: What decoding took.
    """

    pcm: NDArray[np.float32]
    frames: int
    first_frame: int
    idx: int
    sentence_index: int
    arrival_ms: float
    t_ms: float
    decode_ms: float


class DecodePipeline:
    """Decodes an utterance on a worker while its events arrive.

    Events wait without bound (codes are small); decoded audio waits up to ``max_ahead_s``, and the
    worker with it.

    Attributes:
        error: Why it is no success, or None.
        frames_decoded: Frames whose audio was decoded.
        sentences: Sentences that began.
        timeline: Times of all chunks, in order.
    """

    def __init__(
        self,
        decoder: StreamDecoder,
        geometry: CodecGeometry,
        worker: Executor,
        max_ahead_s: float,
    ) -> None:
        self._decoder = decoder
        self._geometry = geometry
        self._worker = worker
        self._max_ahead_samples = max_ahead_s * geometry.sample_rate_hz
        self._inbox: asyncio.Queue[tuple[Event, float] | None] = asyncio.Queue()
        self._ready: deque[AudioChunk] = deque()
        self._ready_samples = 0
        self._news = asyncio.Event()  # a chunk is ready, or it is over
        self._room = asyncio.Event()  # the caller took a chunk, or it is over
        self._started_s = time.perf_counter()
        self._task: asyncio.Task[None] | None = None
        self._busy = False
        self._finished = False  # nothing more will become ready
        self.error: CodecStreamError | None = None
        self.frames_decoded = 0
        self.sentences = 0
        self.timeline: list[ChunkTime] = []

    @property
    def over(self) -> bool:
        """Whether the last chunk was taken, or it ended early: :meth:`get` has nothing more."""
        return self._finished and not self._ready

    @property
    def waiting_for_frames(self) -> bool:
        """Whether everything that arrived is decoded and taken: only the server can go on."""
        return not (self._finished or self._busy or self._ready or self._inbox.qsize())

    def restart_clock(self) -> None:
        """Count times from now: the request is being sent."""
        self._started_s = time.perf_counter()

    def start(self) -> None:
        """Begin to decode."""
        self._task = asyncio.create_task(self._run(), name="codecstream-decode")

    def feed(self, event: Event) -> None:
        """Take an event from the protocol. Never waits."""
        if isinstance(event, UtteranceFailed):
            self.stop(event.error)
        elif not self._finished:
            self._inbox.put_nowait((event, self._elapsed_ms()))

    def stop(self, error: CodecStreamError | None = None) -> None:
        """End now: drop what is not decoded and what is not taken."""
        self._ready.clear()
        self._ready_samples = 0
        if not self._finished:
            self._finish(error)

    async def get(self) -> AudioChunk | None:
        """Return the next chunk, or None when it is over; then look at :attr:`error`."""
        while not self._ready:
            if self._finished:
                return None
            self._news.clear()
            await self._news.wait()
        chunk = self._ready.popleft()
        self._ready_samples -= chunk.pcm.size
        self._room.set()
        return chunk

    async def join(self) -> None:
        """Wait until the decoding task has ended, which takes its current chunk at most."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def _finish(self, error: CodecStreamError | None) -> None:
        self._finished = True
        self.error = error
        self._news.set()
        self._room.set()
        self._inbox.put_nowait(None)

    async def _run(self) -> None:
        try:
            while not self._finished:
                item = await self._inbox.get()
                if item is None:
                    return
                self._busy = True
                await self._handle(*item)
                self._busy = False
        except CodecStreamError as error:
            self.stop(error)
        except Exception as error:  # a runtime's own: it must reach the caller, not a log
            failure = DecoderError(f"decoding failed: {error!r}")
            failure.__cause__ = error
            self.stop(failure)

    async def _handle(self, event: Event, arrival_ms: float) -> None:
        if isinstance(event, SentenceStarted):
            self._decoder.reset()
            self.sentences += 1
        elif isinstance(event, Frames):
            await self._decode(self._decoder.push(event.codes), arrival_ms)
        elif isinstance(event, DecoderReset):
            await self._decode(self._decoder.finish(), arrival_ms)
            self._decoder.reset()
        elif isinstance(event, SentenceEnded):
            await self._decode(self._decoder.finish(), arrival_ms)
        elif isinstance(event, UtteranceEnded):
            await self._decode(self._decoder.finish(), arrival_ms)  # of a sentence cut short
            if not self._finished:
                self._finish(event.error)

    async def _decode(self, chunks: Iterator[NDArray[np.float32]], arrival_ms: float) -> None:
        loop = asyncio.get_running_loop()
        while self._decoder.chunk_ready and not self._finished:
            started_s = time.perf_counter()
            pcm = await loop.run_in_executor(self._worker, next, chunks)
            if self._finished:
                return
            now_ms = self._elapsed_ms()
            decode_ms = (time.perf_counter() - started_s) * 1000
            frames = pcm.size // self._geometry.samples_per_frame
            chunk = AudioChunk(
                pcm=pcm,
                frames=frames,
                first_frame=self.frames_decoded,
                idx=len(self.timeline),
                sentence_index=max(0, self.sentences - 1),
                arrival_ms=arrival_ms,
                t_ms=now_ms,
                decode_ms=decode_ms,
            )
            self.frames_decoded += frames
            self.timeline.append(
                ChunkTime(now_ms, pcm.size, chunk.idx, frames, arrival_ms, decode_ms)
            )
            self._ready.append(chunk)
            self._ready_samples += pcm.size
            self._news.set()
            while self._ready_samples >= self._max_ahead_samples and not self._finished:
                self._room.clear()
                await self._room.wait()

    def _elapsed_ms(self) -> float:
        return (time.perf_counter() - self._started_s) * 1000
