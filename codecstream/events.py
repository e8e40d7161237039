"""What a session's incoming messages mean, as frozen dataclasses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from codecstream import wire
from codecstream.errors import CodecStreamError

__all__ = [
    "DecoderReset",
    "Event",
    "Frames",
    "Notice",
    "SentenceEnded",
    "SentenceStarted",
    "UtteranceEnded",
    "UtteranceFailed",
]


@dataclass(frozen=True, slots=True)
class SentenceStarted:
    """A sentence begins, with a fresh decoder state."""

    start: wire.CodecStart


@dataclass(frozen=True, slots=True)
class Frames:
    """Checked codes, int64 ``[frames, codebooks]``, of packet ``seq``."""

    codes: NDArray[np.int64]
    seq: int


@dataclass(frozen=True, slots=True)
class DecoderReset:
    """Decode the frames so far, then drop the decoder's state."""


@dataclass(frozen=True, slots=True)
class SentenceEnded:
    """All frames of a sentence have come."""

    done: wire.CodecDone


@dataclass(frozen=True, slots=True)
class UtteranceFailed:
    """Nothing more of this utterance will be delivered; ``UtteranceEnded`` follows, or the end.

    Attributes:
        error: What went wrong.
        after_audio: What came before is good and is handed out first; else it is dropped.
    """

    error: CodecStreamError
    after_audio: bool = False


@dataclass(frozen=True, slots=True)
class UtteranceEnded:
    """The utterance is over and the connection is free for the next one.

    Attributes:
        cancelled: It ended because this side cancelled it.
        error: What makes it no success, or None.
    """

    cancelled: bool
    error: CodecStreamError | None


@dataclass(frozen=True, slots=True)
class Notice:
    """Something odd that was tolerated."""

    text: str


Event = (
    SentenceStarted
    | Frames
    | DecoderReset
    | SentenceEnded
    | UtteranceFailed
    | UtteranceEnded
    | Notice
)
