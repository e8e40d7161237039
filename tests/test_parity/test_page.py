"""The page: one file, complete, and what a real browser makes of it."""

from __future__ import annotations

import html.parser
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support import Check

pytest.importorskip("torch")
pytest.importorskip("onnxruntime")
pytest.importorskip("matplotlib")
pytest.importorskip("soundfile")

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((path for name in BROWSERS if (path := shutil.which(name))), None)

# Written into the page's copy: says what the browser has loaded.
PROBE = """
<pre id=probe></pre><script>
const media = [...document.querySelectorAll('audio')];
const state = () => JSON.stringify({
  durations: media.map(m => m.duration), errors: media.map(m => m.error && m.error.message),
  images: [...document.images].map(i => [i.complete, i.naturalWidth]),
  cells: document.querySelectorAll('td').length, wide: document.body.scrollWidth,
  requests: performance.getEntriesByType('resource').map(r => r.name.slice(0, 10)),
});
setInterval(() => { document.getElementById('probe').textContent = state(); }, 100);
</script>
"""


class Tags(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.sources += [v or "" for k, v in attributes if k in ("src", "href")]
        if tag not in ("meta", "img", "p", "dt", "dd"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            assert self.open.pop() == tag


@pytest.fixture
def page(tmp_path: Path, tiny_artifact: Path, check: Check) -> Path:
    path = tmp_path / "report.html"
    status, _ = check(tiny_artifact, "--frames", 60, "--html", path)
    assert status == 0
    return path


def test_the_page_is_one_file(page: Path) -> None:
    tags = Tags()
    tags.feed(page.read_text(encoding="utf-8"))
    assert tags.open == []
    assert tags.seen.count("audio") == 3
    assert tags.seen.count("img") == 1
    assert all(source.startswith("data:") for source in tags.sources)


def test_a_failing_page_says_why(tmp_path: Path, tiny_artifact: Path, check: Check) -> None:
    path = tmp_path / "report.html"
    options = ("--frames", 30, "--html", path, "--min-snr-db", 200)
    status, report = check(tiny_artifact, *options)
    text = path.read_text(encoding="utf-8")
    assert status == 1
    assert "falls short" in text
    for reason in report["reasons"]:
        assert reason in text
    assert "<td class=missed>" in text


def test_names_are_text(tmp_path: Path, tiny_artifact: Path, check: Check) -> None:
    """A folder may be called anything: it must not become part of the page."""
    folder = tmp_path / "<script>alert(1)<"
    shutil.copytree(tiny_artifact, folder)
    path = tmp_path / "report.html"
    check(folder, "--frames", 10, "--html", path)
    assert "<script" not in path.read_text(encoding="utf-8")


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_a_real_browser_shows_the_page(page: Path, tmp_path: Path) -> None:
    """Pictures and sound are loaded, at the right length, and nothing is fetched."""
    assert BROWSER is not None
    probed = tmp_path / "probed.html"
    probed.write_text(page.read_text(encoding="utf-8") + PROBE, encoding="utf-8")
    dumped = subprocess.run(
        [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,2000",
            "--virtual-time-budget=8000", f"--user-data-dir={tmp_path / 'profile'}",
            "--dump-dom", probed.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout  # fmt: skip
    found = re.search(r"<pre id=\"probe\">(.*?)</pre>", dumped, re.DOTALL)
    assert found is not None
    state = json.loads(found.group(1))
    assert state["errors"] == [None] * 3
    assert state["durations"] == pytest.approx([60 * 0.08] * 3, abs=0.01)
    assert state["images"] == [[True, 1400]]
    assert state["cells"] > 40
    assert state["wide"] <= 1280
    assert {name for name in state["requests"] if not name.startswith("data:")} == set()
