"""Windowed programs: no state in the runtime, the newest frames are decoded again with each chunk.

For accelerators that take fixed shapes and no state. It approximates: the decoder's eight layers
see back 568 frames, a window of 72 shows the last of them only.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from codecstream.geometry import CodecGeometry
from codecstream.manifest import Manifest
from codecstream.runtimes import WindowCall
from codecstream.runtimes.interface import read_interface

__all__ = ["WindowedProgram"]

History = NDArray[np.int64]  # [up to context, codebooks]


class WindowedProgram:
    """See :class:`codecstream.runtimes.Program`. The state is the last ``context`` frames' codes.

    A chunk runs through the smallest window that holds it. The real frames come first in a window
    and what is behind them can't be heard: the decoder is causal. So a stream's first frames are
    decoded with no history rather than with an invented one.
    """

    def __init__(self, manifest: Manifest, calls: Mapping[int, WindowCall]) -> None:
        assert manifest.context is not None  # the manifest's parser saw to it
        self.manifest = manifest
        self.geometry: CodecGeometry = manifest.codec_geometry()
        self.max_frames: int | None = manifest.frames.max
        self.decoder_id: str | None = manifest.decoder_id
        self.context: int = manifest.context
        self._interface = read_interface(manifest)
        self._calls = dict(sorted(calls.items()))

    def initial_state(self) -> History:
        """Return the state of a new stream: no frames."""
        return np.empty((0, self.geometry.codebooks), np.int64)

    def step(self, codes: NDArray[np.int64], state: History) -> tuple[NDArray[np.float32], History]:
        """Decode int64 ``[frames, codebooks]``; see :meth:`codecstream.runtimes.Program.step`."""
        new = self._interface.batch(codes).shape[-1]
        size = next(size for size in self._calls if size >= new)
        real = np.concatenate((state, codes))
        window = np.zeros((1, self.geometry.codebooks, self.context + size), np.int64)
        window[0, :, : len(real)] = real.T
        pcm = self._calls[size](window, np.array([len(real)], np.int64))
        # The program returned the last `size` real frames, or the first ones while there are fewer.
        first = max(len(real) - size, 0)
        samples = self.geometry.samples_per_frame
        start = (len(real) - new - first) * samples
        audio = np.array(pcm[start : start + new * samples])
        return audio, np.array(real[-self.context :])
