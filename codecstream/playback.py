"""Play float32 chunks on a sound device, through sounddevice.

::

    with Player(sample_rate_hz=24000) as player:
        for pcm in chunks:
            player.write(pcm)       # waits while 10 s are queued
        player.drain()              # returns when the last sample was heard

The device asks for blocks from a thread of its own; :class:`PlaybackBuffer` answers without ever
waiting. When it has nothing, it answers with silence and counts it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from codecstream.errors import MissingDependencyError, OutputError, PlaybackError

__all__ = ["PlaybackBuffer", "PlaybackStats", "Player"]


@dataclass(frozen=True, slots=True)
class PlaybackStats:
    """Counts of one player.

    Attributes:
        played_samples: Samples of audio handed to the device.
        queued_samples: Samples waiting.
        underruns: Times that the device asked and there was nothing, between the first sample and
            the last.
        underrun_samples: Samples of silence given instead.
    """

    played_samples: int
    queued_samples: int
    underruns: int
    underrun_samples: int


class PlaybackBuffer:
    """Samples on their way to a device: one writer, one reader that never waits for samples.

    Args:
        capacity_samples: ``write`` waits while this many are queued.
        start_delay_s: Silence between the first ``write`` and the first sample; what arrives
            meanwhile is a cushion against a late chunk.
        clock: Returns seconds; for tests.
    """

    def __init__(
        self,
        capacity_samples: int,
        start_delay_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._capacity = capacity_samples
        self._start_delay_s = start_delay_s
        self._clock = clock
        self._chunks: deque[NDArray[np.float32]] = deque()
        self._queued = 0
        self._played = 0
        self._first_write_s: float | None = None
        self._ended = False
        self._dropped = False
        self._underruns = 0
        self._silence = 0  # since the last sample; an underrun only once another sample follows
        self._underrun_samples = 0
        self._changed = threading.Condition()

    @property
    def stats(self) -> PlaybackStats:
        """The counts so far."""
        with self._changed:
            return PlaybackStats(
                self._played, self._queued, self._underruns, self._underrun_samples
            )

    def write(self, pcm: NDArray[np.float32], check: Callable[[], None] = lambda: None) -> None:
        """Queue float32 ``[samples]``; wait while the queue is full.

        ``check`` is called while waiting; what it raises ends the wait. After :meth:`clear`,
        samples are dropped.

        Raises:
            OutputError: A sample is NaN or Inf.
        """
        if not np.isfinite(pcm).all():
            raise OutputError("samples hold NaN or Inf: refusing to play them")
        # A copy, as the caller may reuse its array; in range, as not every device clips by itself.
        samples = np.clip(pcm, -1.0, 1.0, dtype=np.float32)
        with self._changed:
            while self._queued >= self._capacity and not self._dropped:
                check()
                self._changed.wait(0.1)
            if self._dropped:
                return  # what a writer still had in hand is not heard after clear()
            if self._first_write_s is None:
                self._first_write_s = self._clock()
            self._ended = False
            self._chunks.append(samples)
            self._queued += samples.size

    def end(self) -> None:
        """Say that nothing follows: silence from here on is no underrun, and no delay is needed."""
        with self._changed:
            self._ended = True

    def clear(self) -> None:
        """Drop what is queued and what still comes; the next block is silence."""
        with self._changed:
            self._dropped = True
            self._chunks.clear()
            self._queued = 0
            self._ended = True
            self._changed.notify_all()

    def read_into(self, block: NDArray[np.float32]) -> bool:
        """Fill ``block``, float32 ``[samples]``; return False once everything was played."""
        with self._changed:
            filled = self._take(block) if self._may_play() else 0
            block[filled:] = 0.0
            if self._played:
                self._silence += block.size - filled
            self._changed.notify_all()
            return not (self._ended and not self._queued)

    def _may_play(self) -> bool:
        if self._played or self._ended:
            return True
        if self._first_write_s is None:
            return False
        return self._clock() - self._first_write_s >= self._start_delay_s

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
        if filled and self._silence:
            self._underruns += 1
            self._underrun_samples += self._silence
            self._silence = 0
        self._queued -= filled
        self._played += filled
        return filled


class Player:
    """Plays mono audio on a sound device.

    Args:
        sample_rate_hz: Rate of the audio.
        device: sounddevice's name or index of the device; None for the default.
        start_delay_s: See :class:`PlaybackBuffer`.
        capacity_s: Audio that may wait in the queue.
        open_stream: Opens the device's stream, with the keyword arguments of
            ``sounddevice.OutputStream``; for tests and other outputs.

    Raises:
        MissingDependencyError: sounddevice, or the PortAudio library that it needs, is missing.
        PlaybackError: There is no output device, or it does not take this format.
    """

    def __init__(
        self,
        sample_rate_hz: int,
        *,
        device: str | int | None = None,
        start_delay_s: float = 0.0,
        capacity_s: float = 10.0,
        open_stream: Callable[..., Any] | None = None,
    ) -> None:
        self._buffer = PlaybackBuffer(int(capacity_s * sample_rate_hz), start_delay_s)
        self._finished = threading.Event()
        self._failure: BaseException | None = None
        self._stop_type: type[BaseException]
        opener, self._stop_type = _sounddevice() if open_stream is None else (open_stream, _Stop)
        stream: Any = None
        try:
            stream = opener(
                samplerate=sample_rate_hz,
                channels=1,
                dtype="float32",
                device=device,
                callback=self._callback,
                finished_callback=self._finished.set,
            )
            stream.start()
        except Exception as error:  # sounddevice.PortAudioError, or ValueError for a bad name
            if stream is not None:
                stream.close()
            raise PlaybackError(
                f"no sound device can play {sample_rate_hz} Hz mono: {error}. "
                f"Decoding and WAV files need none"
            ) from error
        self._stream = stream

    @property
    def stats(self) -> PlaybackStats:
        """Samples played and queued, underruns."""
        return self._buffer.stats

    def write(self, pcm: NDArray[np.float32]) -> None:
        """Queue float32 ``[samples]``; waits while the queue is full.

        Raises:
            PlaybackError: The device has failed or was closed.
        """
        self._check()
        self._buffer.write(pcm, self._check)

    def drain(self, timeout_s: float | None = None) -> None:
        """Wait until the last sample was played; nothing can be written afterwards.

        Args:
            timeout_s: Longest wait; None for what is queued, the device's latency and 2 s.

        Raises:
            PlaybackError: The device has failed, or does not play.
        """
        self._buffer.end()
        if timeout_s is None:
            queued_s = self.stats.queued_samples / float(self._stream.samplerate)
            timeout_s = queued_s + float(self._stream.latency) + 2.0
        if not self._finished.wait(timeout_s):
            raise PlaybackError(f"the sound device did not finish within {timeout_s:.1f} s")
        self._raise_failure()

    def abort(self) -> None:
        """Silence now: drop what is queued, also in the device; the player cannot be used again."""
        self._buffer.clear()
        self._stream.abort()
        self._finished.set()

    def close(self) -> None:
        """Release the device; what is still queued is dropped."""
        self._buffer.clear()
        self._stream.close()
        self._finished.set()

    def __enter__(self) -> Player:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _callback(self, out: NDArray[np.float32], frames: int, times: Any, status: Any) -> None:
        try:
            more = self._buffer.read_into(out[:, 0])
        except BaseException as error:  # in a foreign thread: keep it for the caller
            self._failure = error
            out[:] = 0.0
            raise self._stop_type from error
        if not more:
            raise self._stop_type  # the device plays what it has, then reports the end

    def _check(self) -> None:
        self._raise_failure()
        if self._finished.is_set():
            raise PlaybackError("the sound device has stopped: open a new Player")

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise PlaybackError(f"playback failed: {self._failure!r}") from self._failure


class _Stop(Exception):
    """What the callback raises to end a stream that is not sounddevice's."""


def _sounddevice() -> tuple[Callable[..., Any], type[BaseException]]:
    try:
        import sounddevice
    except ImportError as error:
        raise MissingDependencyError(
            f"playing sound needs sounddevice ({error}): pip install 'codecstream[play]'"
        ) from error
    except OSError as error:
        raise MissingDependencyError(
            f"playing sound needs the PortAudio library ({error}): "
            f"install it with the system's package manager, such as libportaudio2"
        ) from error
    return sounddevice.OutputStream, sounddevice.CallbackStop
