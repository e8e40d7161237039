"""Play float32 chunks on a sound device, through sounddevice.

::

    with Player(sample_rate_hz=24000) as player:
        for pcm in chunks:
            player.write(pcm)       # waits while 10 s are queued
        player.drain()              # returns when the last sample was heard

A device that refuses the rate or a single channel gets what it takes: the sound is resampled, and
every channel plays it. A device that goes away, or fails in any other way, ends in an error within
3 s of the call that waits for it, never in a wait without end.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from codecstream.device_stream import RESTART_S, DeviceStream, StreamFormat, within
from codecstream.devices import accepted_rates_hz, refresh_devices
from codecstream.errors import (
    DeviceLostError,
    MissingDependencyError,
    OutputError,
    PlaybackError,
)
from codecstream.monitor import new_lock
from codecstream.playback_buffer import PlaybackBuffer
from codecstream.resample import Resampler
from codecstream.sinks import ClosingSink

__all__ = ["PlaybackStats", "Player", "StreamFormat"]

# Longest time until silence after clear(). A device that holds more is made to drop it.
SILENT_WITHIN_S = 0.1
# The system needs a moment to name a new default device when the old one is gone.
MOVE_TRIES = 3
MOVE_PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class PlaybackStats:
    """Counts of one player, in samples at the rate of the audio that is written.

    Attributes:
        played_samples: Samples handed to the device; equal to those written after ``drain``.
        queued_samples: Samples waiting, with those that the resampler holds.
        underruns: Times that the device asked and there was nothing, between an utterance's first
            sample and its last. Pauses are none.
        underrun_samples: Silence given instead.
        device_underflows: Times that the device itself ran dry as this process answered late;
            nothing is lost by it, but it is heard.
        devices_lost: Devices that went away and were replaced.
    """

    played_samples: int = 0
    queued_samples: int = 0
    underruns: int = 0
    underrun_samples: int = 0
    device_underflows: int = 0
    devices_lost: int = 0


class Player(ClosingSink):
    """Plays mono audio on a sound device; a :class:`codecstream.sinks.Sink`.

    One thread writes and drains. Any thread may call everything else meanwhile, but no signal's
    handler in the thread that writes: it would come in the middle of it. Let it set a flag.

    Args:
        sample_rate_hz: Rate of the audio, in Hz.
        device: Index, name or part of the name of the device, see
            :func:`codecstream.devices.list_devices`; None for the default.
        start_delay_s: Silence between an utterance's first chunk and its first sample, in
            seconds; what arrives meanwhile is a cushion against a late chunk. 0 where a policy
            decides when to begin. Where the device needs resampling, what the filter holds back
            comes on top, about 40 ms.
        capacity_s: ``write`` waits while so many seconds are queued.
        latency_s: How far ahead the device shall ask for samples, in seconds. What it has asked
            for can be stopped no more, so this bounds how fast ``clear`` and ``pause`` are heard.
        fade_ms: Fade at every edge between silence and sound, in milliseconds, at most 50; 0
            leaves every sample as it is.
        on_lost: What to do when the device goes away: ``"raise"``, or go on with the ``"default"``
            device of that moment. Looking for it ends every other stream that this process has
            open through sounddevice.
        clock: Returns seconds; for tests.

    Raises:
        ValueError: A setting is out of its range.
        MissingDependencyError: sounddevice, PortAudio or, where the device refuses the rate, soxr
            is missing.
        PlaybackError: There is no such device, or it takes none of the formats tried.
    """

    def __init__(
        self,
        sample_rate_hz: int,
        *,
        device: str | int | None = None,
        start_delay_s: float = 0.0,
        capacity_s: float = 10.0,
        latency_s: float = 0.05,
        fade_ms: float = 0.0,
        on_lost: Literal["raise", "default"] = "raise",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if sample_rate_hz <= 0 or capacity_s <= 0 or latency_s < 0 or start_delay_s < 0:
            raise ValueError(
                f"rate and capacity must be above 0, latency and delay at least 0, not "
                f"{sample_rate_hz} Hz, {capacity_s} s, {latency_s} s and {start_delay_s} s"
            )
        if not 0 <= fade_ms <= 50:
            raise ValueError(f"fade_ms must be between 0 and 50, not {fade_ms}")
        if on_lost not in ("raise", "default"):
            raise ValueError(f"on_lost must be 'raise' or 'default', not {on_lost!r}")
        self._rate_hz = sample_rate_hz
        self._start_delay_s = start_delay_s
        self._capacity_s = capacity_s
        self._latency_s = latency_s
        self._fade_s = fade_ms / 1000
        self._on_lost = on_lost
        self._clock = clock
        # The device's thread takes the buffer's lock only, never this one.
        self._lock = new_lock()
        self._error: PlaybackError | None = None  # why nothing can be played any more
        self._clears = 0
        self._earlier = PlaybackStats()  # of utterances and devices that are over
        self._utterance = _Utterance()
        self._open(device)

    @property
    def format(self) -> StreamFormat:
        """The device in use, and the format that it has granted."""
        return self._stream.format

    @property
    def start_delay_s(self) -> float:
        """See the class. A new value counts at once where the utterance has not started."""
        return self._start_delay_s

    @start_delay_s.setter
    def start_delay_s(self, value: float) -> None:
        if value < 0:
            raise ValueError(f"start_delay_s must be at least 0, not {value}")
        with self._lock:
            self._start_delay_s = value
            self._buffer.start_delay_s = value + self._resampler.hold_back_s

    @property
    def stats(self) -> PlaybackStats:
        """What was played so far, what waits, and what went wrong."""
        with self._lock:
            return self._stats()

    def ahead_s(self) -> float | None:
        """Return how long the sound that was written lasts until the device finds none, in seconds.

        What a :mod:`codecstream.policy` goes by, so ``connect`` takes it:
        ``connect(url, program, policy=AdaptivePolicy(), ahead_s=player.ahead_s)``. Any thread may
        call it, and it never waits for the device.

        Returns:
            None while there is nothing to play, ``math.inf`` while there is and it is paused.
        """
        buffer, rate_hz = self._source
        return buffer.ahead_s(rate_hz)

    def write(self, pcm: NDArray[np.float32]) -> None:
        """Queue float32 ``[samples]``; waits while the queue is full.

        With the queue full and the player paused, that is until it is resumed, cleared or closed.
        Where :meth:`clear` is called meanwhile, ``pcm`` is dropped. Louder than [-1, 1] is clipped.

        Raises:
            OutputError: A sample is NaN or Inf.
            ValueError: ``pcm`` has more than one axis.
            DeviceLostError: The device has gone away.
            PlaybackError: The player is closed, or the device's callback has failed.
        """
        samples = np.array(pcm, np.float32)  # a copy: the caller may reuse its array
        if samples.ndim != 1:
            raise ValueError(f"pcm must be mono, of shape [samples], not {samples.shape}")
        if not np.isfinite(samples).all():
            raise OutputError("samples hold NaN or Inf: refusing to play them")
        clears = self._clears
        while True:
            with self._lock:
                if self._clears != clears:
                    return
                self._look_after_device()
                if self._stream.played_out:
                    reason = self._stream.restart()
                    if reason is not None:
                        self._replace_device(reason)
                stream, buffer = self._stream, self._buffer
                if not stream.over and buffer.wait_for_room(0):
                    self._utterance.forget(self._played())
                    self._queue(samples)
                    return
            if stream.over:
                stream.finished.wait(0.05)
            else:
                buffer.wait_for_room(0.1)

    def drain(self) -> None:
        """Wait until the last sample was heard; the next ``write`` starts a new utterance.

        Returns early where :meth:`clear` is called, and waits as long as the player is paused.

        Raises:
            DeviceLostError: The device has gone away.
            PlaybackError: The player is closed, or the device's callback has failed.
        """
        with self._lock:
            clears = self._clears
            self._look_after_device()
            if not self._utterance.written:
                return
            self._end()
        while True:
            with self._lock:
                if self._clears != clears:
                    return
                self._look_after_device()
                if self._stream.played_out:
                    self._settle(self._utterance.written)
                    return
                finished = self._stream.finished
            finished.wait(0.05)

    def clear(self) -> None:
        """Silence: drop what is queued; what is written next starts a new utterance.

        The next block that the device asks for is silent, and a device that holds more than
        100 ms drops it. A ``write`` that waits returns, and what it had in hand is dropped. A
        pause stays a pause.
        """
        with self._lock:
            if self._error is not None:
                return
            self._clears += 1
            self._buffer.clear()
            self._settle(self._played())
            self._resampler.reset()
            holds_too_much = self._stream.format.latency_s > SILENT_WITHIN_S
            if holds_too_much and not self._stream.played_out:
                self._stream.restart()  # where that fails, what is called next will see it, too

    def pause(self) -> None:
        """Silence from the next block on; nothing is lost, and writing goes on until it is full."""
        with self._lock:
            self._buffer.pause()

    def resume(self) -> None:
        """Go on with the sample that comes next."""
        with self._lock:
            self._buffer.resume()

    def close(self) -> None:
        """Release the device; what is still queued is dropped. May be called twice."""
        with self._lock:
            if self._error is None:
                self._give_up(PlaybackError("the player was closed: open a new Player"))

    def _open(self, device: str | int | None) -> None:
        stream = DeviceStream(device, self._rate_hz, self._latency_s, self._clock)
        rate_hz = stream.format.rate_hz
        try:
            resampler = Resampler(self._rate_hz, rate_hz)
        except MissingDependencyError as error:
            stream.close()
            accepted = ", ".join(str(rate) for rate in accepted_rates_hz(stream.device))
            raise MissingDependencyError(
                f"{stream.format.device!r} refuses {self._rate_hz} Hz; it takes {accepted} Hz, and "
                f"{error}"
            ) from error
        buffer = PlaybackBuffer(
            max(1, round(self._capacity_s * rate_hz)),
            start_delay_s=self._start_delay_s + resampler.hold_back_s,
            fade_samples=round(self._fade_s * rate_hz),
            clock=self._clock,
        )
        stream.start(buffer.read_into)
        self._stream, self._resampler, self._buffer = stream, resampler, buffer
        self._source = (buffer, rate_hz)  # both at once, for a caller without the lock
        self._settled = 0  # samples that the buffer had handed out before this utterance

    def _queue(self, pcm: NDArray[np.float32]) -> None:
        self._utterance.append(pcm)
        self._queue_device(self._resampler.push(pcm))

    def _queue_device(self, samples: NDArray[np.float32]) -> None:
        if samples.size:
            # In range: not every device clips by itself, and a filter may swing over a little.
            self._buffer.append(np.clip(samples, -1.0, 1.0))

    def _end(self) -> None:
        if not self._utterance.ended:
            self._queue_device(self._resampler.finish())
            self._buffer.end()
            self._utterance.ended = True

    def _played(self) -> int:
        """Return how many samples of the utterance the device was given."""
        given = self._buffer.counts.played - self._settled
        played = round(given * self._rate_hz / self._stream.format.rate_hz)
        return min(played, self._utterance.written)

    def _stats(self) -> PlaybackStats:
        earlier, counts, played = self._earlier, self._buffer.counts, self._played()
        silence = counts.underrun_samples * self._rate_hz / self._stream.format.rate_hz
        return PlaybackStats(
            played_samples=earlier.played_samples + played,
            queued_samples=self._utterance.written - played,
            underruns=earlier.underruns + counts.underruns,
            underrun_samples=earlier.underrun_samples + round(silence),
            device_underflows=earlier.device_underflows + self._stream.underflows,
            devices_lost=earlier.devices_lost,
        )

    def _settle(self, played: int) -> None:
        """Close the books of the utterance, of which so many samples were played."""
        total = self._earlier.played_samples + played
        self._earlier = dataclasses.replace(self._earlier, played_samples=total)
        self._settled = self._buffer.counts.played
        self._utterance = _Utterance()
        self._buffer.start_delay_s = self._start_delay_s + self._resampler.hold_back_s

    def _look_after_device(self) -> None:
        """Raise where nothing can be played any more; move to another device where asked to.

        Comes before every step that waits for the device.
        """
        if self._error is not None:
            raise self._error
        failure = self._stream.failure
        if failure is not None:
            error = PlaybackError(f"playback failed: {failure!r}")
            error.__cause__ = failure
            self._give_up(error)
            raise error
        reason = self._stream.trouble()
        if reason is not None:
            self._replace_device(reason)

    def _give_up(self, error: PlaybackError) -> bool:
        """Release the device, and let every later call fail with ``error``."""
        self._error = error
        self._buffer.clear()  # wakes a writer
        self._settle(self._played())
        return self._stream.close()

    def _replace_device(self, reason: str) -> None:
        utterance, played, stats = self._utterance, self._played(), self._stats()
        device, paused = self.format.device, self._buffer.paused

        def lost(then: str) -> DeviceLostError:
            return DeviceLostError(
                f"the sound device {device!r} is lost: {reason}. {then}",
                device=device,
                unplayed_samples=utterance.written - played,
            )

        error = lost("Open a new Player, or let this one go on elsewhere with on_lost='default'")
        released = self._give_up(error)
        if self._on_lost == "raise":
            raise error
        try:
            if not released:
                raise PlaybackError("PortAudio does not let go of the lost one")
            self._open_default()
        except (PlaybackError, MissingDependencyError) as problem:
            self._error = lost(f"No other one could be opened: {problem}")
            raise self._error from problem
        self._error = None
        self._earlier = dataclasses.replace(stats, devices_lost=stats.devices_lost + 1)
        if paused:
            self._buffer.pause()
        rest = utterance.rest(played)
        if rest:
            self._buffer.start_delay_s = 0.0  # the listener has waited long enough
        for pcm in rest:
            self._queue(pcm)
        if utterance.ended:
            self._end()

    def _open_default(self) -> None:
        for tries_left in reversed(range(MOVE_TRIES)):
            if not within(RESTART_S, refresh_devices):
                raise PlaybackError(f"PortAudio did not start again within {RESTART_S:g} s")
            try:
                return self._open(None)
            except PlaybackError:
                if not tries_left:
                    raise
                time.sleep(MOVE_PAUSE_S)


class _Utterance:
    """What was written of one utterance, as it was written, for as long as it is not played.

    Where the device is lost, that goes to the next one, which may take another rate.
    """

    def __init__(self) -> None:
        self.written = 0
        self.ended = False
        self._chunks: deque[NDArray[np.float32]] = deque()
        self._first = 0  # samples before those chunks

    def append(self, pcm: NDArray[np.float32]) -> None:
        """Add float32 ``[samples]``, which must not change afterwards."""
        self._chunks.append(pcm)
        self.written += pcm.size
        self.ended = False

    def forget(self, played: int) -> None:
        """Let go of chunks of which every sample is among the first ``played``."""
        while self._chunks and self._first + self._chunks[0].size <= played:
            self._first += self._chunks.popleft().size

    def rest(self, played: int) -> list[NDArray[np.float32]]:
        """Return the chunks that follow the first ``played`` samples."""
        self.forget(played)
        chunks = list(self._chunks)
        if chunks:
            chunks[0] = chunks[0][played - self._first :]
        return chunks
