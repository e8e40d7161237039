"""geometry, codes, schedule, pcm, wav, metrics and cpus: small, and everything rests on them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from support import GEOMETRY, make_codes

from codecstream import DEFAULT_RAMP, CodecGeometry, InvalidCodesError, OutputError, Ramp
from codecstream.codes import check_codes
from codecstream.cpus import usable_cpus
from codecstream.metrics import ChunkTime, Metrics, summarise
from codecstream.pcm import to_int16
from codecstream.wav import WavWriter, read_wav, write_wav

# geometry


def test_the_defaults_are_the_12_hz_tokenizer() -> None:
    geometry = CodecGeometry()
    assert (geometry.codebooks, geometry.codebook_size) == (16, 2048)
    assert (geometry.frame_rate_hz, geometry.sample_rate_hz) == (12.5, 24000)
    assert geometry.samples_per_frame == 1920
    assert geometry.seconds(0) == 0
    assert geometry.seconds(25) == 2.0


@pytest.mark.parametrize(
    ("rate_hz", "frames_hz", "samples"),
    [(48000, 12.5, 3840), (24000, 25, 960), (24000, 7.5, 3200), (22050, 21.533203125, 1024)],
)
def test_other_rates(rate_hz: int, frames_hz: float, samples: int) -> None:
    geometry = CodecGeometry(sample_rate_hz=rate_hz, frame_rate_hz=frames_hz)
    assert geometry.samples_per_frame == samples


@pytest.mark.parametrize("field", ["codebooks", "codebook_size", "frame_rate_hz", "sample_rate_hz"])
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_geometry_must_be_positive(field: str, value: float) -> None:
    changes: dict[str, Any] = {field: value}
    with pytest.raises(ValueError, match=f"{field} must be positive, not {value}"):
        CodecGeometry(**changes)


@pytest.mark.parametrize(("rate_hz", "frames_hz"), [(44100, 12.6), (24000, 11), (16000, 12)])
def test_a_frame_is_a_whole_number_of_samples(rate_hz: int, frames_hz: float) -> None:
    with pytest.raises(ValueError, match=f"{rate_hz} Hz is not a whole number .* {frames_hz}"):
        CodecGeometry(sample_rate_hz=rate_hz, frame_rate_hz=frames_hz)


def test_geometries_are_values() -> None:
    assert CodecGeometry() == CodecGeometry() != CodecGeometry(codebooks=8)
    with pytest.raises(AttributeError):
        CodecGeometry().codebooks = 8  # type: ignore[misc]


@pytest.mark.parametrize("changes", [{"frame_rate_hz": float("inf")}, {"codebooks": 16.5}])
def test_geometry_of_odd_numbers(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        CodecGeometry(**changes)


# codes


@pytest.mark.parametrize("dtype", ["u2", "i2", ">i2", "i4", "u8", "i8"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_codes_become_int64(dtype: str, order: Any) -> None:
    codes = make_codes(5)
    given_codes = np.array(codes, dtype, order=order)
    given_codes.setflags(write=False)
    checked = check_codes(given_codes, GEOMETRY)
    assert checked.dtype == np.int64
    assert checked.flags.c_contiguous
    assert checked.flags.writeable
    assert not np.shares_memory(checked, given_codes)
    assert np.array_equal(checked, codes)
    assert np.array_equal(check_codes(codes.tolist(), GEOMETRY), codes)
    assert np.array_equal(check_codes(np.repeat(codes, 2, axis=0)[::2], GEOMETRY), codes)


def test_checked_codes_are_the_callers_own() -> None:
    codes = make_codes(2)
    check_codes(codes, GEOMETRY)[:] = 0
    assert np.array_equal(codes, make_codes(2))


@pytest.mark.parametrize("value", [0, 1, 2047])
@pytest.mark.parametrize("frames", [0, 1, 3])
def test_every_id_of_the_codebook_is_a_code(frames: int, value: int) -> None:
    codes = np.full((frames, 16), value)
    assert np.array_equal(check_codes(codes, GEOMETRY), codes)


@pytest.mark.case(7)
@pytest.mark.parametrize("value", [2048, 2150, 32767, -1])
@pytest.mark.parametrize("codebook", [0, 15])
@pytest.mark.parametrize("seq", [None, 4])
def test_case_7_the_first_bad_code_is_named(seq: int | None, codebook: int, value: int) -> None:
    codes = make_codes(4)
    codes[2, codebook] = value
    codes[3] = -7
    with pytest.raises(InvalidCodesError) as caught:
        check_codes(codes, GEOMETRY, seq=seq)
    error = caught.value
    where = (error.seq, error.frame, error.codebook, error.value)
    assert where == (seq, 2, codebook, value)
    prefix = "" if seq is None else "packet 4: "
    assert str(error) == f"{prefix}frame 2, codebook {codebook}: id {value} is outside 0..2047"


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        (np.zeros((2, 16), np.float32), "integers, not float32"),
        (np.zeros((2, 16), bool), "integers, not bool"),
        (np.zeros((2, 8), int), r"\[frames, 16\], not \[2, 8\]"),
        (np.zeros(16, int), r"not \[16\]"),
        (np.zeros((1, 16, 2), int), r"not \[1, 16, 2\]"),
        (np.zeros((0, 8), int), r"not \[0, 8\]"),
        (None, "integers, not object"),
        (7, r"not \[\]"),
        ([[2**70] * 16], "integers, not object"),
    ],
)
def test_codes_of_a_wrong_kind(codes: Any, message: str) -> None:
    with pytest.raises(InvalidCodesError, match=message):
        check_codes(codes, GEOMETRY)


def test_ragged_codes() -> None:
    with pytest.raises(InvalidCodesError):
        check_codes([[1], [1, 2]], GEOMETRY)


# schedule


def test_default_ramp() -> None:
    assert DEFAULT_RAMP == Ramp().sizes == (2, 4, 8, 16, 25)
    assert [Ramp().size(i) for i in (0, 1, 4, 5, 1000)] == [2, 4, 25, 25, 25]


@pytest.mark.parametrize(
    ("frames", "sizes"),
    [
        (0, []),
        (1, [1]),
        (2, [2]),
        (3, [2, 1]),
        (55, [2, 4, 8, 16, 25]),
        (81, [2, 4, 8, 16, 25, 25, 1]),
    ],
)
def test_split(frames: int, sizes: list[int]) -> None:
    assert Ramp().split(frames) == sizes


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(0, 300))
def test_split_keeps_every_frame(sizes: list[int], frames: int) -> None:
    ramp = Ramp(tuple(sizes))
    parts = ramp.split(frames)
    assert sum(parts) == frames
    assert parts[:-1] == [ramp.size(i) for i in range(len(parts) - 1)]
    assert not parts or 1 <= parts[-1] <= ramp.size(len(parts) - 1)


@pytest.mark.parametrize(
    "sizes", [(), (0,), (2, -1), (2, 2.0), (True,), ("2",), (2, None)], ids=repr
)
def test_schedules_that_are_none(sizes: Any) -> None:
    with pytest.raises(ValueError, match="positive whole numbers of frames"):
        Ramp(sizes)


def test_ramp_of() -> None:
    ramp = Ramp((1, 3))
    assert Ramp.of(ramp) is ramp
    assert Ramp.of([1, 3]) == Ramp.of(iter((1, 3))) == ramp


@pytest.mark.case(48)
@pytest.mark.parametrize(
    ("pace", "delay_ms"),
    [(1e-6, 0), (0.1, 0), (0.3, 0), (0.5, 0), (0.6, 224), (0.8, 992), (1.0, 1840)],
)
def test_case_48_start_delay(pace: float, delay_ms: float) -> None:
    frames = Ramp((2, 4, 8, 16, 25)).start_delay_frames(pace)
    assert frames * 80 == pytest.approx(delay_ms, abs=1e-9)
    assert frames >= 0


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=6),
    st.floats(0.01, 1.0),
    st.integers(1, 300),
)
def test_a_player_that_starts_that_late_never_runs_dry(
    sizes: list[int], pace: float, frames: int
) -> None:
    """Each chunk is there when the frames before it have been played; and no later start helps."""
    ramp = Ramp(tuple(sizes))
    starts = ramp.sizes[0] * pace + ramp.start_delay_frames(pace)
    slack = []
    received = 0
    for size in ramp.split(frames):
        slack.append(starts + received - (received + size) * pace)
        received += size
    assert min(slack) > -1e-9
    if frames >= sum(sizes):
        assert min(slack) < 1e-9


@pytest.mark.parametrize("pace", [0, -0.5, 1.0001, float("nan"), float("inf")])
def test_no_start_delay_is_enough(pace: float) -> None:
    with pytest.raises(ValueError, match=f"pace {pace}"):
        Ramp().start_delay_frames(pace)


# pcm


@pytest.mark.case(22)
def test_case_22_loud_samples_are_clipped_and_do_not_wrap() -> None:
    pcm = np.array([1.0, -1.0, 1.0001, -1.5, 3.0, 0.99999, 0.0], np.float32)
    samples = to_int16(pcm)
    assert samples.dtype == np.int16
    assert samples.tolist() == [32767, -32767, 32767, -32768, 32767, 32767, 0]


@given(st.floats(-4, 4, width=32))
def test_int16_is_the_nearest(value: float) -> None:
    expected = min(32767.0, max(-32768.0, value * 32767))
    (sample,) = to_int16(np.array([value], np.float32))
    assert abs(float(sample) - expected) <= 0.51


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("count", [1, 1920])
def test_case_21_no_sound_of_nan_or_inf(value: float, count: int) -> None:
    pcm = np.zeros(1920, np.float32)
    pcm[-count:] = value
    with pytest.raises(OutputError, match="NaN or Inf"):
        to_int16(pcm)


@pytest.mark.parametrize("shape", [(0,), (3, 2), ()])
def test_int16_of_any_shape(shape: tuple[int, ...]) -> None:
    assert to_int16(np.zeros(shape, np.float32)).shape == shape


def test_int16_of_a_huge_sample() -> None:
    assert to_int16(np.array([3e38], np.float32)).tolist() == [32767]


# wav


def tone(samples: int) -> NDArray[np.float32]:
    return (0.5 * np.sin(np.arange(samples) / 9)).astype(np.float32)


@pytest.mark.case(22)
def test_wav_round_trip(tmp_path: Path) -> None:
    """Case 22: the file holds what ``to_int16`` makes, at any chunking."""
    pcm = np.concatenate([tone(4000), np.array([1.0, -1.0, 3.0, -1.5], np.float32)])
    with WavWriter(tmp_path / "a.wav", sample_rate_hz=24000) as writer:
        for start in range(0, len(pcm), 999):
            writer.write(pcm[start : start + 999])
        writer.write(pcm[:0])
    write_wav(str(tmp_path / "b.wav"), pcm, 24000)
    assert (tmp_path / "a.wav").read_bytes() == (tmp_path / "b.wav").read_bytes()

    with wave.open(str(tmp_path / "a.wav")) as file:
        assert file.getparams()[:4] == (1, 2, 24000, len(pcm))
        assert file.readframes(len(pcm)) == to_int16(pcm).astype("<i2").tobytes()
    read, rate_hz = read_wav(tmp_path / "a.wav")
    assert read.dtype == np.float32
    assert (read.shape, rate_hz) == (pcm.shape, 24000)
    assert np.array_equal(to_int16(read), to_int16(pcm))
    assert np.abs(read[:4000] - pcm[:4000]).max() < 0.5001 / 32767


def test_wav_without_samples(tmp_path: Path) -> None:
    WavWriter(tmp_path / "a.wav", 24000).close()
    pcm, rate_hz = read_wav(tmp_path / "a.wav")
    assert (pcm.shape, rate_hz) == ((0,), 24000)


def test_wav_keeps_what_came_before_a_failure(tmp_path: Path) -> None:
    with (
        pytest.raises(OutputError),
        WavWriter(tmp_path / "a.wav", 24000) as writer,
    ):
        writer.write(tone(100))
        writer.write(np.array([np.nan], np.float32))
    writer.close()  # a second time
    assert len(read_wav(tmp_path / "a.wav")[0]) == 100


@pytest.mark.parametrize("content", [b"", b"RIFF", b"no sound at all, but long enough" * 9])
def test_files_that_are_no_wav(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.wav"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.wav is not a WAV file"):
        read_wav(path)


@pytest.mark.parametrize(("channels", "width"), [(2, 2), (1, 1), (1, 3)])
def test_other_kinds_of_wav(tmp_path: Path, channels: int, width: int) -> None:
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setparams((channels, width, 24000, 0, "NONE", "not compressed"))
        file.writeframes(bytes(12))
    with pytest.raises(ValueError, match=f"found {8 * width}-bit with {channels} channels"):
        read_wav(tmp_path / "a.wav")


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="a fault of older Pythons")
def test_a_wav_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unraisable: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    with pytest.raises(FileNotFoundError):
        WavWriter(tmp_path / "no folder" / "a.wav", 24000)
    assert unraisable == []


# metrics


def test_nothing_decoded_has_no_figures() -> None:
    assert summarise([], 24000) == summarise([ChunkTime(100, 0, 5)], 24000) == Metrics()


def test_metrics_by_hand() -> None:
    """Chunks of 160, 320 and 80 ms.

    A player that starts at 200 ms is dry at 360 and waits 140 for the second chunk; it is dry
    again at 820, after the third chunk has come. Without any wait the second chunk must be there
    160 ms after the start: it starts at 340.
    """
    chunks = [
        ChunkTime(t_ms=150, samples=0, decode_ms=99),  # no audio: no chunk
        ChunkTime(t_ms=200, samples=3840, decode_ms=10),
        ChunkTime(t_ms=500, samples=7680, decode_ms=20),
        ChunkTime(t_ms=700, samples=1920, decode_ms=26),
        ChunkTime(t_ms=9999, samples=0),
    ]
    figures = summarise(iter(chunks), 24000)
    assert (figures.ttfa_ms, figures.playback_start_ms) == (200, 340)
    assert figures.stall_at_ttfa_ms == 140
    assert figures.audio_s == pytest.approx(0.56)
    assert figures.total_s == 0.7
    assert figures.rtf == pytest.approx(0.7 / 0.56)
    assert figures.decode_ms_total == 56
    assert figures.decode_rtf == pytest.approx(0.1)


def test_a_stall_shifts_what_follows() -> None:
    """Three chunks of 80 ms at 0, 100 and 250: silences of 20 and 70 ms, not of 20 and 90."""
    chunks = [ChunkTime(t, 1920) for t in (0.0, 100.0, 250.0)]
    figures = summarise(chunks, 24000)
    assert figures.stall_at_ttfa_ms == pytest.approx(20 + 70)
    assert figures.playback_start_ms == pytest.approx(250 - 160)


def test_the_first_chunk_may_be_all() -> None:
    figures = summarise([ChunkTime(300, 24000)], 24000)
    assert (figures.playback_start_ms, figures.stall_at_ttfa_ms) == (300, 0)
    assert (figures.rtf, figures.decode_rtf) == (0.3, 0)


@pytest.mark.case(48)
@pytest.mark.parametrize("pace", [0.4, 0.5, 0.6, 0.8, 1.0])
def test_case_48_metrics_and_schedule_agree(pace: float) -> None:
    ramp, received, chunks = Ramp(), 0, []
    for size in ramp.split(200):
        received += size
        chunks.append(ChunkTime(received * 80 * pace, size * 1920))
    figures = summarise(chunks, 24000)
    assert figures.ttfa_ms is not None
    assert figures.playback_start_ms is not None
    delay_ms = ramp.start_delay_frames(pace) * 80
    assert figures.playback_start_ms - figures.ttfa_ms == pytest.approx(delay_ms)
    assert figures.stall_at_ttfa_ms == pytest.approx(delay_ms)


# cpus


@pytest.fixture
def sixty_four_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)


def make_files(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(content)
    return root


def version_1(quota_us: str, period_us: str = "100000") -> dict[str, str]:
    return {"cpu/cpu.cfs_quota_us": f"{quota_us}\n", "cpu/cpu.cfs_period_us": f"{period_us}\n"}


@pytest.mark.usefixtures("sixty_four_cpus")
@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 64),
        ({"cpu.max": "max 100000\n"}, 64),
        ({"cpu.max": "200000 100000\n"}, 2),
        ({"cpu.max": "350000 100000\n"}, 3),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "6400000 50000\n"}, 64),
        ({"cpu.max": "", **version_1("300000")}, 3),
        (version_1("-1"), 64),
        (version_1("150000"), 1),
        (version_1("400000"), 4),
        (version_1("10000"), 1),
        (version_1("400000", "0"), 64),
        ({"cpu/cpu.cfs_quota_us": "400000\n"}, 64),
        ({"cpu.max": "nonsense"}, 64),
        ({"cpu.max": "100000 100000", **version_1("800000")}, 1),
    ],
)
def test_quota(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert usable_cpus(make_files(tmp_path, files)) == expected


def test_affinity_counts_below_a_larger_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 5, 6}, raising=False)
    assert usable_cpus(make_files(tmp_path, {"cpu.max": "800000 100000"})) == 3


@pytest.mark.parametrize(("counted", "expected"), [(4, 4), (None, 1)])
def test_without_affinity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: int | None, expected: int
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: counted)
    assert usable_cpus(tmp_path) == expected


@pytest.mark.skipif(shutil.which("taskset") is None, reason="needs taskset")
def test_a_process_pinned_to_one_cpu() -> None:
    cpu = min(os.sched_getaffinity(0))
    program = "from codecstream.cpus import usable_cpus; print(usable_cpus())"
    command = ["taskset", "-c", str(cpu), sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["1"]
