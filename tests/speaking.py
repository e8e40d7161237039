"""What the tests of the client share: they speak to a server and listen."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support import SAMPLES, make_codes

from codecstream import AudioChunk, CodecStreamError, Utterance
from codecstream.testing import Fault, Recording, ReplayServer

CODES = make_codes(57)
ROOT = Path(__file__).parents[1]


async def collect(utterance: Utterance) -> NDArray[np.float32]:
    """Take all chunks; check their bookkeeping on the way."""
    parts: list[NDArray[np.float32]] = []
    frames = 0
    async for chunk in utterance:
        assert (chunk.idx, chunk.first_frame) == (len(parts), frames)
        assert chunk.pcm.size == chunk.frames * SAMPLES
        assert chunk.t_ms >= chunk.arrival_ms >= 0
        frames += chunk.frames
        parts.append(chunk.pcm)
    return np.concatenate(parts) if parts else np.empty(0, np.float32)


async def fails(utterance: Utterance, kind: type[CodecStreamError]) -> Any:
    """Return the error that the utterance ends with, and what was heard before."""
    heard: list[AudioChunk] = []
    with pytest.raises(kind) as caught:
        async for chunk in utterance:
            heard.append(chunk)
    assert type(caught.value) is kind
    assert utterance.result.error is caught.value
    assert utterance.result.status != "complete"
    return caught.value


def replay(*faults: Fault, **options: Any) -> ReplayServer:
    return ReplayServer([Recording(CODES)], faults=faults, **{"pace": 0, **options})


@contextmanager
def example_server(*arguments: object) -> Iterator[str]:
    """Run examples/replay_server.py; yields the URL that it prints on its first line."""
    command = [sys.executable, "-u", "examples/replay_server.py", *map(str, arguments)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()  # else a test that fails would wait for it
