"""``manifest.json`` of a decoder artifact: its contents as types, and what must hold among them.

A manifest may have been downloaded with its artifact, so its numbers reach neither a runtime nor
numpy before they were held against each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from codecstream.errors import ArtifactError
from codecstream.geometry import CodecGeometry

__all__ = [
    "FORMAT_VERSION",
    "MANIFEST_NAME",
    "FileEntry",
    "FrameRange",
    "GeometryEntry",
    "Manifest",
    "StateEntry",
    "TensorEntry",
    "parse_manifest",
]

FORMAT = "codecstream-decoder"
FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
MAX_CHUNK_FRAMES = 4096  # five minutes of audio at once: more is a mistake, or an attack on memory


class GeometryEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The codec's rates and sizes, as :class:`codecstream.CodecGeometry` has them."""

    codebooks: int
    codebook_size: int
    frame_rate_hz: float
    sample_rate_hz: int
    samples_per_frame: int


class FrameRange(msgspec.Struct, frozen=True, kw_only=True):
    """The chunk sizes in frames that the program takes; ``max`` None is no bound."""

    min: int = 1
    max: int | None = None


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An input or output. A string in ``shape`` is a length that depends on ``frames``."""

    name: str
    dtype: str
    shape: list[int | str]


class StateEntry(msgspec.Struct, frozen=True, kw_only=True):
    """``output`` of a step is ``input`` of the next; a new stream holds ``fill`` everywhere."""

    input: str
    output: str
    fill: float = 0.0


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Size in bytes and SHA-256 of a file."""

    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of ``manifest.json``."""

    format: str = FORMAT
    format_version: int = FORMAT_VERSION
    runtime: str
    precision: str
    mode: str
    decoder_id: str
    geometry: GeometryEntry
    frames: FrameRange
    ramp: list[int]
    program: str
    inputs: list[TensorEntry]
    outputs: list[TensorEntry]
    state: list[StateEntry]
    files: dict[str, FileEntry]
    made_with: dict[str, str]
    source: dict[str, str] = {}
    parity: dict[str, Any] = {}

    def codec_geometry(self) -> CodecGeometry:
        """Return the geometry as the rest of the package uses it.

        Raises:
            ArtifactError: The numbers do not fit together.
        """
        entry = self.geometry
        try:
            geometry = CodecGeometry(
                codebooks=entry.codebooks,
                codebook_size=entry.codebook_size,
                frame_rate_hz=entry.frame_rate_hz,
                sample_rate_hz=entry.sample_rate_hz,
            )
        except ValueError as error:
            raise ArtifactError(f"manifest: geometry: {error}") from error
        if geometry.samples_per_frame != entry.samples_per_frame:
            raise ArtifactError(
                f"manifest: samples_per_frame is {entry.samples_per_frame}, "
                f"but the rates give {geometry.samples_per_frame}"
            )
        return geometry


def parse_manifest(data: bytes) -> Manifest:
    """Return the manifest in ``data``.

    Raises:
        ArtifactError: It is no manifest, of another format version, or contradicts itself.
    """
    try:
        head = msgspec.json.decode(data)
        if not isinstance(head, dict) or head.get("format") != FORMAT:
            raise ArtifactError("this is not the manifest of a decoder artifact")
        version = head.get("format_version")
        if version != FORMAT_VERSION:
            raise ArtifactError(
                f"the manifest has format version {version!r}, this codecstream reads "
                f"{FORMAT_VERSION}: install a matching codecstream or export again"
            )
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ArtifactError(f"this is not a valid manifest: {error}") from error
    manifest.codec_geometry()
    for problem in (
        *_file_problems(manifest),
        *_frame_problems(manifest),
        *_interface_problems(manifest),
    ):
        raise ArtifactError(f"the manifest contradicts itself: {problem}")
    return manifest


def _file_problems(manifest: Manifest) -> Iterable[str]:
    for name in manifest.files:
        if not name or name in (".", "..", MANIFEST_NAME) or set(name) & set("/\\:\0"):
            yield f"{name!r} is not a plain file name"
    if manifest.program not in manifest.files:
        yield f"program {manifest.program!r} is not among its files"


def _frame_problems(manifest: Manifest) -> Iterable[str]:
    low, high = manifest.frames.min, manifest.frames.max
    if low != 1 or (high is not None and high < 1):
        yield f"a program for {low} to {high} frames cannot stream"
    largest = MAX_CHUNK_FRAMES if high is None else min(high, MAX_CHUNK_FRAMES)
    if not manifest.ramp or not all(1 <= size <= largest for size in manifest.ramp):
        yield f"the ramp must have sizes from 1 to {largest} frames, not {manifest.ramp[:8]}"


def _interface_problems(manifest: Manifest) -> Iterable[str]:
    """Yield what is wrong with inputs, outputs and state."""
    inputs = {item.name: item for item in manifest.inputs}
    outputs = {item.name: item for item in manifest.outputs}
    if len(inputs) != len(manifest.inputs) or len(outputs) != len(manifest.outputs):
        yield "two inputs or two outputs have one name"
    for item in manifest.state:
        source, target = outputs.pop(item.output, None), inputs.pop(item.input, None)
        if source is None or target is None:
            yield f"state {item.input!r} is not an input and an output of its own"
        elif (source.shape, source.dtype) != (target.shape, target.dtype):
            yield f"state {item.input!r} changes its shape or dtype"
        elif target.dtype != "float32" or not all(_is_length(n) for n in target.shape):
            yield f"state {item.input!r} is not float32 of a fixed shape"
    entry = manifest.geometry
    codes, pcm = list(inputs.values()), list(outputs.values())
    if [(i.dtype, i.shape) for i in codes] != [("int64", [1, entry.codebooks, "frames"])]:
        yield f"beside state it must take codes, int64 [1, {entry.codebooks}, frames]"
    expected = [f"{entry.samples_per_frame} * frames"]
    if [(o.dtype, o.shape) for o in pcm] != [("float32", expected)]:
        yield f"beside state it must return pcm, float32 {expected}"


def _is_length(value: int | str) -> bool:
    return isinstance(value, int) and value > 0
