"""What ONNX Runtime needs to fuse the int8 convolutions on x86."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

__all__ = ["use_unsigned_activations"]


def use_unsigned_activations(model: ir.Model) -> int:
    """Move activations from int8 to uint8 (all integers by 128), in place; values stay the same.

    ONNX Runtime does this itself on x86, but not for a tensor that two operators use, and Snake
    uses its input twice. The convolution in front of it would keep an unsigned input and a signed
    output, which no kernel has, and would run in float, slower than without any int8.

    Args:
        model: With the zero points of all activations as constants.

    Returns:
        How many quantise and dequantise operators were changed.
    """
    changed = 0
    unsigned: dict[int, ir.Value] = {}
    for node in list(model.graph):
        source = node.inputs[0].producer() if node.inputs and node.inputs[0] else None
        quantize = node.op_type == "QuantizeLinear"
        dequantize = node.op_type == "DequantizeLinear" and source is not None
        if not (quantize or (dequantize and source and source.op_type == "QuantizeLinear")):
            continue  # a dequantiser of weights
        zero_point = node.inputs[2]
        if zero_point is None or zero_point.const_value is None:
            raise ValueError(f"the zero point of {node.name} is no constant")
        value = int(zero_point.const_value.numpy()) + 128
        if zero_point.const_value.dtype != ir.DataType.INT8:
            continue
        if value not in unsigned:
            constant = ir.tensor(np.array(value, np.uint8), name=f"zero_point_{value}")
            unsigned[value] = ir.Value(
                name=constant.name,
                const_value=constant,
                type=ir.TensorType(ir.DataType.UINT8),
                shape=ir.Shape([]),
            )
            model.graph.register_initializer(unsigned[value])
        node.replace_input_with(2, unsigned[value])
        if quantize:
            node.outputs[0].type = ir.TensorType(ir.DataType.UINT8)
        changed += 1
    return changed
