"""The example player's live view: what it shows, and that it keeps quiet where nobody looks."""

from __future__ import annotations

import importlib.util
import io
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from codecstream.observe import Progress
from codecstream.playback import PlaybackStats

PATH = Path(__file__).parents[2] / "examples" / "live_view.py"


@pytest.fixture(scope="module")
def live_view() -> Any:
    spec = importlib.util.spec_from_file_location("live_view", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def progress(received: int = 50, decoded: int = 30, taken: int = 20) -> Progress:
    return Progress(
        elapsed_ms=4000.0,
        frames_received=received,
        frames_decoded=decoded,
        frames_handed_out=taken,
        frames_waiting=received - decoded,
        audio_ready_s=(decoded - taken) * 0.08,
        decode_ms_total=1200.0,
        decode_rtf=0.5,
    )


def test_rows_by_hand(live_view: Any) -> None:
    stats = PlaybackStats(
        played_samples=24_000, queued_samples=36_000, underruns=2, underrun_samples=6_000
    )
    lines = live_view.describe(progress(), stats).splitlines()
    assert lines[0].split() == ["received", "4.00", "s", "#" * 30]
    assert lines[1].split() == ["decoded", "2.40", "s", "#" * 18]
    assert lines[2].split()[:3] == ["played", "1.00", "s"]
    assert lines[3].split() == (
        ["buffer", "1.50", "s", "decode", "RTF", "0.50", "2", "underruns,", "0.25", "s"]
    )


def test_without_a_player_what_was_taken_is_shown(live_view: Any) -> None:
    lines = live_view.describe(progress(), None).splitlines()
    assert lines[2].split()[:2] == ["taken", "1.60"]
    assert lines[3].split()[:2] == ["buffer", "0.80"]


def test_before_the_first_frame(live_view: Any) -> None:
    nothing = Progress(0.0, 0, 0, 0, 0, 0.0, 0.0, None)
    assert "decode RTF -" in live_view.describe(nothing, None)


def test_nothing_is_shown_where_the_output_is_no_terminal(live_view: Any) -> None:
    console = pytest.importorskip("rich.console").Console(file=io.StringIO())
    view = live_view.live_view(SimpleNamespace(progress=progress()), console=console)
    assert isinstance(view, nullcontext)


def test_a_terminal_sees_the_latest(live_view: Any) -> None:
    output = io.StringIO()
    console = pytest.importorskip("rich.console").Console(file=output, force_terminal=True)
    utterance = SimpleNamespace(progress=progress(received=10, decoded=5))
    with live_view.live_view(utterance, console=console) as view:
        utterance.progress = progress(received=100, decoded=77)
        view.refresh()
    assert "8.00 s" in output.getvalue()
    assert "6.16 s" in output.getvalue()


def test_without_rich_there_is_no_view(live_view: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "rich.console", None)
    view = live_view.live_view(SimpleNamespace(progress=progress()))
    assert isinstance(view, nullcontext)


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_the_player_shows_it_on_a_terminal_and_only_there(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    pytest.importorskip("onnxruntime")
    import pty

    seen: list[bytes] = []

    def read(descriptor: int) -> bytes:
        seen.append(os.read(descriptor, 1024))
        return seen[-1] and b"."  # nothing at all would be the end

    command = [sys.executable, str(PATH.parent / "player.py"), "--no-audio"]
    assert pty.spawn(command, read) == 0
    shown = b"".join(seen)
    assert b"decode RTF" in shown
    assert shown.count(b"received") > 5
    printed = subprocess.run(command, capture_output=True, check=True).stdout
    assert b"received" not in printed
    assert b"TTFA" in printed
