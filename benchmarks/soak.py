"""A long session: does memory stay flat, does what is played keep up with what is received?

    python benchmarks/soak.py [--minutes 30] [--client asyncio|threads] [--pace 1.0]

A replay server in a process of its own serves the demo's codes at a talker's pace, one long
utterance after another on one connection. The client decodes with the demo decoder and hands the
audio to a player that is only a clock: it begins a while after the first chunk, and takes each
chunk when the ones before it have been played. All times are in seconds of audio. The exit status
is 1 where an utterance was not complete or did not sound, bit for bit, as it does offline.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import platform
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

import codecstream
from codecstream import AudioChunk, StreamDecoder, demo

FRAME_RATE_HZ = 12.5
START_AFTER_S = 3.0  # above the longest wait between two chunks of the ramp, 2 s
SAMPLES = 48
ROWS = 12


@dataclass
class Sample:
    """The process at one moment, and how far the utterance in flight has come."""

    t_s: float
    rss_mb: float
    threads: int
    files: int
    received_s: float
    handed_out_s: float
    played_s: float
    silent_s: float  # underruns of this utterance: they put off what follows

    @property
    def ahead_s(self) -> float:
        """What is received and not played, less what underruns have put off."""
        return self.received_s - self.played_s - self.silent_s


@dataclass
class Listener:
    """A player that is only a clock, and what it has seen."""

    pace: float
    every_s: float
    process: Any = field(default_factory=psutil.Process)
    began_s: float = field(default_factory=time.perf_counter)
    samples: list[Sample] = field(default_factory=list)
    results: list[codecstream.UtteranceResult] = field(default_factory=list)
    checksums: list[int] = field(default_factory=list)
    underruns: int = 0
    underrun_s: float = 0.0

    def begin(self) -> None:
        """An utterance begins."""
        self.checksum = 0
        self.handed_out_s = self.silent_s = 0.0
        self.plays_from_s: float | None = None  # when its first sample would have been played

    def take(self, chunk: AudioChunk, utterance: Any) -> float:
        """Take a chunk; return how long to wait until it is this chunk's turn to be played."""
        now_s = time.perf_counter()
        if self.plays_from_s is None:
            self.plays_from_s = now_s + START_AFTER_S * self.pace
        turn_s = self.plays_from_s + self.handed_out_s * self.pace
        if now_s > turn_s:
            self.underruns += 1
            self.underrun_s += now_s - turn_s
            self.silent_s += (now_s - turn_s) / self.pace
            self.plays_from_s += now_s - turn_s
        self.checksum = zlib.crc32(chunk.pcm.tobytes(), self.checksum)
        self.handed_out_s += chunk.frames / FRAME_RATE_HZ
        if now_s - self.began_s >= len(self.samples) * self.every_s:
            self.samples.append(self.look(utterance, now_s))
        return max(0.0, turn_s - now_s)

    def end(self, utterance: Any) -> None:
        """The utterance is over."""
        self.results.append(utterance.result)
        self.checksums.append(self.checksum)

    def look(self, utterance: Any, now_s: float) -> Sample:
        assert self.plays_from_s is not None
        return Sample(
            t_s=now_s - self.began_s,
            rss_mb=self.process.memory_info().rss / 1e6,
            threads=self.process.num_threads(),
            files=self.process.num_fds() if hasattr(self.process, "num_fds") else 0,
            received_s=utterance.speech.frames_received / FRAME_RATE_HZ,
            handed_out_s=self.handed_out_s,
            played_s=max(0.0, (now_s - self.plays_from_s) / self.pace),
            silent_s=self.silent_s,
        )


def main() -> None:
    options = parse_options()
    run_s = options.minutes * 60
    codes = np.concatenate([said.codes for said in demo.utterances()])
    frames = min(run_s / options.pace, options.utterance_s) * FRAME_RATE_HZ
    codes = np.resize(codes, (max(25, round(frames)), codes.shape[1]))
    utterances = max(2, round(run_s / options.pace / (len(codes) / FRAME_RATE_HZ)))
    program = codecstream.load_program(demo.artifact_dir(), threads=1)
    expected = offline_checksum(program, codes)
    listener = Listener(options.pace, every_s=run_s / SAMPLES)
    cpu_s = time.process_time()
    with serving(codes, options.pace) as url:
        if options.client == "asyncio":
            asyncio.run(listen(url, program, utterances, listener))
        else:
            listen_in_thread(url, program, utterances, listener)
    cpu_s = time.process_time() - cpu_s
    report(options, listener, len(codes), cpu_s)
    good = all(result.status == "complete" for result in listener.results)
    if not good or set(listener.checksums) != {expected}:
        statuses = [result.status for result in listener.results]
        raise SystemExit(f"wrong: {statuses}, checksums {listener.checksums}, not {expected}")


async def listen(url: str, program: Any, utterances: int, listener: Listener) -> None:
    async with codecstream.connect(url, program) as client:
        for _ in range(utterances):
            listener.begin()
            utterance = client.speak("x")
            async for chunk in utterance:
                await asyncio.sleep(listener.take(chunk, utterance))
            listener.end(utterance)


def listen_in_thread(url: str, program: Any, utterances: int, listener: Listener) -> None:
    with codecstream.sync_connect(url, program) as client:
        for _ in range(utterances):
            listener.begin()
            utterance = client.speak("x")
            for chunk in utterance:
                time.sleep(listener.take(chunk, utterance))
            listener.end(utterance)


def offline_checksum(program: Any, codes: NDArray[Any]) -> int:
    """Return the checksum of the audio without network, clock and threads."""
    decoder = StreamDecoder(program)
    checksum = 0
    for start in range(0, len(codes), 100):
        for pcm in decoder.push(codes[start : start + 100]):
            checksum = zlib.crc32(pcm.tobytes(), checksum)
    for pcm in decoder.finish():
        checksum = zlib.crc32(pcm.tobytes(), checksum)
    return checksum


@contextlib.contextmanager
def serving(codes: NDArray[Any], pace: float) -> Iterator[str]:
    """Run the replay server as its own process; its memory is not the client's."""
    server = Path(__file__).parents[1] / "examples" / "replay_server.py"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "codes.npy"
        np.save(file, codes)
        command = [sys.executable, "-u", str(server), "--codes", str(file), "--pace", str(pace)]
        command += ["--decoder-id", demo.DECODER_ID]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                yield process.stdout.readline().strip()
            finally:
                process.terminate()


def report(options: argparse.Namespace, listener: Listener, frames: int, cpu_s: float) -> None:
    samples = listener.samples
    wall_s = time.perf_counter() - listener.began_s
    print(
        f"{options.client}, pace {options.pace:g}, {len(listener.results)} utterances of "
        f"{frames / FRAME_RATE_HZ:g} s of audio in {wall_s:.0f} s; Python "
        f"{platform.python_version()}, codecstream {codecstream.__version__}\n"
    )
    print("| s | resident MB | threads | files | received s | handed out s | played s | ahead s |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for sample in samples[:: max(1, len(samples) // ROWS)]:
        print(
            f"| {sample.t_s:.0f} | {sample.rss_mb:.1f} | {sample.threads} | {sample.files} | "
            f"{sample.received_s:.1f} | {sample.handed_out_s:.1f} | {sample.played_s:.1f} | "
            f"{sample.ahead_s:.2f} |"
        )
    settled = samples[len(samples) // 4 :]  # the first quarter fills caches
    growth_mb = settled[-1].rss_mb - settled[0].rss_mb
    both = [s for s in settled if s.played_s > 0 and s.received_s < frames / FRAME_RATE_HZ]
    half = len(both) // 2
    drift = "not measured: the run is too short"
    if half:
        drift = f"{_median_ahead_s(both[half:]) - _median_ahead_s(both[:half]):+.2f} s"
    received = sum(result.frames_received for result in listener.results)
    handed_out = sum(result.frames_handed_out for result in listener.results)
    print("\n| what | figure |\n| --- | ---: |")
    print(f"| frames received, handed out | {received}, {handed_out} |")
    print(f"| memory, from a quarter of the run to its end | {growth_mb:+.1f} MB |")
    print(f"| received less played, second half less first half of that | {drift} |")
    print(f"| underruns | {listener.underruns}, {listener.underrun_s * 1000:.0f} ms |")
    print(
        f"| threads, files: first, last | {_both(samples, 'threads')}, {_both(samples, 'files')} |"
    )
    print(f"| CPU of the client, all threads | {100 * cpu_s / wall_s:.1f} % of one core |")


def _median_ahead_s(samples: list[Sample]) -> float:
    return float(np.median([sample.ahead_s for sample in samples]))


def _both(samples: list[Sample], name: str) -> str:
    return f"{getattr(samples[0], name)} and {getattr(samples[-1], name)}"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="how long (%(default)g)")
    parser.add_argument("--client", choices=["asyncio", "threads"], default="asyncio")
    parser.add_argument(
        "--pace", type=float, default=1.0, help="time per frame over its duration (%(default)g)"
    )
    parser.add_argument(
        "--utterance-s", type=float, default=600.0, help="longest utterance (%(default)g s)"
    )
    options = parser.parse_args()
    if not (options.minutes > 0 and options.pace > 0 and options.utterance_s > 0):
        parser.error("--minutes, --pace and --utterance-s must be above 0")
    return options


if __name__ == "__main__":
    main()
