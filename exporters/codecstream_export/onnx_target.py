"""The step module as an ONNX file: one program for every chunk size, weights inside."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import onnxscript
import torch
from torch.export import Dim, ExportedProgram

from codecstream.manifest import FrameRange, StateEntry, TensorEntry
from codecstream_export.random_weights import random_codes
from codecstream_export.step import StepDecoder

__all__ = ["PROGRAM_NAME", "describe_interface", "export_program", "write_onnx"]

PROGRAM_NAME = "decoder.onnx"
# The oldest pair that has all operators used here (LayerNormalization came with 17, and the
# exporter's translations start at 18), so that old runtimes on devices can read the file.
OPSET_VERSION = 18
IR_VERSION = 8
EXAMPLE_FRAMES = 5  # any size but 0 and 1, which torch.export would freeze


def export_program(step: StepDecoder) -> ExportedProgram:
    """Trace ``step`` with a dynamic number of frames, at least 1."""
    codes = random_codes(EXAMPLE_FRAMES, step.config).T[None].contiguous()
    dynamic: tuple[dict[int, Dim], tuple[dict[int, Dim], ...]] = (
        {2: Dim("frames", min=1)},
        tuple({} for _ in step.state),
    )
    with _quiet():
        return torch.export.export(
            step, (codes, *step.initial_state()), dynamic_shapes=dynamic, strict=False
        )


def write_onnx(program: ExportedProgram, step: StepDecoder, folder: Path) -> dict[str, str]:
    """Write ``decoder.onnx`` into ``folder``; return the versions that made it."""
    inputs, outputs, _ = describe_interface(step)
    with _quiet():
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
        result.save(str(folder / PROGRAM_NAME), external_data=False)
    return {
        "torch": str(torch.__version__),
        "onnx": onnx.__version__,
        "onnxscript": onnxscript.__version__,
        "onnx_ir_version": str(IR_VERSION),
        "onnx_opset": str(OPSET_VERSION),
    }


def describe_interface(
    step: StepDecoder,
) -> tuple[list[TensorEntry], list[TensorEntry], list[StateEntry]]:
    """Return inputs, outputs and state as the manifest lists them."""
    config = step.config
    inputs = [
        TensorEntry(name="codes", dtype="int64", shape=[1, config.num_quantizers, "frames"]),
        *(TensorEntry(name=s.name, dtype="float32", shape=list(s.shape)) for s in step.state),
    ]
    outputs = [
        TensorEntry(name="pcm", dtype="float32", shape=[f"{config.samples_per_frame} * frames"]),
        *(
            TensorEntry(name=f"next.{s.name}", dtype="float32", shape=list(s.shape))
            for s in step.state
        ),
    ]
    state = [StateEntry(input=s.name, output=f"next.{s.name}") for s in step.state]
    return inputs, outputs, state


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


FRAMES = FrameRange(min=1, max=None)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the tracer's own progress lines and its remarks on itself off the terminal."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
