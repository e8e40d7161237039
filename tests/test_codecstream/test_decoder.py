"""StreamDecoder's contract, with programs whose output tells what it was asked: no torch needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support import SAMPLES, LedgerProgram, decode, expected_ledger, make_codes

from codecstream import (
    DecoderError,
    DecoderStateError,
    InvalidCodesError,
    OutputError,
    Ramp,
    StreamDecoder,
)

Array = NDArray[Any]


def joined(parts: list[Array]) -> Array:
    return np.concatenate(parts) if parts else np.empty(0, np.float32)


class Faulty(LedgerProgram):
    """Changes what it returns from call ``first`` on, ``times`` times."""

    def __init__(self, fault: Callable[[Array], Array], first: int = 0, times: int = 10**9) -> None:
        super().__init__()
        self.fault, self.range = fault, range(first, first + times)

    def step(self, codes: NDArray[np.int64], state: int) -> tuple[NDArray[np.float32], int]:
        pcm, after = super().step(codes, state)
        return (self.fault(pcm) if len(self.calls) - 1 in self.range else pcm), after


# Every frame once, in order


@pytest.mark.case(4)
@pytest.mark.parametrize("frames", [1, 2, 3, 5, 6, 13, 29, 30, 54, 55, 56])
def test_short_utterances_come_out_in_full(ledger_program: LedgerProgram, frames: int) -> None:
    codes = make_codes(frames)
    assert np.array_equal(decode(ledger_program, codes), expected_ledger(codes))
    assert ledger_program.calls == Ramp().split(frames)


@pytest.mark.case(12)
@settings(deadline=None, max_examples=100)
@given(data=st.data(), frames=st.integers(1, 60), schedule=st.lists(st.integers(1, 30), min_size=1))
def test_length_is_exact_for_any_partition(
    data: st.DataObject, frames: int, schedule: list[int]
) -> None:
    pushes: list[int] = []
    while (left := frames - sum(pushes)) > 0:
        pushes.append(data.draw(st.integers(0, left)) if len(pushes) < 8 else left)
    codes = make_codes(frames)
    pcm = decode(LedgerProgram(), codes, pushes=pushes, schedule=schedule)
    assert pcm.shape == (frames * SAMPLES,)
    assert np.array_equal(pcm, expected_ledger(codes))


@settings(deadline=None, max_examples=200)
@given(
    pushes=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), max_size=12),
    schedule=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    data=st.data(),
)
def test_lazy_consumption_loses_and_repeats_nothing(
    pushes: list[tuple[int, int]], schedule: list[int], data: st.DataObject
) -> None:
    """Push sizes, schedule, which of the iterators still around is asked, and how often."""
    codes = make_codes(sum(size for size, _ in pushes))
    program = LedgerProgram()
    decoder = StreamDecoder(program, schedule)
    iterators: list[Iterator[Array]] = []
    parts: list[Array] = []
    start = 0
    for size, asked in pushes:
        iterators.append(decoder.push(codes[start : start + size]))
        start += size
        for _ in range(asked):
            iterator = data.draw(st.sampled_from(iterators))
            parts += [pcm for pcm in [next(iterator, None)] if pcm is not None]
        assert decoder.frames_decoded + decoder.frames_pending == start
    parts += list(decoder.finish())
    assert np.array_equal(joined(parts), expected_ledger(codes))
    assert program.calls == Ramp.of(schedule).split(len(codes))
    assert not decoder.chunk_ready


@pytest.mark.case(14)
@pytest.mark.parametrize("frame", [0, 15, 29])
@pytest.mark.parametrize("row", [0, 1])
def test_code_0_is_a_code_like_any_other(
    ledger_program: LedgerProgram, frame: int, row: int
) -> None:
    codes = make_codes(30)
    codes[frame] = row  # a whole frame of zeros, or of the server's placeholder
    codes[:, 0] = np.where(np.arange(30) == frame, 0, codes[:, 0])
    assert np.array_equal(decode(ledger_program, codes), expected_ledger(codes))


@pytest.mark.case(14)
@pytest.mark.parametrize("value", [0, 1])
def test_a_single_frame_of_one_value_is_decoded(ledger_program: LedgerProgram, value: int) -> None:
    codes = np.full((1, 16), value)
    assert np.array_equal(decode(ledger_program, codes), expected_ledger(codes))


def test_chunks_come_as_soon_as_they_are_full(ledger_program: LedgerProgram) -> None:
    decoder = StreamDecoder(ledger_program, (2, 3))
    seen = [[len(pcm) // SAMPLES for pcm in decoder.push(make_codes(1))] for _ in range(8)]
    assert seen == [[], [2], [], [], [3], [], [], [3]]
    assert list(decoder.finish()) == []


def test_counters_follow_the_audio_that_was_handed_out(ledger_program: LedgerProgram) -> None:
    decoder = StreamDecoder(ledger_program, (2,))
    assert not decoder.chunk_ready
    chunks = decoder.push(make_codes(5))
    assert (decoder.frames_pending, decoder.frames_decoded, decoder.chunk_ready) == (5, 0, True)
    next(chunks)
    assert (decoder.frames_pending, decoder.frames_decoded, decoder.chunk_ready) == (3, 2, True)
    list(chunks)
    assert (decoder.frames_pending, decoder.frames_decoded, decoder.chunk_ready) == (1, 4, False)
    list(decoder.finish())
    assert (decoder.frames_pending, decoder.frames_decoded, decoder.chunk_ready) == (0, 5, False)


# Chunks that the caller asks for


@settings(deadline=None, max_examples=200)
@given(
    steps=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 3)), max_size=12),
    schedule=st.lists(st.integers(1, 6), min_size=1, max_size=4),
)
def test_decode_mixes_with_the_schedule_and_loses_nothing(
    steps: list[tuple[int, int, int]], schedule: list[int]
) -> None:
    """Push some, ask for a chunk of so many, then take so many chunks by the schedule."""
    codes = make_codes(sum(size for size, _, _ in steps))
    decoder = StreamDecoder(LedgerProgram(), schedule)
    parts: list[Array] = []
    start = 0
    for size, asked, taken in steps:
        chunks = decoder.push(codes[start : start + size])
        start += size
        if 1 <= asked <= decoder.frames_pending:
            parts.append(decoder.decode(asked))
            assert parts[-1].shape == (asked * SAMPLES,)
        for _ in range(taken):
            parts += [pcm for pcm in [next(chunks, None)] if pcm is not None]
        assert decoder.frames_decoded + decoder.frames_pending == start
    parts += list(decoder.finish())
    assert np.array_equal(joined(parts), expected_ledger(codes))


def test_decode_after_finish_takes_what_is_left(ledger_program: LedgerProgram) -> None:
    codes = make_codes(5)
    decoder = StreamDecoder(ledger_program)
    decoder.push(codes)
    rest = decoder.finish()
    parts = [decoder.decode(3), decoder.decode(2)]
    assert np.array_equal(joined(parts), expected_ledger(codes))
    assert list(rest) == [] and ledger_program.calls == [3, 2]


@pytest.mark.parametrize("frames", [0, -1, 6, 2.0, True, None])
def test_decode_takes_pending_frames_only(ledger_program: LedgerProgram, frames: Any) -> None:
    decoder = StreamDecoder(ledger_program)
    decoder.push(make_codes(5))
    with pytest.raises(ValueError, match=f"a chunk of {frames!r} frames: 5 frames are pending"):
        decoder.decode(frames)
    assert ledger_program.calls == [] and decoder.frames_pending == 5


def test_decode_keeps_to_the_bound_of_the_program(ledger_program: LedgerProgram) -> None:
    ledger_program.max_frames = 8
    decoder = StreamDecoder(ledger_program, (2,))
    decoder.push(make_codes(20))
    with pytest.raises(ValueError, match=r"9 frames: 20 .* pending, the program takes at most 8"):
        decoder.decode(9)
    assert len(decoder.decode(8)) == 8 * SAMPLES


# Bad input


@pytest.mark.case(7)
@pytest.mark.parametrize("value", [2048, 2150, 32767, -1])
@pytest.mark.parametrize("codebook", [0, 15])
@pytest.mark.parametrize("call", ["push", "prime"])
def test_bad_codes_never_reach_the_program(
    ledger_program: LedgerProgram, value: int, codebook: int, call: str
) -> None:
    decoder, other = StreamDecoder(ledger_program), StreamDecoder(ledger_program)
    good, bad = make_codes(10), make_codes(10)
    bad[3, codebook] = value
    with pytest.raises(InvalidCodesError) as caught:
        getattr(decoder, call)(bad)
    error = caught.value
    assert (error.frame, error.codebook, error.value, error.seq) == (3, codebook, value, None)
    assert f"frame 3, codebook {codebook}: id {value} is outside 0..2047" in str(error)
    assert ledger_program.calls == [] and decoder.frames_pending == 0
    for stream in (decoder, other):  # neither is the worse for it
        assert np.array_equal(joined([*stream.push(good), *stream.finish()]), expected_ledger(good))


@pytest.mark.case(36)
@pytest.mark.parametrize(
    "codes",
    [
        make_codes(10).T,
        make_codes(10)[:, :8],
        make_codes(1)[0],
        make_codes(10)[None],
        make_codes(10).astype(np.float32),
        np.zeros((10, 16), bool),
        np.zeros((10, 16), object),
        [["a"] * 16],
        None,
    ],
    ids=["transposed", "8 codebooks", "1-D", "3-D", "float", "bool", "object", "text", "None"],
)
def test_what_is_no_array_of_codes_is_refused(ledger_program: LedgerProgram, codes: Any) -> None:
    with pytest.raises(InvalidCodesError, match="codes must"):
        StreamDecoder(ledger_program).push(codes)
    assert ledger_program.calls == []


def test_no_frames_are_allowed_and_nothing_happens(ledger_program: LedgerProgram) -> None:
    decoder = StreamDecoder(ledger_program)
    assert list(decoder.push(np.empty((0, 16), np.int16))) == []
    decoder.prime(np.empty((0, 16), np.int16))
    assert list(decoder.finish()) == [] and ledger_program.calls == []


def test_codes_may_change_once_they_are_pushed(ledger_program: LedgerProgram) -> None:
    codes = make_codes(5)
    expected = expected_ledger(codes)
    decoder = StreamDecoder(ledger_program)
    chunks = decoder.push(codes)
    codes[:] = 0
    assert np.array_equal(joined([*chunks, *decoder.finish()]), expected)


@pytest.mark.parametrize("schedule", [(), (0,), (2, -1), (2.0,), (True,), "24"])
def test_a_schedule_is_positive_whole_numbers(ledger_program: LedgerProgram, schedule: Any) -> None:
    with pytest.raises(ValueError, match="a schedule is one or more positive whole numbers"):
        StreamDecoder(ledger_program, schedule)


def test_a_schedule_within_the_bound_of_the_program(ledger_program: LedgerProgram) -> None:
    ledger_program.max_frames = 8
    StreamDecoder(ledger_program, (2, 8))
    with pytest.raises(ValueError, match="chunks of 9 frames, the program takes at most 8"):
        StreamDecoder(ledger_program, (2, 9, 4))


# Order of calls


@pytest.mark.parametrize("call", ["push", "prime"])
def test_after_finish_comes_reset(ledger_program: LedgerProgram, call: str) -> None:
    decoder = StreamDecoder(ledger_program)
    decoder.push(make_codes(1))
    rest = decoder.finish()
    for _ in range(2):  # before and after the rest was taken
        with pytest.raises(DecoderStateError, match=rf"{call}\(\) after finish\(\): call reset"):
            getattr(decoder, call)(make_codes(1))
        assert len(list(rest)) <= 1
    assert list(decoder.finish()) == []
    decoder.reset()
    getattr(decoder, call)(make_codes(1))


def test_reset_ends_iterators_of_the_utterance_before(ledger_program: LedgerProgram) -> None:
    decoder = StreamDecoder(ledger_program, (1,))
    old = decoder.push(make_codes(5, seed=1))
    next(old)
    decoder.reset()
    codes = make_codes(3, seed=2)
    new = decoder.push(codes)
    assert list(old) == []
    assert np.array_equal(joined([*new, *decoder.finish()]), expected_ledger(codes))


# prime


def test_priming_advances_the_state_and_hands_out_nothing(ledger_program: LedgerProgram) -> None:
    codes = make_codes(70)
    decoder = StreamDecoder(ledger_program, (2, 25))
    decoder.prime(codes[:60])
    assert ledger_program.calls == [25, 25, 10]
    assert (decoder.frames_decoded, decoder.frames_pending) == (0, 0)
    pcm = joined([*decoder.push(codes[60:]), *decoder.finish()])
    assert np.array_equal(pcm, expected_ledger(codes)[60 * SAMPLES :])
    assert ledger_program.calls[3:] == [2, 8]


def test_prime_refuses_frames_that_are_pending(ledger_program: LedgerProgram) -> None:
    decoder = StreamDecoder(ledger_program)
    decoder.push(make_codes(1))
    with pytest.raises(DecoderStateError, match="in mid-utterance: prime first, then push"):
        decoder.prime(make_codes(5))
    assert ledger_program.calls == []


def test_a_failed_prime_leaves_the_state_as_it_was() -> None:
    program = Faulty(lambda pcm: pcm[:-1], first=1, times=1)
    decoder = StreamDecoder(program, (2, 4))
    with pytest.raises(OutputError):
        decoder.prime(make_codes(12))
    codes = make_codes(9)
    assert np.array_equal(joined([*decoder.push(codes), *decoder.finish()]), expected_ledger(codes))


# Bad output


def spoil(value: float, where: slice) -> Callable[[Array], Array]:
    def fault(pcm: Array) -> Array:
        pcm = pcm.copy()
        pcm[where] = value
        return pcm

    return fault


BAD_OUTPUTS: dict[str, tuple[Callable[[Array], Array], str]] = {
    "555 samples short": (lambda pcm: pcm[:-555], r"shape \[3285\] for 2 frames"),
    "no samples": (lambda pcm: pcm[:0], r"shape \[0\] for 2 frames"),
    "a frame too many": (lambda pcm: np.append(pcm, pcm[:SAMPLES]), r"shape \[5760\]"),
    "a batch axis": (lambda pcm: pcm[None], r"shape \[1, 3840\]"),
    **{
        f"{value} in {name}": (spoil(value, where), f"NaN or Inf in {count} of 3840 samples")
        for value in (np.nan, np.inf, -np.inf)
        for name, where, count in (
            ("one sample", slice(100, 101), 1),
            ("the last sample", slice(-1, None), 1),
            ("all samples", slice(None), 3840),
        )
    },
}


@pytest.mark.case(12)
@pytest.mark.case(21)
@pytest.mark.parametrize("fault", BAD_OUTPUTS)
def test_bad_output_is_refused_and_can_be_tried_again(fault: str) -> None:
    spoiled, message = BAD_OUTPUTS[fault]
    program = Faulty(spoiled, first=1, times=2)
    decoder = StreamDecoder(program, (2,))
    codes = make_codes(7)
    chunks = decoder.push(codes)
    parts = [next(chunks)]
    with pytest.raises(OutputError, match=message):
        next(chunks)
    assert (decoder.frames_decoded, decoder.frames_pending) == (2, 5)
    with pytest.raises(OutputError, match=message):
        next(decoder.finish())
    parts += list(decoder.finish())
    assert np.array_equal(joined(parts), expected_ledger(codes))


def test_a_chunk_that_was_asked_for_can_be_tried_again() -> None:
    spoiled, _ = BAD_OUTPUTS["no samples"]
    decoder = StreamDecoder(Faulty(spoiled, first=0, times=1))
    codes = make_codes(4)
    decoder.push(codes)
    with pytest.raises(OutputError):
        decoder.decode(2)
    assert (decoder.frames_decoded, decoder.frames_pending) == (0, 4)
    parts = [decoder.decode(2), *decoder.finish()]
    assert np.array_equal(joined(parts), expected_ledger(codes))


def test_a_program_that_raises_loses_no_frame() -> None:
    def explode(pcm: Array) -> Array:
        raise DecoderError("out of memory")

    program = Faulty(explode, first=0, times=1)
    decoder = StreamDecoder(program, (2,))
    codes = make_codes(5)
    with pytest.raises(DecoderError, match="out of memory"):
        list(decoder.push(codes))
    assert np.array_equal(
        joined([*decoder.push(codes[:0]), *decoder.finish()]), expected_ledger(codes)
    )
