"""Checkpoints are read strictly: what is missing, unknown or odd is named, never guessed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402

from codecstream_export import (  # noqa: E402
    CheckpointError,
    DecoderConfig,
    EagerDecoder,
    load_checkpoint,
    save_checkpoint,
)
from codecstream_export.cli import main  # noqa: E402
from codecstream_export.random_weights import TINY  # noqa: E402

Tensors = dict[str, Any]

TENSOR = "decoder.decoder.1.block.1.conv.weight"
FIRST_BOOK = "decoder.quantizer.rvq_first.vq.layers.0._codebook.embedding_sum"


@pytest.fixture
def checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint that a test may damage."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "model" / "speech_tokenizer"))


def edit_tensors(folder: Path, change: Callable[[Tensors], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def edit_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "config.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def same_weights(a: EagerDecoder, b: EagerDecoder) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


def rename(tensors: Tensors) -> None:
    tensors[TENSOR + "s"] = tensors.pop(TENSOR)


def make_nan(tensors: Tensors) -> None:
    tensors[TENSOR][0, 0, 0] = torch.nan


BAD_TENSORS: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "missing": (lambda t: t.pop(TENSOR), f"missing tensor {TENSOR}"),
    "missing codebook": (lambda t: t.pop(FIRST_BOOK), f"missing tensor {FIRST_BOOK}"),
    "renamed": (rename, f"missing tensor {TENSOR}; unknown tensor {TENSOR}s"),
    "one column short": (
        lambda t: t.update({TENSOR: t[TENSOR][..., 1:]}),
        f"tensor {TENSOR} has shape [64, 32, 15], the config asks for [64, 32, 16]",
    ),
    "transposed": (
        lambda t: t.update({TENSOR: t[TENSOR].transpose(0, 1)}),
        f"tensor {TENSOR} has shape [32, 64, 16]",
    ),
    "unknown": (
        lambda t: t.update({"decoder.extra.bias": torch.zeros(1)}),
        "unknown tensor decoder.extra.bias",
    ),
    "unknown outside the decoder": (
        lambda t: t.update({"head.weight": torch.zeros(1)}),
        "unknown tensor head.weight",
    ),
    "integers": (lambda t: t.update({TENSOR: t[TENSOR].int()}), f"tensor {TENSOR} has dtype"),
    "NaN": (make_nan, f"tensor {TENSOR} holds NaN or Inf"),
    "all gone": (lambda t: [t.pop(name) for name in list(t)[1:]], "more"),
}


@pytest.mark.case(28)
@pytest.mark.parametrize("damage", BAD_TENSORS)
def test_a_bad_tensor_is_named(checkpoint: Path, damage: str) -> None:
    change, message = BAD_TENSORS[damage]
    edit_tensors(checkpoint, change)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(checkpoint)
    assert message in str(caught.value)
    assert str(checkpoint / "model.safetensors") in str(caught.value)


@pytest.mark.case(28)
@pytest.mark.parametrize("damage", ["missing", "renamed", "one column short"])
def test_the_command_fails_and_names_the_tensor(
    checkpoint: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change, message = BAD_TENSORS[damage]
    edit_tensors(checkpoint, change)
    out = checkpoint.parent / "out"
    status = main(["--checkpoint", str(checkpoint), "--runtime", "onnx", "--out", str(out)])
    assert status == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_the_command_names_a_path_with_brackets_in_full(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "[bold] model"
    folder.mkdir()
    status = main(["--checkpoint", str(folder), "--runtime", "onnx", "--out", str(tmp_path / "o")])
    assert status == 2
    assert str(folder / "speech_tokenizer") in capsys.readouterr().err


def test_tensors_of_the_encoder_and_derived_ones_are_skipped(
    checkpoint: Path, tiny_decoder: EagerDecoder
) -> None:
    extra = {
        "encoder.layers.0.weight": torch.full((2,), torch.nan),
        "decoder.pre_transformer.rotary_emb.inv_freq": torch.zeros(4),
    }
    edit_tensors(checkpoint, lambda t: t.update(extra))
    assert same_weights(load_checkpoint(checkpoint).decoder, tiny_decoder)


def test_save_and_load_give_the_same_decoder(
    tiny_checkpoint: Path, tiny_decoder: EagerDecoder
) -> None:
    loaded = load_checkpoint(tiny_checkpoint)
    assert loaded.config == TINY
    assert loaded.folder == tiny_checkpoint
    assert same_weights(loaded.decoder, tiny_decoder)
    assert not loaded.decoder.training
    assert not any(p.requires_grad for p in loaded.decoder.parameters())


def test_the_folder_above_is_accepted(checkpoint: Path) -> None:
    (checkpoint.parent / "config.json").write_text("{}")  # of the whole model
    (checkpoint.parent / "model.safetensors").write_bytes(b"the talker's")
    assert load_checkpoint(checkpoint.parent).folder == checkpoint


def test_weights_stored_in_half_precision_are_computed_in_float32(
    tmp_path: Path, tiny_decoder: EagerDecoder
) -> None:
    save_checkpoint(tmp_path, tiny_decoder, dtype=torch.float16)
    loaded = load_checkpoint(tmp_path).decoder.state_dict()
    for name, tensor in tiny_decoder.state_dict().items():
        assert loaded[name].dtype == torch.float32
        assert torch.equal(loaded[name], tensor.half().float()), name


BAD_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (lambda p: shutil.rmtree(p), "looked for config.json and model.safetensors in"),
    "no config": (lambda p: (p / "config.json").unlink(), "no checkpoint"),
    "no weights": (lambda p: (p / "model.safetensors").unlink(), "no checkpoint"),
    "config not JSON": (lambda p: (p / "config.json").write_text("{"), "config.json is not"),
    "config not text": (lambda p: (p / "config.json").write_bytes(b"\xff\xfe"), "config.json is"),
    "config a list": (lambda p: (p / "config.json").write_text("[]"), "is not a JSON object"),
    "weights empty": (
        lambda p: (p / "model.safetensors").write_bytes(b""),
        "model.safetensors is not a readable safetensors file",
    ),
    "weights truncated": (
        lambda p: (p / "model.safetensors").write_bytes(
            (p / "model.safetensors").read_bytes()[:-1000]
        ),
        "model.safetensors is not a readable safetensors file",
    ),
    "weights a git-lfs pointer": (
        lambda p: (p / "model.safetensors").write_text("version https://git-lfs.github.com/sp\n"),
        "model.safetensors is not a readable safetensors file",
    ),
}


@pytest.mark.parametrize("damage", BAD_FILES)
def test_a_bad_file_is_named(checkpoint: Path, damage: str) -> None:
    change, message = BAD_FILES[damage]
    change(checkpoint)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(checkpoint)
    assert message in str(caught.value)
    assert str(checkpoint) in str(caught.value)


BAD_SECTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "string": ({"latent_dim": "32"}, "decoder_config.latent_dim has the wrong type: '32'"),
    "bool": ({"latent_dim": True}, "decoder_config.latent_dim has the wrong type: True"),
    "null": ({"latent_dim": None}, "decoder_config.latent_dim has the wrong type: None"),
    "float": ({"num_hidden_layers": 8.0}, "num_hidden_layers has the wrong type: 8.0"),
    "not a list": ({"upsample_rates": 8}, "upsample_rates has the wrong type: 8"),
    "odd list": ({"upsample_rates": [8, "5"]}, "upsample_rates has the wrong type"),
    "empty list": ({"upsample_rates": []}, "upsample_rates must be positive"),
    "zero": ({"sliding_window": 0}, "sliding_window must be positive, not 0"),
    "negative": ({"rope_theta": -1.0}, "rope_theta must be positive, not -1.0"),
    "activation": ({"hidden_act": "relu"}, "decoder_config.hidden_act is 'relu', this decoder"),
    "attention bias": ({"attention_bias": True}, "attention_bias is True"),
    "rope scaling": ({"rope_scaling": {"type": "yarn"}}, "rope_scaling is {'type': 'yarn'}"),
    "head groups": ({"num_key_value_heads": 3}, "multiple of num_key_value_heads"),
    "odd head": ({"head_dim": 7}, "head_dim must be even"),
    "odd codebook": ({"codebook_dim": 15}, "codebook_dim must be even"),
    "odd width": ({"decoder_dim": 24}, "decoder_dim must be divisible by 16"),
    "one codebook": ({"num_quantizers": 1}, "num_quantizers must be at least 2"),
    "wider": ({"latent_dim": 48}, "has shape"),
}


@pytest.mark.parametrize("damage", BAD_SECTIONS)
def test_a_bad_value_in_the_config_is_named(checkpoint: Path, damage: str) -> None:
    values, message = BAD_SECTIONS[damage]
    edit_config(checkpoint, lambda d: d["decoder_config"].update(values))
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(checkpoint)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "document", [{}, {"decoder_config": None}, {"decoder_config": []}, {"model_type": "qwen2"}]
)
def test_a_config_without_a_decoder_says_so(checkpoint: Path, document: dict[str, Any]) -> None:
    (checkpoint / "config.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match="no 'decoder_config' section"):
        load_checkpoint(checkpoint)


OPTIONAL = {"head_dim", "layer_scale_initial_scale"}


@pytest.mark.parametrize("key", sorted(TINY.to_json()["decoder_config"].keys() - OPTIONAL))
def test_a_missing_key_is_named(key: str) -> None:
    document = TINY.to_json()
    del document["decoder_config"][key]
    with pytest.raises(CheckpointError, match=f"decoder_config lacks {key}"):
        DecoderConfig.from_json(document)


def test_keys_that_follow_from_others_may_be_missing() -> None:
    document = TINY.to_json()
    for key in OPTIONAL:
        del document["decoder_config"][key]
    document["decoder_config"]["max_position_embeddings"] = 8000  # known, and not needed
    assert DecoderConfig.from_json(document) == TINY
