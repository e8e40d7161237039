"""Fixtures: the tiny decoder, exported once per session, and the ledger decoder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support import LedgerProgram

import codecstream
from codecstream import Program

if TYPE_CHECKING:
    from codecstream_export import EagerDecoder

# For torch, which reads it at import: at the tiny decoder's widths its threads only wait for each
# other, and a test takes ten times as long when the machine has anything else to do.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def ledger_program() -> LedgerProgram:
    return LedgerProgram()


@pytest.fixture(scope="session")
def tiny_decoder() -> EagerDecoder:
    """The real architecture at small widths, seeded non-zero random weights."""
    pytest.importorskip("torch", reason="the exporter needs torch: pip install '.[export]'")
    from codecstream_export.random_weights import TINY, random_decoder

    return random_decoder(TINY)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory, tiny_decoder: EagerDecoder) -> Path:
    from codecstream_export import save_checkpoint

    folder = tmp_path_factory.mktemp("model") / "speech_tokenizer"
    save_checkpoint(folder, tiny_decoder)
    return folder


@pytest.fixture(scope="session")
def tiny_artifact(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> Path:
    """The tiny decoder as an ONNX artifact; tests must not write into it."""
    from codecstream_export import export_artifact

    return export_artifact(tiny_checkpoint, tmp_path_factory.mktemp("out") / "tiny").folder


@pytest.fixture(scope="session")
def tiny_program(tiny_artifact: Path) -> Program:
    return codecstream.load_program(tiny_artifact, threads=2)
