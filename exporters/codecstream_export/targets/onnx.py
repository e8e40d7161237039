"""The decoder as ONNX files."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import onnxscript
import torch
from safetensors.numpy import save_file
from torch.export import ExportedProgram

from codecstream.manifest import TensorEntry, WindowEntry
from codecstream.runtimes.onnx import WEIGHTS_NAME
from codecstream_export.step import MEMORY_TILES, StepDecoder
from codecstream_export.targets import Written
from codecstream_export.targets.onnx_conv2d import use_conv2d
from codecstream_export.targets.onnx_int8 import use_unsigned_activations
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
MIN_SHARED_BYTES = 1024  # smaller tensors stay in the graph


def write_step(step: StepDecoder, folder: Path, largest: int) -> Written:
    """Write ``decoder.onnx``, with its weights inside, for any number of frames."""
    if len(step.blocks) == len(MEMORY_TILES):
        step.tiles = MEMORY_TILES
    model = _translate(trace_step(step, None), *step_interface(step)[:2])
    onnx_ir.save(model, folder / PROGRAM_NAME)
    return Written(program=PROGRAM_NAME, made_with=_versions())


def write_windows(windows: Mapping[int, WindowDecoder], context: int, folder: Path) -> Written:
    """Write ``decoder.N.onnx`` per size, and the weights of all of them in one file."""
    models = {}
    for frames, window in windows.items():
        program = trace_window(window, window, context)
        models[frames] = _translate(program, *window_interface(window.step)[:2])
    shared = _shared_tensors(models.values())
    places = _write_tensors(shared, folder / WEIGHTS_NAME)
    entries = []
    for frames, model in models.items():
        name = f"decoder.{frames}.onnx"
        _point_to(model, places, folder)
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


def _shared_tensors(models: Iterable[Any]) -> dict[str, Any]:
    """Return the large tensors that have one name and one content in all models."""
    first, *others = (_large_tensors(model) for model in models)
    return {
        name: tensor
        for name, tensor in first.items()
        if all(name in other and other[name].tobytes() == tensor.tobytes() for other in others)
    }


def _large_tensors(model: Any) -> dict[str, Any]:
    values = model.graph.initializers.values()
    return {v.name: v.const_value for v in values if v.const_value.nbytes >= MIN_SHARED_BYTES}


def _write_tensors(tensors: Mapping[str, Any], path: Path) -> dict[str, tuple[int, int]]:
    """Write a safetensors file; return offset and length of each tensor in it, in bytes."""
    # It writes an array's memory as it lies, so a transposed view would come out wrong.
    arrays = {name: np.ascontiguousarray(tensor.numpy()) for name, tensor in tensors.items()}
    save_file(arrays, path)
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    spans = {name: entry["data_offsets"] for name, entry in header.items()}
    return {name: (8 + size + start, end - start) for name, (start, end) in spans.items()}


def _point_to(model: Any, places: Mapping[str, tuple[int, int]], folder: Path) -> None:
    """Let the model's tensors that are in the weights file refer to it."""
    for value in model.graph.initializers.values():
        if value.name in places:
            value.const_value = onnx_ir.ExternalTensor(
                WEIGHTS_NAME,
                *places[value.name],
                value.const_value.dtype,
                shape=value.const_value.shape,
                name=value.name,
                base_dir=folder,
            )
