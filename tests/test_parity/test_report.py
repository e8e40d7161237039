"""Verdicts: what is exact, what is close enough, and what each kind of broken output is told."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from codecstream import Ramp
from codecstream_parity import FLOORS, Floors, Report, compare
from codecstream_parity.floors import NO_FLOORS, floors_for
from codecstream_parity.report import AT_LEAST, AT_MOST

Signal = NDArray[np.float32]

FRAMES = 500  # 40 s
CHUNKS = Ramp().split(FRAMES)


def speech(frames: int = FRAMES, seed: int = 0) -> Signal:
    """Noise with a level that moves as speech does, never silent."""
    source = np.random.default_rng(seed)
    level = np.repeat(0.1 * 10 ** source.uniform(-0.5, 0.5, frames), 1920)
    return (level * source.standard_normal(frames * 1920)).clip(-1, 1).astype(np.float32)


@pytest.fixture(scope="module")
def reference() -> Signal:
    signal = speech()
    signal.flags.writeable = False
    return signal


def with_noise(signal: Signal, snr_db: float, seed: int = 1) -> Signal:
    noise = np.random.default_rng(seed).standard_normal(signal.size)
    noise *= 10 ** (-snr_db / 20) * np.linalg.norm(signal) / np.linalg.norm(noise)
    return (signal + noise).astype(np.float32)


# What is right


def test_an_exact_match_is_reported_as_exact(reference: Signal) -> None:
    report = compare(reference, reference.copy(), chunks=CHUNKS)
    assert (report.passed, report.exact, report.reasons, report.missed) == (True, True, (), ())
    assert report.snr_db == math.inf
    document = report.to_json()
    assert document["exact"] is True
    assert document["snr_db"] is None
    assert document["null_because"]["snr_db"] == "nothing differs"


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
@settings(deadline=None, max_examples=8)
@given(margin_db=st.floats(1.0, 20.0), seed=st.integers(0, 1000))
def test_noise_below_the_floor_passes(precision: str, margin_db: float, seed: int) -> None:
    signal = with_noise(np.zeros(60 * 1920, np.float32) + np.float32(0.1), 0, seed)
    floors = FLOORS[precision]
    assert floors.snr_db is not None
    output = with_noise(signal, floors.snr_db + margin_db, seed + 1)
    report = compare(signal, output, chunks=[2, 4, 8, 16, 25, 5], floors=floors)
    assert report.passed, report.reasons
    assert report.snr_db == pytest.approx(floors.snr_db + margin_db, abs=0.1)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_noise_above_the_floor_does_not(reference: Signal, precision: str) -> None:
    floors = FLOORS[precision]
    assert floors.snr_db is not None
    report = compare(reference, with_noise(reference, floors.snr_db - 1), floors=floors)
    assert not report.passed
    assert "snr_db" in report.missed


@settings(deadline=None, max_examples=20)
@given(levels=st.lists(st.floats(0, 100), min_size=2, max_size=5, unique=True))
def test_more_noise_is_never_better(levels: list[float]) -> None:
    signal = speech(20)
    reports = [compare(signal, with_noise(signal, level)) for level in sorted(levels)]
    for worse, better in itertools.pairwise(reports):
        for name in ("snr_db", "worst_slice_snr_db", "onset_snr_db", "tail_snr_db"):
            assert getattr(worse, name) <= getattr(better, name) + 1e-3, name
        assert worse.max_abs_error >= better.max_abs_error - 1e-7


def test_a_report_does_not_depend_on_the_level(reference: Signal) -> None:
    """Of both signals: 6 dB less of each is the same ratio everywhere."""
    output = with_noise(reference, 50)
    loud, soft = (
        compare(reference * np.float32(gain), output * np.float32(gain), chunks=CHUNKS)
        for gain in (1, 0.5)
    )
    for name in ("snr_db", "worst_slice_snr_db", "slice_p1_snr_db", "gain_db", "correlation"):
        assert getattr(loud, name) == pytest.approx(getattr(soft, name), abs=1e-4)


# Degenerate data: each fails, and says why


def late(signal: Signal, samples: int) -> Signal:
    return np.concatenate((np.zeros(samples, np.float32), signal))[: signal.size]


def with_sample(signal: Signal, index: int, value: float) -> Signal:
    changed = signal.copy()
    changed[index] = value
    return changed


@pytest.mark.parametrize(
    ("name", "first_reason", "missed"),
    [
        ("silent reference", "the reference is silent", "snr_db"),
        ("all-zero output", "the output is silent", "snr_db"),
        ("one NaN", "1 sample of the output: NaN or Inf, first at 4711", "nonfinite_samples"),
        ("one Inf", "1 sample of the output: NaN or Inf, first at 4711", "nonfinite_samples"),
        ("1 short", "the output has 959999 samples, the reference 960000: 1 fewer", "length"),
        ("1 long", "the output has 960001 samples, the reference 960000: 1 more", "length"),
        ("555 short", "555 fewer, the tails of the four transposed convolutions", "length"),
        ("555 long", "555 more, the tails of the four transposed convolutions", "length"),
        ("1920 short", "1920 fewer, 1 frame: lost, repeated or left over", "length"),
        ("1920 long", "1920 more, 1 frame: lost, repeated or left over", "length"),
        ("zero frames", "there is nothing to compare: zero frames", "length"),
        ("no output", "the output has 0 samples", "length"),
        ("one sample late", "the output is 1 sample late (correlation 1.000 there", "lag_samples"),
        ("one sample early", "the output is 1 sample early (correlation", "lag_samples"),
        ("half gain", "the output is 6.02 dB quieter than the reference", "gain_db"),
        ("double gain", "the output is 6.02 dB louder than the reference", "gain_db"),
        ("swapped polarity", "the polarity is swapped (correlation -1.000)", "correlation"),
        ("another sentence", "snr_db is -", "snr_db"),
    ],
)
def test_degenerate_data_fails_with_its_own_reason(
    reference: Signal, name: str, first_reason: str, missed: str
) -> None:
    x, nothing = reference, np.empty(0, np.float32)
    pairs = {
        "silent reference": (np.zeros_like(x), with_noise(x, 60) - x),
        "all-zero output": (x, np.zeros_like(x)),
        "one NaN": (x, with_sample(x, 4711, np.nan)),
        "one Inf": (x, with_sample(x, 4711, np.inf)),
        "1 short": (x, x[:-1]),
        "1 long": (x, np.append(x, np.float32(0))),
        "555 short": (x, x[:-555]),
        "555 long": (x, np.concatenate((x, x[:555]))),
        "1920 short": (x, x[1920:]),
        "1920 long": (x, np.concatenate((x, x[-1920:]))),
        "zero frames": (nothing, nothing),
        "no output": (x, nothing),
        "one sample late": (x, late(x, 1)),
        "one sample early": (late(x, 1), x),
        "half gain": (x, x * np.float32(0.5)),
        "double gain": (x * np.float32(0.5), x),
        "swapped polarity": (x, -x),
        "another sentence": (x, speech(seed=1)),
    }
    report = compare(*pairs[name], chunks=CHUNKS)
    assert not report.passed
    assert not report.exact
    assert first_reason in report.reasons[0]
    assert report.missed[0] == missed
    json.dumps(report.to_json(), allow_nan=False)


def test_no_two_kinds_of_broken_output_have_the_same_first_reason(reference: Signal) -> None:
    x = reference
    broken = [np.zeros_like(x), with_sample(x, 9, np.nan), x[:-1], x[:-555], x[:-1920]]
    broken += [late(x, 1), x * np.float32(0.5), -x, x[:0]]
    reasons = {compare(x, output).reasons[0] for output in broken}
    assert len(reasons) == len(broken)


@pytest.mark.parametrize("cut", [1, 555, 1920, 3000])
def test_a_wrong_length_does_not_hide_the_rest(reference: Signal, cut: int) -> None:
    """Nothing is cut in silence; but what both have is still measured."""
    output = with_noise(reference, 50)[:-cut]
    report = compare(reference, output)
    assert "length" in report.missed
    assert report.snr_db == pytest.approx(50, abs=0.1)


def test_a_nan_fails_whatever_the_floors_are(reference: Signal) -> None:
    report = compare(reference, with_sample(reference, 5, np.nan), floors=NO_FLOORS)
    assert not report.passed
    assert report.to_json()["snr_db"] is None


def test_a_reference_with_nan_is_no_reference(reference: Signal) -> None:
    bad = with_sample(reference, 5, np.nan)
    report = compare(bad, bad)
    assert (report.passed, report.exact) == (False, False)
    assert report.reasons[0] == "the reference has NaN or Inf"


# What one figure hides


@pytest.mark.case(56)
@pytest.mark.parametrize("index", [1, 10, len(CHUNKS) - 2])
@pytest.mark.parametrize("step", [0.02, 0.05, 0.1])
def test_case_56_a_step_at_one_seam_fails_although_the_snr_is_high(
    reference: Signal, index: int, step: float
) -> None:
    """50 samples at one seam of 40 s."""
    output = with_noise(reference, 55)
    seam = sum(CHUNKS[:index]) * 1920
    output[seam : seam + 50] += np.float32(step)
    report = compare(reference, output, chunks=CHUNKS, floors=FLOORS["int8"])
    assert report.snr_db is not None
    assert report.snr_db > 40
    assert report.seams >= 10
    assert not report.passed
    assert "worst_seam" in report.missed
    assert report.worst_seam is not None
    assert report.worst_seam.frame == sum(CHUNKS[:index])
    assert compare(
        reference, with_noise(reference, 55), chunks=CHUNKS, floors=FLOORS["int8"]
    ).passed


@pytest.mark.case(56)
def test_case_56_a_click_away_from_seams_shows_in_its_slice(reference: Signal) -> None:
    output = with_noise(reference, 55)
    output[300 * 1920 + 900 : 300 * 1920 + 950] += np.float32(0.15)
    report = compare(reference, output, chunks=CHUNKS, floors=FLOORS["int8"])
    assert report.snr_db is not None
    assert report.snr_db > 40
    assert report.missed == ("worst_slice_snr_db", "max_abs_error")
    assert report.worst_slice is not None
    assert (report.worst_slice.frame, report.worst_slice.time_s) == (300, 24.0)


@pytest.mark.parametrize(
    ("at", "missed"), [(0, "onset_snr_db"), (FRAMES - 2, "tail_snr_db"), (99, None)]
)
def test_onset_and_tail_are_looked_at_alone(reference: Signal, at: int, missed: str | None) -> None:
    """Noise of 20 dB in 160 ms; the other places of the same kind are slices among many."""
    output = with_noise(reference, 60)
    part = slice(at * 1920, (at + 2) * 1920)
    output[part] = with_noise(reference[part], 20)
    floors = FLOORS["int8"].replaced(worst_slice_snr_db=None, max_abs_error=None)
    report = compare(reference, output, floors=floors)
    assert report.missed == (() if missed is None else (missed,))


def test_hiss_in_a_pause_shows_as_a_level(reference: Signal) -> None:
    """In a pause of -70 dBFS, noise of -60 dBFS: the SNR of the whole does not move."""
    quiet = reference.copy()
    source = np.random.default_rng(3)
    pause = slice(100 * 1920, 110 * 1920)
    quiet[pause] = 10 ** (-70 / 20) * source.standard_normal(10 * 1920)
    output = quiet.copy()
    output[pause] += (10 ** (-60 / 20) * source.standard_normal(10 * 1920)).astype(np.float32)
    report = compare(quiet, output, floors=FLOORS["int8"])
    assert report.quiet_slices == 10
    assert report.quiet_level_db == pytest.approx(10.4, abs=0.5)  # 10 log10(1 + 10)
    assert report.missed == ("quiet_level_db",)
    # A pause's own SNR is no measure of it.
    assert report.worst_slice_snr_db is not None
    assert report.worst_slice_snr_db == math.inf


def test_a_missing_pause_shows_as_a_level(reference: Signal) -> None:
    quiet = reference.copy()
    quiet[: 10 * 1920] *= np.float32(1e-2)
    output = quiet.copy()
    output[: 10 * 1920] = 0
    report = compare(quiet, output, floors=FLOORS["int8"])
    assert report.quiet_slices > 0
    assert "quiet_level_db" in report.missed
    assert report.onset_snr_db is None
    assert "quiet_level_db has it" in report.not_measured["onset_snr_db"]


@pytest.mark.parametrize("pause", [0.0, 2e-4, 5e-4])
@pytest.mark.parametrize("clicks", [False, True])
def test_a_click_in_a_vowel_is_not_hidden_by_the_noise_of_pauses(
    pause: float, clicks: bool
) -> None:
    """Pauses whose noise is 6 dB below their own level, as 8 bits leave them."""
    source = np.random.default_rng(0)
    quiet = np.repeat(np.arange(FRAMES) % 10 < 3, 1920)
    level = np.where(quiet, pause, 0.1)
    signal = (level * source.standard_normal(quiet.size)).astype(np.float32)
    noise = np.where(quiet, pause / 2, 0.1 * 10 ** (-45 / 20))
    output = (signal + noise * source.standard_normal(quiet.size)).astype(np.float32)
    seams = [frame for frame in range(25, FRAMES, 25) if frame % 10 > 3]
    assert len(seams) >= 5
    if clicks:
        output[np.array(seams) * 1920] += np.float32(0.04)
    report = compare(signal, output, chunks=[25] * (FRAMES // 25), floors=FLOORS["int8"])
    assert report.missed == (("worst_seam",) if clicks else ())


@pytest.mark.parametrize(("offset", "missed"), [(2e-3, True), (5e-4, False)])
def test_dc_is_measured(reference: Signal, offset: float, missed: bool) -> None:
    report = compare(reference, reference + np.float32(offset), floors=FLOORS["int8"])
    assert report.dc_offset == pytest.approx(offset, rel=1e-3)
    assert ("dc_offset" in report.missed) == missed


@pytest.mark.parametrize("gain_db", [-0.5, -0.1, 0.1, 0.5])
def test_gain_is_measured(reference: Signal, gain_db: float) -> None:
    output = with_noise(reference * np.float32(10 ** (gain_db / 20)), 50)
    report = compare(reference, output, floors=FLOORS["int8"])
    assert report.gain_db == pytest.approx(gain_db, abs=0.01)
    assert ("gain_db" in report.missed) == (abs(gain_db) > 0.2)


def test_drift_compares_the_last_minute_with_the_first() -> None:
    signal = speech(2000)
    output = with_noise(signal, 60)
    output[-750 * 1920 :] = with_noise(signal[-750 * 1920 :], 50)
    report = compare(signal, output, floors=FLOORS["int8"])
    assert report.drift_db == pytest.approx(-10, abs=0.5)
    assert report.missed == ("drift_db",)
    short = compare(signal[: 1499 * 1920], output[: 1499 * 1920])
    assert short.drift_db is None
    assert short.not_measured["drift_db"] == "it takes at least two minutes"


# Floors


@pytest.mark.parametrize("name", [*AT_LEAST, *AT_MOST])
def test_each_floor_alone_can_fail_an_output(name: str) -> None:
    """And its reason has the figure and the limit."""
    signal = speech(1600)
    signal[: 3 * 1920] *= np.float32(1e-3)  # quiet slices
    output = with_noise(signal, 40)
    limit = 1e6 if name in AT_LEAST else -1.0
    report = compare(signal, output, floors=NO_FLOORS.replaced(**{name: limit}))
    if name == "onset_snr_db":  # it is quiet there
        assert report.passed
        report = compare(signal[3 * 1920 :], output[3 * 1920 :], floors=report.floors)
    assert report.missed == (name,)
    assert report.reasons[0].startswith(f"{name} is ")
    assert f"{limit:g}" in report.reasons[0]


def test_every_floor_has_a_figure() -> None:
    seam = {"seam_excess_db", "seam_step_db"}
    assert {field.name for field in dataclasses.fields(Floors)} == {*AT_LEAST, *AT_MOST, *seam}


def test_all_floors_missed_are_listed(reference: Signal) -> None:
    report = compare(reference, with_noise(reference, 10), chunks=CHUNKS)
    assert set(report.missed) >= {
        "snr_db",
        "worst_slice_snr_db",
        "slice_p1_snr_db",
        "onset_snr_db",
        "tail_snr_db",
        "max_abs_error",
        "log_spectral_distance_db",
    }


def test_a_floor_that_is_none_of_them() -> None:
    with pytest.raises(ValueError, match="no floor is called 'snr'; they are snr_db, "):
        FLOORS["fp32"].replaced(snr=1)


def test_which_floors_hold_for_what() -> None:
    assert floors_for("fp32").snr_db == 90
    assert floors_for("fp16").worst_slice_snr_db == 45
    assert floors_for("int8").worst_slice_snr_db == 25
    assert floors_for("fp32", approximate=True) == FLOORS["windowed"]
    assert floors_for("fp32", wav=True).lag_samples == 4000
    assert floors_for("int8", wav=True).snr_db == 40
    assert floors_for("fp32").lag_samples == 0
    with pytest.raises(ValueError, match="no floors for precision 'bf16': only fp32, fp16, int8"):
        floors_for("bf16")


def test_the_document_has_the_floors_that_are_used() -> None:
    text = (Path(__file__).parents[2] / "docs" / "parity.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| ")]
    (head,) = [row for row in rows if row[0].strip() == "figure"]
    assert [cell.strip() for cell in head[2:]] == [
        "fp32",
        "fp16, WAV",
        "int8",
        "windowed against all frames",
    ]
    kinds = ("fp32", "fp16", "int8", "windowed")
    found = set()
    for row in rows:
        for name in re.findall(r"`([\w.]+)`", row[0]):
            field = {"worst_seam.excess_db": "seam_excess_db", "worst_seam.step_db": "seam_step_db"}
            name = field.get(name, name)
            if name in {item.name for item in dataclasses.fields(Floors)}:
                found.add(name)
                values = [float(cell.split(";")[0]) for cell in row[2:]]
                assert values == [getattr(FLOORS[kind], name) for kind in kinds], name
    assert found == {item.name for item in dataclasses.fields(Floors)}


def test_the_worst_percentile_is_nearest_rank() -> None:
    signal = np.ones(200 * 1920, np.float32) * np.float32(0.5)
    output = signal.copy()
    for index, error in ((10, 0.4), (20, 0.3), (30, 0.2)):  # of 200, the 2nd is 1 %
        output[index * 1920] += np.float32(error)
    report = compare(signal, output, floors=NO_FLOORS)
    assert report.slice_p1_snr_db == pytest.approx(10 * math.log10(480 / 0.09), abs=1e-3)


def test_one_percent_of_few_slices_is_no_figure() -> None:
    signal = speech(99)
    report = compare(signal, with_noise(signal, 95))
    assert report.slice_p1_snr_db is None
    assert report.not_measured["slice_p1_snr_db"] == "it takes at least 100 slices"
    assert report.passed


def test_json_has_a_reason_for_every_null(reference: Signal) -> None:
    for output in (reference, np.zeros_like(reference), with_sample(reference, 0, np.nan)):
        document = compare(reference, output).to_json()
        nulls = {key for key, value in document.items() if value is None}
        assert nulls <= document["null_because"].keys()
        json.dumps(document, allow_nan=False)


def test_reports_compare_by_their_figures(reference: Signal) -> None:
    output = with_noise(reference, 70)
    one, other = (compare(reference, output, chunks=CHUNKS) for _ in range(2))
    assert isinstance(one, Report)
    assert one == other
