"""What the runtime modules share: names in order, shapes held to the manifest, short messages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from codecstream.artifact import Artifact
from codecstream.errors import InvalidCodesError
from codecstream.manifest import Manifest

__all__ = [
    "Interface",
    "describe",
    "first_line",
    "fixed_lengths",
    "is_newer",
    "read_interface",
]


@dataclass(frozen=True, slots=True)
class Interface:
    """A program's inputs and outputs by name, in the order in which its manifest has them.

    ``codes`` comes first among the inputs and ``pcm`` first among the outputs; ``state_in`` and
    ``state_out`` belong together pairwise.
    """

    codes: str
    pcm: str
    others: tuple[str, ...]  # inputs that are neither codes nor state
    state_in: tuple[str, ...]
    state_out: tuple[str, ...]
    state_shapes: tuple[tuple[int, ...], ...]
    fills: tuple[float, ...]
    codebooks: int
    max_frames: int | None

    def batch(self, codes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return ``codes``, int64 ``[frames, codebooks]``, as ``[1, codebooks, frames]``.

        Shape and bound are checked here, before native code sees the array: runtimes compare the
        number of elements only, or nothing.

        Raises:
            InvalidCodesError: Another shape or dtype, no frame, or more than the program takes.
        """
        if codes.dtype != np.int64 or codes.ndim != 2 or codes.shape[1] != self.codebooks:
            raise InvalidCodesError(
                f"a program takes codes int64 [frames, {self.codebooks}], "
                f"not {codes.dtype} {list(codes.shape)}"
            )
        if not 1 <= len(codes) <= (self.max_frames or len(codes)):
            bound = "" if self.max_frames is None else f" to {self.max_frames}"
            raise InvalidCodesError(f"the program takes 1{bound} frames, not {len(codes)}")
        return np.ascontiguousarray(codes.T[np.newaxis])

    def initial_state(self) -> list[NDArray[np.float32]]:
        """Return the state tensors of a new stream."""
        pairs = zip(self.state_shapes, self.fills, strict=True)
        return [np.full(shape, fill, np.float32) for shape, fill in pairs]


def read_interface(manifest: Manifest) -> Interface:
    """Return the interface that a checked manifest describes."""
    state_in = tuple(item.input for item in manifest.state)
    state_out = tuple(item.output for item in manifest.state)
    codes, *others = (item.name for item in manifest.inputs if item.name not in state_in)
    (pcm,) = (item.name for item in manifest.outputs if item.name not in state_out)
    shapes = {item.name: item.shape for item in manifest.inputs}
    return Interface(
        codes=codes,
        pcm=pcm,
        others=tuple(others),
        state_in=state_in,
        state_out=state_out,
        state_shapes=tuple(tuple(int(n) for n in shapes[name]) for name in state_in),
        fills=tuple(item.fill for item in manifest.state),
        codebooks=manifest.geometry.codebooks,
        max_frames=manifest.frames.max,
    )


def describe(artifact: Artifact) -> str:
    """Return the artifact in a few words, for messages."""
    manifest = artifact.manifest
    made_with = ", ".join(f"{name} {version}" for name, version in manifest.made_with.items())
    what = f"{manifest.runtime} {manifest.precision} {manifest.mode}"
    return f"{artifact.folder.name} ({what}, made with {made_with})"


def is_newer(made_with: str, running: str) -> bool:
    """Whether version ``made_with`` is a later minor release than ``running``.

    A version that cannot be read is not newer: the runtime itself will judge the file.
    """
    made, have = _minor_release(made_with), _minor_release(running)
    return made is not None and have is not None and made > have


def _minor_release(version: str) -> tuple[int, int] | None:
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def fixed_lengths(shape: Iterable[Any]) -> list[int | None]:
    """Return the lengths that do not depend on the number of frames, None for the others."""
    return [length if isinstance(length, int) else None for length in shape]


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
