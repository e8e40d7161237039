"""The examples as people run them, with the demo decoder that the package brings. No torch."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from speaking import example_server

import codecstream
from codecstream import demo
from codecstream.runtimes import Program
from codecstream.wav import read_wav

ROOT = Path(__file__).parents[2]
pytest.importorskip("onnxruntime", reason="the demo needs ONNX Runtime: pip install '.[onnx]'")


@pytest.fixture(scope="module")
def demo_program() -> Program:
    return codecstream.load_program(demo.artifact_dir())


def run_player(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "examples/player.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture
def replay_url(request: pytest.FixtureRequest) -> Iterator[str]:
    with example_server(*request.param) as url:
        yield url


def test_the_package_brings_a_small_demo() -> None:
    files = [path for path in Path(demo.__file__).parent.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 12e6
    for utterance in demo.utterances():
        assert 3 <= len(utterance.codes) * 0.08 <= 6 or len(utterance.codes) == 37
        assert utterance.codes.shape[1] == 16
        assert utterance.text.endswith(".")


def test_demo_speech_is_speech(demo_program: Program) -> None:
    """Not noise and not silence; that it is the right words is measured in benchmarks/."""
    decoder = codecstream.StreamDecoder(demo_program)
    for utterance in demo.utterances():
        pcm = np.concatenate([*decoder.push(utterance.codes), *decoder.finish()])
        decoder.reset()
        assert pcm.size == len(utterance.codes) * 1920
        level_db = 20 * np.log10(np.std(pcm))
        assert -40 < level_db < -10
        loudness = np.std(pcm.reshape(-1, 1920), axis=1)
        assert loudness.max() > 5 * loudness.min(), "speech has pauses"


def test_player_speaks_the_demo(tmp_path: Path, demo_program: Program) -> None:
    wav, figures = tmp_path / "demo.wav", tmp_path / "demo.json"
    utterance = min(demo.utterances(), key=lambda u: len(u.codes))
    done = run_player("--no-audio", "--text", utterance.text, "--wav", wav, "--json", figures)
    assert done.returncode == 0, done.stderr
    for word in ("TTFA", "playback start", "stall at TTFA", "RTF", "decode ms"):
        assert word in done.stdout

    decoder = codecstream.StreamDecoder(demo_program)
    expected = np.concatenate([*decoder.push(utterance.codes), *decoder.finish()])
    pcm, rate_hz = read_wav(wav)
    assert rate_hz == 24_000
    assert pcm.shape == expected.shape
    assert np.abs(pcm - expected).max() < 1 / 32767

    report: dict[str, Any] = json.loads(figures.read_text())
    assert report["total_frames"] == len(utterance.codes)
    assert report["underruns"] is None
    nothing = "nothing was played"
    assert report["null_because"] == {"underruns": nothing, "underrun_ms": nothing}
    assert report["schedule"] == [2, 4, 8, 16, 25]
    assert [chunk["frames"] for chunk in report["chunks"]][:4] == [2, 4, 8, 16]
    assert sum(chunk["samples"] for chunk in report["chunks"]) == expected.size
    for key in ("ttfa_ms", "playback_start_ms", "stall_at_ttfa_ms", "rtf", "audio_s", "total_s"):
        assert report[key] > 0
    assert set(report["chunks"][0]) >= {
        "idx", "t_ms", "arrival_ms", "frames", "samples", "decode_ms"
    }  # fmt: skip


@pytest.mark.parametrize("replay_url", [["--pace", "0.1", "--jitter-ms", "20"]], indirect=True)
def test_player_against_the_replay_server(replay_url: str, tmp_path: Path) -> None:
    assert re.fullmatch(r"ws://127\.0\.0\.1:\d+/v1/audio/speech/stream", replay_url)
    wav = tmp_path / "out.wav"
    text = demo.utterances()[2].text
    done = run_player(
        "--no-audio", "--url", replay_url, "--artifact", demo.artifact_dir(), "--text", text,
        "--voice", "any", "--wav", wav,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert read_wav(wav)[0].size == len(demo.utterances()[2].codes) * 1920


@pytest.mark.case(8)
def test_case_8_demo_decoder_refuses_a_talkers_stream(tmp_path: Path) -> None:
    codes = tmp_path / "codes.npy"
    np.save(codes, np.zeros((3, 16), np.int16))
    with example_server("--codes", codes) as url:
        done = run_player(
            "--no-audio", "--url", url, "--artifact", demo.artifact_dir(), "--text", "x"
        )
    assert done.returncode == 1
    assert done.stderr.startswith("error: the stream does not fit the decoder artifact: decoder_id")


def test_player_without_a_server_says_so() -> None:
    url = "ws://127.0.0.1:9/v1/audio/speech/stream"
    done = run_player("--no-audio", "--url", url, "--artifact", demo.artifact_dir(), "--text", "x")
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: no connection to {url}")
    assert "Traceback" not in done.stderr


@pytest.mark.case(44)
def test_case_44_player_without_sound_says_what_is_missing_and_goes_on(tmp_path: Path) -> None:
    hidden = tmp_path / "sounddevice.py"
    hidden.write_text("raise OSError('PortAudio library not found')")
    code = (
        f"import sys, runpy; sys.path[:0] = [{str(tmp_path)!r}, 'examples']; "
        f"sys.argv = ['player.py', '--wav', {str(tmp_path / 'a.wav')!r}]; "
        f"runpy.run_path('examples/player.py', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Not playing: playing sound needs the PortAudio library" in done.stdout
    assert (tmp_path / "a.wav").stat().st_size > 100_000


@pytest.mark.parametrize("options", [[], ["--prebuffer", "0.5"]])
def test_player_to_a_pipe_is_samples_and_nothing_else(
    demo_program: Program, options: list[str], tmp_path: Path
) -> None:
    utterance = min(demo.utterances(), key=lambda u: len(u.codes))
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-W", "error", "examples/player.py", "--stdout", "--json", figures]
    command += [*options, "--text", utterance.text]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    decoder = codecstream.StreamDecoder(demo_program)
    expected = np.concatenate([*decoder.push(utterance.codes), *decoder.finish()])
    assert np.abs(np.frombuffer(done.stdout, "<i2") / 32767 - expected).max() < 1 / 32767
    assert b"TTFA" in done.stderr
    report = json.loads(figures.read_text())
    sizes = [chunk["frames"] for chunk in report["chunks"]]
    if options:
        assert report["schedule"] == [2, 4, 8, 16, 25] and sizes[:4] == [2, 4, 8, 16]
    else:
        assert report["schedule"] == sizes and sizes[0] == 1, "the first sound: sooner is better"


def test_player_plays_on_a_device_and_counts_what_ran_dry(
    tmp_path: Path, demo_program: Program
) -> None:
    """A device of its own that plays in real time, in a thread, as PortAudio's do."""
    utterance = min(demo.utterances(), key=lambda u: len(u.codes))
    (tmp_path / "sounddevice.py").write_text(
        f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r})\n"
        "import atexit, threading, time, fake_sound, numpy\n"
        "sound = sys.modules['sounddevice'] = fake_sound.FakeSound()\n"
        "def play():\n"
        "    while True:\n"
        "        time.sleep(0.01)\n"
        "        for stream in sound.streams:\n"
        "            if stream.active: stream.pull(240)\n"
        "threading.Thread(target=play, daemon=True).start()\n"
        f"atexit.register(lambda: numpy.save({str(tmp_path / 'heard.npy')!r}, "
        "sound.stream.heard))\n"
    )
    code = (
        f"import sys, runpy; sys.path[:0] = [{str(tmp_path)!r}, 'examples']; "
        f"sys.argv = ['player.py', '--text', {utterance.text!r}, '--json', "
        f"{str(tmp_path / 'a.json')!r}]; runpy.run_path('examples/player.py', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "a.json").read_text())
    assert report["underruns"] is not None and report["null_because"] == {}
    decoder = codecstream.StreamDecoder(demo_program)
    expected = np.concatenate([*decoder.push(utterance.codes), *decoder.finish()])
    heard = np.load(tmp_path / "heard.npy")
    sound = np.flatnonzero(heard)
    assert sound.size >= np.count_nonzero(np.abs(expected) > 1e-6) - 10
    if not report["underruns"]:  # else there is silence in the middle of it
        played = heard[sound[0] :][: expected.size]
        first = np.flatnonzero(expected)[0]
        assert np.allclose(played[: expected.size - first], expected[first:], atol=1e-5)


def test_player_whose_pipe_breaks_ends_with_one_line() -> None:
    command = [sys.executable, "examples/player.py", "--stdout"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as player:
        assert player.stdout is not None and player.stderr is not None
        player.stdout.read(100)
        player.stdout.close()
        told = player.stderr.read().decode().splitlines()
    assert player.returncode == 1
    assert told[-1].startswith("error: the output stream takes no more sound")
    assert "Traceback" not in "".join(told)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--list-devices"], "*  1  Speakers, FakeAudio, 48000 Hz"),
        (["--device", "foo"], "no sound device 'foo'"),
        (["--device", "7"], "no sound device 7"),
    ],
)
def test_player_shows_the_devices_to_choose_from(
    tmp_path: Path, options: list[str], told: str
) -> None:
    sound = tmp_path / "sounddevice.py"
    sound.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r}); import fake_sound\n"
        "devices = [fake_sound.FakeDevice('Microphone', channels=()), fake_sound.FakeDevice()]\n"
        "sys.modules['sounddevice'] = fake_sound.FakeSound(devices, default=1)\n"
    )
    code = (
        f"import sys, runpy; sys.path[:0] = [{str(tmp_path)!r}, 'examples']; "
        f"sys.argv = ['player.py', *{options!r}]; "
        f"runpy.run_path('examples/player.py', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == (options != ["--list-devices"])
    printed = done.stderr if done.returncode else done.stdout
    assert told in printed and "Traceback" not in printed
    assert "*  1  Speakers, FakeAudio, 48000 Hz" in printed, "what there is to choose from"
    assert "Microphone" not in printed


@pytest.mark.parametrize("replay_url", [["--pace", "0.3"]], indirect=True)
def test_robot_skips_what_is_interrupted_and_says_the_next(
    replay_url: str, tmp_path: Path, demo_program: Program
) -> None:
    skipped, said = demo.utterances()[1], demo.utterances()[0]
    wav = tmp_path / "said.wav"
    command = [
        sys.executable, "-W", "error", "examples/robot.py", "--url", replay_url,
        "--artifact", demo.artifact_dir(), "--wav", wav, skipped.text, said.text,
    ]  # fmt: skip
    with subprocess.Popen(
        list(map(str, command)),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as robot:
        assert robot.stdout is not None and robot.stderr is not None
        first = robot.stdout.readline()
        time.sleep(0.3)  # at any moment: it takes 1.6 s to say
        robot.send_signal(signal.SIGINT)
        output, errors = robot.communicate(timeout=60)
    assert (errors, robot.returncode) == ("", 0)
    assert first == f"Saying {skipped.text!r}\n"
    lines = output.splitlines()
    assert lines[0].startswith("  cancelled after")
    assert lines[1] == f"Saying {said.text!r}"
    assert lines[2].startswith(f"  complete after {len(said.codes)} frames")
    decoder = codecstream.StreamDecoder(demo_program)
    expected = np.concatenate([*decoder.push(said.codes), *decoder.finish()])
    pcm, _ = read_wav(wav)
    assert (pcm.size - expected.size) % 1920 == 0
    assert np.abs(pcm[-expected.size :] - expected).max() < 1 / 32767


def test_embedding_document_runs(tmp_path: Path, demo_program: Program) -> None:
    """docs/embedding.md is enough to run an artifact, and gives the very same audio."""
    text = (ROOT / "docs" / "embedding.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    scope: dict[str, Any] = {}
    exec(code.replace('"decoder-onnx"', repr(str(demo.artifact_dir()))), scope)
    codes = demo.utterances()[0].codes
    decoder = codecstream.StreamDecoder(demo_program)
    expected = [*decoder.push(codes), *decoder.finish()]
    heard = [scope["step"](codes[start:stop]) for start, stop in ((0, 2), (2, 6), (6, 14))]
    for ours, theirs in zip(expected, heard, strict=False):
        assert np.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize(
    ("document", "index"),
    [("README.md", 0), ("README.md", 1), ("README.md", 2), ("docs/parity.md", 0)],
)
def test_code_in_documents_runs(document: str, index: int, tmp_path: Path) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[index]
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    printed = re.search(re.escape(code) + r"```\n\n```\n(.*?)```", text, re.DOTALL)
    assert done.stdout == ("" if printed is None else printed[1])
