"""The player with devices that refuse, fail, hang and go away. A fake sound system."""

from __future__ import annotations

import builtins
import gc
import sys
import threading
import time
import weakref
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
    play_until_done,
    ramp,
    sounding,
    speech,
    wait_for,
)
from numpy.typing import NDArray

from codecstream import DeviceLostError, MissingDependencyError, PlaybackError
from codecstream import device_stream as device_stream_module
from codecstream import playback as playback_module
from codecstream.devices import accepted_rates_hz, find_device, list_devices, refresh_devices
from codecstream.playback import Player

soxr = pytest.importorskip("soxr", reason="needs: pip install 'codecstream[play]'")


@pytest.fixture
def sound(monkeypatch: pytest.MonkeyPatch) -> FakeSound:
    return FakeSound().install(monkeypatch)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is late is given up after 0.05 s of real time more."""
    monkeypatch.setattr(device_stream_module, "GRACE_S", 0.05)


# Choosing


def three_devices() -> list[FakeDevice]:
    return [
        FakeDevice("Microphone", channels=()),
        FakeDevice("USB Headset", rates_hz=(44_100, 16_000), default_rate_hz=44_100),
        FakeDevice("HDMI USB Dock", channels=(2, 8)),
    ]


def test_devices_that_can_play_are_listed(sound: FakeSound) -> None:
    sound.devices, sound.default = three_devices(), 2
    headset, dock = list_devices()
    assert (headset.index, headset.name, headset.host_api) == (1, "USB Headset", "FakeAudio")
    assert (headset.is_default, dock.is_default, dock.max_channels) == (False, True, 8)
    assert str(headset) == "   1  USB Headset, FakeAudio, 44100 Hz"
    assert str(dock) == "*  2  HDMI USB Dock, FakeAudio, 48000 Hz"
    assert accepted_rates_hz(headset) == [44_100, 16_000]
    sound.default = -1
    assert not any(each.is_default for each in list_devices())


@pytest.mark.parametrize(
    ("wanted", "index"), [(None, 2), (1, 1), ("1", 1), ("headset", 1), ("HDMI USB Dock", 2)]
)
def test_a_device_is_found_by_index_name_or_part_of_it(
    sound: FakeSound, wanted: str | int | None, index: int
) -> None:
    sound.devices, sound.default = three_devices(), 2
    assert find_device(wanted).index == index
    with sound.player(device=wanted) as player:
        assert player.format.device == sound.devices[index].name


@pytest.mark.parametrize("wanted", ["usb", "foo", 0, 17, "17"])
def test_a_device_that_is_not_clear_names_the_choice(sound: FakeSound, wanted: str | int) -> None:
    sound.devices, sound.default = three_devices(), 2
    with pytest.raises(PlaybackError) as caught:
        sound.player(device=wanted)
    assert "  1  USB Headset, FakeAudio" in str(caught.value)
    assert "Microphone" not in str(caught.value)


def test_a_device_plugged_in_later_is_found_after_a_refresh(sound: FakeSound) -> None:
    sound.plugged = three_devices()
    assert [each.name for each in list_devices()] == ["Speakers"]
    refresh_devices()
    assert [each.name for each in list_devices()] == ["USB Headset", "HDMI USB Dock"]


def test_a_sound_system_that_does_not_start_again_is_an_error(
    sound: FakeSound, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise sound.PortAudioError("Internal PortAudio error", -9986)

    monkeypatch.setattr(sound, "_initialize", broken, raising=False)
    with pytest.raises(PlaybackError, match=r"does not start again: .*Internal"):
        refresh_devices()


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
    with sound.player() as player:
        assert (player.format.rate_hz, player.format.channels) == (device_hz, channels[0])
        for chunk in np.split(pcm, np.cumsum(chunks)[:-1]):
            player.write(chunk)
            sound.stream.pull(777)
        drain_playing(sound, player, 333)
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
    with sound.player() as player:
        assert player.format.rate_hz == 48_000
        player.write(speech(1.0))
        drain_playing(sound, player)
    first, last = np.flatnonzero(sound.stream.given)[[0, -1]]
    assert last - first == pytest.approx(48_000, abs=2)


def test_mono_at_the_audios_own_rate_is_tried_first_then_more_channels_then_rates(
    sound: FakeSound,
) -> None:
    sound.devices[0] = FakeDevice(rates_hz=(32_000,), channels=(2, 6), default_rate_hz=44_100)
    with sound.player() as player:
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
        sound.player()
    assert sound.stream.calls == ["close"]


@pytest.mark.case(45)
def test_case_45_a_device_without_a_format_names_the_rates_tried(sound: FakeSound) -> None:
    sound.devices[0] = FakeDevice(rates_hz=())
    message = r"'Speakers' does not play 24000 Hz mono: .*Invalid sample rate.*24000, 48000, 44100"
    with pytest.raises(PlaybackError, match=message):
        sound.player()


def test_a_busy_device_is_not_asked_for_every_format(
    sound: FakeSound, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(self: FakeDevice, rate_hz: float, channels: int) -> None:
        raise sound.PortAudioError("Device unavailable", -9985)

    monkeypatch.setattr(FakeDevice, "check", busy)
    with pytest.raises(PlaybackError, match="Device unavailable"):
        sound.player()
    assert len(sound.opened) == 1


# Failures


@pytest.mark.case(49)
@pytest.mark.parametrize("call", ["write", "drain", "full"])
def test_case_49_a_failing_callback_reaches_the_caller(
    sound: FakeSound, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    player = sound.player(capacity_s=1.0)
    player.write(ramp(RATE))
    stream, read = player._stream, player._buffer.read_into

    def broken(block: NDArray[np.float32]) -> bool:
        if len(sound.stream.blocks) == 10:
            block[:] = 0.5
            raise ZeroDivisionError("in block 10")
        return read(block)

    monkeypatch.setattr(stream, "_read_into", broken)
    with Threads() as pool:
        if call == "full":
            waiting = pool.submit(player.write, ramp(RATE))
        elif call == "drain":
            waiting = pool.submit(player.drain)
        time.sleep(0.05)
        while sound.stream.active:
            sound.stream.pull(480)
        with pytest.raises(PlaybackError, match="in block 10") as caught:
            player.write(ramp(1)) if call == "write" else waiting.result(20)
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
    assert device_stream_module.STALLED_S + device_stream_module.GRACE_S < 3
    player = Player(RATE, capacity_s=0.5)
    player.write(ramp(RATE))
    sound.stream.pull(480)
    sound.stream.unplug(silently=True)
    with pytest.raises(DeviceLostError, match=r"'Speakers' is lost: .*no samples for \d\.\d s"):
        player.drain() if call == "drain" else player.write(ramp(RATE, RATE))


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("silently", [True, False])
def test_a_lost_device_is_told_with_what_was_not_played(sound: FakeSound, silently: bool) -> None:
    player = sound.player()
    player.write(ramp(RATE))
    sound.stream.pull(480)
    sound.stream.unplug(silently=silently)
    with pytest.raises(DeviceLostError) as caught:
        for _ in range(200):
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
        drain_playing(sound, player)


@pytest.mark.usefixtures("impatient")
def test_a_slow_start_and_a_sleeping_machine_are_no_loss(sound: FakeSound) -> None:
    """After sleep the clock has jumped, and the device needs a moment to ask again."""
    player = sound.player()
    player.write(ramp(100))
    sound.stream.pull(50)
    sound.now_s += 3600
    with Threads() as pool:
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
    with sound.player(on_lost="default", capacity_s=1.0) as player:
        block = pcm[:RATE].copy()
        player.write(block)
        block[:] = 0  # as a caller does who uses one array again and again
        headset = sound.stream
        headset.play(0.05)  # longer than the start waits for what the resampler holds back
        headset.play(0.5)
        played = player.stats.played_samples
        assert played == pytest.approx(0.5 * RATE, abs=2)
        player.pause()  # which must be so on the new device, too
        sound.plugged = [FakeDevice("Speakers", rates_hz=(new_hz,), channels=(2,))]
        headset.unplug(silently=silently)
        with Threads() as pool:
            if ends_in == "write":
                pool.submit(player.write, pcm[RATE : 2 * RATE]).result(5)
                call = pool.submit(player.drain)
            else:
                call = pool.submit(player.drain)
            wait_for(lambda: sound.stream is not headset and player._utterance.ended)
            assert not sound.stream.play(0.1).any()
            player.resume()
            play_until_done(sound, call)
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
        drain_playing(sound, player)
        assert player.stats.played_samples == played + expected.size + FRAME


@pytest.mark.usefixtures("impatient")
def test_after_a_move_the_rest_is_heard_at_once_and_the_next_utterance_has_its_delay(
    sound: FakeSound,
) -> None:
    with sound.player(on_lost="default") as player:
        player.write(ramp(RATE))
        sound.stream.pull(480)
        player.start_delay_s = 1.0
        sound.stream.unplug(silently=True)
        player.write(ramp(RATE, RATE))
        assert np.array_equal(sound.stream.pull(480), ramp(480, 480))
        drain_playing(sound, player)
        player.write(ramp(480))
        assert not sound.stream.play(0.98).any()
        assert sound.stream.play(0.06).any()


@pytest.mark.usefixtures("impatient")
def test_moving_without_another_device_is_an_error(sound: FakeSound) -> None:
    player = sound.player(on_lost="default")
    player.write(ramp(100))
    sound.plugged = []
    sound.stream.unplug(silently=False)
    with pytest.raises(DeviceLostError, match="'Speakers' is lost") as caught:
        player.drain()
    assert "No other one could be opened: no default sound device" in str(caught.value)
    with pytest.raises(DeviceLostError, match="No other one"):
        player.write(ramp(1))


@pytest.mark.usefixtures("impatient")
def test_a_new_default_that_takes_a_moment_to_appear_is_waited_for(
    sound: FakeSound, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []

    def later() -> None:
        looks.append(sound.now_s)
        sound.default = 0 if len(looks) == 3 else -1

    with sound.player(on_lost="default") as player:
        player.write(ramp(FRAME))
        monkeypatch.setattr(sound, "_initialize", later, raising=False)
        sound.stream.unplug(silently=False)
        drain_playing(sound, player)
        assert np.array_equal(sounding(sound.stream.heard), ramp(FRAME)) and len(looks) == 3


@pytest.mark.usefixtures("impatient")
def test_a_device_that_does_not_let_go_holds_up_nobody(sound: FakeSound) -> None:
    sound.devices[0].lets_go.clear()
    player = sound.player(on_lost="default")
    player.write(ramp(100))
    sound.stream.unplug(silently=True)
    with pytest.raises(DeviceLostError) as caught:
        player.drain()
    assert "PortAudio does not let go" in str(caught.value)
    sound.stream.lost = False
    assert not sound.stream.pull(100).any(), "should it come back, it is silent"
    sound.devices[0].lets_go.set()
    player.close()


@pytest.mark.usefixtures("impatient")
def test_a_sound_system_that_hangs_while_looking_for_devices_holds_up_nobody(
    sound: FakeSound, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang = threading.Event()
    monkeypatch.setattr(playback_module, "RESTART_S", 0.1)
    monkeypatch.setattr(sound, "_initialize", hang.wait, raising=False)
    player = sound.player(on_lost="default")
    player.write(ramp(100))
    sound.stream.unplug(silently=False)
    with pytest.raises(DeviceLostError, match="did not start again within"):
        player.drain()
    hang.set()


@pytest.mark.usefixtures("impatient")
def test_a_device_lost_between_two_utterances_is_replaced(sound: FakeSound) -> None:
    with sound.player(on_lost="default") as player:
        player.write(ramp(FRAME))
        drain_playing(sound, player)
        sound.plugged = [FakeDevice("Speakers 2")]
        sound.stream.unplug(silently=True)
        player.write(ramp(FRAME, FRAME))
        drain_playing(sound, player)
        assert np.array_equal(sounding(sound.stream.heard), ramp(FRAME, FRAME))
        assert player.stats.played_samples == 2 * FRAME


def test_a_player_that_is_forgotten_stays_there_for_the_devices_thread(sound: FakeSound) -> None:
    """Otherwise the next call of the device's thread would go to freed memory."""
    player = sound.player()
    player.write(ramp(100))
    stream = weakref.ref(sound.streams.pop())
    ours = weakref.ref(player._stream)
    del player
    gc.collect()
    kept, kept_ours = stream(), ours()
    assert kept is not None and kept_ours is not None
    assert np.array_equal(kept.pull(100), ramp(100))
    kept_ours.close()
    del kept, kept_ours
    gc.collect()
    assert stream() is None and ours() is None


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
    opened = sound.RawOutputStream

    def broken(**options: Any) -> Any:
        stream = opened(**options)
        stream.start_fails = True
        return stream

    monkeypatch.setattr(sound, "RawOutputStream", broken, raising=False)
    with pytest.raises(PlaybackError, match=r"'Speakers' cannot be started: .*host error"):
        sound.player()
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
