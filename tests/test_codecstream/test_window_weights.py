"""The one file of weights that windowed programs share: read without trust, named when bad."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from artifacts import Store

import codecstream
from codecstream import ArtifactError
from codecstream.runtimes.tensors import read_tensors

VALUES = np.arange(6, dtype=np.float32).reshape(2, 3)


def entry(dtype: str = "F32", shape: tuple[int, ...] = (2, 3), end: int = 24) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [0, end]}


def safetensors(header: Any, data: bytes, size: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def test_tensors_are_read_by_name(tmp_path: Path) -> None:
    whole = np.array([1, -2], np.int16)
    header = {
        "__metadata__": {"made": "by hand"},
        "a": entry(),
        "b": {"dtype": "I16", "shape": [2], "data_offsets": [24, 28]},
        "none": {"dtype": "I8", "shape": [0], "data_offsets": [28, 28]},
    }
    path = tmp_path / "weights.safetensors"
    path.write_bytes(safetensors(header, VALUES.tobytes() + whole.tobytes()))
    tensors = read_tensors(path)
    assert tensors.keys() == {"a", "b", "none"}
    assert np.array_equal(tensors["a"], VALUES) and tensors["a"].dtype == np.float32
    assert np.array_equal(tensors["b"], whole) and tensors["b"].dtype == np.int16
    assert tensors["none"].shape == (0,)
    assert not tensors["a"].flags.writeable


def test_the_format_is_that_of_the_safetensors_package(tmp_path: Path) -> None:
    package = pytest.importorskip("safetensors.numpy")
    package.save_file({"a": VALUES, "b": np.ones(3, np.float16)}, tmp_path / "x.safetensors")
    tensors = read_tensors(tmp_path / "x.safetensors")
    assert np.array_equal(tensors["a"], VALUES)
    assert np.array_equal(tensors["b"], np.ones(3, np.float16))


DATA = VALUES.tobytes()
BAD: dict[str, bytes] = {
    "empty": b"",
    "seven bytes": b"1234567",
    "no header": safetensors(b"", b""),
    "no JSON": safetensors(b"{not json", DATA),
    "a list": safetensors([], DATA),
    "header beyond the end": safetensors({"a": entry()}, DATA, size=10_000),
    "endless header": safetensors({"a": entry()}, DATA, size=2**63),
    "data cut": safetensors({"a": entry()}, DATA[:-1]),
    "end before begin": safetensors({"a": {**entry(), "data_offsets": [24, 0]}}, DATA),
    "begins before the data": safetensors({"a": {**entry(), "data_offsets": [-24, 0]}}, DATA),
    "unknown dtype": safetensors({"a": entry(dtype="F8_E5M2")}, DATA),
    "half a number": safetensors({"a": entry(end=23)}, DATA),
    "another shape": safetensors({"a": entry(shape=(2, 4))}, DATA),
    "an endless shape": safetensors({"a": entry(shape=(2**62, 4))}, DATA),
    "no shape": safetensors({"a": {"dtype": "F32", "data_offsets": [0, 24]}}, DATA),
    "text for numbers": safetensors({"a": {**entry(), "shape": ["2", 3]}}, DATA),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_named_in_one_line(tmp_path: Path, case: str) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(BAD[case])
    with pytest.raises(ArtifactError) as caught:
        read_tensors(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


# In artifacts

PACKAGES = {"onnx windowed": "onnxruntime", "torch_export windowed": "torch"}


@pytest.fixture(params=list(PACKAGES))
def folder(request: pytest.FixtureRequest, store: Store, tmp_path: Path) -> Path:
    pytest.importorskip(PACKAGES[request.param])
    return Path(shutil.copytree(store.artifact(request.param), tmp_path / "artifact"))


def weights_of(folder: Path) -> Path:
    (path,) = (path for path in folder.iterdir() if path.name.startswith("weights."))
    return path


def refusal(folder: Path) -> str:
    with pytest.raises(ArtifactError) as caught:
        codecstream.load_program(folder, threads=1)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit_files(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "manifest.json"
    document = json.loads(path.read_text())
    change(document["files"])
    path.write_text(json.dumps(document))


@pytest.mark.case(31)
@pytest.mark.parametrize("damage", ["deleted", "cut", "not in the manifest", "of something else"])
def test_case_31_weights_that_did_not_travel_are_named(folder: Path, damage: str) -> None:
    path = weights_of(folder)
    if damage == "deleted":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "not in the manifest":
        edit_files(folder, lambda files: files.pop(path.name))
    else:
        data = b"no weights" * 100
        path.write_bytes(data)
        digest = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        edit_files(folder, lambda files: files.update({path.name: digest}))
    assert path.name in refusal(folder)


class Bomb:
    """Unpickling it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.path),)


def test_weights_that_would_run_code_are_refused(store: Store, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    folder = Path(shutil.copytree(store.artifact("torch_export windowed"), tmp_path / "artifact"))
    path = weights_of(folder)
    bomb = Bomb(tmp_path / "made-by-the-weights")
    torch.save({"weight": bomb}, path)
    data = path.read_bytes()
    digest = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    edit_files(folder, lambda files: files.update({path.name: digest}))
    assert path.name in refusal(folder)
    assert not bomb.path.exists()
