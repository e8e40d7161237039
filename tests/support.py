"""Programs and numbers that several tests share; needs no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from codecstream import CodecGeometry, Program, StreamDecoder
from codecstream_parity import slice_snr_db

Check = Callable[..., tuple[int, dict[str, Any]]]
"""Runs codecstream-parity on an artifact with options; returns its exit status and its JSON."""

GEOMETRY = CodecGeometry()
SAMPLES = GEOMETRY.samples_per_frame


class LedgerProgram:
    """A program whose samples tell which frame they belong to, and which code 0 it had.

    A lost, repeated, reordered or re-used frame shows exactly. Its state is the number of frames
    so far.
    """

    geometry = GEOMETRY
    max_frames: int | None = None
    decoder_id: str | None = "qwen3_tts_tokenizer_v2_12hz"

    def __init__(self) -> None:
        self.calls: list[int] = []

    def initial_state(self) -> int:
        return 0

    def step(self, codes: NDArray[np.int64], state: int) -> tuple[NDArray[np.float32], int]:
        self.calls.append(len(codes))
        after = state + len(codes)
        return ledger(np.arange(state, after), codes[:, 0]), after


def ledger(frames: NDArray[np.int64], first_codes: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the samples that :class:`LedgerProgram` makes of these frames."""
    marks = (frames % 4096) * 2048 + first_codes
    return np.repeat((marks / 2**23).astype(np.float32), SAMPLES)


def expected_ledger(codes: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return what a ledger decoder makes of a whole utterance."""
    return ledger(np.arange(len(codes)), codes[:, 0].astype(np.int64))


def make_codes(frames: int, seed: int = 0) -> NDArray[np.int64]:
    """Return seeded codes, int64 ``[frames, 16]``."""
    return np.random.default_rng(seed).integers(0, 2048, (frames, 16))


def decode(
    program: Program,
    codes: NDArray[np.int64],
    *,
    pushes: Iterable[int] | None = None,
    schedule: Iterable[int] = (2, 4, 8, 16, 25),
) -> NDArray[np.float32]:
    """Decode an utterance through a StreamDecoder, pushed in pieces of ``pushes`` frames."""
    decoder = StreamDecoder(program, schedule)
    parts = []
    start = 0
    for size in [len(codes)] if pushes is None else pushes:
        parts += list(decoder.push(codes[start : start + size]))
        start += size
    assert start == len(codes)
    parts += list(decoder.finish())
    return np.concatenate(parts) if parts else np.empty(0, np.float32)


def worst_slice_db(reference: NDArray[np.float32], output: NDArray[np.float32]) -> float:
    """Return the lowest SNR of all 80 ms slices in dB."""
    return float(slice_snr_db(reference, output, SAMPLES).min())


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite an artifact's manifest after ``change`` was called with what it holds."""
    path = folder / "manifest.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
