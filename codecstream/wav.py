"""16-bit mono WAV files, written as the sound comes.

>>> import numpy as np, tempfile, pathlib
>>> from codecstream.wav import WavWriter, read_wav
>>> path = pathlib.Path(tempfile.mkdtemp()) / "a.wav"
>>> with WavWriter(path, sample_rate_hz=24000) as wav:
...     wav.write(np.zeros(1920, np.float32))
>>> pcm, rate_hz = read_wav(path)
>>> pcm.shape, rate_hz
((1920,), 24000)
"""

from __future__ import annotations

import wave
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from codecstream.pcm import to_int16

__all__ = ["WavWriter", "read_wav", "write_wav"]


class WavWriter:
    """Write float32 chunks to a 16-bit mono WAV file; a sink, and a context manager."""

    def __init__(self, path: str | Path, sample_rate_hz: int) -> None:
        # Opened here: where it fails, wave of Python 3.11 complains a second time on its own.
        self._raw = Path(path).open("wb")  # noqa: SIM115 - closed by close()
        self._file = wave.open(self._raw, "wb")  # noqa: SIM115
        self._file.setnchannels(1)
        self._file.setsampwidth(2)
        self._file.setframerate(sample_rate_hz)

    def write(self, pcm: NDArray[np.float32]) -> None:
        """Append float32 ``[samples]``."""
        self._file.writeframes(to_int16(pcm).astype("<i2").tobytes())

    def drain(self) -> None:
        """Bring everything to the file; it can be read from here on, and written further."""
        self._raw.flush()

    def clear(self) -> None:
        """Do nothing: what is in the file stays there."""

    def close(self) -> None:
        """Finish the file's header; may be called twice."""
        self._file.close()
        self._raw.close()

    def __enter__(self) -> WavWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def write_wav(path: str | Path, pcm: NDArray[np.float32], sample_rate_hz: int) -> None:
    """Write float32 ``[samples]`` as one 16-bit mono WAV file."""
    with WavWriter(path, sample_rate_hz) as wav:
        wav.write(pcm)


def read_wav(path: str | Path) -> tuple[NDArray[np.float32], int]:
    """Return a 16-bit mono WAV file as float32 ``[samples]`` and its rate in Hz.

    Raises:
        ValueError: The file is not 16-bit mono PCM.
    """
    try:
        with wave.open(str(path), "rb") as file:
            if file.getnchannels() != 1 or file.getsampwidth() != 2:
                raise ValueError(
                    f"{path}: expected 16-bit mono, found {8 * file.getsampwidth()}-bit "
                    f"with {file.getnchannels()} channels"
                )
            samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
            return (samples / np.float32(32767)).astype(np.float32), file.getframerate()
    except (wave.Error, EOFError) as error:
        raise ValueError(f"{path} is not a WAV file: {error}") from error
