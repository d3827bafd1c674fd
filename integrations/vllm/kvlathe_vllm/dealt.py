"""Heads dealt to the shards of vLLM's tensor parallelism, which vLLM calls ranks. No
vLLM here.

vLLM gives shard r the r-th part of a layer's heads in the order of the checkpoint, and
every shard blocks of equal bytes. So the KV heads of a layer are put into an order in
which shards have about equal bytes, tensors of the checkpoint are read in that order,
and a block is as large as the largest shard's. Where a layer has fewer KV heads than
there are shards, several shards have the same one, each with other query heads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, partial

import torch
from torch import Tensor

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.deal import Deal, LaneShard, deal
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.plan import CompressionPlan
from kvlathe_vllm.hosted import Hosted

ATTENTION = ("self_attn", "attn", "attention")
"""Segments of a tensor's name below which an attention's own tensors are."""
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj")
SHARED = ("rotary_emb",)
"""The same for all heads."""
NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm")
"""The same for all heads, where they are as long as one."""
Named = tuple[str, Tensor]


class Dealt:
    """``whole``, dealt to so many shards."""

    def __init__(self, whole: Hosted, num_shards: int) -> None:
        """Raises KvlatheError for a plan that cannot be."""
        model = whole.plan.model
        fact = f"vLLM cannot deal these heads to {num_shards} shards"
        if any(lane.removed for lane in whole.plan.lanes):
            reason = "the plan removes heads, and another one answers for each of them"
            remedy = "start it with --tensor-parallel-size 1, or keep all heads"
            raise KvlatheError(fact, reason, remedy)
        if max(model.kv_heads, num_shards) % min(model.kv_heads, num_shards):
            reason = f"a layer has {model.kv_heads} KV heads"
            raise KvlatheError(
                fact, reason, "give a number of shards that divides them"
            )
        self.whole, self.num_shards = whole, num_shards
        self.orders = _orders(whole.plan, num_shards)
        """The KV heads of each layer as vLLM has them."""

    @property
    def changed(self) -> set[int]:
        """Layers whose heads are in another order than in the checkpoint."""
        orders = enumerate(self.orders)
        return {layer for layer, order in orders if list(order) != sorted(order)}

    @cached_property
    def engines(self) -> tuple[Hosted, ...]:
        """The engine of each shard."""
        plan = self.whole.plan
        plans = Deal(
            plan, tuple(self._lane_shards(shard) for shard in range(self.num_shards))
        ).plans
        own = [dataclasses.replace(self.whole, plan=plan) for plan in plans]
        least: list[int] = []
        for layer in range(plan.model.layers):
            least.append(max(engine.token_bytes(layer) for engine in own))
        return tuple(dataclasses.replace(one, least=tuple(least)) for one in own)

    def _lane_shards(self, shard: int) -> tuple[LaneShard, ...]:
        """In the order of lanes."""
        model = self.whole.plan.model
        copies = max(1, self.num_shards // model.kv_heads)
        each = model.group_size // copies
        heads = max(1, model.kv_heads // self.num_shards)
        first = shard // copies * heads
        lane_shards: list[LaneShard] = []
        for layer, order in enumerate(self.orders):
            for head in sorted(order[first : first + heads]):
                lane = layer * model.kv_heads + head
                lane_shards.append(LaneShard(lane, shard % copies * each, each))
        return tuple(lane_shards)

    @property
    def padding(self) -> float:
        """Bytes of a token's blocks on all shards, over those that hold something."""
        layers = range(self.whole.plan.model.layers)
        taken = sum(one.token_bytes(i) for one in self.engines for i in layers)
        filled = sum(one.blocks[i].token_bytes for one in self.engines for i in layers)
        return taken / filled

    def arranged(self, tensors: Iterable[Named]) -> Iterator[Named]:
        """The tensors of a checkpoint, by the names of transformers. Those of attention
        have their heads in the order of vLLM's shards: rows of q, k, v [heads * d,
        ...], columns of o [hidden, query heads * d]. Raises KvlatheError where one is
        not known to have heads, and where some are missing."""
        changed = self.changed
        seen: set[tuple[int, str]] = set()
        for name, tensor in tensors:
            layer, path = _place(name)
            if layer not in changed:
                yield name, tensor
                continue
            place = (layer, ".".join(path))
            if place in seen:
                raise _unknown(f"{name} is another one of layer {layer}")
            seen.add(place)
            yield name, self._in_order(name, path, tensor, self.orders[layer])
        for layer in sorted(changed):
            is_fused = (layer, "qkv_proj.weight") in seen
            for kind in MATRICES[-1:] if is_fused else MATRICES:
                if (layer, f"{kind}.weight") not in seen:
                    raise _unknown(f"layer {layer} has no {kind}")

    def _in_order(
        self, name: str, path: Sequence[str], tensor: Tensor, order: Sequence[int]
    ) -> Tensor:
        model = self.whole.plan.model
        kv, dims = model.kv_heads, model.head_dim
        group = model.group_size * dims
        kind, size = path[0], tuple(tensor.shape)
        is_shared = kind in SHARED or tensor.numel() == 1
        if is_shared or (kind in NORMS and size == (dims,)):
            return tensor
        if kind == "o_proj" and path[1:] == ["bias"]:
            return tensor
        if kind == "o_proj" and size[1:] == (kv * group,):
            return _rows(tensor.T, kv, order).T.contiguous()
        rows = {
            "q_proj": [kv * group],
            "k_proj": [kv * dims],
            "v_proj": [kv * dims],
            "qkv_proj": [kv * group, kv * dims, kv * dims],
            "sinks": [kv * model.group_size],
        }.get(kind, [])
        is_plain = kind == "sinks" or path[1:] in (["weight"], ["bias"])
        if not is_plain or sum(rows) != size[0]:
            raise _unknown(f"{name} of shape {size} is not known to have {kv} KV heads")
        return torch.cat([_rows(part, kv, order) for part in tensor.split(rows)])


def _rows(tensor: Tensor, heads: int, order: Sequence[int]) -> Tensor:
    """Rows head by head, in another order of heads."""
    return tensor.unflatten(0, (heads, -1))[list(order)].flatten(0, 1)


def _orders(plan: CompressionPlan, num_shards: int) -> list[tuple[int, ...]]:
    """As the checkpoint has them, where another order saves no bytes."""
    heads = plan.model.kv_heads
    plain = tuple(range(heads))
    if heads <= num_shards:
        return [plain] * plan.model.layers
    sizes = lane_sizes(plan)
    hands = deal(plan, num_shards, by_layer=True).shards
    orders: list[tuple[int, ...]] = []
    for layer in range(plan.model.layers):
        order: list[int] = []
        for lane_shards in hands:
            own = [lane_shard.lane for lane_shard in lane_shards]
            order += [lane % heads for lane in own if lane // heads == layer]
        of_layer = sizes[layer * heads : (layer + 1) * heads]
        candidates = (plain, tuple(order))
        orders.append(min(candidates, key=partial(largest, of_layer, num_shards)))
    return orders


def largest(sizes: Sequence[int], num_shards: int, order: Sequence[int]) -> int:
    """Bytes of the shard that has most."""
    each = len(order) // num_shards
    found: list[int] = []
    for first in range(0, len(order), each):
        found.append(sum(sizes[head] for head in order[first : first + each]))
    return max(found)


def lane_sizes(plan: CompressionPlan) -> list[int]:
    """Bytes of each lane in a block."""
    layout = CacheLayout(plan)
    sizes = [0] * len(plan.lanes)
    for bucket in plan.index.buckets:
        for lane, size in layout.lane_bytes(bucket.number).items():
            sizes[lane] += size * bucket.stays
    return sizes


def _place(name: str) -> tuple[int, list[str]]:
    """The layer of an attention's tensor, and its name there; -1 and nothing of another
    one's."""
    segments = name.split(".")
    for i in range(len(segments) - 3):
        layers, number, part, *path = segments[i:]
        if layers == "layers" and number.isdigit() and part in ATTENTION:
            return int(number), path
    return -1, []


def _unknown(reason: str) -> KvlatheError:
    return KvlatheError(
        "the heads of this checkpoint cannot be dealt to shards",
        reason,
        "start vLLM with --tensor-parallel-size 1, or build with equal heads",
    )
