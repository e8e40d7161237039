"""Listening checks that need no person: what a recogniser hears, and how alike spectra look.

They say whether speech can still be understood, which SNR does not, and nothing finer: what is
exact is a matter of :mod:`codecstream_parity.report`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from codecstream.errors import MissingDependencyError

__all__ = ["heard_words", "log_mel", "log_mel_correlation", "said_words", "word_errors"]

FFT_SAMPLES, HOP_SAMPLES, BANDS = 1024, 256, 80  # 43 ms and 11 ms at 24 kHz
MIN_POWER = 1e-10
RECOGNISER_HZ = 16_000


def said_words(text: str) -> list[str]:
    """Return the words of a text as a recogniser spells them: no case, no punctuation."""
    kept = "".join(c for c in text.lower() if c.isalnum() or c == "'" or c.isspace())
    return kept.split()


def heard_words(pcm: NDArray[np.float32], sample_rate_hz: int = 24_000) -> list[str]:
    """Return what the recogniser of ``pocketsphinx`` hears in float32 ``[samples]``.

    Raises:
        MissingDependencyError: pocketsphinx or soxr is not installed.
    """
    try:
        import pocketsphinx
        import soxr
    except ImportError as error:
        raise MissingDependencyError(
            f"the recogniser is not installed ({error}): pip install pocketsphinx soxr"
        ) from error
    recogniser = pocketsphinx.Decoder(samprate=RECOGNISER_HZ, loglevel="FATAL")
    samples = soxr.resample(pcm, sample_rate_hz, RECOGNISER_HZ)
    recogniser.start_utt()
    recogniser.process_raw((samples.clip(-1, 1) * 32767).astype("<i2").tobytes(), full_utt=True)
    recogniser.end_utt()
    heard = recogniser.hyp()
    return [] if heard is None else heard.hypstr.split()


def word_errors(said: Sequence[str], heard: Sequence[str]) -> int:
    """Return how many words must be replaced, added or taken away to make one of the other."""
    row = list(range(len(heard) + 1))
    for i, word in enumerate(said, start=1):
        previous, row = row, [i]
        for j, other in enumerate(heard, start=1):
            row.append(min(previous[j] + 1, row[j - 1] + 1, previous[j - 1] + (word != other)))
    return row[-1]


def log_mel(pcm: NDArray[np.float32], sample_rate_hz: int = 24_000) -> NDArray[np.float64]:
    """Return the logarithm of the power in 80 mel bands, float64 ``[80, columns]``."""
    padded = np.pad(pcm.astype(np.float64), (0, max(0, FFT_SAMPLES - pcm.size)))
    frames = np.lib.stride_tricks.sliding_window_view(padded, FFT_SAMPLES)[::HOP_SAMPLES]
    window = np.hanning(FFT_SAMPLES + 1)[:-1]
    power = np.abs(np.fft.rfft(frames * window, axis=1)) ** 2
    bands: NDArray[np.float64] = np.log(_mel_filters(sample_rate_hz) @ power.T + MIN_POWER)
    return bands


def log_mel_correlation(
    reference: NDArray[np.float32], output: NDArray[np.float32], sample_rate_hz: int = 24_000
) -> float:
    """Return how alike two log-mel spectrograms are: Pearson's correlation, 1 for equal ones.

    Each band's mean is taken out first, so that the shape of an average spectrum, which all speech
    has, counts nothing.

    Raises:
        ValueError: The lengths differ.
    """
    if reference.shape != output.shape:
        raise ValueError(f"cannot compare {reference.shape} with {output.shape} samples")
    first, second = (log_mel(pcm, sample_rate_hz) for pcm in (reference, output))
    first, second = (bands - bands.mean(axis=1, keepdims=True) for bands in (first, second))
    energy = np.sqrt((first**2).sum() * (second**2).sum())
    return float((first * second).sum() / energy) if energy else 0.0


def _mel_filters(sample_rate_hz: int) -> NDArray[np.float64]:
    """Return triangles that are even on the mel scale, ``2595 log10(1 + f / 700)``."""
    top = 2595 * np.log10(1 + sample_rate_hz / 2 / 700)
    edges_hz = 700 * (10 ** (np.linspace(0, top, BANDS + 2) / 2595) - 1)
    bins_hz = np.fft.rfftfreq(FFT_SAMPLES, 1 / sample_rate_hz)
    low, centre, high = (edges_hz[i : BANDS + i, None] for i in range(3))
    rising, falling = (bins_hz - low) / (centre - low), (high - bins_hz) / (high - centre)
    filters: NDArray[np.float64] = np.maximum(0, np.minimum(rising, falling))
    return filters
