"""The command: what it decodes, what it prints and writes, and how it exits."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from artifacts import Store
from support import GEOMETRY, Check, edit_manifest, make_codes

pytest.importorskip("torch")
pytest.importorskip("onnxruntime")
pytest.importorskip("matplotlib")
pytest.importorskip("soundfile")

import soundfile

from codecstream import demo
from codecstream_export.reference import eager_pcm
from codecstream_parity import check as check_module
from codecstream_parity import cli, plots
from codecstream_parity.check import DEFAULT_FRAMES, Settings
from codecstream_parity.floors import FLOORS, floors_for
from codecstream_parity.references import WholeReference
from codecstream_parity.runs import compare_pieces

# The fixed names of the JSON.
NAMES = {
    "snr_db",
    "worst_slice_snr_db",
    "worst_seam",
    "onset_snr_db",
    "tail_snr_db",
    "max_abs_error",
    "frames",
    "schedule",
    "runtime",
    "reference",
    "passed",
    "reasons",
}

SHORT = ("--frames", 60)


def test_the_default_crosses_the_attention_and_ten_seams(tiny_artifact: Path, check: Check) -> None:
    status, report = check(tiny_artifact)
    assert status == 0
    assert report.keys() >= NAMES
    assert report["frames"] == DEFAULT_FRAMES > 568
    assert report["seams"] >= 10
    assert report["schedule"] == [2, 4, 8, 16, 25]
    assert report["reference"] == "eager float32, all frames at once"
    assert (report["runtime"], report["precision"], report["mode"]) == ("onnx", "fp32", "stateful")
    assert [run["run"] for run in report["runs"]] == [
        "schedule",
        "after reset",
        "random partition",
        "side by side",
    ]
    assert report["runs"][0]["chunks"] == [2, 4, 8, 16, *[25] * 23, 15]
    partition = report["runs"][2]["chunks"]
    assert sum(partition) == DEFAULT_FRAMES
    assert len(set(partition)) > 10
    assert report["snr_db"] >= 90
    assert report["notes"] == []


def test_every_null_has_a_reason(tiny_artifact: Path, check: Check) -> None:
    _, report = check(tiny_artifact, *SHORT)
    nulls = {name for name, value in report.items() if value is None}
    assert nulls
    assert nulls <= report["null_because"].keys()


@pytest.mark.parametrize("runtime", ["executorch", "torch_export"])
def test_other_runtimes(store: Store, check: Check, runtime: str) -> None:
    pytest.importorskip("executorch" if runtime == "executorch" else "torch")
    status, report = check(store.artifact(runtime), *SHORT, "--threads", 1)
    assert (status, report["runtime"]) == (0, runtime)
    assert max(report["runs"][2]["chunks"]) <= 25


def test_a_windowed_artifact_is_held_against_its_windows(
    windowed_artifact: Path, check: Check
) -> None:
    status, report = check(windowed_artifact, "--frames", 150)
    assert status == 0
    assert report["reference"] == "eager float32, windows of 72 + n frames"
    assert report["snr_db"] >= 90
    # Against all frames at once: measured, and no reason to fail.
    assert report["approximation"]["snr_db"] < 40
    assert report["approximation"]["run"] == "all at once"


def test_a_windowed_artifact_against_all_frames_has_floors_of_its_own(
    windowed_artifact: Path, check: Check
) -> None:
    status, report = check(windowed_artifact, "--frames", 150, "--reference", "eager")
    assert status == 1
    assert report["floors"]["snr_db"] == 40
    assert report["approximation"] is None
    status, _ = check(
        windowed_artifact, "--frames", 150, "--reference", "eager", "--min-snr-db", 5,
        "--min-slice-snr-db", 3, "--floor", "slice_p1_snr_db=none", "--floor", "tail_snr_db=3",
        "--floor", "onset_snr_db=3", "--floor", "gain_db=2", "--floor", "max_abs_error=1",
        "--floor", "log_spectral_distance_db=9", "--floor", "seam_excess_db=none",
    )  # fmt: skip
    assert status == 0


def test_a_stateful_artifact_is_no_window(tiny_artifact: Path, check: Check) -> None:
    status, report = check(tiny_artifact, "--frames", 150, "--reference", "window")
    assert status == 1
    assert report["snr_db"] < 90
    assert report["onset_snr_db"] > 90  # while nothing is forgotten


def test_a_floor_can_be_raised(tiny_artifact: Path, check: Check) -> None:
    status, report = check(tiny_artifact, *SHORT, "--min-snr-db", 150, "--min-slice-snr-db", 140)
    assert status == 1
    assert report["floors"]["snr_db"] == 150
    assert set(report["missed"]) == {"snr_db", "worst_slice_snr_db"}
    assert report["reasons"][0].startswith("schedule: snr_db is 1")
    assert "at least 150 needed" in report["reasons"][0]


def test_the_official_class(tiny_artifact: Path, check: Check) -> None:
    pytest.importorskip("transformers")
    status, report = check(tiny_artifact, *SHORT, "--reference", "official")
    assert (status, report["reference"]) == (0, "official class of qwen-tts, all frames at once")


def test_another_artifact_needs_no_checkpoint(tiny_artifact: Path, check: Check) -> None:
    status, report = check(tiny_artifact, *SHORT, "--reference-artifact", tiny_artifact)
    assert (status, report["exact"], report["snr_db"]) == (0, True, None)
    assert report["null_because"]["snr_db"] == "nothing differs"


def test_a_servers_file(tmp_path: Path, tiny_artifact: Path, check: Check, store: Store) -> None:
    codes = make_codes(80)
    np.save(tmp_path / "codes.npy", codes.astype(np.int16))
    pcm = eager_pcm(store.decoder(), codes)
    soundfile.write(tmp_path / "late.wav", np.pad(pcm, (300, 0))[:-300], 24_000)
    status, report = check(
        tiny_artifact, "--codes", tmp_path / "codes.npy", "--reference-wav", tmp_path / "late.wav",
        "--floor", "tail_snr_db=none",
    )  # fmt: skip
    assert (status, report["reasons"]) == (0, [])
    assert report["lag_samples"] == -300
    assert report["correlation"] > 0.99
    assert report["reference"] == "the file late.wav"
    assert [run["run"] for run in report["runs"]] == ["schedule"]


@pytest.mark.parametrize("frames", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_a_file_of_something_else_fails_however_short(
    tmp_path: Path, tiny_artifact: Path, check: Check, frames: int, seed: int
) -> None:
    """A lag of noise must not take away all that there is to compare."""
    np.save(tmp_path / "codes.npy", make_codes(frames))
    pcm = 0.1 * np.random.default_rng(seed).standard_normal(1920 * frames)
    soundfile.write(tmp_path / "other.wav", pcm, 24_000)
    wav = tmp_path / "other.wav"
    status, report = check(tiny_artifact, "--codes", tmp_path / "codes.npy", "--reference-wav", wav)
    assert (status, report["passed"]) == (1, False)
    assert "snr_db" in report["missed"]


def test_windows_against_a_file_or_a_stateful_artifact_are_an_approximation(
    tmp_path: Path, tiny_artifact: Path, windowed_artifact: Path, check: Check
) -> None:
    np.save(tmp_path / "codes.npy", make_codes(9))
    soundfile.write(tmp_path / "a.wav", make_codes(9 * 120).ravel() / 9000, 24_000)
    codes = ("--codes", tmp_path / "codes.npy")
    for subject, reference, floors in (
        (windowed_artifact, ("--reference-artifact", tiny_artifact), FLOORS["windowed"]),
        (tiny_artifact, ("--reference-artifact", windowed_artifact), FLOORS["windowed"]),
        (windowed_artifact, ("--reference-artifact", windowed_artifact), FLOORS["fp32"]),
        (
            windowed_artifact,
            ("--reference-wav", tmp_path / "a.wav"),
            floors_for("fp32", approximate=True, wav=True),
        ),
    ):
        _, report = check(subject, *codes, *reference)
        assert report["floors"] == dataclasses.asdict(floors)


def test_the_coarser_of_two_artifacts_says_what_they_can_reach(
    tmp_path: Path, tiny_artifact: Path, check: Check
) -> None:
    coarse = Path(shutil.copytree(tiny_artifact, tmp_path / "coarse"))
    edit_manifest(coarse, lambda manifest: manifest.update(precision="int8"))
    for pair in ((coarse, tiny_artifact), (tiny_artifact, coarse)):
        _, report = check(pair[0], "--frames", 3, "--reference-artifact", pair[1])
        assert report["floors"] == dataclasses.asdict(FLOORS["int8"])


@pytest.mark.parametrize("pair", [("--json", "--html"), ("--plot", "--html")])
def test_two_reports_in_one_file_are_refused(
    tmp_path: Path, tiny_artifact: Path, checkpoint: Path, pair: tuple[str, str]
) -> None:
    file = str(tmp_path / "report")
    options = [word for name in pair for word in (name, file)]
    assert cli.main([str(tiny_artifact), "--checkpoint", str(checkpoint), *options]) == 2
    assert not (tmp_path / "report").exists()


def test_a_path_is_no_formula(tmp_path: Path, tiny_artifact: Path, check: Check) -> None:
    copy = Path(shutil.copytree(tiny_artifact, tmp_path / "a$\\b$_$c"))
    status, _ = check(copy, "--frames", 3, "--plot", tmp_path / "a.png")
    assert status == 0


def test_codes_from_a_file_and_a_schedule(
    tmp_path: Path, tiny_artifact: Path, check: Check
) -> None:
    np.save(tmp_path / "codes.npy", make_codes(33).astype(np.uint16))
    status, report = check(
        tiny_artifact, "--codes", tmp_path / "codes.npy", "--schedule", 3, 7, "--frames", 25
    )
    assert (status, report["frames"], report["schedule"]) == (0, 25, [3, 7])
    assert report["runs"][0]["chunks"] == [3, 7, 7, 7, 1]
    assert report["codes"] == "codes.npy, 25 frames"


def test_the_bundled_speech_on_its_own_decoder(check: Check) -> None:
    status, report = check(
        demo.artifact_dir(), "--checkpoint", demo.checkpoint_dir(), "--codes", "demo"
    )
    assert status == 0, report["reasons"]
    assert report["codes"] == f"the bundled speech, repeated, {DEFAULT_FRAMES} frames"


def test_seeds_choose_codes_and_chunks(tiny_artifact: Path, check: Check) -> None:
    reports = [check(tiny_artifact, *SHORT, "--seed", seed)[1] for seed in (1, 1, 2)]
    assert reports[0] == reports[1]
    assert reports[0]["snr_db"] != reports[2]["snr_db"]
    assert reports[0]["runs"][2]["chunks"] != reports[2]["runs"][2]["chunks"]


def test_a_note_says_when_the_weights_are_others(
    tmp_path: Path, tiny_artifact: Path, check: Check
) -> None:
    copy = Path(shutil.copytree(tiny_artifact, tmp_path / "copy"))
    edit_manifest(copy, lambda manifest: manifest["source"].update(weights_sha256="ab" * 32))
    _, report = check(copy, *SHORT)
    assert report["notes"][0].startswith("it was made of other weights (SHA-256 abababababab...)")


# Long


def test_long_runs_in_blocks_and_reports_drift(
    tiny_artifact: Path, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, report = check(tiny_artifact, "--long", 1600)
    assert status == 0
    assert report["reference"] == "eager float32, blocks behind 600 frames of history"
    assert report["frames"] == 1600
    assert abs(report["drift_db"]) < 3
    assert report["first_minute_snr_db"] > 90
    assert report["last_minute_snr_db"] > 90


LONG = """
import resource, sys
import numpy as np
from codecstream_parity import check
from codecstream_parity.references import BlockReference
from support import LedgerProgram, expected_ledger
import codecstream_parity.check as module

def decode(codes):
    return np.zeros(len(codes) * 1920, np.float32)

program = LedgerProgram()
module.load_artifact = lambda *args: program
module._load_checkpoint = lambda *args: None
module._reference = lambda *args: BlockReference("x", decode, 600)
frames = int(sys.argv[2])
module.check(check.Settings(sys.argv[1], checkpoint="x", long=True, frames=frames))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


def test_an_hour_takes_no_more_memory_than_minutes(tiny_artifact: Path) -> None:
    """Without the decoders, whose memory does not depend on the length: 45,000 frames are 345 MB
    of samples for either side."""
    peaks = [
        float(
            subprocess.run(
                [sys.executable, "-c", LONG, str(tiny_artifact), str(frames)],
                check=True,
                capture_output=True,
                text=True,
                env={"PYTHONPATH": str(Path(__file__).parents[1])},
            ).stdout
        )
        for frames in (2_000, 45_000)
    ]
    assert peaks[1] - peaks[0] < 120


# Output


def test_the_table_says_everything(
    tiny_artifact: Path, check: Check, capsys: pytest.CaptureFixture[str]
) -> None:
    check(tiny_artifact, *SHORT)
    printed = capsys.readouterr().out
    for text in (
        "against eager float32, all frames at once",
        "codes: 60 random frames, seed 0",
        "SNR, dB",
        "worst 80 ms, dB",
        "worst seam over usual, dB",
        "not measured: quiet_level_db: no slice of the reference is below -55 dBFS",
        "note: 60 frames do not go beyond the 568",
    ):
        assert text in printed
    assert printed.rstrip().endswith("passed")


def test_a_failure_is_told_with_every_reason(
    tiny_artifact: Path, check: Check, capsys: pytest.CaptureFixture[str]
) -> None:
    _, report = check(tiny_artifact, *SHORT, "--min-snr-db", 150)
    printed = capsys.readouterr().out
    assert printed.rstrip().endswith("falls short")
    for reason in report["reasons"]:
        assert reason in printed


def test_json_on_standard_output(
    tiny_artifact: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(tiny_artifact), "--checkpoint", str(checkpoint), "--frames", "20"]
    assert cli.main([*arguments, "--json", "-"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["passed"] is True
    assert "SNR, dB" in printed.err


def test_a_picture(tmp_path: Path, tiny_artifact: Path, check: Check) -> None:
    status, _ = check(tiny_artifact, *SHORT, "--plot", tmp_path / "a.png")
    assert status == 0
    data = (tmp_path / "a.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = (int.from_bytes(data[i : i + 4], "big") for i in (16, 20))
    assert (width, height) == (1400, 1200)


@pytest.mark.parametrize(
    ("reference", "output"),
    [(0, 0), (0, 3), (3, 0), (1, 1), (2, 1), (3, 3)],
)
def test_a_picture_of_anything(reference: int, output: int, tiny_artifact: Path) -> None:
    """Of silence, of nothing, of NaN: a failing run is what a picture is wanted for."""
    codes = make_codes(3)
    signals = [np.zeros(n * 1920, np.float32) for n in (reference, output)]
    signals[1][:1] = np.nan
    run = compare_pieces(
        "x",
        WholeReference("x", lambda codes: signals[0]),
        [signals[1]],
        codes,
        [1, 2],
        FLOORS["fp32"],
        GEOMETRY,
    )
    assert plots.plot_run(run, "x").startswith(b"\x89PNG")


def test_a_spectrogram_by_hand() -> None:
    """A sine of amplitude 0.5 at a bin's centre: -6 dB there, nothing far away."""
    tone = 0.5 * np.sin(2 * np.pi * 64 * np.arange(24_000) / 1024)
    levels = plots.spectrogram_db(tone.astype(np.float32))
    assert levels.shape[0] == 513
    assert levels[64].mean() == pytest.approx(20 * np.log10(0.5), abs=0.01)
    assert levels[200].max() == -120
    assert plots.spectrogram_db(np.zeros(30_000_000, np.float32)).shape[1] <= 1600


# Wrong use


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "--checkpoint is needed"),
        (("--checkpoint", "no/such"), "no checkpoint 'no/such'"),
        (("--checkpoint", "CHECKPOINT", "--frames", "0"), "frames must be at least 1, not 0"),
        (("--checkpoint", "CHECKPOINT", "--long", "-5"), "frames must be at least 1, not -5"),
        (("--checkpoint", "CHECKPOINT", "--threads", "0"), "threads must be at least 1"),
        (("--checkpoint", "CHECKPOINT", "--schedule", "0"), "positive whole numbers"),
        (("--checkpoint", "CHECKPOINT", "--codes", "no.npy"), "No such file"),
        (("--checkpoint", "CHECKPOINT", "--codes", "TEXT"), "is not a .npy file of numbers"),
        (("--checkpoint", "CHECKPOINT", "--codes", "EMPTY"), "has no frames"),
        (("--checkpoint", "CHECKPOINT", "--codes", "FLOATS"), "codes must be integers"),
        (("--checkpoint", "CHECKPOINT", "--codes", "BIG"), "id 2048 is outside"),
        (("--checkpoint", "CHECKPOINT", "--codes", "NPZ"), "holds several arrays"),
        (("--checkpoint", "CHECKPOINT", "--codes", "GOOD", "--frames", "9"), "has 5 frames, 9"),
        (("--checkpoint", "CHECKPOINT", "--floor", "snr_db"), "NAME=VALUE"),
        (("--checkpoint", "CHECKPOINT", "--floor", "snr_db=high"), "'high' is not a number"),
        (("--checkpoint", "CHECKPOINT", "--floor", "snr=3", "--frames", "2"), "no floor is called"),
        (("--reference-wav", "GOOD"), "with --codes"),
        (("--reference-wav", "GOOD", "--codes", "GOOD"), "cannot be read as sound"),
        (("--reference-artifact", "no/such"), "is not a decoder artifact"),
        (("--reference-artifact", "x", "--reference-wav", "x"), "choose one reference"),
        (("--checkpoint", "CHECKPOINT", "--context", "0"), "at least 1 frame of history"),
        (("--checkpoint", "CHECKPOINT", "--long", "3", "--frames", "4"), "--long says how many"),
    ],
)
def test_wrong_use_is_told_in_one_line(
    tmp_path: Path,
    tiny_artifact: Path,
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    message: str,
) -> None:
    files: dict[str, Any] = {
        "EMPTY": make_codes(0),
        "FLOATS": make_codes(5) / 1,
        "BIG": np.full((2, 16), 2048),
        "GOOD": make_codes(5),
    }
    paths = {"CHECKPOINT": str(checkpoint)}
    for name, array in files.items():
        np.save(tmp_path / f"{name}.npy", array)
        paths[name] = str(tmp_path / f"{name}.npy")
    np.savez(tmp_path / "x.npz", a=make_codes(1))
    (tmp_path / "text").write_text("codes")
    paths |= {"NPZ": str(tmp_path / "x.npz"), "TEXT": str(tmp_path / "text")}
    status = cli.main([str(tiny_artifact), *(paths.get(option, option) for option in options)])
    printed = capsys.readouterr()
    assert status == 2
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert message in printed.err
    assert len(printed.err.splitlines()) == 1


def test_no_artifact(tmp_path: Path, check: Check, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(tmp_path / "nothing") == (2, {})
    assert "is not a decoder artifact" in capsys.readouterr().err


def test_a_schedule_beyond_the_program(windowed_artifact: Path, check: Check) -> None:
    assert check(windowed_artifact, "--schedule", 26) == (2, {})


def test_an_unwritable_report(tiny_artifact: Path, check: Check) -> None:
    assert check(tiny_artifact, *SHORT, "--plot", "/no/such/folder/a.png")[0] == 2


def test_unknown_options_exit_with_2() -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["x", "--no-such-option"])
    assert caught.value.code == 2


def test_without_torch_another_artifact_still_serves(tiny_artifact: Path) -> None:
    """On the device itself: the tool needs neither torch nor the exporter for that."""
    code = (
        "import sys\nsys.modules['torch'] = None\n"
        "from codecstream_parity import cli\n"
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    arguments = [str(tiny_artifact), "--reference-artifact", str(tiny_artifact), "--frames", "30"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "exact" in done.stdout
    done = subprocess.run(
        [sys.executable, "-c", code, str(tiny_artifact), "--checkpoint", "x"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "pip install 'codecstream[parity]'" in done.stderr


def test_as_a_library(tiny_artifact: Path, checkpoint: Path) -> None:
    said: list[str] = []
    outcome = check_module.check(Settings(tiny_artifact, checkpoint, frames=40), said.append)
    assert outcome.passed
    assert outcome.worst_run is outcome.runs[0]
    assert any("40 frames" in text for text in said)
