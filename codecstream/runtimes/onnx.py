"""ONNX Runtime: state stays in the runtime's memory between steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from codecstream.artifact import Artifact
from codecstream.errors import ArtifactError, DecoderError, MissingDependencyError
from codecstream.geometry import CodecGeometry
from codecstream.manifest import TensorEntry
from codecstream.runtimes import describe

__all__ = ["load"]

State = tuple[Any, ...]  # of onnxruntime.OrtValue

# Worker threads that wait for the next chunk by spinning would take a core from everything else
# on the device; they may spin only while a chunk is being decoded.
_SESSION_CONFIG = {"session.force_spinning_stop": "1"}


def load(artifact: Artifact, threads: int) -> OnnxProgram:
    """Load an ONNX artifact.

    Args:
        artifact: The checked artifact.
        threads: Threads of the runtime's pool, the calling one included.

    Raises:
        MissingDependencyError: onnxruntime is not installed or does not import.
        ArtifactError: onnxruntime cannot load the file, or it is not what the manifest says.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingDependencyError(
            f"this artifact needs onnxruntime ({error}): pip install 'codecstream[onnx]'"
        ) from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    # A memory plan per input length would be kept for every chunk size ever seen.
    options.enable_mem_pattern = False
    options.log_severity_level = 4  # errors are raised, not printed as well
    for key, value in _SESSION_CONFIG.items():
        options.add_session_config_entry(key, value)
    try:
        session = onnxruntime.InferenceSession(
            str(artifact.program_path), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # onnxruntime raises a class of its own per status code
        raise ArtifactError(
            f"onnxruntime {onnxruntime.__version__} cannot load {describe(artifact)}: "
            f"{_first_line(error)}. Install a newer onnxruntime, or export again"
        ) from error
    _check_signature("input", artifact.manifest.inputs, session.get_inputs())
    _check_signature("output", artifact.manifest.outputs, session.get_outputs())
    return OnnxProgram(artifact, session, onnxruntime.OrtValue, threads)


@dataclass(frozen=True, slots=True)
class _Names:
    """The session's names in the order in which a step uses them."""

    codes: str
    pcm: str
    state_in: tuple[str, ...]
    outputs: tuple[str, ...]  # pcm, then the state in the order of state_in


class OnnxProgram:
    """See :class:`codecstream.runtimes.Program`. ``threads`` is the size of its thread pool."""

    def __init__(self, artifact: Artifact, session: Any, ort_value: Any, threads: int) -> None:
        manifest = artifact.manifest
        self.manifest = manifest
        self.threads = threads
        self.geometry: CodecGeometry = manifest.codec_geometry()
        self.max_frames: int | None = manifest.frames.max
        self.decoder_id: str | None = manifest.decoder_id
        self._session = session
        self._ort_value = ort_value
        state_in = tuple(item.input for item in manifest.state)
        state_out = tuple(item.output for item in manifest.state)
        (codes,) = (item.name for item in manifest.inputs if item.name not in state_in)
        (pcm,) = (item.name for item in manifest.outputs if item.name not in state_out)
        self._names = _Names(codes, pcm, state_in, (pcm, *state_out))
        shapes: dict[str, Any] = {item.name: item.shape for item in manifest.inputs}
        # The runtime never writes to its inputs, so all new streams can start from the same zeros.
        self._initial: State = tuple(
            ort_value.ortvalue_from_numpy(np.full(shapes[item.input], item.fill, np.float32))
            for item in manifest.state
        )

    def initial_state(self) -> State:
        """Return the state of a new stream."""
        return self._initial

    def step(self, codes: NDArray[np.int64], state: State) -> tuple[NDArray[np.float32], State]:
        """Decode int64 ``[frames, codebooks]``; see :meth:`codecstream.runtimes.Program.step`."""
        names = self._names
        feeds = dict(zip(names.state_in, state, strict=True))
        batch = np.ascontiguousarray(codes.T[np.newaxis])  # [1, codebooks, frames]
        feeds[names.codes] = self._ort_value.ortvalue_from_numpy(batch)
        try:
            pcm, *after = self._session.run_with_ort_values(list(names.outputs), feeds)
        except Exception as error:  # onnxruntime raises a class of its own per status code
            raise DecoderError(f"onnxruntime: {_first_line(error)}") from error
        # A copy: the array must outlive the runtime's buffer and never change.
        return np.array(pcm.numpy(), dtype=np.float32), tuple(after)


def _check_signature(kind: str, declared: list[TensorEntry], actual: list[Any]) -> None:
    """Compare what the manifest declares with what the program has, before anything runs."""
    have = {item.name: (item.type, _fixed(item.shape)) for item in actual}
    want = {item.name: (_TYPES.get(item.dtype), _fixed(item.shape)) for item in declared}
    for name in sorted(have.keys() | want.keys()):
        if have.get(name) != want.get(name):
            raise ArtifactError(
                f"{kind} {name!r} is {have.get(name)} in the program and {want.get(name)} "
                f"in the manifest: export again"
            )


_TYPES = {"int64": "tensor(int64)", "float32": "tensor(float)"}


def _fixed(shape: list[int | str]) -> list[int | None]:
    """Return the lengths that do not depend on the number of frames, None for the others."""
    return [length if isinstance(length, int) else None for length in shape]


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
