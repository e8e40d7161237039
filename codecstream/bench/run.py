"""Run the measuring processes and put their figures together into one report."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from codecstream.artifact import Artifact, open_artifact
from codecstream.bench.figures import (
    SizeFigures,
    intervals,
    judge,
    rtf_by_interval,
    share_of_product,
    simulate_playback,
    simulate_policy,
    summarise_size,
)
from codecstream.bench.host import describe_host
from codecstream.cpus import usable_cpus
from codecstream.errors import CodecStreamError
from codecstream.manifest import Manifest
from codecstream.schedule import Ramp

__all__ = ["FORMAT_VERSION", "BenchError", "Settings", "run_bench"]

FORMAT, FORMAT_VERSION = "codecstream-bench", 1
SIZES = (1, 2, 4, 8, 16, 25)
PACES = (0.5, 1.0, 1.2)
PLAYED_S = 20.0  # length of the simulated utterances
PREBUFFER_MARGIN_S = 0.25  # of the example player, on top of what its ramp needs at pace 1
SWEEP_REPEATS = 5
TURNS = 9
INTERVAL_S = 60.0
MIN_INTERVALS = 5  # a run shorter than five minutes is cut into five
MAX_THREADS = 1024
WORKER_TIMEOUT_S = 600.0  # to start
MAX_TIMEOUT_S = 7 * 24 * 3600.0  # systems' timers end somewhere
SLOWEST_RTF = 20.0  # that is waited for: a device that is too slow gets figures, not an error

# "import codecstream" and little more: the package is light.
_WORKER = (
    "import time; start_s = time.perf_counter()\n"
    "from codecstream.bench.worker import main\n"
    "main((time.perf_counter() - start_s) * 1000)"
)

Say = Callable[[str], None]


class BenchError(CodecStreamError):
    """A measuring process failed; the message has the end of what it printed."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure.

    Attributes:
        artifact: The artifact's folder.
        threads: Threads that decode; None for as many as this process may use.
        sizes: Chunk sizes in frames; None for 1, 2, 4, 8, 16, 25 and those of the ramp.
        repeats: Chunks per size.
        minutes: How long the sustained run decodes; 30 for a qualification, 0 for none.
        with_load: Measure once more beside busy processes, one per CPU that is left.
        sweep: Measure the ramp's first and last size with 1, 2, 4, ... threads.

    Raises:
        ValueError: A number is out of its range.
    """

    artifact: str | Path
    threads: int | None = None
    sizes: tuple[int, ...] | None = None
    repeats: int = 20
    minutes: float = 0.5
    with_load: bool = False
    sweep: bool = True

    def __post_init__(self) -> None:
        if self.threads is not None and not 1 <= self.threads <= MAX_THREADS:
            raise ValueError(
                f"threads must be at least 1 and at most {MAX_THREADS}, not {self.threads}"
            )
        if self.repeats < 1 or not 0 <= self.minutes <= 24 * 60:
            raise ValueError(
                f"at least 1 repeat and 0 to {24 * 60} minutes, not {self.repeats} and "
                f"{self.minutes}"
            )
        if self.sizes is not None:
            Ramp(self.sizes)


def run_bench(settings: Settings, say: Say = lambda text: None) -> dict[str, Any]:
    """Measure and return the report, as ``docs/bench.md`` describes it.

    Raises:
        ArtifactError: The artifact cannot be used.
        BenchError: A measuring process failed.
        ValueError: The settings do not fit the artifact.
    """
    artifact = open_artifact(settings.artifact)
    manifest = artifact.manifest
    threads = settings.threads or usable_cpus()
    sizes = _sizes(settings, manifest.ramp, manifest.frames.max)
    largest = manifest.ramp[-1]
    frame_ms = 1000 / manifest.geometry.frame_rate_hz
    made_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())

    def worker(**task: Any) -> dict[str, Any]:
        timed_s = task["repeats"] * sum(task["sizes"]) * frame_ms / 1000
        timeout_s = WORKER_TIMEOUT_S + SLOWEST_RTF * timed_s + 2 * task["sustained_s"]
        timeout_s = min(timeout_s, MAX_TIMEOUT_S)
        return _run_worker({"artifact": str(artifact.folder), "turns": 0, **task}, timeout_s)

    def steady(what: str, sustained_s: float, in_turns: bool) -> dict[str, Any]:
        say(what)
        return worker(
            threads=threads,
            sizes=sizes,
            repeats=settings.repeats,
            sustained_s=sustained_s,
            sustained_frames=largest,
            turns=min(TURNS, settings.repeats) if in_turns else 0,
        )

    sustained_s = settings.minutes * 60
    main = steady(f"decoding with {threads} threads", sustained_s, in_turns=True)
    figures = _figures(main, frame_ms)
    interval_s = min(INTERVAL_S, max(sustained_s / MIN_INTERVALS, 1.0))
    ends_s = main["sustained_ends_s"]
    sustained = rtf_by_interval(ends_s, largest * frame_ms / 1000, interval_s)
    sustained_mb = [main["sustained_mb"][part[-1]] for part in intervals(ends_s, interval_s)]
    verdict = judge(figures, largest, sustained)
    loaded = None
    if settings.with_load:
        with _busy_cpus(max(1, usable_cpus() - threads)) as processes:
            beside = steady(f"decoding beside {processes} busy processes", 0.0, in_turns=False)
        loaded_figures = _figures(beside, frame_ms)
        loaded = {
            "busy_processes": processes,
            "sizes": [asdict(item) for item in loaded_figures],
            "verdict": asdict(judge(loaded_figures, largest, [])),
        }
    sweep = list(_sweep(settings, manifest.ramp, frame_ms, worker, say)) if settings.sweep else None
    flop = manifest.flop_per_frame
    report = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "made_at": made_at,
        "completed": True,
        "artifact": _describe(artifact),
        "host": describe_host(),
        "settings": {
            "threads": threads,
            "sizes": sizes,
            "repeats": settings.repeats,
            "minutes": settings.minutes,
            "schedule": list(manifest.ramp),
        },
        "verdict": asdict(verdict),
        "sizes": [asdict(item) for item in figures],
        "cold_start": main["cold_start"],
        "memory": {
            "loaded_mb": main["loaded_mb"],
            "resident_mb": main["resident_mb"],
            "peak_mb": main["peak_mb"],
            "growth_mb": _difference(main["resident_after_mb"], main["resident_mb"]),
        },
        "sustained": {
            "minutes": settings.minutes,
            "interval_s": interval_s,
            "frames": largest,
            "rtf": sustained or None,
            "resident_mb": None if None in sustained_mb else sustained_mb or None,
            "slowdown": sustained[-1] / sustained[0] if sustained else None,
        },
        "with_load": loaded,
        "threads": sweep,
        "playback": _playback(figures, manifest),
        "peak": {
            "gflops": statistics.median(gflops for gflops, _ in main["turns"]),
            "flop_per_frame": flop,
            "share": None if flop is None else share_of_product(main["turns"], flop * largest),
        },
    }
    return {**report, "null_because": _reasons(report)}


def _sizes(settings: Settings, ramp: Sequence[int], most: int | None) -> list[int]:
    sizes = sorted({*(settings.sizes or SIZES), *ramp})
    too_large = [size for size in sizes if most is not None and size > most]
    if too_large and settings.sizes is not None:
        raise ValueError(f"the artifact takes chunks of at most {most} frames, not {too_large}")
    return [size for size in sizes if size not in too_large]


def _run_worker(task: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    """Measure in a process of its own, with numpy's threads limited as the decoder's are."""
    environment = {**os.environ}
    for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
        environment[name] = str(task["threads"])
    # Where the package was not installed but lies beside the program.
    root = str(Path(__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    try:
        done = subprocess.run(
            [sys.executable, "-c", _WORKER],
            input=json.dumps(task),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"decoding did not end within {error.timeout:.0f} s") from error
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise BenchError(f"decoding failed: {last[0]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _figures(measured: Mapping[str, Any], frame_ms: float) -> list[SizeFigures]:
    return [
        summarise_size(int(frames), times_ms, frame_ms)
        for frames, times_ms in measured["times_ms"].items()
    ]


def _sweep(
    settings: Settings,
    ramp: Sequence[int],
    frame_ms: float,
    worker: Callable[..., dict[str, Any]],
    say: Say,
) -> Iterator[dict[str, Any]]:
    """Yield the figures of the first and last size for each number of threads."""
    cpus = usable_cpus()
    for threads in sorted({1, *(2**n for n in range(1, 8) if 2**n < cpus), cpus}):
        say(f"decoding with {threads} threads")
        measured = worker(
            threads=threads,
            sizes=sorted({ramp[0], ramp[-1]}),
            repeats=min(SWEEP_REPEATS, settings.repeats),
            sustained_s=0.0,
            sustained_frames=ramp[-1],
        )
        sizes = [asdict(item) for item in _figures(measured, frame_ms)]
        yield {"threads": threads, "sizes": sizes, "resident_mb": measured["resident_mb"]}


def _playback(figures: Sequence[SizeFigures], manifest: Manifest) -> list[dict[str, Any]]:
    """Simulate utterances in which every chunk takes what 90 % of its size do not exceed."""
    geometry = manifest.codec_geometry()
    frame_ms = 1000 / geometry.frame_rate_hz
    cost_ms = {item.frames: item.p90_ms for item in figures}
    delay_ms = Ramp.of(manifest.ramp).start_delay_frames() * frame_ms
    prebuffer_ms = delay_ms + PREBUFFER_MARGIN_S * 1000
    frames = round(PLAYED_S * 1000 / frame_ms)
    rows = []
    for pace in PACES:
        played = simulate_playback(cost_ms, manifest.ramp, pace, frames, frame_ms, prebuffer_ms)
        adaptive = simulate_policy(cost_ms, manifest.frames.max, pace, frames, geometry)
        rows.append({**asdict(played), "adaptive": asdict(adaptive)})
    return rows


def _describe(artifact: Artifact) -> dict[str, Any]:
    manifest = artifact.manifest
    return {
        "path": str(artifact.folder),
        "runtime": manifest.runtime,
        "precision": manifest.precision,
        "mode": manifest.mode,
        "decoder_id": manifest.decoder_id,
        "mb": sum(entry.bytes for entry in manifest.files.values()) / 1e6,
        "made_with": manifest.made_with,
        "weights_sha256": manifest.source.get("weights_sha256"),
    }


def _difference(after: float | None, before: float | None) -> float | None:
    return None if after is None or before is None else after - before


_WHY = {
    "with_load": "--with-load was not given",
    "threads": "the sweep was turned off",
    "sustained": "--minutes is 0",
    "peak.flop_per_frame": "the artifact does not say how much arithmetic a frame takes",
    "peak.share": "the artifact does not say how much arithmetic a frame takes",
    "host": "this system does not say",
    "memory": "only Linux says",
    "artifact": "the manifest does not say",
}


def _reasons(report: Mapping[str, Any]) -> dict[str, str]:
    """Return why each figure that is None is."""
    why = dict(_WHY)
    if report["sustained"]["minutes"]:
        why["sustained"] = _WHY["memory"]  # of its figures, only memory can be missing then
    found = {}
    for name, value in report.items():
        parts = value.items() if isinstance(value, dict) else ()
        for key, part in parts:
            if part is None:
                path = f"{name}.{key}"
                found[path] = why.get(path) or why[name]
        if value is None:
            found[name] = why[name]
    return found


@contextmanager
def _busy_cpus(count: int) -> Iterator[int]:
    """Keep ``count`` processes busy for as long as the context lasts."""
    code = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(100000))"
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
    try:
        yield count
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
