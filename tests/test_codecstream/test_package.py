"""What a device pays for: light imports, and everything documented runs."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import codecstream

MODULES = [
    info.name
    for info in pkgutil.walk_packages(codecstream.__path__, "codecstream.")
    if info.name != "codecstream.demo"  # has a test of its own, with its data
]


def run(code: str) -> str:
    """Run ``code`` in a new interpreter, away from the repository; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(sys.executable).parent,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_loads_nothing_heavy() -> None:
    heavy = "torch onnxruntime onnx sounddevice soxr websockets rich asyncio ssl"
    code = f"import sys, codecstream; print([m for m in '{heavy}'.split() if m in sys.modules])"
    assert run(code) == "[]"


def test_names_are_all_there() -> None:
    code = (
        "import codecstream; print([n for n in codecstream.__all__ if not hasattr(codecstream, n)])"
    )
    assert run(code) == "[]"
    with pytest.raises(AttributeError, match="no attribute 'conect'"):
        _ = codecstream.conect  # type: ignore[attr-defined]


@pytest.mark.case(44)
@pytest.mark.parametrize("missing", ["sounddevice", "soxr", "torch", "onnxruntime"])
def test_case_44_import_works_without_optional_packages(missing: str) -> None:
    modules = "codecstream.client, codecstream.wav, codecstream.sinks, codecstream.playback"
    run(f"import sys; sys.modules[{missing!r}] = None; import {modules}")


NEEDS = {"codecstream.resample": "soxr"}  # modules whose example runs an optional package


@pytest.mark.parametrize("name", ["codecstream", *MODULES, "codecstream_parity"])
def test_docstring_examples_run(name: str) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
