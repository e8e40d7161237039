"""Change the rate of a stream of samples, chunk by chunk, as if it were done at once.

>>> import numpy as np
>>> from codecstream.resample import Resampler
>>> resampler = Resampler(24_000, 44_100)
>>> pieces = [resampler.push(np.zeros(1920, np.float32)) for _ in range(7)]
>>> sum(piece.size for piece in [*pieces, resampler.finish()]), 7 * 1920 * 44_100 / 24_000
(24696, 24696.0)

The filter is soxr's, at its high quality. It looks ahead and works in blocks, so that some sound
comes out only with the next chunk or with ``finish``: up to 39 ms from 24 kHz to 44.1 or 48 kHz.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from codecstream.errors import MissingDependencyError

__all__ = ["Resampler"]


class Resampler:
    """A stream of mono float32 samples at another rate.

    Whatever the sizes of the chunks, the output is the same, and in all ``n`` samples become
    ``n * to_hz / from_hz``, to the nearest whole number. Where both rates are equal, samples pass
    untouched and soxr is not needed.

    Attributes:
        hold_back_s: The longest sound, in seconds, that waits in the filter for what follows.

    Args:
        from_hz: Rate of the samples that come.
        to_hz: Rate of the samples wanted; need not be a whole number.

    Raises:
        ValueError: A rate is not positive.
        MissingDependencyError: The rates differ and soxr is not installed.
    """

    def __init__(self, from_hz: float, to_hz: float) -> None:
        if not (from_hz > 0 and to_hz > 0):
            raise ValueError(f"sample rates must be above 0 Hz, not {from_hz} and {to_hz}")
        self._stream: Any = None if from_hz == to_hz else _soxr_stream(from_hz, to_hz)
        self.hold_back_s = self._measure_hold_back_s(from_hz, to_hz)

    def push(self, pcm: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return what is ready after float32 ``[samples]`` more; may be empty."""
        return self._process(pcm, last=False)

    def finish(self) -> NDArray[np.float32]:
        """Return the rest, float32 ``[samples]``; the next ``push`` starts a new stream."""
        rest = self._process(np.empty(0, np.float32), last=True)
        self.reset()
        return rest

    def reset(self) -> None:
        """Forget what was pushed; the next ``push`` starts a new stream."""
        if self._stream is not None:
            self._stream.clear()

    def _measure_hold_back_s(self, from_hz: float, to_hz: float) -> float:
        """Watch half a second of silence go through, in pieces of 2 ms; soxr does not tell."""
        piece = np.zeros(max(1, round(from_hz / 500)), np.float32)
        held_s, longest_s = 0.0, 0.0
        for _ in range(250):
            held_s += piece.size / from_hz - self.push(piece).size / to_hz
            longest_s = max(longest_s, held_s)
        self.reset()
        return longest_s and longest_s + piece.size / from_hz

    def _process(self, pcm: NDArray[np.float32], last: bool) -> NDArray[np.float32]:
        pcm = np.ascontiguousarray(pcm, np.float32)
        if self._stream is None:
            return pcm
        return self._stream.resample_chunk(pcm, last=last)  # type: ignore[no-any-return]


def _soxr_stream(from_hz: float, to_hz: float) -> Any:
    try:
        import soxr
    except ImportError as error:
        raise MissingDependencyError(
            f"turning {from_hz:g} Hz into {to_hz:g} Hz needs soxr ({error}): "
            f"pip install 'codecstream[play]'"
        ) from error
    return soxr.ResampleStream(from_hz, to_hz, 1, dtype="float32", quality="HQ")
