"""The proof that a built engine still computes attention, read from the engine's own
layer list.

TensorRT drops what it thinks is not needed and folds what it thinks is constant, so a
wrong graph can build. Each layer of a finished engine names the ONNX nodes it computes;
for every Attend node, the products and softmaxes of its function must be among them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvlathe.base.errors import KvlatheError

PRODUCTS = ("MatMul", "Einsum", "Gemm")
SOFTMAX = ("Softmax", "Exp")
PLUGIN = frozenset({"its plugin"})
"""The requirement of an Attend node that must be one plugin layer: no node of a
function has such a name."""


def required_nodes(onnx_path: Path, plugin: bool = False) -> dict[str, frozenset[str]]:
    """For each Attend node: the nodes of its function that must be seen in the engine
    (products of two computed tensors, and the softmax's exponentials). Names are as
    TensorRT's parser gives them. With ``plugin`` none of them will do: the node itself
    must be there as one layer.
    """
    import onnx

    model = onnx.load(onnx_path, load_external_data=False)
    bodies = {(f.domain, f.name): _vital(f.node, f.input) for f in model.functions}
    attends = {
        n.name: bodies[n.domain, n.op_type]
        for n in model.graph.node
        if (n.domain, n.op_type) in bodies
    }
    return dict.fromkeys(attends, PLUGIN) if plugin else attends


def _vital(nodes: Iterable[Any], inputs: Iterable[str]) -> frozenset[str]:
    computed, vital = set(inputs), set()
    for node in nodes:
        live = [name in computed for name in node.input if name]
        if any(live):
            computed.update(node.output)
        if (node.op_type in PRODUCTS and all(live)) or (
            node.op_type in SOFTMAX and any(live)
        ):
            vital.add(node.name or f"node_of_{node.output[0]}")
    return frozenset(vital)


def check_attention(layers: str, required: Mapping[str, frozenset[str]]) -> None:
    """Raise KvlatheError naming every Attend node that the engine's layer list does not
    show whole.

    ``layers`` is the inspector's text: each layer's metadata lists the ONNX nodes it
    computes, as ``[ONNX Layer: <node in the function> | <Attend node> (Attend)]``, or
    ``[ONNX Layer: <Attend node>]`` for a plugin.
    """
    shown = set(re.findall(r"\[ONNX Layer: ([^\]]+?)(?: \([^)]*\))?\]", layers))
    lost: list[str] = []
    for attend, nodes in required.items():
        missing = sorted(node for node in nodes if f"{node} | {attend}" not in shown)
        if missing and attend not in shown:
            lost.append(f"{attend} ({', '.join(missing)})")
    if lost or not required:
        what = "; ".join(lost) or "every layer"
        raise KvlatheError(
            f"the engine lacks attention of {what}",
            "TensorRT dropped it or folded it into a constant",
            "do not use this engine; report this",
        )
