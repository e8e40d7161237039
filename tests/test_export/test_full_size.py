"""The decoder at its published size, from checkpoint to sound. Takes minutes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support import decode

torch = pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

import codecstream  # noqa: E402
from codecstream.artifact import open_artifact  # noqa: E402
from codecstream_export import DecoderConfig, load_checkpoint, save_checkpoint  # noqa: E402
from codecstream_export.cli import main  # noqa: E402
from codecstream_export.random_weights import random_codes, random_decoder  # noqa: E402
from codecstream_parity import slice_snr_db, snr_db  # noqa: E402

FRAMES = 100  # crosses the attention window of 72


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_full_size_exports_and_streams(tmp_path: Path) -> None:
    model, artifact = tmp_path / "model", tmp_path / "artifact"
    save_checkpoint(model / "speech_tokenizer", random_decoder(DecoderConfig(), seed=1))
    arguments = ["--checkpoint", str(model), "--runtime", "onnx", "--out", str(artifact)]
    assert main(arguments) == 0

    manifest = open_artifact(artifact).manifest
    weights = (model / "speech_tokenizer" / "model.safetensors").stat().st_size
    assert sum(entry.bytes for entry in manifest.files.values()) <= 1.01 * weights
    assert {order: p["snr_db"] >= 90 for order, p in manifest.parity.items()} == {
        "ramp": True,
        "every size": True,
    }

    eager = load_checkpoint(model).decoder
    codes = random_codes(FRAMES, seed=2)
    with torch.inference_mode():
        reference = eager(codes.T[None])[0].numpy()
    program = codecstream.load_program(artifact, threads=2)
    pcm = decode(program, codes.numpy(), pushes=[1] * FRAMES)
    assert snr_db(reference, pcm) >= 90
    assert float(np.min(slice_snr_db(reference, pcm, 1920))) >= 80
