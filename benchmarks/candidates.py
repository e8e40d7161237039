"""Ways to compute one layer in ONNX Runtime, timed against each other: what benchmarks/log.md says.

    python benchmarks/candidates.py snake          # SnakeBeta, element by element
    python benchmarks/candidates.py convolution    # a residual unit's seven-tap convolution
    python benchmarks/candidates.py upsampling     # a transposed convolution as a plain one
    python benchmarks/candidates.py tail           # the last convolution, to one channel
    python benchmarks/candidates.py projections    # the transformer's products, side by side
    python benchmarks/candidates.py session ARTIFACT    # a whole program under other options

Variants take turns; a figure is the median of the rounds, and its ratio to the first variant the
median of the ratios within rounds. Each variant's values are compared with the first one's.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from codecstream_parity import snr_db

Array = NDArray[np.float32]
THREADS, ROUNDS = 2, 15
FRAMES = (2, 25)
BLOCKS = ((768, 32), (384, 160), (192, 640), (96, 1920))  # channels, columns per frame
SAMPLES = np.random.default_rng(0)


class Graph:
    """A small ONNX graph of one input ``x`` under construction."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: dict[str, NDArray[Any]] = {}

    def constant(self, value: Any, dtype: Any = np.float32) -> str:
        name = f"constant{len(self.constants)}"
        self.constants[name] = np.asarray(value, dtype)
        return name

    def add(self, kind: str, *inputs: str, **attributes: Any) -> str:
        name = f"value{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def scaled(self, x: str, factor: float) -> str:
        return x if factor == 1 else self.add("Mul", x, self.constant(factor))

    def columns(self, x: str, start: int, stop: int) -> str:
        """``x[:, :, start:stop]``; a stop of 0 or less counts from the end."""
        end = stop if stop > 0 else (np.iinfo(np.int64).max if stop == 0 else stop)
        bounds = [self.constant([value], np.int64) for value in (start, end, 2)]
        return self.add("Slice", x, *bounds)

    def build(self, *outputs: str) -> Callable[[dict[str, Array]], list[Array]]:
        inputs = sorted({n for node in self.nodes for n in node.input if n.startswith("x")})
        graph = helper.make_graph(
            self.nodes,
            "candidate",
            [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, None, None]) for n in inputs],
            [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in outputs],
            [numpy_helper.from_array(value, name) for name, value in self.constants.items()],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
        options = ort.SessionOptions()
        options.intra_op_num_threads = THREADS
        options.enable_mem_pattern = False
        options.add_session_config_entry("session.force_spinning_stop", "1")
        options.log_severity_level = 4
        session = ort.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )

        def run(values: dict[str, Array]) -> list[Array]:
            feeds = {n: ort.OrtValue.ortvalue_from_numpy(values[n]) for n in inputs}
            return [v.numpy() for v in session.run_with_ort_values(list(outputs), feeds)]

        return run


def snake(channels: int, columns: int) -> None:
    """x + gain * sin(frequency * x)**2 in five ways."""
    frequency = SAMPLES.uniform(0.5, 1.5, (1, channels, 1)).astype(np.float32)
    gain = SAMPLES.uniform(0, 1, (1, channels, 1)).astype(np.float32)
    x = 2 * SAMPLES.standard_normal((1, channels, columns)).astype(np.float32)

    plain = Graph()
    s = plain.add("Sin", plain.add("Mul", "x", plain.constant(frequency)))
    squared = plain.add("Mul", plain.add("Mul", s, s), plain.constant(gain))
    runs = {"Sin, 5 passes": plain.build(plain.add("Add", "x", squared))}

    cosine = Graph()
    c = cosine.add("Cos", cosine.add("Mul", "x", cosine.constant(2 * frequency)))
    swing = cosine.add("Mul", c, cosine.constant(-gain / 2))
    constant = cosine.add("Add", "x", cosine.constant(gain / 2))  # goes into a bias in the decoder
    runs["Cos, 4 passes and a constant"] = cosine.build(cosine.add("Add", constant, swing))

    folded = Graph()  # factors folded into the neighbours: another function of x, the same work
    swing = folded.add("Mul", folded.add("Cos", "x"), folded.constant(gain))
    runs["Cos, 3 passes (folded)"] = folded.build(folded.add("Sub", "x", swing))

    polynomial = Graph()
    turns = polynomial.add("Mul", "x", polynomial.constant(frequency / math.pi))
    swing = _sine_squared(polynomial, turns, gain)
    runs["polynomial, 14 passes"] = polynomial.build(polynomial.add("Add", "x", swing))

    folded = Graph()
    swing = _sine_squared(folded, "x", gain)
    runs["polynomial, 13 passes (folded)"] = folded.build(folded.add("Add", "x", swing))
    race(f"{channels} x {columns}", runs, {"x": x})


def _sine_squared(graph: Graph, turns: str, gain: Array) -> str:
    """``gain * sin(pi * turns)**2``: one period, then the sine's polynomial, to 5.9e-7.

    Adding and taking away 1.5 * 2**23 rounds. The leading coefficient goes into the gain.
    """
    *lower, leading = 3.14158202, -5.16714280, 2.54189903, -0.55463620
    add = graph.add
    magic = graph.constant(1.5 * 2**23)
    r = add("Sub", turns, add("Sub", add("Add", turns, magic), magic))
    p = q = add("Mul", r, r)
    for power, coefficient in reversed(list(enumerate(lower))):
        p = add("Add", p, graph.constant(coefficient / leading))
        p = add("Mul", p, q if power else r)
    return add("Mul", add("Mul", p, p), graph.constant(gain * leading**2))


def convolution(channels: int, columns: int) -> None:
    """A seven-tap convolution: 1-D, 2-D, and with fewer products over even and odd columns."""
    weight = (SAMPLES.standard_normal((channels, channels, 7)) / channels).astype(np.float32)
    x = SAMPLES.standard_normal((1, channels, columns + 6)).astype(np.float32)
    # The other forms keep even and odd columns apart throughout a block, so they begin with them.
    halves = {"xe": np.ascontiguousarray(x[:, :, 0::2]), "xo": np.ascontiguousarray(x[:, :, 1::2])}

    flat = Graph()
    runs = {"1-D": flat.build(flat.add("Conv", "x", flat.constant(weight)))}
    blocked = Graph()
    height = blocked.constant([2], np.int64)
    y = blocked.add("Conv", blocked.add("Unsqueeze", "x", height), _high(blocked, weight))
    runs["2-D"] = blocked.build(blocked.add("Squeeze", y, height))
    runs["2-D, fast FIR by 2"] = _fast_fir(weight, columns)
    runs["Cook-Toom F(2, 7), products"] = _cook_toom(weight, columns)
    race(f"{channels} x {columns}", runs, {"x": x, **halves})


def upsampling(stride: int, channels: int, columns: int) -> None:
    """Two taps to ``stride * channels`` rows, and three ways to put those in the order of time."""
    inputs = 2 * channels
    rows = SAMPLES.standard_normal((channels, stride, inputs, 2)).astype(np.float32) / inputs

    def convolved(weight: Array) -> tuple[Graph, str]:
        graph = Graph()
        height = graph.constant([2], np.int64)
        taps = weight.reshape(-1, inputs, 2)
        y = graph.add("Conv", graph.add("Unsqueeze", "x", height), _high(graph, taps))
        return graph, y

    def flat(graph: Graph, y: str, *shape: int) -> str:
        return graph.add("Reshape", y, graph.constant(shape, np.int64))

    graph, y = convolved(rows)
    y = graph.add("Transpose", flat(graph, y, 1, channels, stride, -1), perm=[0, 1, 3, 2])
    runs = {"inner axes swapped": graph.build(flat(graph, y, 1, channels, -1))}
    by_step = np.ascontiguousarray(rows.transpose(1, 0, 2, 3))
    graph, y = convolved(by_step)
    y = graph.add("Transpose", flat(graph, y, 1, channels * stride, -1), perm=[0, 2, 1])
    y = graph.add("Transpose", flat(graph, y, 1, -1, channels), perm=[0, 2, 1])
    runs["two plain transposes"] = graph.build(y)
    graph, y = convolved(by_step)  # the runtime lets its blocked kernels give this order
    y = flat(graph, graph.add("Transpose", y, perm=[0, 2, 3, 1]), 1, -1, channels)
    runs["channels last, one transpose"] = graph.build(graph.add("Transpose", y, perm=[0, 2, 1]))
    x = SAMPLES.standard_normal((1, inputs, columns + 1)).astype(np.float32)
    race(f"{inputs} to {stride} x {channels}, {columns}", runs, {"x": x})


def tail(channels: int, columns: int) -> None:
    """Seven taps to one channel, with six columns of history."""
    weight = (SAMPLES.standard_normal((1, channels, 7)) / channels).astype(np.float32)
    history = SAMPLES.standard_normal((1, channels, 6)).astype(np.float32)

    def joined() -> tuple[Graph, str]:
        graph = Graph()
        return graph, graph.add("Concat", graph.constant(history), "x", axis=2)

    graph, x = joined()
    height = graph.constant([2], np.int64)
    y = graph.add("Conv", graph.add("Unsqueeze", x, height), _high(graph, weight))
    runs = {"2-D": graph.build(graph.add("Squeeze", y, height))}
    graph, x = joined()
    runs["1-D"] = graph.build(graph.add("Conv", x, graph.constant(weight)))
    graph = Graph()
    taps = np.ascontiguousarray(weight.transpose(2, 1, 0))
    products = graph.add("Conv", "x", graph.constant(taps))
    products = graph.add("Concat", graph.constant(taps[:, :, 0] @ history), products, axis=2)
    total = ""
    for tap in range(7):
        ends = [tap + 1, tap - 6 if tap < 6 else np.iinfo(np.int64).max]
        bounds = [graph.constant(v, np.int64) for v in ([tap, tap], ends, [1, 2])]
        row = graph.add("Slice", products, *bounds)
        total = graph.add("Add", total, row) if total else row
    runs["products and a sum"] = graph.build(total)
    x = SAMPLES.standard_normal((1, channels, columns)).astype(np.float32)
    race(f"{channels} x {columns}", runs, {"x": x})


def projections(rows: int) -> None:
    """A layer's products with one input, 24 layers' worth, so that no cache keeps the weights."""
    width, parts = 512, 5
    layers = [
        SAMPLES.standard_normal((width, parts * 1024)).astype(np.float32) / width for _ in range(24)
    ]
    runs = {}
    for name, count in (("five products", parts), ("one product", 1)):
        graph = Graph()
        outputs = [
            graph.add("MatMul", "x", graph.constant(np.ascontiguousarray(part)))
            for layer in layers
            for part in np.split(layer, count, axis=1)
        ]
        runs[name] = graph.build(graph.add("Concat", *outputs, axis=2))
    race(f"{rows} rows", runs, {"x": SAMPLES.standard_normal((1, rows, width)).astype(np.float32)})


def _high(graph: Graph, weight: Array) -> str:
    return graph.constant(weight[:, :, None, :])


def _fast_fir(weight: Array, columns: int) -> Callable[[dict[str, Array]], list[Array]]:
    """Three filters of 4, 3 and 4 taps at half the rate instead of two of 7: 11 products for 14."""
    graph = Graph()
    height = graph.constant([2], np.int64)

    def filtered(x: str, taps: Array) -> str:
        y = graph.add("Conv", graph.add("Unsqueeze", x, height), _high(graph, taps))
        return graph.add("Squeeze", y, height)

    half = columns // 2
    even_taps, odd_taps = weight[:, :, 0::2], weight[:, :, 1::2]
    both_taps = even_taps.copy()
    both_taps[:, :, :3] += odd_taps
    zero = graph.constant(np.zeros((1, len(weight), 1)))
    xe = graph.add("Concat", "xe", zero, axis=2)
    of_even = filtered(xe, even_taps)  # [half + 1]
    of_odd = filtered("xo", odd_taps)  # [half + 1]
    mixed = filtered(graph.add("Add", graph.columns(xe, 1, 0), "xo"), both_taps)  # [half]
    even = graph.add("Add", graph.columns(of_even, 0, half), graph.columns(of_odd, 0, half))
    taken = graph.add("Sub", mixed, graph.columns(of_even, 1, 0))
    odd = graph.add("Sub", taken, graph.columns(of_odd, 0, half))
    return _interleaved(graph.build(even, odd))


def _cook_toom(weight: Array, columns: int) -> Callable[[dict[str, Array]], list[Array]]:
    """Eight products for two outputs instead of 14, at the points 0, +-1, +-2, +-1/2, infinity."""
    graph = Graph()
    half = columns // 2
    d = [graph.columns("xe" if i % 2 == 0 else "xo", i // 2, i // 2 + half) for i in range(8)]

    def total(*terms: tuple[float, str]) -> str:
        result = graph.scaled(terms[0][1], terms[0][0])
        for factor, value in terms[1:]:
            result = graph.add("Add", result, graph.scaled(value, factor))
        return result

    def product(x: str, point: float | None) -> str:
        powers = np.zeros(7) if point is None else np.array([point**k for k in range(7)])
        others = [b for b in (0, 1, -1, 2, -2, 0.5, -0.5) if b != point]
        if point is None:
            powers[6] = 1
        else:
            powers /= np.prod([point - b for b in others])
        matrix = (weight.astype(np.float64) @ powers).astype(np.float32)
        return graph.add("MatMul", graph.constant(matrix), x)

    even, odd = [], []
    for a in (1.0, 2.0, 0.5):
        squares = [b * b for b in (1.0, 2.0, 0.5) if b != a]
        p, q = -sum(squares), math.prod(squares)
        e = total((1, d[6]), (p, d[4]), (q, d[2]))
        o = graph.scaled(total((1, d[5]), (p, d[3]), (q, d[1])), a)
        plus = product(graph.add("Add", e, o), a)
        minus = product(graph.add("Sub", e, o), -a)
        even.append(graph.add("Add", plus, minus))
        odd.append(graph.scaled(graph.add("Sub", plus, minus), a))
    p, q, r = -5.25, 5.25, -1.0  # of (x**2 - 1)(x**2 - 4)(x**2 - 1/4)
    even.append(product(total((1, d[6]), (p, d[4]), (q, d[2]), (r, d[0])), 0.0))
    odd.append(product(total((1, d[7]), (p, d[5]), (q, d[3]), (r, d[1])), None))
    return _interleaved(graph.build(total(*((1, v) for v in even)), total(*((1, v) for v in odd))))


def _interleaved(
    run: Callable[[dict[str, Array]], list[Array]],
) -> Callable[[dict[str, Array]], list[Array]]:
    def both(values: dict[str, Array]) -> list[Array]:
        return [np.stack(run(values), -1).reshape(1, values["x"].shape[1], -1)]

    both.timed = run  # type: ignore[attr-defined]
    return both


def race(title: str, runs: dict[str, Any], values: dict[str, Array]) -> None:
    """Time variants in turns, and print a line of the table for each."""
    expected = next(iter(runs.values()))(values)[0]
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(ROUNDS + 2):
        for name, run in runs.items():
            timed = getattr(run, "timed", run)  # without what puts even and odd together
            began = time.perf_counter()
            timed(values)
            if turn > 1:
                times[name].append(1000 * (time.perf_counter() - began))
    first = next(iter(times.values()))
    for name, each in times.items():
        ratio = statistics.median(a / b for a, b in zip(each, first, strict=True))
        snr = snr_db(expected.ravel(), runs[name](values)[0].ravel())
        noise = "another function" if snr < 20 else f"{snr:.0f} dB"
        print(f"| {title} | {name} | {statistics.median(each):.2f} | {ratio:.2f} | {noise} |")


def session(path: str) -> None:
    """A whole program under other options of its session, and of each run."""
    from codecstream.artifact import open_artifact
    from codecstream.runtimes import onnx as runtime

    artifact = open_artifact(path)

    def step(
        shrink: bool = False, change: Callable[[Any], object] = lambda options: None
    ) -> Callable[[int], float]:
        options = runtime._options(ort, THREADS)
        change(options)
        opened = ort.InferenceSession(
            str(artifact.program_path), options, providers=["CPUExecutionProvider"]
        )
        state = {
            item.name: ort.OrtValue.ortvalue_from_numpy(np.zeros(item.shape, np.float32))
            for item in opened.get_inputs()[1:]
        }
        names = [item.name for item in opened.get_outputs()]
        run_options = runtime._shrinking(ort) if shrink else None

        def timed(frames: int) -> float:
            codes = SAMPLES.integers(0, 2048, (1, 16, frames))
            began = time.perf_counter()
            feeds = {"codes": ort.OrtValue.ortvalue_from_numpy(codes), **state}
            opened.run_with_ort_values(names, feeds, run_options)
            return 1000 * (time.perf_counter() - began)

        return timed

    def setting(name: str, value: Any) -> Callable[[Any], object]:
        return lambda options: setattr(options, name, value)

    def entry(key: str, value: str) -> Callable[[Any], object]:
        return lambda options: options.add_session_config_entry(key, value)

    def at_once(inner: int, nodes: int) -> Callable[[Any], object]:
        def change(options: Any) -> None:
            options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
            options.intra_op_num_threads, options.inter_op_num_threads = inner, nodes
            options.add_session_config_entry("session.inter_op.allow_spinning", "0")

        return change

    variants = {
        "as the client runs it": step(),
        "arena given back after each chunk": step(shrink=True),
        "memory pattern": step(change=setting("enable_mem_pattern", True)),
        "no arena": step(change=setting("enable_cpu_mem_arena", False)),
        "threads spin between chunks": step(change=entry("session.force_spinning_stop", "0")),
        "denormals are zero": step(change=entry("session.set_denormal_as_zero", "1")),
        "nodes in parallel, 2 x 2 threads": step(change=at_once(2, 2)),
        "nodes in parallel, 1 x 3 threads": step(change=at_once(1, 3)),
    }
    for frames in FRAMES:
        times: dict[str, list[float]] = {name: [] for name in variants}
        for turn in range(ROUNDS + 2):
            for name, timed in variants.items():
                ms = timed(frames)
                if turn > 1:  # the first two warm up
                    times[name].append(ms)
        first = next(iter(times.values()))
        for name, each in times.items():
            ratio = statistics.median(a / b for a, b in zip(each, first, strict=True))
            print(f"| {frames} frames | {name} | {statistics.median(each):.0f} | {ratio:.2f} | |")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=(*LAYERS, "session"))
    parser.add_argument("artifact", type=Path, nargs="?")
    options = parser.parse_args(arguments)
    print(
        "| size | variant | ms | x first | against the first |\n| --- | --- | ---: | ---: | ---: |"
    )
    if options.what == "session":
        if options.artifact is None:
            parser.error("session needs an artifact")
        session(str(options.artifact))
        return
    layer, sizes = LAYERS[options.what]
    for *shape, columns in sizes:
        for frames in FRAMES:
            layer(*shape, columns * frames)


LAYERS: dict[str, tuple[Callable[..., None], Sequence[tuple[int, ...]]]] = {
    "snake": (snake, BLOCKS),
    "convolution": (convolution, BLOCKS),
    "upsampling": (upsampling, ((8, 768, 4), (5, 384, 32), (4, 192, 160), (3, 96, 640))),
    "tail": (tail, (BLOCKS[-1],)),
    "projections": (projections, ((1,),)),
}


if __name__ == "__main__":
    main()
