"""Samples on their way to a sound device: the half of playback that is neither thread nor device.

>>> import numpy as np
>>> from codecstream.playback_buffer import PlaybackBuffer
>>> buffer = PlaybackBuffer(capacity_samples=24_000)
>>> buffer.append(np.ones(3, np.float32))
>>> block = np.empty(5, np.float32)
>>> buffer.read_into(block), block.tolist()
(True, [1.0, 1.0, 1.0, 0.0, 0.0])
>>> buffer.end()
>>> buffer.read_into(block)
False

The device asks for blocks of any length from a thread of its own, and is answered without waiting:
with samples, or with silence. Silence in the middle of an utterance is an underrun and is counted;
silence before its first sample, behind its last and while paused is none.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from codecstream.monitor import Monitor

__all__ = ["BufferCounts", "PlaybackBuffer"]


@dataclass(frozen=True, slots=True)
class BufferCounts:
    """What went through a buffer, in samples at the device's rate.

    Attributes:
        played: Samples handed to the device.
        queued: Samples waiting.
        underruns: Times that the device asked and there was nothing, between an utterance's first
            sample and its last.
        underrun_samples: Samples of silence given instead.
    """

    played: int
    queued: int
    underruns: int
    underrun_samples: int


class PlaybackBuffer:
    """A queue of samples with one writer and one reader that never waits for samples.

    An utterance starts with the first ``append`` and ends with ``end`` or ``clear``; the next
    ``append`` starts another.

    Args:
        capacity_samples: :meth:`wait_for_room` waits while this many or more are queued.
        start_delay_s: Silence between an utterance's first ``append`` and its first sample; what
            arrives meanwhile is a cushion against a late chunk. May be changed at any time.
        fade_samples: 0 hands out the very samples. Otherwise the first so many samples after any
            silence fade in; where sound stops, the value of its last sample, which stays as it
            is, falls to 0 within so many samples of the silence.
        clock: Returns seconds; for tests.
    """

    def __init__(
        self,
        capacity_samples: int,
        *,
        start_delay_s: float = 0.0,
        fade_samples: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.start_delay_s = start_delay_s
        self._capacity = capacity_samples
        self._clock = clock
        self._monitor = Monitor()
        self._chunks: deque[NDArray[np.float32]] = deque()
        self._queued = 0
        self._played = 0
        self._underruns = 0
        self._underrun_samples = 0
        self._first_append_s: float | None = None
        self._started = False  # a sample of this utterance was handed out
        self._ended = False
        self._paused = False
        self._read_s = 0.0  # when the device last asked ...
        self._block = 1  # ... and for how many samples
        self._silence = 0  # since the last sample; an underrun only once another sample follows
        self._fade = _Fade(fade_samples)

    @property
    def counts(self) -> BufferCounts:
        """The counts so far."""
        with self._monitor.lock:
            return self._counts()

    @property
    def paused(self) -> bool:
        """True between :meth:`pause` and :meth:`resume`."""
        return self._paused

    def ahead_s(self, rate_hz: float) -> float | None:
        """Return how long it is until the device finds too little, at so many samples per second.

        It is taken to go on in blocks of the length of its last one, which lasts until the next
        is asked for. Silence that is still to come before the first sample is added. None while
        nothing is queued and nothing plays, ``inf`` while paused.
        """
        with self._monitor.lock:
            playing = self._started and not self._silence
            if not self._queued and not playing:
                return None
            if self._paused:
                return math.inf
            if playing:
                blocks = self._queued // self._block + 1
                return max(0.0, blocks * self._block / rate_hz - (self._clock() - self._read_s))
            queued_s = self._queued / rate_hz
            if self._started or self._ended or self._first_append_s is None:
                return queued_s
            waited_s = self._clock() - self._first_append_s
            return max(0.0, self.start_delay_s - waited_s) + queued_s

    def append(self, samples: NDArray[np.float32]) -> None:
        """Queue float32 ``[samples]``, which must not change afterwards. Never waits."""
        with self._monitor.lock:
            if self._first_append_s is None:
                self._first_append_s = self._clock()
            self._ended = False
            self._chunks.append(samples)
            self._queued += samples.size

    def wait_for_room(self, timeout_s: float) -> bool:
        """Wait until less than the capacity is queued; return False when the time is over."""
        with self._monitor.lock:
            return self._monitor.wait_for(lambda: self._queued < self._capacity, timeout_s)

    def end(self) -> None:
        """Say that nothing follows: silence from here on is no underrun, and no delay is needed."""
        with self._monitor.lock:
            self._ended = True

    def clear(self) -> BufferCounts:
        """Drop what is queued and end the utterance: the next block is silence.

        Returns:
            The counts of that moment.
        """
        with self._monitor.lock:
            self._chunks.clear()
            self._queued = 0
            self._forget_utterance()
            self._monitor.notify_all()
            return self._counts()

    def pause(self) -> None:
        """Answer with silence from the next block on, and keep what is queued."""
        with self._monitor.lock:
            self._paused = True

    def resume(self) -> None:
        """Go on with the next sample."""
        with self._monitor.lock:
            self._paused = False

    def read_into(self, block: NDArray[np.float32]) -> bool:
        """Fill ``block``, float32 ``[samples]``; return False once an ended utterance is over."""
        with self._monitor.lock:
            self._read_s, self._block = self._clock(), max(1, block.size)
            filled = self._take(block) if self._may_play() else 0
            block[filled:] = 0.0
            if self._started and not self._paused:
                self._silence += block.size - filled
            self._fade.apply(block, filled)
            over = self._ended and not self._queued and self._fade.over
            if over:
                self._forget_utterance()
            self._monitor.notify_all()
            return not over

    def _may_play(self) -> bool:
        if self._paused:
            return False
        if self._started or self._ended:
            return True
        if self._first_append_s is None:
            return False
        return self._clock() - self._first_append_s >= self.start_delay_s

    def _take(self, block: NDArray[np.float32]) -> int:
        filled = 0
        while self._chunks and filled < block.size:
            chunk = self._chunks[0]
            count = min(chunk.size, block.size - filled)
            block[filled : filled + count] = chunk[:count]
            filled += count
            if count == chunk.size:
                self._chunks.popleft()
            else:
                self._chunks[0] = chunk[count:]
        if filled:
            self._started = True
            if self._silence:
                self._underruns += 1
                self._underrun_samples += self._silence
                self._silence = 0
        self._queued -= filled
        self._played += filled
        return filled

    def _forget_utterance(self) -> None:
        self._first_append_s = None
        self._started = False
        self._ended = False
        self._silence = 0

    def _counts(self) -> BufferCounts:
        return BufferCounts(self._played, self._queued, self._underruns, self._underrun_samples)


class _Fade:
    """Takes the click out of the edges between sound and silence; of length 0, does nothing."""

    def __init__(self, samples: int) -> None:
        steps = (np.arange(samples) + 0.5) / max(samples, 1)
        self._rise = ((1 - np.cos(np.pi * steps)) / 2).astype(np.float32)
        self._risen = 0  # samples of sound faded in since the last silence
        self._last = np.float32(0)  # sample of sound handed out
        self._tail = self._rise[:0]  # still to come, of the fall after that sample

    @property
    def over(self) -> bool:
        """True in silence: a fall is not to come, nor under way."""
        return not self._risen and not self._tail.size

    def apply(self, block: NDArray[np.float32], filled: int) -> None:
        """Fade a block whose first ``filled`` samples are sound and whose others are 0."""
        if not self._rise.size:
            return
        if filled:
            rise = self._rise[self._risen : self._risen + filled]
            block[: rise.size] *= rise
            self._risen += rise.size
            # Rise and fall of one length add up to no more than the louder of the two.
            self._add_tail(block[:filled])
            self._last = block[filled - 1]
        if filled < block.size:
            if self._risen:
                self._risen = 0
                self._tail = self._last * (1 - self._rise)
            self._add_tail(block[filled:])

    def _add_tail(self, part: NDArray[np.float32]) -> None:
        count = min(part.size, self._tail.size)
        part[:count] += self._tail[:count]
        self._tail = self._tail[count:]
