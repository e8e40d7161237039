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
ramp or, where there is one, by a :mod:`codecstream.policy`. A policy is asked again at
``ask_again_s``, and holds chunks back until playback is to begin: then :meth:`DecodePipeline.take`
is to be asked again at ``begin_s``. Times in seconds are of the shell's clock, which only a policy
needs.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

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
from codecstream.pacing import Pacing

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
            or, for the last chunk of a sentence on a fixed ramp, ``codec.done``.
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
    """One chunk to decode; :meth:`run` may be called in any thread, once.

    Attributes:
        arrival_ms: See :class:`AudioChunk`.
    """

    __slots__ = ("arrival_ms", "run")

    def __init__(self, run: Callable[[], NDArray[np.float32]], arrival_ms: float) -> None:
        self.run = run
        """Decode the chunk and return it, or nothing at an end that is only to be written down.
        Raises what the program raises."""
        self.arrival_ms = arrival_ms


class DecodePipeline:
    """What has come of an utterance, what is decoded of it, and what was taken.

    Args:
        new_decoder: Makes a decoder in its first state.
        geometry: What it decodes.
        max_ahead_s: Decoded audio that waits for the caller, in seconds; at least one chunk.
        pacing: A policy's part in it; None for the decoder's ramp and no delay.

    Attributes:
        request_s: When the request was sent: what times in ms count from, in seconds.
        ask_again_s: When to ask :meth:`next_job` again at the latest, after it returned None.
        error: Why it is no success, or None.
        finished: Whether nothing more will be decoded.
        paused: Whether the caller wants no chunk for now.
        frames_decoded: Frames whose audio was decoded.
        frames_taken: Frames whose audio the caller has taken.
        sentences: Sentences that began to arrive.
        timeline: Times of all chunks, in order.
        audio_ready_max_s: The most audio that was decoded and not taken at a time.
        decode_ms_total: Time spent decoding, and
        audio_ms_total: the audio that it made; both are kept, as a timeline may be long.
    """

    def __init__(
        self,
        new_decoder: Callable[[], StreamDecoder],
        geometry: CodecGeometry,
        max_ahead_s: float,
        pacing: Pacing | None = None,
    ) -> None:
        self._new_decoder = new_decoder
        self._geometry = geometry
        self._pacing = pacing
        self.request_s = 0.0
        self._max_ahead_samples = max_ahead_s * geometry.sample_rate_hz
        self.paused = False
        self.restart()

    def restart(self) -> None:
        """Forget all that came: the utterance is requested again. A job still out is void."""
        self._decoder = self._new_decoder()
        self._chunks: Iterator[NDArray[np.float32]] = iter(())
        self._then: Callable[[], None] | None = None  # what follows the chunks now pending
        self._released = 0  # frames whose audio no policy may hold back any more
        self._arrival_ms = 0.0
        self._job: Job | None = None
        self._inbox: deque[tuple[Event, float]] = deque()
        self._ready: deque[AudioChunk] = deque()
        self._ready_samples = 0
        self.finished = False
        self.ask_again_s = math.inf
        self.error: CodecStreamError | None = None
        self.frames_decoded = 0
        self.frames_taken = 0
        self.sentences = 0
        self._sentences_decoded = 0  # the last one perhaps in part
        self.timeline: list[ChunkTime] = []
        self.audio_ready_max_s = 0.0
        self.decode_ms_total = 0.0
        self.audio_ms_total = 0.0
        if self._pacing is not None:
            self._pacing.restart()

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

    @property
    def begin_s(self) -> float:
        """When a policy lets :meth:`take` have a chunk if nothing happens; else ``inf``."""
        return math.inf if self._pacing is None or self.paused else self._pacing.begin_s

    @property
    def _full(self) -> bool:
        return bool(self._ready) and self._ready_samples >= self._max_ahead_samples

    # The network's side

    def feed(self, event: Event, arrival_ms: float) -> None:
        """Take an event from the protocol."""
        if self.finished:
            return
        if isinstance(event, UtteranceFailed) and not event.after_audio:
            self.stop(event.error)
        else:
            self.sentences += isinstance(event, SentenceStarted)
            self._inbox.append((event, arrival_ms))
            if self._pacing is not None:
                self._pacing.changed()

    def stop(self, error: CodecStreamError | None = None) -> None:
        """End now: drop what is not decoded and what is not taken."""
        self._ready.clear()
        self._ready_samples = 0
        self._inbox.clear()
        if not self.finished:
            self._finish(error)

    # The worker's side

    def next_job(self, now_s: float = 0.0) -> Job | None:
        """Return the next chunk to decode; None where there is none yet, or no room for it."""
        self.ask_again_s = math.inf
        if self._job is not None or self._full or self.finished:
            return None
        try:
            self._job = self._ramp_job() if self._pacing is None else self._policy_job(now_s)
        except Exception as error:
            self.stop(_as_ours(error))
        return self._job

    def finish_job(self, job: Job, pcm: NDArray[np.float32], t_ms: float, decode_ms: float) -> None:
        """Take the audio of ``job``; a job from before a stop or restart counts for nothing."""
        if job is not self._job:
            return
        self._job = None
        if self.finished or not pcm.size:
            return
        frames = pcm.size // self._geometry.samples_per_frame
        chunk = AudioChunk(
            pcm=pcm,
            frames=frames,
            first_frame=self.frames_decoded,
            idx=len(self.timeline),
            sentence_index=max(0, self._sentences_decoded - 1),
            arrival_ms=job.arrival_ms,
            t_ms=t_ms,
            decode_ms=decode_ms,
        )
        self.frames_decoded += frames
        budget_ms = pcm.size * 1000 / self._geometry.sample_rate_hz
        self.timeline.append(
            ChunkTime(t_ms, pcm.size, chunk.idx, frames, job.arrival_ms, decode_ms, budget_ms)
        )
        self.decode_ms_total += decode_ms
        self.audio_ms_total += budget_ms
        if self._pacing is not None:
            now_s = self.request_s + t_ms / 1000
            try:
                self._pacing.decoded(now_s, self.audio_ready_s, frames, decode_ms / 1000)
            except Exception as error:
                self.stop(_as_ours(error))
                return
        self._ready.append(chunk)
        self._ready_samples += pcm.size
        self.audio_ready_max_s = max(self.audio_ready_max_s, self.audio_ready_s)

    def fail_job(self, job: Job, error: BaseException) -> None:
        """Take note that ``job`` could not be decoded: the utterance ends here."""
        if job is self._job:
            self._job = None
            if not self.finished:
                self.stop(_as_ours(error))

    # The caller's side

    def take(self, now_s: float = 0.0) -> AudioChunk | None:
        """Return the next chunk; None where none is ready, or none wanted, and at the end."""
        if self._pacing is not None:
            self._pacing.back()
        if self.paused or not self._ready or not self._wanted(now_s):
            return None
        if not self._ready:  # cancelled by what a policy runs, or by a signal's handler
            return None
        chunk = self._ready.popleft()
        self._ready_samples -= chunk.pcm.size
        self.frames_taken += chunk.frames
        if self._pacing is not None:
            self._pacing.handed_out(now_s, chunk.pcm.size / self._geometry.sample_rate_hz)
        return chunk

    def _wanted(self, now_s: float) -> bool:
        """Whether a policy, where there is one, lets the next chunk be played."""
        if self._pacing is None or self.finished or self._full:
            return True
        if self._ready[0].first_frame < self._released:
            return True
        try:
            self._tell()
            return self._pacing.may_hand_out(now_s, self.audio_ready_s)
        except Exception as error:
            self.stop(_as_ours(error))
            return False

    def _finish(self, error: CodecStreamError | None) -> None:
        self.finished = True
        self.error = error

    # By the decoder's ramp

    def _ramp_job(self) -> Job | None:
        while not self.finished:
            if self._decoder.chunk_ready:
                return Job(partial(_next_of, self._chunks), self._arrival_ms)
            if self._then is not None:
                if self._decoder.sampling:
                    return Job(partial(_exhaust, self._chunks), self._arrival_ms)
                self._go_on()
            elif self._inbox:
                self._handle(*self._inbox.popleft())
            else:
                return None
        return None

    def _handle(self, event: Event, arrival_ms: float) -> None:
        self._arrival_ms = arrival_ms
        if isinstance(event, SentenceStarted):
            self._start_sentence()
        elif isinstance(event, Frames):
            self._chunks = self._decoder.push(event.codes)
        else:
            self._then = self._after(event)
            if self._then is not None:
                self._chunks = self._decoder.finish()

    # By a policy

    def _policy_job(self, now_s: float) -> Job | None:
        pacing = self._pacing
        assert pacing is not None
        while not self.finished:
            self._tell()
            if self._then is not None and not pacing.frames_waiting:
                if self._decoder.sampling:
                    return Job(partial(_exhaust, self._decoder.finish()), self._arrival_ms)
                self._released = self.frames_decoded
                self._go_on()
            elif self._then is None and self._inbox:
                self._start_sentence()  # all else was told
                self._inbox.popleft()
            else:
                frames, self.ask_again_s = pacing.next_chunk(
                    now_s,
                    ready_s=self.audio_ready_s,
                    held=self.paused,
                    ended=self._then is not None,
                )
                if not frames:
                    return None
                codes, arrival_ms = pacing.take(frames)
                self._decoder.push(codes)  # its iterator goes by the ramp
                return Job(partial(self._decoder.decode, frames), arrival_ms)
        return None

    def _tell(self) -> None:
        """Tell the policy what has come of this sentence. A job may be out."""
        pacing = self._pacing
        assert pacing is not None
        while self._inbox and self._then is None:
            event, arrival_ms = self._inbox[0]
            if isinstance(event, SentenceStarted):
                return  # the decoder must be free for that
            self._inbox.popleft()
            arrival_s = self.request_s + arrival_ms / 1000
            if isinstance(event, Frames):
                pacing.arrived(event.codes, arrival_s, arrival_ms)
            else:
                self._arrival_ms = arrival_ms
                self._then = self._after(event)
                if self._then is not None:
                    pacing.ended(arrival_s)

    # By either

    def _start_sentence(self) -> None:
        self._decoder.reset()
        self._sentences_decoded += 1

    def _after(self, event: Event) -> Callable[[], None] | None:
        """Return what follows the frames up to ``event``, which end with it; None for others."""
        if isinstance(event, SentenceEnded):
            return _nothing
        if isinstance(event, DecoderReset):
            return self._decoder.reset
        if isinstance(event, (UtteranceEnded, UtteranceFailed)):  # of a sentence cut short
            return partial(self._finish, event.error)
        return None

    def _go_on(self) -> None:
        then, self._then = self._then, None
        if then is not None:
            then()


def _next_of(chunks: Iterator[NDArray[np.float32]]) -> NDArray[np.float32]:
    for pcm in chunks:
        return pcm
    raise DecoderError("the decoder had a chunk ready and did not decode it")


def _exhaust(chunks: Iterator[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Let the decoder write the sample of an utterance that is over, which takes a while."""
    for _ in chunks:
        raise DecoderError("the decoder had frames left at their end")
    return np.empty(0, np.float32)


def _nothing() -> None:
    pass


def _as_ours(error: BaseException) -> CodecStreamError:
    """Return ``error`` as one of ours: a runtime's own must reach the caller, not a log."""
    if isinstance(error, CodecStreamError):
        return error
    failure = DecoderError(f"decoding failed: {error!r}")
    failure.__cause__ = error
    return failure
