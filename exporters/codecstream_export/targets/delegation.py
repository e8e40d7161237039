"""What an accelerator took of a program: nodes, arithmetic, and the products that it left.

An operator that is left runs in the runtime's reference code. That is right but can be a hundred
times slower, and nothing says so by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from executorch.exir.sym_util import eval_upper_bound
from torch.export import ExportedProgram
from torch.fx import Graph, Node

__all__ = ["Delegation", "measure_delegation"]


@dataclass(frozen=True, slots=True)
class Delegation:
    """Counts over all methods of a program.

    Attributes:
        backend: The accelerator's name.
        nodes: Operators that compute.
        delegated_nodes: Those of them that the accelerator took.
        multiply_adds: Of all products and convolutions, at the largest chunk.
        delegated_multiply_adds: Those of them that the accelerator took.
        undelegated_products: One line for each product or convolution that it did not take.
        undelegated_operators: How often each other operator was left.
    """

    backend: str
    nodes: int
    delegated_nodes: int
    multiply_adds: int
    delegated_multiply_adds: int
    undelegated_products: tuple[str, ...]
    undelegated_operators: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        """Return the fields for the manifest."""
        return {
            "backend": self.backend,
            "nodes": self.nodes,
            "node_share": self.delegated_nodes / max(self.nodes, 1),
            "multiply_adds": self.multiply_adds,
            "arithmetic_share": self.delegated_multiply_adds / max(self.multiply_adds, 1),
            "undelegated_products": list(self.undelegated_products),
            "undelegated_operators": dict(self.undelegated_operators),
        }


def measure_delegation(programs: Mapping[str, ExportedProgram], backend: str) -> Delegation:
    """Count what was delegated in lowered edge ``programs``, by method name."""
    total = {True: 0, False: 0}
    arithmetic = {True: 0, False: 0}
    products: list[str] = []
    others: dict[str, int] = {}
    for method, program in programs.items():
        for node, delegated in _operators(program):
            name = node.target._schema.name  # type: ignore[union-attr]
            total[delegated] += 1
            amount = _multiply_adds(node, name)
            arithmetic[delegated] += amount
            if delegated:
                continue
            if amount:
                products.append(f"{method}: {name} {_shapes(node)}, {amount:,} multiply-adds")
            else:
                others[name] = others.get(name, 0) + 1
    return Delegation(
        backend=backend,
        nodes=sum(total.values()),
        delegated_nodes=total[True],
        multiply_adds=sum(arithmetic.values()),
        delegated_multiply_adds=arithmetic[True],
        undelegated_products=tuple(products),
        undelegated_operators=dict(sorted(others.items())),
    )


def _operators(program: ExportedProgram) -> Iterator[tuple[Node, bool]]:
    """Yield the operators of ``program``, each with whether it was delegated."""
    for node in program.graph.nodes:
        if "call_delegate" in str(node.target):
            lowered = getattr(program.graph_module, node.args[0].target)
            yield from ((inner, True) for inner in _calls(lowered.original_module.graph))
    yield from ((node, False) for node in _calls(program.graph))


def _calls(graph: Graph) -> Iterable[Node]:
    """Return the nodes that compute tensors; sizes and tuple items are no work."""
    return (
        node
        for node in graph.nodes
        if node.op == "call_function"
        and hasattr(node.target, "_schema")
        and not node.target._schema.name.startswith(("aten::sym_", "executorch::"))
        and "call_delegate" not in str(node.target)
    )


def _multiply_adds(node: Node, name: str) -> int:
    inner = _INNER_LENGTH.get(name)
    return 0 if inner is None else math.prod(_shape(node)) * inner(node)


def _argument_shape(node: Node, index: int) -> list[int]:
    argument = node.args[index]
    assert isinstance(argument, Node)
    return _shape(argument)


# How many products are added up for one element of the output.
_INNER_LENGTH: dict[str, Callable[[Node], int]] = {
    "aten::convolution": lambda node: math.prod(_argument_shape(node, 1)[1:]),
    "aten::conv1d": lambda node: math.prod(_argument_shape(node, 1)[1:]),
    "aten::conv2d": lambda node: math.prod(_argument_shape(node, 1)[1:]),
    "aten::linear": lambda node: _argument_shape(node, 1)[-1],
    "aten::addmm": lambda node: _argument_shape(node, 1)[-1],
    "aten::mm": lambda node: _argument_shape(node, 0)[-1],
    "aten::bmm": lambda node: _argument_shape(node, 0)[-1],
    "aten::matmul": lambda node: _argument_shape(node, 0)[-1],
}


def _shape(node: Node) -> list[int]:
    """Return a tensor's largest shape."""
    return [int(eval_upper_bound(length)) for length in node.meta["val"].shape]


def _shapes(node: Node) -> str:
    arguments = [a for a in node.args if isinstance(a, Node) and hasattr(a.meta["val"], "shape")]
    return " x ".join(str(_shape(a)) for a in arguments)
