"""ONNX Runtime as a guest on a device: memory, threads and CPU time."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from support import make_codes

import codecstream
from codecstream import Program

pytest.importorskip("onnxruntime", reason="needs: pip install 'codecstream[onnx]'")


def rss_bytes() -> int:
    rss: int = psutil.Process().memory_info().rss
    return rss


@pytest.mark.slow
@pytest.mark.case(32)
def test_memory_stays_when_sizes_vary(tiny_program: Program) -> None:
    source = random.Random(0)
    codes = make_codes(25)
    state = tiny_program.initial_state()
    at_200 = 0
    for count in range(1, 2001):
        _, state = tiny_program.step(codes[: source.randint(1, 25)], state)
        if count % 40 == 0:  # an utterance ends
            state = tiny_program.initial_state()
        if count == 200:
            at_200 = rss_bytes()
    assert rss_bytes() <= at_200 + max(0.05 * at_200, 10e6)


@pytest.mark.case(33)
@pytest.mark.skipif(shutil.which("taskset") is None, reason="needs taskset, of util-linux")
def test_one_allowed_cpu_means_one_thread(tiny_artifact: Path) -> None:
    code = (
        "import sys, numpy, codecstream; from codecstream.cpus import usable_cpus\n"
        "program = codecstream.load_program(sys.argv[1])\n"
        "pcm, _ = program.step(numpy.zeros((2, 16), numpy.int64), program.initial_state())\n"
        "print(usable_cpus(), program.threads, len(pcm))"
    )
    cpu = str(min(os.sched_getaffinity(0)))
    command = ["taskset", "-c", cpu, sys.executable, "-c", code, str(tiny_artifact)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    assert done.stdout.split() == ["1", "1", "3840"]


@pytest.mark.case(34)
def test_threads_sleep_between_chunks(tiny_artifact: Path) -> None:
    """Counted in CPU time of this process, so a busy machine does not matter."""
    program = codecstream.load_program(tiny_artifact, threads=2)
    codes = make_codes(25)
    state = program.initial_state()
    decoding_s = 0.0
    first = time.process_time()
    for _ in range(12):
        before = time.process_time()
        _, state = program.step(codes, state)
        decoding_s += time.process_time() - before
        time.sleep(0.25)
    assert time.process_time() - first <= 1.5 * decoding_s + 0.05
    before = time.process_time()
    time.sleep(2.0)
    assert time.process_time() - before < 0.05
