"""The torch.export target: an archive that any torch can run anywhere, and nothing else in it."""

from __future__ import annotations

import json
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from artifacts import Store
from support import SAMPLES, make_codes, worst_slice_db

torch = pytest.importorskip("torch")

ARCHIVE_OVERHEAD_BYTES = 1_200_000  # the graph as JSON; does not grow with the weights


@pytest.fixture(scope="module")
def folder(store: Store) -> Path:
    return store.artifact("torch_export")


@pytest.fixture(scope="module")
def manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text())


@pytest.fixture(scope="module")
def exported(folder: Path) -> Any:
    """The program as anyone can load it, without this package."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.load(folder / "decoder.pt2")


@pytest.fixture(scope="module")
def module(exported: Any) -> Any:
    return exported.module()  # with its guards: they hold for every size


@pytest.fixture(scope="module")
def zeros(manifest: dict[str, Any]) -> list[torch.Tensor]:
    _, *state = manifest["inputs"]
    return [torch.zeros(item["shape"]) for item in state]


def test_manifest_is_complete(manifest: dict[str, Any], folder: Path) -> None:
    assert (manifest["runtime"], manifest["precision"], manifest["mode"]) == (
        "torch_export",
        "fp32",
        "stateful",
    )
    assert manifest["frames"] == {"min": 1, "max": None}
    assert manifest["program"] == "decoder.pt2"
    assert manifest["made_with"]["torch"] == torch.__version__
    assert manifest["delegation"] is None
    assert {path.name for path in folder.iterdir()} == {"manifest.json", "decoder.pt2"}
    for order in ("ramp", "every size"):
        assert manifest["parity"][order]["snr_db"] >= 90.0


# The program


@pytest.mark.case(24)
def test_case_24_every_size_runs_and_is_right(
    module: Any, zeros: list[torch.Tensor], store: Store
) -> None:
    """With torch's own guards on, which the runtime leaves out; 0 and 1 are no special sizes."""
    sizes = [*range(1, 33), 150]
    reference = store.reference("whole")
    state, parts, start = zeros, [], 0
    for size in sizes:
        codes = torch.from_numpy(reference.codes[start : start + size].T[None].copy())
        with torch.inference_mode():
            pcm, *state = module(codes, *state)
        assert pcm.shape == (size * SAMPLES,)
        assert [value.shape for value in state] == [value.shape for value in zeros]
        parts.append(pcm.numpy())
        start += size
    output = np.concatenate(parts)
    assert worst_slice_db(reference.pcm[: len(output)], output) >= 90.0


def test_no_device_is_baked_in(exported: Any, zeros: list[torch.Tensor]) -> None:
    """The meta device computes shapes only, and refuses every tensor of another device."""
    for node in exported.graph.nodes:
        assert "device" not in node.kwargs, node
    module = exported.module(check_guards=False).to("meta")
    for frames in (1, 25):
        codes = torch.zeros((1, 16, frames), dtype=torch.int64, device="meta")
        pcm, *state = module(codes, *(value.to("meta") for value in zeros))
        assert pcm.shape == (frames * SAMPLES,)
        assert {value.device.type for value in (pcm, *state)} == {"meta"}


@pytest.mark.case(26)
def test_case_26_only_plain_operators_are_used(exported: Any) -> None:
    """No helper of a model library, no higher-order operator, nothing random."""
    targets = [node.target for node in exported.graph.nodes if node.op == "call_function"]
    namespaces = {t.namespace for t in targets if hasattr(t, "namespace")}
    assert namespaces == {"aten"}
    others = {t.__module__ for t in targets if not hasattr(t, "namespace")}
    assert others <= {"_operator"}  # sums and products of sizes
    names = " ".join(str(t) for t in targets)
    assert "rand" not in names and "dropout" not in names and "higher_order" not in names


@pytest.mark.case(30)
def test_case_30_nothing_is_computed_from_weights_alone(exported: Any) -> None:
    signature = exported.graph_signature
    user = set(signature.user_inputs)
    constant = {
        node.name
        for node in exported.graph.nodes
        if node.op == "placeholder" and node.name not in user
    }
    assert len(constant) > 100
    late = []
    for node in exported.graph.nodes:
        inputs = {item.name for item in node.all_input_nodes}
        if node.op == "call_function" and inputs and inputs <= constant:
            constant.add(node.name)
            late.append(str(node.target))
    assert late == []


# The archive


def members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_archive_holds_no_sample_inputs_and_no_pickles(folder: Path) -> None:
    files = members(folder / "decoder.pt2")
    assert not any(data for name, data in files.items() if "sample_inputs" in name)
    for name, data in files.items():
        if name.endswith("_config.json"):
            for item in json.loads(data)["config"].values():
                assert item["use_pickle"] is False
        assert not data.startswith((b"\x80\x02", b"\x80\x04", b"PK")), name


@pytest.mark.parametrize("name", ["torch_export", "torch_export windowed"])
def test_the_archive_does_not_tell_where_it_was_made(store: Store, name: str) -> None:
    for path in store.artifact(name).glob("*.pt2"):
        for member, data in members(path).items():
            if "/weights/weight_" in member:
                continue
            for trace in (
                str(Path(__file__).parents[2]),
                str(Path.home()),
                sys.prefix,
                "Traceback",
                "site-packages",
                ".py",
                "stack_trace",
            ):
                assert trace.encode() not in data, (member, trace)


def test_one_copy_of_the_weights_is_stored(store: Store, folder: Path) -> None:
    weights = sum(
        len(data) for name, data in members(folder / "decoder.pt2").items() if "weight_" in name
    )
    parameters = 4 * sum(p.numel() for p in store.decoder().parameters())
    assert weights <= 1.05 * parameters
    assert (folder / "decoder.pt2").stat().st_size <= weights + ARCHIVE_OVERHEAD_BYTES


@pytest.mark.case(43)
def test_case_43_windows_share_one_file_of_weights(store: Store) -> None:
    windowed = store.artifact("torch_export windowed")
    programs = list(windowed.glob("decoder.*.pt2"))
    manifest = json.loads((windowed / "manifest.json").read_text())
    assert len(programs) == len(manifest["windows"]) > 1
    for path in programs:
        inside = sum(len(data) for name, data in members(path).items() if "weight_" in name)
        assert inside < 50_000  # constants of the window's own
    parameters = 4 * sum(p.numel() for p in store.decoder(2).parameters())
    (weights,) = (path for path in windowed.iterdir() if path.name.startswith("weights."))
    assert weights.stat().st_size <= 1.05 * parameters + 100_000


def test_the_archive_is_the_same_program_in_torchs_own_hands(
    folder: Path, module: Any, zeros: list[torch.Tensor]
) -> None:
    """``docs/embedding.md`` says that any torch can run it: bit for bit what the package runs."""
    import codecstream

    codes = make_codes(20)
    program = codecstream.load_program(folder, threads=1)
    ours, _ = program.step(codes, program.initial_state())
    with torch.inference_mode():
        theirs, *_ = module(torch.from_numpy(codes.T[None].copy()), *zeros)
    assert np.array_equal(ours, theirs.numpy())
