"""Convolutions over time as two-dimensional ones, which ONNX Runtime computes in blocks."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

__all__ = ["use_conv2d"]

_WIDENING = ("Cast", "Mul")  # of weights stored in 16 bits


def use_conv2d(model: ir.Model) -> int:
    """Give the convolutions with several taps a height of 1, in place; values stay the same.

    ONNX Runtime has blocked kernels for four-dimensional convolutions only. For others it first
    unfolds the input to seven times its size for seven taps: 10 % of a chunk's time, by
    benchmarks/runtimes.py. Int8 convolutions stay as they are.

    Returns:
        How many convolutions were changed.
    """
    height = ir.Value(
        name="height_axis",
        const_value=ir.tensor(np.array([2], np.int64), name="height_axis"),
        type=ir.TensorType(ir.DataType.INT64),
        shape=ir.Shape([1]),
    )
    changed = 0
    for node in list(model.graph):
        if node.op_type != "Conv" or not _is_wide(node):
            continue
        if not changed:
            model.graph.register_initializer(height)
        _raise_weight(model.graph, node, height)
        before = ir.Node("", "Unsqueeze", [node.inputs[0], height])
        model.graph.insert_before(node, before)
        node.replace_input_with(0, before.outputs[0])
        for name, added in (("kernel_shape", 1), ("dilations", 1), ("strides", 1)):
            if name in node.attributes:
                values = node.attributes[name].as_ints()
                node.attributes[name] = ir.AttrInt64s(name, [added, *values])
        node.attributes["pads"] = ir.AttrInt64s("pads", [0, 0, 0, 0])
        output = node.outputs[0]
        users = list(output.uses())
        after = ir.Node("", "Squeeze", [output, height])
        model.graph.insert_after(node, after)
        for user, index in users:
            user.replace_input_with(index, after.outputs[0])
        output.shape = None
        changed += 1
    return changed


def _raise_weight(graph: ir.Graph, node: ir.Node, height: ir.Value) -> None:
    """Give the weight of ``node`` its height, beforehand where it is a constant."""
    weight = node.inputs[1]
    assert weight is not None
    if weight.const_value is None:  # widened from 16 bits; the runtime folds it at load
        raised = ir.Node("", "Unsqueeze", [weight, height])
        graph.insert_before(node, raised)
        node.replace_input_with(1, raised.outputs[0])
        return
    data = weight.const_value.numpy()[:, :, None, :]
    name = f"{weight.name}.2d"
    constant = graph.initializers.get(name)  # there already where several tiles share a weight
    if constant is None:
        constant = ir.Value(
            name=name,
            const_value=ir.tensor(data, name=name),
            type=weight.type,
            shape=ir.Shape(data.shape),
        )
        graph.register_initializer(constant)
    node.replace_input_with(1, constant)
    if not list(weight.uses()):
        assert weight.name is not None
        graph.initializers.pop(weight.name)


def _is_wide(node: ir.Node) -> bool:
    weight = node.inputs[1]
    if weight is None or weight.shape is None or len(weight.shape) != 3:
        return False
    producer = weight.producer()
    if weight.const_value is None and (producer is None or producer.op_type not in _WIDENING):
        return False
    group = node.attributes["group"].as_int() if "group" in node.attributes else 1
    pads = node.attributes["pads"].as_ints() if "pads" in node.attributes else ()
    taps = weight.shape[2]
    return isinstance(taps, int) and taps > 1 and group == 1 and not any(pads)
