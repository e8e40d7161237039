"""Reading a safetensors file by hand: what it reads is right, and what is broken is refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from codecstream import ArtifactError
from codecstream.memory import return_free_memory
from codecstream.runtimes.tensors import read_tensors


def write(path: Path, header: object, data: bytes = b"", size: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if size is None else size) + text + data)
    return path


def entry(start: int = 0, end: int = 8, dtype: str = "F32", shape: tuple[int, ...] = (2,)) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def test_reads_what_the_package_writes(tmp_path: Path) -> None:
    numpy_format = pytest.importorskip("safetensors.numpy")
    tensors = {
        "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
        "b": np.arange(5, dtype=np.int16),
        "c": np.float16([[1.5], [-2.0]]),
    }
    numpy_format.save_file(tensors, tmp_path / "w.safetensors", metadata={"made": "here"})
    read = read_tensors(tmp_path / "w.safetensors")
    assert read.keys() == tensors.keys()
    for name, value in tensors.items():
        assert read[name].dtype == value.dtype and np.array_equal(read[name], value)
        with pytest.raises(ValueError, match="read-only"):
            read[name][...] = 0


@pytest.mark.parametrize(
    ("header", "data", "size"),
    [
        ({"a": entry()}, b"1234", None),  # ends beyond the file
        ({"a": entry(start=8, end=0)}, b"12345678", None),
        ({"a": entry(start=-8, end=0)}, b"12345678", None),
        ({"a": entry(shape=(3,))}, b"12345678", None),
        ({"a": entry(end=7)}, b"12345678", None),  # not a whole number of floats
        ({"a": entry(dtype="F99")}, b"12345678", None),
        ({"a": {"dtype": "F32"}}, b"12345678", None),
        ([1, 2], b"", None),
        (b"\xff{", b"", None),
        ({}, b"", 2**62),  # would ask for all memory
        ({}, b"", 100),  # a header that is not there
    ],
)
def test_a_broken_file_is_refused_by_name(
    tmp_path: Path, header: object, data: bytes, size: int | None
) -> None:
    path = write(tmp_path / "w.safetensors", header, data, size)
    with pytest.raises(ArtifactError, match=r"w\.safetensors is not a readable"):
        read_tensors(path)


@pytest.mark.parametrize("data", [b"", b"1234567"])
def test_a_file_without_a_length_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "w.safetensors").write_bytes(data)
    with pytest.raises(ArtifactError, match="not a readable"):
        read_tensors(tmp_path / "w.safetensors")


def test_returning_memory_never_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    return_free_memory()
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())  # a library without the call
    return_free_memory()
