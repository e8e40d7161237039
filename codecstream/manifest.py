"""``manifest.json`` of a decoder artifact: its contents as types, and what must hold among them.

A manifest may have been downloaded with its artifact, so its numbers reach neither a runtime nor
numpy before they were held against each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from codecstream.errors import ArtifactError
from codecstream.geometry import ATTENTION_WINDOW_FRAMES, CodecGeometry

__all__ = [
    "FORMAT_VERSION",
    "MANIFEST_NAME",
    "FileEntry",
    "FrameRange",
    "GeometryEntry",
    "Manifest",
    "StateEntry",
    "TensorEntry",
    "WindowEntry",
    "parse_manifest",
]

FORMAT = "codecstream-decoder"
FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
MODES = ("stateful", "windowed")
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


class WindowEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A program without state for one chunk size: its file and, where a file has several, name."""

    frames: int
    program: str
    method: str = "forward"


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Size in bytes and SHA-256 of a file."""

    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of ``manifest.json``.

    A ``stateful`` artifact has one ``program`` for every chunk size in ``frames``. A ``windowed``
    one has no state: it has one program per chunk size in ``windows``, and each decodes ``context``
    frames again in front of the new ones.
    """

    format: str = FORMAT
    format_version: int = FORMAT_VERSION
    runtime: str
    precision: str
    mode: str
    decoder_id: str
    geometry: GeometryEntry
    frames: FrameRange
    ramp: list[int]
    program: str | None = None
    context: int | None = None
    windows: list[WindowEntry] = []
    inputs: list[TensorEntry]
    outputs: list[TensorEntry]
    state: list[StateEntry]
    files: dict[str, FileEntry]
    made_with: dict[str, str]
    source: dict[str, str] = {}
    parity: dict[str, Any] = {}
    quantization: dict[str, Any] | None = None  # which layers compute in int8, and at what cost
    delegation: dict[str, Any] | None = None  # what an accelerator took of the program
    flop_per_frame: int | None = None  # of the decoder in floating point; None: not counted

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
        *_mode_problems(manifest),
        *_frame_problems(manifest),
        *_interface_problems(manifest),
    ):
        raise ArtifactError(f"the manifest contradicts itself: {problem}")
    return manifest


def _file_problems(manifest: Manifest) -> Iterable[str]:
    for name in manifest.files:
        if not name or name in (".", "..", MANIFEST_NAME) or set(name) & set("/\\:\0"):
            yield f"{name!r} is not a plain file name"
    programs = [window.program for window in manifest.windows]
    for program in programs if manifest.program is None else [manifest.program, *programs]:
        if program not in manifest.files:
            yield f"program {program!r} is not among its files"


def _mode_problems(manifest: Manifest) -> Iterable[str]:
    if manifest.mode not in MODES:
        yield f"mode is {manifest.mode!r}, not one of {', '.join(MODES)}"
    stateful = manifest.mode == "stateful"
    if stateful != (manifest.program is not None) or stateful == bool(manifest.windows):
        yield "a stateful artifact has one program, a windowed one has windows"
    if stateful != (manifest.context is None):
        yield "a windowed artifact has a context, a stateful one has none"
    sizes = [window.frames for window in manifest.windows]
    if sizes and (sizes != sorted(set(sizes)) or sizes[0] < 1):
        yield f"windows must be for rising numbers of frames, not {sizes[:8]}"
    if sizes and sizes[-1] != manifest.frames.max:
        yield f"the largest window is for {sizes[-1]} frames, not {manifest.frames.max}"
    context = manifest.context
    if context is not None and not ATTENTION_WINDOW_FRAMES <= context <= MAX_CHUNK_FRAMES:
        yield (
            f"a context of {context} frames; less than the decoder's attention window of "
            f"{ATTENTION_WINDOW_FRAMES} frames is audible, more than {MAX_CHUNK_FRAMES} a mistake"
        )


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
    expected: list[tuple[str, list[int | str]]]
    if manifest.mode == "windowed":
        expected = [("int64", [1, entry.codebooks, "context + frames"]), ("int64", [1])]
        what = f"codes, int64 [1, {entry.codebooks}, context + frames], and a count, int64 [1]"
        if manifest.state:
            yield "a windowed program has no state"
    else:
        expected = [("int64", [1, entry.codebooks, "frames"])]
        what = f"codes, int64 [1, {entry.codebooks}, frames]"
    if [(item.dtype, item.shape) for item in inputs.values()] != expected:
        yield f"beside state it must take {what}"
    pcm: list[int | str] = [f"{entry.samples_per_frame} * frames"]
    if [(item.dtype, item.shape) for item in outputs.values()] != [("float32", pcm)]:
        yield f"beside state it must return pcm, float32 {pcm}"
    for kind, items, first, last in (
        ("inputs", manifest.inputs, "codes", [item.input for item in manifest.state]),
        ("outputs", manifest.outputs, "pcm", [item.output for item in manifest.state]),
    ):
        if last and [item.name for item in items][-len(last) :] != last:
            # Some runtimes know no names and are called by position.
            yield f"{kind} must be {first}, then those of the state, in this order"


def _is_length(value: int | str) -> bool:
    return isinstance(value, int) and value > 0
