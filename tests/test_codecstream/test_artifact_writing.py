"""Artifacts appear whole or not at all, and what a killed export leaves is cleared by the next."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

import pytest

from codecstream import ArtifactError, artifact, locks
from codecstream.artifact import check_replaceable, open_artifact, writing_artifact
from codecstream.locks import try_lock

# Writes "decoder.onnx" and a manifest whose text is argv[2], as far as argv[3] says.
WRITER = """
import os, signal, sys, time
from pathlib import Path
from codecstream import artifact

target, text, until = Path(sys.argv[1]), sys.argv[2], sys.argv[3]

def pause():
    print(until, flush=True)
    time.sleep(60)

replace = os.replace
def replace_and_pause(source, destination):
    if until == "before the renames" or (until == "between the renames" and source != target):
        pause()
    replace(source, destination)
    if until == "after the renames" and source != target:
        pause()
os.replace = replace_and_pause

with artifact.writing_artifact(target, force=True) as folder:
    (folder / "decoder.onnx").write_text(text)
    if until == "after one file":
        pause()
    (folder / "manifest.json").write_text(text)
    if until == "after two files":
        pause()
"""
MOMENTS = (
    "after one file",
    "after two files",
    "before the renames",
    "between the renames",
    "after the renames",
)


@contextmanager
def writer(target: Path, text: str, until: str) -> Iterator[subprocess.Popen[str]]:
    """A live process that writes to ``target`` and has come as far as ``until``."""
    command = [sys.executable, "-c", WRITER, str(target), text, until]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == until + "\n"
            yield process
        finally:
            process.kill()


def kill_writer(target: Path, text: str, until: str) -> None:
    with writer(target, text, until) as process:
        process.kill()
        assert process.wait() != 0


def write(target: Path, text: str, force: bool = False) -> None:
    with writing_artifact(target, force=force) as folder:
        assert list(folder.iterdir()) == []
        (folder / "decoder.onnx").write_text(text)
        (folder / "manifest.json").write_text(text)


def texts(target: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in target.iterdir()}


def whole(text: str) -> dict[str, str]:
    return {"decoder.onnx": text, "manifest.json": text}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.case(57)
@pytest.mark.parametrize("moment", MOMENTS[:-2])
def test_a_killed_writer_leaves_nothing_that_loads_and_the_next_clears_it(
    tmp_path: Path, moment: str
) -> None:
    target = tmp_path / "decoder"
    kill_writer(target, "killed", moment)
    assert not target.exists()
    check_replaceable(target, force=False)  # the next export may write there
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".decoder.")
    with pytest.raises(ArtifactError):
        open_artifact(left)

    write(target, "next")
    assert texts(target) == whole("next")
    assert names(tmp_path) == ["decoder"]


@pytest.mark.case(57)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_never_loses_the_artifact_that_was_there(tmp_path: Path, moment: str) -> None:
    target = tmp_path / "decoder"
    write(target, "old")
    kill_writer(target, "killed", moment)
    kept = "killed" if moment == "after the renames" else "old"
    if moment == "between the renames":
        assert not target.exists()
    else:
        assert texts(target) == whole(kept)

    # Nothing is given up until --force says so, and then there is one artifact and nothing else.
    with pytest.raises(ArtifactError, match="already holds an artifact"):
        write(target, "next")
    assert texts(target) == whole(kept)
    assert names(tmp_path) == ["decoder"]
    write(target, "next", force=True)
    assert texts(target) == whole("next")


def test_an_artifact_that_was_replaced_does_not_come_back(tmp_path: Path) -> None:
    target = tmp_path / "decoder"
    write(target, "old")
    kill_writer(target, "killed", "after the renames")
    shutil.rmtree(target)
    write(target, "next")
    assert texts(target) == whole("next")
    assert names(tmp_path) == ["decoder"]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_live_writer_is_left_alone(tmp_path: Path, moment: str) -> None:
    target = tmp_path / "decoder"
    write(target, "old")
    with writer(target, "live", moment):
        before = {path: path.stat().st_ino for path in tmp_path.rglob("*") if target != path}
        with suppress(ArtifactError):
            write(target, "next")
        after = {path: path.stat().st_ino for path in tmp_path.rglob("*") if target != path}
        assert {path: after.get(path) for path in before} == before


def test_two_writers_at_once_are_not_mixed(tmp_path: Path) -> None:
    target = tmp_path / "decoder"
    with writing_artifact(target, force=True) as ours:
        (ours / "decoder.onnx").write_text("ours")
        write(target, "theirs")  # begins and ends meanwhile
        assert texts(target) == whole("theirs")
        (ours / "manifest.json").write_text("ours")
    assert texts(target) == whole("ours")
    assert names(tmp_path) == ["decoder"]


def test_without_force_the_second_of_two_writers_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "decoder"
    with pytest.raises(ArtifactError, match="use --force"), writing_artifact(target):
        write(target, "theirs")
    assert texts(target) == whole("theirs")
    assert names(tmp_path) == ["decoder"]


def test_two_writers_that_end_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "decoder"
    write(target, "old")
    replace = os.replace

    def replace_and_lose(source: Path, destination: Path) -> None:
        monkeypatch.setattr(os, "replace", replace)
        replace(source, destination)  # the old one is away
        write(target, "theirs")

    with pytest.raises(ArtifactError, match="another export wrote"), ExitStack() as stack:
        folder = stack.enter_context(writing_artifact(target, force=True))
        (folder / "manifest.json").write_text("ours")
        monkeypatch.setattr(os, "replace", replace_and_lose)
    assert texts(target) == whole("theirs")
    assert names(tmp_path) == ["decoder"]


def test_an_old_artifact_that_cannot_be_put_back_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "decoder"
    write(target, "old")
    kill_writer(target, "killed", "between the renames")
    target.mkdir()
    (target / "beach.jpg").write_text("...")
    with pytest.raises(ArtifactError, match="is not a decoder artifact"):
        write(target, "next", force=True)
    assert texts(target) == {"beach.jpg": "..."}
    (hidden,) = (path for path in tmp_path.iterdir() if path != target)
    assert texts(hidden / "old") == whole("old")


def test_only_leftovers_of_the_same_target_are_removed(tmp_path: Path) -> None:
    others = [
        ".decoder.0123abcd.part.zip",
        ".decoder.0123abc.part",
        ".decoder.v2.0123abcd.part",
        ".decoder.0123abcd.old",
        "decoder.0123abcd.part",
        ".decoderX0123abcd.part",
    ]
    for name in [*others, ".decoder.0123abcd.part"]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "decoder.onnx").write_text("...")
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "new").mkdir(parents=True)
    (tmp_path / ".decoder.01234567.part").symlink_to(elsewhere)

    write(tmp_path / "decoder", "next")
    assert names(tmp_path) == sorted([*others, "decoder", "elsewhere", ".decoder.01234567.part"])
    assert (elsewhere / "new").exists()


@pytest.mark.parametrize("name", ["[a-z]*", "ü-日本", "a b.c+"])
def test_the_name_of_a_target_is_no_pattern(tmp_path: Path, name: str) -> None:
    kill_writer(tmp_path / name, "killed", "after one file")
    write(tmp_path / name, "next")
    assert names(tmp_path) == [name]


@pytest.mark.parametrize("step", ["made", "opened"])
def test_a_new_folder_taken_for_a_leftover_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Another export may look between a folder's making and its locking."""
    target, mkdir = tmp_path / "decoder", Path.mkdir
    removed: list[str] = []

    def look() -> None:
        """Be the other export, once."""
        monkeypatch.undo()
        (hidden,) = names(tmp_path)
        artifact._clear_leftovers(target)
        assert names(tmp_path) == []
        removed.append(hidden)

    def mkdir_and_look(path: Path) -> None:
        mkdir(path)
        look()

    def look_and_lock(file: IO[bytes]) -> bool:
        look()
        return try_lock(file)

    if step == "made":
        # The parent is made with options, the hidden folder without.
        monkeypatch.setattr(Path, "mkdir", lambda p, **o: mkdir(p, **o) if o else mkdir_and_look(p))
    else:
        monkeypatch.setattr(artifact, "try_lock", look_and_lock)
    with writing_artifact(target) as folder:
        assert folder.parent.name not in removed
        assert len(removed) == 1
        assert (folder.parent / "lock").exists()
        (folder / "manifest.json").write_text("next")
    assert names(tmp_path) == ["decoder"]


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An artifact is written all the same; leftovers, dead or not, stay."""

    def no_locks(file: object) -> bool:
        raise OSError(95, "Operation not supported")

    target = tmp_path / "decoder"
    kill_writer(target, "killed", "after one file")
    (left,) = names(tmp_path)
    monkeypatch.setattr(artifact, "try_lock", no_locks)
    write(target, "next")
    assert texts(target) == whole("next")
    assert names(tmp_path) == [left, "decoder"]


def test_a_lock_excludes_another_handle_of_the_same_process(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("ab") as first, path.open("ab") as second:
        assert try_lock(first)
        assert not try_lock(second)
        first.close()
        assert try_lock(second)


@pytest.mark.skipif(sys.platform == "win32", reason="fcntl")
def test_no_locks_here_is_not_taken_for_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    def flock(*args: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", flock)
    with (tmp_path / "lock").open("ab") as file, pytest.raises(OSError, match="not supported"):
        locks.try_lock(file)
