"""The exporter, killed in the middle: nothing usable stays, and the next export is whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

import codecstream  # noqa: E402
from codecstream import ArtifactError  # noqa: E402
from codecstream.artifact import open_artifact  # noqa: E402

# The real command, killed by the system as soon as it has written as many files as argv[3] says.
# The program is copied instead of traced again; all else is as ever.
EXPORTER = """
import json, os, shutil, signal, sys
from pathlib import Path
from codecstream_export import cli, export
from codecstream_export.targets import Written, onnx as target

artifact, checkpoint, out, files, *more = sys.argv[1:]

def die_after(number):
    if number == int(files):
        os.kill(os.getpid(), signal.SIGKILL)

def write_step(step, folder, largest):
    shutil.copy(Path(artifact) / "decoder.onnx", folder)
    die_after(1)
    made_with = json.loads((Path(artifact) / "manifest.json").read_text())["made_with"]
    return Written(program="decoder.onnx", made_with=made_with)

def write_manifest(folder, manifest, *name):
    plain(folder, manifest, *name)
    die_after(2 if name else 3)

plain = export.write_manifest
target.write_step = write_step
export.write_manifest = write_manifest
sys.exit(cli.main(["--checkpoint", checkpoint, "--runtime", "onnx", "--out", out, *more]))
"""


def run(
    artifact: Path, checkpoint: Path, out: Path, files: int, *more: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", EXPORTER, artifact, checkpoint, out, str(files), *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.case(57)
@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
@pytest.mark.parametrize("files", [2, 3])
def test_case_57_a_killed_export_and_the_next_with_another_ramp(
    tiny_artifact: Path, tiny_checkpoint: Path, tmp_path: Path, files: int
) -> None:
    out = tmp_path / "out"
    killed = run(tiny_artifact, tiny_checkpoint, out, files, "--ramp", "2", "4")
    assert killed.returncode == -9, killed.stderr
    assert not out.exists()
    with pytest.raises(ArtifactError, match="not a decoder artifact"):
        codecstream.load_program(out)
    (hidden,) = tmp_path.iterdir()
    assert hidden.name.startswith(".out.")
    written = {path.name for path in (hidden / "new").iterdir()}
    # Only after the third file, all being verified, does it look like an artifact.
    assert ("manifest.json" in written) == (files == 3)
    if files == 2:
        assert written == {"decoder.onnx", "manifest.unverified.json"}
        with pytest.raises(ArtifactError, match="not a decoder artifact"):
            codecstream.load_program(hidden / "new")

    done = run(tiny_artifact, tiny_checkpoint, out, 0, "--ramp", "5")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert {path.name for path in out.iterdir()} == {"decoder.onnx", "manifest.json"}
    assert json.loads((out / "manifest.json").read_text())["ramp"] == [5]
    open_artifact(out, verify_hashes=True)
    codecstream.load_program(out, threads=1)
