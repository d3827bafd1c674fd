"""Functions of the operators DeltaRule and StateSpace (export/model/recurrence.py), in
standard ONNX: one token of all sequences after the other."""

from __future__ import annotations

import onnx
from onnx import FunctionProto, GraphProto, helper

from kvlathe.export.model.recurrence import NODES
from kvlathe.export.onnx.attend import DOMAIN
from kvlathe.export.onnx.body import FLOAT, Body

TOKENS = 1
"""The axis of the tokens."""


def recurrence_functions(opset: int) -> list[FunctionProto]:
    return [
        _function(name, with_strengths, opset) for with_strengths, name in NODES.items()
    ]


def _function(name: str, with_strengths: bool, opset: int) -> FunctionProto:
    rows = ["q", "k", "v", "decays", *(["strengths"] if with_strengths else [])]
    scan = helper.make_node(
        "Scan",
        ["states", *rows],
        ["after", "y"],
        body=_token(rows),
        num_scan_inputs=len(rows),
        scan_input_axes=[TOKENS] * len(rows),
        scan_output_axes=[TOKENS],
    )
    return helper.make_function(
        DOMAIN,
        name,
        [*rows, "states"],
        ["y", "after"],
        [scan],
        [helper.make_opsetid("", opset)],
    )


def _token(rows: list[str]) -> GraphProto:
    """One token of each sequence: states [B, H, dk, dv], rows [B, H, ...]."""
    b = Body()
    decay = b.unsqueeze(b.op("Exp", "decays_now"), 2, 3)
    states = b.op("Mul", "states_before", decay)
    added = b.unsqueeze("v_now", 2)  # [B, H, 1, dv]
    if "strengths" in rows:
        held = b.op("MatMul", b.unsqueeze("k_now", 2), states)
        strength = b.unsqueeze("strengths_now", 2, 3)
        added = b.op("Mul", b.op("Sub", added, held), strength)
    states = b.op("Add", states, b.op("Mul", b.unsqueeze("k_now", 3), added))
    b.nodes.append(helper.make_node("Identity", [states], ["states_after"]))
    y = b.op("MatMul", b.unsqueeze("q_now", 2), states)
    b.nodes.append(helper.make_node("Squeeze", [y, b.const([2])], ["y_now"]))
    order = sorted(b.nodes, key=lambda node: node.op_type != "Constant")
    sizes = {"decays": 2, "strengths": 2}
    inputs = [_value("states_before", 4)]
    inputs += [_value(f"{row}_now", sizes.get(row, 3)) for row in rows]
    outputs = [_value("states_after", 4), _value("y_now", 3)]
    return helper.make_graph(order, "token", inputs, outputs)


def _value(name: str, axes: int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, FLOAT, [None] * axes)
