"""The bundled demo: its artifact is its checkpoint's, and what it says can be understood."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from support import SAMPLES, decode, worst_slice_db

pytest.importorskip("torch")

import codecstream
from codecstream import demo
from codecstream.artifact import open_artifact
from codecstream_export import load_checkpoint
from codecstream_export.reference import eager_pcm
from codecstream_parity.listening import heard_words, said_words, word_errors

Speech = dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]]

# What the recogniser gets wrong in the readings themselves, as scripts/train_demo_decoder.py says.
WORD_ERRORS_OF_THE_READINGS = {"0880": 3, "0890": 4, "0930": 1}
SEAMS = np.cumsum([2, 4, 8, 16]) * SAMPLES


@pytest.fixture(scope="module")
def speech() -> Speech:
    """Each utterance as the eager decoder says it and as the artifact streams it."""
    eager = load_checkpoint(demo.checkpoint_dir()).decoder
    program = codecstream.load_program(demo.artifact_dir())
    codes = {item.name: item.codes.astype(np.int64) for item in demo.utterances()}
    return {name: (eager_pcm(eager, c), decode(program, c)) for name, c in codes.items()}


def test_the_artifact_is_made_of_the_checkpoint(speech: Speech) -> None:
    source = open_artifact(demo.artifact_dir()).manifest.source
    assert source["weights_sha256"] == load_checkpoint(demo.checkpoint_dir()).weights_sha256
    for eager, streamed in speech.values():
        assert worst_slice_db(eager, streamed) >= 80


def test_the_recogniser_hears_no_more_wrong_words_than_in_the_readings(speech: Speech) -> None:
    pytest.importorskip("pocketsphinx")
    pytest.importorskip("soxr")
    for item in demo.utterances():
        heard = heard_words(speech[item.name][1])
        errors = word_errors(said_words(item.text), heard)
        assert errors <= WORD_ERRORS_OF_THE_READINGS[item.name[-4:]], heard


@pytest.mark.case(15)
def test_case_15_no_seam_is_louder_than_the_speech_around_it(speech: Speech) -> None:
    for _, streamed in speech.values():
        steps = np.abs(np.diff(streamed)) / local_rms(streamed)[1:]
        away = np.delete(steps, np.concatenate([SEAMS - 1 + k for k in (-1, 0, 1)]))
        assert steps[SEAMS - 1].max() <= 1.5 * np.percentile(away, 99)


def local_rms(pcm: NDArray[np.float32], window: int = 480) -> NDArray[np.float64]:
    """Return the level around each sample, over 20 ms."""
    power = np.convolve(np.square(pcm, dtype=np.float64), np.ones(window) / window, "same")
    return np.sqrt(power + 1e-8)


@pytest.mark.case(23)
def test_case_23_pauses_are_no_noisier_than_in_the_whole_decode(speech: Speech) -> None:
    """The readings' pauses are louder than -55 dBFS, so the quietest tenth stands for them."""
    for eager, streamed in speech.values():
        levels = [
            10 * np.log10(np.mean(np.square(pcm.reshape(-1, SAMPLES), dtype=np.float64), axis=1))
            for pcm in (eager, streamed)
        ]
        quiet = levels[0] <= np.percentile(levels[0], 10)
        assert quiet.any()
        assert np.abs(levels[1] - levels[0])[quiet].max() < 0.01
