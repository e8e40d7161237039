"""What a program must keep up besides its speed: no slow first chunk, no drift, room for two.

    python benchmarks/goals.py --artifact benchmarks/work/onnx-fp32

- the first chunk after loading, over the median of that size later;
- a process that has decoded 1,000 chunks against one that has decoded 10, in turns, and its memory
  in between. One after the other would not do: over minutes, the machine itself changes by a tenth;
- two streams at once, each in a thread of its own, over one: time for both, and memory.

`codecstream-bench --minutes 30` decodes an hour of audio, and takes decoding's share of the
machine's matrix product.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import numpy as np
from numpy.typing import NDArray

import codecstream
from codecstream.bench.worker import memory_mb
from codecstream.runtimes import Program

GENERATOR = np.random.default_rng(0)
YOUNG, OLD = 10, 1000  # chunks decoded


def main() -> None:
    options = parse_options()
    ageing(options.artifact, options.threads)
    program = codecstream.load_program(options.artifact, threads=options.threads)
    manifest = program.manifest
    print(f"{manifest.runtime}, {manifest.precision}, {options.threads} threads, decode in ms")
    first_chunks(program, manifest.ramp)
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


def ageing(artifact: str, threads: int, frames: int = 2) -> None:
    """Compare a young process with an old one."""
    old = Worker(artifact, threads)
    memory_mb = [old.decode(frames)[1] for _ in range(OLD)]
    young = Worker(artifact, threads)
    for _ in range(YOUNG):
        young.decode(frames)
    times: dict[str, list[float]] = {"young": [], "old": []}
    for turn in range(40):
        for age, worker in (("young", young), ("old", old))[:: 1 if turn % 2 else -1]:
            times[age].append(worker.decode(frames)[0])
    ratio = statistics.median(b / a for a, b in zip(times["young"], times["old"], strict=True))
    print(
        f"chunks of {frames}: {statistics.median(times['young']):.1f} behind {YOUNG}, "
        f"{statistics.median(times['old']):.1f} behind {OLD} chunks, ratio {ratio:.3f}; memory "
        f"{memory_mb[YOUNG]:.1f} to {memory_mb[-1]:.1f} MB",
        flush=True,
    )
    for worker in (young, old):
        worker.close()


class Worker:
    """A process that decodes one stream."""

    def __init__(self, artifact: str, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=serve, args=(artifact, threads, there), daemon=True)
        self._process.start()

    def decode(self, frames: int) -> tuple[float, float]:
        """Decode the next chunk; return its milliseconds and the process's MB behind it."""
        self._here.send(frames)
        found: tuple[float, float] = self._here.recv()
        return found

    def close(self) -> None:
        self._here.send(0)
        self._process.join()


def serve(artifact: str, threads: int, asked: Connection) -> None:
    """Decode a chunk of as many frames as are asked for, until 0 are."""
    program = codecstream.load_program(artifact, threads=threads)
    state = program.initial_state()
    while frames := asked.recv():
        ms, state = timed(program, frames, state)
        asked.send((ms, memory_mb()[0]))


def two_streams(program: Program, frames: int = 25, rounds: int = 15) -> None:
    ones, pairs = [], []
    before = memory_mb()[0]
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
        f"{memory_mb()[0]:.0f} MB"
    )


def timed(program: Program, frames: int, state: object) -> tuple[float, object]:
    codes = random_codes(frames)
    began = time.perf_counter()
    _, after = program.step(codes, state)
    return 1000 * (time.perf_counter() - began), after


def random_codes(frames: int) -> NDArray[np.int64]:
    return GENERATOR.integers(0, 2048, (frames, 16))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--artifact", required=True)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
