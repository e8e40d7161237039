"""The decoder as ONNX files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import onnx
import onnx_ir
import onnxscript
import torch
from torch.export import ExportedProgram

from codecstream.manifest import TensorEntry, WindowEntry
from codecstream_export.onnx_conv2d import use_conv2d
from codecstream_export.onnx_int8 import use_unsigned_activations
from codecstream_export.step import StepDecoder
from codecstream_export.targets import Written
from codecstream_export.tracing import (
    quiet,
    step_interface,
    trace_step,
    trace_window,
    window_interface,
)
from codecstream_export.window import WindowDecoder

__all__ = ["write_step", "write_windows"]

PROGRAM_NAME = "decoder.onnx"
# The oldest pair that has all operators used here (LayerNormalization came with 17, and the
# exporter's translations start at 18), so that old runtimes on devices can read the file.
OPSET_VERSION = 18
IR_VERSION = 8
WEIGHTS_NAME = "weights.bin"
MIN_SHARED_BYTES = 1024  # smaller tensors stay in the graph
ALIGNMENT = 64  # of a tensor in the weights file, so that a runtime can use it where it lies


def write_step(step: StepDecoder, folder: Path, largest: int) -> Written:
    """Write ``decoder.onnx``, with its weights inside, for any number of frames."""
    model = _translate(trace_step(step, None), *step_interface(step)[:2])
    onnx_ir.save(model, folder / PROGRAM_NAME)
    return Written(program=PROGRAM_NAME, made_with=_versions())


def write_windows(windows: Mapping[int, WindowDecoder], context: int, folder: Path) -> Written:
    """Write ``decoder.N.onnx`` per size, and the weights of all of them in one file."""
    entries = []
    with _SharedWeights(folder / WEIGHTS_NAME) as weights:
        for frames, window in windows.items():
            name = f"decoder.{frames}.onnx"
            program = trace_window(window, window, context)
            model = _translate(program, *window_interface(window.step)[:2])
            weights.take(model)
            onnx_ir.save(model, folder / name)
            entries.append(WindowEntry(frames=frames, program=name))
    return Written(windows=entries, made_with=_versions())


def _translate(
    program: ExportedProgram, inputs: list[TensorEntry], outputs: list[TensorEntry]
) -> Any:
    """Return the program as an ``onnx_ir`` model."""
    with quiet():
        result = torch.onnx.export(
            program,
            (),
            input_names=[item.name for item in inputs],
            output_names=[item.name for item in outputs],
            opset_version=OPSET_VERSION,
            dynamo=True,
            external_data=False,
        )
    assert result is not None
    result.model.ir_version = IR_VERSION
    _forget_origin(result.model)
    use_conv2d(result.model)
    use_unsigned_activations(result.model)
    return result.model


def _versions() -> dict[str, str]:
    return {
        "torch": str(torch.__version__),
        "onnx": onnx.__version__,
        "onnxscript": onnxscript.__version__,
        "onnx_ir_version": str(IR_VERSION),
        "onnx_opset": str(OPSET_VERSION),
    }


def _forget_origin(model: Any) -> None:
    """Drop the tracer's notes: stack traces with paths of this machine, in every node."""
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()


class _SharedWeights:
    """A file of weights for several models; equal tensors are written once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offsets: dict[bytes, int] = {}
        self._end = 0
        self._file: BinaryIO

    def __enter__(self) -> _SharedWeights:
        self._file = self._path.open("wb")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()

    def take(self, model: Any) -> None:
        """Move the model's large tensors into the file."""
        for value in model.graph.initializers.values():
            tensor = value.const_value
            if tensor.nbytes < MIN_SHARED_BYTES:
                continue
            value.const_value = onnx_ir.ExternalTensor(
                self._path.name,
                self._store(tensor.tobytes()),
                tensor.nbytes,
                tensor.dtype,
                shape=tensor.shape,
                name=value.name,
                base_dir=self._path.parent,
            )

    def _store(self, data: bytes) -> int:
        key = hashlib.sha256(data).digest()
        if key not in self._offsets:
            self._end = self._file.seek(-(-self._end // ALIGNMENT) * ALIGNMENT)
            self._offsets[key] = self._end
            self._end += self._file.write(data)
        return self._offsets[key]
