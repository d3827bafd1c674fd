"""Functions of the operators DeltaRule and StateSpace (export/model/recurrence.py), in
standard ONNX: few tokens one after the other, many by products of CHUNK.

A delta rule's chunk solves (I + A) u = w, with A below the diagonal. The inverse of a
matrix of blocks follows from those of the blocks on its diagonal, [[P, 0], [A, R]] ^ -1 =
[[P^-1, 0], [-R^-1 A P^-1, R^-1]], so from single numbers on blocks double.

Sizes: B sequences, Q tokens of each, H heads, dk and dv dims of a key and of a value, C
tokens of a chunk, N chunks.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import FunctionProto, GraphProto, helper

from kvlathe.export.model.recurrence import NODES
from kvlathe.export.onnx.attend import DOMAIN
from kvlathe.export.onnx.body import FLOAT, Body
from kvlathe.layers.recurrence import CHUNK

FEW = 16
"""Fewer tokens of a sequence are computed one by one. A power of two: which way a
sequence goes then never depends on those beside it (runtime/sessions/host/ragged.py)."""
AXES = {"decays": 2, "strengths": 2}
"""Axes of a row that has no dims; others have one more."""


def recurrence_functions(opset: int) -> list[FunctionProto]:
    return [_function(*node, opset) for node in NODES.items()]


def _function(with_strengths: bool, name: str, opset: int) -> FunctionProto:
    rows = ["q", "k", "v", "decays", *(["strengths"] if with_strengths else [])]
    b = Body()
    tokens = b.op("Shape", "q", start=1, end=2)
    is_few = b.op("Less", tokens, b.const([FEW]))
    choice = helper.make_node(
        "If",
        [is_few],
        ["y", "after"],
        then_branch=_one_by_one(rows),
        else_branch=_in_chunks(rows),
    )
    inputs, outputs = [*rows, "states"], ["y", "after"]
    opsets = [helper.make_opsetid("", opset)]
    nodes = [*_ordered(b), choice]
    return helper.make_function(DOMAIN, name, inputs, outputs, nodes, opsets)


def _ordered(b: Body) -> list[onnx.NodeProto]:
    """Constants first."""
    return sorted(b.nodes, key=lambda node: node.op_type != "Constant")


def _graph(
    b: Body, name: str, inputs: dict[str, int], outputs: dict[str, int]
) -> GraphProto:
    """``inputs`` and ``outputs``: names, and how many axes they have. Other names begin
    with the graph's: those of graphs within one another differ."""

    def values(of: dict[str, int]) -> list[onnx.ValueInfoProto]:
        return [
            helper.make_tensor_value_info(x, FLOAT, [None] * n) for x, n in of.items()
        ]

    made = {x for node in b.nodes for x in node.output} - outputs.keys()
    for node in b.nodes:
        node.name = f"{name}/{node.name}"
        for names in (node.input, node.output):
            names[:] = [f"{name}_{x}" if x in made else x for x in names]
    return helper.make_graph(_ordered(b), name, values(inputs), values(outputs))


def _named(b: Body, name: str, x: str) -> None:
    b.nodes.append(helper.make_node("Identity", [x], [name], name=name))


# -- few tokens ------------------------------------------------------------------------
def _one_by_one(rows: list[str]) -> GraphProto:
    b, scans = Body(), len(rows)
    b.nodes.append(
        helper.make_node(
            "Scan",
            ["states", *rows],
            ["after_few", "y_few"],
            body=_token(rows),
            num_scan_inputs=scans,
            scan_input_axes=[1] * scans,
            scan_output_axes=[1],
        )
    )
    return _graph(b, "few", {}, {"y_few": 4, "after_few": 4})


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
    y = b.op("MatMul", b.unsqueeze("q_now", 2), states)
    _named(b, "states_after", states)
    _named(b, "y_now", b.op("Squeeze", y, b.const([2])))
    inputs = {"states_before": 4} | {f"{row}_now": AXES.get(row, 3) for row in rows}
    return _graph(b, "token", inputs, {"states_after": 4, "y_now": 3})


# -- many tokens -----------------------------------------------------------------------
def _in_chunks(rows: list[str]) -> GraphProto:
    b = Body()
    tokens = b.op("Shape", "q", start=1, end=2)
    missing = b.op("Mod", b.op("Neg", tokens), b.const([CHUNK]))
    chunks = [_cut(b, row, missing, AXES.get(row, 3) + 1) for row in rows]
    after, y = b.ops(
        "Scan", 2, "states", *chunks, body=_chunk(rows), num_scan_inputs=len(rows)
    )
    y = b.transpose(y, 1, 0, 3, 2, 4)  # [B, N, C, H, dv]
    parts = b.op("Shape", "v", start=0, end=1), b.const([-1])
    y = b.op("Reshape", y, b.op("Concat", *parts, b.op("Shape", "v", start=2), axis=0))
    _named(b, "y_many", b.op("Slice", y, b.const([0]), tokens, b.const([1])))
    _named(b, "after_many", after)
    return _graph(b, "many", {}, {"y_many": 4, "after_many": 4})


def _cut(b: Body, row: str, missing: str, axes: int) -> str:
    """[B, Q, H, ...] -> [N, B, H, C, ...], filled up with zeros."""
    before, behind = b.const([0] * (axes + 1)), b.const([0] * (axes - 2))
    filled = b.op("Pad", row, b.op("Concat", before, missing, behind, axis=0))
    ends = b.op("Shape", row, start=0, end=1), b.op("Shape", row, start=2)
    sizes = b.op("Concat", ends[0], b.const([-1, CHUNK]), ends[1], axis=0)
    cut = b.op("Reshape", filled, sizes)  # [B, N, C, H, ...]
    return b.transpose(cut, *([1, 0, 3, 2, 4][: axes + 1]))


def _chunk(rows: list[str]) -> GraphProto:
    """One chunk of each sequence: states [B, H, dk, dv], rows [B, H, C, ...]."""
    b = Body()
    lower = np.tril(np.ones((CHUNK, CHUNK), np.bool_))
    total = b.op("CumSum", "decays_now", b.const(2))  # log of what is left, [B, H, C]
    between = b.op("Sub", b.unsqueeze(total, 3), b.unsqueeze(total, 2))
    never = b.const(-np.inf, np.float32)
    left = b.op("Exp", b.op("Where", b.const(lower, np.bool_), between, never))
    before = b.unsqueeze(b.op("Exp", total), 3)
    keys = b.transpose("k_now", 0, 1, 3, 2)
    values = "v_now"
    if "strengths" in rows:
        values = _replaced(b, keys, left, before)
    own = b.op("Mul", b.op("MatMul", "q_now", keys), left)
    earlier = b.op("MatMul", b.op("Mul", "q_now", before), "states_before")
    _named(b, "y_now", b.op("Add", earlier, b.op("MatMul", own, values)))
    last = b.op("Slice", total, *(b.const([x]) for x in (CHUNK - 1, CHUNK, 2)))
    rest = b.unsqueeze(b.op("Exp", b.op("Sub", last, total)), 2)  # [B, H, 1, C]
    kept = b.op("Mul", "states_before", b.unsqueeze(b.op("Exp", last), 3))
    added = b.op("MatMul", b.op("Mul", keys, rest), values)
    _named(b, "states_after", b.op("Add", kept, added))
    inputs = {"states_before": 4} | {f"{row}_now": AXES.get(row, 3) + 1 for row in rows}
    return _graph(b, "chunk", inputs, {"states_after": 4, "y_now": 4})


def _replaced(b: Body, keys: str, left: str, before: str) -> str:
    """The values that a delta rule adds: [B, H, C, dv]."""
    strength = b.unsqueeze("strengths_now", 3)
    held = b.op("MatMul", b.op("Mul", "k_now", before), "states_before")
    wanted = b.op("Mul", strength, b.op("Sub", "v_now", held))
    alike = b.op("Mul", b.op("MatMul", "k_now", keys), left)
    alike = b.op("Mul", alike, strength)
    inverse = b.float(np.eye(CHUNK))
    size = 1
    while size < CHUNK:
        below = b.op("Mul", alike, b.float(_below(size)))
        if size > 1:
            below = b.op("MatMul", b.op("MatMul", inverse, below), inverse)
        inverse = b.op("Sub", inverse, below)
        size *= 2
    return b.op("MatMul", inverse, wanted)


def _below(size: int) -> np.ndarray:
    """[C, C]: 1 in the blocks of ``size`` that stand below the diagonal's, two by two."""
    places = np.arange(CHUNK) // size
    rows, columns = places[:, None], places[None]
    return (rows == columns + 1) & (rows % 2 == 1)
