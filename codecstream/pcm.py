"""One conversion from float samples to 16-bit ones, for files, devices and pipes alike."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from codecstream.errors import OutputError

__all__ = ["to_int16"]


def to_int16(pcm: NDArray[np.float32]) -> NDArray[np.int16]:
    """Return float samples as int16: 1.0 becomes 32767, and what is louder is clipped.

    Args:
        pcm: Float samples of any shape; full scale is [-1, 1].

    Raises:
        OutputError: A sample is NaN or Inf. Turned into integers it would be a full-scale click.
    """
    pcm = np.asarray(pcm)
    if not np.isfinite(pcm).all():
        raise OutputError("samples hold NaN or Inf: refusing to turn them into sound")
    # To the integers' own range: -1.5 becomes -32768. What is far beyond must not overflow first.
    scaled = np.rint(np.clip(pcm, -2, 2) * np.float32(32767))
    scaled = np.clip(scaled, -32768, 32767)
    return scaled.astype(np.int16)  # type: ignore[no-any-return]
