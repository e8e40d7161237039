"""The tool finds broken decoders: each of these fails with the default arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from artifacts import Store
from numpy.typing import NDArray
from support import Check

pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

from codecstream import Program, StreamDecoder
from codecstream_export import export_artifact, save_checkpoint
from codecstream_export.random_weights import TINY, random_decoder
from codecstream_export.reference import eager_pcm, window_pcm
from codecstream_parity import check as check_module

Codes = NDArray[np.int64]
Pcm = NDArray[np.float32]
Step = tuple[Pcm, Any]


class Mutant:
    """A program with a fault; ``step`` is the sound program's unless a subclass has another."""

    def __init__(self, sound: Program) -> None:
        self.sound = sound
        self.geometry = sound.geometry
        self.max_frames = sound.max_frames
        self.decoder_id = sound.decoder_id

    def initial_state(self) -> Any:
        return self.sound.initial_state()

    def step(self, codes: Codes, state: Any) -> Step:
        return self.sound.step(codes, state)


class StateNotCarried(Mutant):
    def step(self, codes: Codes, state: Any) -> Step:
        return self.sound.step(codes, self.initial_state())


class OneTensorNotCarried(Mutant):
    """The smallest history of all: that of the last convolution, six samples."""

    def step(self, codes: Codes, state: Any) -> Step:
        pcm, after = self.sound.step(codes, state)
        first = self.initial_state()
        small = min(range(len(after)), key=lambda i: np.asarray(after[i].numpy()).size)
        return pcm, tuple(first[i] if i == small else after[i] for i in range(len(after)))


class StateOfThreadsMixed(Mutant):
    """The state is kept in the program, as hidden buffers are."""

    hidden: Any = None

    def step(self, codes: Codes, state: Any) -> Step:
        pcm, self.hidden = self.sound.step(codes, self.hidden or self.sound.initial_state())
        return pcm, None


class StateOneChunkOld(Mutant):
    def initial_state(self) -> Any:
        return (self.sound.initial_state(), self.sound.initial_state())

    def step(self, codes: Codes, state: Any) -> Step:
        older, newer = state
        pcm, after = self.sound.step(codes, older if len(codes) == 25 else newer)
        return pcm, (newer, after)


class TailInFrontOfZeros(Mutant):
    """A short chunk runs through the program for a long one, at its wrong end."""

    def step(self, codes: Codes, state: Any) -> Step:
        if len(codes) in (2, 4, 8, 16, 25):
            return self.sound.step(codes, state)
        padded = np.concatenate((np.zeros((25 - len(codes), 16), np.int64), codes))
        pcm, after = self.sound.step(padded, state)
        return pcm[-1920 * len(codes) :], after


class LastFrameTwice(Mutant):
    """A chunk of an odd size is filled up to the next even one, and the state keeps the filling."""

    def step(self, codes: Codes, state: Any) -> Step:
        if len(codes) % 2 == 0:
            return self.sound.step(codes, state)
        pcm, after = self.sound.step(np.concatenate((codes, codes[-1:])), state)
        return pcm[: 1920 * len(codes)], after


class OneSampleLatePerChunk(Mutant):
    def step(self, codes: Codes, state: Any) -> Step:
        pcm, after = self.sound.step(codes, state)
        return np.append(np.float32(0), pcm[:-1]), after


class Crossfaded(Mutant):
    """Chunks that are faded in over 5 ms, as those who re-decode windows do to hide seams."""

    def step(self, codes: Codes, state: Any) -> Step:
        pcm, after = self.sound.step(codes, state)
        pcm[:120] *= np.linspace(0, 1, 120, dtype=np.float32)
        return pcm, after


class OneBadSample(Mutant):
    def step(self, codes: Codes, state: Any) -> Step:
        pcm, after = self.sound.step(codes, state)
        pcm[17] = np.nan
        return pcm, after


class OneStateForAll(Mutant):
    """Every new stream empties the one and only state: right for one utterance at a time."""

    only: Any = None

    def initial_state(self) -> Any:
        self.only = self.sound.initial_state()
        return None

    def step(self, codes: Codes, state: Any) -> Step:
        pcm, self.only = self.sound.step(codes, self.only)
        return pcm, None


class StateChangedInPlace(Mutant):
    """The state after a step is the same object: a chunk that is tried again comes out wrong."""

    def initial_state(self) -> Any:
        return [self.sound.initial_state()]

    def step(self, codes: Codes, state: Any) -> Step:
        pcm, state[0] = self.sound.step(codes, state[0])
        return pcm, state


class OneBufferForAll(Mutant):
    """What was handed out changes with the next chunk."""

    buffer: Any = None

    def step(self, codes: Codes, state: Any) -> Step:
        pcm, after = self.sound.step(codes, state)
        if self.buffer is None:
            self.buffer = np.zeros(25 * 1920, np.float32)
        self.buffer[: pcm.size] = pcm
        return self.buffer[: pcm.size], after


class SilentAtOneSize(Mutant):
    """No client asks for it but at the end of an utterance."""

    frames = 0

    def step(self, codes: Codes, state: Any) -> Step:
        pcm, after = self.sound.step(codes, state)
        return (pcm * 0 if len(codes) == self.frames else pcm), after


class SilentAtOne(SilentAtOneSize):
    frames = 1


class SilentAtSix(SilentAtOneSize):
    frames = 6


class RaisesSomething(Mutant):
    def step(self, codes: Codes, state: Any) -> Step:
        if len(codes) == 8:
            raise ZeroDivisionError("a bug of the program")
        return self.sound.step(codes, state)


class ContextOffByOne(Mutant):
    """A windowed program's history has one frame less than the manifest says."""

    def step(self, codes: Codes, state: Any) -> Step:
        pcm, after = self.sound.step(codes, state)
        return pcm, after[-71:]


class WrongWindowForATail(Mutant):
    """A tail is decoded by the window of another size, and cut at its start."""

    def step(self, codes: Codes, state: Any) -> Step:
        if len(codes) in (2, 5, 25):
            return self.sound.step(codes, state)
        padded = np.concatenate((codes, np.zeros((25 - len(codes), 16), np.int64)))
        pcm, after = self.sound.step(padded, state)
        return pcm[-1920 * len(codes) :], after


@pytest.fixture
def put_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[type[Mutant]], None]:
    """Make every artifact that is loaded a mutant."""

    def put(kind: type[Mutant]) -> None:
        load = check_module.load_artifact
        monkeypatch.setattr(check_module, "load_artifact", lambda *args: kind(load(*args)))

    return put


def test_a_sound_decoder_passes(tiny_artifact: Path, windowed_artifact: Path, check: Check) -> None:
    for artifact in (tiny_artifact, windowed_artifact):
        status, report = check(artifact)
        assert (status, report["passed"], report["reasons"]) == (0, True, [])


@pytest.mark.parametrize(
    "kind",
    [
        StateNotCarried,
        OneTensorNotCarried,
        StateOfThreadsMixed,
        StateOneChunkOld,
        TailInFrontOfZeros,
        LastFrameTwice,
        OneSampleLatePerChunk,
        Crossfaded,
        OneBadSample,
        RaisesSomething,
        OneStateForAll,
        StateChangedInPlace,
        OneBufferForAll,
        SilentAtOne,
        SilentAtSix,
    ],
)
def test_a_broken_stateful_decoder_fails(
    tiny_artifact: Path, check: Check, put_in: Callable[[type[Mutant]], None], kind: type[Mutant]
) -> None:
    put_in(kind)
    status, report = check(tiny_artifact)
    assert (status, report["passed"]) == (1, False)
    assert report["reasons"]


@pytest.mark.parametrize("kind", [StateNotCarried, ContextOffByOne, WrongWindowForATail])
def test_a_broken_windowed_decoder_fails(
    windowed_artifact: Path,
    check: Check,
    put_in: Callable[[type[Mutant]], None],
    kind: type[Mutant],
) -> None:
    put_in(kind)
    status, report = check(windowed_artifact)
    assert (status, report["passed"]) == (1, False)


def test_a_program_that_raises_is_told_as_such(
    tiny_artifact: Path, check: Check, put_in: Callable[[type[Mutant]], None]
) -> None:
    put_in(RaisesSomething)
    _, report = check(tiny_artifact)
    wanted = "schedule: the decoder failed: ZeroDivisionError: a bug of the program"
    assert report["reasons"][0] == wanted
    assert report["runs"][0]["output_samples"] == 6 * 1920


def test_a_wrong_tail_fails_in_the_tail(
    tiny_artifact: Path, check: Check, put_in: Callable[[type[Mutant]], None]
) -> None:
    """The schedule's only chunk of another size is its last."""
    put_in(TailInFrontOfZeros)
    _, report = check(tiny_artifact)
    schedule = report["runs"][0]
    assert "tail_snr_db" in schedule["missed"]
    assert "onset_snr_db" not in schedule["missed"]


def test_hidden_state_shows_after_a_reset(
    tiny_artifact: Path, check: Check, put_in: Callable[[type[Mutant]], None]
) -> None:
    put_in(StateOfThreadsMixed)
    _, report = check(tiny_artifact)
    passed = {run["run"]: run["passed"] for run in report["runs"]}
    assert passed == {
        "schedule": True,
        "after reset": False,
        "random partition": False,
        "side by side": False,
    }
    assert "onset_snr_db" in report["runs"][1]["missed"]


def test_a_reset_that_is_forgotten_fails(
    tiny_artifact: Path, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    reset = StreamDecoder.reset

    def forgets(self: StreamDecoder) -> None:
        state = getattr(self, "_state", None)
        reset(self)
        if state is not None:
            self._state = state

    monkeypatch.setattr(StreamDecoder, "reset", forgets)
    status, report = check(tiny_artifact)
    assert status == 1
    assert [run["passed"] for run in report["runs"]] == [True, False, True, True]
    assert all(reason.startswith("after reset: ") for reason in report["reasons"])


def test_an_attention_window_off_by_one_fails(tmp_path: Path, check: Check) -> None:
    """A real artifact, of a decoder whose attention sees one frame less."""
    decoder = random_decoder(dataclasses.replace(TINY, sliding_window=71))
    save_checkpoint(tmp_path / "other" / "speech_tokenizer", decoder)
    export_artifact(tmp_path / "other", tmp_path / "artifact", runtime="onnx")
    status, report = check(tmp_path / "artifact")
    assert status == 1
    assert report["worst_slice_snr_db"] < 80
    # The first 71 frames can't tell: that is why the default goes so far.
    status, report = check(tmp_path / "artifact", "--frames", 71)
    assert status == 0
    assert any("do not go beyond the 568" in note for note in report["notes"])


class ChunkedDecode(Mutant):
    """What re-decodes 25 frames in front of each chunk, as the official code does."""

    store: Store

    def initial_state(self) -> Any:
        return np.empty((0, 16), np.int64)

    def step(self, codes: Codes, state: Any) -> Step:
        both = np.concatenate((state, codes))
        decoder = self.store.decoder()
        sizes = [len(state), len(codes)] if len(state) else [len(codes)]
        *_, pcm = window_pcm(lambda c: eager_pcm(decoder, c), both, sizes, 25)
        return pcm, both[-25:]


def test_decoding_again_with_a_short_context_fails_with_the_figure(
    tiny_artifact: Path,
    store: Store,
    check: Check,
    put_in: Callable[[type[Mutant]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ChunkedDecode, "store", store, raising=False)
    put_in(ChunkedDecode)
    status, report = check(tiny_artifact, "--frames", 120)
    assert status == 1
    assert 0 < report["snr_db"] < 40
