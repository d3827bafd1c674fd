"""The node ``kvlathe::Attend`` in an exported graph: its inputs, its attributes, the
shapes of its outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from kvlathe.export.attention.tables import LayerTables, PlanFacts
from kvlathe.plan.plan import CompressionPlan


def scoring(plan: CompressionPlan) -> dict[str, float | int]:
    """The attributes of a model whose softmax is not that of its scores alone."""
    model = plan.model
    found: dict[str, float | int] = {"softcap": model.softcap} if model.softcap else {}
    return found | {"sinks": 1} if model.sinks else found


ATTRIBUTES = {"plugin_namespace": "kvlathe", "plugin_version": "1"}


def node_inputs(plan: CompressionPlan, layer: int) -> list[str]:
    """Names of the node's inputs, in order. They are the same for every layer of a
    plan."""
    form, buckets = PlanFacts(plan), range(len(plan.index.buckets))
    names = [
        "q",
        "k",
        "v",
        *(["cos", "sin"] if form.rope else []),
        "cu_seqlens_q",
        "query_offsets",
        "lengths",
    ]
    names += [f"page_table_{i}" for i in buckets] + list(form.pools)
    names += ["proj_q", "proj_k", "centre_k"] if plan.index.projected else []
    names += ["sinks"] if plan.model.sinks else []
    names += ["observation_weights"] if plan.index.observes else []
    return names + list(LayerTables(plan, layer))


def attend_node(
    plan: CompressionPlan,
    layer: int,
    scale: float,
    values: dict[str, Tensor | None],
    dtypes: tuple[torch.dtype, torch.dtype],
) -> tuple[Tensor, ...]:
    """Put the node into the graph that is being traced. ``values``: its inputs by name.
    ``dtypes``: of o, and of the rows to append."""
    sizes = LayerTables(plan, layer)
    tokens = _size(values["q"], 0)
    width_o = sizes.G * sum(lane.rank_v for lane in sizes.lanes)
    width_rows = sum(lane.numbers for lane in sizes.lanes)
    shapes: list[tuple[int, ...]] = [(tokens, width_o), (tokens, width_rows)]
    types = [*dtypes]
    if plan.index.observes:
        tables = [values[f"page_table_{i}"] for i in range(len(plan.index.buckets))]
        places = sum(_size(table, 1) for table in tables) * plan.page_tokens
        places += _size(values["query_offsets"], 0)
        shapes.append((_size(values["lengths"], 0), sizes.H, places))
        types.append(torch.float32)
    outputs = torch.onnx.ops.symbolic_multi_out(
        "kvlathe::Attend",
        [values[name] for name in node_inputs(plan, layer)],
        attrs={
            "layer": layer,
            "scale": scale,
            "layout": sizes["layout"].tolist(),
            **scoring(plan),
            **ATTRIBUTES,
        },
        dtypes=types,
        shapes=shapes,
        version=1,
    )
    return tuple(outputs)


def _size(x: Tensor | None, axis: int) -> int:
    """A size that may be a symbol while exporting."""
    assert x is not None
    return x.shape[axis]
