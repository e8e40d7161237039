"""How much a player says that it has not played yet: what a start policy goes by."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest
from fake_sound import FRAME, RATE, FakeDevice, FakeSound, Threads, drain_playing, ramp
from hypothesis import given
from hypothesis import strategies as st

from codecstream import PlaybackError
from codecstream.playback_buffer import PlaybackBuffer

soxr = pytest.importorskip("soxr", reason="needs: pip install 'codecstream[play]'")
BLOCK_S = 0.02


@pytest.fixture
def sound(monkeypatch: pytest.MonkeyPatch) -> FakeSound:
    return FakeSound().install(monkeypatch)


@given(st.integers(1, 5000), st.integers(1, 700), st.floats(0, 0.999), st.integers(0, 20))
def test_it_is_the_time_until_the_device_finds_too_little(
    samples: int, block: int, within_block: float, blocks: int
) -> None:
    now_s = [0.0]
    rate_hz = 1000.0
    buffer = PlaybackBuffer(10**6, clock=lambda: now_s[0])
    buffer.append(np.ones(samples, np.float32))
    for _ in range(min(blocks, samples // block)):
        buffer.read_into(np.empty(block, np.float32))
        now_s[0] += block / rate_hz
    read = min(blocks, samples // block) * block
    if not read:
        assert buffer.ahead_s(rate_hz) == samples / rate_hz
        return
    now_s[0] -= (1 - within_block) * block / rate_hz  # since the last block was asked for
    ahead_s = buffer.ahead_s(rate_hz)
    next_read_s = (1 - within_block) * block / rate_hz
    short_s = next_read_s + (samples - read) // block * block / rate_hz
    assert ahead_s == pytest.approx(short_s, abs=1e-9)


def test_an_utterance_from_its_first_sample_to_its_last(sound: FakeSound) -> None:
    with sound.player() as player:
        assert player.ahead_s() is None
        player.write(ramp(FRAME))
        assert player.ahead_s() == pytest.approx(0.08), "it begins when the device asks"
        sound.stream.play(BLOCK_S)
        assert player.ahead_s() == pytest.approx(0.08 - BLOCK_S, abs=0.01)
        player.write(ramp(FRAME, FRAME))
        assert player.ahead_s() == pytest.approx(0.16 - BLOCK_S, abs=0.01)
        drain_playing(sound, player, 480)
        assert player.ahead_s() is None, "nothing follows"
        player.write(ramp(FRAME))
        assert player.ahead_s() == pytest.approx(0.08)


def test_what_ran_dry_does_not_play_and_what_is_written_then_does(sound: FakeSound) -> None:
    with sound.player() as player:
        player.write(ramp(FRAME))
        sound.stream.play(0.08)
        assert player.ahead_s() == 0.0, "the last block is being heard"
        sound.stream.play(0.02)
        assert player.ahead_s() is None
        player.write(ramp(FRAME, FRAME))
        assert player.ahead_s() == pytest.approx(0.08)
        sound.stream.play(0.02)
        assert player.ahead_s() == pytest.approx(0.06, abs=0.01)
        assert player.stats.underruns == 1


def test_a_start_delay_is_ahead_too(sound: FakeSound) -> None:
    with sound.player(start_delay_s=0.5) as player:
        player.write(ramp(RATE))
        assert player.ahead_s() == pytest.approx(1.5)
        sound.stream.play(0.3)
        assert player.ahead_s() == pytest.approx(1.2)
        sound.stream.play(0.4)
        assert player.ahead_s() == pytest.approx(0.8, abs=0.011)


def test_paused_it_never_ends(sound: FakeSound) -> None:
    with sound.player() as player:
        player.pause()
        assert player.ahead_s() is None, "there is nothing to go on with"
        player.write(ramp(FRAME))
        assert player.ahead_s() == math.inf
        player.resume()
        assert player.ahead_s() == pytest.approx(0.08)
        sound.stream.play(BLOCK_S)
        player.pause()
        sound.stream.play(1.0)
        assert player.ahead_s() == math.inf
        player.resume()
        assert player.ahead_s() == pytest.approx(0.06, abs=0.01)
        player.pause()
        player.clear()
        assert player.ahead_s() is None


def test_in_seconds_of_the_device_whatever_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = FakeSound([FakeDevice(rates_hz=(48_000,))]).install(monkeypatch)
    with sound.player() as player:
        player.write(ramp(RATE))
        assert player.ahead_s() == pytest.approx(1.02, abs=0.03), "what the filter holds included"
        sound.stream.play(0.5)
        assert player.ahead_s() == pytest.approx(0.5, abs=0.06)


def test_another_device_goes_on_with_what_is_left(sound: FakeSound) -> None:
    sound.plugged = [FakeDevice("Headset", rates_hz=(48_000,))]
    with sound.player(on_lost="default") as player:
        player.write(ramp(RATE))
        sound.stream.play(0.5)
        sound.stream.unplug(silently=False)
        player.write(ramp(FRAME, RATE))
        assert player.ahead_s() == pytest.approx(0.58, abs=0.06)
        assert player.stats.devices_lost == 1


def test_it_answers_while_the_player_waits_for_its_device(
    sound: FakeSound, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client asks it from its event loop, which must not wait for a device."""
    player = sound.player()
    player.write(ramp(FRAME))
    with player._lock:  # as while a device is started again, which may take seconds
        asked = Threads().submit(player.ahead_s)
        assert asked.result(5) == pytest.approx(0.08)
    player.close()
    assert player.ahead_s() is None
    with pytest.raises(PlaybackError):
        player.write(ramp(FRAME))


def test_asking_beside_writing_and_playing_never_fails(sound: FakeSound) -> None:
    with sound.player() as player:
        answers: list[Any] = []
        stop = [False]

        def ask() -> None:
            while not stop[0]:
                answers.append(player.ahead_s())

        asking = Threads().submit(ask)
        for index in range(50):
            player.write(ramp(FRAME, index * FRAME))
            sound.stream.play(0.06)
        until_s = time.monotonic() + 10
        while not answers and time.monotonic() < until_s:
            time.sleep(0.001)
        stop[0] = True
        asking.result(10)
    assert answers and all(answer is None or 0 <= answer < 4 for answer in answers)
