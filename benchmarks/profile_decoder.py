"""Where the time of a chunk goes, by operator and by stage of the decoder.

    python benchmarks/profile_decoder.py --artifact benchmarks/work/onnx-fp32 [--frames 2 25]

Reads ONNX Runtime's own profiler, or ExecuTorch's event tracer (which needs the official package,
with ``executorch.devtools``). Both cost some time themselves. An operator's figure is the median
over the steps after the first two; a table's total is their sum, beside the time of whole steps.

ExecuTorch's events have no names of our modules. Their stages are told by landmarks: a program
has one convolution with several taps for each layer that has one, in the decoder's order.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from codecstream.artifact import Artifact, open_artifact
from codecstream.bench.host import describe_host

STEPS, WARM_UP = 9, 2
BEFORE_BLOCKS = ("codebooks, pre_conv", "transformer", "upsamplers", "head")
REST = "shapes and copies between stages"
LISTED = 10


@dataclass(frozen=True)
class Operation:
    """One operator of one step: what it is, where it belongs, and its median time."""

    kind: str
    stage: str
    ms: float


def main() -> None:
    options = parse_options()
    artifact = open_artifact(options.artifact)
    manifest = artifact.manifest
    profile = {"onnx": profile_onnx, "executorch": profile_executorch}[manifest.runtime]
    host = describe_host()
    print(
        f"{manifest.runtime}, {manifest.precision}; {host['cpu']}, {options.threads} "
        f"threads, {time.strftime('%Y-%m-%d', time.gmtime())}"
    )
    for frames in options.frames:
        operations, step_ms = profile(artifact, frames, options.threads)
        total = sum(operation.ms for operation in operations)
        print(
            f"\n{frames} frames: a step took {step_ms:.0f} ms with the profiler on, its operators "
            f"{total:.0f}\n"
        )
        print_table("operator", ((o.kind, o.ms) for o in operations), total)
        print()
        print_table("stage", ((o.stage, o.ms) for o in operations), total, in_order=True)


def profile_onnx(artifact: Artifact, frames: int, threads: int) -> tuple[list[Operation], float]:
    """Profile a step of an ONNX program as the client runs it."""
    import onnx
    import onnxruntime

    from codecstream.runtimes import onnx as runtime

    with tempfile.TemporaryDirectory() as folder:
        settings = runtime._options(onnxruntime, threads)
        settings.enable_profiling = True
        settings.profile_file_prefix = str(Path(folder) / "profile")
        settings.optimized_model_filepath = str(Path(folder) / "optimized.onnx")
        session = onnxruntime.InferenceSession(
            str(artifact.program_path), settings, providers=["CPUExecutionProvider"]
        )
        stages = onnx_stages(onnx.load(settings.optimized_model_filepath).graph)
        state = {item.name: np.zeros(item.shape, np.float32) for item in session.get_inputs()[1:]}
        for _ in range(STEPS):
            session.run(None, {"codes": random_codes(frames), **state})
        events = json.loads(Path(session.end_profiling()).read_text())
    steps_us = [event["dur"] for event in events if event["name"] == "model_run"][WARM_UP:]
    times_us: dict[str, list[int]] = defaultdict(list)
    kinds: dict[str, str] = {}
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            name = event["name"].removesuffix("_kernel_time")
            times_us[name].append(event["dur"])
            kinds[name] = event["args"]["op_name"]
    operations = [
        Operation(kinds[name], stages.get(name, REST), statistics.median(dur_us[WARM_UP:]) / 1000)
        for name, dur_us in times_us.items()
    ]
    return operations, statistics.median(steps_us) / 1000


def onnx_stages(graph: Any) -> dict[str, str]:
    """Return the stage of each node: that of its weights, else the last one of its inputs."""
    ranks: dict[str, int] = {}  # of values
    order = [*BEFORE_BLOCKS, *(f"block {i}" for i in range(1, 5)), "tail"]
    found = {}
    for node in graph.node:
        named = [rank(name, order) for name in (*node.input, *node.output)]
        known = [place for place in named if place is not None]
        inherited = [ranks[name] for name in node.input if name in ranks]
        # A weight says where; a state that goes out is cut from what is there already.
        place = max(known) if known else max(inherited, default=None)
        if place is None:
            continue
        ranks.update((name, place) for name in node.output)
        found[node.name] = order[place]
    return found


def rank(name: str, order: Sequence[str]) -> int | None:
    """Return the stage that a weight or state of this name belongs to."""
    name = name.removeprefix("next.")
    for pattern, stage in (
        (r"(quantizer|pre_conv)\b", "codebooks, pre_conv"),
        (r"(transformer\b|frames_valid)", "transformer"),
        (r"(upsample|upsamples|mixers)\.", "upsamplers"),
        (r"(decoder\.)?head\b", "head"),
        (r"(decoder\.)?(tail|snake)\b", "tail"),
    ):
        if re.match(pattern, name):
            return order.index(stage)
    block = re.match(r"(?:decoder|blocks)\.(\d)\.", name)
    return order.index(f"block {int(block[1]) + 1}") if block else None


def profile_executorch(
    artifact: Artifact, frames: int, threads: int
) -> tuple[list[Operation], float]:
    """Profile a step of an ExecuTorch program."""
    import torch
    from executorch.devtools import Inspector
    from executorch.extension.pybindings import portable_lib

    if threads != portable_lib._threadpool_get_thread_count():
        portable_lib._unsafe_reset_threadpool(threads)
    program = portable_lib._load_for_executorch(str(artifact.program_path), enable_etdump=True)
    state = [torch.zeros(item.shape) for item in artifact.manifest.inputs[1:]]
    steps_ms = []
    for _ in range(STEPS):
        began = time.perf_counter()
        program.forward([torch.from_numpy(random_codes(frames)), *state])
        steps_ms.append(1000 * (time.perf_counter() - began))
    with tempfile.TemporaryDirectory() as folder:
        dump = Path(folder) / "events.etdp"
        program.write_etdump_result_to_file(str(dump))
        blocks = Inspector(etdump_path=str(dump)).event_blocks
    (events,) = (block.events for block in blocks if block.name == "Execute")
    kept = [event for event in events if is_operator(event)]
    kinds = [kind_of(event.name) for event in kept]
    operations = [
        Operation(kind, stage, statistics.median(event.perf_data.raw[WARM_UP:]))
        for event, kind, stage in zip(kept, kinds, executorch_stages(kinds), strict=True)
    ]
    return operations, statistics.median(steps_ms[WARM_UP:])


def is_operator(event: Any) -> bool:
    """Leave out events that hold others."""
    return event.name not in ("OPERATOR_CALL", "DELEGATE_CALL", "Method::execute")


def kind_of(name: str) -> str:
    """``Convolution (NHWC, F32) IGEMM #2`` is a ``Convolution``, by kernel."""
    name = name.removeprefix("native_call_").split(".")[0]
    match = re.match(r"(.+?) \([^)]*\)( I?GEMM| DWConv)?", name)
    return match[1] + (match[2] or "") if match else f"{name} (not delegated)"


def executorch_stages(kinds: Sequence[str]) -> list[str]:
    """Name the stage of each operator of a program, by its convolutions with several taps.

    They are: pre_conv; a depthwise one per upsampler; the head; per block the upsampling one and
    three of its units. Snake, which ends in a sum of its own, stands in front of most: where a
    stage begins with it, it begins behind the sum before that one. The tail has one tap, and
    begins behind the last unit's sum.
    """
    wide = [i for i, kind in enumerate(kinds) if kind == "Convolution IGEMM"]
    depthwise = [i for i, kind in enumerate(kinds) if kind == "Convolution DWConv"]
    if len(wide) != 18 or len(depthwise) != 2:
        raise SystemExit(f"not the landmarks expected: {len(wide)} and {len(depthwise)}")

    def begins(conv: int, sums: int) -> int:
        before = [i for i in range(conv) if kinds[i] == "Add"]
        return before[-sums] + 1

    products = [i for i in range(depthwise[0]) if kinds[i].startswith("Fully Connected")]
    starts = {
        "codebooks, pre_conv": 0,
        "transformer": wide[0] + 1,
        "upsamplers": products[-1],  # the first upsampler is one, behind the output projection
        "head": begins(wide[1], 1),
        **{f"block {i + 1}": begins(wide[2 + 4 * i], 2) for i in range(1, 4)},
        "tail": kinds.index("Add", wide[17]) + 1,
    }
    starts["block 1"] = wide[1] + 1
    names = [""] * len(kinds)
    for name, start in sorted(starts.items(), key=lambda item: item[1]):
        names[start:] = [name] * (len(kinds) - start)
    return names


def random_codes(frames: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.random.default_rng(frames).integers(0, 2048, (1, 16, frames))


def print_table(
    heading: str, rows: Iterable[tuple[str, float]], total: float, in_order: bool = False
) -> None:
    """Print a Markdown table of sums; small ones together, unless they are wanted in order."""
    sums: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for name, ms in rows:
        sums[name] += ms  # type: ignore[assignment]
        counts[name] += 1
    if in_order:
        listed = list(sums)
        order = [*BEFORE_BLOCKS, *(f"block {i}" for i in range(1, 5)), "tail", REST]
        listed.sort(key=order.index)
    else:
        listed = [name for name, _ in sums.most_common(LISTED)]
    print(f"| {heading} | count | ms | share |\n| --- | ---: | ---: | ---: |")
    for name in listed:
        print(f"| {name} | {counts[name]} | {sums[name]:.1f} | {sums[name] / total:.0%} |")
    others = [name for name in sums if name not in listed]
    if others:
        count, ms = sum(counts[name] for name in others), sum(sums[name] for name in others)
        print(f"| {len(others)} others | {count} | {ms:.1f} | {ms / total:.0%} |")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--artifact", required=True)
    parser.add_argument("--frames", type=int, nargs="+", default=[2, 25])
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
