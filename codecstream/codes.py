"""Check codes before anything looks them up in a table; read them from files."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from codecstream.errors import InvalidCodesError
from codecstream.geometry import CodecGeometry

__all__ = ["FrameQueue", "as_integers", "check_codes", "read_codes"]


def as_integers(codes: ArrayLike) -> NDArray[np.integer[Any]]:
    """Return ``codes`` as an integer array of any shape and width, or an empty one.

    Raises:
        InvalidCodesError: They are ragged, or not integers.
    """
    try:
        array = np.asarray(codes)
    except ValueError as error:  # rows of unequal length
        raise InvalidCodesError(f"codes are no array: {error}") from error
    if array.size and array.dtype.kind not in "iu":  # numpy gives an empty list floats
        raise InvalidCodesError(f"codes must be integers, not {array.dtype}")
    return array


def check_codes(
    codes: ArrayLike, geometry: CodecGeometry, *, seq: int | None = None
) -> NDArray[np.int64]:
    """Return ``codes`` as a fresh, contiguous int64 array ``[frames, codebooks]``.

    Any integer width, byte order, memory layout and read-only buffer is accepted; 0 is a code
    like any other.

    Args:
        codes: Integer ``[frames, codebooks]``; zero frames are allowed.
        geometry: Says how many codebooks there are and how large they are.
        seq: Packet number for the error message, when the codes came from the wire.

    Raises:
        InvalidCodesError: Wrong dtype or shape, or an id outside ``0..codebook_size - 1``; names
            frame, codebook and value of the first one.
    """
    where = "" if seq is None else f"packet {seq}: "
    array = as_integers(codes)
    if array.ndim != 2 or array.shape[1] != geometry.codebooks:
        raise InvalidCodesError(
            f"{where}codes must have shape [frames, {geometry.codebooks}], not {list(array.shape)}",
            seq=seq,
        )
    bad = (array < 0) | (array >= geometry.codebook_size)
    if bad.any():
        frame, codebook = (int(i) for i in np.argwhere(bad)[0])
        value = int(array[frame, codebook])
        raise InvalidCodesError(
            f"{where}frame {frame}, codebook {codebook}: id {value} is outside "
            f"0..{geometry.codebook_size - 1}",
            seq=seq,
            frame=frame,
            codebook=codebook,
            value=value,
        )
    return np.array(array, dtype=np.int64, order="C")


def read_codes(path: str | Path, geometry: CodecGeometry) -> NDArray[np.int64]:
    """Read a codes file: ``.npy``, integer ``[frames, codebooks]``, checked.

    Raises:
        InvalidCodesError: It is no such file, holds something else, or ids outside the codebooks.
        OSError: It cannot be read.
    """
    try:
        loaded = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise InvalidCodesError(f"{path} is not a .npy file of numbers: {error}") from error
    if not isinstance(loaded, np.ndarray):
        loaded.close()
        raise InvalidCodesError(f"{path} holds several arrays; a codes file is one .npy array")
    try:
        return check_codes(loaded, geometry)
    except InvalidCodesError as error:
        raise InvalidCodesError(
            f"{path}: {error}", frame=error.frame, codebook=error.codebook, value=error.value
        ) from error


class FrameQueue:
    """Frames waiting to be decoded; taking a chunk costs the chunk, whatever waits behind it.

    Attributes:
        frames: How many there are.
    """

    def __init__(self) -> None:
        self._parts: deque[NDArray[np.int64]] = deque()
        self.frames = 0

    def append(self, codes: NDArray[np.int64]) -> None:
        """Add int64 ``[frames, codebooks]``, which must not change afterwards."""
        if len(codes):
            self._parts.append(codes)
            self.frames += len(codes)

    def peek(self, frames: int) -> NDArray[np.int64]:
        """Return the first ``frames`` frames, contiguous, and keep them."""
        taken: list[NDArray[np.int64]] = []
        missing = frames
        for part in self._parts:
            if missing <= 0:
                break
            taken.append(part[:missing])
            missing -= len(taken[-1])
        return np.concatenate(taken)

    def drop(self, frames: int) -> None:
        """Remove the first ``frames`` frames."""
        self.frames -= frames
        while frames:
            first = self._parts.popleft()
            if len(first) > frames:
                self._parts.appendleft(first[frames:])
                return
            frames -= len(first)
