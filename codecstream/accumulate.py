"""Per-step outputs of the talker to new codec frames, once each and in order.

For programs that run the talker themselves. Its step outputs come in four shapes: one new row, a
list of rows, a cumulative matrix, a list of cumulative matrices.

>>> import numpy as np
>>> from codecstream import CodeAccumulator
>>> rows = np.arange(48).reshape(3, 16)
>>> accumulator = CodeAccumulator()
>>> accumulator.push(rows[0]).shape          # one new row
(1, 16)
>>> accumulator.push(rows[:2]).tolist() == rows[1:2].tolist()   # a cumulative matrix
True
>>> accumulator.push([rows[:2], rows]).tolist() == rows[2:].tolist()   # a list of them
True
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from codecstream.codes import as_integers
from codecstream.errors import InvalidCodesError
from codecstream.geometry import CodecGeometry

__all__ = ["CodeAccumulator"]

Mode = Literal["auto", "delta", "cumulative"]


class CodeAccumulator:
    """Turns step outputs into new frames.

    Args:
        geometry: Says how many codebooks there are and how large they are.
        mode: ``"delta"`` when every output holds new rows only, ``"cumulative"`` when every output
            holds all rows so far, ``"auto"`` to tell them apart by content: an output that begins
            with every row seen so far, and is not a single row after a single one, is cumulative.
            That rule can mistake new rows for old ones only where a stream repeats itself from
            its very first row; name the mode where it is known.

    Attributes:
        frames: Frames handed out so far.
    """

    def __init__(self, geometry: CodecGeometry | None = None, *, mode: Mode = "auto") -> None:
        if mode not in ("auto", "delta", "cumulative"):
            raise ValueError(f"mode must be 'auto', 'delta' or 'cumulative', not {mode!r}")
        self._geometry = geometry or CodecGeometry()
        self._mode = mode
        self._seen = np.empty((0, self._geometry.codebooks), np.int64)
        self._count = 0
        self.frames = 0

    @property
    def rows_seen(self) -> int:
        """Talker rows so far, frames and others."""
        return self._count

    def push(
        self,
        output: ArrayLike | Sequence[ArrayLike],
        token_ids: Sequence[int] | None = None,
    ) -> NDArray[np.int64]:
        """Return the frames that are new in ``output``, int64 ``[new, codebooks]``.

        Rows with an id outside the codebook, such as padding and the stop row, are no frames.

        Args:
            output: Integers ``[codebooks]`` or ``[rows, codebooks]``, or a list of such.
            token_ids: The talker's output token ids, all so far or this step's. Rows belong to
                them from the tail: a new row in front of all ids is the prefill's placeholder, and
                a row whose id is outside the codebook is the stop row; neither is a frame.

        Raises:
            InvalidCodesError: Wrong dtype or shape, or, with ``mode="cumulative"``, an output
                that does not continue the ones before it. Nothing is taken over then.
        """
        new = self._new_rows(self._matrix(output))
        frames = self._aligned(new, token_ids)
        self._remember(new)
        size = self._geometry.codebook_size
        frames = frames[((frames >= 0) & (frames < size)).all(axis=1)]
        self.frames += len(frames)
        return frames

    def reset(self) -> None:
        """Start over, for the next utterance."""
        self._count = 0
        self.frames = 0

    def _matrix(self, output: ArrayLike | Sequence[ArrayLike]) -> NDArray[np.int64]:
        """Bring any of the four shapes to one matrix of rows."""
        if (
            not isinstance(output, (list, tuple))
            or not output
            or isinstance(output[0], int | np.integer)
        ):
            return self._rows(output)  # type: ignore[arg-type]  # no list of arrays here
        parts = [self._rows(part) for part in output]
        cumulative = self._mode == "cumulative" or (self._mode == "auto" and _grows(parts))
        return parts[-1] if cumulative else np.concatenate(parts)

    def _rows(self, output: ArrayLike) -> NDArray[np.int64]:
        array = as_integers(output)
        if array.size == 0:
            return np.empty((0, self._geometry.codebooks), np.int64)
        if array.ndim not in (1, 2) or array.shape[-1] != self._geometry.codebooks:
            raise InvalidCodesError(
                f"a step output has shape [{self._geometry.codebooks}] or "
                f"[rows, {self._geometry.codebooks}], not {list(array.shape)}"
            )
        return array.reshape(-1, self._geometry.codebooks).astype(np.int64)

    def _new_rows(self, matrix: NDArray[np.int64]) -> NDArray[np.int64]:
        if self._mode == "delta":
            return matrix
        seen = self._seen[: self._count]
        continues = len(matrix) >= len(seen) and np.array_equal(matrix[: len(seen)], seen)
        if self._mode == "cumulative" and not continues:
            raise InvalidCodesError(
                f"a cumulative output of {len(matrix)} rows does not continue "
                f"the {len(seen)} rows before it"
            )
        # One row after one equal row: a talker that repeats itself, not a matrix that stood still.
        ambiguous = len(matrix) == len(seen) == 1
        if not continues or (self._mode == "auto" and ambiguous):
            return matrix
        return matrix[len(seen) :]

    def _remember(self, new: NDArray[np.int64]) -> None:
        """Append to a buffer that doubles, so that a long stream costs linear time."""
        needed = self._count + len(new)
        if self._mode != "delta":  # which never looks back
            if needed > len(self._seen):
                grown = np.empty((max(64, 2 * needed), self._geometry.codebooks), np.int64)
                grown[: self._count] = self._seen[: self._count]
                self._seen = grown
            self._seen[self._count : needed] = new
        self._count = needed

    def _aligned(
        self, new: NDArray[np.int64], token_ids: Sequence[int] | None
    ) -> NDArray[np.int64]:
        if token_ids is None or len(new) == 0:
            return new
        ids = np.asarray(token_ids, dtype=np.int64).reshape(-1)[-len(new) :]
        rows = new[len(new) - len(ids) :]
        return rows[(ids >= 0) & (ids < self._geometry.codebook_size)]


def _grows(parts: list[NDArray[np.int64]]) -> bool:
    """Whether each part begins with the one before it; single rows are a list of rows."""
    return any(len(part) > 1 for part in parts) and all(
        np.array_equal(long[: len(short)], short) for short, long in itertools.pairwise(parts)
    )
