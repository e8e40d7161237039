"""Make decoder artifacts: checkpoint, eager decoder, step module, target, verification.

::

    result = codecstream_export.export_artifact("Qwen3-TTS/speech_tokenizer", "decoder-onnx")

The names below load torch when they are first used, so that ``codecstream-export --help`` need
not wait for it; the device's package, ``codecstream``, never loads it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from codecstream_export.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
    from codecstream_export.config import DecoderConfig
    from codecstream_export.eager import EagerDecoder
    from codecstream_export.errors import CheckpointError, ExportError, ParityError
    from codecstream_export.export import ExportResult, export_artifact
    from codecstream_export.step import StepDecoder

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "DecoderConfig",
    "EagerDecoder",
    "ExportError",
    "ExportResult",
    "ParityError",
    "StepDecoder",
    "export_artifact",
    "load_checkpoint",
    "save_checkpoint",
]

_HOMES = {
    "Checkpoint": "checkpoint",
    "CheckpointError": "errors",
    "DecoderConfig": "config",
    "EagerDecoder": "eager",
    "ExportError": "errors",
    "ExportResult": "export",
    "ParityError": "errors",
    "StepDecoder": "step",
    "export_artifact": "export",
    "load_checkpoint": "checkpoint",
    "save_checkpoint": "checkpoint",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
