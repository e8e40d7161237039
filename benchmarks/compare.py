"""Time decoder artifacts against each other, in turns and in one process.

    python benchmarks/compare.py BEFORE AFTER [MORE ...] [--frames 1 2 4 8 16 25] [--rounds 15]

In every round each artifact decodes one chunk of each size, so that whatever else the machine does
hits all of them. A ratio is the median over the rounds of "this artifact's time over the first
one's in the same round": 0.9 is a tenth faster. `benchmarks/log.md` is made of these.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np

import codecstream
from codecstream.bench.worker import matrix_product
from codecstream.runtimes import Program

FRAME_MS = 80.0


def main() -> None:
    options = parse_options()
    programs = [codecstream.load_program(path, threads=options.threads) for path in options.paths]
    times_ms = measure(programs, options.frames, options.rounds)
    gflops = matrix_product()
    print(f"{options.threads} threads, {options.rounds} rounds, {gflops:.0f} GFLOP/s\n")
    print("| frames | " + " | ".join(path.name for path in options.paths) + " |")
    print("| ---: |" + " ---: |" * len(programs))
    for frames in options.frames:
        first_ms = times_ms[0, frames]
        cells = []
        for i in range(len(programs)):
            each_ms = times_ms[i, frames]
            middle_ms = statistics.median(each_ms)
            ratio = statistics.median(a / b for a, b in zip(each_ms, first_ms, strict=True))
            rtf = middle_ms / frames / FRAME_MS
            cells.append(f"{middle_ms:.0f} ms, RTF {rtf:.2f}" + (f", x {ratio:.2f}" if i else ""))
        print(f"| {frames} | " + " | ".join(cells) + " |")


def measure(
    programs: list[Program], sizes: list[int], rounds: int
) -> dict[tuple[int, int], list[float]]:
    """Return milliseconds by program and size, one entry per round."""
    generator = np.random.default_rng(0)
    states = [program.initial_state() for program in programs]
    times_ms: dict[tuple[int, int], list[float]] = {
        (i, frames): [] for i in range(len(programs)) for frames in sizes
    }
    for turn in range(rounds + 1):
        for frames in sizes:
            codes = generator.integers(0, 2048, (frames, 16))
            order = range(len(programs)) if turn % 2 else reversed(range(len(programs)))
            for i in order:
                began = time.perf_counter()
                _, states[i] = programs[i].step(codes, states[i])
                if turn:  # the first round warms up
                    times_ms[i, frames].append(1000 * (time.perf_counter() - began))
    return times_ms


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", type=Path, nargs="+", metavar="ARTIFACT")
    parser.add_argument("--frames", type=int, nargs="+", default=[1, 2, 4, 8, 16, 25])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
