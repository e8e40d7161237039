"""Protocol events in, decoding jobs out, decoded chunks back: an utterance on its way to sound.

Nothing here waits, and nothing runs beside anything: a shell (``utterance.py`` for asyncio,
``sync_utterance.py`` for threads) feeds events from its network side, runs the jobs on its worker,
and takes chunks for its caller.

::

    pipeline.feed(event, arrival_ms)                  # the network's side
    while job := pipeline.next_job():                 # the worker's side
        pipeline.finish_job(job, job.run(), t_ms, decode_ms)
    chunk = pipeline.take()                           # the caller's side

Events wait without bound (codes are small); decoded audio waits up to ``max_ahead_s``, and with it
the next job. **The size of a chunk is chosen in** :meth:`DecodePipeline.next_job`, by the decoder's
ramp.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
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

__all__ = ["AudioChunk", "DecodePipeline", "Job"]


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


class Job:
    """One chunk to decode; :meth:`run` may be called in any thread, once."""

    __slots__ = ("_chunks", "arrival_ms")

    def __init__(self, chunks: Iterator[NDArray[np.float32]], arrival_ms: float) -> None:
        self._chunks = chunks
        self.arrival_ms = arrival_ms

    def run(self) -> NDArray[np.float32]:
        """Decode the chunk. Raises what the program raises."""
        for pcm in self._chunks:
            return pcm
        raise DecoderError("the decoder had a chunk ready and did not decode it")


class DecodePipeline:
    """What has come of an utterance, what is decoded of it, and what was taken.

    Args:
        new_decoder: Makes a decoder in its first state.
        geometry: What it decodes.
        max_ahead_s: Decoded audio that waits for the caller, in seconds; at least one chunk.

    Attributes:
        error: Why it is no success, or None.
        finished: Whether nothing more will be decoded.
        paused: Whether the caller wants no chunk for now.
        frames_decoded: Frames whose audio was decoded.
        frames_taken: Frames whose audio the caller has taken.
        sentences: Sentences that began.
        timeline: Times of all chunks, in order.
        audio_ready_max_s: The most audio that was decoded and not taken at a time.
    """

    def __init__(
        self,
        new_decoder: Callable[[], StreamDecoder],
        geometry: CodecGeometry,
        max_ahead_s: float,
    ) -> None:
        self._new_decoder = new_decoder
        self._geometry = geometry
        self._max_ahead_samples = max_ahead_s * geometry.sample_rate_hz
        self.paused = False
        self.restart()

    def restart(self) -> None:
        """Forget all that came: the utterance is requested again. A job still out is void."""
        self._decoder = self._new_decoder()
        self._chunks: Iterator[NDArray[np.float32]] = iter(())
        self._then: Callable[[], None] | None = None  # what follows the chunks now pending
        self._arrival_ms = 0.0
        self._job: Job | None = None
        self._inbox: deque[tuple[Event, float]] = deque()
        self._ready: deque[AudioChunk] = deque()
        self._ready_samples = 0
        self.finished = False
        self.error: CodecStreamError | None = None
        self.frames_decoded = 0
        self.frames_taken = 0
        self.sentences = 0
        self.timeline: list[ChunkTime] = []
        self.audio_ready_max_s = 0.0

    @property
    def audio_ready_s(self) -> float:
        """Audio that is decoded and not taken, in seconds."""
        return self._ready_samples / self._geometry.sample_rate_hz

    @property
    def over(self) -> bool:
        """Whether the last chunk was taken, or it ended early: :meth:`take` has nothing more."""
        return self.finished and not self._ready

    @property
    def busy(self) -> bool:
        """Whether a job is out."""
        return self._job is not None

    # The network's side

    def feed(self, event: Event, arrival_ms: float) -> None:
        """Take an event from the protocol."""
        if self.finished:
            return
        if isinstance(event, UtteranceFailed) and not event.after_audio:
            self.stop(event.error)
        else:
            self._inbox.append((event, arrival_ms))

    def stop(self, error: CodecStreamError | None = None) -> None:
        """End now: drop what is not decoded and what is not taken."""
        self._ready.clear()
        self._ready_samples = 0
        self._inbox.clear()
        if not self.finished:
            self._finish(error)

    # The worker's side

    def next_job(self) -> Job | None:
        """Return the next chunk to decode; None where there is none yet, or no room for it."""
        full = self._ready and self._ready_samples >= self._max_ahead_samples
        if self._job is not None or full:
            return None
        try:
            while not self.finished and not self._decoder.chunk_ready:
                if self._then is not None:
                    then, self._then = self._then, None
                    then()
                elif self._inbox:
                    self._handle(*self._inbox.popleft())
                else:
                    return None
        except Exception as error:
            self.stop(_as_ours(error))
        if self.finished:
            return None
        self._job = Job(self._chunks, self._arrival_ms)
        return self._job

    def finish_job(self, job: Job, pcm: NDArray[np.float32], t_ms: float, decode_ms: float) -> None:
        """Take the audio of ``job``; a job from before a stop or restart counts for nothing."""
        if job is not self._job:
            return
        self._job = None
        if self.finished:
            return
        frames = pcm.size // self._geometry.samples_per_frame
        chunk = AudioChunk(
            pcm=pcm,
            frames=frames,
            first_frame=self.frames_decoded,
            idx=len(self.timeline),
            sentence_index=max(0, self.sentences - 1),
            arrival_ms=job.arrival_ms,
            t_ms=t_ms,
            decode_ms=decode_ms,
        )
        self.frames_decoded += frames
        budget_ms = pcm.size * 1000 / self._geometry.sample_rate_hz
        self.timeline.append(
            ChunkTime(t_ms, pcm.size, chunk.idx, frames, job.arrival_ms, decode_ms, budget_ms)
        )
        self._ready.append(chunk)
        self._ready_samples += pcm.size
        self.audio_ready_max_s = max(self.audio_ready_max_s, self.audio_ready_s)

    def fail_job(self, job: Job, error: Exception) -> None:
        """Take note that ``job`` could not be decoded: the utterance ends here."""
        if job is self._job:
            self._job = None
            if not self.finished:
                self.stop(_as_ours(error))

    # The caller's side

    def take(self) -> AudioChunk | None:
        """Return the next chunk; None where none is ready, while paused, and at the end."""
        if self.paused or not self._ready:
            return None
        chunk = self._ready.popleft()
        self._ready_samples -= chunk.pcm.size
        self.frames_taken += chunk.frames
        return chunk

    def _finish(self, error: CodecStreamError | None) -> None:
        self.finished = True
        self.error = error

    def _handle(self, event: Event, arrival_ms: float) -> None:
        self._arrival_ms = arrival_ms
        if isinstance(event, SentenceStarted):
            self._decoder.reset()
            self.sentences += 1
        elif isinstance(event, Frames):
            self._chunks = self._decoder.push(event.codes)
        elif isinstance(event, SentenceEnded):
            self._chunks = self._decoder.finish()
        elif isinstance(event, DecoderReset):
            self._chunks = self._decoder.finish()
            self._then = self._decoder.reset
        elif isinstance(event, (UtteranceEnded, UtteranceFailed)):
            error = event.error
            self._chunks = self._decoder.finish()  # of a sentence cut short
            self._then = lambda: self._finish(error)


def _as_ours(error: Exception) -> CodecStreamError:
    """Return ``error`` as one of ours: a runtime's own must reach the caller, not a log."""
    if isinstance(error, CodecStreamError):
        return error
    failure = DecoderError(f"decoding failed: {error!r}")
    failure.__cause__ = error
    return failure
