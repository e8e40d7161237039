"""The one file of weights that windowed programs share: not trusted, and named when bad."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from artifacts import Store

import codecstream
from codecstream import ArtifactError

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
