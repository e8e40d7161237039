r"""The machine's sound devices, as sounddevice and PortAudio see them.

::

    print(*list_devices(), sep="\n")

    *  0  Speakers, ALSA, 48000 Hz                 the default
       1  USB Headset, ALSA, 44100 Hz

PortAudio looks for devices once, when it starts; one that was plugged in later is found after
:func:`refresh_devices`.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from codecstream.errors import MissingDependencyError, PlaybackError

__all__ = [
    "OutputDevice",
    "accepted_rates_hz",
    "channel_choices",
    "find_device",
    "list_devices",
    "load_sounddevice",
    "refresh_devices",
]

# To try with a device that refuses the audio's own rate; high ones first, as they lose nothing.
COMMON_RATES_HZ = (48_000, 44_100, 96_000, 192_000, 88_200, 32_000, 24_000, 22_050, 16_000, 8_000)


@dataclass(frozen=True, slots=True)
class OutputDevice:
    """A device that can play.

    Attributes:
        index: What ``Player(device=...)`` takes; changes when devices come and go.
        name: What ``Player(device=...)`` takes, too, also in part.
        host_api: The system's interface through which it is reached, such as ALSA or WASAPI.
        max_channels: The most channels that it plays.
        default_rate_hz: The rate that it likes best.
        is_default: True for the device that plays where none is asked for.
    """

    index: int
    name: str
    host_api: str
    max_channels: int
    default_rate_hz: float
    is_default: bool

    def __str__(self) -> str:
        mark = "*" if self.is_default else " "
        return f"{mark}{self.index:3d}  {self.name}, {self.host_api}, {self.default_rate_hz:g} Hz"


def list_devices() -> list[OutputDevice]:
    """Return the devices that can play; none where the machine has none.

    Raises:
        MissingDependencyError: sounddevice or PortAudio is missing.
    """
    sounddevice = load_sounddevice()
    try:
        default = sounddevice.query_devices(None, "output")["index"]
    except (sounddevice.PortAudioError, ValueError):
        default = None  # there is none
    return [
        OutputDevice(
            index=info["index"],
            name=info["name"],
            host_api=sounddevice.query_hostapis(info["hostapi"])["name"],
            max_channels=info["max_output_channels"],
            default_rate_hz=info["default_samplerate"],
            is_default=info["index"] == default,
        )
        for info in sounddevice.query_devices()
        if info["max_output_channels"] > 0
    ]


def find_device(device: str | int | None) -> OutputDevice:
    """Return the device that is meant.

    Args:
        device: Its index, also as digits; its name or a part of it, with or without its host API;
            None for the default.

    Raises:
        PlaybackError: There is none, or several; the message has those to choose from.
        MissingDependencyError: sounddevice or PortAudio is missing.
    """
    sounddevice = load_sounddevice()
    if isinstance(device, str) and device.isdecimal():
        device = int(device)
    try:
        index = sounddevice.query_devices(device, "output")["index"]
    except (sounddevice.PortAudioError, ValueError) as error:
        found = list_devices()
        names = "\n".join(str(each) for each in found)
        wanted = "no default sound device" if device is None else f"no sound device {device!r}"
        raise PlaybackError(
            f"{wanted}: {error}. Decoding and WAV files need none. "
            + (f"Devices that can play:\n{names}" if found else "This machine has no device")
        ) from error
    return next(each for each in list_devices() if each.index == index)


def accepted_rates_hz(device: OutputDevice) -> list[int]:
    """Return those of the common sample rates, in Hz, that a device says it takes."""
    sounddevice = load_sounddevice()
    accepted = []
    for rate_hz in COMMON_RATES_HZ:
        for channels in channel_choices(device):
            with contextlib.suppress(sounddevice.PortAudioError, ValueError):
                sounddevice.check_output_settings(
                    device=device.index, channels=channels, dtype="float32", samplerate=rate_hz
                )
                accepted.append(rate_hz)
                break
    return accepted


def channel_choices(device: OutputDevice) -> list[int]:
    """Return the numbers of channels to try with a device, best first."""
    most = device.max_channels
    return [count for count in (1, 2) if count <= most] + ([most] if most > 2 else [])


def refresh_devices() -> None:
    """Look for devices again.

    PortAudio can do that only by starting anew: every open stream of this process ends, also
    those of other users of sounddevice.

    Raises:
        PlaybackError: PortAudio does not start again.
    """
    sounddevice = load_sounddevice()
    # Private, and what sounddevice's maintainer names for this purpose (its issue 125).
    with contextlib.suppress(sounddevice.PortAudioError):
        sounddevice._terminate()
    try:
        sounddevice._initialize()
    except sounddevice.PortAudioError as error:
        raise PlaybackError(f"PortAudio does not start again: {error}") from error


def load_sounddevice() -> Any:
    """Import sounddevice and return it.

    Raises:
        MissingDependencyError: It, or the PortAudio library that it needs, is missing.
    """
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
    return sounddevice
