"""Playback against a fake device; no sound card, no real time."""

from __future__ import annotations

import builtins
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from codecstream import MissingDependencyError, PlaybackError
from codecstream.playback import PlaybackBuffer, Player

RATE = 24_000


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class FakeDevice:
    """A device that asks for blocks when the test says so, and plays them after a latency.

    It behaves as PortAudio does: after the callback has raised its stop exception it plays what
    it holds, then calls ``finished_callback``.
    """

    latency = 0.4

    def __init__(self, **options: Any) -> None:
        self.samplerate = options["samplerate"]
        self.options = options
        self.callback: Callable[..., None] = options["callback"]
        self.finished = options["finished_callback"]
        self.heard: list[NDArray[np.float32]] = []
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def abort(self) -> None:
        self.calls.append("abort")
        self.finished()

    def close(self) -> None:
        self.calls.append("close")

    def pull(self, frames: int) -> NDArray[np.float32]:
        """Ask for one block, as the device's thread would."""
        block = np.full((frames, 1), 9.0, np.float32)
        try:
            self.callback(block, frames, None, None)
        except Exception:
            self.finished()
        self.heard.append(block[:, 0])
        return block[:, 0]


def open_player(**options: Any) -> tuple[Player, FakeDevice]:
    devices: list[FakeDevice] = []

    def opener(**kwargs: Any) -> FakeDevice:
        devices.append(FakeDevice(**kwargs))
        return devices[0]

    player = Player(RATE, open_stream=opener, **options)
    return player, devices[0]


def ramp(samples: int, start: int = 0) -> NDArray[np.float32]:
    return (np.arange(start, start + samples) / 2**20).astype(np.float32)


@pytest.mark.parametrize("block", [1, 333, 480, 4096])
def test_every_block_size_plays_each_sample_once(block: int) -> None:
    buffer = PlaybackBuffer(10**6)
    for start in (0, 1000, 1001):
        buffer.write(ramp({0: 1000, 1000: 1, 1001: 2839}[start], start))
    buffer.end()
    heard = np.empty(0, np.float32)
    more = True
    while more:
        out = np.empty(block, np.float32)
        more = buffer.read_into(out)
        heard = np.concatenate([heard, out])
    assert np.array_equal(heard[:3840], ramp(3840))
    assert not heard[3840:].any()
    assert buffer.stats.played_samples == 3840
    assert (buffer.stats.underruns, buffer.stats.underrun_samples) == (0, 0)


@pytest.mark.case(47)
def test_case_47_starvation_is_silence_and_counted_once() -> None:
    buffer = PlaybackBuffer(10**6)
    out = np.empty(480, np.float32)
    buffer.read_into(out)  # before the first sample: silence, but nobody starves
    buffer.write(ramp(720))
    buffer.read_into(out)
    buffer.read_into(out)  # 240 samples, then dry
    assert np.array_equal(out[:240], ramp(240, 480)) and not out[240:].any()
    for _ in range(30):
        buffer.read_into(out)
    buffer.write(ramp(480, 720))
    buffer.read_into(out)
    assert np.array_equal(out, ramp(480, 720)), "speech resumes at the next sample"
    buffer.end()
    buffer.read_into(out)  # silence after the end is no underrun
    assert buffer.stats.underruns == 1
    assert buffer.stats.underrun_samples == 240 + 30 * 480


def test_start_delay_lets_a_cushion_build_up() -> None:
    clock = Clock()
    buffer = PlaybackBuffer(10**6, start_delay_s=1.84, clock=clock)
    out = np.empty(480, np.float32)
    clock.now_s = 5.0
    buffer.write(ramp(4800))
    clock.now_s = 6.8
    buffer.read_into(out)
    assert not out.any() and buffer.stats.underruns == 0
    clock.now_s = 6.85
    buffer.read_into(out)
    assert np.array_equal(out, ramp(480))


def test_a_text_shorter_than_the_delay_plays_when_it_ends() -> None:
    buffer = PlaybackBuffer(10**6, start_delay_s=60, clock=Clock())
    buffer.write(ramp(480))
    buffer.end()
    out = np.empty(480, np.float32)
    assert buffer.read_into(out) is False
    assert np.array_equal(out, ramp(480))


def test_write_waits_while_the_queue_is_full() -> None:
    buffer = PlaybackBuffer(1000)
    buffer.write(ramp(1000))
    writer = threading.Thread(target=buffer.write, args=(ramp(500, 1000),))
    writer.start()
    writer.join(0.2)
    assert writer.is_alive() and buffer.stats.queued_samples == 1000
    buffer.read_into(np.empty(600, np.float32))
    writer.join(5)
    assert not writer.is_alive() and buffer.stats.queued_samples == 900


@pytest.mark.case(10)
def test_case_10_a_writer_that_waited_is_not_heard_after_clear() -> None:
    buffer = PlaybackBuffer(1000)
    buffer.write(ramp(1000, 1))
    writer = threading.Thread(target=buffer.write, args=(ramp(500, 1001),))
    writer.start()
    writer.join(0.1)
    assert writer.is_alive()
    buffer.clear()
    writer.join(5)
    assert not writer.is_alive()
    out = np.empty(500, np.float32)
    assert buffer.read_into(out) is False
    assert not out.any() and buffer.stats.queued_samples == 0


def test_the_callers_array_may_change_afterwards() -> None:
    buffer = PlaybackBuffer(1000)
    pcm = ramp(100)
    buffer.write(pcm)
    pcm[:] = 7
    out = np.empty(100, np.float32)
    buffer.read_into(out)
    assert np.array_equal(out, ramp(100))


@pytest.mark.case(46)
@pytest.mark.parametrize("frames", [1, 7, 55])
def test_case_46_drain_returns_after_the_last_sample(frames: int) -> None:
    player, device = open_player()
    with player:
        for _ in range(frames):
            player.write(ramp(1920))
        done = threading.Event()
        waiter = threading.Thread(target=lambda: (player.drain(), done.set()))
        waiter.start()
        while not done.wait(0.001):
            device.pull(1024)
        waiter.join(5)
    heard = np.concatenate(device.heard)
    assert np.array_equal(heard[: frames * 1920], np.tile(ramp(1920), frames))
    assert device.calls == ["start", "close"]
    with pytest.raises(PlaybackError, match="open a new Player"):
        player.write(ramp(1))


@pytest.mark.case(10)
def test_case_10_abort_is_silence_at_once() -> None:
    player, device = open_player()
    player.write(ramp(3 * RATE))
    device.pull(480)
    player.abort()
    assert not device.pull(480).any()
    assert player.stats.queued_samples == 0
    assert "abort" in device.calls


@pytest.mark.case(49)
def test_case_49_a_failing_callback_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    player, device = open_player()
    player.write(ramp(RATE))

    def broken(block: NDArray[np.float32]) -> bool:
        block[:] = 0.5
        raise ZeroDivisionError("in block 10")

    monkeypatch.setattr(player._buffer, "read_into", broken)
    assert not device.pull(480).any(), "the block of the failure is silent"
    for call in (lambda: player.write(ramp(1)), player.drain):
        with pytest.raises(PlaybackError, match="in block 10"):
            call()


def test_a_device_that_never_finishes_is_noticed() -> None:
    player, _ = open_player()
    player.write(ramp(480))
    with pytest.raises(PlaybackError, match="did not finish within"):
        player.drain(timeout_s=0.05)


@pytest.mark.case(44)
def test_case_44_no_device_names_what_still_works() -> None:
    def opener(**kwargs: Any) -> FakeDevice:
        raise RuntimeError("Error querying device -1")

    with pytest.raises(PlaybackError, match=r"24000 Hz mono.*querying device.*WAV files need none"):
        Player(RATE, open_stream=opener)


@pytest.mark.case(44)
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ImportError("No module named 'sounddevice'"), r"pip install 'codecstream\[play\]'"),
        (OSError("PortAudio library not found"), "libportaudio2"),
    ],
)
def test_case_44_a_missing_library_is_named(
    monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "sounddevice":
            raise error
        return real(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "sounddevice", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingDependencyError, match=message):
        Player(RATE)
