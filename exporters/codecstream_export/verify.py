"""Hold a written artifact against the eager decoder before anyone relies on it."""

from __future__ import annotations

import functools
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from codecstream.runtimes import Program
from codecstream.schedule import Ramp
from codecstream_export.eager import EagerDecoder
from codecstream_export.errors import ParityError
from codecstream_export.random_weights import random_codes
from codecstream_export.reference import eager_pcm, window_pcm
from codecstream_export.tracing import COMMON_MAX_FRAMES
from codecstream_parity import slice_snr_db, snr_db
from codecstream_parity.floors import floors_for
from codecstream_parity.runs import random_chunks

__all__ = ["FLOORS", "Floor", "Parity", "RealTime", "check_parity", "check_windows", "run_program"]

MIN_REFERENCE_RMS = 1e-4
WHOLE, WINDOW = "eager, all frames at once", "eager, the same window of frames"
# Another seed than the ones that weights are calibrated with.
VERIFY_SEED = 7_919


@dataclass(frozen=True, slots=True)
class Floor:
    """What an artifact must reach: SNR overall and in the worst 80 ms, and over how many frames."""

    snr_db: float
    slice_snr_db: float  # a quiet slice has the same noise under less signal
    frames: int

    def replaced(self, snr_db: float | None, slice_snr_db: float | None) -> Floor:
        """Return this floor with what is given in place of its own figures."""
        return Floor(
            self.snr_db if snr_db is None else snr_db,
            self.slice_snr_db if slice_snr_db is None else slice_snr_db,
            self.frames,
        )


# 220 frames are three attention windows of 72 and a tail; codecstream-parity decodes more.
FRAMES = {"fp32": 220, "fp16": 220, "int8": 440}


def _floor(precision: str) -> Floor:
    floors = floors_for(precision)
    assert floors.snr_db is not None and floors.worst_slice_snr_db is not None
    return Floor(floors.snr_db, floors.worst_slice_snr_db, FRAMES[precision])


FLOORS = {precision: _floor(precision) for precision in FRAMES}


@dataclass(frozen=True, slots=True)
class Parity:
    """How close a program's audio is to a reference's, for one order of chunk sizes."""

    order: str
    reference: str
    frames: int
    seed: int
    snr_db: float
    worst_slice_snr_db: float
    min_snr_db: float | None  # None: measured, not required
    min_slice_snr_db: float | None

    def to_json(self) -> dict[str, object]:
        """Return the fields for the manifest.

        A ratio without noise, for which JSON has no number, is null, with ``exact`` true.
        """
        fields = asdict(self)
        for name in ("snr_db", "worst_slice_snr_db"):
            if not math.isfinite(fields[name]):
                fields[name] = None
        return {**fields, "exact": math.isinf(self.snr_db)}


def check_parity(
    program: Program,
    decoder: EagerDecoder,
    ramp: Sequence[int],
    floor: Floor = FLOORS["fp32"],
    seed: int = VERIFY_SEED,
) -> list[Parity]:
    """Decode seeded codes with ``program`` in ramp order, and with every chunk size once.

    Args:
        program: The program, reloaded from disk.
        decoder: The eager decoder of the same checkpoint.
        ramp: Chunk sizes in frames.
        floor: What it must reach.
        seed: Seed of the codes and of the random order.

    Raises:
        ParityError: An order falls short of the floor; or the eager decoder is silent, and
            anything would agree with it.
    """
    orders = {"ramp": _ramp_order(ramp, floor.frames)}
    # A size that the program refuses, or gets wrong, must show here and not on a device.
    bound = program.max_frames or max(COMMON_MAX_FRAMES, *ramp)
    sizes = [*range(1, min(bound, COMMON_MAX_FRAMES) + 1)]
    orders["every size"] = random.Random(seed).sample(sizes, len(sizes))
    frames = max(sum(order) for order in orders.values())
    codes = random_codes(frames, decoder.config, seed).numpy()
    reference = eager_pcm(decoder, codes)
    _require_sound(reference)
    results = []
    for order, chunks in orders.items():
        output = run_program(program, codes, chunks)
        results.append(
            _compare(order, WHOLE, _first(reference, chunks, decoder), output, seed, floor, decoder)
        )
    return results


def check_windows(
    program: Program,
    decoder: EagerDecoder,
    ramp: Sequence[int],
    context: int,
    floor: Floor,
    seed: int = VERIFY_SEED,
) -> list[Parity]:
    """Hold a windowed program against the eager decoder of the same windows, chunk by chunk.

    How far windows are from decoding all frames at once is measured too. That is the mode's
    approximation and not a fault of the program, so it has no floor here.

    Raises:
        ParityError: As for :func:`check_parity`.
    """
    largest = max(ramp)
    orders = {
        "ramp": _ramp_order(ramp, floor.frames),
        "random": random_chunks(context + 3 * largest, largest, seed),
    }
    frames = max(sum(order) for order in orders.values())
    codes = random_codes(frames, decoder.config, seed).numpy()
    whole = eager_pcm(decoder, codes)
    _require_sound(whole)
    results = []
    for order, chunks in orders.items():
        output = run_program(program, codes, chunks)
        decode = functools.partial(eager_pcm, decoder)
        reference = np.concatenate(list(window_pcm(decode, codes, chunks, context)))
        results.append(_compare(order, WINDOW, reference, output, seed, floor, decoder))
        if order == "ramp":
            results.append(
                _compare(
                    "ramp, approximation",
                    WHOLE,
                    _first(whole, chunks, decoder),
                    output,
                    seed,
                    None,
                    decoder,
                )
            )
    return results


def _first(
    reference: NDArray[np.float32], chunks: Sequence[int], decoder: EagerDecoder
) -> NDArray[np.float32]:
    """Return the part of the reference that chunks of these sizes decode."""
    return reference[: sum(chunks) * decoder.config.samples_per_frame]


def _compare(
    order: str,
    name: str,
    reference: NDArray[np.float32],
    output: NDArray[np.float32],
    seed: int,
    floor: Floor | None,
    decoder: EagerDecoder,
) -> Parity:
    samples = decoder.config.samples_per_frame
    if len(output) != len(reference):
        raise ParityError(
            f"the exported program makes {len(output)} samples in {order} order, the reference "
            f"({name}) {len(reference)}"
        )
    overall = snr_db(reference, output)
    worst = float(slice_snr_db(reference, output, samples).min())
    if floor is not None and not (overall >= floor.snr_db and worst >= floor.slice_snr_db):
        raise ParityError(
            f"the exported program differs from the reference ({name}) in {order} order: "
            f"{overall:.1f} dB overall (at least {floor.snr_db:.0f} needed), {worst:.1f} dB in "
            f"the worst 80 ms (at least {floor.slice_snr_db:.0f} needed)"
        )
    return Parity(
        order=order,
        reference=name,
        frames=len(output) // samples,
        seed=seed,
        snr_db=overall,
        worst_slice_snr_db=worst,
        min_snr_db=None if floor is None else floor.snr_db,
        min_slice_snr_db=None if floor is None else floor.slice_snr_db,
    )


@dataclass(frozen=True, slots=True)
class RealTime:
    """Whether this machine decodes its largest usual chunk in less time than it plays."""

    frames: int
    seconds: float  # median
    audio_seconds: float

    @property
    def passed(self) -> bool:
        """Whether it does."""
        return self.seconds < self.audio_seconds


def check_real_time(program: Program, frames: int, repetitions: int = 3) -> RealTime:
    """Time a warm chunk of ``frames`` frames."""
    codes = np.zeros((frames, program.geometry.codebooks), np.int64)
    state = program.initial_state()
    times = []
    for _ in range(repetitions + 1):
        started = time.perf_counter()
        _, state = program.step(codes, state)
        times.append(time.perf_counter() - started)
    audio_seconds = frames / program.geometry.frame_rate_hz
    return RealTime(frames, statistics.median(times[1:]), audio_seconds)


def run_program(
    program: Program, codes: NDArray[np.int64], sizes: Sequence[int]
) -> NDArray[np.float32]:
    """Decode int64 ``[frames, codebooks]`` in chunks of ``sizes``; return float32 ``[samples]``."""
    state = program.initial_state()
    parts = []
    start = 0
    for size in sizes:
        pcm, state = program.step(codes[start : start + size], state)
        parts.append(pcm)
        start += size
    return np.concatenate(parts)


def _ramp_order(ramp: Sequence[int], frames: int) -> list[int]:
    # A seam behind every size, and a tail.
    return Ramp(tuple(ramp)).split(max(frames, sum(ramp) + max(ramp) + 1))


def _require_sound(reference: NDArray[np.float32]) -> None:
    level = float(np.sqrt(np.mean(np.square(reference, dtype=np.float64))))
    if not level >= MIN_REFERENCE_RMS:
        raise ParityError(
            f"the eager decoder is silent (RMS {level:.1e}): are the checkpoint's codebooks empty?"
        )
