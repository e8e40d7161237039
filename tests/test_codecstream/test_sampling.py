"""Utterances that a device keeps of itself: which, in what form, and at no cost to speech."""

from __future__ import annotations

import io
import json
import logging
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import LedgerProgram, expected_ledger, make_codes

import codecstream
from codecstream import ArtifactError, OutputError, StreamDecoder
from codecstream.sampling import SUFFIX, UtteranceSampler, find_samples, read_sample

CODES = make_codes(20)


def speak(decoder: StreamDecoder, codes: np.ndarray = CODES) -> np.ndarray:
    parts = [*decoder.push(codes), *decoder.finish()]
    decoder.reset()
    return np.concatenate(parts)


def test_an_utterance_is_kept_as_it_was_heard(tmp_path: Path) -> None:
    decoder = StreamDecoder(LedgerProgram(), (2, 4, 8), sampler=UtteranceSampler(tmp_path))
    heard = speak(decoder)
    (path,) = find_samples(tmp_path)
    sample = read_sample(path)
    assert np.array_equal(sample.codes, CODES)
    assert np.array_equal(sample.pcm, heard)
    assert np.array_equal(sample.pcm, expected_ledger(CODES))
    assert sample.chunks == (2, 4, 8, 6)
    assert sample.primed.shape == (0, 16)
    assert sample.about["complete"] is True
    assert sample.about["decoder_id"] == "qwen3_tts_tokenizer_v2_12hz"
    assert sample.about["sample_rate_hz"] == 24_000
    assert path.name == sample.name + SUFFIX


def test_what_the_artifact_says_is_kept(tiny_artifact: Path, tmp_path: Path) -> None:
    program = codecstream.load_program(tiny_artifact, threads=1, warmup=False)
    speak(StreamDecoder(program, sampler=UtteranceSampler(tmp_path)))
    about = read_sample(*find_samples(tmp_path)).about
    assert (about["runtime"], about["precision"], about["mode"]) == ("onnx", "fp32", "stateful")
    assert len(about["weights_sha256"]) == 64
    assert about["made_with"]["codecstream"] == codecstream.__version__


@settings(deadline=None, max_examples=20)
@given(every=st.integers(1, 7), utterances=st.integers(0, 20))
def test_every_nth_is_kept_from_the_first_on(
    tmp_path_factory: pytest.TempPathFactory, every: int, utterances: int
) -> None:
    """Counted over all decoders: a client makes a new one for each utterance."""
    folder = tmp_path_factory.mktemp("samples")
    sampler = UtteranceSampler(folder, every=every)
    for index in range(utterances):
        codes = CODES.copy()
        codes[:, 0] = index
        speak(StreamDecoder(LedgerProgram(), sampler=sampler), codes)
    kept = [int(read_sample(path).codes[0, 0]) for path in find_samples(folder)]
    assert kept == list(range(0, utterances, every))
    assert sampler.written == len(kept)


def test_a_cancelled_utterance_is_kept_as_far_as_it_was_heard(tmp_path: Path) -> None:
    decoder = StreamDecoder(LedgerProgram(), (2,), sampler=UtteranceSampler(tmp_path))
    heard = next(iter(decoder.push(CODES)))
    decoder.reset()
    sample = read_sample(*find_samples(tmp_path))
    assert np.array_equal(sample.pcm, heard)
    assert sample.about["complete"] is False


def test_frames_that_primed_the_state_are_kept(tmp_path: Path) -> None:
    decoder = StreamDecoder(LedgerProgram(), sampler=UtteranceSampler(tmp_path))
    primed = make_codes(7, seed=1)
    decoder.prime(primed[:3])
    decoder.prime(primed[3:])
    speak(decoder)
    sample = read_sample(*find_samples(tmp_path))
    assert np.array_equal(sample.primed, primed)
    assert np.array_equal(sample.codes, CODES)


def test_an_utterance_without_sound_is_not_kept(tmp_path: Path) -> None:
    sampler = UtteranceSampler(tmp_path, every=1)
    decoder = StreamDecoder(LedgerProgram(), sampler=sampler)
    decoder.prime(CODES)
    decoder.reset()
    assert list(decoder.finish()) == []
    decoder.reset()
    decoder.reset()
    assert find_samples(tmp_path) == []


def test_finish_twice_writes_once(tmp_path: Path) -> None:
    decoder = StreamDecoder(LedgerProgram(), sampler=UtteranceSampler(tmp_path, every=1))
    list(decoder.push(CODES))
    list(decoder.finish())
    list(decoder.finish())
    decoder.reset()
    assert len(find_samples(tmp_path)) == 1


def test_the_caller_may_change_what_it_was_given(tmp_path: Path) -> None:
    decoder = StreamDecoder(LedgerProgram(), sampler=UtteranceSampler(tmp_path))
    for pcm in [*decoder.push(CODES), *decoder.finish()]:
        pcm[:] = 0
    assert np.array_equal(read_sample(*find_samples(tmp_path)).pcm, expected_ledger(CODES))


def test_a_chunk_that_fails_is_not_in_it(tmp_path: Path) -> None:
    class FailsOnce(LedgerProgram):
        failures = 1

        def step(self, codes: Any, state: int) -> Any:
            pcm, after = super().step(codes, state)
            if len(codes) == 4 and self.failures:
                self.failures = 0
                pcm[0] = np.nan
            return pcm, after

    decoder = StreamDecoder(FailsOnce(), (2, 4), sampler=UtteranceSampler(tmp_path))
    with pytest.raises(OutputError):
        list(decoder.push(CODES))
    list(decoder.push(CODES[:0]))
    list(decoder.finish())
    assert np.array_equal(read_sample(*find_samples(tmp_path)).pcm, expected_ledger(CODES))


# Limits


def test_the_oldest_go(tmp_path: Path) -> None:
    sampler = UtteranceSampler(tmp_path, every=1, max_files=3)
    for index in range(6):
        codes = CODES.copy()
        codes[:, 0] = index
        speak(StreamDecoder(LedgerProgram(), sampler=sampler), codes)
    assert [int(read_sample(path).codes[0, 0]) for path in find_samples(tmp_path)] == [3, 4, 5]
    assert sampler.written == 6


def test_a_clock_that_is_set_back_costs_no_new_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = UtteranceSampler(tmp_path, every=1, max_files=2)
    gmtime = time.gmtime
    for day in (20_000, 20_001, 10_000):  # since 1970: the last is decades before the others
        monkeypatch.setattr(time, "gmtime", lambda *_, day=day: gmtime(day * 86_400))
        speak(StreamDecoder(LedgerProgram(), sampler=sampler))
    years = [path.name[:4] for path in find_samples(tmp_path)]
    assert years == ["1997", "2024"]


def test_other_files_stay(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "mine.npz").write_bytes(b"mine")
    sampler = UtteranceSampler(tmp_path, every=1, max_files=1)
    for _ in range(3):
        speak(StreamDecoder(LedgerProgram(), sampler=sampler))
    assert {path.name for path in tmp_path.iterdir()} >= {"notes.txt", "mine.npz"}
    assert len(list(tmp_path.iterdir())) == 3


def test_long_utterances_are_kept_up_to_a_limit(tmp_path: Path) -> None:
    sampler = UtteranceSampler(tmp_path, max_s=1.0)  # 12.5 frames
    heard = speak(StreamDecoder(LedgerProgram(), (5,), sampler=sampler))
    sample = read_sample(*find_samples(tmp_path))
    assert sample.chunks == (5, 5)
    assert np.array_equal(sample.pcm, heard[: 10 * 1920])
    assert sample.about["complete"] is False


@pytest.mark.parametrize("options", [{"every": 0}, {"max_files": 0}, {"max_s": 0.0}])
def test_limits_are_positive(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        UtteranceSampler(tmp_path, **options)


def test_a_full_disk_takes_no_word_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    sampler = UtteranceSampler(tmp_path)
    with caplog.at_level(logging.WARNING, "codecstream"):
        heard = speak(StreamDecoder(LedgerProgram(), sampler=sampler))
    assert np.array_equal(heard, expected_ledger(CODES))
    assert (sampler.written, sampler.failed) == (0, 1)
    assert "No space left on device" in caplog.text
    assert list(tmp_path.iterdir()) == []  # no half of a file


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    sampler = UtteranceSampler(tmp_path / "file")
    assert speak(StreamDecoder(LedgerProgram(), sampler=sampler)).size
    assert sampler.failed == 1


def test_several_threads_share_a_sampler(tmp_path: Path) -> None:
    sampler = UtteranceSampler(tmp_path, every=2)

    def talk() -> None:
        for _ in range(10):
            speak(StreamDecoder(LedgerProgram(), sampler=sampler))

    threads = [threading.Thread(target=talk) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sampler.written == len(find_samples(tmp_path)) == 20
    for path in find_samples(tmp_path):
        assert np.array_equal(read_sample(path).pcm, expected_ledger(CODES))


def test_without_a_sampler_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    speak(StreamDecoder(LedgerProgram()))
    assert list(tmp_path.iterdir()) == []


# Files from anywhere


@pytest.fixture
def parts(tmp_path: Path) -> dict[str, Any]:
    """What a file holds."""
    speak(StreamDecoder(LedgerProgram(), sampler=UtteranceSampler(tmp_path)))
    with np.load(*find_samples(tmp_path)) as arrays:
        return dict(arrays)


def about(parts: dict[str, Any], **changes: Any) -> np.ndarray:
    document = {**json.loads(bytes(parts["about"])), **changes}
    return np.frombuffer(json.dumps(document).encode(), np.uint8)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("codes", lambda p: p["codes"][:-1], "19 frames in chunks of 20"),
        ("codes", lambda p: p["codes"].astype(float), "codes is float64"),
        ("codes", lambda p: p["codes"][:0], "0 frames"),
        ("pcm", lambda p: p["pcm"][:-1], "38399 samples for 20 frames of 1920"),
        ("pcm", lambda p: p["pcm"].astype(int), "pcm is int64"),
        ("chunks", lambda p: p["chunks"] * 0, "frames in chunks of 0"),
        ("chunks", lambda p: np.array([25, -5], np.int32), "20 frames in chunks of"),
        ("primed", lambda p: p["primed"][:, :3], "38400 samples for 20 frames"),
        ("chunks", lambda p: np.array([2**63, 2**63 + 20], np.uint64), "20 frames in chunks of"),
        ("about", lambda p: about(p, precision=[1]), r"precision is \[1\]"),
        ("about", lambda p: about(p, mode="other"), "mode is 'other'"),
        ("about", lambda p: about(p, context="72"), "context is '72'"),
        ("about", lambda p: about(p, context=0), "context is 0"),
        ("about", lambda p: about(p, made_with=[1]), r"made_with is \[1\]"),
        ("about", lambda p: about(p, format="other"), "does not say that it is one"),
        ("about", lambda p: about(p, format_version=2), "format version 2, this codecstream"),
        ("about", lambda p: about(p, samples_per_frame=0), "samples_per_frame is 0"),
        ("about", lambda p: np.frombuffer(b"{", np.uint8), "not a recorded utterance"),
        ("about", lambda p: np.frombuffer(b"[" * 9999, np.uint8), "not a recorded utterance"),
        ("about", lambda p: np.array([{}], object), "allow_pickle=False"),
    ],
)
def test_a_damaged_file_is_refused(
    tmp_path: Path, parts: dict[str, Any], name: str, change: Any, message: str
) -> None:
    path = tmp_path / f"bad{SUFFIX}"
    np.savez(path, **{**parts, name: change(parts)})
    with pytest.raises(ArtifactError, match=message) as caught:
        read_sample(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["codes", "primed", "chunks", "pcm", "about"])
def test_a_missing_part_is_refused(tmp_path: Path, parts: dict[str, Any], name: str) -> None:
    path = tmp_path / f"bad{SUFFIX}"
    np.savez(path, **{key: value for key, value in parts.items() if key != name})
    with pytest.raises(ArtifactError, match=name):
        read_sample(path)


@settings(deadline=None, max_examples=150)
@given(seed=st.integers(0, 2**32 - 1))
def test_any_damage_is_an_error_of_ours_or_none(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    folder = tmp_path_factory.getbasetemp() / "damage"
    if not folder.exists():
        speak(StreamDecoder(LedgerProgram(), sampler=UtteranceSampler(folder)), CODES[:2])
    data = bytearray(find_samples(folder)[0].read_bytes())
    source = np.random.default_rng(seed)
    if source.random() < 0.3:
        del data[source.integers(len(data)) :]
    for _ in range(source.integers(1, 8)):
        if data:
            data[source.integers(len(data))] = source.integers(256)
    path = folder / "damaged"
    path.write_bytes(data)
    try:
        sample = read_sample(path)
    except ArtifactError:
        return
    assert len(sample.pcm) == len(sample.codes) * 1920


def test_a_bomb_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / f"bomb{SUFFIX}"
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("pcm.npy", "w", force_zip64=True) as file,
    ):
        for _ in range(1100):
            file.write(bytes(1 << 20))
    with pytest.raises(ArtifactError, match="would unpack to"):
        read_sample(path)


def test_an_array_that_says_it_is_huge_is_refused(tmp_path: Path, parts: dict[str, Any]) -> None:
    path = tmp_path / f"huge{SUFFIX}"
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<f4", "fortran_order": False, "shape": (1 << 44,)}
    )
    with zipfile.ZipFile(path, "w") as archive:
        for name, value in parts.items():
            buffer = io.BytesIO()
            np.save(buffer, value)
            archive.writestr(
                f"{name}.npy", header.getvalue() if name == "pcm" else buffer.getvalue()
            )
    with pytest.raises(ArtifactError, match="not a recorded utterance"):
        read_sample(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="cannot be read: No such file"):
        read_sample(tmp_path / "none")
