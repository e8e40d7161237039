"""One open stream of a sound device: asks for blocks, and tells when something is wrong with it.

It is opened with the format nearest to the one wanted that the device takes, and says which that
is. PortAudio reports the loss of a device in no uniform way: the stream may end, or its callback
may just stop coming. Both are seen here.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from codecstream.devices import (
    COMMON_RATES_HZ,
    OutputDevice,
    channel_choices,
    find_device,
    load_sounddevice,
)
from codecstream.errors import PlaybackError
from codecstream.monitor import Flag

__all__ = ["RESTART_S", "DeviceStream", "StreamFormat", "within"]

# A device that has not asked for that long is lost. Blocks last some hundredths of a second.
STALLED_S = 1.5
# For a machine that slept: the clock has jumped, and the device needs a moment to ask again.
GRACE_S = 0.25
# What a device may need to play what it holds, beyond the latency that it claims.
FINISH_S = 1.5
# PortAudio can wait for ever for a device that is gone; it is left behind then. To start a device,
# such as a headset by radio, may rightly take longer than to let it go.
RELEASE_S = 0.5
RESTART_S = 2.0

# Codes of PortAudio with which another rate or number of channels is worth a try: unanticipated
# host error, invalid number of channels, invalid sample rate, sample format not supported.
FORMAT_ERRORS = frozenset({-9999, -9998, -9997, -9994})

# Those that are open: the device's thread calls into them, and would call into nothing where the
# last reference to one is lost before it is closed.
_open_streams: set[DeviceStream] = set()


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """What a device really granted.

    Attributes:
        device: Name of the device.
        rate_hz: Its sample rate, as read back.
        channels: Channels, all of which play the same.
        latency_s: Time from a sample's way into the device until it is heard, as the device
            claims; what is heard cannot be stopped earlier than that.
    """

    device: str
    rate_hz: float
    channels: int
    latency_s: float


class DeviceStream:
    """An open output stream.

    Args:
        device: sounddevice's index or name of the device; None for the default.
        rate_hz: The rate wanted.
        latency_s: The latency wanted.
        clock: Returns seconds.

    Raises:
        MissingDependencyError: sounddevice, or the PortAudio library that it needs, is missing.
        PlaybackError: There is no such device, or it takes none of the formats tried.
    """

    def __init__(
        self,
        device: str | int | None,
        rate_hz: int,
        latency_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._clock = clock
        self._read_into: Callable[[NDArray[np.float32]], bool]
        self._stop_type: type[Exception] = load_sounddevice().CallbackStop
        self._called = Flag()
        self._called_s = 0.0
        self._over_s: float | None = None  # when the last block was handed out
        self.finished = Flag()
        self.failure: BaseException | None = None
        self.underflows = 0
        self.device = find_device(device)
        self._stream = self._open(rate_hz, latency_s)
        self.format = StreamFormat(
            device=self.device.name,
            rate_hz=float(self._stream.samplerate),
            channels=int(self._stream.channels),
            latency_s=float(self._stream.latency),
        )
        _open_streams.add(self)

    @property
    def over(self) -> bool:
        """True once ``read_into`` has returned False; the device may still play what it holds."""
        return self._over_s is not None

    @property
    def played_out(self) -> bool:
        """True once the device has played that, too; :meth:`restart` comes next."""
        return self.over and self.finished.is_set()

    def start(self, read_into: Callable[[NDArray[np.float32]], bool]) -> None:
        """Play what ``read_into`` writes into its float32 ``[samples]`` until it returns False.

        Raises:
            PlaybackError: The device cannot be started.
        """
        self._read_into = read_into
        try:
            self._start()
        except Exception as error:  # PortAudioError, which needs sounddevice to be named
            self.close()
            raise PlaybackError(f"{self.format.device!r} cannot be started: {error}") from error

    def restart(self) -> str | None:
        """Start again after the end, or to drop what the device holds.

        Returns:
            None, or the reason why the device is lost.
        """

        def again() -> None:
            # After its end, too, a stream must be stopped before it can start, says PortAudio.
            self._stream.abort()
            self._start()

        try:
            if within(RESTART_S, again):
                return None
            return f"it did not start again within {RESTART_S:g} s"
        except Exception as error:  # PortAudioError, which needs sounddevice to be named
            return f"it cannot be started again: {error}"

    def trouble(self) -> str | None:
        """Return the reason why this device must be given up, or None where all is well."""
        now_s = self._clock()
        if self._over_s is not None:
            late = now_s - self._over_s > self.format.latency_s + FINISH_S
            if late and not self.finished.is_set():
                return "it did not finish playing what it holds"
            return None
        if self.finished.is_set() and not self._active():
            return "it stopped by itself"
        silent_s = now_s - self._called_s
        if silent_s > STALLED_S:
            self._called.clear()
            if not self._called.wait(GRACE_S):
                return f"it has asked for no samples for {silent_s + GRACE_S:.1f} s"
        return None

    def close(self) -> bool:
        """Release the device; return False where it does not let go, and is left behind."""

        def release() -> None:
            try:
                self._stream.close()
            finally:
                _open_streams.discard(self)

        with contextlib.suppress(Exception):  # where that fails, there is nothing to release
            return within(RELEASE_S, release)
        return True

    def _open(self, rate_hz: int, latency_s: float) -> Any:
        first: Exception | None = None
        formats = itertools.product(_rates(self.device, rate_hz), channel_choices(self.device))
        for rate, channels in formats:
            try:
                # Raw: an array of the buffer is one line here, and no release of sounddevice
                # has to keep up with numpy for it.
                return load_sounddevice().RawOutputStream(
                    samplerate=rate,
                    channels=channels,
                    dtype="float32",
                    device=self.device.index,
                    latency=latency_s,
                    callback=self._callback,
                    finished_callback=self.finished.set,
                )
            except Exception as error:  # PortAudioError, which needs sounddevice to be named
                first = first or error
                if error.args[1:] and error.args[1] not in FORMAT_ERRORS:
                    break  # busy or gone: no format helps
        tried = ", ".join(f"{rate:g}" for rate in _rates(self.device, rate_hz))
        raise PlaybackError(
            f"{self.device.name!r} does not play {rate_hz} Hz mono: {first}. Rates tried, in Hz: "
            f"{tried}. Choose another device; decoding and WAV files need none"
        ) from first

    def _start(self) -> None:
        self._over_s = None
        self.finished.clear()
        self._called_s = self._clock()
        self._stream.start()

    def _active(self) -> bool:
        with contextlib.suppress(Exception):  # a device that is gone cannot say
            return bool(self._stream.active)
        return False

    def _callback(self, buffer: Any, frames: int, times: Any, status: Any) -> None:
        out = np.frombuffer(buffer, np.float32).reshape(-1, self.format.channels)
        self._called_s = self._clock()
        self._called.set()
        if status and status.output_underflow:
            self.underflows += 1  # what the device missed was not taken from the queue
        try:
            more = self._read_into(out[:, 0])
            out[:, 1:] = out[:, :1]
        except BaseException as error:  # in a foreign thread: keep it for the caller
            self.failure = error
            out[:] = 0.0
            raise self._stop_type from error
        if not more:
            self.finished.clear()  # of a restart whose news came late
            self._over_s = self._clock()
            raise self._stop_type  # the device plays what it has, then reports the end


def _rates(device: OutputDevice, rate_hz: int) -> list[float]:
    """Return the rates to try, best first."""
    return list(dict.fromkeys([rate_hz, device.default_rate_hz, *COMMON_RATES_HZ]))


def within(limit_s: float, action: Callable[[], object]) -> bool:
    """Do ``action``, and raise what it raises; return False where it takes longer and goes on."""
    problems: list[BaseException] = []

    def work() -> None:
        try:
            action()
        except BaseException as error:
            problems.append(error)

    worker = threading.Thread(target=work, name="codecstream-device", daemon=True)
    worker.start()
    worker.join(limit_s)
    if problems:
        raise problems[0]
    return not worker.is_alive()
