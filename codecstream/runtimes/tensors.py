"""Read a safetensors file without its package: a length, a JSON header, and plain numbers."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from codecstream.errors import ArtifactError

__all__ = ["read_tensors"]

MAX_HEADER_BYTES = 16 * 1024 * 1024
_LENGTH = struct.Struct("<Q")
_DTYPES = {"F32": np.float32, "F16": np.float16, "I16": np.int16, "I8": np.int8, "I64": np.int64}


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read_tensors(path: Path) -> dict[str, NDArray[Any]]:
    """Return the tensors of a file by name, as read-only views into the mapped file.

    Raises:
        ArtifactError: It is no safetensors file, or a tensor reaches beyond its end.
    """
    try:
        data = np.memmap(path, np.uint8, mode="r")
        (size,) = _LENGTH.unpack(data[:8].tobytes())
        start = 8 + size
        if size > MAX_HEADER_BYTES or start > len(data):
            raise ValueError(f"a header of {size} bytes in a file of {len(data)}")
        header = msgspec.json.decode(data[8:start].tobytes(), type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        return {
            name: _view(data[start:], msgspec.json.decode(entry, type=_Entry))
            for name, entry in header.items()
        }
    except (OSError, ValueError, KeyError, struct.error, msgspec.MsgspecError) as error:
        raise ArtifactError(
            f"{path} is not a readable safetensors file ({error}): copy the artifact again"
        ) from error


def _view(data: NDArray[np.uint8], entry: _Entry) -> NDArray[Any]:
    begin, end = entry.data_offsets
    if not 0 <= begin <= end <= len(data):
        raise ValueError(f"a tensor from {begin} to {end} of {len(data)} bytes")
    return data[begin:end].view(_DTYPES[entry.dtype]).reshape(entry.shape)
