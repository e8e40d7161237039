"""ONNX Runtime: state stays in the runtime's memory between steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from codecstream.artifact import Artifact
from codecstream.errors import ArtifactError, DecoderError, MissingDependencyError
from codecstream.geometry import CodecGeometry
from codecstream.manifest import TensorEntry
from codecstream.runtimes import WindowCall
from codecstream.runtimes.interface import describe, first_line, fixed_lengths, read_interface
from codecstream.runtimes.tensors import read_tensors

__all__ = ["WEIGHTS_NAME", "load", "load_windows"]

WEIGHTS_NAME = "weights.safetensors"  # of all the programs of a windowed artifact

State = tuple[Any, ...]  # of onnxruntime.OrtValue

# Worker threads that wait for the next chunk by spinning would take a core from everything else
# on the device; they may spin only while a chunk is being decoded.
_SESSION_CONFIG = {
    "session.force_spinning_stop": "1",
    # Weights outside the arena, which would round its size up to the next power of two for them.
    "session.use_device_allocator_for_initializers": "1",
}


def load(artifact: Artifact, threads: int) -> OnnxProgram:
    """Load a stateful ONNX artifact.

    Args:
        artifact: The checked artifact.
        threads: Threads of the runtime's pool, the calling one included.

    Raises:
        MissingDependencyError: onnxruntime is not installed or does not import.
        ArtifactError: onnxruntime cannot load the file, or it is not what the manifest says.
    """
    onnxruntime = _import()
    session = _open(onnxruntime, artifact, artifact.program_path, _options(onnxruntime, threads))
    manifest = artifact.manifest
    _check_signature("input", manifest.inputs, session.get_inputs())
    _check_signature("output", manifest.outputs, session.get_outputs())
    return OnnxProgram(artifact, session, onnxruntime, threads)


def load_windows(artifact: Artifact, threads: int) -> dict[int, WindowCall]:
    """Load a windowed ONNX artifact; see :func:`load` for arguments and errors."""
    onnxruntime = _import()
    interface = read_interface(artifact.manifest)
    (count,) = interface.others
    if WEIGHTS_NAME not in artifact.manifest.files:
        raise ArtifactError(f"{describe(artifact)} names no {WEIGHTS_NAME}: export again")
    tensors = read_tensors(artifact.folder / WEIGHTS_NAME)
    weights = {
        name: onnxruntime.OrtValue.ortvalue_from_numpy(value) for name, value in tensors.items()
    }
    calls: dict[int, WindowCall] = {}
    for window in artifact.manifest.windows:
        options = _options(onnxruntime, threads)
        # One copy for all sessions. Prepacking would make one more per session.
        options.add_session_config_entry("session.disable_prepacking", "1")
        for name, value in weights.items():
            options.add_initializer(name, value)
        path = artifact.folder / window.program
        session = _open(onnxruntime, artifact, path, options)
        names = interface.codes, count, interface.pcm
        calls[window.frames] = _OnnxWindow(session, weights, _shrinking(onnxruntime), *names)
    return calls


class OnnxProgram:
    """See :class:`codecstream.runtimes.Program`. ``threads`` is the size of its thread pool."""

    def __init__(self, artifact: Artifact, session: Any, onnxruntime: Any, threads: int) -> None:
        manifest = artifact.manifest
        self.manifest = manifest
        self.threads = threads
        self.geometry: CodecGeometry = manifest.codec_geometry()
        self.max_frames: int | None = manifest.frames.max
        self.decoder_id: str | None = manifest.decoder_id
        self._session = session
        self._ort_value = onnxruntime.OrtValue
        self._interface = read_interface(manifest)
        self._outputs = [self._interface.pcm, *self._interface.state_out]
        # The runtime never writes to its inputs, so all new streams can start from the same zeros.
        self._initial: State = tuple(
            self._ort_value.ortvalue_from_numpy(value) for value in self._interface.initial_state()
        )

    def initial_state(self) -> State:
        """Return the state of a new stream."""
        return self._initial

    def step(self, codes: NDArray[np.int64], state: State) -> tuple[NDArray[np.float32], State]:
        """Decode int64 ``[frames, codebooks]``; see :meth:`codecstream.runtimes.Program.step`."""
        interface = self._interface
        batch = interface.batch(codes)
        if len(state) != len(interface.state_in):
            raise DecoderError("this is not a state of this program")
        feeds = dict(zip(interface.state_in, state, strict=True))
        feeds[interface.codes] = self._ort_value.ortvalue_from_numpy(batch)
        try:
            pcm, *after = self._session.run_with_ort_values(self._outputs, feeds)
        except Exception as error:  # onnxruntime raises a class of its own per status code
            raise DecoderError(f"onnxruntime: {first_line(error)}") from error
        # A copy: the array must outlive the runtime's buffer and never change.
        return np.array(pcm.numpy(), dtype=np.float32), tuple(after)


class _OnnxWindow:
    """One windowed program; its arguments are those of :data:`codecstream.runtimes.WindowCall`."""

    def __init__(
        self, session: Any, weights: Any, run_options: Any, codes: str, count: str, pcm: str
    ) -> None:
        self._session, self._run_options = session, run_options
        self._weights = weights  # the session borrows them
        self._codes, self._count, self._pcm = codes, count, pcm

    def __call__(
        self, codes: NDArray[np.int64], frames_real: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        try:
            (pcm,) = self._session.run(
                [self._pcm], {self._codes: codes, self._count: frames_real}, self._run_options
            )
        except Exception as error:  # onnxruntime raises a class of its own per status code
            raise DecoderError(f"onnxruntime: {first_line(error)}") from error
        return np.asarray(pcm, dtype=np.float32)


def _import() -> Any:
    try:
        import onnxruntime
    except (ImportError, OSError) as error:  # OSError: a native library of it does not load
        raise MissingDependencyError(
            f"this artifact needs onnxruntime ({first_line(error)}): "
            f"pip install 'codecstream[onnx]'"
        ) from error
    return onnxruntime


def _options(onnxruntime: Any, threads: int) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    # A memory plan per input length would be kept for every chunk size ever seen.
    options.enable_mem_pattern = False
    options.log_severity_level = 4  # errors are raised, not printed as well
    for key, value in _SESSION_CONFIG.items():
        options.add_session_config_entry(key, value)
    return options


def _shrinking(onnxruntime: Any) -> Any:
    """Let each call give its working memory back.

    Every session keeps what its largest call ever needed otherwise, and windowed artifacts have a
    session per size. A stateful program has one: taking its memory again at each chunk, page by
    page, would cost more than a tenth of a large chunk's time.
    """
    options = onnxruntime.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    return options


def _open(onnxruntime: Any, artifact: Artifact, path: Path, options: Any) -> Any:
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises a class of its own per status code
        raise ArtifactError(
            f"onnxruntime {onnxruntime.__version__} cannot load {path.name} of "
            f"{describe(artifact)}: {first_line(error)}. Install a newer onnxruntime, or export "
            f"again"
        ) from error


def _check_signature(kind: str, declared: Sequence[TensorEntry], actual: Sequence[Any]) -> None:
    """Compare what the manifest declares with what the program has, before anything runs."""
    have = {item.name: (item.type, fixed_lengths(item.shape)) for item in actual}
    want = {item.name: (_TYPES.get(item.dtype), fixed_lengths(item.shape)) for item in declared}
    for name in sorted(have.keys() | want.keys()):
        if have.get(name) != want.get(name):
            raise ArtifactError(
                f"{kind} {name!r} is {have.get(name)} in the program and {want.get(name)} "
                f"in the manifest: export again"
            )


_TYPES = {"int64": "tensor(int64)", "float32": "tensor(float)"}
