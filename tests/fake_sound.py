"""A sound system with a clock of its own, in place of the module sounddevice.

Devices play only when a test says so, refuse formats, hold samples for their latency, and get
lost. They behave as PortAudio's: after the callback has raised its stop exception they play what
they hold, then call ``finished_callback``; an aborted stream drops what it holds; a stream must be
stopped before it can start again; devices are looked for only when the library starts.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray

from codecstream.playback import Player

T = TypeVar("T")

RATE = 24_000
FRAME = 1920


class PortAudioError(Exception):
    pass


class CallbackStop(Exception):
    pass


def set_event() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


@dataclass
class FakeDevice:
    name: str = "Speakers"
    rates_hz: tuple[float, ...] | None = None  # None: any
    channels: tuple[int, ...] = (1, 2)
    default_rate_hz: float = 48_000.0
    granted_hz: float | None = None  # None: as asked
    latency_s: float = 0.02
    lets_go: threading.Event = field(default_factory=set_event)

    def check(self, rate_hz: float, channels: int) -> None:
        if channels not in self.channels:
            raise PortAudioError("Invalid number of channels", -9998)
        if self.rates_hz is not None and rate_hz not in self.rates_hz:
            raise PortAudioError("Invalid sample rate", -9997)


@dataclass
class FakeSound:
    """The module; ``devices[default]`` is the default device, and -1 means none."""

    devices: list[FakeDevice] = field(default_factory=lambda: [FakeDevice()])
    default: int = 0
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.streams: list[FakeStream] = []
        self.opened: list[tuple[float, int]] = []  # formats tried
        self.plugged: list[FakeDevice] | None = None  # what is found when it starts again
        self.PortAudioError = PortAudioError
        self.CallbackStop = CallbackStop

    def install(self, patch: pytest.MonkeyPatch) -> FakeSound:
        patch.setitem(sys.modules, "sounddevice", self)
        return self

    def clock(self) -> float:
        return self.now_s

    def player(self, **settings: Any) -> Player:
        """A player whose time is this system's: it passes only while a device plays."""
        return Player(RATE, clock=self.clock, **settings)

    @property
    def stream(self) -> FakeStream:
        """The stream opened last."""
        return self.streams[-1]

    def RawOutputStream(self, **options: Any) -> FakeStream:
        self.opened.append((options["samplerate"], options["channels"]))
        device = self.devices[options["device"]]
        device.check(options["samplerate"], options["channels"])
        self.streams.append(FakeStream(self, device, options))
        return self.streams[-1]

    def check_output_settings(
        self, *, device: int, channels: int, dtype: str, samplerate: float
    ) -> None:
        self.devices[device].check(samplerate, channels)

    def query_devices(self, device: str | int | None = None, kind: str | None = None) -> Any:
        infos: list[dict[str, Any]] = [
            {
                "index": index,
                "name": each.name,
                "hostapi": 0,
                "max_output_channels": max(each.channels, default=0),
                "default_samplerate": each.default_rate_hz,
            }
            for index, each in enumerate(self.devices)
        ]
        if kind is None:
            return tuple(infos)
        if device is None:
            if self.default < 0:
                raise PortAudioError("Error querying device -1")
            return infos[self.default]
        found = [
            info
            for info in infos
            if info["max_output_channels"]
            and (
                device == info["index"]
                or (isinstance(device, str) and device.lower() in info["name"].lower())
            )
        ]
        if len(found) != 1 and isinstance(device, int):
            raise PortAudioError(f"Error querying device {device}")
        if len(found) != 1:
            raise ValueError(f"{len(found)} output devices matching {device!r}")
        return found[0]

    def query_hostapis(self, index: int) -> dict[str, str]:
        return {"name": "FakeAudio"}

    def _terminate(self) -> None:
        for stream in self.streams:
            stream.active = False

    def _initialize(self) -> None:
        if self.plugged is not None:
            self.devices = self.plugged
            self.default = 0 if self.plugged else -1


class FakeStream:
    def __init__(self, sound: FakeSound, device: FakeDevice, options: dict[str, Any]) -> None:
        self._sound = sound
        self._device = device
        self._callback: Callable[..., None] = options["callback"]
        self._finished: Callable[[], None] = options["finished_callback"]
        self.samplerate = device.granted_hz or options["samplerate"]
        self.channels = options["channels"]
        self.latency = device.latency_s
        self.active = False
        self.stopped = True
        self.lost = False
        self.start_fails = False
        self.calls: list[str] = []
        self.blocks: list[NDArray[np.float32]] = []  # given by the callback, [frames, channels]
        self._held: list[NDArray[np.float32]] = []
        self._heard: list[NDArray[np.float32]] = []

    def start(self) -> None:
        self.calls.append("start")
        if self.start_fails or self.lost:
            raise PortAudioError("Unanticipated host error", -9999)
        if not self.stopped:
            raise PortAudioError("Stream is not stopped", -9982)
        self.active, self.stopped = True, False

    def abort(self) -> None:
        self.calls.append("abort")
        was_active, self.active, self.stopped = self.active, False, True
        self._held.clear()
        if was_active:
            self._finished()

    def close(self) -> None:
        self.calls.append("close")
        self._device.lets_go.wait()
        self.active, self.stopped = False, True
        self._held.clear()

    def unplug(self, *, silently: bool) -> None:
        """Take the device away; ``silently``, its callback has not come for 2 s, no more."""
        self.lost = True
        if silently:
            self._sound.now_s += 2
        else:
            self.active = False
            self._finished()

    def pull(self, frames: int, *, underflow: bool = False) -> NDArray[np.float32]:
        """Ask for one block, as the device's thread would, and return its first channel."""
        assert self.active and not self.lost
        out = np.full((frames, self.channels), 9.0, np.float32)
        try:
            status = SimpleNamespace(output_underflow=underflow)
            self._callback(memoryview(out).cast("B"), frames, None, status)
        except CallbackStop:
            self.active = False
        self._sound.now_s += frames / self.samplerate
        self.blocks.append(out)
        self._held.append(out[:, 0])
        if not self.active:
            self._heard += self._held
            self._held.clear()
            self._finished()
        while sum(block.size for block in self._held) > self.latency * self.samplerate:
            self._heard.append(self._held.pop(0))
        return out[:, 0]

    def play(self, seconds: float, frames: int = 480) -> NDArray[np.float32]:
        """Ask for blocks for that long; return what the callback gave."""
        count = round(seconds * self.samplerate / frames)
        return np.concatenate([self.pull(frames) for _ in range(count)])

    @property
    def given(self) -> NDArray[np.float32]:
        """Everything that the callback gave, of the first channel."""
        return np.concatenate([np.empty(0, np.float32), *(block[:, 0] for block in self.blocks)])

    @property
    def heard(self) -> NDArray[np.float32]:
        """What the listener has heard so far."""
        return np.concatenate([np.empty(0, np.float32), *self._heard])


class Threads:
    """Runs calls in threads, and unlike an executor does not wait for one that hangs."""

    def __enter__(self) -> Threads:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        future: Future[T] = Future()

        def work() -> None:
            try:
                future.set_result(call(*arguments))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        return future


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until ``condition`` holds, for 10 s at most."""
    until_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until_s, "waited for 10 s"
        time.sleep(0.001)


def play_until_done(
    sound: FakeSound,
    call: Future[T],
    *,
    frames: int = 1024,
    ready: Callable[[], bool] = lambda: True,
) -> T:
    """Once ``ready``, play with the device that is open until ``call`` is done.

    The device here plays as fast as it can: without ``ready`` it may be seconds ahead before the
    call has even begun.
    """
    until_s = time.monotonic() + 10
    while not call.done():
        assert time.monotonic() < until_s, "waited for 10 s"
        stream = sound.stream
        if ready() and stream.active and not stream.lost:
            stream.pull(frames)
        else:
            time.sleep(0.001)
    return call.result()


def ramp(samples: int, start: int = 0) -> NDArray[np.float32]:
    """Samples that tell their place; none is 0."""
    return (np.arange(start + 1, start + samples + 1) / 2**20).astype(np.float32)


def speech(seconds: float) -> NDArray[np.float32]:
    """A signal without steps, so that a step is a seam."""
    t = np.arange(round(seconds * RATE)) / RATE
    return (0.4 * np.sin(2 * np.pi * 220 * t) + 0.2 * np.sin(2 * np.pi * 1730 * t)).astype(
        np.float32
    )


def drain_playing(sound: FakeSound, player: Player, frames: int = 1024) -> None:
    """Drain while the device plays; it starts when the player knows that nothing follows."""

    def ready() -> bool:
        return player._utterance.ended or not player._utterance.written

    play_until_done(sound, Threads().submit(player.drain), frames=frames, ready=ready)


def sounding(heard: NDArray[np.float32]) -> NDArray[np.float32]:
    return heard[heard != 0]
