"""Resampling chunk by chunk is resampling at once."""

from __future__ import annotations

import builtins
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codecstream import MissingDependencyError
from codecstream.resample import Resampler

soxr = pytest.importorskip("soxr", reason="needs: pip install 'codecstream[play]'")

RATE = 24_000
RATES = [8_000, 11_025, 16_000, 22_050, 32_000, 44_100, 47_998.7, 48_000, 96_000, 192_000]


@pytest.mark.case(45)
@settings(deadline=None)
@given(
    rate_hz=st.sampled_from(RATES),
    sizes=st.lists(st.integers(0, 6000), max_size=8),
    seed=st.integers(0, 2**32 - 1),
)
def test_case_45_any_chunking_gives_the_samples_of_one_piece(
    rate_hz: float, sizes: list[int], seed: int
) -> None:
    pcm = np.random.default_rng(seed).uniform(-0.5, 0.5, sum(sizes)).astype(np.float32)
    resampler = Resampler(RATE, rate_hz)
    pieces = [resampler.push(piece) for piece in np.split(pcm, np.cumsum(sizes)[:-1])]
    streamed = np.concatenate([*pieces, resampler.finish()])
    assert streamed.dtype == np.float32
    assert abs(streamed.size - pcm.size * rate_hz / RATE) <= 0.5 + 1e-6
    if streamed.size:
        whole = soxr.resample(pcm, RATE, rate_hz)
        worst_db = 20 * np.log10(np.abs(streamed - whole).max() / 0.5 + 1e-12)
        assert worst_db < -90


@pytest.mark.parametrize("rate_hz", RATES)
def test_a_tone_stays_the_tone(rate_hz: float) -> None:
    """Against the ideal samples: right pitch, level and phase from the first sample on."""
    tone = 0.5 * np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE)
    resampler = Resampler(RATE, rate_hz)
    heard = np.concatenate([resampler.push(tone.astype(np.float32)), resampler.finish()])
    ideal = 0.5 * np.sin(2 * np.pi * 440 * np.arange(heard.size) / rate_hz)
    middle = slice(heard.size // 10, -heard.size // 10)  # the tone starts and stops suddenly
    assert np.abs(heard - ideal)[middle].max() < 1e-4


@pytest.mark.parametrize("rate_hz", RATES)
@pytest.mark.parametrize("piece", [1, 100, 1920])
def test_no_more_is_held_back_than_is_said(rate_hz: float, piece: int) -> None:
    resampler = Resampler(RATE, rate_hz)
    out_s = 0.0
    for count in range(1, RATE // 3 // piece):
        out_s += resampler.push(np.zeros(piece, np.float32)).size / rate_hz
        assert count * piece / RATE - out_s <= resampler.hold_back_s + 1e-9
    assert resampler.hold_back_s < (0.048 if rate_hz > 16_000 - 1 else 0.08)


@pytest.mark.parametrize("ending", ["finish", "reset"])
def test_the_next_stream_knows_nothing_of_the_last(ending: str) -> None:
    pcm = np.random.default_rng(1).uniform(-0.5, 0.5, 2000).astype(np.float32)
    used, fresh = Resampler(RATE, 44_100), Resampler(RATE, 44_100)
    used.push(pcm[::-1])
    getattr(used, ending)()
    for resampler in (used, fresh):
        resampler.result = np.concatenate([resampler.push(pcm), resampler.finish()])  # type: ignore[attr-defined]
    assert np.array_equal(used.result, fresh.result)  # type: ignore[attr-defined]


def test_equal_rates_pass_the_very_samples_without_soxr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "soxr", None)
    resampler = Resampler(RATE, 24_000.0)
    pcm = np.random.default_rng(2).uniform(-1, 1, 100).astype(np.float32)
    assert np.array_equal(resampler.push(pcm), pcm)
    assert resampler.finish().size == 0 and resampler.hold_back_s == 0


def test_soxr_missing_is_said_with_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "soxr":
            raise ImportError("No module named 'soxr'")
        return real(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "soxr")
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingDependencyError, match=r"48000 Hz needs soxr.*codecstream\[play\]"):
        Resampler(RATE, 48_000)


@pytest.mark.parametrize("rates", [(0, 48_000), (24_000, -1), (24_000, float("nan"))])
def test_impossible_rates_are_refused(rates: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="above 0 Hz"):
        Resampler(*rates)
