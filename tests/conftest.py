"""Fixtures: the tiny decoder and its artifacts, made once per session, and the ledger decoder."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import stalls
from artifacts import FOLDER_VARIABLE, Store, skip_or_fail
from support import LedgerProgram

import codecstream
from codecstream import Program

if TYPE_CHECKING:
    from codecstream_export import EagerDecoder

# For torch, which reads it at import: at the tiny decoder's widths its threads only wait for each
# other, and a test takes ten times as long when the machine has anything else to do.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Any of a runtime's packages runs its programs.
PACKAGES = {
    "onnx": ("onnxruntime",),
    "executorch": ("executorch_numpy_runtime", "executorch"),
    "torch_export": ("torch",),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--stalls",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="stand the process still at random moments, for up to so long",
    )


def pytest_configure(config: pytest.Config) -> None:
    if longest_s := config.getoption("--stalls"):
        stalls.begin(longest_s)


@pytest.fixture
def ledger_program() -> LedgerProgram:
    return LedgerProgram()


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Artifacts and references by name."""
    if folder := os.environ.get(FOLDER_VARIABLE):
        return Store(Path(folder).absolute())
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return Store(tmp_path_factory.mktemp("artifacts"))
    shared = tmp_path_factory.getbasetemp().parent / "artifacts"  # by the workers of one session
    shared.mkdir(exist_ok=True)
    return Store(shared)


@pytest.fixture(scope="session", params=list(PACKAGES))
def runtime(request: pytest.FixtureRequest) -> str:
    """The name of each runtime in turn; skips those that are not installed."""
    name: str = request.param
    if not any(importlib.util.find_spec(package) for package in PACKAGES[name]):
        skip_or_fail(name, f"none of {', '.join(PACKAGES[name])} is installed")
    return name


@pytest.fixture(scope="session")
def artifact(store: Store, runtime: str) -> Path:
    """The tiny decoder as an artifact for each runtime; tests must not write into it."""
    return store.artifact(runtime)


@pytest.fixture(scope="session")
def program(artifact: Path) -> Program:
    """The tiny decoder's program in each runtime."""
    return codecstream.load_program(artifact, threads=1)


@pytest.fixture(scope="session")
def tiny_decoder(store: Store) -> EagerDecoder:
    """The real architecture at small widths, seeded non-zero random weights."""
    return store.decoder()


@pytest.fixture(scope="session")
def tiny_checkpoint(store: Store) -> Path:
    return store.checkpoint()


@pytest.fixture(scope="session")
def tiny_artifact(store: Store) -> Path:
    """The tiny decoder as an ONNX artifact; tests must not write into it."""
    pytest.importorskip("onnxruntime", reason="needs: pip install 'codecstream[onnx]'")
    return store.artifact("onnx")


@pytest.fixture(scope="session")
def tiny_program(tiny_artifact: Path) -> Program:
    return codecstream.load_program(tiny_artifact, threads=2)
