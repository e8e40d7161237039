"""Trace the decoder with torch.export: the form from which every runtime's program is made."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from codecstream.manifest import StateEntry, TensorEntry
from codecstream_export.config import DecoderConfig
from codecstream_export.random_weights import random_codes
from codecstream_export.step import StepDecoder
from codecstream_export.window import WindowDecoder

__all__ = [
    "COMMON_MAX_FRAMES",
    "Interface",
    "quiet",
    "step_interface",
    "trace_step",
    "trace_window",
    "window_interface",
]

COMMON_MAX_FRAMES = 32
"""The chunk size up to which every artifact is verified, size by size."""

Interface = tuple[list[TensorEntry], list[TensorEntry], list[StateEntry]]


def trace_step(step: StepDecoder, max_frames: int | None) -> ExportedProgram:
    """Trace ``step`` with a dynamic number of frames from 1 to ``max_frames``; None is no bound.

    The example has the largest size: a tool that specialises on a comparison with it can only
    narrow the range from below, where nothing is planned, never from above.
    """
    frames = max_frames or COMMON_MAX_FRAMES
    codes = random_codes(frames, step.config).T[None].contiguous()
    dynamic: tuple[dict[int, Dim], tuple[dict[int, Dim], ...]] = (
        {2: Dim("frames", min=1, max=max_frames)},
        tuple({} for _ in step.state),
    )
    with quiet():
        program = torch.export.export(
            step, (codes, *step.initial_state()), dynamic_shapes=dynamic, strict=False
        )
    return _without_origin(program)


def trace_window(
    module: nn.Module, window: WindowDecoder, context: int, more: tuple[Tensor, ...] = ()
) -> ExportedProgram:
    """Trace ``module``, which is or wraps ``window``, for its fixed shape.

    ``more`` are inputs of ``module`` behind the window's own.
    """
    frames = context + window.frames
    codes = random_codes(frames, window.step.config).T[None].contiguous()
    with quiet():
        program = torch.export.export(module, (codes, torch.tensor([frames]), *more), strict=False)
    return _without_origin(program)


def step_interface(step: StepDecoder) -> Interface:
    """Return inputs, outputs and state of the step program as the manifest lists them."""
    inputs = [
        _codes(step.config, "frames"),
        *(TensorEntry(name=s.name, dtype="float32", shape=list(s.shape)) for s in step.state),
    ]
    outputs = [
        _pcm(step.config),
        *(
            TensorEntry(name=f"next.{s.name}", dtype="float32", shape=list(s.shape))
            for s in step.state
        ),
    ]
    return inputs, outputs, [StateEntry(input=s.name, output=f"next.{s.name}") for s in step.state]


def window_interface(step: StepDecoder) -> Interface:
    """Return inputs and outputs of window programs as the manifest lists them."""
    count = TensorEntry(name="frames_real", dtype="int64", shape=[1])
    return [_codes(step.config, "context + frames"), count], [_pcm(step.config)], []


def _codes(config: DecoderConfig, frames: str) -> TensorEntry:
    return TensorEntry(name="codes", dtype="int64", shape=[1, config.num_quantizers, frames])


def _pcm(config: DecoderConfig) -> TensorEntry:
    return TensorEntry(name="pcm", dtype="float32", shape=[f"{config.samples_per_frame} * frames"])


def _without_origin(program: ExportedProgram) -> ExportedProgram:
    """Drop what a program has from its tracing and a device has no use for.

    Sample inputs; stack traces with paths of this machine, in every node; and checks that a
    weight has the dtype of its file, which keep a loader from widening it.
    """
    program._example_inputs = None
    graph = program.graph
    for node in list(graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph.erase_node(node)
        else:
            node.meta.pop("stack_trace", None)
    program.graph_module.recompile()
    return program


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep a tool's own progress lines and its remarks on itself off the terminal."""
    previous = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)
