"""Time a stateful step against decoding a window of old and new frames again, as others do.

    python benchmarks/against_windows.py --artifact benchmarks/work/onnx-fp32 \\
        --checkpoint benchmarks/work/checkpoint [--frames 2 4 8 16 25] [--rounds 7]

Without state, n new frames of audio cost a window of 72 + n frames: 72 is the attention window.
Three ways to the same new frames, with the same weights and codes, in turns in one process:

- the artifact's step of n frames, with the state of a stream that is under way;
- the eager PyTorch decoder over the window;
- the artifact's program over the window, from no state: the same window in ONNX Runtime.

A ratio is the median over the rounds of "this way's time over the step's in the same round". The
last column is the audio of an utterance, put together from the newest frames of each window, held
against the eager decode of all frames at once.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

import codecstream
from codecstream.runtimes import Program
from codecstream_export import EagerDecoder, load_checkpoint
from codecstream_export.reference import eager_pcm
from codecstream_parity import snr_db

CONTEXT = 72
FRAME_MS = 80.0
CODEBOOKS, CODES = 16, 2048
UTTERANCE = 200  # frames that the SNR is measured over

Codes = NDArray[np.int64]
Pcm = NDArray[np.float32]


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    program = codecstream.load_program(options.artifact, threads=options.threads)
    decoder = load_checkpoint(options.checkpoint).decoder
    codes = np.random.default_rng(0).integers(0, CODES, (UTTERANCE, CODEBOOKS))
    windows: dict[str, Callable[[Codes], Pcm]] = {
        "window, eager PyTorch": lambda window: eager(decoder, window),
        f"window, {program.manifest.runtime}": lambda window: from_no_state(program, window),
    }
    with torch.inference_mode():
        print("| frames | step, ms | RTF | " + " | ".join(f"{name}, ms | x" for name in windows))
        print("| ---: |" + " ---: |" * (2 + 2 * len(windows)))
        for frames in options.frames:
            print(row(program, codes, frames, windows, options.rounds))
        reference = eager_pcm(decoder, codes)
        stepped = stream(program, codes, max(options.frames))
        print(f"\nAudio against all frames at once, {UTTERANCE} frames in chunks of ", end="")
        print(f"{max(options.frames)}: steps {snr_db(reference, stepped):.1f} dB", end="")
        for name, decode in windows.items():
            windowed = newest_of_windows(decode, codes, max(options.frames))
            print(f"; {name} {snr_db(reference, windowed):.1f} dB", end="")
        print()


def row(
    program: Program,
    codes: Codes,
    frames: int,
    windows: dict[str, Callable[[Codes], Pcm]],
    rounds: int,
) -> str:
    """Time each way to decode the same ``frames`` frames; return a line of the table."""
    _, under_way = program.step(codes[:CONTEXT], program.initial_state())
    window = codes[: CONTEXT + frames]
    ways: dict[str, Callable[[], object]] = {
        "step": lambda: program.step(window[CONTEXT:], under_way),
        **{name: (lambda decode=decode: decode(window)) for name, decode in windows.items()},
    }
    times_ms: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            if turn:  # the first round warms up
                times_ms[name].append(1000 * (time.perf_counter() - began))
    step_ms = times_ms.pop("step")
    middle_ms = statistics.median(step_ms)
    cells = [f"{frames}", f"{middle_ms:.0f}", f"{middle_ms / frames / FRAME_MS:.2f}"]
    for each_ms in times_ms.values():
        ratio = statistics.median(a / b for a, b in zip(each_ms, step_ms, strict=True))
        cells += [f"{statistics.median(each_ms):.0f}", f"{ratio:.1f}"]
    return "| " + " | ".join(cells) + " |"


def eager(decoder: EagerDecoder, window: Codes) -> Pcm:
    """Decode int64 ``[frames, codebooks]`` with PyTorch, as a caller of the model would."""
    pcm: Pcm = decoder(torch.from_numpy(window).T[None]).flatten().numpy()
    return pcm


def from_no_state(program: Program, window: Codes) -> Pcm:
    return program.step(window, program.initial_state())[0]


def stream(program: Program, codes: Codes, frames: int) -> Pcm:
    decoder = codecstream.StreamDecoder(program, (frames,))
    return np.concatenate([*decoder.push(codes), *decoder.finish()])


def newest_of_windows(decode: Callable[[Codes], Pcm], codes: Codes, frames: int) -> Pcm:
    """Decode an utterance window by window, and keep the newest frames of each."""
    pieces = []
    for start in range(0, len(codes), frames):
        new = codes[start : start + frames]
        pcm = decode(codes[max(0, start - CONTEXT) : start + len(new)])
        pieces.append(pcm[-1920 * len(new) :])
    return np.concatenate(pieces)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--artifact", required=True, help="a stateful one without a largest chunk")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--frames", type=int, nargs="+", default=[2, 4, 8, 16, 25])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
