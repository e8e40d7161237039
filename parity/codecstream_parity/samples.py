"""Utterances that a device recorded of itself, decoded again here and compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from codecstream.codes import check_codes
from codecstream.errors import ArtifactError
from codecstream.geometry import CodecGeometry
from codecstream.sampling import SUFFIX, Sample, find_samples, read_sample
from codecstream_parity.floors import Floors
from codecstream_parity.outcome import Subject
from codecstream_parity.references import Reference
from codecstream_parity.runs import Run, compare_pieces

__all__ = ["check_sample", "is_recording", "read_samples", "sample_subject"]


def is_recording(path: str | Path) -> bool:
    """Return whether ``path`` is a recorded utterance, or a folder of some."""
    path = Path(path)
    if path.is_dir():
        return not (path / "manifest.json").exists() and bool(find_samples(path))
    return path.name.endswith(SUFFIX)


def read_samples(path: str | Path) -> list[Sample]:
    """Read a recorded utterance, or all in a folder.

    Raises:
        ArtifactError: A file is damaged, or they are not all of one decoder.
    """
    path = Path(path)
    samples = [read_sample(file) for file in (find_samples(path) if path.is_dir() else [path])]
    for name in ("decoder_id", "precision", "mode", "context", "sample_rate_hz"):
        found = {str(sample.about.get(name)) for sample in samples}
        if len(found) > 1:
            raise ArtifactError(
                f"the recordings in {path} are of different decoders: {name} is "
                f"{' and '.join(sorted(found))}. Check them by kind, in folders of their own"
            )
    return samples


def sample_subject(path: str | Path, samples: Sequence[Sample]) -> Subject:
    """Return whose output recordings are."""
    about = samples[0].about
    runtimes = sorted({str(sample.about.get("runtime")) for sample in samples})
    return Subject(
        path=str(path),
        runtime=" and ".join(runtimes),
        precision=about.get("precision"),
        mode=about.get("mode"),
        decoder_id=about.get("decoder_id"),
        made_with=dict(about.get("made_with") or {}),
    )


def check_sample(
    sample: Sample, reference: Reference, floors: Floors, geometry: CodecGeometry
) -> Run:
    """Compare a recorded utterance with a reference.

    Raises:
        InvalidCodesError: Its codes are not for a decoder of this geometry.
    """
    codes = check_codes(sample.codes, geometry)
    primed = check_codes(sample.primed, geometry)
    if len(primed):
        reference = _Primed(reference, primed, geometry.samples_per_frame)
    pieces = _split(sample.pcm, sample.chunks, geometry.samples_per_frame)
    return compare_pieces(sample.name, reference, pieces, codes, sample.chunks, floors, geometry)


@dataclass(frozen=True, slots=True)
class _Primed:
    """A reference behind frames whose sound is not heard."""

    behind: Reference
    primed: NDArray[np.int64]
    samples_per_frame: int

    @property
    def name(self) -> str:
        return self.behind.name

    def pieces(
        self, codes: NDArray[np.int64], chunks: Sequence[int]
    ) -> Iterator[NDArray[np.float32]]:
        unheard = len(self.primed) * self.samples_per_frame
        everything = np.concatenate((self.primed, codes))
        for pcm in self.behind.pieces(everything, [len(self.primed), *chunks]):
            yield pcm[unheard:]
            unheard = max(0, unheard - pcm.size)


def _split(
    pcm: NDArray[np.float32], chunks: Sequence[int], samples_per_frame: int
) -> Iterator[NDArray[np.float32]]:
    start = 0
    for frames in chunks:
        yield pcm[start : start + frames * samples_per_frame]
        start += frames * samples_per_frame
