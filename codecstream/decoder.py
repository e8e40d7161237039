"""Frames in, sound out: the state of one utterance on top of a decoder program.

::

    program = codecstream.load_program("artifact-dir")
    decoder = codecstream.StreamDecoder(program)
    for codes in packets:                  # int [n, 16], any n
        for pcm in decoder.push(codes):    # float32 [1920 * frames], as chunks fill
            play(pcm)
    for pcm in decoder.finish():           # whatever is left
        play(pcm)
    decoder.reset()                        # ready for the next utterance
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from codecstream.codes import FrameQueue, check_codes
from codecstream.errors import DecoderStateError, OutputError
from codecstream.runtimes import Program
from codecstream.schedule import DEFAULT_RAMP, Ramp

if TYPE_CHECKING:
    from codecstream.sampling import SampleRecorder, UtteranceSampler

__all__ = ["StreamDecoder"]


class StreamDecoder:
    """Decodes one utterance at a time, chunk by chunk.

    The audio does not depend on how frames were grouped into ``push`` calls or chunks, and
    ``frames`` frames are exactly ``frames * 1920`` samples once ``finish`` is exhausted.

    A decoder belongs to one thread at a time; several decoders may share one program.

    Args:
        program: From :func:`codecstream.load_program`.
        schedule: Frames per chunk; the last size repeats.
        sampler: Keeps codes and sound of some utterances, for a check later; None for none.

    Raises:
        ValueError: The schedule is empty or not positive, or asks for more than the program takes.
    """

    def __init__(
        self,
        program: Program,
        schedule: Ramp | Iterable[int] = DEFAULT_RAMP,
        *,
        sampler: UtteranceSampler | None = None,
    ) -> None:
        self._program = program
        self._sampler = sampler
        self._recorder: SampleRecorder | None = None
        self._ramp = Ramp.of(schedule)
        largest = max(self._ramp.sizes)
        if program.max_frames is not None and largest > program.max_frames:
            raise ValueError(
                f"the schedule asks for chunks of {largest} frames, "
                f"the program takes at most {program.max_frames}"
            )
        self.reset()

    def reset(self) -> None:
        """Drop frames and state; bit for bit a new decoder."""
        self._end_sample()
        self._state = self._program.initial_state()
        self._pending = FrameQueue()
        self._begun = False
        self._finishing = False
        self._chunks = 0
        self._frames = 0

    @property
    def frames_pending(self) -> int:
        """Frames pushed but not decoded yet."""
        return self._pending.frames

    @property
    def frames_decoded(self) -> int:
        """Frames whose audio was handed out since the last reset."""
        return self._frames

    @property
    def sampling(self) -> bool:
        """Whether this utterance is being kept; what ``finish`` returns writes it at its end."""
        return self._recorder is not None

    @property
    def chunk_ready(self) -> bool:
        """Whether the next iterator would have a chunk to decode."""
        enough = 1 if self._finishing else self._ramp.size(self._chunks)
        return self._pending.frames >= enough

    def push(self, codes: ArrayLike) -> Iterator[NDArray[np.float32]]:
        """Take frames and return an iterator over the chunks that are now full.

        The frames are checked and taken at once; each chunk is decoded when the iterator is asked
        for it. Chunks that nobody asked for come from the next ``push`` or ``finish``. When
        decoding a chunk fails, its frames and the state stay as they were: the next iterator
        tries it again.

        Args:
            codes: Integer ``[frames, codebooks]``, ids from 0 to 2047; zero frames are allowed.

        Returns:
            An iterator over float32 ``[samples]`` at 24 kHz.

        Raises:
            InvalidCodesError: The codes cannot be decoded; none of them was taken.
            DecoderStateError: ``finish`` was called and ``reset`` was not.
            DecoderError: While iterating: the program failed.
            OutputError: While iterating: the program returned NaN, Inf or a wrong length.
        """
        self._require_open("push")
        self._pending.append(check_codes(codes, self._program.geometry))
        return self._decode_pending()

    def decode(self, frames: int) -> NDArray[np.float32]:
        """Decode the next ``frames`` pending frames as one chunk, whatever the schedule says.

        For a caller that decides by itself, such as by a :mod:`codecstream.policy`: push, leave
        the iterator alone, and ask for chunks here. When it fails, the frames and the state stay
        as they were.

        Args:
            frames: From 1 to :attr:`frames_pending`, and no more than the program takes.

        Returns:
            float32 ``[samples]`` at 24 kHz.

        Raises:
            ValueError: Another number of frames.
            DecoderError, OutputError: As for :meth:`push`.
        """
        most = min(self._pending.frames, self._program.max_frames or self._pending.frames)
        if type(frames) is not int or not 1 <= frames <= most:
            bound = self._program.max_frames and f"at most {self._program.max_frames}"
            raise ValueError(
                f"a chunk of {frames!r} frames: {self._pending.frames} frames are pending, "
                f"the program takes {bound or 'any number'}"
            )
        codes = self._pending.peek(frames)
        pcm, state = self._step(codes, self._state)
        self._state = state
        self._pending.drop(frames)
        self._chunks += 1
        self._frames += frames
        self._begin_sample()
        if self._recorder is not None:
            self._recorder.chunk(codes, pcm)
        return pcm

    def finish(self) -> Iterator[NDArray[np.float32]]:
        """Return an iterator over what is left, the short last chunk included.

        Errors while iterating are those of :meth:`push`; ``finish`` may then be called again.
        """
        self._finishing = True
        return self._decode_pending()

    def prime(self, codes: ArrayLike) -> None:
        """Run reference frames through the state before an utterance and discard their audio.

        What is pushed afterwards sounds as if it followed those frames. When it fails, the state
        stays as it was. It may be called several times.

        Args:
            codes: Integer ``[frames, codebooks]``.

        Raises:
            DecoderStateError: The utterance has begun, or ``finish`` was called.
            InvalidCodesError, DecoderError, OutputError: As for :meth:`push`.
        """
        self._require_open("prime")
        if self._chunks or self._pending.frames:
            raise DecoderStateError("prime() in mid-utterance: prime first, then push")
        checked = check_codes(codes, self._program.geometry)
        state = self._state
        largest = max(self._ramp.sizes)
        for start in range(0, len(checked), largest):
            _, state = self._step(checked[start : start + largest], state)
        self._state = state
        self._begin_sample()
        if self._recorder is not None:
            self._recorder.prime(checked)

    def _require_open(self, call: str) -> None:
        if self._finishing:
            raise DecoderStateError(f"{call}() after finish(): call reset() for the next utterance")

    def _decode_pending(self) -> Iterator[NDArray[np.float32]]:
        pending = self._pending
        while self.chunk_ready and pending is self._pending:  # reset() ends older iterators
            yield self.decode(min(self._ramp.size(self._chunks), pending.frames))
        if self._finishing and not self.frames_pending and pending is self._pending:
            self._end_sample()  # after the last sound was handed out

    def _begin_sample(self) -> None:
        if self._sampler is not None and not self._begun:
            self._recorder = self._sampler.begin(self._program)
        self._begun = True

    def _end_sample(self) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.end(complete=self._finishing and not self.frames_pending)

    def _step(self, codes: NDArray[np.int64], state: object) -> tuple[NDArray[np.float32], object]:
        pcm, after = self._program.step(codes, state)
        expected = len(codes) * self._program.geometry.samples_per_frame
        if pcm.shape != (expected,):
            raise OutputError(
                f"the program returned shape {list(pcm.shape)} for {len(codes)} frames, "
                f"which are [{expected}] samples"
            )
        if not np.isfinite(pcm).all():
            bad = int(np.count_nonzero(~np.isfinite(pcm)))
            raise OutputError(f"the program returned NaN or Inf in {bad} of {expected} samples")
        return pcm, after
