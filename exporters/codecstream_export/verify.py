"""Hold a written artifact against the eager decoder before anyone relies on it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from codecstream.runtimes import Program
from codecstream.schedule import Ramp
from codecstream_export.eager import EagerDecoder
from codecstream_export.errors import ParityError
from codecstream_export.random_weights import random_codes
from codecstream_parity import slice_snr_db, snr_db

__all__ = ["Parity", "check_parity", "random_partition", "run_program"]

MIN_SNR_DB = 90.0
MIN_SLICE_SNR_DB = 80.0  # a quiet slice has the same noise under less signal
MIN_REFERENCE_RMS = 1e-4
VERIFY_FRAMES = 220  # three attention windows of 72 frames, and a tail


@dataclass(frozen=True, slots=True)
class Parity:
    """How close a program's audio is to the eager decoder's, for one order of chunk sizes."""

    order: str
    frames: int
    seed: int
    snr_db: float
    worst_slice_snr_db: float
    min_snr_db: float

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
    *,
    frames: int = VERIFY_FRAMES,
    seed: int = 0,
) -> list[Parity]:
    """Decode seeded codes with ``program`` in ramp order and in a random order of sizes.

    Args:
        program: The program, reloaded from disk.
        decoder: The eager decoder of the same checkpoint.
        ramp: Chunk sizes in frames.
        frames: How many frames to decode.
        seed: Seed of the codes and of the random order.

    Raises:
        ParityError: An order falls short of 90 dB, or one of its 80 ms slices of 80 dB; or the
            eager decoder is silent, and anything would agree with it.
    """
    frames = max(frames, sum(ramp) + max(ramp) + 1)  # a seam behind every size, and a tail
    codes = random_codes(frames, decoder.config, seed)
    with torch.inference_mode():
        reference = decoder(codes.T[None])[0].numpy()
    level = float(np.sqrt(np.mean(np.square(reference, dtype=np.float64))))
    if not level >= MIN_REFERENCE_RMS:
        raise ParityError(
            f"the eager decoder is silent (RMS {level:.1e}): are the checkpoint's codebooks empty?"
        )
    largest = max(ramp)
    orders = {
        "ramp": Ramp(tuple(ramp)).split(frames),
        "random": list(random_partition(frames, largest, seed)),
    }
    results = []
    for order, sizes in orders.items():
        output = run_program(program, codes.numpy(), sizes)
        slices = slice_snr_db(reference, output, program.geometry.samples_per_frame)
        overall = snr_db(reference, output)
        result = Parity(order, frames, seed, overall, float(slices.min()), MIN_SNR_DB)
        results.append(result)
        if not (overall >= MIN_SNR_DB and result.worst_slice_snr_db >= MIN_SLICE_SNR_DB):
            raise ParityError(
                f"the exported program differs from the eager decoder in {order} order: "
                f"{overall:.1f} dB overall (at least {MIN_SNR_DB:.0f} needed), "
                f"{result.worst_slice_snr_db:.1f} dB in the worst 80 ms "
                f"(at least {MIN_SLICE_SNR_DB:.0f} needed)"
            )
    return results


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


def random_partition(frames: int, largest: int, seed: int) -> Iterator[int]:
    """Yield seeded chunk sizes from 1 to ``largest`` that add up to ``frames``."""
    source = random.Random(seed)
    while frames > 0:
        size = min(source.randint(1, largest), frames)
        yield size
        frames -= size
