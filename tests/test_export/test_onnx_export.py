"""An exported ONNX artifact: what is in it, and what is left behind when something goes wrong."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import make_codes

torch = pytest.importorskip("torch")
onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

import codecstream  # noqa: E402
from codecstream import ArtifactError  # noqa: E402
from codecstream.artifact import open_artifact  # noqa: E402
from codecstream_export import (  # noqa: E402
    EagerDecoder,
    ParityError,
    StepDecoder,
    export,
    export_artifact,
    verify,
)
from codecstream_export.cli import main  # noqa: E402
from codecstream_export.targets import Written  # noqa: E402
from codecstream_export.targets import onnx as onnx_target  # noqa: E402

GRAPH_OVERHEAD_BYTES = 250_000  # names, shapes and nodes; does not grow with the weights


@pytest.fixture(scope="module")
def manifest(tiny_artifact: Path) -> dict[str, Any]:
    return json.loads((tiny_artifact / "manifest.json").read_text())


@pytest.fixture(scope="module")
def model(tiny_artifact: Path) -> Any:
    return onnx.load(tiny_artifact / "decoder.onnx")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tiny_artifact: Path) -> None:
    """Copy the program that is there instead of tracing it again; all else is as ever."""
    made_with = json.loads((tiny_artifact / "manifest.json").read_text())["made_with"]

    def write_step(step: StepDecoder, folder: Path, largest: int) -> Written:
        shutil.copy(tiny_artifact / "decoder.onnx", folder)
        return Written(program="decoder.onnx", made_with=made_with)

    monkeypatch.setattr(onnx_target, "write_step", write_step)


def command(checkpoint: Path, out: Path, *more: str) -> int:
    return main(["--checkpoint", str(checkpoint), "--runtime", "onnx", "--out", str(out), *more])


# What an artifact holds


@pytest.mark.usefixtures("quick")
def test_the_command_writes_an_artifact_that_loads(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new folder" / "decoder"
    assert command(tiny_checkpoint, out, "--ramp", "1", "3") == 0
    output = capsys.readouterr()
    assert output.out == ""
    assert "Wrote" in output.err and "worst 80 ms" in output.err
    assert open_artifact(out).manifest.ramp == [1, 3]
    program = codecstream.load_program(out)
    pcm, _ = program.step(make_codes(3), program.initial_state())
    assert pcm.shape == (3 * 1920,)


def test_manifest_is_complete(manifest: dict[str, Any]) -> None:
    assert manifest["format"] == "codecstream-decoder"
    assert manifest["format_version"] == 1
    assert (manifest["runtime"], manifest["precision"], manifest["mode"]) == (
        "onnx",
        "fp32",
        "stateful",
    )
    assert manifest["decoder_id"] == "qwen3_tts_tokenizer_v2_12hz"
    assert manifest["geometry"] == {
        "codebooks": 16,
        "codebook_size": 2048,
        "frame_rate_hz": 12.5,
        "sample_rate_hz": 24000,
        "samples_per_frame": 1920,
    }
    assert manifest["frames"] == {"min": 1, "max": None}
    assert manifest["ramp"] == [2, 4, 8, 16, 25]
    assert manifest["program"] == "decoder.onnx"


def test_manifest_describes_every_input_output_and_state(
    manifest: dict[str, Any], tiny_decoder: EagerDecoder
) -> None:
    state = StepDecoder(tiny_decoder).state
    tensors = [{"name": item.name, "dtype": "float32", "shape": list(item.shape)} for item in state]
    codes, *state_in = manifest["inputs"]
    pcm, *state_out = manifest["outputs"]
    assert codes == {"name": "codes", "dtype": "int64", "shape": [1, 16, "frames"]}
    assert pcm == {"name": "pcm", "dtype": "float32", "shape": ["1920 * frames"]}
    assert state_in == tensors
    assert state_out == [{**item, "name": f"next.{item['name']}"} for item in tensors]
    assert manifest["state"] == [
        {"input": item.name, "output": f"next.{item.name}", "fill": 0.0} for item in state
    ]


def test_manifest_agrees_with_the_program(manifest: dict[str, Any], model: Any) -> None:
    for kind, entries in (("input", model.graph.input), ("output", model.graph.output)):
        actual = [
            {
                "name": entry.name,
                "dtype": {1: "float32", 7: "int64"}[entry.type.tensor_type.elem_type],
                "dims": [d.dim_value or "symbol" for d in entry.type.tensor_type.shape.dim],
            }
            for entry in entries
        ]
        assert actual == [
            {
                "name": entry["name"],
                "dtype": entry["dtype"],
                "dims": [d if isinstance(d, int) else "symbol" for d in entry["shape"]],
            }
            for entry in manifest[f"{kind}s"]
        ]


@pytest.mark.case(31)
def test_manifest_lists_every_file_and_there_is_one(
    manifest: dict[str, Any], tiny_artifact: Path
) -> None:
    assert {p.name for p in tiny_artifact.iterdir()} == {"manifest.json", "decoder.onnx"}
    data = (tiny_artifact / "decoder.onnx").read_bytes()
    assert manifest["files"] == {
        "decoder.onnx": {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    }


def test_manifest_says_where_it_comes_from_and_how_good_it_is(
    manifest: dict[str, Any], tiny_checkpoint: Path
) -> None:
    weights = (tiny_checkpoint / "model.safetensors").read_bytes()
    assert manifest["source"]["weights_sha256"] == hashlib.sha256(weights).hexdigest()
    assert manifest["made_with"]["codecstream"] == codecstream.__version__
    assert manifest["made_with"]["torch"] == torch.__version__
    assert manifest["made_with"]["onnx"] == onnx.__version__
    for order in ("ramp", "every size"):
        parity = manifest["parity"][order]
        assert parity["frames"] > 2 * 72
        assert parity["snr_db"] >= parity["min_snr_db"] == 90.0
        assert parity["worst_slice_snr_db"] >= 80.0


@pytest.mark.case(35)
def test_the_oldest_ir_and_opset_are_written_and_recorded(
    manifest: dict[str, Any], model: Any
) -> None:
    assert model.ir_version == 8
    assert {entry.domain: entry.version for entry in model.opset_import} == {"": 18}
    assert manifest["made_with"]["onnx_ir_version"] == "8"
    assert manifest["made_with"]["onnx_opset"] == "18"


@pytest.mark.case(35)
def test_an_artifact_newer_than_the_runtime_says_what_to_install(
    tiny_artifact: Path, tmp_path: Path, model: Any
) -> None:
    folder = Path(shutil.copytree(tiny_artifact, tmp_path / "newer"))
    newer = onnx.ModelProto()
    newer.CopyFrom(model)
    newer.ir_version = 99
    (folder / "decoder.onnx").write_bytes(newer.SerializeToString())
    document = json.loads((folder / "manifest.json").read_text())
    document["files"]["decoder.onnx"]["bytes"] = newer.ByteSize()
    document["made_with"]["onnx_ir_version"] = "99"
    (folder / "manifest.json").write_text(json.dumps(document))
    with pytest.raises(ArtifactError) as caught:
        codecstream.load_program(folder, verify_hashes=False)
    message = str(caught.value)
    assert "onnx_ir_version 99" in message
    assert f"onnxruntime {onnxruntime.__version__}" in message
    assert "Install a newer onnxruntime" in message
    assert "\n" not in message


# The graph


def weights(model: Any) -> dict[str, Any]:
    return {item.name: item for item in model.graph.initializer}


def test_one_copy_of_the_weights_is_stored(
    model: Any, tiny_artifact: Path, tiny_decoder: EagerDecoder
) -> None:
    parameters = 4 * sum(p.numel() for p in tiny_decoder.parameters())
    stored = sum(len(item.raw_data) for item in model.graph.initializer)
    assert stored <= 1.05 * parameters
    assert (tiny_artifact / "decoder.onnx").stat().st_size <= stored + GRAPH_OVERHEAD_BYTES
    large = [item.raw_data for item in model.graph.initializer if len(item.raw_data) > 256]
    assert len(set(large)) == len(large)
    assert not any(item.external_data for item in model.graph.initializer)


@pytest.mark.case(30)
def test_nothing_is_computed_from_constants_alone(model: Any) -> None:
    constant = set(weights(model))
    folded_late = []
    for node in model.graph.node:
        if all(name in constant for name in node.input if name):
            constant.update(node.output)
            if node.op_type != "Constant":
                folded_late.append(f"{node.op_type} {node.name}")
    assert not folded_late


@pytest.mark.case(30)
def test_every_convolution_and_codebook_reads_a_stored_weight(model: Any) -> None:
    stored = weights(model)
    convolutions = [node for node in model.graph.node if node.op_type == "Conv"]
    # The same number at every width; some work several times, on tiles.
    assert len({node.input[1] for node in convolutions}) == 33
    for node in convolutions:
        assert set(node.input[1:]) <= stored.keys(), node.name
    tables = [node for node in model.graph.node if node.op_type == "Gather"]
    assert any(tuple(stored[node.input[0]].dims) == (16 * 2048, 8) for node in tables)
    assert not {node.op_type for node in model.graph.node} & {"ConvTranspose", "Exp", "If", "Loop"}


def test_the_graph_tells_nothing_about_the_machine_that_made_it(tiny_artifact: Path) -> None:
    data = (tiny_artifact / "decoder.onnx").read_bytes()
    folders = (Path(export.__file__).parent, Path(torch.__file__).parent, Path.home())
    told = [str(folder) for folder in folders if str(folder).encode() in data]
    assert not told


# Failures


def fail(*arguments: object, **options: object) -> Any:
    raise RuntimeError("the disk is full")


def interrupt(*arguments: object, **options: object) -> Any:
    raise KeyboardInterrupt


DEATHS: dict[str, tuple[object, str, Callable[..., Any], type[BaseException]]] = {
    "after the file is written": (export, "describe_file", fail, RuntimeError),
    "before the manifest": (export, "write_manifest", fail, RuntimeError),
    "at the reload": (export, "load_artifact", fail, RuntimeError),
    "at the comparison": (export, "check_parity", interrupt, KeyboardInterrupt),
}


@pytest.mark.case(57)
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("death", DEATHS)
def test_a_dying_export_leaves_nothing(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, death: str
) -> None:
    module, name, stub, error = DEATHS[death]
    monkeypatch.setattr(module, name, stub)
    with pytest.raises(error):
        export_artifact(tiny_checkpoint, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("quick")
def test_an_artifact_that_falls_short_is_not_kept(
    tiny_checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(verify.FLOORS, "fp32", verify.Floor(200.0, 200.0, 150))
    with pytest.raises(ParityError, match=r"in ramp order: .* dB overall .at least 200 needed"):
        export_artifact(tiny_checkpoint, tmp_path / "out")
    assert command(tiny_checkpoint, tmp_path / "out") == 1
    assert "falls short" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("quick")
def test_force_replaces_an_artifact_and_nothing_else(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact, photos = tmp_path / "artifact", tmp_path / "photos"
    photos.mkdir()
    (photos / "beach.jpg").write_bytes(b"...")
    assert command(tiny_checkpoint, artifact) == 0
    (artifact / "stale.bin").write_bytes(b"of an older export")

    assert command(tiny_checkpoint, artifact) == 2
    assert "--force" in capsys.readouterr().err
    assert (artifact / "stale.bin").exists()

    assert command(tiny_checkpoint, artifact, "--force", "--ramp", "5") == 0
    assert {p.name for p in artifact.iterdir()} == {"manifest.json", "decoder.onnx"}
    assert open_artifact(artifact).manifest.ramp == [5]

    capsys.readouterr()
    assert command(tiny_checkpoint, photos, "--force") == 2
    assert "is not a decoder artifact" in capsys.readouterr().err
    assert [p.name for p in photos.iterdir()] == ["beach.jpg"]
    assert {p.name for p in tmp_path.iterdir()} == {"artifact", "photos"}


@pytest.mark.usefixtures("quick")
def test_a_failed_replacement_keeps_the_artifact_that_was_there(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = export_artifact(tiny_checkpoint, tmp_path / "out", ramp=(5,)).folder
    monkeypatch.setattr(export, "check_parity", fail)
    with pytest.raises(RuntimeError):
        export_artifact(tiny_checkpoint, out, force=True)
    assert open_artifact(out).manifest.ramp == [5]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.usefixtures("quick")
def test_an_empty_folder_may_become_an_artifact(tiny_checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "empty"
    out.mkdir()
    assert command(tiny_checkpoint, out) == 0
    assert out.stat().st_mode & 0o700 == 0o700
    open_artifact(out)


def test_a_wrong_parent_is_wrong_use(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("not a folder")
    assert command(tiny_checkpoint, tmp_path / "file") == 2
    assert "is not a decoder artifact" in capsys.readouterr().err


WRONG_USE = {
    "nothing": "",
    "no runtime": "--checkpoint x --out y",
    "unknown runtime": "--checkpoint x --out y --runtime tensorflow",
    "unknown precision": "--checkpoint x --out y --runtime onnx --precision fp8",
    "odd ramp": "--checkpoint x --out y --runtime onnx --ramp two",
    "zero in ramp": "--checkpoint x --out y --runtime onnx --ramp 0",
    "no checkpoint": "--checkpoint /nowhere --out y --runtime onnx",
}


@pytest.mark.parametrize("use", WRONG_USE)
def test_wrong_use_is_exit_2_with_a_reason(
    use: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        status = main(WRONG_USE[use].split())
    except SystemExit as stop:  # argparse
        status = int(stop.code or 0)
    assert status == 2
    assert "error" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_command_starts_without_torch() -> None:
    """Help and wrong options answer at once."""
    code = "import codecstream_export.cli, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


def test_a_program_takes_any_number_of_frames(tiny_artifact: Path) -> None:
    program = codecstream.load_program(tiny_artifact, threads=1, warmup=False)
    assert program.max_frames is None
    for frames in (1, 2, 3, 24, 25, 26, 150):
        pcm, _ = program.step(make_codes(frames), program.initial_state())
        assert pcm.shape == (frames * 1920,) and np.abs(pcm).max() > 0.01


def test_the_program_does_not_tell_where_it_was_made(tiny_artifact: Path) -> None:
    data = (tiny_artifact / "decoder.onnx").read_bytes()
    for trace in (str(Path(__file__).parents[2]), sys.prefix, "Traceback", "site-packages", ".py"):
        assert trace.encode() not in data


@pytest.mark.case(57)
@pytest.mark.usefixtures("quick")
def test_case_57_nothing_looks_usable_before_it_is_verified(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a kill during the comparison would leave behind does not load."""
    seen: list[set[str]] = []

    def look(*args: Any, **kwargs: Any) -> list[Any]:
        (hidden,) = tmp_path.iterdir()
        assert hidden.name.startswith(".out.")
        staging = hidden / "new"
        seen.append({path.name for path in staging.iterdir()})
        with pytest.raises(ArtifactError, match="not a decoder artifact"):
            codecstream.load_program(staging)
        return []

    monkeypatch.setattr(export, "check_parity", look)
    export_artifact(tiny_checkpoint, tmp_path / "out")
    assert seen == [{"decoder.onnx", "manifest.unverified.json"}]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"decoder.onnx", "manifest.json"}


@pytest.mark.parametrize("missing", ["rich", "torch"])
def test_without_what_it_needs_the_command_says_what_to_install(missing: str) -> None:
    code = (
        f"import sys\nsys.modules[{missing!r}] = None\n"
        "from codecstream_export import cli\n"
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run([*command, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    arguments = ["--checkpoint", "x", "--runtime", "onnx", "--out", "y"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "pip install 'codecstream[export]'" in done.stderr
