"""How the demo decoder sounds in each precision and mode, next to the eager decoder, as Markdown.

pip install '.[export,parity,dev]' soxr
python benchmarks/listening.py
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import codecstream
from codecstream import demo
from codecstream_export import export_artifact, load_checkpoint
from codecstream_export.reference import eager_pcm
from codecstream_parity import compare
from codecstream_parity.floors import NO_FLOORS
from codecstream_parity.listening import (
    heard_words,
    log_mel_correlation,
    said_words,
    word_errors,
)

WORK = Path(__file__).parent / "work" / "listening"


@dataclass(frozen=True)
class Kind:
    """An artifact to listen to, by the exporter's settings."""

    name: str
    precision: str = "fp32"
    mode: str = "stateful"
    min_snr_db: float | None = None
    min_slice_snr_db: float | None = None


KINDS = (
    Kind("fp32"),
    Kind("fp16", "fp16"),
    Kind("int8, 40 dB", "int8"),
    Kind("int8, 25 dB", "int8", min_snr_db=25.0, min_slice_snr_db=10.0),
    Kind("windowed, 72 frames", mode="windowed"),
)


def artifact(kind: Kind) -> Path:
    folder = WORK / kind.name.replace(", ", "-").replace(" ", "-")
    print(f"exporting {kind.name}", file=sys.stderr)
    export_artifact(
        demo.checkpoint_dir(),
        folder,
        precision=kind.precision,
        mode=kind.mode,
        min_snr_db=kind.min_snr_db,
        min_slice_snr_db=kind.min_slice_snr_db,
        calibration=None if kind.precision != "int8" else calibration(),
        decoder_id=demo.DECODER_ID,
        force=True,
    )
    return folder


def calibration() -> object:
    """Return the demo's own codes: a decoder that has learned by heart knows no others."""
    import torch

    return torch.from_numpy(np.concatenate([u.codes for u in demo.utterances()]).astype(np.int64))


def decode(folder: Path, codes: NDArray[np.int64]) -> NDArray[np.float32]:
    decoder = codecstream.StreamDecoder(codecstream.load_program(folder, threads=1))
    return np.concatenate([*decoder.push(codes), *decoder.finish()])


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    decoder = load_checkpoint(demo.checkpoint_dir()).decoder
    said = [(u, u.codes.astype(np.int64)) for u in demo.utterances()]
    eager = [eager_pcm(decoder, codes) for _, codes in said]
    words = sum(len(said_words(u.text)) for u, _ in said)
    wrong = [
        word_errors(said_words(u.text), heard_words(pcm))
        for (u, _), pcm in zip(said, eager, strict=True)
    ]
    print(
        f"| artifact | SNR dB | worst 80 ms dB | log-mel correlation, lowest | word errors of "
        f"{words}, by sentence |\n| --- | ---: | ---: | ---: | ---: |"
    )
    print(f"| eager decoder | | | 1 | {sum(wrong)} ({', '.join(map(str, wrong))}) |")
    for kind in KINDS:
        folder = artifact(kind)
        outputs = [decode(folder, codes) for _, codes in said]
        report = compare(np.concatenate(eager), np.concatenate(outputs), floors=NO_FLOORS)
        alike = [log_mel_correlation(a, b) for a, b in zip(eager, outputs, strict=True)]
        wrong = [
            word_errors(said_words(u.text), heard_words(pcm))
            for (u, _), pcm in zip(said, outputs, strict=True)
        ]
        print(
            f"| {kind.name} | {report.snr_db:.1f} | {report.worst_slice_snr_db:.1f} "
            f"| {min(alike):.6f} | {sum(wrong)} ({', '.join(map(str, wrong))}) |"
        )


if __name__ == "__main__":
    main()
