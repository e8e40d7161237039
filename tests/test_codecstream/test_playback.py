"""The player against a fake sound system with a clock of its own; no sound card."""

from __future__ import annotations

import builtins
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from fake_sound import FakeDevice, FakeSound, while_playing
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from codecstream import DeviceLostError, MissingDependencyError, OutputError, PlaybackError
from codecstream import device_stream as device_stream_module
from codecstream.playback import Player

soxr = pytest.importorskip("soxr", reason="needs: pip install 'codecstream[play]'")

RATE = 24_000
FRAME = 1920


@pytest.fixture
def sound(monkeypatch: pytest.MonkeyPatch) -> FakeSound:
    return FakeSound().install(monkeypatch)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device is given up after 0.15 s instead of 1.75."""
    monkeypatch.setattr(device_stream_module, "STALLED_S", 0.1)
    monkeypatch.setattr(device_stream_module, "GRACE_S", 0.05)


def ramp(samples: int, start: int = 0) -> NDArray[np.float32]:
    """Samples that tell their place; none is 0."""
    return (np.arange(start + 1, start + samples + 1) / 2**20).astype(np.float32)


def speech(seconds: float) -> NDArray[np.float32]:
    """A signal without steps, so that a step is a seam."""
    t = np.arange(round(seconds * RATE)) / RATE
    return (0.4 * np.sin(2 * np.pi * 220 * t) + 0.2 * np.sin(2 * np.pi * 1730 * t)).astype(
        np.float32
    )


def drain(sound: FakeSound, player: Player, frames: int = 1024) -> None:
    """Drain while the device plays; it starts when the player knows that nothing follows."""

    def ready() -> bool:
        return player._utterance.ended or not player._utterance.written

    while_playing(sound, player.drain, frames=frames, ready=ready)


def sounding(heard: NDArray[np.float32]) -> NDArray[np.float32]:
    return heard[heard != 0]


# The life of an utterance


@pytest.mark.case(46)
@pytest.mark.parametrize("frames", [1, 7, 55])
def test_case_46_drain_returns_after_the_last_sample_was_heard(
    sound: FakeSound, frames: int
) -> None:
    sound.devices[0].latency_s = 0.4
    with Player(RATE) as player:
        for frame in range(frames):
            player.write(ramp(FRAME, frame * FRAME))
        drain(sound, player)
        assert np.array_equal(sounding(sound.stream.heard), ramp(frames * FRAME))
        assert sound.stream.heard.size / RATE <= frames * 0.08 + 0.4 + 0.2
        assert player.stats.played_samples == frames * FRAME and player.stats.underruns == 0
    assert sound.stream.calls == ["start", "close"]


def test_utterance_after_utterance_on_one_player(sound: FakeSound) -> None:
    with Player(RATE) as player:
        for index in range(3):
            for frame in range(5):
                player.write(ramp(FRAME, (5 * index + frame) * FRAME))
            drain(sound, player)
            assert np.array_equal(sounding(sound.stream.heard), ramp(5 * (index + 1) * FRAME))
            player.drain()  # nothing to wait for
        assert player.stats.played_samples == 15 * FRAME
        assert (player.stats.queued_samples, player.stats.underruns) == (0, 0)
    assert len(sound.streams) == 1, "opening a device takes long: it is done once"


def test_write_waits_while_the_queue_is_full(sound: FakeSound) -> None:
    player = Player(RATE, capacity_s=1000 / RATE)
    player.write(ramp(1000))
    writer = threading.Thread(target=player.write, args=(ramp(500, 1000),))
    writer.start()
    writer.join(0.2)
    assert writer.is_alive() and player.stats.queued_samples == 1000
    sound.stream.pull(600)
    writer.join(5)
    assert not writer.is_alive() and player.stats.queued_samples == 900
    player.close()


def test_the_callers_array_may_change_afterwards(sound: FakeSound) -> None:
    with Player(RATE) as player:
        pcm = ramp(100)
        player.write(pcm)
        pcm[:] = 7
        assert np.array_equal(sound.stream.pull(100), ramp(100))


def test_what_is_no_sound_is_refused_and_what_is_too_loud_is_clipped(sound: FakeSound) -> None:
    with Player(RATE) as player:
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
    with Player(RATE, start_delay_s=60, clock=sound.clock) as player:
        player.write(ramp(RATE))
        assert not sound.stream.play(1).any()
        player.start_delay_s = 1.5
        heard = sound.stream.play(1)
        assert np.flatnonzero(heard)[0] == pytest.approx(RATE / 2, abs=480)
        assert player.stats.underruns == 0


@pytest.mark.case(47)
def test_case_47_a_stall_of_the_decoder(sound: FakeSound) -> None:
    with Player(RATE) as player:
        player.write(ramp(RATE))
        sound.stream.play(1.6)
        player.write(ramp(RATE, RATE))
        drain(sound, player, 480)
        heard = sound.stream.heard
        assert np.array_equal(sounding(heard), ramp(2 * RATE)), "none skipped, none twice"
        assert np.flatnonzero(heard)[-1] + 1 == 2 * RATE + 0.6 * RATE, "late by the stall only"
        stats = player.stats
    assert (stats.underruns, stats.underrun_samples) == (1, 0.6 * RATE)


def test_the_devices_own_underflow_is_a_count_not_an_error(sound: FakeSound) -> None:
    with Player(RATE) as player:
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
    with Player(RATE) as player:
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
        drain(sound, player)
        again = sound.stream.given[-round(0.7 * device_hz) :]
        lone = Player(RATE)
        lone.write(speech(0.4))
        drain(sound, lone)
        lone.close()
        assert np.array_equal(sounding(again), sounding(sound.stream.given))
        assert player.stats.played_samples == played + 0.4 * RATE
        assert player.stats.underruns == 0


@pytest.mark.case(10)
def test_case_10_a_writer_that_waited_is_not_heard_after_clear(sound: FakeSound) -> None:
    with Player(RATE, capacity_s=0.1) as player:
        player.write(ramp(RATE))
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(player.write, ramp(500, RATE))
            time.sleep(0.05)
            assert not waiting.done()
            player.clear()
            waiting.result(5)
        assert not sound.stream.pull(4800).any() and player.stats.queued_samples == 0


@pytest.mark.parametrize("latency_s", [0.02, 0.4])
def test_clear_ends_a_drain(sound: FakeSound, latency_s: float) -> None:
    sound.devices[0].latency_s = latency_s
    with Player(RATE) as player, ThreadPoolExecutor(1) as pool:
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
            drain(sound, player)
            assert player.stats.played_samples == written and player.stats.queued_samples == 0
        heard = sounding(sound.stream.heard)
        if device_hz == RATE:
            assert np.array_equal(heard, ramp(written))
        elif written:
            whole = sounding(soxr.resample(ramp(written), RATE, device_hz))
            assert heard.size == whole.size
            assert np.abs(heard - whole).max() < 1e-4 * np.abs(whole).max()


def test_writing_goes_on_while_paused_until_the_queue_is_full(sound: FakeSound) -> None:
    with Player(RATE, capacity_s=1.0) as player, ThreadPoolExecutor(1) as pool:
        player.write(ramp(FRAME))
        sound.stream.pull(480)
        player.pause()
        for frame in range(1, 13):
            player.write(ramp(FRAME, frame * FRAME))
        waiting = pool.submit(lambda: [player.write(ramp(FRAME, n * FRAME)) for n in (13, 14, 15)])
        assert not sound.stream.play(2.0).any()
        assert not waiting.done() and player.stats.queued_samples <= RATE + FRAME
        player.resume()
        while not waiting.done():
            sound.stream.pull(480)
            time.sleep(0.001)
        drain(sound, player)
        assert np.array_equal(sounding(sound.stream.heard), ramp(16 * FRAME))
        assert player.stats.underruns == 0, "paused time is no underrun"


@pytest.mark.parametrize("wait", ["write", "drain"])
def test_close_ends_every_wait(sound: FakeSound, wait: str) -> None:
    player = Player(RATE, capacity_s=0.01)
    player.write(ramp(RATE))
    player.pause()
    arguments = (ramp(10),) if wait == "write" else ()
    with ThreadPoolExecutor(1) as pool:
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


# Formats


@pytest.mark.case(45)
@pytest.mark.parametrize("channels", [(1, 2), (2,), (8,)])
@pytest.mark.parametrize("device_hz", [48_000, 44_100, 16_000])
def test_case_45_a_device_that_refuses_24_khz_gets_what_it_takes(
    sound: FakeSound, device_hz: int, channels: tuple[int, ...]
) -> None:
    sound.devices[0] = FakeDevice(rates_hz=(device_hz,), channels=channels)
    pcm = speech(3.1)
    chunks = [3840, 7680, 15360, 30720, 7680, 9120]
    with Player(RATE) as player:
        assert (player.format.rate_hz, player.format.channels) == (device_hz, channels[0])
        for chunk in np.split(pcm, np.cumsum(chunks)[:-1]):
            player.write(chunk)
            sound.stream.pull(777)
        drain(sound, player, 333)
        assert player.stats.played_samples == pcm.size and player.stats.underruns == 0
    heard = np.concatenate(sound.stream.blocks)
    heard = heard[np.flatnonzero(heard[:, 0])[0] :]
    assert all(np.array_equal(heard[:, 0], heard[:, each]) for each in range(channels[0]))
    ideal = soxr.resample(pcm, RATE, device_hz)
    assert abs(ideal.size - pcm.size * device_hz / RATE) <= 1
    assert np.abs(heard[: ideal.size, 0] - ideal).max() < 0.5 * 10 ** (-90 / 20)
    assert not heard[ideal.size :].any()
    assert seam_ratio(heard[: ideal.size, 0], np.cumsum(chunks)[:-1] * device_hz / RATE) <= 1.5


def seam_ratio(pcm: NDArray[np.float32], seams: NDArray[np.float64]) -> float:
    """Return the worst step at a seam over the 99th percentile of steps elsewhere (case 15)."""
    steps = np.abs(np.diff(pcm))
    at = np.concatenate([np.arange(int(seam) - 3, int(seam) + 4) for seam in seams])
    return float(steps[at].max() / np.percentile(np.delete(steps, at), 99))


@pytest.mark.case(45)
def test_case_45_the_rate_really_granted_counts_not_the_one_asked_for(sound: FakeSound) -> None:
    sound.devices[0] = FakeDevice(granted_hz=48_000)  # says yes to 24 kHz and runs at 48
    with Player(RATE) as player:
        assert player.format.rate_hz == 48_000
        player.write(speech(1.0))
        drain(sound, player)
    first, last = np.flatnonzero(sound.stream.given)[[0, -1]]
    assert last - first == pytest.approx(48_000, abs=2)


def test_mono_at_the_audios_own_rate_is_tried_first_then_more_channels_then_rates(
    sound: FakeSound,
) -> None:
    sound.devices[0] = FakeDevice(rates_hz=(32_000,), channels=(2, 6), default_rate_hz=44_100)
    with Player(RATE) as player:
        assert (player.format.rate_hz, player.format.channels) == (32_000, 2)
    assert sound.opened[:4] == [(24_000, 1), (24_000, 2), (24_000, 6), (44_100, 1)]


@pytest.mark.case(45)
def test_case_45_without_soxr_the_accepted_rates_are_listed(
    sound: FakeSound, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound.devices[0] = FakeDevice(rates_hz=(44_100, 48_000))
    monkeypatch.setitem(sys.modules, "soxr", None)
    message = r"'Speakers' refuses 24000 Hz; it takes 48000, 44100 Hz.*codecstream\[play\]"
    with pytest.raises(MissingDependencyError, match=message):
        Player(RATE)
    assert sound.stream.calls == ["close"]


@pytest.mark.case(45)
def test_case_45_a_device_without_a_format_names_the_rates_tried(sound: FakeSound) -> None:
    sound.devices[0] = FakeDevice(rates_hz=())
    message = r"'Speakers' does not play 24000 Hz mono: .*Invalid sample rate.*24000, 48000, 44100"
    with pytest.raises(PlaybackError, match=message):
        Player(RATE)


def test_a_busy_device_is_not_asked_for_every_format(
    sound: FakeSound, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(self: FakeDevice, rate_hz: float, channels: int) -> None:
        raise sound.PortAudioError("Device unavailable", -9985)

    monkeypatch.setattr(FakeDevice, "check", busy)
    with pytest.raises(PlaybackError, match="Device unavailable"):
        Player(RATE)
    assert len(sound.opened) == 1


# Failures


@pytest.mark.case(49)
@pytest.mark.parametrize("call", ["write", "drain", "full"])
def test_case_49_a_failing_callback_reaches_the_caller(
    sound: FakeSound, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    player = Player(RATE, capacity_s=1.0)
    player.write(ramp(RATE))
    stream, read = player._stream, player._buffer.read_into

    def broken(block: NDArray[np.float32]) -> bool:
        if len(sound.stream.blocks) == 10:
            block[:] = 0.5
            raise ZeroDivisionError("in block 10")
        return read(block)

    monkeypatch.setattr(stream, "_read_into", broken)
    with ThreadPoolExecutor(1) as pool:
        if call == "full":
            waiting = pool.submit(player.write, ramp(RATE))
            waiting = pool.submit(player.write, ramp(RATE))
        elif call == "drain":
            waiting = pool.submit(player.drain)
        time.sleep(0.05)
        while sound.stream.active:
            sound.stream.pull(480)
        failed_s = time.monotonic()
        with pytest.raises(PlaybackError, match="in block 10") as caught:
            player.write(ramp(1)) if call == "write" else waiting.result(5)
        assert time.monotonic() - failed_s < 1
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert len(sound.stream.blocks) == 11
    assert not sound.stream.blocks[-1].any(), "the block of the failure is silent"
    assert "close" in sound.stream.calls
    with pytest.raises(PlaybackError, match="in block 10"):
        player.drain()


@pytest.mark.parametrize("call", ["write", "drain"])
def test_a_device_whose_callback_stops_coming_is_an_error_within_3_s(
    sound: FakeSound, call: str
) -> None:
    """The one test with the real limits, in real time."""
    player = Player(RATE, capacity_s=0.5)
    player.write(ramp(RATE))
    sound.stream.pull(480)
    sound.stream.unplug(silently=True)
    started_s = time.monotonic()
    with pytest.raises(DeviceLostError, match=r"'Speakers' is lost: .*no samples for 1\.\d s"):
        player.drain() if call == "drain" else player.write(ramp(RATE, RATE))
    assert time.monotonic() - started_s < 3


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("silently", [True, False])
def test_a_lost_device_is_told_with_what_was_not_played(sound: FakeSound, silently: bool) -> None:
    player = Player(RATE)
    player.write(ramp(RATE))
    sound.stream.pull(480)
    sound.stream.unplug(silently=silently)
    with pytest.raises(DeviceLostError) as caught:
        while True:
            player.write(ramp(10))
            time.sleep(0.01)
    assert caught.value.device == "Speakers"
    assert caught.value.unplayed_samples >= RATE - 480
    assert ("stopped by itself" in str(caught.value)) is not silently
    with pytest.raises(DeviceLostError):
        player.drain()
    player.close()
    assert sound.stream.calls.count("close") == 1


@pytest.mark.usefixtures("impatient")
def test_a_device_that_never_finishes_is_lost(
    sound: FakeSound, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_stream_module, "FINISH_S", 0.1)
    player = Player(RATE)
    player.write(ramp(100))
    monkeypatch.setattr(sound.stream, "_finished", lambda: None)
    with pytest.raises(DeviceLostError, match="did not finish"):
        drain(sound, player)


@pytest.mark.usefixtures("impatient")
def test_a_slow_start_and_a_sleeping_machine_are_no_loss(sound: FakeSound) -> None:
    """After sleep the clock has jumped, and the device needs a moment to ask again."""
    player = Player(RATE, clock=sound.clock)
    player.write(ramp(100))
    sound.stream.pull(50)
    sound.now_s += 3600
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(player.write, ramp(100, 100))
        time.sleep(0.01)
        sound.stream.pull(10)
        waiting.result(5)
    player.close()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("silently", [True, False])
@pytest.mark.parametrize("new_hz", [24_000, 44_100])
@pytest.mark.parametrize("ends_in", ["write", "drain"])
def test_playing_goes_on_with_the_new_default(
    sound: FakeSound, silently: bool, new_hz: int, ends_in: str
) -> None:
    """A headset is unplugged in mid-sentence: the rest is heard from the speakers."""
    sound.devices[0] = FakeDevice("Headset", rates_hz=(48_000,))
    pcm = speech(2.0)
    with Player(RATE, on_lost="default", capacity_s=1.0) as player:
        player.write(pcm[:RATE])
        headset = sound.stream
        time.sleep(0.06)  # longer than the start waits for what the resampler holds back
        headset.play(0.5)
        played = player.stats.played_samples
        assert played == pytest.approx(0.5 * RATE, abs=2)
        player.pause()  # which must be so on the new device, too
        sound.plugged = [FakeDevice("Speakers", rates_hz=(new_hz,), channels=(2,))]
        headset.unplug(silently=silently)
        with ThreadPoolExecutor(1) as pool:
            if ends_in == "write":
                pool.submit(player.write, pcm[RATE : 2 * RATE]).result(5)
                call = pool.submit(player.drain)
            else:
                call = pool.submit(player.drain)
            while sound.stream is headset or not player._utterance.ended:
                time.sleep(0.001)
            assert not sound.stream.play(0.1).any()
            player.resume()
            while not call.done():
                if sound.stream.active:
                    sound.stream.pull(480)
                else:
                    time.sleep(0.001)
            call.result()
        assert "close" in headset.calls
        assert player.format.device == "Speakers"
        assert player.stats.devices_lost == 1 and player.stats.underruns == 0
        expected = pcm[played : 2 * RATE if ends_in == "write" else RATE]
        assert player.stats.played_samples == played + expected.size
        heard = sounding(sound.stream.given)
        if new_hz == RATE:
            assert np.array_equal(heard, sounding(expected)), "none lost, none twice"
        else:
            whole = sounding(soxr.resample(expected, RATE, new_hz))
            assert heard.size == whole.size and np.abs(heard - whole).max() < 1e-5

        player.write(ramp(FRAME))  # and the next utterance, too
        drain(sound, player)
        assert player.stats.played_samples == played + expected.size + FRAME


@pytest.mark.usefixtures("impatient")
def test_moving_without_another_device_is_an_error(sound: FakeSound) -> None:
    player = Player(RATE, on_lost="default")
    player.write(ramp(100))
    sound.plugged = []
    sound.stream.unplug(silently=False)
    with pytest.raises(DeviceLostError, match="'Speakers' is lost") as caught:
        player.drain()
    assert "no default sound device" in str(caught.value.__cause__)


@pytest.mark.usefixtures("impatient")
def test_a_device_that_does_not_let_go_holds_up_nobody(sound: FakeSound) -> None:
    sound.devices[0].close_hangs_s = 0.9
    player = Player(RATE, on_lost="default")
    player.write(ramp(100))
    sound.stream.unplug(silently=True)
    started_s = time.monotonic()
    with pytest.raises(DeviceLostError) as caught:
        player.drain()
    assert time.monotonic() - started_s < 0.85
    assert "does not let go" in str(caught.value.__cause__)
    player.close()
    time.sleep(max(0.0, started_s + 1.2 - time.monotonic()))  # leave no thread to the next test


@pytest.mark.usefixtures("impatient")
def test_a_device_lost_between_two_utterances_is_replaced(sound: FakeSound) -> None:
    with Player(RATE, on_lost="default") as player:
        player.write(ramp(FRAME))
        drain(sound, player)
        sound.plugged = [FakeDevice("Speakers 2")]
        sound.stream.unplug(silently=True)
        player.write(ramp(FRAME, FRAME))
        drain(sound, player)
        assert np.array_equal(sounding(sound.stream.heard), ramp(FRAME, FRAME))
        assert player.stats.played_samples == 2 * FRAME


# Missing pieces


@pytest.mark.case(44)
def test_case_44_no_device_names_what_still_works(sound: FakeSound) -> None:
    sound.devices, sound.default = [], -1
    with pytest.raises(PlaybackError, match=r"no default.*querying device.*WAV files need none"):
        Player(RATE)


@pytest.mark.case(44)
def test_case_44_a_device_that_cannot_start_is_released(
    sound: FakeSound, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = sound.OutputStream

    def broken(**options: Any) -> Any:
        stream = opened(**options)
        stream.start_fails = True
        return stream

    monkeypatch.setattr(sound, "OutputStream", broken, raising=False)
    with pytest.raises(PlaybackError, match=r"'Speakers' cannot be started: .*host error"):
        Player(RATE)
    assert sound.stream.calls == ["start", "close"]


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
