"""The talker's step outputs, in all their shapes, to frames: once each, in order."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from support import make_codes

from codecstream import CodeAccumulator, CodecGeometry, InvalidCodesError

Codes = NDArray[np.int64]
STOP = 2150


class Tensor:
    """Like a torch tensor: no list, no array, but it can become one."""

    def __init__(self, values: Codes) -> None:
        self._values = values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self._values, dtype)


def cumulative(rows: Codes, bounds: list[int]) -> list[Any]:
    return [rows[:end] for end in bounds[1:]]


def list_of_cumulative(rows: Codes, bounds: list[int]) -> list[Any]:
    """A list per step: a matrix for every row that came since."""
    return [
        [rows[:i] for i in range(start + 1, end + 1)] for start, end in itertools.pairwise(bounds)
    ]


# How one talker could hand out ``rows`` in steps that end at ``bounds``.
SHAPES: dict[str, Callable[[Codes, list[int]], list[Any]]] = {
    "row": lambda rows, _: [row for row in rows],
    "row [1, 16]": lambda rows, _: [row[None] for row in rows],
    "plain lists": lambda rows, _: [row.tolist() for row in rows],
    "tensor": lambda rows, _: [Tensor(row) for row in rows],
    "delta": lambda rows, bounds: [rows[a:b] for a, b in itertools.pairwise(bounds)],
    "list of rows": lambda rows, bounds: [
        list(rows[a:b]) for a, b in itertools.pairwise(bounds)
    ],
    "tuple of tensors [1, 16]": lambda rows, bounds: [
        tuple(Tensor(row[None]) for row in rows[a:b]) for a, b in itertools.pairwise(bounds)
    ],
    "cumulative": cumulative,
    "cumulative tensor": lambda rows, bounds: [Tensor(m) for m in cumulative(rows, bounds)],
    "list of cumulative": list_of_cumulative,
    "list of one cumulative": lambda rows, bounds: [[m] for m in cumulative(rows, bounds)],
}  # fmt: skip


def push_all(accumulator: CodeAccumulator, outputs: list[Any]) -> list[list[int]]:
    return [row for output in outputs for row in accumulator.push(output).tolist()]


@st.composite
def utterances(draw: st.DrawFn) -> tuple[Codes, list[int]]:
    """Rows, not all different, and the step boundaries, from 0 to their number.

    The first row comes once: a stream that repeats itself from its very first row is the one that
    ``mode="auto"`` cannot tell from a cumulative one.
    """
    seeds = draw(st.lists(st.integers(1, 6), max_size=30))
    rows = np.stack([make_codes(1, seed)[0] for seed in [0, *seeds]])
    inner = draw(st.sets(st.integers(1, len(rows)), max_size=len(rows)))
    return rows, sorted({0, *inner, len(rows)})


@given(utterances(), st.sampled_from(sorted(SHAPES)))
def test_every_shape_gives_every_row_once_in_order(
    utterance: tuple[Codes, list[int]], shape: str
) -> None:
    rows, bounds = utterance
    accumulator = CodeAccumulator()
    assert push_all(accumulator, SHAPES[shape](rows, bounds)) == rows.tolist()
    assert accumulator.frames == accumulator.rows_seen == len(rows)


@given(utterances(), st.data())
def test_shapes_mixed_in_one_stream(
    utterance: tuple[Codes, list[int]], data: st.DataObject
) -> None:
    """Case 5: a talker that changes from deltas to snapshots, and back, is not heard twice."""
    rows, bounds = utterance
    accumulator = CodeAccumulator()
    heard: list[list[int]] = []
    for start, end in itertools.pairwise(bounds):
        output: Any = data.draw(
            st.sampled_from([rows[start:end], list(rows[start:end]), rows[:end], [rows[:end]]])
        )
        heard += accumulator.push(output).tolist()
    assert heard == rows.tolist()


@pytest.mark.case(5)
def test_case_5_from_deltas_to_snapshots_in_mid_stream() -> None:
    rows, accumulator = make_codes(10), CodeAccumulator()
    outputs = [*rows[:4], rows[:5], rows[:5], rows[:8], [rows[:9], rows]]
    assert push_all(accumulator, outputs) == rows.tolist()


@given(utterances())
def test_named_modes(utterance: tuple[Codes, list[int]]) -> None:
    rows, bounds = utterance
    for mode, shape in [
        ("delta", "delta"),
        ("delta", "row"),
        ("delta", "list of rows"),
        ("cumulative", "cumulative"),
        ("cumulative", "list of cumulative"),
    ]:
        accumulator = CodeAccumulator(mode=mode)  # type: ignore[arg-type]
        assert push_all(accumulator, SHAPES[shape](rows, bounds)) == rows.tolist()


def test_named_modes_take_repetition_as_what_it_is() -> None:
    """What ``auto`` must guess, the modes know: two equal outputs of two rows."""
    rows = make_codes(2)
    assert push_all(CodeAccumulator(mode="delta"), [rows, rows]) == [*rows.tolist()] * 2
    assert push_all(CodeAccumulator(mode="cumulative"), [rows, rows]) == rows.tolist()
    one = rows[:1]
    assert push_all(CodeAccumulator(mode="delta"), [one, one]) == one.tolist() * 2
    assert push_all(CodeAccumulator(mode="cumulative"), [one, one]) == one.tolist()
    assert push_all(CodeAccumulator(), [one, one]) == one.tolist() * 2


@pytest.mark.case(14)
@pytest.mark.parametrize("value", [0, 1, 2047])
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_case_14_a_row_of_one_value_is_a_frame(value: int, shape: str) -> None:
    rows = make_codes(5)
    rows[2] = value
    assert push_all(CodeAccumulator(), SHAPES[shape](rows, [0, 2, 5])) == rows.tolist()
    rows[0] = value
    assert push_all(CodeAccumulator(), SHAPES[shape](rows, [0, 2, 5])) == rows.tolist()


@pytest.mark.parametrize("bad", [-1, 2048, STOP, 10**9])
@pytest.mark.parametrize("codebook", [0, 7, 15])
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_rows_outside_the_codebook_are_no_frames(shape: str, codebook: int, bad: int) -> None:
    rows = make_codes(6)
    rows[[3, 5], codebook] = bad
    accumulator = CodeAccumulator()
    assert push_all(accumulator, SHAPES[shape](rows, [0, 2, 6])) == rows[[0, 1, 2, 4]].tolist()
    assert (accumulator.frames, accumulator.rows_seen) == (4, 6)


@pytest.mark.parametrize("ids_so_far", [True, False], ids=["all ids", "this step's ids"])
@pytest.mark.parametrize("shape", ["row", "cumulative", "list of cumulative", "list of rows"])
def test_rows_belong_to_token_ids_from_the_tail(shape: str, ids_so_far: bool) -> None:
    """One row more than ids, the prefill's placeholder; the last id is the stop token.

    Both rows have codes like any other: only their place tells them apart.
    """
    rows = make_codes(6)
    rows[0] = 1  # the placeholder
    ids = [5, 0, 2047, 7, STOP]  # of rows 1 to 5
    bounds = list(range(7)) if shape == "row" else [0, 2, 3, 6]
    accumulator = CodeAccumulator()
    heard = []
    for (start, end), output in zip(
        itertools.pairwise(bounds), SHAPES[shape](rows, bounds), strict=True
    ):
        # Row i has id i - 1; the placeholder has none.
        step_ids = ids[0 if ids_so_far else max(0, start - 1) : end - 1]
        heard += accumulator.push(output, token_ids=step_ids).tolist()
    assert heard == rows[1:5].tolist()
    assert (accumulator.frames, accumulator.rows_seen) == (4, 6)


def test_a_placeholder_before_any_id_is_no_frame() -> None:
    accumulator = CodeAccumulator()
    assert accumulator.push(np.ones(16, int), token_ids=[]).shape == (0, 16)
    ids: Any = np.array([3])
    assert accumulator.push(make_codes(1)[0], token_ids=ids).shape == (1, 16)


@pytest.mark.parametrize("empty", [[], (), np.empty((0, 16), np.int64), np.empty(0), [[]]])
def test_an_empty_output_is_no_rows(empty: Any) -> None:
    accumulator = CodeAccumulator()
    frames = accumulator.push(empty)
    assert frames.shape == (0, 16)
    assert frames.dtype == np.int64
    assert accumulator.push(make_codes(2)).shape == (2, 16)
    assert accumulator.push(empty).shape == (0, 16)


def test_frames_are_the_callers_own() -> None:
    """Neither the talker's buffer nor the accumulator's memory is handed out."""
    rows, accumulator = make_codes(2), CodeAccumulator()
    kept = rows.copy()
    accumulator.push(rows)[:] = 0
    assert np.array_equal(rows, kept)
    rows[:] = 1  # the talker uses its buffer again
    assert accumulator.push(kept).shape == (0, 16)


@pytest.mark.parametrize("dtype", ["i2", "u2", "i4", ">i4", "u8"])
def test_any_integer_width(dtype: str) -> None:
    rows = make_codes(3)
    frames = CodeAccumulator().push(rows.astype(dtype))
    assert frames.dtype == np.int64
    assert np.array_equal(frames, rows)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (np.zeros((1, 16)), "integers, not float64"),
        (np.zeros((1, 16), bool), "integers, not bool"),
        (np.full((1, 16), "a"), "integers"),
        (None, "integers, not object"),
        ([np.zeros(16, int), np.zeros(16)], "integers, not float64"),
        (np.zeros((1, 8), int), r"\[rows, 16\], not \[1, 8\]"),
        (np.zeros(15, int), r"not \[15\]"),
        ([1, 2, 3], r"not \[3\]"),
        (np.zeros((1, 1, 16), int), r"not \[1, 1, 16\]"),
        (5, r"not \[\]"),
        ([np.zeros(16, int), np.zeros((2, 32), int)], r"not \[2, 32\]"),
    ],
)
def test_outputs_of_a_wrong_kind(output: Any, message: str) -> None:
    """They are refused, and nothing of them is taken over."""
    rows, accumulator = make_codes(3), CodeAccumulator()
    accumulator.push(rows[:2])
    with pytest.raises(InvalidCodesError, match=message):
        accumulator.push(output)
    assert (accumulator.frames, accumulator.rows_seen) == (2, 2)
    assert accumulator.push(rows).tolist() == rows[2:].tolist()


@pytest.mark.parametrize("output", [make_codes(1), make_codes(3, seed=1)], ids=["shorter", "other"])
def test_a_cumulative_output_must_continue(output: Codes) -> None:
    rows, accumulator = make_codes(3), CodeAccumulator(mode="cumulative")
    accumulator.push(rows[:2])
    with pytest.raises(InvalidCodesError, match=rf"{len(output)} rows.*the 2 rows before"):
        accumulator.push(output)
    assert accumulator.push(rows).tolist() == rows[2:].tolist()


def test_unknown_mode() -> None:
    mode: Any = "snapshot"
    with pytest.raises(ValueError, match="'auto', 'delta' or 'cumulative', not 'snapshot'"):
        CodeAccumulator(mode=mode)


@pytest.mark.parametrize("mode", ["auto", "cumulative", "delta"])
def test_reset_forgets_everything(mode: Literal["auto", "delta", "cumulative"]) -> None:
    accumulator = CodeAccumulator(mode=mode)
    for rows in (make_codes(100), make_codes(70, seed=1), make_codes(70, seed=1)):
        assert accumulator.push(rows).tolist() == rows.tolist()
        assert accumulator.frames == len(rows)
        accumulator.reset()
        assert (accumulator.frames, accumulator.rows_seen) == (0, 0)


def test_another_geometry() -> None:
    geometry = CodecGeometry(codebooks=2, codebook_size=10)
    accumulator = CodeAccumulator(geometry)
    assert accumulator.push([[9, 0], [10, 0], [0, 9]]).tolist() == [[9, 0], [0, 9]]


def test_memory_in_delta_mode_does_not_grow() -> None:
    """A day of speech is a million rows of 128 bytes; none of them is kept."""
    accumulator, row = CodeAccumulator(mode="delta"), make_codes(1)[0]
    accumulator.push(row)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(5_000):
            accumulator.push(row)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert accumulator.frames == 5_001
    assert after - before < 20_000


# Known faults: each becomes a plain test when the code is right


@pytest.mark.parametrize("mode", ["auto", "cumulative"])
def test_a_list_of_cumulative_matrices_that_stood_still(
    mode: Literal["auto", "cumulative"],
) -> None:
    """Of a list of cumulative matrices the last one counts, also when it has no row more."""
    rows, accumulator = make_codes(3), CodeAccumulator(mode=mode)
    outputs = [[rows[:2], rows[:2]], [rows[:2], rows, rows]]
    assert push_all(accumulator, outputs) == rows.tolist()


def test_a_list_of_deltas_is_joined_in_delta_mode() -> None:
    rows = make_codes(2)
    outputs = [[rows[:1], rows]]
    assert push_all(CodeAccumulator(mode="delta"), outputs) == [*rows[:1].tolist(), *rows.tolist()]


def test_ragged_rows_are_refused() -> None:
    with pytest.raises(InvalidCodesError):
        CodeAccumulator().push([[[1, 2], [3]]])


def test_unreadable_token_ids_take_nothing_over() -> None:
    rows, accumulator = make_codes(1), CodeAccumulator()
    ids: Any = [None]
    with pytest.raises((TypeError, ValueError)):
        accumulator.push(rows, token_ids=ids)
    assert accumulator.rows_seen == 0
