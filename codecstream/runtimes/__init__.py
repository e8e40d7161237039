"""One module per runtime, each with the same verbs; none imports another.

A runtime module has two functions, which import the runtime inside, so that a device needs only
the one that it uses::

    load(artifact, threads) -> Program                     # stateful
    load_windows(artifact, threads) -> dict[frames, Call]  # windowed: one call per chunk size
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from codecstream.cpus import usable_cpus
from codecstream.errors import ArtifactError
from codecstream.geometry import CodecGeometry
from codecstream.memory import return_free_memory

if TYPE_CHECKING:
    from codecstream.artifact import Artifact

__all__ = ["Program", "WindowCall", "load_artifact", "load_program", "measure_costs", "warm_up"]

_RUNTIMES = {
    "executorch": "codecstream.runtimes.executorch",
    "onnx": "codecstream.runtimes.onnx",
    "torch_export": "codecstream.runtimes.torch_export",
}

WindowCall = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.float32]]
"""Runs codes ``[1, codebooks, context + n]`` and the count of real frames in front, ``[1]``;
returns float32 ``[1920 * n]``, which never changes afterwards."""


class Program(Protocol):
    """A loaded decoder program. It has no state of its own: any number of streams may share it.

    ``step`` may be called from several threads at once, with a different state each.
    """

    @property
    def geometry(self) -> CodecGeometry:
        """Rates and sizes of the codec."""

    @property
    def max_frames(self) -> int | None:
        """The largest chunk in frames, or None for any."""

    @property
    def decoder_id(self) -> str | None:
        """Name of the codec, to hold against the one that a server offers; None for any."""

    def initial_state(self) -> Any:
        """Return the state of a new stream."""

    def step(self, codes: NDArray[np.int64], state: Any) -> tuple[NDArray[np.float32], Any]:
        """Decode one chunk.

        Args:
            codes: int64 ``[frames, codebooks]``, ids already checked.
            state: From :meth:`initial_state` or the step before. It is left as it is.

        Returns:
            The audio, float32 ``[frames * samples_per_frame]``, which never changes afterwards,
            and the state for the next step.

        Raises:
            InvalidCodesError: Another shape or dtype, or more frames than the program takes;
                nothing reached the runtime.
            DecoderError: The runtime failed.
        """


def load_program(
    folder: str | Path,
    threads: int | None = None,
    *,
    warmup: bool = True,
    verify_hashes: bool = True,
) -> Program:
    """Load a decoder artifact with the runtime that its manifest names.

    Args:
        folder: The artifact's folder, written by ``codecstream-export``.
        threads: Threads that decode; None for as many as this process may use, by CPU affinity
            and the container's limit. ONNX Runtime has a pool per program; torch and ExecuTorch
            have one for the whole process, and the last program loaded sets its size.
        warmup: Decode each chunk size of the artifact's ramp once, so that the first chunk of a
            stream takes no longer than the later ones. It leaves no trace in any stream.
        verify_hashes: See :func:`codecstream.artifact.open_artifact`.

    Raises:
        ArtifactError: The artifact is missing, damaged, or not for the installed runtime.
        MissingDependencyError: The runtime is not installed; the message has the pip line.
        ValueError: ``threads`` is not positive.
    """
    if threads is not None and threads < 1:
        raise ValueError(f"threads must be at least 1, not {threads}")
    from codecstream.artifact import open_artifact  # hashing, JSON: not for a mere import

    artifact = open_artifact(folder, verify_hashes=verify_hashes)
    program = load_artifact(artifact, threads)
    if warmup:
        warm_up(program, artifact.manifest.ramp)
    return_free_memory()
    return program


def load_artifact(artifact: Artifact, threads: int | None = None) -> Program:
    """Load an artifact that was opened already; see :func:`load_program`."""
    manifest = artifact.manifest
    if manifest.runtime not in _RUNTIMES:
        raise ArtifactError(
            f"{artifact.folder} is a program for {manifest.runtime!r}; this codecstream runs "
            f"{', '.join(_RUNTIMES)}"
        )
    runtime = importlib.import_module(_RUNTIMES[manifest.runtime])
    threads = threads or usable_cpus()
    if manifest.mode == "windowed":
        from codecstream.runtimes.windowed import WindowedProgram

        calls: Mapping[int, WindowCall] = runtime.load_windows(artifact, threads)
        return WindowedProgram(manifest, calls)
    program: Program = runtime.load(artifact, threads)
    return program


def warm_up(program: Program, ramp: Iterable[int]) -> None:
    """Run each size of the ramp once on a throw-away state."""
    for frames in sorted(set(ramp)):
        codes = np.zeros((frames, program.geometry.codebooks), np.int64)
        program.step(codes, program.initial_state())


def measure_costs(program: Program, sizes: Iterable[int] = (1, 8)) -> dict[int, float]:
    """Return what chunks of these sizes take here, in seconds, as a policy wants to know it.

    Each is decoded twice on a throw-away state, and the second time counts: a program's first
    call of a size can take far longer. Sizes that the program does not take are left out.
    """
    costs_s = {}
    for frames in sorted(set(sizes)):
        if program.max_frames is not None and frames > program.max_frames:
            break
        codes = np.zeros((frames, program.geometry.codebooks), np.int64)
        for _ in range(2):
            state = program.initial_state()
            began_s = time.perf_counter()
            program.step(codes, state)
            costs_s[frames] = time.perf_counter() - began_s
    return costs_s
