"""Artifacts and installations that a runtime cannot use: one line that says what to do."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from artifacts import Store
from support import edit_manifest

import codecstream
from codecstream import ArtifactError, MissingDependencyError

Document = dict[str, Any]


@pytest.fixture
def copy(artifact: Path, tmp_path: Path) -> Path:
    """A copy of each runtime's artifact that a test may damage."""
    return Path(shutil.copytree(artifact, tmp_path / "artifact"))


@pytest.fixture
def pt2(store: Store, tmp_path: Path) -> Path:
    """A copy of torch's artifact."""
    pytest.importorskip("torch", reason="needs: pip install 'codecstream[torch]'")
    return Path(shutil.copytree(store.artifact("torch_export"), tmp_path / "artifact"))


@pytest.fixture
def pte(store: Store, tmp_path: Path) -> Path:
    """A copy of ExecuTorch's artifact."""
    if running_executorch() is None:
        pytest.skip("needs: pip install 'codecstream[executorch]'")
    return Path(shutil.copytree(store.artifact("executorch"), tmp_path / "artifact"))


def running_executorch() -> str | None:
    """Return the package that runs ``.pte`` here, with its version."""
    for package in ("executorch-numpy-runtime", "executorch"):
        with suppress(importlib.metadata.PackageNotFoundError):
            return f"{package} {importlib.metadata.version(package)}"
    return None


def the_program(folder: Path) -> Path:
    return folder / json.loads((folder / "manifest.json").read_text())["program"]


def write_program(folder: Path, data: bytes) -> None:
    """Change the program, and the manifest with it: what a careful forger would do."""
    path = the_program(folder)
    path.write_bytes(data)
    entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    edit_manifest(folder, lambda document: document["files"].update({path.name: entry}))


def refusal(folder: Path) -> str:
    with pytest.raises(ArtifactError) as caught:
        codecstream.load_program(folder, threads=1)
    message = str(caught.value)
    assert "\n" not in message and "Traceback" not in message
    return message


# Programs that are none, or not the manifest's


def zipped() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("notes.txt", "no program")
    return file.getvalue()


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut in half": lambda data: data[: len(data) // 2],
    "cut at the end": lambda data: data[:-100],
    "only its head": lambda data: data[:64],
    "of something else": lambda data: b"#!/bin/sh\necho no program\n" * 100,
    "a zip": lambda data: zipped(),
    "zeros": lambda data: bytes(len(data)),
}


@pytest.mark.case(27)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_program_is_one_line(runtime: str, copy: Path, damage: str) -> None:
    write_program(copy, DAMAGES[damage](the_program(copy).read_bytes()))
    if runtime == "executorch":  # the runtime here may in truth be older than the exporter
        edit_manifest(copy, put("1.0.0", "made_with", "executorch"))
    message = refusal(copy)
    assert the_program(copy).name in message or "artifact (" in message
    assert "made with" in message and "export" in message
    if runtime != "onnx":
        assert "copy the artifact again" in message


def put(value: Any, *path: str | int) -> Callable[[Document], object]:
    def change(document: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = value

    return change


def resize_state(document: Document) -> None:
    for kind in ("inputs", "outputs"):
        document[kind][-1]["shape"][-1] += 1


def swap_states(document: Document) -> None:
    for items in (document["inputs"], document["outputs"], document["state"]):
        items[-2], items[-1] = items[-1], items[-2]


def drop_state(document: Document) -> None:
    for items in (document["inputs"], document["outputs"], document["state"]):
        del items[-1]


UNLIKE: dict[str, Callable[[Document], object]] = {
    "state of another shape": resize_state,
    "states swapped": swap_states,
    "a state less": drop_state,
    "fewer codebooks": lambda d: (
        put(8, "geometry", "codebooks")(d),
        put([1, 8, "frames"], "inputs", 0, "shape")(d),
    ),
}


@pytest.mark.parametrize("difference", UNLIKE)
def test_a_program_unlike_its_manifest_is_refused_before_it_runs(
    runtime: str, copy: Path, difference: str
) -> None:
    edit_manifest(copy, UNLIKE[difference])
    if (runtime, difference) == ("onnx", "states swapped"):
        codecstream.load_program(copy)  # it is called by name
    else:
        assert "export again" in refusal(copy)


@pytest.mark.case(38)
@pytest.mark.parametrize("bound", [24, 26, None])
def test_another_bound_than_the_programs_is_refused(pte: Path, bound: int | None) -> None:
    edit_manifest(pte, lambda d: d.update(frames={"min": 1, "max": bound}, ramp=[2]))
    assert "export again" in refusal(pte)


# Versions


@pytest.mark.case(27)
def test_a_program_of_a_newer_torch_is_not_even_opened(
    pt2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = importlib.import_module("torch")
    monkeypatch.setattr(torch.export, "load", None)
    edit_manifest(pt2, put("99.1.0+cu999", "made_with", "torch"))
    message = refusal(pt2)
    assert f"made with torch 99.1.0+cu999, running torch {torch.__version__}" in message
    assert "install torch 99.1.0 or newer, or export again" in message


@pytest.mark.case(35)
def test_a_program_of_a_newer_executorch_says_so(pte: Path) -> None:
    """It may well run, so it is tried; only what the runtime rejects is put down to its age."""
    edit_manifest(pte, put("99.1.0", "made_with", "executorch"))
    codecstream.load_program(pte, threads=1, warmup=False)
    data = the_program(pte).read_bytes()
    assert data[4:6] == b"ET"
    write_program(pte, data[:4] + b"ET99" + data[8:])
    message = refusal(pte)
    assert f"made with ExecuTorch 99.1.0, running {running_executorch()}" in message
    assert "install a newer one, or export with executorch" in message

    edit_manifest(pte, put("1.0.0", "made_with", "executorch"))  # the same, but not for its age
    message = refusal(pte)
    assert f"made with ExecuTorch 1.0.0, running {running_executorch()}" in message
    assert "install a newer" not in message and "copy the artifact again" in message


# Archives that would run code


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.path),)


def rewrite(path: Path, change: Callable[[str, bytes], bytes]) -> None:
    """Rewrite the members of an archive, which torch wants stored and in place."""
    with zipfile.ZipFile(path) as archive:
        members = {name: change(name, archive.read(name)) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def pickled_samples(bomb: Bomb) -> Callable[[str, bytes], bytes]:
    return lambda name, data: pickle.dumps(bomb) if "sample_inputs" in name else data


def pickled_weight(bomb: Bomb) -> Callable[[str, bytes], bytes]:
    def change(name: str, data: bytes) -> bytes:
        if name.endswith("/weight_0"):
            return pickle.dumps(bomb)
        if name.endswith("weights_config.json"):
            return data.replace(b'"use_pickle": false', b'"use_pickle": true', 1)
        return data

    return change


def custom_constant(bomb: Bomb) -> Callable[[str, bytes], bytes]:
    def change(name: str, data: bytes) -> bytes:
        if name.endswith("constants_config.json"):
            entry = {"path_name": "custom_obj_0", "is_param": False, "use_pickle": True}
            return json.dumps({"config": {"x": {**entry, "tensor_meta": None}}}).encode()
        return data

    return change


def code_for_a_size(bomb: Bomb) -> Callable[[str, bytes], bytes]:
    def change(name: str, data: bytes) -> bytes:
        if "/models/" in name:
            size = b"__import__('os').mkdir(" + json.dumps(str(bomb.path))[1:-1].join("''").encode()
            place = data.index(b'"expr_str": "') + len(b'"expr_str": "')
            return data[:place] + size + b") or " + data[place:]
        return data

    return change


BOMBS = {
    "sample inputs": (pickled_samples, "sample_inputs"),
    "a weight": (pickled_weight, "pickled object"),
    "a constant": (custom_constant, "'custom_obj_0' as a pickled object"),
    "a size": (code_for_a_size, "for a size, which can run code"),
}


@pytest.mark.case(27)
@pytest.mark.parametrize("place", BOMBS)
def test_an_archive_that_would_run_code_is_refused_before(
    pt2: Path, tmp_path: Path, place: str
) -> None:
    make, reason = BOMBS[place]
    bomb = Bomb(tmp_path / "made-by-the-archive")
    if place == "sample inputs":  # rewriting alone does no harm
        rewrite(the_program(pt2), lambda name, data: data)
        write_program(pt2, the_program(pt2).read_bytes())
        codecstream.load_program(pt2, threads=1, warmup=False)
    rewrite(the_program(pt2), make(bomb))
    write_program(pt2, the_program(pt2).read_bytes())
    message = refusal(pt2)
    assert reason in message
    assert not bomb.path.exists()


@pytest.mark.case(27)
@pytest.mark.parametrize("place", ["sample inputs", "a weight", "a size"])
def test_those_archives_do_run_code_where_nobody_looks(
    pt2: Path, tmp_path: Path, place: str
) -> None:
    """Otherwise the test above would prove nothing."""
    bomb = Bomb(tmp_path / "made-by-the-archive")
    rewrite(the_program(pt2), BOMBS[place][0](bomb))
    torch = importlib.import_module("torch")
    with suppress(Exception):  # by then it has done its work
        torch.export.load(str(the_program(pt2)))
    assert bomb.path.exists()


@pytest.mark.case(27)
def test_a_file_of_torch_save_is_no_program(pt2: Path, tmp_path: Path) -> None:
    torch = importlib.import_module("torch")
    bomb = Bomb(tmp_path / "made-by-the-archive")
    torch.save({"weights": torch.zeros(3), "bomb": bomb}, tmp_path / "saved.pt")
    write_program(pt2, (tmp_path / "saved.pt").read_bytes())
    assert "decoder.pt2 is not a program that torch" in refusal(pt2)
    assert not bomb.path.exists()


# Runtimes that are not there

PACKAGES = {
    "onnx": (["onnxruntime"], "pip install 'codecstream[onnx]'"),
    "torch_export": (["torch"], "pip install 'codecstream[torch]'"),
    "executorch": (
        ["executorch_numpy_runtime", "executorch"],
        "pip install 'codecstream[executorch]' under Python 3.12 or newer, or pip install",
    ),
}

TRY = """
import json, sys
import codecstream
messages = {}
for path in sys.argv[1:]:
    try:
        codecstream.load_program(path, threads=1, warmup=False)
        messages[path] = None
    except Exception as error:
        messages[path] = f"{type(error).__name__}: {error}"
print(json.dumps(messages))
"""


def attempt(stubs: Path, *folders: Path) -> list[str | None]:
    """Load artifacts in a process that finds the packages in ``stubs`` first."""
    path = os.pathsep.join([str(stubs), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", TRY, *map(str, folders)],
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    messages = json.loads(done.stdout.splitlines()[-1])
    return [messages[str(folder)] for folder in folders]


def no_program(folder: Path, runtime: str) -> Path:
    """An artifact of the right form whose program is none: it needs the runtime to say so."""
    folder.mkdir()
    (folder / "decoder.bin").write_bytes(b"nothing")
    state = {"dtype": "float32", "shape": [1, 71]}
    document = {
        "format": "codecstream-decoder",
        "format_version": 1,
        "runtime": runtime,
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
        "frames": {"min": 1, "max": 25},
        "ramp": [2],
        "program": "decoder.bin",
        "inputs": [
            {"name": "codes", "dtype": "int64", "shape": [1, 16, "frames"]},
            {"name": "frames_valid", **state},
        ],
        "outputs": [
            {"name": "pcm", "dtype": "float32", "shape": ["1920 * frames"]},
            {"name": "next.frames_valid", **state},
        ],
        "state": [{"input": "frames_valid", "output": "next.frames_valid"}],
        "files": {"decoder.bin": {"bytes": 7, "sha256": hashlib.sha256(b"nothing").hexdigest()}},
        "made_with": {},
    }
    (folder / "manifest.json").write_text(json.dumps(document))
    return folder


@pytest.mark.case(42)
@pytest.mark.parametrize(
    "reason",
    [
        "ImportError('undefined symbol: _ZN3c104impl')",
        "ModuleNotFoundError('No module named x')",
        "OSError('libgomp.so.1: cannot open shared object file')",
    ],
)
@pytest.mark.parametrize("name", PACKAGES)
def test_case_42_a_runtime_that_does_not_import(tmp_path: Path, name: str, reason: str) -> None:
    """Also where it stands on disk without being installed, as a folder beside the program does."""
    packages, pip_line = PACKAGES[name]
    for package in packages:
        (tmp_path / "stubs" / package).mkdir(parents=True)
        (tmp_path / "stubs" / package / "__init__.py").write_text(f"raise {reason}\n")
    (message,) = attempt(tmp_path / "stubs", no_program(tmp_path / "artifact", name))
    assert message is not None and "\n" not in message
    assert message.startswith("MissingDependencyError: this artifact needs")
    assert reason.split("'")[1] in message
    assert pip_line in message
    if name == "executorch":
        assert f"numpy {importlib.metadata.version('numpy')}" in message


@pytest.mark.case(42)
def test_case_42_the_other_runtimes_go_on(runtime: str, artifact: Path, tmp_path: Path) -> None:
    """One runtime is broken; programs of another load in the same process afterwards."""
    broken = "onnx" if runtime != "onnx" else "executorch"
    for package in PACKAGES[broken][0]:
        (tmp_path / "stubs" / package).mkdir(parents=True)
        (tmp_path / "stubs" / package / "__init__.py").write_text(
            "raise ImportError('undefined symbol: _ZN3c104impl')\n"
        )
    first = no_program(tmp_path / "artifact", broken)
    messages = attempt(tmp_path / "stubs", first, artifact)
    assert "undefined symbol" in str(messages[0])
    assert messages[1] is None


@pytest.mark.case(42)
def test_a_folder_named_like_a_runtime_is_no_runtime(tmp_path: Path) -> None:
    """Python takes any folder for a package: a clone beside the script, for one."""
    for package in PACKAGES["executorch"][0]:
        (tmp_path / "stubs" / package).mkdir(parents=True)
    folder = no_program(tmp_path / "artifact", "executorch")
    for value in (*PACKAGES["executorch"][0], "torch"):
        (tmp_path / "stubs" / value).mkdir(exist_ok=True)
        (tmp_path / "stubs" / value / "__init__.py").write_text("")
    (message,) = attempt(tmp_path / "stubs", folder)
    assert message is not None and message.startswith("MissingDependencyError: ")


def test_missing_dependencies_are_import_errors() -> None:
    """Code that guards its imports in the usual way catches them too."""
    assert issubclass(MissingDependencyError, ImportError)
