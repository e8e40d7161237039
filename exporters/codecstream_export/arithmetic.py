"""How much arithmetic a decoder does, counted on its shapes alone."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

from codecstream_export.config import DecoderConfig
from codecstream_export.eager import EagerDecoder

__all__ = ["flop_per_frame"]

_FRAMES = 72  # attention over a whole window, as in the middle of an utterance


def flop_per_frame(config: DecoderConfig) -> int:
    """Return the floating point operations of products and convolutions per frame.

    A multiplication and an addition are two. Counted as the difference that one more frame makes,
    behind a window of history.
    """
    return _count(config, _FRAMES + 1) - _count(config, _FRAMES)


def _count(config: DecoderConfig, frames: int) -> int:
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        decoder = EagerDecoder(config)
        decoder(torch.zeros(1, config.num_quantizers, frames, dtype=torch.int64))
    return int(counter.get_total_flops())
