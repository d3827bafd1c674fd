"""AdapterMaps of a checkpoint whose plan is folded into an engine's weights: what fold.py
does to a weight, as an adapter of that weight needs it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvlathe.base.errors import KvlatheError
from kvlathe.export.bases.basis import Basis
from kvlathe.export.folding.lane_fold import LaneFold, lane_folds
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.model.lora import modules_of
from kvlathe.export.model.spec import DecoderSpec
from kvlathe.export.model.tensors import apply_factor, cut, stored_name, stored_shapes
from kvlathe.plan.adapter_maps import AdapterMap, AdapterMaps, Float32, Int32
from kvlathe.plan.plan import CompressionPlan

HEADS = ("q", "k", "v", "o")
ROLES = (*HEADS, "out_gate", "gate", "up", "down")
"""Maps of a layer that adapters may change."""


def adapter_maps(
    checkpoint: Checkpoint, plan: CompressionPlan, basis: Basis
) -> AdapterMaps:
    """Raises KvlatheError for a model whose maps are no longer those that adapters are
    of."""
    spec = checkpoint.spec
    if spec.family.latent is not None:
        raise KvlatheError(
            "the engine cannot take adapters at run time",
            "the heads of this model share a latent, and their maps are one in an engine",
            "merge the adapter: build with --lora",
        )
    folds = lane_folds(spec, plan, basis)
    orders: dict[str, Int32] = {}
    matrices: dict[str, Float32] = {}
    maps = [
        _map(checkpoint, plan, folds[plan.model.source(layer)], layer, role, matrices)
        for layer, role in _there(checkpoint)
    ]
    for one in maps:
        order = _order(checkpoint.spec, f"{one.name}.weight", one.outputs)
        if order is not None:
            orders[one.name] = order
    return AdapterMaps(tuple(maps), orders, matrices)


def _order(spec: DecoderSpec, weight: str, outputs: int) -> Int32 | None:
    """The stored outputs that a map has, in its order; None where it has all as they
    are."""
    row = torch.arange(outputs)[None]
    order = cut(spec, weight, row if spec.family.in_out else row.T)[0]
    return None if torch.equal(order, row[0]) else order.int().numpy()


def _there(checkpoint: Checkpoint) -> Iterator[tuple[int, str]]:
    """The layer and the role of every map that the checkpoint has."""
    for layer in range(checkpoint.spec.layers):
        for role in ROLES:
            if checkpoint.has(f"layers.{layer}.{role}.weight"):
                yield layer, role


def _map(
    checkpoint: Checkpoint,
    plan: CompressionPlan,
    folds: list[LaneFold],
    layer: int,
    role: str,
    matrices: dict[str, Float32],
) -> AdapterMap:
    """A map, whose matrices are added to ``matrices``."""
    spec = checkpoint.spec
    name = f"layers.{layer}.{role}"
    weight = f"{name}.weight"
    stored = stored_name(spec, weight)
    sizes = stored_shapes(spec)[stored]
    inputs, outputs = sizes if spec.family.in_out else sizes[::-1]
    factor = apply_factor(spec, weight, torch.ones(1)).item()
    modules = tuple(modules_of(spec, stored))
    whole = AdapterMap(name, modules, inputs, outputs, factor)
    gated = role == "o" and spec.has_out_gates
    after_norm = role == "v" and spec.family.value_norm
    if role not in HEADS or gated or after_norm:
        return whole
    own = [_matrix(fold, role) for fold in folds]
    kv_heads = spec.heads(layer).kv_heads
    if _is_whole(own, kv_heads) and not (role == "o" and _shifts(folds)):
        return whole
    for i, (fold, matrix) in enumerate(zip(folds, own, strict=True)):
        matrices[f"{name}.{i}"] = matrix.float().numpy()
        if role == "o" and _shifts(folds):
            matrices[f"{name}.shift.{i}"] = fold.shift_v.float().numpy()
    return AdapterMap(
        name,
        modules,
        inputs,
        outputs,
        factor,
        "inputs" if role == "o" else "outputs",
        kv_heads,
        _lanes(plan, layer, folds, kv_heads, role),
        role == "o" and _shifts(folds),
    )


def _matrix(fold: LaneFold, role: str) -> Tensor:
    return {"q": fold.q, "k": fold.k, "v": fold.v, "o": fold.out}[role]


def _shifts(folds: list[LaneFold]) -> bool:
    return any(bool(fold.shift_v.any()) for fold in folds)


def _is_whole(matrices: list[Tensor], kv_heads: int) -> bool:
    """Whether every head stays as it is."""
    squares = all(len(one) == one.shape[1] for one in matrices)
    if not squares or len(matrices) != kv_heads:
        return False
    return all(torch.equal(one, torch.eye(len(one)).double()) for one in matrices)


def _lanes(
    plan: CompressionPlan,
    layer: int,
    folds: list[LaneFold],
    kv_heads: int,
    role: str,
) -> tuple[tuple[int, ...], ...]:
    """The heads of each kept lane: its own and, for W_O, those that it fills."""
    source = plan.model.source(layer)
    filled: dict[int, list[int]] = {fold.head: [] for fold in folds}
    for head in range(kv_heads if role == "o" else 0):
        fills = plan.index.lane(source, head).fill_from
        if fills is not None:
            filled[fills].append(head)
    return tuple((fold.head, *filled[fold.head]) for fold in folds)
