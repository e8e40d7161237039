"""torch.export: a ``.pt2`` program, run by the torch that is installed."""

from __future__ import annotations

import re
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from codecstream.artifact import Artifact
from codecstream.errors import ArtifactError, DecoderError, MissingDependencyError
from codecstream.geometry import CodecGeometry
from codecstream.manifest import Manifest
from codecstream.runtimes import WindowCall
from codecstream.runtimes.interface import (
    describe,
    first_line,
    fixed_lengths,
    is_newer,
    read_interface,
)

WEIGHTS_NAME = "weights.pt"

__all__ = ["load", "load_windows"]

State = tuple[Any, ...]  # of torch.Tensor


def load(artifact: Artifact, threads: int) -> TorchProgram:
    """Load a stateful ``.pt2`` artifact.

    Args:
        artifact: The checked artifact.
        threads: Threads of torch's pool, which is one for the whole process.

    Raises:
        MissingDependencyError: torch is not installed or does not import.
        ArtifactError: The file was made with a newer torch, or is no exported program.
    """
    torch = _import()
    torch.set_num_threads(threads)
    module = _open(torch, artifact, artifact.program_path)
    return TorchProgram(torch, artifact, module)


def load_windows(artifact: Artifact, threads: int) -> dict[int, WindowCall]:
    """Load a windowed ``.pt2`` artifact; see :func:`load` for arguments and errors."""
    torch = _import()
    torch.set_num_threads(threads)
    path = artifact.folder / WEIGHTS_NAME
    if WEIGHTS_NAME not in artifact.manifest.files:
        raise ArtifactError(f"{describe(artifact)} names no {WEIGHTS_NAME}: export again")
    try:
        # Tensors only, whatever the file holds; used where they lie in the file.
        stored = torch.load(path, weights_only=True, mmap=True)
        weights = [
            value["stored"].float() * value["scale"] if isinstance(value, dict) else value
            for value in stored.values()
        ]
    except Exception as error:  # from the archive or from torch itself
        raise ArtifactError(
            f"{path.name} of {describe(artifact)} holds no weights that torch "
            f"{torch.__version__} can load ({first_line(error)}): copy the artifact again"
        ) from error
    return {
        window.frames: _TorchWindow(
            torch, _open(torch, artifact, artifact.folder / window.program), weights
        )
        for window in artifact.manifest.windows
    }


class TorchProgram:
    """See :class:`codecstream.runtimes.Program`."""

    def __init__(self, torch: Any, artifact: Artifact, module: Any) -> None:
        manifest = artifact.manifest
        self.manifest = manifest
        self.geometry: CodecGeometry = manifest.codec_geometry()
        self.max_frames: int | None = manifest.frames.max
        self.decoder_id: str | None = manifest.decoder_id
        self._torch = torch
        self._module = module
        self._interface = read_interface(manifest)
        # The program never writes to its inputs, so all new streams start from the same zeros.
        self._initial: State = tuple(
            torch.from_numpy(value) for value in self._interface.initial_state()
        )

    def initial_state(self) -> State:
        """Return the state of a new stream."""
        return self._initial

    def step(self, codes: NDArray[np.int64], state: State) -> tuple[NDArray[np.float32], State]:
        """Decode int64 ``[frames, codebooks]``; see :meth:`codecstream.runtimes.Program.step`."""
        torch = self._torch
        batch = torch.from_numpy(self._interface.batch(codes))
        try:
            with torch.inference_mode():
                pcm, *after = self._module(batch, *state)
                # The new state is a view into each layer's whole input: only a copy lets go of it.
                kept = tuple(value.clone() for value in after)
        except Exception as error:  # torch raises classes of many kinds
            raise DecoderError(f"torch: {first_line(error)}") from error
        return np.array(pcm.numpy(), dtype=np.float32), kept


class _TorchWindow:
    """One windowed program; its arguments are those of :data:`codecstream.runtimes.WindowCall`."""

    def __init__(self, torch: Any, module: Any, weights: list[Any]) -> None:
        self._torch, self._module, self._weights = torch, module, weights

    def __call__(
        self, codes: NDArray[np.int64], frames_real: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        torch = self._torch
        try:
            with torch.inference_mode():
                pcm = self._module(
                    torch.from_numpy(codes), torch.from_numpy(frames_real), *self._weights
                )
        except Exception as error:  # torch raises classes of many kinds
            raise DecoderError(f"torch: {first_line(error)}") from error
        return np.array(pcm.numpy(), dtype=np.float32)


def _import() -> Any:
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a native library of it does not load
        raise MissingDependencyError(
            f"this artifact needs torch ({first_line(error)}): pip install 'codecstream[torch]'"
        ) from error
    return torch


def _open(torch: Any, artifact: Artifact, path: Path) -> Any:
    """Return the program in ``path`` as a callable module."""
    made_with = artifact.manifest.made_with.get("torch", "an unknown torch")
    running = str(torch.__version__)
    if is_newer(made_with, running):
        raise ArtifactError(
            f"{describe(artifact)}: made with torch {made_with}, running torch {running}: "
            f"install torch {made_with.partition('+')[0]} or newer, or export again"
        )
    try:
        _refuse_code(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its own deprecated calls
            program = torch.export.load(str(path))
            module = program.module(check_guards=False)
            with torch.inference_mode():
                _widen_weights(torch, module)
    except Exception as error:  # from the archive, the JSON in it, or torch itself
        raise ArtifactError(
            f"{path.name} is not a program that torch {running} can load ({first_line(error)}); "
            f"made with torch {made_with}: copy the artifact again, or export it again"
        ) from error
    if artifact.manifest.mode == "stateful":
        _check_signature(program, artifact.manifest)
    return module


def _check_signature(program: Any, manifest: Manifest) -> None:
    """Compare what the manifest declares with what the program has, before anything runs."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    signature = program.graph_signature
    for kind, names, declared in (
        ("input", signature.user_inputs, manifest.inputs),
        ("output", signature.user_outputs, manifest.outputs),
    ):
        if len(names) != len(declared):
            raise ArtifactError(
                f"the program has {len(names)} {kind}s, the manifest {len(declared)}: export again"
            )
        for name, item in zip(names, declared, strict=True):
            have = str(values[name].dtype).removeprefix("torch."), fixed_lengths(values[name].shape)
            want = item.dtype, fixed_lengths(item.shape)
            if have != want:
                raise ArtifactError(
                    f"{kind} {item.name!r} is {have} in the program and {want} in the manifest: "
                    f"export again"
                )


def _widen_weights(torch: Any, module: Any) -> None:
    """Compute once what a program computes from weights alone: those stored in 16 bits, widened."""
    graph = module.graph
    for node in list(graph.nodes):
        inputs = node.all_input_nodes
        if node.op != "call_function" or not inputs:
            continue
        if all(item.op == "get_attr" for item in inputs):
            values = {item: _attribute(module, item.target) for item in inputs}
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
            name = f"widened_{node.name}"
            module.register_buffer(name, node.target(*args, **kwargs))
            with graph.inserting_before(node):
                node.replace_all_uses_with(graph.get_attr(name))
            graph.erase_node(node)
    used = {node.target for node in graph.nodes if node.op == "get_attr"}
    graph.eliminate_dead_code()
    module.delete_all_unused_submodules()
    module.recompile()
    for name, _ in [*module.named_parameters(), *module.named_buffers()]:
        if name not in used:
            _forget(module, name)


def _attribute(module: Any, target: str) -> Any:
    for part in target.split("."):
        module = getattr(module, part)
    return module


def _forget(module: Any, target: str) -> None:
    *path, name = target.split(".")
    delattr(_attribute(module, ".".join(path)) if path else module, name)


def _refuse_code(path: Path) -> None:
    """Raise ArtifactError where loading ``path`` could run code that somebody put into it.

    The exporter writes tensors as plain bytes and sizes as sums and products. The archive allows
    more: torch unpickles objects, and has a size that is no number evaluated as Python.
    """
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            parts = entry.filename.split("/")
            if "aotinductor" in parts or ("sample_inputs" in parts and entry.file_size):
                raise ArtifactError(f"it holds {parts[-2]}, which no decoder artifact has")
            if parts[-1].endswith("_config.json"):
                for item in msgspec.json.decode(archive.read(entry))["config"].values():
                    name = item.get("path_name", "")
                    if item.get("use_pickle") or not name.startswith(("weight_", "tensor_")):
                        raise ArtifactError(
                            f"it holds {name!r} as a pickled object, which can run code"
                        )
            elif "models" in parts:
                for size in _sizes(msgspec.json.decode(archive.read(entry))):
                    words = set(re.findall(r"[^\W\d]\w*", size))
                    if not re.fullmatch(r"[\w\s'(),=+*/-]*", size) or any(
                        word not in _SIZE_WORDS and not re.fullmatch(r"[su]\d+", word)
                        for word in words
                    ):
                        raise ArtifactError(f"it has {size[:60]!r} for a size, which can run code")


_SIZE_WORDS = {"Symbol", "Integer", "Add", "Mul", "Pow", "Mod", "FloorDiv", "Max", "Min"}
_SIZE_WORDS |= {"positive", "nonnegative", "integer", "True"}


def _sizes(document: Any) -> Iterator[str]:
    """Yield every size in a program's JSON that is an expression."""
    if isinstance(document, dict):
        for key, value in document.items():
            if key == "expr_str":
                yield str(value)
            else:
                yield from _sizes(value)
    elif isinstance(document, list):
        for value in document:
            yield from _sizes(value)
