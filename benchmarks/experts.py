"""A layer of experts on a CPU by ONNX Runtime: every expert for every token, the loop
over chosen ones that float32 engines have, and ONNX Runtime's own operator.

    python -m benchmarks.experts [--shapes E,C,D,I ...] [--tokens 1,8,64] [--threads 2]

E experts, C of them a token, hidden size D, I columns. Weights are random, float32, in
memory. Milliseconds, the best of what fits into ``SECONDS``; ``apart``: the largest
difference from the first, as a share of its largest number. The graphs of the first two
are those of the exporter. com.microsoft.MoE gets the logarithms of the chosen weights, and
its maps as it wants them, gate and up in turn. One table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime as ort
import torch
from onnx import TensorProto, helper, numpy_helper

from kvlathe.base.console import print_table
from kvlathe.export.families import Experts
from kvlathe.export.model.blocks import ExpertBlock, routing_of
from kvlathe.export.onnx.attend import OPSET
from kvlathe.export.onnx.experts import experts_function, part_names
from kvlathe.layers.experts import ExpertWeights, choose_experts, run_experts
from kvlathe.layers.routing import Routing

SECONDS, FEWEST = 1.0, 3
ACTIVATION = "silu"
FORMS = ("every expert", "loop", "MoE")
Array = npt.NDArray[np.float32]
Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Compute = Callable[[torch.Tensor, ExpertWeights, Routing], Result]


class Part(torch.nn.Module):
    """What ``compute`` makes of a block's weights, as a graph."""

    def __init__(self, block: ExpertBlock, compute: Compute) -> None:
        super().__init__()
        self.block, self.compute = block, compute

    def forward(self, x: torch.Tensor) -> Result:
        weights = ExpertWeights(**dict(self.block.named_parameters()))
        return self.compute(x, weights, self.block.routing)


def every_expert(
    x: torch.Tensor, weights: ExpertWeights, routing: Routing
) -> torch.Tensor:
    return run_experts(x, weights, routing, ACTIVATION)


def block_of(experts: Experts, hidden: int) -> ExpertBlock:
    block = ExpertBlock(experts, hidden, ACTIVATION, torch.float32)
    draw = torch.Generator().manual_seed(0)
    for weight in block.parameters():
        weight.normal_(generator=draw).mul_(weight.shape[-2] ** -0.5)
    return block


def graph_of(
    module: torch.nn.Module, hidden: int, dtype: torch.dtype = torch.float32
) -> onnx.ModelProto:
    program = torch.export.export(
        module.eval(),
        (torch.zeros(11, hidden, dtype=dtype),),
        dynamic_shapes=({0: torch.export.Dim("T")},),
    )
    found = torch.onnx.export(program, dynamo=True, opset_version=OPSET, verbose=False)
    assert found is not None
    return ir.to_proto(found.model)


def looped(block: ExpertBlock, experts: Experts, hidden: int) -> onnx.ModelProto:
    """As engines of float32 have it."""
    model = graph_of(block, hidden)
    names, routing = part_names(experts.gated, experts.biased), routing_of(experts)
    function = experts_function(names, routing, block.activation, OPSET)
    model.functions.append(function)
    model.opset_import.append(helper.make_opsetid("kvlathe", 1))
    return model


def graphs(
    block: ExpertBlock, experts: Experts, hidden: int
) -> Iterator[onnx.ModelProto]:
    """One a form, in the order of FORMS."""
    yield graph_of(Part(block, every_expert), hidden)
    yield looped(block, experts, hidden)
    own = graph_of(Part(block, choose_experts), hidden)
    values, places = (output.name for output in own.graph.output)
    gate, up, down = (
        getattr(block, role).detach().mT for role in ("gate", "up", "down")
    )
    maps = {"fc1": torch.stack([gate, up], 2).flatten(1, 2), "fc2": down}
    for name, tensor in maps.items():
        own.graph.initializer.append(
            numpy_helper.from_array(tensor.contiguous().numpy(), name)
        )
    least = numpy_helper.from_array(np.full(1, -1e30, np.float32))
    own.graph.initializer.append(
        numpy_helper.from_array(np.array([experts.count]), "count")
    )
    own.graph.node.extend(
        [
            helper.make_node("Log", [values], ["logs"]),
            helper.make_node("Shape", ["x"], ["tokens"], start=0, end=1),
            helper.make_node("Concat", ["tokens", "count"], ["size"], axis=0),
            helper.make_node("ConstantOfShape", ["size"], ["none"], value=least),
            helper.make_node(
                "ScatterElements", ["none", places, "logs"], ["logits"], axis=1
            ),
            helper.make_node(
                "MoE",
                ["x", "logits", "fc1", "", "fc2"],
                ["y"],
                domain="com.microsoft",
                k=experts.chosen,
                activation_type="swiglu",
                swiglu_fusion=1,
                activation_alpha=1.0,
                activation_beta=0.0,
            ),
        ]
    )
    del own.graph.output[:]
    own.graph.output.append(
        helper.make_tensor_value_info("y", TensorProto.FLOAT, ["T", hidden])
    )
    own.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    yield own


def session_of(model: onnx.ModelProto, threads: int) -> ort.InferenceSession:
    """Weights lie beside the graph, which could not hold them."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx.save_model(
            model, path, save_as_external_data=True, location="model.onnx.data"
        )
        return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def best(session: ort.InferenceSession, x: Array) -> tuple[Array, float]:
    """What it gives, and milliseconds."""
    least, turns, start = np.inf, 0, time.perf_counter()
    name, found = session.get_inputs()[0].name, np.empty(0, np.float32)
    while turns < FEWEST or time.perf_counter() - start < SECONDS:
        begun = time.perf_counter()
        found = np.asarray(session.run(None, {name: x})[0])
        least = min(least, time.perf_counter() - begun)
        turns += 1
    return found, least * 1e3


def rows_of(shape: str, tokens: list[int], threads: int) -> Iterator[list[str | float]]:
    count, chosen, hidden, inner = (int(number) for number in shape.split(","))
    experts = Experts(count, chosen, inner, normalized=True)
    expected: dict[int, Array] = {}
    models = graphs(block_of(experts, hidden), experts, hidden)
    for form, model in zip(FORMS, models, strict=True):
        session = session_of(model, threads)
        for many in tokens:
            x = np.random.default_rng(many).standard_normal((many, hidden))
            found, milliseconds = best(session, x.astype(np.float32))
            first = expected.setdefault(many, found)
            apart = float(np.abs(found - first).max() / np.abs(first).max())
            yield [shape, many, form, round(milliseconds, 2), f"{apart:.0e}"]


@torch.no_grad()
def main() -> None:
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["32,4,512,256", "64,8,768,384"])
    parser.add_argument("--tokens", default="1,8,64,256")
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    tokens = [int(number) for number in asked.tokens.split(",")]
    rows = [
        row for shape in asked.shapes for row in rows_of(shape, tokens, asked.threads)
    ]
    columns = ["experts, chosen, D, I", "tokens", "form", "ms", "apart"]
    print_table("Experts on a CPU", columns, rows)
    print(json.dumps({"bench": "experts", "threads": asked.threads, "rows": rows}))


if __name__ == "__main__":
    main()
