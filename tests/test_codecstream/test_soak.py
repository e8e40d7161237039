"""The soak, for some seconds: what it looks at is looked at, and it fails where it should."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytest.importorskip("onnxruntime", reason="the demo needs ONNX Runtime: pip install '.[onnx]'")
pytest.importorskip("psutil")


def soak(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    code = f"""
import runpy, sys
sys.argv = ["soak.py", *sys.argv[1:]]
{before}
runpy.run_path("benchmarks/soak.py", run_name="__main__")
"""
    command = [sys.executable, "-W", "error", "-c", code, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("client", ["asyncio", "threads"])
def test_memory_is_flat_and_what_is_played_keeps_up(client: str) -> None:
    done = soak("--minutes", "0.2", "--pace", "0.25", "--utterance-s", "16", "--client", client)
    assert done.returncode == 0, done.stderr
    figures = dict(re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|$", done.stdout, re.MULTILINE))
    received, handed_out = figures["frames received, handed out"].split(", ")
    assert received == handed_out  # how many utterances there is time for, the machine decides
    assert int(received) >= 200
    growth_mb = float(figures["memory, from a quarter of the run to its end"].split()[0])
    assert growth_mb < 20
    (drift,) = [figure for what, figure in figures.items() if what.startswith("received less")]
    assert abs(float(drift.split()[0])) < 10  # four times as fast as speech
    for first_and_last in figures["threads, files: first, last"].split(", "):
        first, last = first_and_last.split(" and ")
        # A leak is two by the third utterance; the first look may come before a thread has begun.
        assert int(last) <= int(first) + 1


SWALLOW_A_CHUNK = """
from codecstream.speech import Speech
whole = Speech.take
def take(self, now_s):
    chunk = whole(self, now_s)
    return whole(self, now_s) if chunk is not None and chunk.idx == 3 else chunk
Speech.take = take
"""


def test_audio_that_is_not_the_offline_audio_fails() -> None:
    arguments = ("--minutes", "0.02", "--pace", "0.05", "--utterance-s", "12")
    done = soak(*arguments, before=SWALLOW_A_CHUNK)
    assert done.returncode == 1
    assert done.stderr.startswith("wrong: ['complete', 'complete'], checksums")
