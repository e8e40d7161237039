"""What outputs are held against: each is what its name says."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from official import official_decoder
from support import SAMPLES, LedgerProgram, expected_ledger, make_codes, worst_slice_db

pytest.importorskip("torch")
pytest.importorskip("soundfile")

import soundfile
import torch

from codecstream import MissingDependencyError, demo, load_program
from codecstream_export import eager, load_checkpoint
from codecstream_export.reference import block_pcm, eager_pcm, reach_frames
from codecstream_parity import official, references
from codecstream_parity.floors import FLOORS
from codecstream_parity.references import (
    ArtifactReference,
    WavReference,
    WholeReference,
    checkpoint_reference,
)
from codecstream_parity.runs import compare_pieces

if TYPE_CHECKING:
    from codecstream_export import EagerDecoder

CHUNKS = [2, 4, 8, 16, 25, 25, 20]
CODES = make_codes(sum(CHUNKS))


def joined(reference: references.Reference) -> np.ndarray:
    return np.concatenate(list(reference.pieces(CODES, CHUNKS)))


def test_eager_is_all_frames_at_once(checkpoint: Path, tiny_decoder: EagerDecoder) -> None:
    reference = checkpoint_reference("eager", load_checkpoint(checkpoint), 72)
    assert reference.name == "eager float32, all frames at once"
    assert np.array_equal(joined(reference), eager_pcm(tiny_decoder, CODES))


def test_blocks_are_all_frames_at_once_but_for_rounding(
    checkpoint: Path, tiny_decoder: EagerDecoder
) -> None:
    """Blocks far shorter than the history that they need: every block's start is looked at."""
    codes = make_codes(1300)
    reach = reach_frames(tiny_decoder.config)
    blocks = list(block_pcm(lambda c: eager_pcm(tiny_decoder, c), codes, reach, 100))
    assert [len(pcm) for pcm in blocks] == [100 * SAMPLES] * 13
    assert worst_slice_db(eager_pcm(tiny_decoder, codes), np.concatenate(blocks)) > 95


def test_blocks_behind_too_little_history_are_not(tiny_decoder: EagerDecoder) -> None:
    codes = make_codes(700)
    blocks = block_pcm(lambda c: eager_pcm(tiny_decoder, c), codes, 300, 100)
    assert worst_slice_db(eager_pcm(tiny_decoder, codes), np.concatenate(list(blocks))) < 90


def test_the_reference_is_more_exact_than_the_program_that_it_judges() -> None:
    """Rounded rotary angles are what the published decoder has, and no fault of a program."""
    decoder = load_checkpoint(demo.checkpoint_dir()).decoder
    codes = make_codes(528)
    batch = torch.from_numpy(codes).T[None]

    def in_float64(*arguments: Any) -> tuple[torch.Tensor, ...]:
        positions, head_dim, theta, _ = arguments
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        angles = positions[:, None] / theta**exponents
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()

    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        published = decoder(batch)[0].numpy()
        patch.setattr(eager, "rotary_tables", in_float64)
        truth = copy.deepcopy(decoder).double()(batch)[0].numpy()
    assert truth.dtype == np.float64
    ours, theirs = (
        worst_slice_db(truth, eager_pcm(decoder, codes)),
        worst_slice_db(truth, published),
    )
    assert ours > 95
    assert ours > theirs + 5


def test_a_long_reference_says_so(checkpoint: Path) -> None:
    reference = checkpoint_reference("eager", load_checkpoint(checkpoint), 72, long=True)
    assert reference.name == "eager float32, blocks behind 600 frames of history"


def test_a_window_forgets_what_is_before_it(checkpoint: Path, tiny_decoder: EagerDecoder) -> None:
    reference = checkpoint_reference("window", load_checkpoint(checkpoint), 30)
    *_, last = reference.pieces(CODES, CHUNKS)
    assert np.array_equal(last, eager_pcm(tiny_decoder, CODES[-50:])[-20 * SAMPLES :])
    changed = CODES.copy()
    changed[:-50] = 0
    *_, same = reference.pieces(changed, CHUNKS)
    assert np.array_equal(last, same)


def test_the_official_class_with_the_checkpoints_weights(
    checkpoint: Path, tiny_decoder: EagerDecoder
) -> None:
    official_decoder(tiny_decoder.config)  # or skip
    reference = checkpoint_reference("official", load_checkpoint(checkpoint), 72)
    assert reference.name == "official class of qwen-tts, all frames at once"
    pcm = joined(reference)
    assert worst_slice_db(eager_pcm(tiny_decoder, CODES), pcm) > 110
    assert pcm.any()


def test_without_the_official_class_the_pip_lines_are_given(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(official.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delitem(official.sys.modules, official._MODULE, raising=False)
    with pytest.raises(MissingDependencyError, match="pip install --no-deps qwen-tts"):
        checkpoint_reference("official", load_checkpoint(checkpoint), 72)


def test_another_artifact_decodes_in_the_same_chunks(tiny_artifact: Path) -> None:
    program = LedgerProgram()
    reference = ArtifactReference("a ledger", program)
    assert np.array_equal(joined(reference), expected_ledger(CODES))
    assert program.calls == CHUNKS


def test_another_artifact_with_a_bound_decodes_in_smaller_chunks() -> None:
    program = LedgerProgram()
    program.max_frames = 10
    reference = ArtifactReference("a ledger", program)
    assert np.array_equal(joined(reference), expected_ledger(CODES))
    assert max(program.calls) == 10


# WAV files of a server


def write(path: Path, pcm: np.ndarray, rate_hz: int = 24_000, subtype: str = "PCM_16") -> Path:
    soundfile.write(path, pcm, rate_hz, subtype=subtype)
    return path


@pytest.mark.parametrize("lag", [0, 1, -1, 100, -100, 1919, 1920, -3000, 4000])
@pytest.mark.parametrize("subtype", ["PCM_16", "PCM_24", "FLOAT"])
def test_a_shifted_file_is_aligned(
    tmp_path: Path, tiny_artifact: Path, lag: int, subtype: str
) -> None:
    """A positive lag: the output is late, so the file begins later than the decoder's sound."""
    program = load_program(tiny_artifact, threads=1, warmup=False)
    pcm = np.concatenate(list(ArtifactReference("", program).pieces(CODES, CHUNKS)))
    shifted = pcm[lag:] if lag >= 0 else np.pad(pcm, (-lag, 0))
    shifted = np.pad(shifted, (0, max(0, pcm.size - shifted.size)))[: pcm.size]
    path = write(tmp_path / "server.wav", shifted, subtype=subtype)
    reference = WavReference.read(path, 24_000)
    run = compare_pieces("x", reference, [pcm], CODES, CHUNKS, FLOORS["wav"], program.geometry)
    report = run.report
    assert (report.lag_samples, report.correlation) == (lag, pytest.approx(1, abs=1e-4))
    wav = {"PCM_16": 70, "PCM_24": 110, "FLOAT": 140}
    # What was shifted out at the end is missing; the rest is as exact as the format.
    whole = report.slice_snr_db[: len(report.slice_snr_db) - 3]
    assert whole.min() > wav[subtype] - 5
    if lag == 0:
        assert report.passed, report.reasons
    assert run.reference.size
    assert report.reference_samples == report.output_samples == pcm.size


@pytest.mark.parametrize(
    ("channels", "rate_hz", "message"),
    [(2, 24_000, "has 2 channels at 24000 Hz"), (1, 16_000, "has 1 channels at 16000 Hz")],
)
def test_a_file_of_another_kind_is_refused(
    tmp_path: Path, channels: int, rate_hz: int, message: str
) -> None:
    path = write(tmp_path / "x.wav", np.zeros((100, channels)), rate_hz)
    with pytest.raises(ValueError, match=message):
        WavReference.read(path, 24_000)


def test_what_is_no_sound_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.wav"
    path.write_bytes(b"no sound")
    with pytest.raises(ValueError, match="cannot be read as sound"):
        WavReference.read(path, 24_000)


# Runs


@pytest.mark.parametrize("seed", range(5))
def test_pieces_of_any_size_make_the_same_report(seed: int) -> None:
    source = random.Random(seed)
    pcm, geometry = expected_ledger(CODES), LedgerProgram.geometry
    cuts = sorted(source.sample(range(pcm.size), 20))
    reference = WholeReference("x", lambda codes: pcm)
    whole, cut = (
        compare_pieces("x", reference, output, CODES, CHUNKS, FLOORS["fp32"], geometry)
        for output in ([pcm], np.split(pcm, cuts))
    )
    assert whole.report == cut.report
    assert whole.report.exact
    assert np.array_equal(whole.output, cut.output)


def test_only_the_first_minute_is_kept_for_pictures() -> None:
    codes = make_codes(800)
    reference = WholeReference("x", expected_ledger)
    run = compare_pieces(
        "x",
        reference,
        [expected_ledger(codes)],
        codes,
        [800],
        FLOORS["fp32"],
        LedgerProgram.geometry,
    )
    assert run.reference.size == run.output.size == 60 * 24_000
    assert run.report.reference_samples == 800 * SAMPLES
