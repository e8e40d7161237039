"""Read the decoder's config and weights from a ``speech_tokenizer/`` folder, strictly.

A checkpoint folder holds ``config.json`` and ``model.safetensors``; a folder above it, such as
a whole Qwen3-TTS model, is accepted too. Tensors of the encoder are skipped knowingly; any other
tensor that is missing, unknown or of the wrong shape is an error that names it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from codecstream.artifact import describe_file
from codecstream_export.config import DecoderConfig
from codecstream_export.eager import EagerDecoder
from codecstream_export.errors import CheckpointError

__all__ = ["Checkpoint", "find_checkpoint", "load_checkpoint", "save_checkpoint"]

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
DECODER_PREFIX = "decoder."
ENCODER_PREFIX = "encoder."
# Derived from the config, stored by some versions of the training code.
DERIVED = frozenset({"decoder.pre_transformer.rotary_emb.inv_freq"})
MAX_NAMES_IN_MESSAGE = 6


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A loaded decoder and where it came from."""

    folder: Path
    config: DecoderConfig
    decoder: EagerDecoder
    weights_sha256: str


def find_checkpoint(path: str | Path) -> Path:
    """Return the folder with ``config.json`` and ``model.safetensors`` at or below ``path``.

    Raises:
        CheckpointError: Neither ``path`` nor ``path/speech_tokenizer`` has both files.
    """
    root = Path(path)
    candidates = (root, root / "speech_tokenizer")
    # A whole model has a config.json of its own: the tokenizer's folder is looked at first.
    for folder in reversed(candidates):
        if (folder / CONFIG_NAME).is_file() and (folder / WEIGHTS_NAME).is_file():
            return folder
    looked = " and ".join(str(folder) for folder in candidates)
    raise CheckpointError(f"no checkpoint: looked for {CONFIG_NAME} and {WEIGHTS_NAME} in {looked}")


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Load the decoder in float32 for evaluation.

    Args:
        path: A ``speech_tokenizer/`` folder or a folder above it.

    Raises:
        CheckpointError: A file is missing or unreadable, or a tensor is missing, unknown or
            of the wrong shape.
    """
    folder = find_checkpoint(path)
    config_path, weights_path = folder / CONFIG_NAME, folder / WEIGHTS_NAME
    try:
        document = json.loads(config_path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{config_path} is not readable JSON: {error}") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{config_path} is not a JSON object")
    config = DecoderConfig.from_json(document)
    with torch.device("meta"):  # no memory for weights that are about to be replaced
        decoder = EagerDecoder(config)
    tensors = _read_decoder_tensors(weights_path, decoder)
    decoder.load_state_dict(tensors, strict=True, assign=True)
    decoder.eval().requires_grad_(False)
    return Checkpoint(folder, config, decoder, describe_file(weights_path).sha256)


def save_checkpoint(
    folder: str | Path, decoder: EagerDecoder, dtype: torch.dtype = torch.float32
) -> None:
    """Write ``decoder`` as a checkpoint folder that :func:`load_checkpoint` reads.

    Args:
        folder: Created when missing; existing files are replaced.
        decoder: The decoder; its weights are stored in ``dtype``.
        dtype: ``torch.float32`` or, at half the size, ``torch.float16``.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    document = json.dumps(decoder.config.to_json(), indent=2) + "\n"
    (folder / CONFIG_NAME).write_text(document, encoding="utf-8")
    tensors = {
        DECODER_PREFIX + name: tensor.detach().to(dtype).contiguous()
        for name, tensor in decoder.state_dict().items()
    }
    save_file(tensors, str(folder / WEIGHTS_NAME))


def _read_decoder_tensors(path: Path, decoder: EagerDecoder) -> dict[str, Tensor]:
    expected = {DECODER_PREFIX + k: tuple(v.shape) for k, v in decoder.state_dict().items()}
    tensors: dict[str, Tensor] = {}
    problems: list[str] = []
    try:
        with safe_open(str(path), framework="pt") as file:
            stored = set(file.keys())
            unknown = {
                k for k in stored - expected.keys() - DERIVED if not k.startswith(ENCODER_PREFIX)
            }
            problems += [f"missing tensor {name}" for name in sorted(expected.keys() - stored)]
            problems += [f"unknown tensor {name}" for name in sorted(unknown)]
            for name in sorted(expected.keys() & stored):
                tensor = file.get_tensor(name)
                if tuple(tensor.shape) != expected[name]:
                    problems.append(
                        f"tensor {name} has shape {list(tensor.shape)}, "
                        f"the config asks for {list(expected[name])}"
                    )
                elif not tensor.is_floating_point():
                    problems.append(f"tensor {name} has dtype {tensor.dtype}, not a float")
                elif not bool(torch.isfinite(tensor).all()):
                    problems.append(f"tensor {name} holds NaN or Inf")
                else:
                    tensors[name.removeprefix(DECODER_PREFIX)] = tensor.to(torch.float32)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error
    if problems:
        shown = "; ".join(problems[:MAX_NAMES_IN_MESSAGE])
        more = len(problems) - MAX_NAMES_IN_MESSAGE
        raise CheckpointError(f"{path}: {shown}" + (f"; and {more} more" if more > 0 else ""))
    return tensors
