"""ExecuTorch: a ``.pte`` program with XNNPACK, with or without torch on the device.

Two packages can run it, and the first of them that is installed is used:
``executorch-numpy-runtime``, a few megabytes beside numpy, for Python 3.12 and newer; and the
official ``executorch``, which needs torch. Both write some lines to stderr while they load.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from codecstream.artifact import Artifact
from codecstream.errors import ArtifactError, DecoderError, MissingDependencyError
from codecstream.geometry import CodecGeometry
from codecstream.monitor import new_lock
from codecstream.runtimes import WindowCall
from codecstream.runtimes.interface import describe, first_line, is_newer, read_interface

__all__ = ["load", "load_windows"]

Array = NDArray[Any]
Signature = Sequence[tuple[int, tuple[int, ...]]]  # ScalarType and largest shape of each tensor
State = tuple[NDArray[np.float32], ...]

_INT64, _FLOAT32 = 4, 6  # ScalarType of ExecuTorch


def load(artifact: Artifact, threads: int) -> ExecutorchProgram:
    """Load a stateful ``.pte`` artifact.

    Args:
        artifact: The checked artifact.
        threads: Threads of the runtime's pool, which is one for the whole process.

    Raises:
        MissingDependencyError: Neither package is installed, or it does not import.
        ArtifactError: The program is newer than the runtime, or not what the manifest says.
    """
    backend = _find_backend()
    backend.set_threads(threads)
    return ExecutorchProgram(artifact, _Loaded(backend, artifact, artifact.program_path))


def load_windows(artifact: Artifact, threads: int) -> dict[int, WindowCall]:
    """Load a windowed ``.pte`` artifact; see :func:`load` for arguments and errors."""
    backend = _find_backend()
    backend.set_threads(threads)
    manifest = artifact.manifest
    codebooks, context = manifest.geometry.codebooks, manifest.context or 0
    files: dict[str, _Loaded] = {}
    calls: dict[int, WindowCall] = {}
    for window in manifest.windows:
        if window.program not in files:
            files[window.program] = _Loaded(backend, artifact, artifact.folder / window.program)
        inputs = [(_INT64, (1, codebooks, context + window.frames)), (_INT64, (1,))]
        outputs = [(_FLOAT32, (manifest.geometry.samples_per_frame * window.frames,))]
        method = files[window.program].method(window.method, inputs, outputs)
        calls[window.frames] = _Window(method)
    smallest = manifest.windows[0]
    codes = np.zeros((1, codebooks, context + smallest.frames), np.int64)
    files[smallest.program].try_out(lambda: calls[smallest.frames](codes, np.ones(1, np.int64)))
    return calls


class ExecutorchProgram:
    """See :class:`codecstream.runtimes.Program`. The state is a tuple of numpy arrays."""

    def __init__(self, artifact: Artifact, loaded: _Loaded) -> None:
        manifest = artifact.manifest
        self.manifest = manifest
        self.geometry: CodecGeometry = manifest.codec_geometry()
        self.max_frames: int | None = manifest.frames.max
        self.decoder_id: str | None = manifest.decoder_id
        if self.max_frames is None:
            raise ArtifactError(f"{describe(artifact)} has no bound in frames: export again")
        self._interface = read_interface(manifest)
        self._initial: State = tuple(self._interface.initial_state())
        state = [(_FLOAT32, value.shape) for value in self._initial]
        codes = (1, manifest.geometry.codebooks, self.max_frames)
        pcm = (manifest.geometry.samples_per_frame * self.max_frames,)
        self._method = loaded.method(
            "forward", [(_INT64, codes), *state], [(_FLOAT32, pcm), *state]
        )
        one_frame = np.zeros((1, manifest.geometry.codebooks), np.int64)
        loaded.try_out(lambda: self.step(one_frame, self._initial))

    def initial_state(self) -> State:
        """Return the state of a new stream."""
        return self._initial

    def step(self, codes: NDArray[np.int64], state: State) -> tuple[NDArray[np.float32], State]:
        """Decode int64 ``[frames, codebooks]``; see :meth:`codecstream.runtimes.Program.step`."""
        batch = self._interface.batch(codes)
        # The runtime compares numbers of elements, so shapes are compared here.
        if [value.shape for value in state] != [value.shape for value in self._initial]:
            raise DecoderError("this is not a state of this program")
        pcm, *after = self._method([batch, *state])
        return pcm, tuple(after)


class _Window:
    """One windowed program; its arguments are those of :data:`codecstream.runtimes.WindowCall`."""

    def __init__(self, method: _Method) -> None:
        self._method = method

    def __call__(
        self, codes: NDArray[np.int64], frames_real: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        (pcm,) = self._method([codes, frames_real])
        return pcm


class _Loaded:
    """A program file; its methods share memory, so one runs at a time."""

    def __init__(self, backend: _Backend, artifact: Artifact, path: Path) -> None:
        self._backend, self._artifact, self._path = backend, artifact, path
        self._lock = new_lock()
        try:
            self._program = backend.open(path)
        except Exception as error:  # the packages raise classes of their own
            raise self._cannot_load(error) from error

    def method(self, name: str, inputs: Signature, outputs: Signature) -> _Method:
        """Load a method, and hold its tensors against what the manifest says."""
        try:
            call, have_inputs, have_outputs = self._backend.method(self._program, name)
        except Exception as error:  # the packages raise classes of their own
            raise self._cannot_load(error) from error
        for kind, have, want in (
            ("input", have_inputs, inputs),
            ("output", have_outputs, outputs),
        ):
            if list(have) != list(want):
                pairs = enumerate(zip(have, want, strict=False))
                at = next((i for i, (one, other) in pairs if one != other), "the end")
                raise ArtifactError(
                    f"{kind}s of method {name!r} of {self._path.name} are not what the manifest "
                    f"says ({len(have)} for {len(want)}, the first difference at {at}): "
                    f"export again"
                )
        return _Method(self._backend, self._program, call, self._lock)

    def try_out(self, call: Callable[[], object]) -> None:
        """Run a call at once: a method's operators and delegates are looked up only then."""
        try:
            call()
        except DecoderError as error:
            raise self._cannot_load(error) from error

    def _cannot_load(self, error: Exception) -> ArtifactError:
        made_with = self._artifact.manifest.made_with.get("executorch", "an unknown version")
        running = self._backend.version
        if is_newer(made_with, running):
            why = (
                f"made with ExecuTorch {made_with}, running {self._backend.name}: a runtime may "
                f"not read what a newer release wrote; install a newer one, or export with "
                f"executorch {running}"
            )
        else:
            why = (
                f"made with ExecuTorch {made_with}, running {self._backend.name}: "
                f"copy the artifact again, or export it again"
            )
        return ArtifactError(
            f"{describe(self._artifact)} does not load ({first_line(error)}); {why}"
        )


class _Method:
    """A method that is safe to call from several threads, and whose results are the caller's."""

    def __init__(
        self, backend: _Backend, program: Any, call: Any, lock: AbstractContextManager[Any]
    ) -> None:
        self._backend, self._call, self._lock = backend, call, lock
        self._program = program  # native code of the method borrows from it

    def __call__(self, arrays: Sequence[Array]) -> list[Array]:
        with self._lock:
            try:
                return self._backend.run(self._call, arrays)
            except Exception as error:  # the packages raise classes of their own
                raise DecoderError(f"executorch: {first_line(error)}") from error


# The two packages, behind the same five verbs.


class _Backend(Protocol):
    name: str  # package and version, for messages
    version: str  # of ExecuTorch

    def set_threads(self, threads: int) -> None: ...
    def open(self, path: Path) -> Any: ...
    def method(self, program: Any, name: str) -> tuple[Any, Signature, Signature]: ...
    def run(self, call: Any, arrays: Sequence[Array]) -> list[Array]: ...


class _NumpyBackend:
    """``executorch-numpy-runtime``."""

    def __init__(self) -> None:
        self._package = importlib.import_module("executorch_numpy_runtime")
        self.version = str(self._package.__et_version__)
        self.name = f"executorch-numpy-runtime {self._package.__version__}"
        self.name += f" (ExecuTorch {self.version})"

    def set_threads(self, threads: int) -> None:
        """Resize the pool, which the package itself gives no way to do."""
        space = "_ZN{}10executorch9extension10threadpool{}"
        try:
            library = ctypes.CDLL(self._package._core.__file__)
            get = library[space.format("", "14get_threadpoolEv")]
            count = library[space.format("K", "10ThreadPool16get_thread_countEv")]
            reset = library[space.format("", "10ThreadPool24_unsafe_reset_threadpoolEj")]
        except (OSError, AttributeError):
            warnings.warn(
                f"{self.name} chooses its number of threads by itself, threads={threads} is not "
                f"heard",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        get.restype = ctypes.c_void_p
        count.argtypes, count.restype = [ctypes.c_void_p], ctypes.c_size_t
        reset.argtypes = [ctypes.c_void_p, ctypes.c_uint32]
        reset.restype = ctypes.c_bool
        pool = get()
        if count(pool) != threads:
            reset(pool, threads)

    def open(self, path: Path) -> Any:
        return self._package.Runtime.get().load_program(str(path))

    def method(self, program: Any, name: str) -> tuple[Any, Signature, Signature]:
        method = program.load_method(name)
        inputs, outputs = (
            [(int(item["scalar_type"]), tuple(item["shape"])) for item in method.metadata[kind]]
            for kind in ("inputs", "outputs")
        )
        return method, inputs, outputs

    def run(self, call: Any, arrays: Sequence[Array]) -> list[Array]:
        return [np.array(value) for value in call(arrays)]


class _OfficialBackend:
    """``executorch``, whose tensors are torch's."""

    def __init__(self) -> None:
        self._torch = importlib.import_module("torch")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it calls itself experimental at every import
            self._runtime = importlib.import_module("executorch.runtime").Runtime.get()
            bindings = "executorch.extension.pybindings.portable_lib"
            self._bindings = importlib.import_module(bindings)
        self.version = importlib.metadata.version("executorch")
        self.name = f"executorch {self.version}"

    def set_threads(self, threads: int) -> None:
        if self._bindings._threadpool_get_thread_count() != threads:
            self._bindings._unsafe_reset_threadpool(threads)
        # Some of its own operators work on torch's pool instead.
        self._torch.set_num_threads(threads)

    def open(self, path: Path) -> Any:
        return self._runtime.load_program(path)

    def method(self, program: Any, name: str) -> tuple[Any, Signature, Signature]:
        method = program.load_method(name)
        meta = method.metadata
        inputs = [meta.input_tensor_meta(i) for i in range(meta.num_inputs())]
        outputs = [meta.output_tensor_meta(i) for i in range(meta.num_outputs())]
        return (
            method,
            [(int(item.dtype()), tuple(item.sizes())) for item in inputs],
            [(int(item.dtype()), tuple(item.sizes())) for item in outputs],
        )

    def run(self, call: Any, arrays: Sequence[Array]) -> list[Array]:
        tensors = [self._torch.from_numpy(array) for array in arrays]
        return [np.array(value.numpy()) for value in call.execute(tensors)]


def _find_backend() -> _Backend:
    """Return the package that is installed.

    Raises:
        MissingDependencyError: There is none, or none that imports; says what was tried.
    """
    tried = []
    for make in (_NumpyBackend, _OfficialBackend):
        try:
            return make()
        except (ImportError, OSError, AttributeError) as error:
            # OSError: a native library does not load. AttributeError: something else of that name.
            tried.append(first_line(error))
    installed = []
    for name in ("executorch-numpy-runtime", "executorch", "torch", "numpy"):
        with suppress(importlib.metadata.PackageNotFoundError):
            installed.append(f"{name} {importlib.metadata.version(name)}")
    raise MissingDependencyError(
        f"this artifact needs ExecuTorch ({'; '.join(tried)}; installed: {', '.join(installed)}): "
        f"pip install 'codecstream[executorch]' under Python 3.12 or newer, or "
        f"pip install executorch, which brings torch"
    )
