"""Checkpoints by id: the real huggingface_hub, in a process of its own, against a hub on loopback.

The library reads its environment once, at import: so each call has a process, and what users set
is what is tested.
"""

from __future__ import annotations

import builtins
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("huggingface_hub")

from fake_hub import FakeHub

from codecstream import MissingDependencyError
from codecstream_export.errors import CheckpointError
from codecstream_export.hub import ResolvedCheckpoint, resolve_checkpoint

HUB_ID = "Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice"
CONFIG, WEIGHTS = "speech_tokenizer/config.json", "speech_tokenizer/model.safetensors"
FILES = {
    CONFIG: b'{"decoder_config": {}}',
    WEIGHTS: bytes(range(256)) * 4000,
    "config.json": b"{}",
    "model.safetensors": b"the talker's, two gigabytes",
    "speech_tokenizer/pytorch_model.bin": b"a pickle",
    "speech_tokenizer/model.pkl": b"a pickle",
    "speech_tokenizer/nested/model.safetensors": b"another",
    "other/speech_tokenizer/config.json": b"{}",
}

CALL = """
import json, sys
from codecstream.errors import CodecStreamError
from codecstream_export.hub import resolve_checkpoint

try:
    found = resolve_checkpoint(sys.argv[1], revision=json.loads(sys.argv[2]))
    print(json.dumps({"folder": str(found.folder), "source": found.source}))
except CodecStreamError as error:
    print(json.dumps({"error": type(error).__name__, "message": str(error)}))
"""
ROOT = Path(__file__).parents[2]


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub(HUB_ID, dict(FILES)).serving() as hub:
        yield hub


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """What HF_HOME is set to."""
    return tmp_path / "hf"


def environment(hub: FakeHub, home: Path, **more: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    ours = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "NO_PROXY": "127.0.0.1,localhost",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "exporters"))),
    }
    return {**clean, **ours, **more}


def call(
    hub: FakeHub,
    home: Path,
    asked: str = HUB_ID,
    revision: str | None = None,
    before: str = "",
    cwd: Path | None = None,
    **more: str,
) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", before + CALL, asked, json.dumps(revision)],
        capture_output=True,
        text=True,
        env=environment(hub, home, **more),
        cwd=cwd,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def fetch(hub: FakeHub, home: Path, *args: Any, **more: Any) -> Path:
    found = call(hub, home, *args, **more)
    assert "folder" in found, found
    folder = Path(found["folder"])
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == {
        "config.json": hub.files[CONFIG],
        "model.safetensors": hub.files[WEIGHTS],
    }
    return folder


def complaint(hub: FakeHub, home: Path, *args: Any, **more: Any) -> str:
    """Return the message of a call that fails, one line that names what was asked."""
    failed = call(hub, home, *args, **more)
    assert failed.get("error") == "CheckpointError", failed
    message = failed["message"]
    assert "\n" not in message and message.startswith(f"no checkpoint '{HUB_ID}")
    assert "no such local path" in message
    for path in home.rglob("snapshots/*/speech_tokenizer/*"):
        assert path.read_bytes() == hub.files[f"speech_tokenizer/{path.name}"]
    return str(message)


# Downloads


def test_only_the_two_files_are_asked_for_and_the_commit_is_told(hub: FakeHub, home: Path) -> None:
    found = call(hub, home)
    assert found["source"] == {"hub_id": HUB_ID, "revision": hub.commit}
    assert sorted(hub.downloads()) == [CONFIG, WEIGHTS]
    assert {line for line in hub.log if "/cdn/" in line} == {f"GET /cdn/{WEIGHTS}"}
    fetched = {p.name for p in home.rglob("*") if p.is_file() and "snapshots" in p.parts}
    assert fetched == {"config.json", "model.safetensors"}


def test_a_second_call_downloads_nothing(hub: FakeHub, home: Path) -> None:
    first = fetch(hub, home)
    hub.log.clear()
    assert fetch(hub, home) == first
    assert hub.log and hub.downloads() == []


def test_a_moved_branch_is_followed(hub: FakeHub, home: Path) -> None:
    first = fetch(hub, home)
    hub.files[CONFIG] += b" "
    hub.refs["main"] = "a" * 40
    assert fetch(hub, home) != first


def test_what_was_downloaded_loads(hub: FakeHub, home: Path, tiny_checkpoint: Path) -> None:
    from codecstream_export import load_checkpoint

    for name in (CONFIG, WEIGHTS):
        hub.files[name] = (tiny_checkpoint / Path(name).name).read_bytes()
    folder = fetch(hub, home)
    loaded = load_checkpoint(folder)
    assert loaded.folder == folder
    assert loaded.weights_sha256 == load_checkpoint(tiny_checkpoint).weights_sha256


@pytest.mark.parametrize("way", ["in the id", "as argument"])
@pytest.mark.parametrize("revision", ["v1.0", "refs/pr/1", "commit"])
def test_a_revision_is_taken(hub: FakeHub, home: Path, revision: str, way: str) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    hub.refs |= {"v1.0": commit, "refs/pr/1": commit}
    revision = commit if revision == "commit" else revision
    asked = (f"{HUB_ID}@{revision}",) if way == "in the id" else (HUB_ID, revision)
    found = call(hub, home, *asked)
    assert found["source"] == {"hub_id": HUB_ID, "revision": commit}
    assert all(f"/resolve/{commit}/" in line for line in hub.log if "/resolve/" in line)


@pytest.mark.skipif(sys.platform == "win32", reason="pty")
def test_progress_is_shown_on_a_terminal(hub: FakeHub, home: Path) -> None:
    import fcntl
    import pty
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))
    try:
        done = subprocess.run(
            [sys.executable, "-c", CALL, HUB_ID, "null"],
            stdout=subprocess.PIPE,
            stderr=theirs,
            env=environment(hub, home),
            timeout=120,
        )
        shown = os.read(ours, 65536).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert done.returncode == 0
    assert "2/2" in shown and "100%" in shown


def test_a_gated_model_needs_the_token(hub: FakeHub, home: Path) -> None:
    hub.token = "hf_good"
    message = complaint(hub, home)
    assert "its owner must give you access" in message and "HF_TOKEN" in message
    assert hub.downloads() == []
    fetch(hub, home, HF_TOKEN="hf_good")


# Without a network


def test_offline_mode_takes_the_cache(hub: FakeHub, home: Path) -> None:
    first = call(hub, home)
    hub.log.clear()
    assert call(hub, home, HF_HUB_OFFLINE="1") == first
    assert hub.log == []


def test_offline_mode_without_the_cache_says_so(hub: FakeHub, home: Path) -> None:
    message = complaint(hub, home, HF_HUB_OFFLINE="1")
    assert "offline mode is on (HF_HUB_OFFLINE)" in message
    assert str(home) in message and "pass a local folder" in message
    assert hub.log == []


def test_half_a_cache_is_not_taken_for_all_of_it(hub: FakeHub, home: Path) -> None:
    (fetch(hub, home) / "model.safetensors").unlink()
    assert "does not have all of it" in complaint(hub, home, HF_HUB_OFFLINE="1")


def test_a_server_that_is_down(hub: FakeHub, home: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        down = {"HF_ENDPOINT": f"http://127.0.0.1:{unused.getsockname()[1]}"}
        message = complaint(hub, home, **down)
        assert f"the connection to {down['HF_ENDPOINT']} failed" in message
        assert "where there is a network" in message and "pass a local folder" in message
        first = fetch(hub, home)
        assert fetch(hub, home, **down) == first  # the cache will do


def test_a_server_that_never_answers(hub: FakeHub, home: Path) -> None:
    hub.stalled = True
    message = complaint(hub, home, HF_HUB_ETAG_TIMEOUT="1")
    assert f"the connection to {hub.url} failed" in message and "imeout" in message


def test_a_cut_download_is_finished_or_told_and_never_truncated(hub: FakeHub, home: Path) -> None:
    hub.cuts = 1
    found = call(hub, home)
    if "error" in found:  # some versions try again by themselves
        assert f"the connection to {hub.url} failed" in found["message"]
        assert not list(home.rglob("snapshots/*/speech_tokenizer/model.safetensors"))
    fetch(hub, home)
    assert hub.cuts == 0


# Refusals

REFUSALS: dict[str, tuple[int, dict[str, str], str]] = {
    "no such repository": (404, {"X-Error-Code": "RepoNotFound"}, "has no such repository"),
    "none for strangers": (401, {}, "the repository is private or not there"),
    "gated": (403, {"X-Error-Code": "GatedRepo"}, "its owner must give you access"),
    "token refused": (
        401,
        {"X-Error-Message": "Invalid credentials in Authorization header"},
        "access was refused (status 401)",
    ),
    "forbidden": (403, {}, "access was refused (status 403)"),
    "too many": (418, {}, "answered with status 418. Try again later"),
    "broken": (500, {}, "answered with status 500. Try again later"),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_refusal_says_who_must_act(hub: FakeHub, home: Path, refusal: str) -> None:
    status, headers, expected = REFUSALS[refusal]
    hub.refusal = (status, headers)
    assert expected in complaint(hub, home)


@pytest.mark.parametrize("known", ["never", "until now"])
def test_an_unknown_revision(hub: FakeHub, home: Path, known: str) -> None:
    hub.refs["v9"] = hub.commit
    fetch(hub, home, HUB_ID if known == "never" else f"{HUB_ID}@v9")
    del hub.refs["v9"]
    message = complaint(hub, home, f"{HUB_ID}@v9")
    assert message.startswith(f"no checkpoint '{HUB_ID}@v9'")
    assert "the repository has no such revision" in message


@pytest.mark.parametrize("missing", [[CONFIG], [WEIGHTS], [CONFIG, WEIGHTS]])
def test_a_repository_without_the_files(hub: FakeHub, home: Path, missing: list[str]) -> None:
    for name in missing:
        del hub.files[name]
    message = complaint(hub, home)
    assert f"{HUB_ID} has no {CONFIG} and {WEIGHTS}" in message
    assert hub.downloads() == []


def test_an_answer_that_is_no_hubs(hub: FakeHub, home: Path) -> None:
    hub.refusal = (200, {"Content-Type": "text/html"})
    hub.answer = lambda path, token: (200, {}, b"<html>sign in</html>")  # type: ignore[method-assign]
    assert f"the connection to {hub.url} failed" in complaint(hub, home)


@pytest.mark.skipif(sys.platform == "win32", reason="resource limits")
def test_a_disk_that_takes_no_more(hub: FakeHub, home: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
    message = complaint(hub, home, before=limit)
    assert f"the cache, {home / 'hub'}, cannot be written" in message and "HF_HOME" in message
    fetch(hub, home)


def test_a_cache_that_is_a_file(hub: FakeHub, home: Path) -> None:
    home.write_text("")
    assert "cannot be written" in complaint(hub, home)


def lost_in_between() -> Exception:
    """What a download raises when the hub went away after its first answer."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    error = LocalEntryNotFoundError("cannot find the requested files")
    error.__cause__ = ConnectionResetError(104, "Connection reset by peer")
    return error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("Xet: task failed\nbacktrace:\n  0: ..."), "RuntimeError: Xet: task failed"),
        (ConnectionResetError(104, "Connection reset by peer"), "Connection reset by peer"),
        (socket.gaierror(-2, "Name or service not known"), "Name or service not known"),
        (lost_in_between(), "Connection reset by peer"),
        (ValueError(), "ValueError"),
    ],
)
def test_whatever_the_download_raises_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, reason: str
) -> None:
    def fail(*args: object) -> None:
        raise error

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("codecstream_export.hub._download", fail)
    with pytest.raises(CheckpointError) as caught:
        resolve_checkpoint(HUB_ID)
    message = str(caught.value)
    assert "\n" not in message
    assert "the connection to " in message and f"{reason})" in message


def test_without_huggingface_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = builtins.__import__

    def without(name: str, *more: Any) -> Any:
        if name.startswith("huggingface_hub"):
            raise ImportError(f"No module named {name!r}")
        return plain(name, *more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingDependencyError) as caught:
        resolve_checkpoint(HUB_ID)
    assert "pip install 'codecstream[export]'" in str(caught.value)
    assert "no local path" in str(caught.value)
    resolve_checkpoint(Path(__file__).parent)  # needs none


# What is no id


@pytest.fixture
def no_download(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise AssertionError("asked the hub")

    monkeypatch.setattr("codecstream_export.hub._download", fail)


@pytest.mark.parametrize("name", [HUB_ID, f"{HUB_ID}@main", "owner/name"])
def test_a_local_folder_of_that_name_wins(hub: FakeHub, home: Path, name: str) -> None:
    work = home / "work"
    (work / name).mkdir(parents=True)
    assert call(hub, home, name, cwd=work) == {"folder": name, "source": {}}
    shutil.rmtree(work / name)
    assert "error" in call(hub, home, name + "x", cwd=work)
    assert hub.log


@pytest.mark.usefixtures("no_download")
def test_a_local_path_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_checkpoint(tmp_path) == ResolvedCheckpoint(tmp_path, {})
    assert resolve_checkpoint(".").folder == Path(".")
    dangling = tmp_path / "a"
    dangling.mkdir()
    (dangling / "b").symlink_to("nowhere")
    assert resolve_checkpoint("a/b").folder == Path("a/b")  # to be told as unreadable


MALFORMED = [
    "",
    " ",
    "name",
    "a/b/c",
    "../x",
    "./x/y",
    "x/..",
    "~/x",
    "~user/x",
    "/x/y",
    "a/",
    "/a",
    "a//b",
    "a b/c",
    "a/b c",
    " a/b",
    "a/b ",
    "a/b\n",
    "a/.b",
    "a/b.",
    "-a/b",
    "a/b-",
    "a/b--c",
    "a/b..c",
    "a/b.git",
    "ä/b",
    "a/b:c",
    "a/b?x=1",
    "a/b#c",
    "a/%2e%2e",
    "a\x00/b",
    "C:\\models\\qwen",
    "C:/models",
    "models\\qwen",
    "https://example.org/a/b",
    "a/" + "b" * 97,
    "a/" + "b" * 5000,
    "@main",
    "a@main",
]


@pytest.mark.usefixtures("no_download")
@pytest.mark.parametrize("asked", MALFORMED)
def test_what_is_neither_path_nor_id(
    asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        resolve_checkpoint(asked)
    message = str(caught.value)
    assert "there is no local path" in message and "owner/name" in message
    assert repr(asked) in message


@pytest.mark.usefixtures("no_download")
def test_a_path_object_is_never_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="there is no local path"):
        resolve_checkpoint(Path("owner/name"))


@pytest.mark.usefixtures("no_download")
@pytest.mark.parametrize("revision", ["", "../../x", "a..b", "/main", "-x", "a b", "a\n", "a@b"])
def test_a_malformed_revision(revision: str) -> None:
    for asked, argument in ((f"owner/name@{revision}", None), ("owner/name", revision)):
        with pytest.raises(CheckpointError, match="cannot be a revision of owner/name"):
            resolve_checkpoint(asked, revision=argument)


@pytest.mark.usefixtures("no_download")
def test_two_revisions_or_one_of_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has a revision of its own"):
        resolve_checkpoint("owner/name@v1", revision="v2")
    with pytest.raises(CheckpointError, match="is a local path, which has no revision 'v1'"):
        resolve_checkpoint(str(tmp_path), revision="v1")
