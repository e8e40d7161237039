"""The numbers that tie codec frames to sound.

>>> from codecstream import CodecGeometry
>>> CodecGeometry().samples_per_frame
1920
>>> CodecGeometry(sample_rate_hz=44101)
Traceback (most recent call last):
    ...
ValueError: 44101 Hz is not a whole number of samples per frame at 12.5 frames per second
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

__all__ = ["ATTENTION_WINDOW_FRAMES", "QWEN3_TTS_12HZ", "CodecGeometry"]

QWEN3_TTS_12HZ = "qwen3_tts_tokenizer_v2_12hz"
"""``decoder_id`` of the codec whose geometry is the default, as talker servers announce it."""

ATTENTION_WINDOW_FRAMES = 72
"""``sliding_window`` of that codec's published decoder config."""


@dataclass(frozen=True, slots=True)
class CodecGeometry:
    """Rates and sizes of one codec; the defaults are the Qwen3-TTS 12 Hz tokenizer's.

    Attributes:
        codebooks: Code ids per frame (1 semantic and 15 acoustic).
        codebook_size: Ids run from 0 to ``codebook_size - 1``.
        frame_rate_hz: Frames per second of audio.
        sample_rate_hz: Samples per second of the decoded mono audio.
        samples_per_frame: Derived: samples that one frame becomes, exactly.

    Raises:
        ValueError: A value is not positive, or a frame is not a whole number of samples.
    """

    codebooks: int = 16
    codebook_size: int = 2048
    frame_rate_hz: float = 12.5
    sample_rate_hz: int = 24_000
    samples_per_frame: int = field(init=False)

    def __post_init__(self) -> None:
        for name in ("codebooks", "codebook_size", "frame_rate_hz", "sample_rate_hz"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive, not {value!r}")
            if name != "frame_rate_hz" and not isinstance(value, int):
                raise ValueError(f"{name} must be a whole number, not {value!r}")
        numerator, denominator = float(self.frame_rate_hz).as_integer_ratio()
        samples, rest = divmod(self.sample_rate_hz * denominator, numerator)
        if rest:
            raise ValueError(
                f"{self.sample_rate_hz} Hz is not a whole number of samples per frame "
                f"at {self.frame_rate_hz} frames per second"
            )
        object.__setattr__(self, "samples_per_frame", samples)

    def seconds(self, frames: int) -> float:
        """Return the duration of ``frames`` frames in seconds of audio."""
        return frames * self.samples_per_frame / self.sample_rate_hz
