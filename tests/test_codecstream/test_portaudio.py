"""The player on the real sounddevice and PortAudio, with a device of ALSA's that writes a file.

That device needs no sound card and takes samples as fast as they come, so that these tests say
nothing about time. They say that PortAudio starts, stops, restarts and closes as the fake sound
system of the other tests does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ASOUND = """
pcm.!default { type null }
pcm.recorder { type file slave.pcm { type null } file "%s" format raw }
"""

SETUP = """
import sys
import time
import numpy as np
from codecstream.playback import Player

def ramp(samples, start):
    return (np.arange(start + 1, start + samples + 1) / 2**20).astype(np.float32)
"""


def play(code: str, folder: Path) -> np.ndarray:
    """Run ``code`` in a process whose default device swallows sound; return the recorder's file."""
    config, recorded = folder / "asound.conf", folder / "recorded.raw"
    config.write_text(ASOUND % recorded)
    environment = os.environ | {"ALSA_CONFIG_PATH": str(config)}
    probe = "import sounddevice; sounddevice.query_devices('recorder', 'output')"
    command = [sys.executable, "-W", "error", "-X", "faulthandler", "-c"]
    found = subprocess.run([*command, probe], env=environment, capture_output=True, check=False)
    if found.returncode:
        pytest.skip("sounddevice, PortAudio or ALSA's file device is missing here")
    done = subprocess.run(
        [*command, SETUP + code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return np.fromfile(recorded, np.float32)


def ramp(samples: int) -> np.ndarray:
    return (np.arange(1, samples + 1) / 2**20).astype(np.float32)


def test_utterances_with_pauses_reach_the_device_whole(tmp_path: Path) -> None:
    recorded = play(
        """
with Player(24000, device="recorder") as player:
    assert (player.format.device, player.format.rate_hz) == ("recorder", 24000)
    for utterance in range(4):
        player.pause()
        for frame in range(5):
            player.write(ramp(1920, (5 * utterance + frame) * 1920))
        time.sleep(0.01)
        assert player.stats.played_samples == utterance * 9600
        player.resume()
        player.drain()
        assert player.stats.played_samples == (utterance + 1) * 9600, player.stats
""",
        tmp_path,
    )
    assert np.array_equal(recorded[recorded != 0], ramp(4 * 9600))


def test_clear_makes_room_for_the_next_utterance(tmp_path: Path) -> None:
    recorded = play(
        """
with Player(24000, device="recorder", latency_s=0.3) as player:
    for _ in range(3):
        player.pause()
        player.write(-ramp(48000, 0))
        player.clear()
        player.resume()
        player.write(ramp(1920, 0))
        player.drain()
    assert player.stats.played_samples == 3 * 1920
""",
        tmp_path,
    )
    assert np.array_equal(recorded[recorded != 0], np.tile(ramp(1920), 3))


def test_a_stream_that_ends_by_itself_is_replaced_by_the_default_device(tmp_path: Path) -> None:
    recorded = play(
        """
with Player(24000, device="recorder", on_lost="default") as player:
    player.write(ramp(1920, 0))
    while player.stats.queued_samples:
        time.sleep(0.001)
    player._stream._stream.abort()          # as the system does when a device goes away
    for frame in range(1, 5):
        player.write(ramp(1920, frame * 1920))
    player.drain()
    assert player.format.device == "default", player.format
    assert player.stats.devices_lost == 1 and player.stats.played_samples == 5 * 1920
""",
        tmp_path,
    )
    assert np.array_equal(recorded[recorded != 0], ramp(1920))


@pytest.mark.case(49)
def test_case_49_a_failing_callback_reaches_the_caller(tmp_path: Path) -> None:
    recorded = play(
        """
from codecstream import PlaybackError

def broken(block):
    raise ZeroDivisionError("in the callback")

player = Player(24000, device="recorder")
player._stream._read_into = broken
try:
    player.write(ramp(24000, 0))
    player.drain()
except PlaybackError as error:
    assert "in the callback" in str(error)
else:
    sys.exit("no error")
""",
        tmp_path,
    )
    assert not recorded.any()
