"""The body of an ``ExpertBlock``'s node in standard ONNX operators: a loop over the experts
that any token of the step chose, each of which computes the tokens that chose it.

Each turn copies one expert's weights, as a Gather does; reading those of the others is
what it saves. Every expert for every token and ONNX Runtime's own operator are measured
beside it (docs/models.md): ``python -m benchmarks.experts``.

Sizes: T packed tokens, C experts that a token passes, R tokens of one expert, D hidden
size, I columns of an expert, E experts.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import torch
from onnx import FunctionProto, GraphProto, NodeProto, TensorProto, helper, numpy_helper
from torch import Tensor, nn

from kvlathe.export.model.blocks import experts_op
from kvlathe.export.onnx.body import FLOAT, Body
from kvlathe.layers.experts import PARTS, ExpertWeights, run_expert
from kvlathe.layers.routing import Routing

DOMAIN = "kvlathe"
Names = tuple[str, ...]
ZERO = numpy_helper.from_array(np.zeros(1, np.float32))
INNER, FORMULA = "expert.", "expert.formula."
"""The beginnings of names inside of the loop, and of those of an expert's formula."""
LARGE, SMALL = 6, 4
"""Any D and I: the formula has no sizes."""
SIZES = {
    "up": (LARGE, SMALL),
    "down": (SMALL, LARGE),
    "gate": (LARGE, SMALL),
    "up_bias": (1, SMALL),
    "down_bias": (LARGE,),
    "gate_bias": (1, SMALL),
}
"""The shape of each part of one expert."""


class Expert(nn.Module):
    """One expert as a graph: [R, D] and its weights -> [R, D]."""

    def __init__(self, names: Names, routing: Routing, activation: str) -> None:
        super().__init__()
        self.names, self.routing, self.activation = names, routing, activation

    def forward(self, x: Tensor, *parts: Tensor) -> Tensor:
        weights = ExpertWeights(router=x, **dict(zip(self.names, parts, strict=True)))
        return run_expert(x, weights, self.routing, self.activation)


def part_names(gated: bool, biased: bool) -> Names:
    """The parts of experts with gates and with biases, or without.

    >>> part_names(gated=True, biased=False)
    ('up', 'down', 'gate')
    """
    kept = (x for x in PARTS if gated or not x.startswith("gate"))
    return tuple(x for x in kept if biased or not x.endswith("bias"))


def experts_function(
    names: Names, routing: Routing, activation: str, opset: int
) -> FunctionProto:
    """x [T, D], weights [T, C] float32 and experts [T, C] int64 of a step, and the parts
    ``names`` of all experts -> y [T, D] float32."""
    body = Body()
    numbers = body.op("Unique", body.reshape("experts", -1))
    many = body.op("Squeeze", body.op("Shape", numbers))
    start = body.op("ConstantOfShape", body.op("Shape", "x"), value=ZERO)
    formula = _formula(names, routing, activation, opset)
    each = _each(numbers, names, formula, routing.before)
    body.output("y", body.op("Loop", many, "", start, body=each))
    return helper.make_function(
        DOMAIN,
        experts_op(routing),
        ["x", "weights", "experts", *names],
        ["y"],
        body.nodes,
        [helper.make_opsetid("", opset)],
    )


def _each(numbers: str, names: Names, formula: GraphProto, before: bool) -> GraphProto:
    """One turn of the loop: what one of the experts ``numbers`` adds to the sum. Weights
    multiply what it reads (``before``), or what it gives."""
    body = Body()
    expert = body.op("Gather", numbers, "turn", axis=0)
    counts = body.op("Cast", body.op("Equal", "experts", expert), to=FLOAT)  # [T, C]
    last = body.const([-1])
    shares = body.op("ReduceSum", body.op("Mul", counts, "weights"), last, keepdims=0)
    passes = body.op("ReduceMax", counts, last, keepdims=0)  # [T]
    rows = body.op("Squeeze", body.op("NonZero", passes), body.const([0]))  # [R]
    parts = [body.op("Gather", name, expert, axis=0) for name in names]
    share = body.unsqueeze(body.op("Gather", shares, rows, axis=0), -1)  # [R, 1]
    own = body.op("Gather", "x", rows, axis=0)
    if before:
        own = body.op("Mul", own, share)
    ends = [value.name for value in formula.input]
    body.nodes += _renamed(formula, dict(zip(ends, [own, *parts], strict=True)))
    out = f"{FORMULA}{formula.output[0].name}"
    if not before:
        out = body.op("Mul", out, share)
    body.op("ScatterND", "sum", body.unsqueeze(rows, -1), out, reduction="add")
    body.output("next_sum", body.nodes[-1].output[0])
    body.output("go_on", body.op("Identity", "condition"))
    return _graph(body.nodes, outside={numbers, "x", "weights", "experts", *names})


def _graph(nodes: list[NodeProto], outside: set[str]) -> GraphProto:
    """The loop's graph, its names apart from all that are ``outside``."""
    for node in nodes:
        node.name = f"{INNER}{node.name}"
        for names in (node.input, node.output):
            names[:] = [x if x in outside else _inner(x) for x in names]
    value = helper.make_tensor_value_info
    rows = ["T", "D"]
    inputs = [
        value(_inner("turn"), TensorProto.INT64, []),
        value(_inner("condition"), TensorProto.BOOL, []),
        value(_inner("sum"), FLOAT, rows),
    ]
    return helper.make_graph(
        nodes,
        "expert",
        inputs,
        [
            value(_inner("go_on"), TensorProto.BOOL, []),
            value(_inner("next_sum"), FLOAT, rows),
        ],
    )


def _inner(name: str) -> str:
    return f"{INNER}{name}" if name and not name.startswith(INNER) else name


def _renamed(formula: GraphProto, known: dict[str, str]) -> list[NodeProto]:
    """The nodes of one expert's formula, and its constants, in the loop's names."""
    nodes = [
        helper.make_node("Constant", [], [f"{FORMULA}{one.name}"], one.name, value=one)
        for one in formula.initializer
    ]
    for node in formula.node:
        copy = NodeProto()
        copy.CopyFrom(node)
        copy.input[:] = [known.get(x, f"{FORMULA}{x}") if x else x for x in node.input]
        copy.output[:] = [f"{FORMULA}{x}" for x in node.output]
        nodes.append(copy)
    return nodes


def _formula(names: Names, routing: Routing, activation: str, opset: int) -> GraphProto:
    """One expert, traced from what the layer itself computes."""
    parts = tuple(torch.zeros(SIZES[name]) for name in names)
    free = ({0: torch.export.Dim("R")}, tuple(None for _ in parts))
    expert = Expert(names, routing, activation)
    program = torch.export.export(
        expert,
        (torch.zeros(5, LARGE), *parts),
        dynamic_shapes=free,
    )
    found = torch.onnx.export(
        program, dynamo=True, optimize=True, opset_version=opset, verbose=False
    )
    assert found is not None
    return ir.to_proto(found.model).graph
