"""The listening checks' arithmetic; what the demo sounds like is in test_demo and benchmarks."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codecstream import MissingDependencyError
from codecstream_parity.listening import (
    heard_words,
    log_mel,
    log_mel_correlation,
    said_words,
    word_errors,
)


@pytest.mark.parametrize(
    ("said", "heard", "errors"),
    [
        ("", "", 0),
        ("a b c", "a b c", 0),
        ("a b c", "", 3),
        ("", "a b", 2),
        ("a b c", "a x c", 1),  # replaced
        ("a b c", "a c", 1),  # lost
        ("a c", "a b c", 1),  # added
        ("a b c d", "b c d e", 2),
        ("a b", "b a", 2),
    ],
)
def test_word_errors_by_hand(said: str, heard: str, errors: int) -> None:
    assert word_errors(said.split(), heard.split()) == errors


words = st.lists(st.sampled_from("abc"), max_size=7)


@given(words, words, words)
def test_word_errors_are_a_distance(a: list[str], b: list[str], c: list[str]) -> None:
    assert (word_errors(a, b) == 0) == (a == b)
    assert word_errors(a, b) == word_errors(b, a)
    assert word_errors(a, c) <= word_errors(a, b) + word_errors(b, c)
    assert abs(len(a) - len(b)) <= word_errors(a, b) <= max(len(a), len(b))


def test_words_have_no_case_and_no_punctuation() -> None:
    assert said_words("He wasn't, was HE?\nNo - 3.") == ["he", "wasn't", "was", "he", "no", "3"]


def test_a_tone_is_in_its_own_band() -> None:
    """1,000 Hz are 1,000 mel, of 3,265: band 24 of 80."""
    tone = np.sin(2 * np.pi * 1000 * np.arange(24_000) / 24_000).astype(np.float32)
    bands = log_mel(tone)
    assert bands.shape == (80, 90)
    top = 2595 * math.log10(1 + 12_000 / 700)
    centre = round(2595 * math.log10(1 + 1000 / 700) / top * 81) - 1
    assert set(bands.argmax(axis=0)) <= {centre - 1, centre, centre + 1}


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 1000), gain=st.floats(0.1, 2))
def test_a_gain_changes_no_correlation(seed: int, gain: float) -> None:
    pcm = np.random.default_rng(seed).standard_normal(9_600).astype(np.float32)
    assert log_mel_correlation(pcm, pcm) == pytest.approx(1)
    assert log_mel_correlation(pcm, np.float32(gain) * pcm) == pytest.approx(1, abs=1e-6)


def test_other_sound_is_not_alike() -> None:
    first, second = np.random.default_rng(0).standard_normal((2, 48_000)).astype(np.float32)
    assert abs(log_mel_correlation(first, second)) < 0.1
    assert log_mel_correlation(first, np.zeros_like(first)) == pytest.approx(0, abs=1e-9)
    near, far = (first + np.float32(gain) * second for gain in (0.1, 1))
    assert log_mel_correlation(first, near) > log_mel_correlation(first, far)


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="cannot compare"):
        log_mel_correlation(np.zeros(9, np.float32), np.zeros(8, np.float32))


def test_a_missing_recogniser_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pocketsphinx", None)
    with pytest.raises(MissingDependencyError, match="pip install pocketsphinx soxr"):
        heard_words(np.zeros(10, np.float32))
