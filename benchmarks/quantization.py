"""What int8 costs and saves: layers quantised against signal-to-noise ratio and time.

    python benchmarks/quantization.py --checkpoint DIR [--layers 0 1 3 6 12 16] [--work DIR]

Quantises the most worthwhile layers of the step module, one more set per line, and runs each
program through ONNX Runtime, taking turns with the float32 one: minimum of the rounds. "k=7", "up"
and "k=1" count the units' wide convolutions, the transposed ones and the narrow ones.
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch

from codecstream.schedule import Ramp
from codecstream_export import load_checkpoint
from codecstream_export.int8.sensitivity import MIN_SLICE_SNR_DB, MIN_SNR_DB, Quantization, Survey
from codecstream_export.random_weights import random_codes
from codecstream_export.step import StepDecoder
from codecstream_export.targets.onnx_int8 import use_unsigned_activations
from codecstream_parity import slice_snr_db, snr_db

HELD_OUT_SEED = 3003  # neither the calibration's nor the probe's
FRAMES = (25, 2)
PROGRAM_NAME = "decoder.onnx"


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    source = load_checkpoint(options.checkpoint)
    step = StepDecoder(source.decoder)
    codes = random_codes(options.frames, source.decoder.config, HELD_OUT_SEED)
    with torch.inference_mode():
        reference = source.decoder(codes.T[None])[0].numpy()
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        float_session = export(step, Path(folder), options.threads)
        survey = Survey(step, source.decoder)
        chosen = survey.choose(MIN_SNR_DB, MIN_SLICE_SNR_DB)
        print_head(options, len(survey.order))
        report = survey.report(chosen, MIN_SNR_DB, MIN_SLICE_SNR_DB)
        shares = {layer.name: layer.arithmetic for layer in report.layers}
        for names in [chosen, *(survey.order[:count] for count in options.layers)]:
            with survey.applied(names):
                session = export(step, Path(folder), options.threads)
            output = decode(session, codes.numpy())
            slices = slice_snr_db(reference, output, source.decoder.config.samples_per_frame)
            times = [race(float_session, session, n, options.rounds) for n in FRAMES]
            size = (Path(folder) / PROGRAM_NAME).stat().st_size
            cells = [
                f"{len(names)}{' (shipped)' if names is chosen else ''}",
                kinds(names),
                f"{sum(shares[name] for name in names):.0%}",
                f"{snr_db(reference, output):.1f}",
                f"{slices.min():.1f}",
                *(
                    cell
                    for whole, small in times
                    for cell in (f"{whole:.0f}", f"{small:.0f}", f"{whole / small:.2f}")
                ),
                f"{times[0][1] / (FRAMES[0] * 80):.2f}",
                f"{size / 1e6:.0f}",
            ]
            print("| " + " | ".join(cells) + " |", flush=True)
            del session
        print_layers(report)


def export(step: StepDecoder, folder: Path, threads: int) -> Any:
    """Write ``step`` as ONNX and load it as the runtime module does."""
    codes = random_codes(5, step.config).T[None].contiguous()
    frames = ({2: torch.export.Dim("frames", min=1)}, tuple({} for _ in step.state))
    names = [item.name for item in step.state]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(
            step, (codes, *step.initial_state()), dynamic_shapes=frames, strict=False
        )
        result = torch.onnx.export(
            program,
            (),
            input_names=["codes", *names],
            output_names=["pcm", *(f"next.{name}" for name in names)],
            opset_version=18,
            dynamo=True,
            external_data=False,
            verbose=False,
        )
    assert result is not None
    use_unsigned_activations(result.model)
    path = folder / PROGRAM_NAME
    ir.save(result.model, path)
    del result, program
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    settings.inter_op_num_threads = 1
    settings.enable_mem_pattern = False
    settings.add_session_config_entry("session.force_spinning_stop", "1")
    return onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])


def decode(session: Any, codes: np.ndarray[Any, np.dtype[np.int64]]) -> Any:
    """Decode ``[frames, codebooks]`` in ramp order."""
    state = {item.name: np.zeros(item.shape, np.float32) for item in session.get_inputs()[1:]}
    parts, start = [], 0
    for size in Ramp().split(len(codes)):
        batch = codes[start : start + size].T[np.newaxis]
        pcm, *after = session.run(None, {"codes": batch, **state})
        state = dict(zip(state, after, strict=True))
        parts.append(pcm)
        start += size
    return np.concatenate(parts)


def race(first: Any, second: Any, frames: int, rounds: int) -> tuple[float, float]:
    """Return the least time in ms of each session, taking turns."""
    codes = np.random.default_rng(0).integers(0, 2048, (1, 16, frames))
    best = [float("inf"), float("inf")]
    for _ in range(rounds + 1):
        for i, session in enumerate((first, second)):
            feeds = {
                item.name: np.zeros(item.shape, np.float32) for item in session.get_inputs()[1:]
            }
            start = time.perf_counter()
            session.run(None, {"codes": codes, **feeds})
            best[i] = min(best[i], (time.perf_counter() - start) * 1e3)
    return best[0], best[1]


def kinds(names: Sequence[str]) -> str:
    wide = sum(name.endswith("conv1") for name in names)
    up = sum("upsample" in name for name in names)
    narrow = sum(name.endswith("conv2") for name in names)
    rest = len(names) - wide - up - narrow
    parts = ((wide, "k=7"), (up, "up"), (narrow, "k=1"), (rest, "first"))
    return " + ".join(f"{count} {kind}" for count, kind in parts if count) or "none"


def print_head(options: argparse.Namespace, candidates: int) -> None:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    cpu = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        "unknown",
    )
    print(
        f"{datetime.date.today()}, commit {commit}, {cpu}, {options.threads} threads, "
        f"onnxruntime {onnxruntime.__version__}, torch {torch.__version__}; "
        f"{options.frames} held-out frames in ramp order; {candidates} candidates\n"
    )
    print(
        "| layers on int8 | which | arithmetic | SNR dB | worst 80 ms dB "
        "| 25 frames: fp32 ms | int8 ms | ratio | 2 frames: fp32 ms | int8 ms | ratio "
        "| RTF, 25 frames | MB |"
    )
    print("| ---: | --- " + "| ---: " * 11 + "|", flush=True)


def print_layers(report: Quantization) -> None:
    print("\n| layer alone on int8 | arithmetic | SNR dB | worst 80 ms dB | largest weight |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for layer in report.layers:
        if layer.snr_db is not None:
            print(
                f"| {layer.name} | {layer.arithmetic:.1%} | {layer.snr_db:.1f} "
                f"| {layer.worst_slice_snr_db:.1f} | {layer.largest_weight} |"
            )


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--layers", type=int, nargs="*", default=[3, 6, 9, 12, 16])
    parser.add_argument("--frames", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", help="folder for temporary programs of half a GB")
    return parser.parse_args()


if __name__ == "__main__":
    main()
