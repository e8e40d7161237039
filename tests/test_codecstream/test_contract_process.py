"""What every runtime does to the process and the device that it is a guest in."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import decode, make_codes

import codecstream

CODES = make_codes(10)


def run(code: str, *arguments: str | Path, cpu: int | None = None) -> dict[str, Any]:
    """Run ``code`` in a process of its own; return the JSON that it prints last."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    if cpu is not None:
        command = ["taskset", "-c", str(cpu), *command]
    # OMP_NUM_THREADS would hide what the package itself decides.
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = {**json.loads(done.stdout.splitlines()[-1]), "stderr": done.stderr}
    return result


# Where an artifact may lie


def test_an_artifact_loads_from_anywhere(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "a folder, ü-日本 100%{x}[y]'\""
    folder = Path(shutil.copytree(artifact, place / "decoder"))
    names = {path.name for path in folder.iterdir()}
    for path in (*folder.iterdir(), folder):
        path.chmod(0o555)
    monkeypatch.chdir(place)
    program = codecstream.load_program("decoder", threads=1, warmup=False)
    monkeypatch.chdir("/")
    assert len(decode(program, CODES)) == 10 * 1920
    assert {path.name for path in folder.iterdir()} == names
    folder.chmod(0o755)


GONE = """
import gc, json, pathlib, shutil, sys
import numpy, codecstream
folder = pathlib.Path(sys.argv[1])
codes = numpy.load(sys.argv[2])[:200]
program = codecstream.load_program(folder, threads=1)
decoder = codecstream.StreamDecoder(program, (4,))
before = numpy.concatenate(list(decoder.push(codes)))
for path in folder.iterdir():  # as the exporter replaces an artifact; then the folder goes too
    other = path.with_suffix(".new")
    other.write_bytes(b"\\xff" * path.stat().st_size)
    other.replace(path)
shutil.rmtree(folder)
gc.collect()
for value in range(5):  # 500 MB, of which nothing may be the program's
    block = numpy.full(12_500_000, value, numpy.int64)
    del block
blocks = [numpy.full(1000, 255, numpy.uint8) for _ in range(1000)]
decoder.reset()
after = numpy.concatenate(list(decoder.push(codes)))  # 50 chunks
print(json.dumps({"chunks": len(codes) // 4, "equal": bool(numpy.array_equal(before, after))}))
"""


@pytest.mark.case(37)
def test_a_loaded_program_needs_its_files_no_longer(artifact: Path, tmp_path: Path) -> None:
    """Nothing native may go on reading bytes that Python, or the file system, gave away.

    Files that are overwritten where they lie are another matter: some runtimes map them.
    """
    folder = Path(shutil.copytree(artifact, tmp_path / "decoder"))
    np.save(tmp_path / "codes.npy", make_codes(200))
    result = run(GONE, folder, tmp_path / "codes.npy")
    assert (result["chunks"], result["equal"]) == (50, True)
    assert not folder.exists()


# Warm-up


@pytest.mark.case(19)
@pytest.mark.case(29)
def test_warming_up_leaves_no_trace(artifact: Path) -> None:
    warm, cold = (
        decode(codecstream.load_program(artifact, threads=1, warmup=warmup), CODES)
        for warmup in (True, False)
    )
    assert np.array_equal(warm, cold)


# CPU and threads, measured once in a process of its own

# Importing ONNX Runtime starts a thread of its own on some machines, and on others none.
GUEST = """
import contextlib, json, os, statistics, sys, time
import numpy
with contextlib.suppress(ImportError):
    import onnxruntime
own = set(os.listdir("/proc/self/task"))
import codecstream
program = codecstream.load_program(sys.argv[1], threads=int(sys.argv[2]) or None)
extra = len(set(os.listdir("/proc/self/task")) - own)
codes = numpy.random.default_rng(0).integers(0, 2048, (25, 16))
state = program.initial_state()
def cpu_s(frames):
    before = time.process_time()
    program.step(codes[:frames], state)
    return time.process_time() - before
first = {size: (cpu_s(size), statistics.median(cpu_s(size) for _ in range(5)))
         for size in (2, 4, 8, 16, 25)}
before = time.process_time(), time.perf_counter()
for _ in range(10):
    program.step(codes, state)
cpu_per_wall = (time.process_time() - before[0]) / (time.perf_counter() - before[1])

program = codecstream.load_program(sys.argv[1], threads=2, warmup=False)
cpu_s(8)
extra_of_two = len(set(os.listdir("/proc/self/task")) - own)
decoding_s, started = 0.0, time.process_time()
for _ in range(8):
    decoding_s += cpu_s(8)
    time.sleep(0.25)
busy_s = time.process_time() - started
before = time.process_time()
time.sleep(2.0)
idle_s = time.process_time() - before
print(json.dumps(dict(extra=extra, extra_of_two=extra_of_two, first=first, busy_s=busy_s,
                      cpu_per_wall=cpu_per_wall, decoding_s=decoding_s, idle_s=idle_s)))
"""


@pytest.fixture(scope="module")
def guest(artifact: Path) -> dict[str, Any]:
    """One thread, by the option; then two."""
    return run(GUEST, artifact, "1")


needs_proc = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux's /proc")


@pytest.mark.case(29)
@needs_proc
def test_the_first_chunk_of_a_size_costs_little_more_than_the_next(guest: dict[str, Any]) -> None:
    """In CPU time of that process. A runtime that plans anew for each change of size may do so."""
    for size, (first_s, later_s) in guest["first"].items():
        assert first_s <= 2 * later_s + 0.01, size


@pytest.mark.case(33)
@needs_proc
def test_as_many_threads_as_were_asked_for(guest: dict[str, Any]) -> None:
    assert guest["cpu_per_wall"] <= 1.1
    assert guest["extra_of_two"] > guest["extra"]


@pytest.mark.case(33)
@needs_proc
@pytest.mark.skipif(shutil.which("taskset") is None, reason="needs taskset, of util-linux")
def test_one_allowed_cpu_means_one_thread(runtime: str, artifact: Path) -> None:
    code = GUEST.partition("\nfirst = ")[0] + "\npcm, _ = program.step(codes, state)"
    code += "\nprint(json.dumps(dict(extra=extra, samples=len(pcm))))"
    alone = run(code, artifact, "0", cpu=min(os.sched_getaffinity(0)))
    assert alone["extra"] == 0
    assert alone["samples"] == 25 * 1920
    assert "affinity" not in alone["stderr"].lower()
    if runtime != "executorch":  # which says things about the CPU that nobody can turn off
        assert alone["stderr"] == ""


@pytest.mark.case(34)
@needs_proc
def test_threads_sleep_between_chunks(guest: dict[str, Any]) -> None:
    """A thread that does not would take 2 s in each of the two spans."""
    assert guest["busy_s"] - guest["decoding_s"] < 1
    assert guest["idle_s"] < 1


# In a process of its own too: what the tests before it left behind comes and goes there.
LONG = """
import json, random, sys
import numpy, psutil, codecstream
source = random.Random(0)
codes = numpy.load(sys.argv[2])
program = codecstream.load_program(sys.argv[1], threads=1)
state = program.initial_state()
for count in range(1, 2001):
    _, state = program.step(codes[: source.randint(1, 25)], state)
    if count % 40 == 0:  # an utterance ends
        state = program.initial_state()
    if count == 200:
        at_200 = psutil.Process().memory_info().rss
print(json.dumps({"at_200": at_200, "at_2000": psutil.Process().memory_info().rss}))
"""


@pytest.mark.slow
@pytest.mark.case(32)
def test_memory_stays_when_sizes_vary(artifact: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "codes.npy", make_codes(25))
    rss = run(LONG, artifact, tmp_path / "codes.npy")
    assert rss["at_2000"] <= rss["at_200"] + max(0.05 * rss["at_200"], 10e6)
