"""Make decoder artifacts: checkpoint, eager decoder, step module, target, verification.

::

    result = codecstream_export.export_artifact("Qwen3-TTS/speech_tokenizer", "decoder-onnx")

Importing this package imports torch; the device's package, ``codecstream``, never does.
"""

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
