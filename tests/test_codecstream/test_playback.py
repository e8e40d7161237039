"""The player with a device that is well: playing, pausing, clearing. A fake sound system."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from fake_sound import (
    FRAME,
    RATE,
    FakeDevice,
    FakeSound,
    Threads,
    drain_playing,
    ramp,
    sounding,
    speech,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from codecstream import OutputError, PlaybackError
from codecstream.playback import Player

soxr = pytest.importorskip("soxr", reason="needs: pip install 'codecstream[play]'")


@pytest.fixture
def sound(monkeypatch: pytest.MonkeyPatch) -> FakeSound:
    return FakeSound().install(monkeypatch)


# The life of an utterance


@pytest.mark.case(46)
@pytest.mark.parametrize("frames", [1, 7, 55])
def test_case_46_drain_returns_after_the_last_sample_was_heard(
    sound: FakeSound, frames: int
) -> None:
    sound.devices[0].latency_s = 0.4
    with sound.player() as player:
        for frame in range(frames):
            player.write(ramp(FRAME, frame * FRAME))
        drain_playing(sound, player)
        assert np.array_equal(sounding(sound.stream.heard), ramp(frames * FRAME))
        assert sound.stream.heard.size / RATE <= frames * 0.08 + 0.4 + 0.2
        assert player.stats.played_samples == frames * FRAME and player.stats.underruns == 0
    assert sound.stream.calls == ["start", "close"]


def test_utterance_after_utterance_on_one_player(sound: FakeSound) -> None:
    with sound.player() as player:
        for index in range(3):
            for frame in range(5):
                player.write(ramp(FRAME, (5 * index + frame) * FRAME))
            drain_playing(sound, player)
            assert np.array_equal(sounding(sound.stream.heard), ramp(5 * (index + 1) * FRAME))
            player.drain()  # nothing to wait for
        assert player.stats.played_samples == 15 * FRAME
        assert (player.stats.queued_samples, player.stats.underruns) == (0, 0)
    assert len(sound.streams) == 1, "opening a device takes long: it is done once"


def test_write_waits_while_the_queue_is_full(sound: FakeSound) -> None:
    player = sound.player(capacity_s=1000 / RATE)
    player.write(ramp(1000))
    writing = Threads().submit(player.write, ramp(500, 1000))
    time.sleep(0.1)
    assert not writing.done() and player.stats.queued_samples == 1000
    sound.stream.pull(600)
    writing.result(5)
    assert player.stats.queued_samples == 900
    player.close()


def test_the_callers_array_may_change_afterwards(sound: FakeSound) -> None:
    with sound.player() as player:
        pcm = ramp(100)
        player.write(pcm)
        pcm[:] = 7
        assert np.array_equal(sound.stream.pull(100), ramp(100))


def test_what_is_no_sound_is_refused_and_what_is_too_loud_is_clipped(sound: FakeSound) -> None:
    with sound.player() as player:
        with pytest.raises(OutputError, match="NaN or Inf"):
            player.write(np.array([0.5, np.inf], np.float32))
        with pytest.raises(ValueError, match=r"mono.*not \(2, 1\)"):
            player.write(np.zeros((2, 1), np.float32))
        player.write(np.array([-1.5, 0.5, 1.5], np.float32))
        assert sound.stream.pull(4).tolist() == [-1.0, 0.5, 1.0, 0.0]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"capacity_s": 0}, "capacity must be above 0"),
        ({"start_delay_s": -1}, "delay at least 0"),
        ({"fade_ms": 51}, "between 0 and 50, not 51"),
        ({"on_lost": "retry"}, "'raise' or 'default', not 'retry'"),
    ],
)
def test_settings_out_of_range_are_refused(
    sound: FakeSound, setting: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Player(RATE, **setting)
    assert not sound.streams


def test_the_start_delay_can_be_set_while_waiting(sound: FakeSound) -> None:
    with sound.player(start_delay_s=60) as player:
        player.write(ramp(RATE))
        assert not sound.stream.play(1).any()
        with pytest.raises(ValueError, match="at least 0, not -1"):
            player.start_delay_s = -1
        player.start_delay_s = 1.5
        heard = sound.stream.play(1)
        assert np.flatnonzero(heard)[0] == pytest.approx(RATE / 2, abs=480)
        assert player.stats.underruns == 0


@pytest.mark.parametrize("device_hz", [24_000, 48_000])
def test_a_fade_is_of_the_length_asked_for_at_the_devices_rate(
    sound: FakeSound, device_hz: int
) -> None:
    sound.devices[0] = FakeDevice(rates_hz=(device_hz,))
    with sound.player(fade_ms=5) as player:
        player.write(np.full(RATE // 10, 0.5, np.float32))
        drain_playing(sound, player, 100)
    heard = sounding(sound.stream.heard)
    fade = device_hz // 200
    assert heard.size == device_hz // 10 + fade, "the fall is heard to its end, too"
    assert heard[0] < 0.001 and heard[-1] < 0.001
    assert np.abs(np.diff(heard[: 2 * fade])).max() < 0.02
    assert heard[fade : 2 * fade] == pytest.approx(0.5, abs=0.02)


@pytest.mark.case(47)
def test_case_47_a_stall_of_the_decoder(sound: FakeSound) -> None:
    with sound.player() as player:
        player.write(ramp(RATE))
        sound.stream.play(1.6)
        player.write(ramp(RATE, RATE))
        drain_playing(sound, player, 480)
        heard = sound.stream.heard
        assert np.array_equal(sounding(heard), ramp(2 * RATE)), "none skipped, none twice"
        assert np.flatnonzero(heard)[-1] + 1 == 2 * RATE + 0.6 * RATE, "late by the stall only"
        stats = player.stats
    assert (stats.underruns, stats.underrun_samples) == (1, 0.6 * RATE)


def test_the_devices_own_underflow_is_a_count_not_an_error(sound: FakeSound) -> None:
    with sound.player() as player:
        player.write(ramp(960))
        sound.stream.pull(480, underflow=True)
        sound.stream.pull(480)
        assert (player.stats.device_underflows, player.stats.underruns) == (1, 0)
        assert player.stats.played_samples == 960


# Interrupting


@pytest.mark.case(10)
@pytest.mark.parametrize("latency_s", [0.02, 0.09, 0.4])
@pytest.mark.parametrize("device_hz", [24_000, 44_100])
def test_case_10_clear_is_heard_within_100_ms_and_the_next_utterance_is_clean(
    sound: FakeSound, latency_s: float, device_hz: int
) -> None:
    sound.devices[0] = FakeDevice(rates_hz=(device_hz,), latency_s=latency_s)
    with sound.player() as player:
        player.write(ramp(3 * RATE))
        sound.stream.play(1.0)
        heard_before = sound.stream.heard.size
        player.clear()
        assert player.stats.queued_samples == 0
        assert not sound.stream.play(1.0).any(), "the next block is silent"
        after = sound.stream.heard[heard_before:]
        assert np.count_nonzero(after) / device_hz <= 0.1
        played = player.stats.played_samples

        player.write(speech(0.4))
        drain_playing(sound, player)
        again = sound.stream.given[-round(0.7 * device_hz) :]
        lone = sound.player()
        lone.write(speech(0.4))
        drain_playing(sound, lone)
        lone.close()
        assert np.array_equal(sounding(again), sounding(sound.stream.given))
        assert player.stats.played_samples == played + 0.4 * RATE
        assert player.stats.underruns == 0


@pytest.mark.case(10)
def test_case_10_a_writer_that_waited_is_not_heard_after_clear(sound: FakeSound) -> None:
    with sound.player(capacity_s=0.1) as player:
        player.write(ramp(RATE))
        with Threads() as pool:
            waiting = pool.submit(player.write, ramp(500, RATE))
            time.sleep(0.05)
            assert not waiting.done()
            player.clear()
            waiting.result(5)
        assert not sound.stream.pull(4800).any() and player.stats.queued_samples == 0


@pytest.mark.parametrize("latency_s", [0.02, 0.4])
def test_clear_ends_a_drain(sound: FakeSound, latency_s: float) -> None:
    sound.devices[0].latency_s = latency_s
    with sound.player() as player, Threads() as pool:
        player.write(ramp(RATE))
        draining = pool.submit(player.drain)
        time.sleep(0.05)
        sound.stream.pull(480)
        player.clear()
        draining.result(5)
        assert not sound.stream.pull(480).any()


call_steps = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(1, 4000)),
        st.tuples(st.just("pull"), st.integers(1, 2000)),
        st.tuples(st.sampled_from(["pause", "resume"]), st.just(0)),
    ),
    max_size=30,
)


@settings(deadline=None)
@given(calls=call_steps, device_hz=st.sampled_from([24_000, 44_100, 16_000]))
def test_pause_and_resume_lose_and_repeat_nothing(
    calls: list[tuple[str, int]], device_hz: int
) -> None:
    """Where the rates are equal, each sample is known by its value; else the whole is compared."""
    with pytest.MonkeyPatch.context() as patch:
        sound = FakeSound([FakeDevice(rates_hz=(device_hz,))]).install(patch)
        written = 0
        paused = False
        with Player(RATE) as player:
            for name, size in calls:
                if name == "write":
                    player.write(ramp(size, written))
                    written += size
                elif name == "pull":
                    assert not (sound.stream.pull(size).any() and paused)
                else:
                    getattr(player, name)()
                    paused = name == "pause"
            player.resume()
            drain_playing(sound, player)
            assert player.stats.played_samples == written and player.stats.queued_samples == 0
        heard = sounding(sound.stream.heard)
        if device_hz == RATE:
            assert np.array_equal(heard, ramp(written))
        elif written:
            whole = sounding(soxr.resample(ramp(written), RATE, device_hz))
            assert heard.size == whole.size
            assert np.abs(heard - whole).max() < 1e-4 * np.abs(whole).max()


def test_writing_goes_on_while_paused_until_the_queue_is_full(sound: FakeSound) -> None:
    with sound.player(capacity_s=1.0) as player, Threads() as pool:
        player.write(ramp(FRAME))
        sound.stream.pull(480)
        player.pause()
        for frame in range(1, 13):
            player.write(ramp(FRAME, frame * FRAME))
        waiting = pool.submit(player.write, ramp(FRAME, 13 * FRAME))
        assert not sound.stream.play(2.0).any()
        assert not waiting.done() and RATE <= player.stats.queued_samples <= RATE + FRAME
        player.resume()
        sound.stream.play(0.04)
        waiting.result(5)
        drain_playing(sound, player)
        assert np.array_equal(sounding(sound.stream.heard), ramp(14 * FRAME))
        assert player.stats.underruns == 0, "paused time is no underrun"


@pytest.mark.parametrize("wait", ["write", "drain"])
def test_close_ends_every_wait(sound: FakeSound, wait: str) -> None:
    player = sound.player(capacity_s=0.01)
    player.write(ramp(RATE))
    player.pause()
    arguments = (ramp(10),) if wait == "write" else ()
    with Threads() as pool:
        waiting = pool.submit(getattr(player, wait), *arguments)
        time.sleep(0.05)
        player.close()
        player.close()
        with pytest.raises(PlaybackError, match="closed: open a new Player"):
            waiting.result(5)
    with pytest.raises(PlaybackError, match="closed"):
        player.write(ramp(1))
    assert sound.stream.calls.count("close") == 1
    assert player.stats.queued_samples == 0
