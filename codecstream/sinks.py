"""Where sound goes: one small interface, and the outputs that need no sound device.

>>> import io
>>> import numpy as np
>>> from codecstream.sinks import RawSink
>>> pipe = io.BytesIO()
>>> sink = RawSink(pipe)
>>> sink.write(np.array([0.0, 1.0, -1.0], np.float32))
>>> sink.drain()
>>> pipe.getvalue().hex(" ", 2)
'0000 ff7f 0180'

A robot's own output is any object with the four methods of :class:`Sink`. Those of this package
are :class:`codecstream.playback.Player` for sound devices, :class:`codecstream.wav.WavWriter`,
:class:`RawSink` and :class:`NullSink`. One that can also say how much it has not played yet, as
:meth:`codecstream.playback.Player.ahead_s` does, gives a policy more to go by. In asyncio, call
``write`` and ``drain`` through ``asyncio.to_thread``: they may wait.
"""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Any, BinaryIO, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from codecstream.errors import PlaybackError
from codecstream.pcm import to_int16

__all__ = ["NullSink", "RawSink", "Sink"]


@runtime_checkable
class Sink(Protocol):
    """An output for mono sound.

    One thread writes and drains; any thread may call ``clear`` and ``close`` meanwhile.
    """

    def write(self, pcm: NDArray[np.float32]) -> None:
        """Take float32 ``[samples]`` in [-1, 1]; may wait until there is room."""

    def drain(self) -> None:
        """Return once everything written has left; a following ``write`` starts anew."""

    def clear(self) -> None:
        """Drop what has not left yet, at once, also what a waiting ``write`` has in hand."""

    def close(self) -> None:
        """Release what the sink holds; may be called twice."""


_ClosingSink = TypeVar("_ClosingSink", bound="ClosingSink")


class ClosingSink:
    """Makes a sink a context manager that closes it."""

    def close(self) -> None:
        """Release what the sink holds."""

    def __enter__(self: _ClosingSink) -> _ClosingSink:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class RawSink(ClosingSink):
    """Samples as bare 16-bit little-endian numbers to a binary stream, such as a pipe.

    What was written is in the hands of the stream's reader: ``clear`` cannot call it back, and a
    reader that stops reading holds up ``write`` as it does any program of a pipe.

    Args:
        stream: The stream, such as ``sys.stdout.buffer``; whoever opened it closes it.
    """

    def __init__(self, stream: BinaryIO) -> None:
        stream.flush()
        self._given = stream  # a buffer that nobody holds closes what is under it
        # Without Python's own buffer: sound leaves at once, and nothing is left to be flushed
        # into a broken pipe when the interpreter ends.
        self._stream: Any = getattr(stream, "raw", stream)

    def write(self, pcm: NDArray[np.float32]) -> None:
        """Write float32 ``[samples]``.

        Raises:
            PlaybackError: The stream takes no more, as when its reader has ended.
            OutputError: A sample is NaN or Inf; nothing is written.
        """
        rest = memoryview(to_int16(pcm).astype("<i2").tobytes())
        while rest:
            try:
                count = self._stream.write(rest)
            except (OSError, ValueError) as error:  # a broken pipe, a full disk, a closed file
                raise PlaybackError(f"the output stream takes no more sound: {error}") from error
            if count is None:
                raise PlaybackError(
                    "the output stream is full and does not block: RawSink needs one that does"
                )
            rest = rest[count:]

    def drain(self) -> None:
        """Hand everything to the system.

        Raises:
            PlaybackError: The stream takes no more.
        """
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            raise PlaybackError(f"the output stream takes no more sound: {error}") from error

    def clear(self) -> None:
        """Do nothing: everything has left."""

    def close(self) -> None:
        """Flush; the stream stays open."""
        with contextlib.suppress(PlaybackError):  # write or drain has told already
            self.drain()


class NullSink(ClosingSink):
    """Swallows sound and counts it, for measurements and tests.

    Attributes:
        written_samples: Samples so far.
    """

    def __init__(self) -> None:
        self.written_samples = 0

    def write(self, pcm: NDArray[np.float32]) -> None:
        """Count float32 ``[samples]``."""
        self.written_samples += pcm.size

    def drain(self) -> None:
        """Do nothing: nothing waits."""

    def clear(self) -> None:
        """Do nothing: nothing waits."""
