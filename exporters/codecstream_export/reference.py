"""What programs are held against: the eager decoder's sound of some codes.

Codes are int64 ``[frames, codebooks]``, sound is float32 ``[frames * 1920]``.

The decoder computes in float32, but for the angles of its rotary embedding. In float32, as the
published decoder has them, their rounding grows with the position, and what it does to the sound
with the sharpness of attention: the bundled demo decoder was 99.8 dB from its own float64 result
over 528 frames, 79.0 dB in the worst 80 ms. A program that rotates a window's own small positions
is more exact than that (114 dB, 100 dB), and must not be blamed for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from codecstream_export.config import DecoderConfig
from codecstream_export.eager import EagerDecoder

__all__ = ["Decode", "block_pcm", "eager_pcm", "reach_frames", "window_pcm"]

Decode = Callable[[NDArray[np.int64]], NDArray[np.float32]]

# The convolutions see back 12 frames: 2 in front of the transformer, about 10 behind it.
CONVOLUTION_REACH_FRAMES = 32


def eager_pcm(decoder: EagerDecoder, codes: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the sound of all frames in one pass, with the angles in float64."""
    with torch.inference_mode():
        pcm: NDArray[np.float32] = decoder(torch.from_numpy(codes).T[None], torch.float64)[
            0
        ].numpy()
    return pcm


def reach_frames(config: DecoderConfig) -> int:
    """Return how many frames before a frame can change its sound, rounded up."""
    return config.num_hidden_layers * (config.sliding_window - 1) + CONVOLUTION_REACH_FRAMES


def block_pcm(
    decode: Decode, codes: NDArray[np.int64], reach: int, block_frames: int
) -> Iterator[NDArray[np.float32]]:
    """Yield the sound of all frames in blocks, each behind all the frames that it depends on.

    In bounded memory, and equal to one pass but for rounding.
    """
    for start in range(0, len(codes), block_frames):
        end = min(start + block_frames, len(codes))
        yield _newest(decode, codes, max(0, start - reach), start, end)


def window_pcm(
    decode: Decode, codes: NDArray[np.int64], chunks: Sequence[int], context: int
) -> Iterator[NDArray[np.float32]]:
    """Yield the sound of each chunk behind ``context`` frames of history, and no more."""
    end = 0
    for size in chunks:
        start, end = end, end + size
        yield _newest(decode, codes, max(0, start - context), start, end)


def _newest(
    decode: Decode, codes: NDArray[np.int64], first: int, start: int, end: int
) -> NDArray[np.float32]:
    pcm = decode(codes[first:end])
    samples = len(pcm) // (end - first)
    return pcm[(start - first) * samples :]
