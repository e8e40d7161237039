"""What a device recorded of itself is decoded again and judged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from artifacts import Store
from support import Check, make_codes

pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

import codecstream
from codecstream import Program, StreamDecoder
from codecstream.sampling import UtteranceSampler, find_samples
from codecstream_parity.cli import main


def record(program: Program, folder: Path, frames: list[int], primed: int = 0) -> None:
    decoder = StreamDecoder(program, sampler=UtteranceSampler(folder, every=1))
    for seed, count in enumerate(frames):
        if primed:
            decoder.prime(make_codes(primed, seed=100 + seed))
        list(decoder.push(make_codes(count, seed=seed)))
        list(decoder.finish())
        decoder.reset()


@pytest.fixture
def program(tiny_artifact: Path) -> Program:
    return codecstream.load_program(tiny_artifact, threads=1, warmup=False)


def test_a_folder_of_recordings_passes(tmp_path: Path, program: Program, check: Check) -> None:
    record(program, tmp_path / "samples", [3, 60, 200])
    status, report = check(tmp_path / "samples")
    assert status == 0, report["reasons"]
    assert [run["frames"] for run in report["runs"]] == [3, 60, 200]
    assert report["runs"][1]["chunks"] == [2, 4, 8, 16, 25, 5]
    assert report["codes"] == "3 recorded utterances, 263 frames"
    assert report["schedule"] is None
    assert report["null_because"]["schedule"] == "recordings do not say"
    assert (report["runtime"], report["precision"]) == ("onnx", "fp32")
    assert report["reference"] == "eager float32, all frames at once"
    assert all(run["snr_db"] > 90 for run in report["runs"])


def test_one_file_is_enough(tmp_path: Path, program: Program, check: Check) -> None:
    record(program, tmp_path, [30])
    status, report = check(*find_samples(tmp_path))
    assert (status, report["frames"]) == (0, 30)


def test_what_primed_the_state_is_decoded_first(
    tmp_path: Path, program: Program, check: Check
) -> None:
    record(program, tmp_path / "samples", [40], primed=90)
    status, report = check(tmp_path / "samples")
    assert status == 0, report["reasons"]
    assert report["frames"] == 40


def test_a_device_that_forgot_its_state_is_found(
    tmp_path: Path, program: Program, check: Check
) -> None:
    class Forgets:
        geometry, max_frames, decoder_id = program.geometry, None, program.decoder_id
        manifest = program.manifest  # type: ignore[attr-defined]

        def initial_state(self) -> Any:
            return program.initial_state()

        def step(self, codes: Any, state: Any) -> Any:
            return program.step(codes, self.initial_state())

    record(program, tmp_path / "samples", [30])
    record(Forgets(), tmp_path / "samples", [30])
    status, report = check(tmp_path / "samples")
    assert status == 1
    assert [run["passed"] for run in report["runs"]] == [True, False]
    assert "snr_db" in report["runs"][1]["missed"]


def test_windowed_recordings_are_held_against_windows(
    tmp_path: Path, windowed_artifact: Path, check: Check
) -> None:
    program = codecstream.load_program(windowed_artifact, threads=1, warmup=False)
    record(program, tmp_path / "samples", [120], primed=10)
    status, report = check(tmp_path / "samples")
    assert status == 0, report["reasons"]
    assert report["reference"] == "eager float32, windows of 72 + n frames"
    status, report = check(tmp_path / "samples", "--reference", "eager")
    assert (status, report["floors"]["snr_db"]) == (1, 40)


def test_an_artifact_can_be_the_reference(
    tmp_path: Path, program: Program, tiny_artifact: Path, check: Check
) -> None:
    record(program, tmp_path / "samples", [30])
    status, report = check(tmp_path / "samples", "--reference-artifact", tiny_artifact)
    assert (status, report["exact"]) == (0, True)


def test_recordings_cut_short_are_said_to_be(
    tmp_path: Path, program: Program, check: Check
) -> None:
    decoder = StreamDecoder(program, sampler=UtteranceSampler(tmp_path / "samples"))
    next(iter(decoder.push(make_codes(9))))
    decoder.reset()
    status, report = check(tmp_path / "samples")
    assert status == 0
    assert report["notes"] == ["1 of 1 recordings end before their utterance did"]


def test_recordings_of_several_decoders_are_refused(
    tmp_path: Path,
    program: Program,
    windowed_artifact: Path,
    check: Check,
    capsys: pytest.CaptureFixture[str],
) -> None:
    windowed = codecstream.load_program(windowed_artifact, threads=1, warmup=False)
    for one in (program, windowed):
        record(one, tmp_path / "samples", [3])
    assert check(tmp_path / "samples")[0] == 2
    assert "mode is stateful and windowed. Check them by kind" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--codes", "--long", "--frames", "--schedule"])
def test_recordings_have_codes_of_their_own(
    tmp_path: Path, program: Program, check: Check, option: str
) -> None:
    record(program, tmp_path / "samples", [3])
    assert check(tmp_path / "samples", option, "3")[0] == 2


def test_a_recording_with_impossible_codes_is_refused(
    tmp_path: Path, program: Program, check: Check, capsys: pytest.CaptureFixture[str]
) -> None:
    record(program, tmp_path, [3])
    (path,) = find_samples(tmp_path)
    with np.load(path) as arrays:
        parts = dict(arrays)
    parts["codes"] = parts["codes"] + 5000
    np.savez(path, **parts)
    assert check(tmp_path)[0] == 2
    assert "is outside 0..2047" in capsys.readouterr().err


def test_recordings_and_pictures(tmp_path: Path, program: Program, store: Store) -> None:
    record(program, tmp_path / "samples", [30, 30])
    arguments = ["--checkpoint", str(store.checkpoint()), "--plot", str(tmp_path / "a.png")]
    assert main([str(tmp_path / "samples"), *arguments]) == 0
    assert (tmp_path / "a.png").stat().st_size > 10_000
