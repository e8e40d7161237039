"""The decoder as one ExecuTorch file, with XNNPACK doing the arithmetic."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from pathlib import Path

import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from torch.export import ExportedProgram

from codecstream.manifest import WindowEntry
from codecstream_export.step import StepDecoder
from codecstream_export.targets import Written
from codecstream_export.targets.delegation import Delegation, measure_delegation
from codecstream_export.tracing import quiet, trace_step, trace_window
from codecstream_export.window import WindowDecoder

__all__ = ["write_step", "write_windows"]

PROGRAM_NAME = "decoder.pte"


def write_step(step: StepDecoder, folder: Path, largest: int) -> Written:
    """Write ``decoder.pte`` for 1 to ``largest`` frames; memory is planned for the largest."""
    made_with, delegation = _lower({"forward": trace_step(step, largest)}, folder / PROGRAM_NAME)
    return Written(
        program=PROGRAM_NAME, max_frames=largest, made_with=made_with, delegation=delegation
    )


def write_windows(windows: Mapping[int, WindowDecoder], context: int, folder: Path) -> Written:
    """Write ``decoder.pte`` with a method per size; they share their weights."""
    programs = {
        f"frames_{frames}": trace_window(window, window, context)
        for frames, window in windows.items()
    }
    made_with, delegation = _lower(programs, folder / PROGRAM_NAME)
    return Written(
        windows=[
            WindowEntry(frames=frames, program=PROGRAM_NAME, method=f"frames_{frames}")
            for frames in windows
        ],
        made_with=made_with,
        delegation=delegation,
    )


def _lower(programs: dict[str, ExportedProgram], path: Path) -> tuple[dict[str, str], Delegation]:
    with quiet():
        lowered = to_edge_transform_and_lower(programs, partitioner=[XnnpackPartitioner()])
        methods = {name: lowered.exported_program(name) for name in lowered.methods}
        delegation = measure_delegation(methods, "xnnpack")
        program = lowered.to_executorch()
        with path.open("wb") as file:
            program.write_to_file(file)
    made_with = {
        "torch": str(torch.__version__),
        "executorch": importlib.metadata.version("executorch"),
    }
    return made_with, delegation
