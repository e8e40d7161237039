"""Speed and memory of the full-size decoder on this machine, as the tables of README.md.

    python benchmarks/decode.py [--threads 2] [--work DIR] [--repeats 7] [--steps 2000]

The weights are seeded random ones at the published size: speed and memory do not depend on their
values. The first run exports the artifact into --work (about two minutes); later runs reuse it.
Every figure is taken beside the same machine's best float32 matrix product of the same run, since
a shared machine is not equally fast on every day.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import numpy as np
import psutil
from threadpoolctl import threadpool_limits

import codecstream

GFLOP_PER_AUDIO_SECOND = 62.0  # of the published size, see docs/architecture.md
CHUNKS = (1, 2, 4, 8, 16, 25)
FRAME_S = 0.08
MATRIX = 2048
REST_S = 0.5  # until numpy's own threads have stopped waiting for more work, which takes a core


def main() -> None:
    options = parse_options()
    artifact = ensure_artifact(options.work)
    import_s, import_mb = measure_import()
    before_mb = rss_mb()
    started_s = time.perf_counter()
    program = codecstream.load_program(artifact, threads=options.threads)
    load_s = time.perf_counter() - started_s
    rows, peak = measure_chunks(program, options.threads, options.repeats)
    streaming_mb = rss_mb()
    growth_mb = measure_growth(program, options.steps)

    print(f"Machine: {describe_machine()}, {options.threads} threads; {date.today()}, {commit()}\n")
    print("| frames | min ms | median ms | RTF (min) | RTF (median) | share of the peak |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for frames, times_s in rows:
        best, middle = min(times_s[1:]), statistics.median(times_s[1:])
        share = GFLOP_PER_AUDIO_SECOND * frames * FRAME_S / best / peak
        print(
            f"| {frames} | {best * 1e3:.0f} | {middle * 1e3:.0f} | {best / frames / FRAME_S:.2f} "
            f"| {middle / frames / FRAME_S:.2f} | {share:.2f} |"
        )
    print(f"\nBest float32 matrix product of the same run: {peak:.0f} GFLOP/s\n")
    print("| what | figure |")
    print("| --- | ---: |")
    print(f"| `import codecstream` | {import_s * 1e3:.0f} ms, {import_mb:.0f} MB resident |")
    print(f"| load, with hash check and warm-up | {load_s:.1f} s |")
    print(f"| resident before loading | {before_mb:.0f} MB |")
    print(f"| resident while streaming, all chunk sizes used | {streaming_mb:.0f} MB |")
    steps = f"from step {options.steps // 10} to {options.steps}, sizes 1 to 25"
    print(f"| growth {steps} | {growth_mb:.1f} MB |")
    firsts = ", ".join(
        f"{times_s[0] / statistics.median(times_s[1:]):.2f} ({frames})"
        for frames, times_s in rows
        if frames > 1
    )
    print(f"| first call after loading over the median, by frames | {firsts} |")


def ensure_artifact(work: Path) -> Path:
    """Export the full-size decoder with seeded weights, once."""
    artifact = work / "decoder-onnx"
    if not artifact.exists():
        code = (
            "import sys, codecstream_export as e\n"
            "from codecstream_export.cli import main\n"
            "from codecstream_export.random_weights import random_decoder\n"
            "e.save_checkpoint(sys.argv[1], random_decoder(e.DecoderConfig()))\n"
            "arguments = ['--checkpoint', sys.argv[1], '--out', sys.argv[2], '--runtime', 'onnx']\n"
            "sys.exit(main(arguments))"
        )
        checkpoint = work / "checkpoint" / "speech_tokenizer"
        # In a process of its own, so that torch does not count as this one's memory.
        subprocess.run([sys.executable, "-c", code, checkpoint, artifact], check=True)
    return artifact


def measure_import() -> tuple[float, float]:
    """Return seconds and resident MB of importing the package, the best of some new processes."""
    code = (
        "import time; t = time.perf_counter(); import codecstream; t = time.perf_counter() - t\n"
        "pages = int(open('/proc/self/statm').read().split()[1])\n"
        "import os, json; print(json.dumps([t, pages * os.sysconf('SC_PAGE_SIZE') / 1e6]))"
    )
    runs = [
        json.loads(
            subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
        )
        for _ in range(7)
    ]
    return min(run[0] for run in runs), min(run[1] for run in runs)


def measure_chunks(
    program: codecstream.Program, threads: int, repeats: int
) -> tuple[list[tuple[int, list[float]]], float]:
    """Time each chunk size in turn, round after round, and the matrix product between rounds.

    The first time of each size is its first call after loading; it is told apart.
    """
    generator = np.random.default_rng(0)
    times: dict[int, list[float]] = {frames: [] for frames in CHUNKS}
    state = program.initial_state()
    matrices = [generator.standard_normal((MATRIX, MATRIX), np.float32) for _ in range(2)]
    peak = 0.0
    for _ in range(1 + repeats):
        with threadpool_limits(threads):
            for _ in range(3):
                peak = max(peak, 2 * MATRIX**3 / 1e9 / seconds(lambda: np.matmul(*matrices)))
        time.sleep(REST_S)
        for frames in CHUNKS:
            codes = generator.integers(0, 2048, (frames, 16))
            started_s = time.perf_counter()
            _, state = program.step(codes, state)
            times[frames].append(time.perf_counter() - started_s)
    return list(times.items()), peak


def measure_growth(program: codecstream.Program, steps: int) -> float:
    """Return how much resident memory grows over ``steps`` steps of random sizes, in MB."""
    generator = np.random.default_rng(1)
    state = program.initial_state()
    # The cheap sizes most of the time: this is about memory, and 2,000 large chunks take an hour.
    sizes = generator.choice(CHUNKS, steps, p=(0.5, 0.3, 0.1, 0.05, 0.03, 0.02))
    before_mb = 0.0
    for i, frames in enumerate(sizes):
        if i == steps // 10:
            before_mb = rss_mb()
        _, state = program.step(generator.integers(0, 2048, (frames, 16)), state)
    return rss_mb() - before_mb


def seconds(call: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s


def rss_mb() -> float:
    return psutil.Process().memory_info().rss / 1e6


def describe_machine() -> str:
    name = platform.processor() or platform.machine()
    flags = ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = dict(
            (part.strip() for part in line.split(":", 1))
            for line in cpuinfo.read_text().splitlines()
            if ":" in line
        )
        name = lines.get("model name", name)
        have = lines.get("flags", "").split()
        flags = " (" + ", ".join(f for f in ("avx2", "avx512f", "avx512_vnni") if f in have) + ")"
    return f"{name}{flags}, {os.cpu_count()} CPUs"


def commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return f"commit {done.stdout.strip() or 'unknown'}"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path("benchmarks/work"))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2000)
    return parser.parse_args()


if __name__ == "__main__":
    main()
