"""Decode an utterance in some order of chunks, and compare it with a reference as it comes."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from codecstream.decoder import StreamDecoder
from codecstream.errors import CodecStreamError
from codecstream.geometry import CodecGeometry
from codecstream.runtimes import Program
from codecstream.schedule import Ramp
from codecstream_parity.floors import Floors
from codecstream_parity.measures import Measured, Signals, align
from codecstream_parity.references import Reference, WavReference, decode_pieces
from codecstream_parity.report import RELATED, Report, judge, seams_of

__all__ = ["Run", "check_program", "compare_pieces", "random_chunks"]

Progress = Callable[[int], None]

KEEP_S = 60.0  # of both signals, for plots and for listening
RESET_FRAMES = 60
# A window has forgotten what lies more than its context back: more frames show nothing new.
WINDOWED_RANDOM_FRAMES = 325  # every size from 1 to 25 once


@dataclass(frozen=True, slots=True)
class Run:
    """One decoding of an utterance, compared.

    Attributes:
        name: ``schedule``, ``after reset``, ``random partition``, ``side by side``, or a recorded
            utterance's.
        chunks: Frames per chunk.
        report: The figures.
        failure: Why the decoder stopped early, or None.
        reference: The first minute of the reference, float32 ``[samples]``.
        output: The same of the output.
    """

    name: str
    chunks: tuple[int, ...]
    report: Report
    failure: str | None
    reference: NDArray[np.float32] = dataclasses.field(repr=False)
    output: NDArray[np.float32] = dataclasses.field(repr=False)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it does not pass."""
        failure = () if self.failure is None else (f"the decoder failed: {self.failure}",)
        return (*failure, *self.report.reasons)


def check_program(
    program: Program,
    reference: Reference,
    codes: NDArray[np.int64],
    schedule: Sequence[int],
    floors: Floors,
    *,
    seed: int = 0,
    random_frames: int | None = None,
    schedule_only: bool = False,
    progress: Progress = lambda frames: None,
) -> Iterator[Run]:
    """Yield the runs that a program has to pass, each when it is done.

    The schedule that a client uses; the beginning once more on the same decoder, after a reset;
    chunks of random sizes on a new one; and the beginning while another utterance is decoded. Any
    of the four can go wrong alone.

    Args:
        program: The program.
        reference: What it should compute.
        codes: int64 ``[frames, codebooks]``.
        schedule: Frames per chunk; the last size repeats.
        floors: What it must reach.
        seed: Of the random sizes.
        random_frames: Frames of the run in random sizes; None for all.
        schedule_only: Leave the other three runs out.
        progress: See :func:`compare_pieces`.
    """
    ramp = Ramp.of(schedule)
    decoder = StreamDecoder(program, ramp)

    def run(name: str, decoder: StreamDecoder, codes: NDArray[np.int64], chunks: list[int]) -> Run:
        pieces = decode_pieces(decoder, codes)
        return compare_pieces(
            name, reference, pieces, codes, chunks, floors, program.geometry, progress
        )

    yield run("schedule", decoder, codes, ramp.split(len(codes)))
    if schedule_only:
        return
    start = codes[:RESET_FRAMES]
    decoder.reset()
    yield run("after reset", decoder, start, ramp.split(len(start)))
    part = codes if random_frames is None else codes[:random_frames]
    chunks = random_chunks(len(part), max(ramp.sizes), seed)
    yield run("random partition", StreamDecoder(program, chunks), part, chunks)
    chunks = ramp.split(len(start))
    beside = decode_pieces(StreamDecoder(_SideBySide(program), ramp), start)
    yield compare_pieces(
        "side by side", reference, _held(beside), start, chunks, floors, program.geometry, progress
    )


class _SideBySide:
    """A program that decodes other frames from each state first, for an utterance beside."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self.geometry = program.geometry
        self.max_frames = program.max_frames
        self.decoder_id = program.decoder_id

    def initial_state(self) -> Any:
        state = self._program.initial_state()
        self._program.initial_state()
        return state

    def step(self, codes: NDArray[np.int64], state: Any) -> tuple[NDArray[np.float32], Any]:
        self._program.step((codes + 1) % self.geometry.codebook_size, state)
        return self._program.step(codes, state)


def _held(pieces: Iterable[NDArray[np.float32]]) -> Iterator[NDArray[np.float32]]:
    """Yield pieces when the last of them was made, as a player with a buffer uses them."""
    made: list[NDArray[np.float32]] = []
    failure: Exception | None = None
    try:
        for pcm in pieces:
            made.append(pcm)
    except Exception as error:  # whatever it is, told after what was made before it
        failure = error
    yield from made
    if failure is not None:
        raise failure


def random_chunks(frames: int, largest: int, seed: int) -> list[int]:
    """Return seeded chunk sizes from 1 to ``largest``, together ``frames``.

    No size comes again before every other came: ``largest * (largest + 1) / 2`` frames have all.
    """
    source = random.Random(seed)
    sizes: list[int] = []
    waiting: list[int] = []
    while frames > 0:
        if not waiting:
            waiting = list(range(1, min(largest, frames) + 1))
            source.shuffle(waiting)
        sizes.append(min(waiting.pop(), frames))
        frames -= sizes[-1]
    return sizes


def compare_pieces(
    name: str,
    reference: Reference,
    output: Iterable[NDArray[np.float32]],
    codes: NDArray[np.int64],
    chunks: Sequence[int],
    floors: Floors,
    geometry: CodecGeometry,
    progress: Progress = lambda frames: None,
) -> Run:
    """Compare what an iterator yields with a reference; neither is held in memory as a whole.

    Args:
        name: Of the run.
        reference: What should come.
        output: float32 ``[samples]`` each. When it raises an error of this package, the run ends
            there and fails.
        codes: What both decode.
        chunks: Frames per chunk of the output.
        floors: What it must reach.
        geometry: Rates of both.
        progress: Called with the number of frames that both have reached.
    """
    if isinstance(reference, WavReference):
        return _compare_with_wav(name, reference, output, chunks, floors, geometry)
    samples_per_frame = geometry.samples_per_frame
    signals = Signals(samples_per_frame)
    kept = _Kept(geometry), _Kept(geometry)
    expected, made = iter(reference.pieces(codes, chunks)), _UntilFailure(output)
    received = [0, 0]
    pieces: list[Iterator[NDArray[np.float32]] | None] = [expected, made]
    while any(pieces):
        # Whichever is behind goes on, so that little waits for the other.
        which = min((i for i in (0, 1) if pieces[i] is not None), key=lambda i: received[i])
        source = pieces[which]
        assert source is not None
        pcm = next(source, None)
        if pcm is None:
            pieces[which] = None
            continue
        received[which] += pcm.size
        kept[which].add(pcm)
        (signals.push_output if which else signals.push_reference)(pcm)
        progress(min(received) // samples_per_frame)
    measured = signals.finish()
    report = judge(measured, seams_of(chunks), floors, geometry.sample_rate_hz)
    return Run(name, tuple(chunks), report, made.failure, kept[0].pcm(), kept[1].pcm())


def _compare_with_wav(
    name: str,
    reference: WavReference,
    output: Iterable[NDArray[np.float32]],
    chunks: Sequence[int],
    floors: Floors,
    geometry: CodecGeometry,
) -> Run:
    """The same where the reference may begin earlier or later than the output."""
    made = _UntilFailure(output)
    pcm = np.concatenate([np.empty(0, np.float32), *made])
    alignment = align(reference.pcm, pcm)
    # Of signals that are not alike, a lag means nothing, and nothing is taken out.
    alike = alignment is not None and abs(alignment.correlation) >= RELATED
    lag = alignment.lag_samples if alignment is not None and alike else 0
    samples = geometry.samples_per_frame
    # Cut at a frame of the output, so that its slices stay codec frames.
    skipped = -(-max(lag, 0) // samples)
    aligned = reference.pcm[skipped * samples - lag :], pcm[skipped * samples :]
    signals = Signals(samples)
    signals.push_reference(aligned[0])
    signals.push_output(aligned[1])
    measured: Measured = dataclasses.replace(
        signals.finish(),
        alignment=alignment,
        reference_samples=reference.pcm.size,
        output_samples=pcm.size,
    )
    report = judge(measured, seams_of(chunks) - skipped, floors, geometry.sample_rate_hz)
    kept = int(KEEP_S * geometry.sample_rate_hz)
    return Run(
        name,
        tuple(chunks),
        report,
        made.failure,
        aligned[0][:kept].copy(),
        aligned[1][:kept].copy(),
    )


class _UntilFailure(Iterator[NDArray[np.float32]]):
    """What an iterator yields until it fails, which is kept: any failure is the program's."""

    def __init__(self, pieces: Iterable[NDArray[np.float32]]) -> None:
        self._pieces = iter(pieces)
        self.failure: str | None = None

    def __next__(self) -> NDArray[np.float32]:
        if self.failure is not None:
            raise StopIteration
        try:
            return next(self._pieces)
        except StopIteration:
            raise
        except Exception as error:  # a program may raise anything, and that is what was asked
            ours = isinstance(error, CodecStreamError)
            self.failure = str(error) if ours else f"{type(error).__name__}: {error}"
            raise StopIteration from None


class _Kept:
    """The first minute of a signal."""

    def __init__(self, geometry: CodecGeometry) -> None:
        self._room = int(KEEP_S * geometry.sample_rate_hz)
        self._parts: list[NDArray[np.float32]] = [np.empty(0, np.float32)]

    def add(self, pcm: NDArray[np.float32]) -> None:
        part = pcm[: self._room]
        self._room -= part.size
        if part.size:
            self._parts.append(part.copy())

    def pcm(self) -> NDArray[np.float32]:
        return np.concatenate(self._parts)
