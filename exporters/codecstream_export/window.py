"""The decoder without state, for one fixed shape: a window of old and new frames in, new audio out.

For accelerators that carry no state from call to call. What a window decodes is what the eager
decoder makes of the same frames alone, so it is exact for as long as the whole utterance fits the
window, and approximates afterwards: eight layers of attention see back 568 frames.

Two things make it cheaper and cleaner than decoding the window and cutting:

- Only attention needs the whole context. The convolutions behind it see back about ten frames
  (:func:`synthesis_reach_frames`), so they run over the new frames and that many before.
- Real frames come first in the window. The decoder is causal, so what stands behind them changes
  nothing: frames that do not exist need no mask, and no code is invented for them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from codecstream_export.step import StepDecoder
from codecstream_export.step_layers import StateTensor

__all__ = ["WindowDecoder", "synthesis_reach_frames"]


class FreshCursor:
    """Nothing lies before a window: convolutions see zeros, attention sees no frame."""

    def extend(self, item: StateTensor, x: Tensor) -> Tensor:
        """See :class:`codecstream_export.step_layers.Cursor`."""
        return F.pad(x, (item.shape[-1], 0))

    def recall(self, item: StateTensor, x: Tensor) -> Tensor:
        """See :class:`codecstream_export.step_layers.Cursor`."""
        return x


class WindowDecoder(nn.Module):
    """A window as a module, sharing the weights of ``step``.

    ``forward(codes, frames_real)``: codes int64 ``[1, codebooks, context + frames]`` of which the
    first ``frames_real`` (int64 ``[1]``, at least 1) are real; returns pcm float32
    ``[1920 * frames]`` of the last ``frames`` real frames, or of the first ``frames`` while there
    are fewer.
    """

    def __init__(self, step: StepDecoder, context: int, frames: int) -> None:
        super().__init__()
        self.step = step
        self.frames = frames
        self.reach = min(synthesis_reach_frames(step), context)
        self.register_buffer("synthesised", torch.arange(frames + self.reach), persistent=False)
        self.register_buffer("returned", torch.arange(frames), persistent=False)
        self.synthesised: Tensor
        self.returned: Tensor
        self.eval().requires_grad_(False)

    def forward(self, codes: Tensor, frames_real: Tensor) -> Tensor:
        """Decode one window; see the class."""
        cursor = FreshCursor()
        latent = self.step.encode(codes, cursor)
        newest = (frames_real - self.frames).clamp(min=0)
        start = (newest - self.reach).clamp(min=0)
        latent = latent.index_select(1, start + self.synthesised)
        pcm = self.step.synthesise(latent, cursor)
        by_frame = pcm.view(self.frames + self.reach, self.step.config.samples_per_frame)
        return by_frame.index_select(0, newest - start + self.returned).reshape(-1)


def synthesis_reach_frames(step: StepDecoder) -> int:
    """Return how many frames before a frame its audio depends on behind the transformer."""
    cursor = _ReachCursor()
    with torch.no_grad():
        step.synthesise(torch.zeros(1, 1, step.config.latent_dim), cursor)
    return math.ceil(cursor.reach)


class _ReachCursor(FreshCursor):
    """Adds up, over one frame, how far back each convolution sees."""

    def __init__(self) -> None:
        self.reach = 0.0

    def extend(self, item: StateTensor, x: Tensor) -> Tensor:
        self.reach += item.shape[-1] / x.shape[-1]
        return super().extend(item, x)
