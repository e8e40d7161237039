"""Windowed programs: each chunk is the eager decode of its window, from the first frame on.

First with windows that write the number of each frame into its samples, then with the tiny
decoder's in every runtime.
"""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from artifacts import CONTEXT, RECIPES, Reference, Store, skip_or_fail, window_chunks
from conftest import PACKAGES
from numpy.typing import NDArray
from support import SAMPLES, decode, make_codes, worst_slice_db

import codecstream
from codecstream import InvalidCodesError, Program, StreamDecoder
from codecstream.manifest import Manifest
from codecstream.runtimes.windowed import WindowedProgram
from codecstream_parity import snr_db

Pcm = NDArray[np.float32]
Codes = NDArray[np.int64]

MIN_SLICE_DB = 90.0
SIZES = (2, 5, 25)

# Windows that tell


class Teller:
    """A window whose samples are code 0 of their frame; what is not real is NaN."""

    def __init__(self, frames: int) -> None:
        self.frames = frames
        self.calls: list[Codes] = []  # real frames of each call, [frames, codebooks]
        self._buffer = np.empty(frames * SAMPLES, np.float32)  # the same one for all calls

    def __call__(self, codes: Codes, frames_real: NDArray[np.int64]) -> Pcm:
        assert codes.shape == (1, 16, CONTEXT + self.frames) and codes.dtype == np.int64
        assert codes.flags.c_contiguous
        assert frames_real.shape == (1,) and frames_real.dtype == np.int64
        assert codes.min() >= 0 and codes.max() < 2048  # padding too goes to a table
        real = int(frames_real[0])
        assert 1 <= real <= codes.shape[2]
        self.calls.append(codes[0, :, :real].T.copy())
        first = max(real - self.frames, 0)
        told = np.full(self.frames, np.nan, np.float32)
        told[: real - first] = codes[0, 0, first:real] / 2048
        self._buffer[:] = np.repeat(told, SAMPLES)
        return self._buffer


def windowed_manifest() -> Manifest:
    document: dict[str, Any] = {
        "runtime": "onnx",
        "precision": "fp32",
        "mode": "windowed",
        "decoder_id": "test",
        "geometry": {
            "codebooks": 16,
            "codebook_size": 2048,
            "frame_rate_hz": 12.5,
            "sample_rate_hz": 24000,
            "samples_per_frame": SAMPLES,
        },
        "frames": {"max": max(SIZES)},
        "ramp": SIZES,
        "context": CONTEXT,
        "windows": [{"frames": n, "program": "x"} for n in SIZES],
        "inputs": [
            {"name": "codes", "dtype": "int64", "shape": [1, 16, "context + frames"]},
            {"name": "frames_real", "dtype": "int64", "shape": [1]},
        ],
        "outputs": [{"name": "pcm", "dtype": "float32", "shape": ["1920 * frames"]}],
        "state": [],
        "files": {},
        "made_with": {},
    }
    return msgspec.convert(document, Manifest)


@pytest.fixture
def tellers() -> dict[int, Teller]:
    return {size: Teller(size) for size in (25, 2, 5)}


@pytest.fixture
def telling(tellers: dict[int, Teller]) -> WindowedProgram:
    return WindowedProgram(windowed_manifest(), tellers)


def numbered(frames: int) -> Codes:
    codes = make_codes(frames)
    codes[:, 0] = np.arange(frames) % 2048
    return codes


def told(pcm: Pcm) -> list[int]:
    """Return the number that each frame has in all of its samples."""
    by_frame = pcm.reshape(-1, SAMPLES)
    assert (by_frame == by_frame[:, :1]).all()  # so trims are whole frames; NaN fails too
    return [round(float(value) * 2048) for value in by_frame[:, 0]]


@pytest.mark.case(12)
@pytest.mark.case(15)
@pytest.mark.parametrize("schedule", ["ramp", "ones", "random", "every size"])
@pytest.mark.parametrize("frames", [1, 2, 3, 26, 71, 72, 73, 74, 98, 300])
def test_every_frame_is_heard_once_in_its_place(
    telling: WindowedProgram, frames: int, schedule: str
) -> None:
    source = random.Random(frames)
    sizes = {
        "ramp": [2, 5, 25],
        "ones": [1],
        "random": [source.randint(1, 25) for _ in range(frames)],
        "every size": list(range(1, 26)),
    }[schedule]
    assert told(decode(telling, numbered(frames), schedule=sizes)) == list(range(frames))


def test_a_chunk_goes_through_the_smallest_window_that_holds_it(
    telling: WindowedProgram, tellers: dict[int, Teller]
) -> None:
    state = telling.initial_state()
    for frames in range(1, 26):
        telling.step(numbered(frames), state)
    assert {size: len(teller.calls) for size, teller in tellers.items()} == {2: 2, 5: 3, 25: 20}


def test_a_window_sees_the_newest_frames_in_order_and_no_invented_ones(
    telling: WindowedProgram, tellers: dict[int, Teller]
) -> None:
    codes = numbered(200)
    list(StreamDecoder(telling, (5,)).push(codes))
    assert len(tellers[5].calls) == 40
    for i, real in enumerate(tellers[5].calls):
        end = 5 * (i + 1)
        assert np.array_equal(real, codes[max(0, end - 5 - CONTEXT) : end])


def test_windows_hand_out_arrays_that_never_change(telling: WindowedProgram) -> None:
    codes = numbered(60)
    parts = list(StreamDecoder(telling, (5,)).push(codes))
    assert told(np.concatenate(parts)) == list(range(60))
    assert not any(np.shares_memory(a, b) for a in parts for b in parts if a is not b)
    assert all(part.flags.writeable and part.flags.owndata for part in parts)


def test_a_state_of_windows_is_left_as_it_is(telling: WindowedProgram) -> None:
    codes = numbered(200)
    _, state = telling.step(codes[:25], telling.initial_state())
    kept = state.copy()
    first, after = telling.step(codes[25:50], state)
    codes[:] = 7  # the caller's buffer is the caller's
    assert np.array_equal(state, kept)
    again, _ = telling.step(numbered(50)[25:], state)
    assert np.array_equal(first, again)
    assert told(first) == list(range(25, 50))
    assert len(after) == 50 and not np.shares_memory(after, state)


@pytest.mark.case(18)
def test_the_state_of_windows_stops_growing(telling: WindowedProgram) -> None:
    state = telling.initial_state()
    codes = numbered(25)
    lengths = []
    for _ in range(400):
        _, state = telling.step(codes, state)
        lengths.append(len(state))
    assert lengths[:4] == [25, 50, CONTEXT, CONTEXT] and set(lengths[3:]) == {CONTEXT}
    assert state.base is None  # no view into something that grows


@pytest.mark.case(38)
def test_windows_refuse_what_they_were_not_made_for(
    telling: WindowedProgram, tellers: dict[int, Teller]
) -> None:
    codes = numbered(40)
    for wrong in (codes[:26], codes[:0], codes[:5].T, codes[:5, :8], codes[:5].astype(np.int32)):
        with pytest.raises(InvalidCodesError):
            telling.step(wrong, telling.initial_state())
    with pytest.raises(InvalidCodesError, match="takes 1 to 25 frames, not 26"):
        telling.step(codes[:26], telling.initial_state())
    assert not any(teller.calls for teller in tellers.values())
    with pytest.raises(ValueError, match="at most 25"):
        StreamDecoder(telling, (26,))


@pytest.mark.case(4)
def test_priming_a_windowed_stream_is_history(
    telling: WindowedProgram, tellers: dict[int, Teller]
) -> None:
    codes = numbered(140)
    decoder = StreamDecoder(telling, (5,))
    decoder.prime(codes[:100])
    tellers[5].calls.clear()
    parts = [*decoder.push(codes[100:]), *decoder.finish()]
    assert told(np.concatenate(parts)) == list(range(100, 140))
    assert np.array_equal(tellers[5].calls[0], codes[28:105])


# The tiny decoder's


WINDOWED = [name for name, recipe in RECIPES.items() if recipe.mode == "windowed"]


@pytest.fixture(scope="module", params=WINDOWED)
def name(request: pytest.FixtureRequest) -> str:
    windowed: str = request.param
    runtime = RECIPES[windowed].runtime
    if not any(importlib.util.find_spec(package) for package in PACKAGES[runtime]):
        skip_or_fail(runtime, f"none of {', '.join(PACKAGES[runtime])} is installed")
    return windowed


@pytest.fixture(scope="module")
def windowed(name: str, store: Store) -> Program:
    return codecstream.load_program(store.artifact(name), threads=1)


@pytest.fixture(scope="module")
def same_windows(name: str, store: Store) -> Reference:
    """What the eager decoder makes of the same windows."""
    return store.reference("windows", RECIPES[name].layers)


def exact(reference: Pcm, output: Pcm) -> bool:
    return worst_slice_db(reference[: len(output)], output) >= MIN_SLICE_DB


@pytest.mark.case(39)
@pytest.mark.case(40)
def test_every_chunk_is_the_eager_decode_of_its_window(
    windowed: Program, same_windows: Reference
) -> None:
    """A cold start, and chunks of every size in random order."""
    pcm = decode(windowed, same_windows.codes, schedule=window_chunks())
    assert len(pcm) == len(same_windows.pcm)
    assert exact(same_windows.pcm, pcm)


@pytest.mark.case(16)
@pytest.mark.parametrize("frames", [1, 2, 5, 6, 13, 14, 30, 55, 72])
def test_a_stream_that_fits_a_window_is_exact_from_its_first_sample(
    windowed: Program, same_windows: Reference, name: str, store: Store, frames: int
) -> None:
    if RECIPES[name].layers == 8:
        reference = store.reference("whole")
    else:  # the first chunks of its windows hold all there is
        frames = min(frames, 30)
        reference = same_windows
    for schedule in ([2, 5, 25], [1], [25]):
        pcm = decode(windowed, reference.codes[:frames], schedule=schedule)
        assert len(pcm) == frames * SAMPLES
        onset = slice(0, 2 * SAMPLES)  # 160 ms
        assert snr_db(reference.pcm[: len(pcm)][onset], pcm[onset]) >= MIN_SLICE_DB
        assert exact(reference.pcm, pcm)


@pytest.mark.case(14)
@pytest.mark.parametrize("real", [1, 12, 60])
def test_what_stands_behind_the_real_frames_changes_no_bit(windowed: Any, real: int) -> None:
    heard: list[Pcm] = []
    size, call = max(windowed._calls.items())
    for padding in (0, 1, 2047, None):
        codes = make_codes(CONTEXT + size, seed=9)
        if padding is not None:
            codes[real:] = padding
        codes[:real] = make_codes(real, seed=1)
        pcm = call(np.ascontiguousarray(codes.T[None]), np.array([real], np.int64))
        heard.append(pcm[: min(real, size) * SAMPLES])
    assert all(np.array_equal(heard[0], other) for other in heard[1:])


@pytest.mark.case(19)
def test_reset_and_sharing_of_windows_are_bit_for_bit(windowed: Program) -> None:
    one, other = make_codes(120, seed=1), make_codes(120, seed=2)
    alone = decode(windowed, one), decode(windowed, other)
    decoder, second = StreamDecoder(windowed), StreamDecoder(windowed)
    parts: tuple[list[Pcm], list[Pcm]] = ([], [])
    for start in range(0, 120, 10):
        parts[0].extend(decoder.push(one[start : start + 10]))
        parts[1].extend(second.push(other[start : start + 10]))
    parts[0].extend(decoder.finish())
    parts[1].extend(second.finish())
    for joined, solo in zip(parts, alone, strict=True):
        assert np.array_equal(np.concatenate(joined), solo)
    decoder.reset()
    assert np.array_equal(np.concatenate([*decoder.push(one), *decoder.finish()]), alone[0])


def seam_metric(pcm: Pcm) -> NDArray[np.float64]:
    """Return the step to each sample from the one before, over the RMS of 20 ms around it."""
    signal = pcm.astype(np.float64)
    power = np.convolve(signal**2, np.ones(480) / 480, mode="same")
    steps = np.abs(np.diff(signal, prepend=signal[0]))
    ratio: NDArray[np.float64] = steps / np.sqrt(power)
    return ratio


def worst_seam(pcm: Pcm, chunk_frames: int) -> float:
    """Return the largest step at a seam, as a multiple of what is usual away from seams."""
    metric = seam_metric(pcm)
    seams = np.arange(chunk_frames * SAMPLES, len(pcm), chunk_frames * SAMPLES)
    usual = np.delete(metric, seams)
    return float(metric[seams].max() / np.percentile(usual, 99))


@pytest.mark.case(15)
def test_seams_of_windows_are_not_heard(windowed: Program) -> None:
    pcm = decode(windowed, make_codes(300), schedule=[25])
    assert worst_seam(pcm, 25) <= 1.5
    pcm[150 * SAMPLES] += 8 * pcm.std()  # the measure does notice a click
    assert worst_seam(pcm, 25) > 1.5


def test_the_artifact_says_that_it_approximates(name: str, store: Store) -> None:
    folder: Path = store.artifact(name)
    manifest = msgspec.json.decode((folder / "manifest.json").read_bytes())
    assert (manifest["mode"], manifest["context"], manifest["state"]) == ("windowed", 72, [])
    assert manifest["frames"]["max"] == max(w["frames"] for w in manifest["windows"])
    approximation = manifest["parity"]["ramp, approximation"]
    assert approximation["min_snr_db"] is None
    for order in ("ramp", "random"):
        assert manifest["parity"][order]["snr_db"] >= 90.0
