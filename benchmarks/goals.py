"""What a program must keep up besides its speed: no slow first chunk, no drift, room for two.

    python benchmarks/goals.py --artifact benchmarks/work/onnx-fp32 [--hour]

- the first chunk after loading, over the median of that size later;
- the 1,000th chunk of a stream over its 10th, in turns, and the memory between them;
- two streams at once, each in a thread of its own, over one: time for both, and memory;
- with --hour, instead: 45,000 frames in chunks of 25, time and memory of every ten minutes.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

import codecstream
from codecstream.runtimes import Program

GENERATOR = np.random.default_rng(0)
HOUR_FRAMES, PART_FRAMES = 45_000, 7_500


def main() -> None:
    options = parse_options()
    program = codecstream.load_program(options.artifact, threads=options.threads)
    manifest = program.manifest
    print(f"{manifest.runtime}, {manifest.precision}, {options.threads} threads, decode in ms\n")
    if options.hour:
        hour(program)
        return
    first_chunks(program, manifest.ramp)
    long_stream(program)
    two_streams(program)


def first_chunks(program: Program, sizes: Sequence[int]) -> None:
    state = program.initial_state()
    first = {}
    for frames in sizes:
        first[frames], state = timed(program, frames, state)
    for frames in sizes:
        later = []
        for _ in range(11):
            ms, state = timed(program, frames, state)
            later.append(ms)
        middle = statistics.median(later)
        print(
            f"first chunk of {frames}: {first[frames]:.0f}, later {middle:.0f}, "
            f"ratio {first[frames] / middle:.2f}"
        )


def long_stream(program: Program, frames: int = 2, count: int = 1000) -> None:
    """Compare young and old by turns: over minutes, the machine itself changes by a tenth."""
    state = program.initial_state()
    memory = []
    for done in range(count):
        if done == 10:
            young = state
        _, state = timed(program, frames, state)
        memory.append(resident_mb())
    times: dict[str, list[float]] = {"young": [], "old": []}
    for _ in range(41):
        for age, kept in (("young", young), ("old", state)):
            times[age].append(timed(program, frames, kept)[0])
    ratio = statistics.median(b / a for a, b in zip(times["young"], times["old"], strict=True))
    print(
        f"chunks of {frames}: {statistics.median(times['young']):.1f} for the 10th, "
        f"{statistics.median(times['old']):.1f} for the {count}th, ratio {ratio:.3f}; memory "
        f"{memory[10]:.0f} to {memory[-1]:.0f} MB"
    )


def two_streams(program: Program, frames: int = 25, rounds: int = 7) -> None:
    ones, pairs = [], []
    before = resident_mb()
    states = [program.initial_state(), program.initial_state()]
    for _ in range(rounds):
        ms, states[0] = timed(program, frames, states[0])
        ones.append(ms)
        began = time.perf_counter()
        threads = [
            threading.Thread(target=program.step, args=(random_codes(frames), state))
            for state in states
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        pairs.append(1000 * (time.perf_counter() - began))
    ratio = statistics.median(b / a for a, b in zip(ones, pairs, strict=True))
    print(
        f"two streams at once, chunks of {frames}: {statistics.median(pairs):.0f} for both, "
        f"{statistics.median(ones):.0f} for one, ratio {ratio:.2f}; memory {before:.0f} to "
        f"{resident_mb():.0f} MB"
    )


def hour(program: Program, frames: int = 25) -> None:
    state = program.initial_state()
    part: list[float] = []
    for done in range(frames, HOUR_FRAMES + 1, frames):
        ms, state = timed(program, frames, state)
        part.append(ms)
        if done % PART_FRAMES == 0:
            print(
                f"minute {done / 750:.0f}: {statistics.median(part):.0f} ms a chunk of {frames}, "
                f"{resident_mb():.1f} MB",
                flush=True,
            )
            part.clear()


def timed(program: Program, frames: int, state: object) -> tuple[float, object]:
    codes = random_codes(frames)
    began = time.perf_counter()
    _, after = program.step(codes, state)
    return 1000 * (time.perf_counter() - began), after


def random_codes(frames: int) -> NDArray[np.int64]:
    return GENERATOR.integers(0, 2048, (frames, 16))


def resident_mb() -> float:
    with open("/proc/self/status") as status:
        lines = dict(line.split(":", 1) for line in status)
    return int(lines["VmRSS"].split()[0]) * 1024 / 1e6


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--artifact", required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--hour", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
