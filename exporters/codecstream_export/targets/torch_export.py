"""The decoder as ``.pt2``: torch.export's own archive."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from codecstream.manifest import WindowEntry
from codecstream.runtimes.torch_export import WEIGHTS_NAME
from codecstream_export.half import take_stored
from codecstream_export.step import StepDecoder
from codecstream_export.targets import Written
from codecstream_export.tracing import quiet, trace_step, trace_window
from codecstream_export.window import WindowDecoder

__all__ = ["write_step", "write_windows"]

PROGRAM_NAME = "decoder.pt2"


def write_step(step: StepDecoder, folder: Path, largest: int) -> Written:
    """Write ``decoder.pt2`` for any number of frames."""
    program = trace_step(step, None)
    with quiet():
        torch.export.save(program, folder / PROGRAM_NAME)
    return Written(program=PROGRAM_NAME, made_with=_versions())


def write_windows(windows: Mapping[int, WindowDecoder], context: int, folder: Path) -> Written:
    """Write ``decoder.N.pt2`` per size and the weights, which they take as inputs, once."""
    entries = []
    stored = take_stored(next(iter(windows.values())))  # of the step module that they share
    for frames, window in windows.items():
        name = f"decoder.{frames}.pt2"
        weightless = _Weightless(window)
        program = trace_window(weightless, window, context, tuple(weightless.weights.values()))
        with quiet():
            torch.export.save(program, folder / name)
        entries.append(WindowEntry(frames=frames, program=name))
        if len(entries) == 1:
            torch.save({**weightless.weights, **stored}, folder / WEIGHTS_NAME)
    return Written(windows=entries, made_with=_versions())


class _Weightless(nn.Module):
    """A window that takes its weights as further inputs, in the order of ``weights``."""

    def __init__(self, window: WindowDecoder) -> None:
        super().__init__()
        self._window = [window]  # in a list: not a submodule, which would bring its weights along
        self.weights = {name: value.data for name, value in window.named_parameters()}
        self.weights.update(
            (name, value) for name, value in window.step.named_buffers(prefix="step")
        )

    def forward(self, codes: Tensor, frames_real: Tensor, *weights: Tensor) -> Tensor:
        named = dict(zip(self.weights, weights, strict=True))
        result: Tensor = torch.func.functional_call(self._window[0], named, (codes, frames_real))
        return result


def _versions() -> dict[str, str]:
    return {"torch": str(torch.__version__)}
