"""Where ONNX Runtime spends the time of a chunk, by operator.

    python benchmarks/profile_onnx.py --artifact benchmarks/work/decoder-onnx [--frames 25]

Uses the runtime's own profiler on the last of a few steps; the profile costs some time itself.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import onnxruntime

from codecstream.artifact import open_artifact

STEPS = 4


def main() -> None:
    options = parse_options()
    artifact = open_artifact(options.artifact)
    with tempfile.TemporaryDirectory() as folder:
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = options.threads
        settings.enable_mem_pattern = False
        settings.enable_profiling = True
        settings.profile_file_prefix = str(Path(folder) / "profile")
        session = onnxruntime.InferenceSession(
            str(artifact.program_path), settings, providers=["CPUExecutionProvider"]
        )
        state = {
            item.name: np.zeros(item.shape, np.float32) for item in artifact.manifest.inputs[1:]
        }
        codes = np.random.default_rng(0).integers(0, 2048, (1, 16, options.frames))
        for _ in range(STEPS):
            session.run(None, {"codes": codes, **state})
        events = json.loads(Path(session.end_profiling()).read_text())
    last = [event for event in events if event["name"] == "model_run"][-1]
    times: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in events:
        kernel = event.get("cat") == "Node" and event["name"].endswith("kernel_time")
        if kernel and event["ts"] >= last["ts"]:
            times[event["args"]["op_name"]] += event["dur"]
            counts[event["args"]["op_name"]] += 1
    print(f"{options.frames} frames: {last['dur'] / 1e3:.0f} ms\n")
    print("| operator | nodes | ms | share |\n| --- | ---: | ---: | ---: |")
    for name, time_us in times.most_common(8):
        share = time_us / sum(times.values())
        print(f"| {name} | {counts[name]} | {time_us / 1e3:.0f} | {share:.0%} |")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--artifact", required=True)
    parser.add_argument("--frames", type=int, default=25)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
