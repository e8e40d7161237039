"""Which runtimes wait for the C library's allocator: decode with glibc's thresholds raised or not.

    python benchmarks/allocator.py ARTIFACT [MORE ...] [--rounds 3]

glibc gives large blocks back to the kernel when they are freed, and takes them again page by page.
With MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_ raised to 4 GB it keeps them. Both are read
once, when a process starts, so the two kinds of process take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys

FRAMES = (2, 25)
RAISED = {"MALLOC_MMAP_THRESHOLD_": "4000000000", "MALLOC_TRIM_THRESHOLD_": "4000000000"}
WORKER = """
import json, statistics, sys, time
import numpy, codecstream
from codecstream.bench.worker import memory_mb
program = codecstream.load_program(sys.argv[1], threads=2)
state, times = program.initial_state(), {}
for frames in (2, 25):
    taken = []
    for _ in range(9):
        codes = numpy.random.default_rng(0).integers(0, 2048, (frames, 16))
        began = time.perf_counter()
        _, state = program.step(codes, state)
        taken.append(1000 * (time.perf_counter() - began))
    times[frames] = statistics.median(taken[1:])
print(json.dumps({**times, "resident_mb": memory_mb()[0]}))
"""


def main() -> None:
    options = parse_options()
    print("| artifact | frames | default ms | raised ms | ratio | resident MB, default | raised |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for artifact in options.artifacts:
        runs = [(run(artifact, {}), run(artifact, RAISED)) for _ in range(options.rounds)]
        memory = [statistics.median(pair[i]["resident_mb"] for pair in runs) for i in (0, 1)]
        for frames in map(str, FRAMES):
            middle = [statistics.median(pair[i][frames] for pair in runs) for i in (0, 1)]
            ratio = statistics.median(raised[frames] / usual[frames] for usual, raised in runs)
            print(
                f"| {os.path.basename(artifact)} | {frames} | {middle[0]:.0f} | {middle[1]:.0f} | "
                f"{ratio:.2f} | {memory[0]:.0f} | {memory[1]:.0f} |",
                flush=True,
            )


def run(artifact: str, environment: dict[str, str]) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", WORKER, artifact],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifacts", nargs="+")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
