"""Export the full-size decoder for every runtime and print one table of what came out.

    python benchmarks/runtimes.py [--work DIR] [--threads 2] [--repeats 5] [--only NAME ...]
                                  [--export-only] [--torch-free PYTHON]

Each artifact is exported by the command line in a process of its own (which verifies it against
the eager decoder), and then loaded and timed in another, so that memory is that of a device that
streams. An artifact that is in --work already is only timed, unless --again is given. ExecuTorch
is timed with the interpreter of --torch-free too, where ``codecstream[executorch]`` is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

SIZES = (1, 2, 4, 8, 16, 25)
FRAME_S = 0.08
ARTIFACTS = {
    "onnx-fp32": ["--runtime", "onnx"],
    "onnx-fp16": ["--runtime", "onnx", "--precision", "fp16"],
    "onnx-int8": ["--runtime", "onnx", "--precision", "int8"],
    "torch_export-fp32": ["--runtime", "torch_export"],
    "torch_export-fp16": ["--runtime", "torch_export", "--precision", "fp16"],
    "executorch-fp32": ["--runtime", "executorch"],
    "executorch-int8": ["--runtime", "executorch", "--precision", "int8"],
    "onnx-windowed": ["--runtime", "onnx", "--mode", "windowed"],
    "torch_export-windowed": ["--runtime", "torch_export", "--mode", "windowed"],
    "executorch-windowed": ["--runtime", "executorch", "--mode", "windowed"],
}
CHECKPOINT_CODE = (
    "import sys, codecstream_export as e\n"
    "from codecstream_export.random_weights import random_decoder\n"
    "e.save_checkpoint(sys.argv[1], random_decoder(e.DecoderConfig()))"
)


def main() -> None:
    options = parse_options()
    if options.measure:
        print(json.dumps(measure(options.measure, options.threads, options.repeats)))
        return
    checkpoint = options.work / "checkpoint" / "speech_tokenizer"
    if not checkpoint.exists():
        subprocess.run([sys.executable, "-c", CHECKPOINT_CODE, checkpoint], check=True)
    print_head(options.threads)
    for name in options.only or ARTIFACTS:
        artifact = options.work / name
        exported = export(artifact, checkpoint, name, again=options.again)
        if options.export_only:
            continue
        pythons = [sys.executable]
        if options.torch_free and name.startswith("executorch"):
            pythons.append(options.torch_free)
        for python in pythons:
            print_row(name, artifact, exported, run_measure(python, artifact, options))


def export(artifact: Path, checkpoint: Path, name: str, *, again: bool) -> str:
    """Export unless it is there; return the seconds that took, noted beside the artifact."""
    note = artifact.with_suffix(".seconds")
    if again or not artifact.exists():
        started_s = time.perf_counter()
        command = [sys.executable, "-m", "codecstream_export.cli", "--checkpoint", str(checkpoint)]
        command += ["--out", str(artifact), "--force", *ARTIFACTS[name]]
        with artifact.with_suffix(".log").open("w") as log:
            done = subprocess.run(command, stdout=log, stderr=log)
        if done.returncode:
            raise SystemExit(f"{name}: {artifact.with_suffix('.log').read_text()[-2000:]}")
        note.write_text(f"{time.perf_counter() - started_s:.0f}")
    return note.read_text() if note.exists() else "not measured"


def run_measure(python: str, artifact: Path, options: argparse.Namespace) -> dict[str, Any]:
    command = [python, __file__, "--measure", str(artifact)]
    command += ["--threads", str(options.threads), "--repeats", str(options.repeats)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{artifact.name} under {python}: {done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure(artifact: str, threads: int, repeats: int) -> dict[str, Any]:
    """Time each chunk size in turn, round after round; runs on a device's packages alone."""
    import numpy as np

    import codecstream
    from codecstream.bench.worker import matrix_product, memory_mb

    started_s = time.perf_counter()
    program = codecstream.load_program(artifact, threads=threads)
    load_s = time.perf_counter() - started_s
    generator = np.random.default_rng(0)
    state = program.initial_state()
    times: dict[int, list[float]] = {frames: [] for frames in SIZES}
    for _ in range(repeats):
        for frames in SIZES:
            codes = generator.integers(0, 2048, (frames, 16))
            started_s = time.perf_counter()
            _, state = program.step(codes, state)
            times[frames].append(time.perf_counter() - started_s)
    resident_mb, peak_mb = memory_mb()
    return {
        "load_s": load_s,
        "rtf": {frames: sorted(t)[len(t) // 2] / frames / FRAME_S for frames, t in times.items()},
        "best": {frames: min(t) / frames / FRAME_S for frames, t in times.items()},
        "resident_mb": resident_mb,
        "peak_mb": peak_mb,
        "torch": "torch" in sys.modules,
        "matrix_gflops": matrix_product(),
    }


def print_head(threads: int) -> None:
    from decode import commit, describe_machine

    print(f"Machine: {describe_machine()}, {threads} threads; {date.today()}, {commit()}\n")
    sizes = " / ".join(str(size) for size in SIZES)
    print(
        f"| artifact | MB | export s | SNR dB | worst 80 ms dB | RTF at {sizes} frames (median) "
        f"| best | load s | resident MB | peak MB | GFLOP/s |"
    )
    print("| --- | ---: | ---: | ---: | ---: | --- | --- | ---: | ---: | ---: | ---: |")


def print_row(name: str, artifact: Path, seconds: str, figures: dict[str, Any]) -> None:
    manifest = json.loads((artifact / "manifest.json").read_text())
    size_mb = sum(entry["bytes"] for entry in manifest["files"].values()) / 1e6
    parity = [p for p in manifest["parity"].values() if p["min_snr_db"] is not None]
    snr, worst = (min(p[key] for p in parity) for key in ("snr_db", "worst_slice_snr_db"))
    extra = "".join(
        f" ({p['snr_db']:.1f} / {p['worst_slice_snr_db']:.1f} against all frames at once)"
        for p in manifest["parity"].values()
        if p["min_snr_db"] is None
    )
    rtf, best = (" / ".join(f"{v:.2f}" for v in figures[k].values()) for k in ("rtf", "best"))
    where = "" if figures["torch"] or not name.startswith("executorch") else ", without torch"
    print(
        f"| {name}{where} | {size_mb:.1f} | {seconds} | {snr:.1f}{extra} | {worst:.1f} | {rtf} "
        f"| {best} | {figures['load_s']:.1f} | {figures['resident_mb']:.0f} "
        f"| {figures['peak_mb']:.0f} | {figures['matrix_gflops']:.0f} |",
        flush=True,
    )


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path("benchmarks/work"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=ARTIFACTS, metavar="NAME")
    parser.add_argument("--again", action="store_true", help="export what is there already")
    parser.add_argument("--export-only", action="store_true", help="for timing later, in quiet")
    parser.add_argument("--torch-free", metavar="PYTHON")
    parser.add_argument("--measure", metavar="ARTIFACT", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
