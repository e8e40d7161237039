"""A window decodes what the eager decoder makes of its real frames alone, whatever follows them."""

from __future__ import annotations

import numpy as np
import pytest
from support import SAMPLES, make_codes, worst_slice_db

torch = pytest.importorskip("torch")

from codecstream_export import EagerDecoder, StepDecoder  # noqa: E402
from codecstream_export import window as window_module  # noqa: E402
from codecstream_export.reference import eager_pcm  # noqa: E402
from codecstream_export.window import WindowDecoder, synthesis_reach_frames  # noqa: E402

MIN_SLICE_DB = 90.0
CONTEXT = 72


@pytest.fixture(scope="module")
def step(tiny_decoder: EagerDecoder) -> StepDecoder:
    return StepDecoder(tiny_decoder)


def run(window: WindowDecoder, real: np.ndarray, padding_seed: int = 0) -> np.ndarray:
    """Fill a window with ``real`` frames and random ones behind them."""
    frames = CONTEXT + window.frames
    codes = make_codes(frames, seed=100 + padding_seed)
    codes[: len(real)] = real
    with torch.inference_mode():
        pcm = window(torch.from_numpy(codes.T[None].copy()), torch.tensor([len(real)]))
    return pcm.numpy()


@pytest.mark.case(16)
@pytest.mark.parametrize("frames", [2, 25])
@pytest.mark.parametrize("real", [1, 2, 5, 11, 12, 13, 30, 73, 97])
def test_a_window_is_the_eager_decode_of_its_real_frames(
    step: StepDecoder, tiny_decoder: EagerDecoder, frames: int, real: int
) -> None:
    real = min(real, CONTEXT + frames)
    codes = make_codes(real)
    reference = eager_pcm(tiny_decoder, codes)
    first = max(real - frames, 0)
    pcm = run(WindowDecoder(step, CONTEXT, frames), codes)
    assert pcm.shape == (frames * SAMPLES,)
    heard = pcm[: (real - first) * SAMPLES]
    assert worst_slice_db(reference[first * SAMPLES :], heard) >= MIN_SLICE_DB


@pytest.mark.case(14)
@pytest.mark.parametrize("real", [1, 12, 60])
def test_what_stands_behind_the_real_frames_changes_no_bit(step: StepDecoder, real: int) -> None:
    window = WindowDecoder(step, CONTEXT, 4)
    codes = make_codes(real)
    heard = min(real, 4) * SAMPLES
    one, other = (run(window, codes, seed)[:heard] for seed in (1, 2))
    assert np.array_equal(one, other)


def test_convolutions_reach_back_ten_frames_and_not_fewer(
    step: StepDecoder, tiny_decoder: EagerDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand, in frames: 3 + 3/2 + 3/2 and 1/4 at the start, 78 columns and one per block."""
    by_hand = 6 / 2 + 6 / 4 + 6 / 4 + 1 / 4
    columns = 4
    for stride in (8, 5, 4, 3):
        columns *= stride
        by_hand += 78 / columns + 1 / columns
    assert synthesis_reach_frames(step) == int(np.ceil(by_hand)) == 10
    monkeypatch.setattr(window_module, "synthesis_reach_frames", lambda step: 7)
    codes = make_codes(60)
    pcm = run(WindowDecoder(step, CONTEXT, 2), codes)
    reference = eager_pcm(tiny_decoder, codes)[-len(pcm) :]
    assert worst_slice_db(reference, pcm) < MIN_SLICE_DB
