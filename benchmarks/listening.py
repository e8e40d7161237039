"""How the demo decoder sounds in each precision and mode, next to the eager decoder, as Markdown.

pip install '.[export,parity,dev]' soxr
python benchmarks/listening.py
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import codecstream
from codecstream import demo
from codecstream_export import ParityError, export_artifact, load_checkpoint
from codecstream_export.reference import eager_pcm
from codecstream_parity import compare
from codecstream_parity.floors import NO_FLOORS
from codecstream_parity.listening import (
    heard_words,
    log_mel_correlation,
    said_words,
    word_errors,
)

Codes = NDArray[np.int64]
Pcm = NDArray[np.float32]

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
    Kind("int8, at least 40 dB", "int8"),
    Kind("int8, at least 25 dB", "int8", min_snr_db=25.0, min_slice_snr_db=10.0),
    Kind("int8, at least 15 dB", "int8", min_snr_db=15.0, min_slice_snr_db=0.0),
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


def decode(folder: Path, codes: Codes) -> Pcm:
    decoder = codecstream.StreamDecoder(codecstream.load_program(folder, threads=1))
    return np.concatenate([*decoder.push(codes), *decoder.finish()])


def by_sentence(decode: Callable[[Codes], Pcm], joined: bool) -> list[Pcm]:
    """Return the sound of each sentence, decoded alone or in one stream of all."""
    codes = [u.codes.astype(np.int64) for u in demo.utterances()]
    if not joined:
        return [decode(one) for one in codes]
    pcm = decode(np.concatenate(codes))
    return np.split(pcm, np.cumsum([len(one) * 1920 for one in codes])[:-1])


def errors(sentences: list[Pcm]) -> str:
    counts = [
        word_errors(said_words(u.text), heard_words(pcm))
        for u, pcm in zip(demo.utterances(), sentences, strict=True)
    ]
    return f"{sum(counts)} ({', '.join(map(str, counts))})"


def row(name: str, eager: list[Pcm], sentences: list[Pcm]) -> str:
    report = compare(np.concatenate(eager), np.concatenate(sentences), floors=NO_FLOORS)
    alike = [log_mel_correlation(a, b) for a, b in zip(eager, sentences, strict=True)]
    return (
        f"| {name} | {report.snr_db:.1f} | {report.worst_slice_snr_db:.1f} | {min(alike):.6f} "
        f"| {errors(sentences)} |"
    )


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    decoder = load_checkpoint(demo.checkpoint_dir()).decoder
    words = sum(len(said_words(u.text)) for u in demo.utterances())
    folders: dict[Kind, Path | str] = {}
    for kind in KINDS:
        try:
            folders[kind] = artifact(kind)
        except ParityError as error:
            folders[kind] = str(error).partition(";")[0]
    for joined, title in ((False, "Each sentence alone"), (True, "All three in one stream")):
        eager = by_sentence(lambda codes: eager_pcm(decoder, codes), joined)
        print(f"\n{title}:\n")
        print(
            "| artifact | SNR dB | worst 80 ms dB | lowest log-mel correlation "
            f"| word errors of {words}, by sentence |\n| --- | ---: | ---: | ---: | ---: |"
        )
        print(f"| eager decoder | | | | {errors(eager)} |")
        for kind, found in folders.items():
            if isinstance(found, Path):
                decoded = by_sentence(functools.partial(decode, found), joined)
                print(row(kind.name, eager, decoded))
            elif not joined:
                print(f"| {kind.name} | refused: {found} | | | |")


if __name__ == "__main__":
    main()
