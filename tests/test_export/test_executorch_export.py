"""The ExecuTorch target: what the accelerator took, and what stands in the file."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from artifacts import CONTEXT, Store
from support import make_codes, worst_slice_db

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own deprecated imports
    pytest.importorskip("executorch.exir", reason="needs: pip install '.[export-executorch]'")
    from executorch.exir import to_edge_transform_and_lower
    from executorch.exir.backend.partitioner import Partitioner, PartitionResult

    from codecstream_export.targets import executorch as target
    from codecstream_export.targets.delegation import Delegation, measure_delegation

import codecstream  # noqa: E402
from codecstream_export import (  # noqa: E402
    ExportError,
    StepDecoder,
    export_artifact,
    save_checkpoint,
    verify,
)
from codecstream_export.random_weights import TINY, random_decoder  # noqa: E402
from codecstream_export.reference import eager_pcm  # noqa: E402
from codecstream_export.targets import Written  # noqa: E402

METHOD_OVERHEAD_BYTES = 150_000  # of a method's graph; does not grow with the weights


@pytest.fixture(scope="module")
def manifest(store: Store) -> dict[str, Any]:
    return json.loads((store.artifact("executorch") / "manifest.json").read_text())


@pytest.fixture(scope="module")
def windowed_manifest(store: Store) -> dict[str, Any]:
    return json.loads((store.artifact("executorch windowed") / "manifest.json").read_text())


# What was delegated


@pytest.mark.case(41)
@pytest.mark.parametrize("name", ["manifest", "windowed_manifest"])
def test_case_41_the_manifest_says_what_was_delegated(
    request: pytest.FixtureRequest, name: str
) -> None:
    delegation = request.getfixturevalue(name)["delegation"]
    assert delegation["backend"] == "xnnpack"
    assert delegation["undelegated_products"] == []
    assert delegation["arithmetic_share"] == 1.0
    assert delegation["multiply_adds"] > 10e6
    assert 0.5 < delegation["node_share"] < 1.0
    left = delegation["undelegated_operators"]
    assert sum(left.values()) == round(delegation["nodes"] * (1 - delegation["node_share"]))
    assert "aten::embedding" in left
    assert not [op for op in left if "conv" in op or "linear" in op or "mm" in op]


class Nothing(Partitioner):  # type: ignore[misc]
    """An accelerator that takes nothing."""

    def partition(self, program: Any) -> PartitionResult:
        return PartitionResult(tagged_exported_program=program, partition_tags={})


class Products(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv1d(3, 5, 7)
        self.linear = torch.nn.Linear(11, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.conv(x)) + 1.0


# Outputs [1, 5, 11] of 3 x 7 products each, then [1, 5, 2] of 11 each.
PRODUCTS = 5 * 11 * 3 * 7 + 5 * 2 * 11


@pytest.mark.case(41)
@pytest.mark.parametrize("taken", [True, False])
def test_case_41_delegated_arithmetic_is_counted(taken: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(Products().eval(), (torch.randn(1, 3, 17),))
        partitioner = target.XnnpackPartitioner() if taken else Nothing()
        lowered = to_edge_transform_and_lower({"forward": program}, partitioner=[partitioner])
        delegation = measure_delegation({"forward": lowered.exported_program("forward")}, "x")
    assert delegation.multiply_adds == PRODUCTS
    assert delegation.delegated_multiply_adds == (PRODUCTS if taken else 0)
    assert delegation.delegated_nodes <= delegation.nodes
    if taken:
        assert delegation.undelegated_products == ()
    else:
        assert delegation.delegated_nodes == 0
        assert len(delegation.undelegated_products) == 2
        assert any("convolution" in line for line in delegation.undelegated_products)
        assert delegation.to_json()["arithmetic_share"] == 0.0


@pytest.mark.case(41)
@pytest.mark.timeout(600)
def test_case_41_a_program_that_nothing_accelerates_is_refused_or_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused, with every product named; accepted on request, and then as exact as any other."""
    decoder = random_decoder(dataclasses.replace(TINY, num_hidden_layers=1))
    save_checkpoint(tmp_path / "speech_tokenizer", decoder)
    monkeypatch.setattr(target, "XnnpackPartitioner", Nothing)
    monkeypatch.setitem(verify.FLOORS, "fp32", verify.Floor(90.0, 80.0, 12))  # it is slow
    kept: dict[Path, Written] = {}
    lower = target.write_step

    def write_step(step: StepDecoder, folder: Path, largest: int) -> Written:
        """Lower once; the second export copies."""
        for before, written in kept.items():
            shutil.copy(before, folder)
            return written
        written = lower(step, folder, largest)
        kept[Path(shutil.copy(folder / "decoder.pte", tmp_path))] = written
        return written

    monkeypatch.setattr(target, "write_step", write_step)

    def export(allow: bool) -> dict[str, Any]:
        out = tmp_path / "out"
        export_artifact(tmp_path, out, runtime="executorch", ramp=(2,), allow_undelegated=allow)
        document: dict[str, Any] = json.loads((out / "manifest.json").read_text())
        return document

    with pytest.raises(
        ExportError, match=r"(?s)xnnpack did not take \d+ products, .*convolution"
    ) as caught:
        export(False)
    assert "--allow-undelegated" in str(caught.value).splitlines()[0]
    assert not (tmp_path / "out").exists()

    manifest = export(True)
    assert manifest["delegation"]["node_share"] == 0.0
    assert manifest["delegation"]["arithmetic_share"] == 0.0
    assert len(manifest["delegation"]["undelegated_products"]) > 40
    program = codecstream.load_program(tmp_path / "out", threads=1)
    state = program.initial_state()
    codes = make_codes(9)
    parts = []
    for start, size in ((0, 2), (2, 1), (3, 2), (5, 2), (7, 1), (8, 1)):
        pcm, state = program.step(codes[start : start + size], state)
        parts.append(torch.from_numpy(pcm))
    output = torch.cat(parts).numpy()
    assert worst_slice_db(eager_pcm(decoder, codes), output) >= 90.0


def test_only_products_count_as_undelegated() -> None:
    """Copies and masks in reference code are no reason to refuse."""
    delegation = Delegation("x", 10, 5, 100, 100, (), {"aten::slice_copy": 5})
    assert delegation.to_json()["node_share"] == 0.5
    assert delegation.to_json()["arithmetic_share"] == 1.0


# What stands in the file


def stored_weights(layers: int) -> int:
    """Return the size of the step module's weights in bytes."""
    step = StepDecoder(random_decoder(dataclasses.replace(TINY, num_hidden_layers=layers)))
    return 4 * sum(p.numel() for p in step.parameters())


@pytest.mark.case(43)
def test_case_43_methods_share_one_copy_of_the_weights(
    store: Store, windowed_manifest: dict[str, Any]
) -> None:
    """Measured at tiny widths, where graphs weigh as much as weights, so they count apart."""
    (name,) = (name for name in windowed_manifest["files"] if name.endswith(".pte"))
    size = (store.artifact("executorch windowed") / name).stat().st_size
    methods = len(windowed_manifest["windows"])
    assert methods == 2
    assert {window["program"] for window in windowed_manifest["windows"]} == {name}
    assert size <= 1.05 * stored_weights(2) + methods * METHOD_OVERHEAD_BYTES


def test_the_stateful_file_has_one_copy_of_the_weights(store: Store) -> None:
    size = (store.artifact("executorch") / "decoder.pte").stat().st_size
    assert size <= 1.05 * stored_weights(8) + METHOD_OVERHEAD_BYTES


def test_manifest_is_complete(manifest: dict[str, Any], store: Store) -> None:
    assert (manifest["runtime"], manifest["precision"], manifest["mode"]) == (
        "executorch",
        "fp32",
        "stateful",
    )
    assert manifest["frames"] == {"min": 1, "max": 25}
    assert manifest["program"] == "decoder.pte"
    assert {"torch", "executorch", "codecstream"} <= manifest["made_with"].keys()
    assert {path.name for path in store.artifact("executorch").iterdir()} == {
        "manifest.json",
        "decoder.pte",
    }
    for order in ("ramp", "every size"):
        assert manifest["parity"][order]["snr_db"] >= 90.0


def test_windows_are_methods_of_one_file(windowed_manifest: dict[str, Any]) -> None:
    assert windowed_manifest["context"] == CONTEXT
    assert windowed_manifest["windows"] == [
        {"frames": 2, "program": "decoder.pte", "method": "frames_2"},
        {"frames": 25, "program": "decoder.pte", "method": "frames_25"},
    ]


@pytest.mark.parametrize("name", ["executorch", "executorch windowed"])
def test_the_program_does_not_tell_where_it_was_made(store: Store, name: str) -> None:
    data = (store.artifact(name) / "decoder.pte").read_bytes()
    for trace in (
        str(Path(__file__).parents[2]),
        str(Path.home()),
        sys.prefix,
        "Traceback",
        "site-packages",
        ".py",
    ):
        assert trace.encode() not in data
