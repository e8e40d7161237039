"""What a measuring process does: a task as JSON on its input, raw times as JSON on its output.

It computes no figures. A process of its own makes starts cold, memory
that of one program, and thread pools those that were asked for.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from codecstream.artifact import open_artifact
from codecstream.memory import return_free_memory
from codecstream.runtimes import Program, load_artifact, warm_up

__all__ = ["main", "matrix_product", "memory_mb"]

MATRIX = 2048
MATRIX_REPEATS = 4
SETTLE_S = 0.5  # until numpy's own threads have stopped waiting for more work, which takes a core


def main(import_ms: float) -> None:
    """Measure what standard input asks for; write the result to standard output.

    Args:
        import_ms: What importing this package took, which only the caller can know.
    """
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    result = measure(json.load(sys.stdin), import_ms)
    sys.stdout.write("\n" + json.dumps(result) + "\n")


def _end_with(parent: int) -> None:
    """End this process when the one that wants its figures has gone, however it went."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def measure(task: dict[str, Any], import_ms: float) -> dict[str, Any]:
    """Start, time every size in turn, decode on for a while.

    Args:
        import_ms: See :func:`main`.
        task: ``artifact``, ``threads``, ``sizes``, ``repeats``, ``sustained_s``,
            ``sustained_frames``, and how many ``turns`` to take with a matrix product.
    """
    import_s = time.perf_counter()
    artifact = open_artifact(task["artifact"])
    open_s = time.perf_counter()
    program = load_artifact(artifact, task["threads"])
    load_s = time.perf_counter()
    ramp = artifact.manifest.ramp
    warm_up(program, ramp)
    return_free_memory()
    warm_s = time.perf_counter()
    generator = np.random.default_rng(0)

    def codes(frames: int) -> Any:
        geometry = program.geometry
        return generator.integers(0, geometry.codebook_size, (frames, geometry.codebooks))

    first = codes(ramp[0])
    begin_s = time.perf_counter()
    program.step(first, program.initial_state())
    first_s = time.perf_counter()
    result: dict[str, Any] = {
        "cold_start": {
            "import_ms": import_ms,
            "open_ms": (open_s - import_s) * 1000,
            "load_ms": (load_s - open_s) * 1000,
            "warm_up_ms": (warm_s - load_s) * 1000,
            "first_chunk_ms": (first_s - begin_s) * 1000,
        },
        "loaded_mb": memory_mb()[0],
        "times_ms": _time_sizes(program, task["sizes"], task["repeats"], codes),
    }
    result["resident_mb"] = memory_mb()[0]
    result["sustained_ends_s"], result["sustained_mb"] = _decode_on(
        program, task["sustained_frames"], task["sustained_s"], codes
    )
    result["resident_after_mb"], result["peak_mb"] = memory_mb()
    # Last: numpy's own buffers are not the program's memory.
    result["turns"] = _in_turns(program, task["sustained_frames"], task["turns"], codes)
    return result


def _time_sizes(
    program: Program, sizes: list[int], repeats: int, codes: Any
) -> dict[int, list[float]]:
    """Time every size in turn, so that each finds the caches as another size left them."""
    times_ms: dict[int, list[float]] = {frames: [] for frames in sizes}
    state = program.initial_state()
    for _ in range(repeats):
        for frames in sizes:
            chunk = codes(frames)
            begin_s = time.perf_counter()
            _, state = program.step(chunk, state)
            times_ms[frames].append((time.perf_counter() - begin_s) * 1000)
    return times_ms


def _decode_on(
    program: Program, frames: int, seconds: float, codes: Any
) -> tuple[list[float], list[float | None]]:
    """Decode chunk after chunk for so long; return when each was ready, and the memory then."""
    ends_s: list[float] = []
    resident_mb: list[float | None] = []
    state = program.initial_state()
    begin_s = time.perf_counter()
    while seconds > 0 and (not ends_s or ends_s[-1] < seconds):
        _, state = program.step(codes(frames), state)
        ends_s.append(time.perf_counter() - begin_s)
        resident_mb.append(memory_mb()[0])
    return ends_s, resident_mb


def _in_turns(program: Program, frames: int, turns: int, codes: Any) -> list[tuple[float, float]]:
    """Return GFLOP/s of a matrix product and ms of the chunk decoded right behind it, by turn."""
    measured: list[tuple[float, float]] = []
    state = program.initial_state()
    for _ in range(turns):
        time.sleep(SETTLE_S)
        gflops = matrix_product()
        time.sleep(SETTLE_S)
        chunk = codes(frames)
        begin_s = time.perf_counter()
        _, state = program.step(chunk, state)
        measured.append((gflops, (time.perf_counter() - begin_s) * 1000))
    return measured


def matrix_product() -> float:
    """Return numpy's best float32 matrix product in GFLOP/s: what these cores can do."""
    one, other = (np.ones((MATRIX, MATRIX), np.float32) for _ in range(2))
    best_s = float("inf")
    for _ in range(MATRIX_REPEATS):
        begin_s = time.perf_counter()
        one @ other
        best_s = min(best_s, time.perf_counter() - begin_s)
    return float(2 * MATRIX**3 / 1e9 / best_s)


def memory_mb() -> tuple[float | None, float | None]:
    """Return what this process holds now, and the most it ever held, in MB."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None, None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    found = (fields.get(name, "").split() for name in ("VmRSS", "VmHWM"))
    now, most = (int(words[0]) * 1024 / 1e6 if words else None for words in found)
    return now, most
