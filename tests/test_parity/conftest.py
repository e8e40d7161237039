"""The tiny decoder's artifacts and checkpoint, and the command in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from artifacts import Store
from support import Check

from codecstream_parity import cli


@pytest.fixture
def checkpoint(store: Store) -> Path:
    return store.checkpoint()


@pytest.fixture
def windowed_artifact(store: Store) -> Path:
    pytest.importorskip("onnxruntime")
    return store.artifact("onnx windowed")


@pytest.fixture
def check(tmp_path: Path, checkpoint: Path) -> Check:
    """Run ``codecstream-parity`` on the tiny checkpoint; return its status and its JSON."""

    def run(subject: Path, *options: object) -> tuple[int, dict[str, Any]]:
        file = tmp_path / "report.json"
        arguments = [str(subject), "--json", str(file), *map(str, options)]
        if not {"--checkpoint", "--reference-wav", "--reference-artifact"} & set(arguments):
            arguments += ["--checkpoint", str(checkpoint)]
        status = cli.main(arguments)
        return status, json.loads(file.read_text()) if file.exists() else {}

    return run
