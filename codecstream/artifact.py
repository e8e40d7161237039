"""A decoder artifact on disk: a folder with ``manifest.json`` and the files that it names.

The manifest says enough for a program in any language to run the decoder: every input and output
by name, shape and dtype, which output feeds which input of the next step, and what a new stream
starts with. ``docs/embedding.md`` shows the call sequence.

Everything in an artifact may have been downloaded, so nothing in it is trusted: sizes and hashes
are checked before a runtime sees a file, and a file name cannot leave the folder.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from codecstream.errors import ArtifactError
from codecstream.geometry import CodecGeometry

__all__ = [
    "FORMAT_VERSION",
    "MANIFEST_NAME",
    "Artifact",
    "FileEntry",
    "FrameRange",
    "GeometryEntry",
    "Manifest",
    "StateEntry",
    "TensorEntry",
    "describe_file",
    "open_artifact",
    "writing_artifact",
]

FORMAT = "codecstream-decoder"
FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
MAX_MANIFEST_BYTES = 1024 * 1024
_READ_BYTES = 1024 * 1024


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


class Artifact(msgspec.Struct, frozen=True):
    """An artifact whose manifest and files were checked."""

    folder: Path
    manifest: Manifest

    @property
    def program_path(self) -> Path:
        """The program's file, as an absolute path."""
        return self.folder / self.manifest.program


def open_artifact(folder: str | Path, *, verify_hashes: bool = True) -> Artifact:
    """Read and check an artifact.

    Args:
        folder: The artifact's folder.
        verify_hashes: Compare every file's SHA-256 as well as its size. Costs about a second per
            gigabyte; leave it out only for a folder that nobody else can write to.

    Raises:
        ArtifactError: No artifact, an unknown format version, a file that is missing, of another
            size or damaged, or a name that leaves the folder; names the file and what to do.
    """
    root = Path(folder).absolute()
    manifest = _read_manifest(root)
    _check_manifest(manifest)
    for name, entry in manifest.files.items():
        _check_file(root / name, entry, verify_hashes)
    return Artifact(root, manifest)


@contextmanager
def writing_artifact(folder: str | Path, *, force: bool = False) -> Iterator[Path]:
    """Yield an empty folder to write an artifact into; it becomes ``folder`` when all went well.

    What is written appears at ``folder`` in one rename, so a killed export leaves nothing there
    that could be loaded, and two exports are never mixed.

    Args:
        folder: The artifact's future folder; its parent is created when missing.
        force: Replace a folder that holds an artifact. Any other folder is never replaced.

    Raises:
        ArtifactError: ``folder`` is there already and must not be replaced.
    """
    target = Path(folder).absolute()
    check_replaceable(target, force=force)
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent))
    try:
        yield staging
        staging.chmod(0o777 & ~_umask())
        check_replaceable(target, force=force)
        if target.exists():
            old = Path(
                tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".old", dir=target.parent)
            )
            os.replace(target, old / "artifact")
            os.replace(staging, target)
            shutil.rmtree(old)
        else:
            os.replace(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def check_replaceable(target: Path, *, force: bool) -> None:
    """Raise ArtifactError unless an artifact may be written to ``target``."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not (target / MANIFEST_NAME).is_file():
        raise ArtifactError(f"{target} exists and is not a decoder artifact; choose another folder")
    if not force:
        raise ArtifactError(f"{target} already holds an artifact; use --force to replace it")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``manifest.json``, the last file of an artifact."""
    data = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
    (folder / MANIFEST_NAME).write_bytes(data + b"\n")


def describe_file(path: Path) -> FileEntry:
    """Return the entry of the file at ``path``."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return FileEntry(bytes=path.stat().st_size, sha256=digest.hexdigest())


def _read_manifest(root: Path) -> Manifest:
    path = root / MANIFEST_NAME
    try:
        with path.open("rb") as file:
            data = file.read(MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        reason = error.strerror or error
        raise ArtifactError(
            f"{root} is not a decoder artifact: {MANIFEST_NAME}: {reason}. "
            f"codecstream-export makes one"
        ) from error
    if len(data) > MAX_MANIFEST_BYTES:
        raise ArtifactError(f"{path} is larger than {MAX_MANIFEST_BYTES} bytes: not a manifest")
    try:
        head = msgspec.json.decode(data)
        if not isinstance(head, dict) or head.get("format") != FORMAT:
            raise ArtifactError(f"{path} is not the manifest of a decoder artifact")
        version = head.get("format_version")
        if version != FORMAT_VERSION:
            raise ArtifactError(
                f"{path} has format version {version!r}, this codecstream reads {FORMAT_VERSION}: "
                f"install a matching codecstream or export again"
            )
        return msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ArtifactError(f"{path} is not a valid manifest: {error}") from error


def _check_manifest(manifest: Manifest) -> None:
    for name in manifest.files:
        if not name or name in (".", "..", MANIFEST_NAME) or set(name) & set("/\\:\0"):
            raise ArtifactError(f"manifest: {name!r} is not a plain file name")
    if manifest.program not in manifest.files:
        raise ArtifactError(f"manifest: program {manifest.program!r} is not among its files")
    low, high = manifest.frames.min, manifest.frames.max
    if low != 1 or (high is not None and high < 1):
        raise ArtifactError(f"manifest: a program for {low} to {high} frames cannot stream")
    inputs = {item.name for item in manifest.inputs}
    outputs = {item.name for item in manifest.outputs}
    for item in manifest.state:
        if item.input not in inputs or item.output not in outputs:
            raise ArtifactError(f"manifest: state {item.input!r} is not an input and an output")
    manifest.codec_geometry()


def _check_file(path: Path, entry: FileEntry, verify_hashes: bool) -> None:
    try:
        size = path.stat().st_size
        if size != entry.bytes:
            raise ArtifactError(
                f"{path} has {size} bytes, its manifest says {entry.bytes}: "
                f"copy or download the artifact again"
            )
        if verify_hashes and describe_file(path).sha256 != entry.sha256:
            raise ArtifactError(
                f"{path} is damaged or was changed (its SHA-256 differs from the manifest's): "
                f"copy or download the artifact again"
            )
    except OSError as error:
        reason = error.strerror or error
        raise ArtifactError(f"artifact file {path}: {reason}. Copy the whole folder") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
