"""Artifacts on disk: nothing in them is trusted, and what is wrong is named."""

from __future__ import annotations

import builtins
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import LedgerProgram, edit_manifest, make_codes

import codecstream
from codecstream import ArtifactError, MissingDependencyError
from codecstream.artifact import open_artifact
from codecstream.runtimes import warm_up

Document = dict[str, Any]

CODES = make_codes(10)


@pytest.fixture
def artifact(tiny_artifact: Path, tmp_path: Path) -> Path:
    """A copy of the tiny artifact that a test may damage."""
    return Path(shutil.copytree(tiny_artifact, tmp_path / "artifact"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An artifact of the right form whose program is no program: no torch, no runtime."""
    (tmp_path / "decoder.onnx").write_bytes(b"not an ONNX file")
    document = {
        "format": "codecstream-decoder",
        "format_version": 1,
        "runtime": "onnx",
        "precision": "fp32",
        "mode": "stateful",
        "decoder_id": "test",
        "geometry": {
            "codebooks": 16,
            "codebook_size": 2048,
            "frame_rate_hz": 12.5,
            "sample_rate_hz": 24000,
            "samples_per_frame": 1920,
        },
        "frames": {"min": 1, "max": None},
        "ramp": [2, 25],
        "program": "decoder.onnx",
        "inputs": [
            {"name": "codes", "dtype": "int64", "shape": [1, 16, "frames"]},
            {"name": "keys", "dtype": "float32", "shape": [2, 71, 8]},
            {"name": "values", "dtype": "float32", "shape": [2, 71, 8]},
        ],
        "outputs": [
            {"name": "pcm", "dtype": "float32", "shape": ["1920 * frames"]},
            {"name": "next.keys", "dtype": "float32", "shape": [2, 71, 8]},
            {"name": "next.values", "dtype": "float32", "shape": [2, 71, 8]},
        ],
        "state": [
            {"input": "keys", "output": "next.keys", "fill": 0.0},
            {"input": "values", "output": "next.values", "fill": 0.0},
        ],
        "files": {
            "decoder.onnx": {
                "bytes": 16,
                "sha256": hashlib.sha256(b"not an ONNX file").hexdigest(),
            }
        },
        "made_with": {"codecstream": "0.1.0"},
    }
    (tmp_path / "manifest.json").write_text(json.dumps(document))
    return tmp_path


def flip_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


# Files


BAD_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "deleted": (lambda p: p.unlink(), "No such file"),
    "renamed": (lambda p: p.rename(p.with_name("model.onnx")), "No such file"),
    "truncated": (lambda p: p.write_bytes(p.read_bytes()[:-1]), "its manifest says"),
    "emptied": (lambda p: p.write_bytes(b""), "has 0 bytes, its manifest says"),
    "appended to": (lambda p: p.write_bytes(p.read_bytes() + b"x"), "its manifest says"),
    "a folder": (make_folder, "artifact"),
    "one bit changed": (flip_byte, "SHA-256 differs"),
}


@pytest.mark.case(31)
@pytest.mark.parametrize("damage", BAD_FILES)
def test_a_bad_program_file_is_named_by_its_path(folder: Path, damage: str) -> None:
    change, message = BAD_FILES[damage]
    open_artifact(folder)
    change(folder / "decoder.onnx")
    with pytest.raises(ArtifactError) as caught:
        codecstream.load_program(folder)
    assert str(folder / "decoder.onnx") in str(caught.value)
    assert message in str(caught.value)


def test_hashes_may_be_skipped_and_sizes_may_not(folder: Path) -> None:
    flip_byte(folder / "decoder.onnx")
    open_artifact(folder, verify_hashes=False)
    (folder / "decoder.onnx").write_bytes(b"")
    with pytest.raises(ArtifactError, match="has 0 bytes"):
        open_artifact(folder, verify_hashes=False)


def test_a_file_that_is_no_program_is_named(folder: Path) -> None:
    pytest.importorskip("onnxruntime")
    with pytest.raises(ArtifactError, match=r"cannot load decoder.onnx .* export again$") as caught:
        codecstream.load_program(folder)
    assert "\n" not in str(caught.value)


# Manifests


BAD_TEXTS: dict[str, tuple[bytes | None, str]] = {
    "missing": (None, "is not a decoder artifact: manifest.json: No such file"),
    "empty": (b"", "not a valid manifest"),
    "not JSON": (b"{runtime: onnx}", "not a valid manifest"),
    "cut short": (b'{"format": "codecstream-decoder", ', "not a valid manifest"),
    "not text": (b"\xff\xfe\x00", "not a valid manifest"),
    "a list": (b"[]", "not the manifest of a decoder artifact"),
    "of something else": (b'{"format": "web-app"}', "not the manifest of a decoder artifact"),
    "too deep": (b"[" * 100_000, "not a valid manifest"),
    "only a head": (b'{"format": "codecstream-decoder", "format_version": 1}', "missing required"),
    "huge": (b" " * (1024 * 1024 + 1), "larger than 1048576 bytes"),
}


@pytest.mark.parametrize("text", BAD_TEXTS)
def test_a_bad_manifest_is_named(folder: Path, text: str) -> None:
    data, message = BAD_TEXTS[text]
    if data is None:
        (folder / "manifest.json").unlink()
    else:
        (folder / "manifest.json").write_bytes(data)
    with pytest.raises(ArtifactError) as caught:
        open_artifact(folder)
    assert message in str(caught.value)
    assert str(folder) in str(caught.value)


def rename_file(name: str) -> Callable[[Document], object]:
    def change(document: Document) -> None:
        document["files"] = {name: document["files"]["decoder.onnx"]}
        document["program"] = name

    return change


def put(value: Any, *path: str | int) -> Callable[[Document], object]:
    """Return a change of one value deep in the manifest."""

    def change(document: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = value

    return change


HUGE = 10**9

BAD_MANIFESTS: dict[str, tuple[Callable[[Document], object], str]] = {
    **{
        f"file {name!r}": (rename_file(name), "is not a plain file name")
        for name in ("../x", "/etc/passwd", "a/b", "C:\\x", "..", ".", "", "x\0", "manifest.json")
    },
    "newer format": (put(2, "format_version"), "has format version 2, this codecstream reads 1"),
    "odd format": (put("1", "format_version"), "has format version '1'"),
    "program not listed": (put("other.onnx", "program"), "program 'other.onnx' is not among"),
    "no files": (put({}, "files"), "is not among its files"),
    "24,001 Hz": (put(24001, "geometry", "sample_rate_hz"), "not a whole number of samples"),
    "no codebooks": (put(0, "geometry", "codebooks"), "codebooks must be positive, not 0"),
    "negative rate": (put(-12.5, "geometry", "frame_rate_hz"), "frame_rate_hz must be positive"),
    "tiny rate": (put(1e-300, "geometry", "frame_rate_hz"), "geometry"),
    "other samples": (put(1365, "geometry", "samples_per_frame"), "the rates give 1920"),
    "text as number": (put("16", "geometry", "codebooks"), "Expected `int`"),
    "starts at 2": (put(2, "frames", "min"), "cannot stream"),
    "ends at 0": (put(0, "frames", "max"), "cannot stream"),
    "unknown state": (put("hidden", "state", 0, "input"), "state 'hidden' is not an input"),
    "unknown next state": (put("hidden", "state", 0, "output"), "is not an input and an output"),
    # Whatever passes here reaches a runtime, or numpy, with numbers that somebody else chose.
    "codebooks unlike the input": (put(8, "geometry", "codebooks"), "manifest"),
    "no chunk sizes of 0": (put([0], "ramp"), "ramp"),
    "no negative chunk sizes": (put([2, -1], "ramp"), "ramp"),
    "ramp beyond the bound": (put({"min": 1, "max": 8}, "frames"), "ramp"),
    "endless ramp": (put([HUGE], "ramp"), "ramp"),
    "state without a partner": (lambda d: d["state"].pop(), "manifest"),
    "the same state twice": (lambda d: d["state"].append(d["state"][0]), "manifest"),
    "codes as state": (put({"input": "codes", "output": "pcm"}, "state", 0), "manifest"),
    "state changes shape": (put([2, 71, 9], "outputs", 1, "shape"), "manifest"),
    "state of unknown length": (put([2, "n", 8], "inputs", 1, "shape"), "manifest"),
    "no codes": (lambda d: d["inputs"].pop(0), "manifest"),
    "windows beside a program": (
        put([{"frames": 2, "program": "decoder.onnx"}], "windows"),
        "a stateful artifact has one program, a windowed one has windows",
    ),
    "a context beside a program": (put(72, "context"), "a stateful one has none"),
    # Some runtimes are called by position.
    "codes not first": (lambda d: d["inputs"].insert(1, d["inputs"].pop(0)), "in this order"),
    "pcm not first": (lambda d: d["outputs"].reverse(), "in this order"),
    "states in another order": (lambda d: d["state"].reverse(), "in this order"),
    "next states in another order": (
        lambda d: d["outputs"].append(d["outputs"].pop(1)),
        "in this order",
    ),
}


# The same program as a windowed artifact.
WINDOWS: Document = {
    "mode": "windowed",
    "context": 72,
    "frames": {"min": 1, "max": 25},
    "ramp": [2, 25],
    "windows": [
        {"frames": 2, "program": "decoder.onnx", "method": "frames_2"},
        {"frames": 25, "program": "decoder.onnx", "method": "frames_25"},
    ],
    "inputs": [
        {"name": "codes", "dtype": "int64", "shape": [1, 16, "context + frames"]},
        {"name": "frames_real", "dtype": "int64", "shape": [1]},
    ],
    "outputs": [{"name": "pcm", "dtype": "float32", "shape": ["1920 * frames"]}],
    "state": [],
}


def make_windowed(document: Document) -> None:
    del document["program"]
    document.update(json.loads(json.dumps(WINDOWS)))


def give_state(document: Document) -> None:
    document["inputs"].append({"name": "keys", "dtype": "float32", "shape": [2]})
    document["outputs"].append({"name": "next.keys", "dtype": "float32", "shape": [2]})
    document["state"].append({"input": "keys", "output": "next.keys"})


BAD_WINDOWS: dict[str, tuple[Callable[[Document], object], str]] = {
    "falling": (lambda d: d["windows"].reverse(), "windows must be for rising numbers of frames"),
    "twice the same": (put(25, "windows", 0, "frames"), "rising numbers of frames, not [25, 25]"),
    "of no frames": (put(0, "windows", 0, "frames"), "rising numbers of frames, not [0, 25]"),
    "none": (put([], "windows"), "a windowed one has windows"),
    "and a program": (put("decoder.onnx", "program"), "a stateful artifact has one program"),
    "no context": (lambda d: d.pop("context"), "a windowed artifact has a context"),
    "context of 25": (put(25, "context"), "less than the decoder's attention window of 72 frames"),
    "context of 71": (put(71, "context"), "a context of 71 frames"),
    "endless context": (put(HUGE, "context"), "a context of 1000000000 frames"),
    "other bound": (put(26, "frames", "max"), "the largest window is for 25 frames, not 26"),
    "no bound": (put(None, "frames", "max"), "the largest window is for 25 frames, not None"),
    "ramp beyond it": (put([2, 26], "ramp"), "the ramp must have sizes from 1 to 25 frames"),
    "file not listed": (put("x.onnx", "windows", 0, "program"), "program 'x.onnx' is not among"),
    "with state": (give_state, "a windowed program has no state"),
    "no count": (lambda d: d["inputs"].pop(), "and a count, int64 [1]"),
    "count first": (lambda d: d["inputs"].reverse(), "codes, int64 [1, 16, context + frames]"),
    "called stateful": (put("stateful", "mode"), "a stateful artifact has one program"),
    "unknown mode": (put("parallel", "mode"), "mode is 'parallel', not one of stateful, windowed"),
}


@pytest.mark.case(15)
@pytest.mark.parametrize("damage", BAD_WINDOWS)
def test_a_windowed_manifest_that_contradicts_itself_is_named(folder: Path, damage: str) -> None:
    edit_manifest(folder, make_windowed)
    assert open_artifact(folder).manifest.context == 72
    change, message = BAD_WINDOWS[damage]
    edit_manifest(folder, change)
    with pytest.raises(ArtifactError) as caught:
        open_artifact(folder)
    assert message in str(caught.value)


def test_a_windowed_artifact_has_no_single_program(folder: Path) -> None:
    edit_manifest(folder, make_windowed)
    with pytest.raises(ArtifactError, match="is a windowed artifact: it has several programs"):
        _ = open_artifact(folder).program_path


@pytest.mark.parametrize("damage", BAD_MANIFESTS)
def test_a_bad_value_in_the_manifest_is_named(folder: Path, damage: str) -> None:
    change, message = BAD_MANIFESTS[damage]
    edit_manifest(folder, change)
    with pytest.raises(ArtifactError) as caught:
        open_artifact(folder)
    assert message in str(caught.value)


def test_an_endless_rate_is_refused(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace("12.5", "1e400"))
    with pytest.raises(ArtifactError):
        open_artifact(folder)


def test_fields_that_a_later_writer_adds_are_ignored(folder: Path) -> None:
    edit_manifest(folder, put({"size": 1}, "notes"))
    open_artifact(folder)


@pytest.mark.parametrize("runtime", ["os", "codecstream.runtimes.onnx", "", "ONNX"])
def test_a_program_for_an_unknown_runtime_is_refused(folder: Path, runtime: str) -> None:
    """The name chooses a module, so it is one of a list and nothing else."""
    edit_manifest(folder, put(runtime, "runtime"))
    with pytest.raises(ArtifactError) as caught:
        codecstream.load_program(folder)
    message = f"is a program for {runtime!r}; this codecstream runs executorch, onnx, torch_export"
    assert message in str(caught.value)


SIGNATURES: dict[str, tuple[Callable[[Document], object], str]] = {
    "input gone": (lambda d: d["inputs"][1].update(name="older"), "input 'older'"),
    "other shape": (put([1, 8, "frames"], "inputs", 0, "shape"), "input 'codes'"),
    "other dtype": (put("int32", "inputs", 0, "dtype"), "input 'codes'"),
    "unknown dtype": (put("bfloat16", "outputs", 0, "dtype"), "output 'pcm'"),
    "fixed length": (put([1920], "outputs", 0, "shape"), "output 'pcm'"),
}


@pytest.mark.parametrize("damage", SIGNATURES)
def test_a_program_unlike_its_manifest_is_refused(artifact: Path, damage: str) -> None:
    change, name = SIGNATURES[damage]
    edit_manifest(artifact, change)
    with pytest.raises(ArtifactError) as caught:
        codecstream.load_program(artifact)
    assert name in str(caught.value) or "manifest" in str(caught.value)


# What loading needs


@pytest.mark.parametrize("reason", ["No module named 'onnxruntime'", "undefined symbol: _ZN3Ort"])
def test_a_missing_runtime_is_reported_with_the_pip_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    plain = builtins.__import__

    def without_onnxruntime(name: str, *more: Any) -> Any:
        if name == "onnxruntime":
            raise ImportError(reason)
        return plain(name, *more)

    monkeypatch.setattr(builtins, "__import__", without_onnxruntime)
    with pytest.raises(MissingDependencyError) as caught:
        codecstream.load_program(folder)
    assert "pip install 'codecstream[onnx]'" in str(caught.value)
    assert reason in str(caught.value)


@pytest.mark.parametrize("threads", [0, -1])
def test_threads_are_positive(tmp_path: Path, threads: int) -> None:
    with pytest.raises(ValueError, match=f"threads must be at least 1, not {threads}"):
        codecstream.load_program(tmp_path, threads=threads)


@pytest.mark.case(29)
def test_warming_up_runs_each_size_once(folder: Path, ledger_program: LedgerProgram) -> None:
    edit_manifest(folder, put([2, 4, 25, 4], "ramp"))
    warm_up(ledger_program, open_artifact(folder).manifest.ramp)
    assert ledger_program.calls == [2, 4, 25]


def test_importing_the_package_is_light() -> None:
    code = (
        "import codecstream, sys; print([m for m in ('torch', 'onnxruntime', 'onnx', 'sounddevice',"
        " 'websockets') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", os.fspath(sys.executable)
