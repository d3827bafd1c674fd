"""The graph that takes LoRA adapters: an exported graph in which maps have products
beside them.

Adapters of a step lie side by side. For a map, A is [in, N] and B is [N, out] of all of
them together, N ranks in sum; ``of`` [N] says whose each rank is, and ``adapters`` [T]
which adapter each token has (0: none). What a token's own adapter does not have is 0:

    y = x W + (where(of == adapters, x A + shift, 0)) B

So a step may mix adapters of any rank, and N is 0 where none of them changes a map.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
from onnx import helper

from kvlathe.export.onnx.body import FLOAT, HALF, INT32
from kvlathe.plan.adapter_maps import AdapterMap

AFTER_ROWS = ("o", "out_gate", "gate", "up", "down")
"""Maps that in a model's last layer see the rows of logits alone."""
TYPES = {"float32": FLOAT, "float16": HALF}


def with_adapters(
    model: onnx.ModelProto, maps: Sequence[AdapterMap], layers: int, dtype: str
) -> onnx.ModelProto:
    """A copy of an exported graph with the products of ``maps``, as many of them as it
    has. ``layers``: of the model."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    graph, kind = made.graph, TYPES[dtype]
    by_weight = {
        f"{one.name}.{end}": one for one in maps for end in ("weight", "codes")
    }
    shapes = {one.name: list(one.dims) for one in graph.initializer}
    nodes = list(graph.node)
    graph.ClearField("node")
    graph.node.extend(_rows(any(x.name == "logits" for x in graph.output)))
    graph.node.append(helper.make_node("Constant", [], [ZERO], value=_zero(kind)))
    graph.input.append(helper.make_tensor_value_info("adapters", INT32, ["T"]))
    for node in nodes:
        own = next((by_weight[x] for x in node.input if x in by_weight), None)
        if own is None:
            graph.node.append(node)
            continue
        _, layer, role = own.name.split(".")
        last = int(layer) == layers - 1 and role in AFTER_ROWS
        graph.node.extend(_with_product(node, own, LOGIT_ROWS if last else ROWS))
        graph.input.extend(_inputs(own, kind, _sizes(node, shapes)))
    return made


ROWS, LOGIT_ROWS, ZERO, AXIS = (
    "adapters/rows",
    "adapters/logit_rows",
    "adapters/zero",
    "adapters/axis",
)


def _rows(gives_logits: bool) -> list[onnx.NodeProto]:
    """Adapters of tokens as a column, and of the rows of logits."""
    axis = helper.make_tensor(AXIS, onnx.TensorProto.INT64, [1], [1])
    nodes = [
        helper.make_node("Constant", [], [AXIS], value=axis),
        helper.make_node("Unsqueeze", ["adapters", AXIS], [ROWS], name=ROWS),
    ]
    if gives_logits:
        inputs = [ROWS, "logit_rows"]
        nodes.append(
            helper.make_node("Gather", inputs, [LOGIT_ROWS], name=LOGIT_ROWS, axis=0)
        )
    return nodes


def _zero(kind: int) -> onnx.TensorProto:
    return helper.make_tensor(ZERO, kind, [], [0.0])


def _sizes(node: onnx.NodeProto, shapes: Mapping[str, list[int]]) -> tuple[int, int]:
    """Inputs and outputs of a product of numbers, or of codes."""
    said = {one.name: one.i for one in node.attribute}
    if "K" in said:
        return said["K"], said["N"]
    inputs, outputs = next(shapes[name] for name in node.input if name in shapes)
    return inputs, outputs


def _inputs(
    own: AdapterMap, kind: int, sizes: tuple[int, int]
) -> list[onnx.ValueInfoProto]:
    width = f"{own.name}.ranks"
    shapes: Mapping[str, tuple[int, list[int | str]]] = {
        "a": (kind, [sizes[0], width]),
        "b": (kind, [width, sizes[1]]),
        "of": (INT32, [width]),
        **({"shift": (kind, [width])} if own.shifts else {}),
    }
    return [
        helper.make_tensor_value_info(f"{own.name}.adapters.{end}", type_, shape)
        for end, (type_, shape) in shapes.items()
    ]


def _with_product(
    node: onnx.NodeProto, own: AdapterMap, rows: str
) -> list[onnx.NodeProto]:
    """``node``, and nodes that add the product to what it gave, under that name."""
    at = f"{own.name}.adapters"
    result, node.output[0] = node.output[0], f"{at}/without"
    steps = [("MatMul", [node.input[0], f"{at}.a"], f"{at}/inner")]
    if own.shifts:
        steps.append(("Add", [f"{at}/inner", f"{at}.shift"], f"{at}/shifted"))
    inner = steps[-1][2]
    steps += [
        ("Equal", [rows, f"{at}.of"], f"{at}/own"),
        ("Where", [f"{at}/own", inner, ZERO], f"{at}/kept"),
        ("MatMul", [f"{at}/kept", f"{at}.b"], f"{at}/added"),
        ("Add", [f"{at}/without", f"{at}/added"], result),
    ]
    added = [
        helper.make_node(kind, inputs, [output], name=f"{at}/{kind}_{i}")
        for i, (kind, inputs, output) in enumerate(steps)
    ]
    return [node, *added]
