"""What an output is held against, each with the name that the report gives it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from codecstream.decoder import StreamDecoder
from codecstream.errors import MissingDependencyError
from codecstream.runtimes import Program

if TYPE_CHECKING:
    from codecstream_export.checkpoint import Checkpoint
    from codecstream_export.reference import Decode

__all__ = [
    "ArtifactReference",
    "BlockReference",
    "Reference",
    "WavReference",
    "WholeReference",
    "WindowReference",
    "checkpoint_reference",
    "decode_pieces",
]

BLOCK_FRAMES = 600  # of new frames, behind 600 of history: about 2 GB at the published size

Codes = NDArray[np.int64]
Pcm = NDArray[np.float32]


class Reference(Protocol):
    """Makes the sound that an output should be.

    Attributes:
        name: For the report.
    """

    @property
    def name(self) -> str:
        """What the report calls it."""

    def pieces(self, codes: Codes, chunks: Sequence[int]) -> Iterator[Pcm]:
        """Yield the sound of ``codes``, which the output decodes in ``chunks``."""


@dataclass(frozen=True, slots=True)
class WholeReference:
    """All frames at once."""

    name: str
    decode: Decode

    def pieces(self, codes: Codes, chunks: Sequence[int]) -> Iterator[Pcm]:
        """See :class:`Reference`."""
        yield self.decode(codes)


@dataclass(frozen=True, slots=True)
class BlockReference:
    """Blocks of frames, each behind everything that it depends on: for hours, in bounded memory."""

    name: str
    decode: Decode
    reach_frames: int

    def pieces(self, codes: Codes, chunks: Sequence[int]) -> Iterator[Pcm]:
        """See :class:`Reference`."""
        from codecstream_export.reference import block_pcm

        return block_pcm(self.decode, codes, self.reach_frames, BLOCK_FRAMES)


@dataclass(frozen=True, slots=True)
class WindowReference:
    """Each chunk behind ``context`` frames of history, and no more."""

    name: str
    decode: Decode
    context: int

    def pieces(self, codes: Codes, chunks: Sequence[int]) -> Iterator[Pcm]:
        """See :class:`Reference`."""
        from codecstream_export.reference import window_pcm

        return window_pcm(self.decode, codes, chunks, self.context)


@dataclass(frozen=True, slots=True)
class ArtifactReference:
    """Another program, in the same chunks."""

    name: str
    program: Program

    def pieces(self, codes: Codes, chunks: Sequence[int]) -> Iterator[Pcm]:
        """See :class:`Reference`."""
        return decode_pieces(StreamDecoder(self.program, _bounded(chunks, self.program)), codes)


@dataclass(frozen=True, slots=True)
class WavReference:
    """A WAV file that a server made of the same codes."""

    name: str
    pcm: Pcm

    @classmethod
    def read(cls, path: str | Path, sample_rate_hz: int) -> WavReference:
        """Read a mono file in any format that libsndfile knows.

        Raises:
            ValueError: It has more channels or another rate, or is no sound file.
            MissingDependencyError: soundfile is not installed.
        """
        try:
            import soundfile
        except ImportError as error:
            raise MissingDependencyError(
                f"reading {path} needs soundfile: pip install 'codecstream[parity]'"
            ) from error
        try:
            pcm, rate_hz = soundfile.read(str(path), dtype="float32", always_2d=True)
        except soundfile.LibsndfileError as error:
            raise ValueError(f"{path} cannot be read as sound: {error}") from error
        if rate_hz != sample_rate_hz or pcm.shape[1] != 1:
            raise ValueError(
                f"{path} has {pcm.shape[1]} channels at {rate_hz} Hz; the decoder makes one at "
                f"{sample_rate_hz} Hz, and resampling would hide what is to be measured"
            )
        return cls(f"the file {Path(path).name}", pcm[:, 0].copy())

    def pieces(self, codes: Codes, chunks: Sequence[int]) -> Iterator[Pcm]:
        """See :class:`Reference`."""
        yield self.pcm


def checkpoint_reference(
    kind: str, checkpoint: Checkpoint, context: int, *, long: bool = False
) -> Reference:
    """Return a reference that a checkpoint's weights make.

    Args:
        kind: ``eager``: the float32 decoder, all frames at once. ``window``: the same, each chunk
            behind ``context`` frames. ``official``: the published class of ``qwen-tts``.
        checkpoint: From ``codecstream_export.load_checkpoint``.
        context: Frames of history in a window.
        long: In blocks with all their history, for more frames than memory holds at once.

    Raises:
        MissingDependencyError: The published class is not installed.
    """
    from codecstream_export.reference import eager_pcm, reach_frames

    def eager(codes: Codes) -> Pcm:
        return eager_pcm(checkpoint.decoder, codes)

    if kind == "window":
        return WindowReference(f"eager float32, windows of {context} + n frames", eager, context)
    decode: Decode = eager
    name = "eager float32"
    if kind == "official":
        from codecstream_parity.official import load_official

        decode, name = load_official(checkpoint.decoder), "official class of qwen-tts"
    if long:
        reach = reach_frames(checkpoint.config)
        return BlockReference(f"{name}, blocks behind {reach} frames of history", decode, reach)
    return WholeReference(f"{name}, all frames at once", decode)


def decode_pieces(decoder: StreamDecoder, codes: Codes) -> Iterator[Pcm]:
    """Yield the chunks that a decoder makes of an utterance, decoding each when it is asked for."""
    yield from decoder.push(codes)
    yield from decoder.finish()


def _bounded(chunks: Sequence[int], program: Program) -> Sequence[int]:
    limit = program.max_frames
    if limit is None or max(chunks) <= limit:
        return chunks
    return [min(size, limit) for size in chunks]
