"""A checkpoint by its id on the hub: fetch the two files that are needed, and say which they were.

::

    found = resolve_checkpoint("Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice")
    load_checkpoint(found.folder)  # found.source has the id and the commit

The download is huggingface_hub's, with its cache, progress bars and environment variables, such
as ``HF_TOKEN``, ``HF_HUB_OFFLINE`` and ``HF_ENDPOINT``.
"""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass, field
from pathlib import Path

from codecstream.errors import MissingDependencyError
from codecstream_export.errors import CheckpointError

__all__ = ["ResolvedCheckpoint", "resolve_checkpoint"]

SUBFOLDER = "speech_tokenizer"
# By name and not by a pattern such as speech_tokenizer/*: a repository may hold anything, and what
# is never asked for, such as a pickle, cannot be run by mistake nor fill the disk.
FILES = (f"{SUBFOLDER}/config.json", f"{SUBFOLDER}/model.safetensors")

# What huggingface_hub's own check of an id allows, but with an owner; at most 96 characters each.
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
_HUB_ID = re.compile(rf"{_PART}/{_PART}")
# A branch, tag, pull request (refs/pr/1) or commit. It becomes a file name in the cache.
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+/-]*")


@dataclass(frozen=True, slots=True)
class ResolvedCheckpoint:
    """Where a checkpoint lies.

    Attributes:
        folder: The folder that was given, or the downloaded ``speech_tokenizer/``.
        source: For the manifest: ``hub_id`` and ``revision``, the commit's hash; empty for a
            local folder.
    """

    folder: Path
    source: dict[str, str] = field(default_factory=dict)


def resolve_checkpoint(
    path_or_id: str | Path, *, revision: str | None = None
) -> ResolvedCheckpoint:
    """Return the local folder of a checkpoint, after a download when it is an id on the hub.

    Args:
        path_or_id: A local path, which wins, or ``owner/name`` or ``owner/name@revision``. A
            ``Path`` is always local.
        revision: The hub's branch, tag or commit; ``main`` when not given.

    Raises:
        CheckpointError: Neither a local path nor an id, or the download failed; says who must
            act.
        codecstream.MissingDependencyError: The download needs huggingface_hub.
    """
    asked = str(path_or_id)
    if os.path.lexists(asked):
        if revision is not None:
            raise CheckpointError(
                f"{asked} is a local path, which has no revision {revision!r}; "
                f"leave the revision out, or run where no such path is"
            )
        return ResolvedCheckpoint(Path(path_or_id))
    hub_id, at, tail = asked.partition("@")
    if isinstance(path_or_id, Path) or not _is_hub_id(hub_id):
        raise CheckpointError(
            f"no checkpoint {asked!r}: there is no local path {os.path.abspath(asked)!r}, and an "
            f"id on the hub would be owner/name or owner/name@revision"
        )
    if at and revision is not None:
        raise CheckpointError(f"{asked!r} has a revision of its own; {revision!r} was given too")
    revision = tail if at else revision
    if revision is not None and not _is_revision(revision):
        raise CheckpointError(f"{revision!r} cannot be a revision of {hub_id}: no such name")
    try:
        from huggingface_hub.errors import HfHubHTTPError  # noqa: F401 - there since 0.25
    except ImportError as error:
        raise MissingDependencyError(
            f"there is no local path {asked!r}, and a download from the hub needs huggingface_hub "
            f"({error}): pip install 'codecstream[export]'"
        ) from error
    try:
        snapshot = _download(hub_id, revision)
    # The library raises its own errors, those of two HTTP clients, of a native extension and of
    # the disk: whatever it is, this is the place where it becomes one line.
    except Exception as error:
        raise CheckpointError(
            f"no checkpoint {asked!r}: there is no such local path, and from the hub: "
            f"{_explain(error)}"
        ) from error
    # The cache has one folder per commit: .../snapshots/<hash>.
    return ResolvedCheckpoint(snapshot / SUBFOLDER, {"hub_id": hub_id, "revision": snapshot.name})


def _is_hub_id(text: str) -> bool:
    return (
        _HUB_ID.fullmatch(text) is not None
        and "--" not in text
        and ".." not in text
        and not text.endswith(".git")
    )


def _is_revision(text: str) -> bool:
    return _REVISION.fullmatch(text) is not None and ".." not in text


def _download(hub_id: str, revision: str | None) -> Path:
    """Return the cache's folder of one commit, with all FILES in it."""
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError, RevisionNotFoundError

    def snapshot(local_files_only: bool) -> Path:
        folder = snapshot_download(
            hub_id,
            revision=revision,
            allow_patterns=list(FILES),
            local_files_only=local_files_only,
        )
        return Path(folder)

    try:
        # snapshot_download asks this too, but some versions of it wait for ever.
        info = HfApi().model_info(hub_id, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except RevisionNotFoundError:
        raise
    except Exception as no_answer:
        # Offline, or not allowed: what an earlier run fetched is as good.
        try:
            folder = snapshot(local_files_only=True)
        except LocalEntryNotFoundError:
            raise no_answer from None
        if not all((folder / name).is_file() for name in FILES):
            raise  # an earlier run was interrupted
        return folder
    names = {file.rfilename for file in info.siblings or ()}
    if not names.issuperset(FILES):
        raise CheckpointError(
            f"{hub_id} has no {' and '.join(FILES)}. Name a Qwen3-TTS model that has a "
            f"{SUBFOLDER} folder, or download the files yourself and pass their folder"
        )
    return snapshot(local_files_only=False)


def _explain(error: BaseException) -> str:
    """Say in one line what went wrong in the download, and what to do."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    # Each test before those for the error's base classes.
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None:
        return _explain(error.__cause__)  # "not in the cache either": what else failed, matters
    if isinstance(error, OfflineModeIsEnabled):
        return (
            f"offline mode is on (HF_HUB_OFFLINE) and the cache, {constants.HF_HUB_CACHE}, does "
            f"not have all of it. Run once without HF_HUB_OFFLINE, or pass a local folder"
        )
    if isinstance(error, GatedRepoError):
        return (
            "its owner must give you access. Ask for it on the model's page, then set HF_TOKEN "
            "to a token of your account"
        )
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{constants.ENDPOINT} has no such repository, or it is private. Check the spelling; "
            f"for a private one, set HF_TOKEN to a token that may read it"
        )
    if isinstance(error, RevisionNotFoundError):
        return "the repository has no such revision. Name a branch, a tag or a full commit hash"
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        status = error.response.status_code
        if status in (401, 403):
            return (
                f"access was refused (status {status}): the repository is private or not there, or "
                f"the token is wrong. Check the spelling, and HF_TOKEN"
            )
        return f"{constants.ENDPOINT} answered with status {status}. Try again later"
    reason = _first_line(error)
    if isinstance(error, OSError) and error.errno is not None and not _is_network(error):
        return (
            f"the cache, {constants.HF_HUB_CACHE}, cannot be written ({reason}). Make room, or set "
            f"HF_HOME to another folder"
        )
    return (
        f"the connection to {constants.ENDPOINT} failed ({reason}). Run it again where there is a "
        f"network, or pass a local folder"
    )


def _is_network(error: OSError) -> bool:
    return isinstance(error, ConnectionError | TimeoutError | socket.gaierror)


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
