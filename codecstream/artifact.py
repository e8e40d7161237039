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
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import msgspec

from codecstream.errors import ArtifactError
from codecstream.locks import try_lock
from codecstream.manifest import MANIFEST_NAME, FileEntry, Manifest, parse_manifest

__all__ = [
    "Artifact",
    "check_replaceable",
    "describe_file",
    "open_artifact",
    "write_manifest",
    "writing_artifact",
]

MAX_MANIFEST_BYTES = 1024 * 1024
_READ_BYTES = 1024 * 1024


class Artifact(msgspec.Struct, frozen=True):
    """An artifact whose manifest and files were checked."""

    folder: Path
    manifest: Manifest

    @property
    def program_path(self) -> Path:
        """The file of a stateful artifact's program, as an absolute path."""
        if self.manifest.program is None:
            raise ArtifactError(f"{self.folder} is a windowed artifact: it has several programs")
        return self.folder / self.manifest.program


def open_artifact(
    folder: str | Path, *, verify_hashes: bool = True, manifest_name: str = MANIFEST_NAME
) -> Artifact:
    """Read and check an artifact.

    Args:
        folder: The artifact's folder.
        verify_hashes: Compare every file's SHA-256 as well as its size. Costs about a second per
            gigabyte; leave it out only for a folder that nobody else can write to.
        manifest_name: The exporter gives a manifest its right name when all is verified.

    Raises:
        ArtifactError: No artifact, an unknown format version, a file that is missing, of another
            size or damaged, or a name that leaves the folder; names the file and what to do.
    """
    root = Path(folder).absolute()
    manifest = _read_manifest(root / manifest_name)
    for name, entry in manifest.files.items():
        _check_file(root / name, entry, verify_hashes)
    return Artifact(root, manifest)


@contextmanager
def writing_artifact(folder: str | Path, *, force: bool = False) -> Iterator[Path]:
    """Yield an empty folder to write an artifact into; it becomes ``folder`` when all went well.

    What is written appears at ``folder`` in one rename, so a killed export leaves nothing there
    that could be loaded, and two exports are never mixed.

    What it does leave is a hidden folder beside ``folder``, with all that it had written. The
    next export to ``folder`` removes it, but not one that a live export is writing. A kill in the
    instant between the two renames of a replacement leaves no artifact at ``folder``: the next
    export puts the old one back before it does anything else.

    Args:
        folder: The artifact's future folder; its parent is created when missing.
        force: Replace a folder that holds an artifact. Any other folder is never replaced.

    Raises:
        ArtifactError: ``folder`` is there already and must not be replaced, or another export
            finished at the same instant.
    """
    target = Path(folder).absolute()
    _clear_leftovers(target)
    check_replaceable(target, force=force)
    target.parent.mkdir(parents=True, exist_ok=True)
    hidden, lock = _make_hidden(target)
    new = hidden / _NEW
    try:
        new.mkdir()
        yield new
        check_replaceable(target, force=force)
        if target.exists():
            os.replace(target, hidden / _OLD)
        try:
            os.replace(new, target)
        except OSError as error:
            if not target.exists():
                raise
            raise ArtifactError(f"another export wrote {target} at the same time") from error
    finally:
        _discard(hidden, lock, target)


# Beside the target, on the same file system, for renames: .NAME.<8 hex digits>.part/
_LOCK = "lock"  # held while its export lives
_NEW = "new"  # what is being written
_OLD = "old"  # what was at the target, between the two renames


def _make_hidden(target: Path) -> tuple[Path, IO[bytes]]:
    """Make a hidden folder beside ``target``; return it and its lock, held."""
    while True:
        hidden = target.parent / f".{target.name}.{secrets.token_hex(4)}.part"
        hidden.mkdir()
        try:
            lock = (hidden / _LOCK).open("ab")
        except FileNotFoundError:
            continue  # another export took it for a leftover before it had a lock
        try:
            # It may also have been removed between the last line and the next.
            if try_lock(lock) and (hidden / _LOCK).exists():
                return hidden, lock
        except OSError:
            return hidden, lock  # no locks here: then nobody removes it either
        lock.close()


def _clear_leftovers(target: Path) -> None:
    """Remove what killed exports to ``target`` left beside it."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}\.part")
    try:
        beside = [path for path in target.parent.iterdir() if pattern.fullmatch(path.name)]
    except OSError:
        return  # no such folder, or none that may be listed: the export itself will tell
    for hidden in beside:
        if hidden.is_symlink():
            continue  # none of ours, and it may lead anywhere
        # Leftovers that cannot be removed, such as another user's, are no reason to fail.
        with suppress(OSError, ArtifactError), (hidden / _LOCK).open("ab") as lock:
            if try_lock(lock):
                _discard(hidden, lock, target)


def _discard(hidden: Path, lock: IO[bytes], target: Path) -> None:
    """Remove the hidden folder whose lock is held; first put back what it took from ``target``."""
    new, old = hidden / _NEW, hidden / _OLD
    with lock:
        # With both there, the second rename did not happen. An artifact that is at the target all
        # the same is another export's, and replaced the old one as well.
        if new.exists() and old.exists() and not (target / MANIFEST_NAME).is_file():
            try:
                os.replace(old, target)
            except OSError as error:
                raise ArtifactError(
                    f"the artifact that was {target} is now {old}: {error.strerror}. Move it back"
                ) from error
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
    # Last, as an open file cannot be removed on Windows.
    shutil.rmtree(hidden, ignore_errors=True)


def check_replaceable(target: Path, *, force: bool) -> None:
    """Raise ArtifactError unless an artifact may be written to ``target``."""
    parents = [parent for parent in target.parents if parent.exists()]
    if not parents[0].is_dir():
        raise ArtifactError(f"{parents[0]} is a file: no folder can be made in it")
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not (target / MANIFEST_NAME).is_file():
        raise ArtifactError(f"{target} exists and is not a decoder artifact; choose another folder")
    if not force:
        raise ArtifactError(f"{target} already holds an artifact; use --force to replace it")


def write_manifest(folder: Path, manifest: Manifest, name: str = MANIFEST_NAME) -> None:
    """Write ``manifest.json``, the last file of an artifact."""
    data = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
    (folder / name).write_bytes(data + b"\n")


def describe_file(path: Path) -> FileEntry:
    """Return the entry of the file at ``path``."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return FileEntry(bytes=path.stat().st_size, sha256=digest.hexdigest())


def _read_manifest(path: Path) -> Manifest:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        reason = error.strerror or error
        raise ArtifactError(
            f"{path.parent} is not a decoder artifact: {path.name}: {reason}. "
            f"codecstream-export makes one"
        ) from error
    if len(data) > MAX_MANIFEST_BYTES:
        raise ArtifactError(f"{path} is larger than {MAX_MANIFEST_BYTES} bytes: not a manifest")
    try:
        return parse_manifest(data)
    except ArtifactError as error:
        raise ArtifactError(f"{path}: {error}") from error


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
