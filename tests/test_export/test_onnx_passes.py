"""What the ONNX files hold: blocked convolutions, 16-bit weights, one copy for all windows."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from support import make_codes

onnx = pytest.importorskip("onnx")
pytest.importorskip("torch")

import codecstream  # noqa: E402
from codecstream.artifact import open_artifact  # noqa: E402
from codecstream_export import export_artifact, save_checkpoint  # noqa: E402
from codecstream_export.random_weights import TINY, random_decoder  # noqa: E402

SMALL = dataclasses.replace(TINY, num_hidden_layers=2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_checkpoint(folder, random_decoder(SMALL))
    return folder


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    out = tmp_path_factory.mktemp("out") / "half"
    return export_artifact(checkpoint, out, precision="fp16").folder


def initializers(path: Path) -> dict[str, onnx.TensorProto]:
    return {item.name: item for item in onnx.load(path).graph.initializer}


def test_convolutions_with_taps_are_two_dimensional(tiny_artifact: Path) -> None:
    graph = onnx.load(tiny_artifact / "decoder.onnx").graph
    weights = {item.name: item.dims for item in graph.initializer}
    kinds: defaultdict[tuple[int, bool, bool], set[str]] = defaultdict(set)
    for node in graph.node:
        if node.op_type == "Conv":
            group = next((a.i for a in node.attribute if a.name == "group"), 1)
            dims = tuple(weights[node.input[1]])
            kinds[(len(dims), dims[-1] > 1, group > 1)] |= {node.input[1]}
    counts = {kind: len(names) for kind, names in kinds.items()}
    assert counts == {(4, True, False): 18, (3, False, False): 13, (3, True, True): 2}


def test_the_last_blocks_work_in_tiles_that_share_their_weights(tiny_artifact: Path) -> None:
    graph = onnx.load(tiny_artifact / "decoder.onnx").graph
    uses = Counter(node.input[1] for node in graph.node if node.op_type == "Conv")
    # Two tiles in block 2, each of them in two in block 3; the tail reads what block 3 gives.
    by_block = {i: uses[f"blocks.{i}.units.0.conv1.weight.2d"] for i in (1, 2, 3)}
    assert by_block == {1: 1, 2: 2, 3: 4}
    assert uses["tail.weight"] == 4


def test_16_bit_weights_take_half_the_space(half: Path) -> None:
    tensors = initializers(half / "decoder.onnx").items()
    # The codebooks have a scale per entry, which at this width is many, and the translator folds
    # what is small beside the published size.
    large = [t for name, t in tensors if np.prod(t.dims) >= 8192 and not name.endswith("scale")]
    assert len(large) >= 3
    assert {t.data_type for t in large} <= {onnx.TensorProto.INT16, onnx.TensorProto.FLOAT16}
    parity = open_artifact(half).manifest.parity
    assert all(item["snr_db"] >= 60 and item["min_snr_db"] == 60 for item in parity.values())


def test_16_bit_weights_are_convolved_in_blocks_too(half: Path) -> None:
    names = {node.op_type for node in onnx.load(half / "decoder.onnx").graph.node}
    assert {"Cast", "Unsqueeze", "Conv"} <= names


@pytest.mark.case(31)
@pytest.mark.case(43)
def test_all_windows_read_one_weights_file(tmp_path: Path, checkpoint: Path) -> None:
    sizes = {}
    for ramp in ((2,), (2, 3, 4)):
        result = export_artifact(checkpoint, tmp_path / str(len(ramp)), mode="windowed", ramp=ramp)
        files = result.manifest.files
        assert files.keys() == {"weights.safetensors", *(f"decoder.{n}.onnx" for n in ramp)}
        sizes[len(ramp)] = files["weights.safetensors"].bytes
    assert sizes[3] <= 1.02 * sizes[1]
    weights = result.folder / "weights.safetensors"
    content = weights.read_bytes()
    codecstream.load_program(result.folder, threads=1)
    for damage in (content[:-4], content[:-1] + bytes([content[-1] ^ 1])):
        weights.write_bytes(damage)
        with pytest.raises(codecstream.ArtifactError, match=r"weights\.safetensors"):
            codecstream.load_program(result.folder, threads=1)
    weights.rename(tmp_path / "elsewhere")
    with pytest.raises(codecstream.ArtifactError, match=r"weights\.safetensors.*Copy the whole"):
        codecstream.load_program(result.folder, threads=1)
    (tmp_path / "elsewhere").rename(weights)
    weights.write_bytes(content)
    program = codecstream.load_program(result.folder, threads=1)
    pcm, _ = program.step(make_codes(3), program.initial_state())
    assert pcm.shape == (3 * 1920,)


def test_int8_is_what_the_floor_allows(tmp_path: Path, checkpoint: Path) -> None:
    result = export_artifact(
        checkpoint, tmp_path / "int8", precision="int8", min_snr_db=25, min_slice_snr_db=18
    )
    record = result.manifest.quantization
    assert record is not None and record["quantized"]
    assert all(item.snr_db >= 25 and item.frames >= 440 for item in result.parity)
    kinds = {t.data_type for t in initializers(result.folder / "decoder.onnx").values()}
    assert onnx.TensorProto.INT8 in kinds and onnx.TensorProto.INT16 in kinds
