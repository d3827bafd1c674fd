"""Slices: the weights of one shard, cut from those of the decoder as they are read.

Query heads and their lanes go by the deal (kvlathe/plan/deal.py): columns of q, k and
v, rows of o. MLPs go by columns, and so does each expert; the embedding and the head by
vocabulary (Shoeybi et al. 2019, "Megatron-LM"). Norms, routers, RoPE and learned
positions are whole everywhere; what is added once, shard 0 adds.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.deal import Deal, LaneShard
from kvlathe.plan.heads import Lane
from kvlathe.runtime.sessions.torch_cuda.model.shard_group import shard_borders

LAYER = re.compile(r"layers\.(\d+)\.(.+)")
COLUMNS = (
    *("gate.weight", "up.weight", "gate.bias", "up.bias"),
    *("experts.gate", "experts.up", "experts.gate_bias", "experts.up_bias"),
)
"""Cut in their last dimension, as those of ROWS are in the one before it."""
ROWS = ("down.weight", "experts.down")
ONCE = ("o.bias", "down.bias", "experts.down_bias")
WHOLE = {
    ".codes": (
        "its weights are codes, which are not cut",
        "run it on one GPU, or build it without --weights",
    ),
    ".out_gate.weight": (
        "gates multiply what its attention gives, and no shard cuts them",
        "run it on one GPU",
    ),
}
"""Ends of names of tensors that no shard has a part of -> why, and what to do."""
Width = Callable[[Lane], int]


class Slices:
    """Cuts for shard ``shard``. ``vocabulary``: its first token, and the end."""

    def __init__(self, dealt: Deal, shard: int) -> None:
        self.plan = dealt.plan
        self.shard = shard
        self.num_shards = dealt.num_shards
        self.own = dealt.plans[shard]
        self._lane_shards: dict[int, list[LaneShard]] = {}
        for lane_shard in dealt.shards[shard]:
            layer = self.plan.lanes[lane_shard.lane].layer
            self._lane_shards.setdefault(layer, []).append(lane_shard)

    @cached_property
    def vocabulary(self) -> tuple[int, int]:
        return self._part(self.plan.model.vocab_size)

    def __call__(self, name: str, tensor: Tensor) -> Tensor | None:
        """This shard's part of tensor ``name`` of the whole decoder; None where it has
        none. A view where that is possible."""
        for end, refusal in WHOLE.items():
            if name.endswith(end):
                fact = f"the engine cannot run on {self.num_shards} GPUs"
                raise KvlatheError(fact, *refusal)
        if found := LAYER.fullmatch(name):
            return self._of_layer(int(found[1]), found[2], tensor)
        first, end = self.vocabulary
        if name == "embed.weight":
            return tensor[first:end]
        if name in ("head.weight", "head.bias"):
            return tensor[..., first:end]
        if name == "positions.weight" and self.shard:
            return None
        return tensor

    def _of_layer(self, layer: int, role: str, tensor: Tensor) -> Tensor | None:
        if role in COLUMNS:
            first, end = self._part(tensor.shape[-1])
            return tensor[..., first:end]
        if role in ROWS:
            first, end = self._part(tensor.shape[-2])
            return tensor[..., first:end, :]
        if role in ONCE:
            return None if self.shard else tensor
        side, _, kind = role.partition(".")
        if side in ("q", "k"):
            by_query = side == "q"
            return self._heads(layer, tensor, -1, _input_dim, by_query)
        if side == "v":
            return self._heads(layer, tensor, -1, _rank_v, False)
        if side == "o":
            return self._heads(layer, tensor, 0, _rank_v, True)
        if side in ("q_norm", "k_norm") and len(tensor) != self.plan.model.head_dim:
            return self._wide_norm(layer, side == "q_norm", tensor)
        if role == "attend.sinks":
            return self._sinks(layer, tensor)
        if side == "attend":
            return self._projection(layer, kind, tensor)
        return tensor

    def _wide_norm(self, layer: int, by_query: bool, tensor: Tensor) -> Tensor:
        """A norm of all heads together. Shards add up the squares of their own."""
        heads = self.plan.model.kv_heads
        if heads < self.num_shards:
            raise KvlatheError(
                f"the model cannot run on {self.num_shards} shards",
                f"its QK-norm is of all heads together, and it has {heads} KV heads",
                f"give at most {heads} shards",
            )
        return self._heads(layer, tensor, 0, _input_dim, by_query)

    def _part(self, count: int) -> tuple[int, int]:
        borders = shard_borders(count, self.num_shards)
        return borders[self.shard], borders[self.shard + 1]

    def _heads(
        self, layer: int, tensor: Tensor, dim: int, width: Width, by_query: bool
    ) -> Tensor:
        """The own heads in ``dim``: of each lane, or of each of its query heads, filled
        up with zeros to as many as this shard has for any lane."""
        group = self.plan.model.group_size if by_query else 1
        most = self.own.model.group_size if by_query else 1
        starts = self._starts(layer, width)
        parts: list[Tensor] = []
        for lane_shard in self._lane_shards[layer]:
            size = width(self.plan.lanes[lane_shard.lane])
            first = lane_shard.first if by_query else 0
            count = lane_shard.queries if by_query else 1
            begin = group * starts[lane_shard.lane] + first * size
            parts.append(tensor.narrow(dim, begin, count * size))
            if count < most:
                shape = list(parts[-1].shape)
                shape[dim] = (most - count) * size
                parts.append(tensor.new_zeros(shape))
        return torch.cat(parts, dim)

    def _starts(self, layer: int, width: Width) -> dict[int, int]:
        """Where each lane begins among those of its layer."""
        starts: dict[int, int] = {}
        at = 0
        for lane in self.plan.index.active(layer):
            starts[layer * self.plan.model.kv_heads + lane.head] = at
            at += width(lane)
        return starts

    def _sinks(self, layer: int, tensor: Tensor) -> Tensor:
        """Sink logits [H, G] of the own query heads; zeros for those of zeros."""
        places = list(self._starts(layer, _input_dim))
        lane_shards = self._lane_shards[layer]
        found = tensor.new_zeros(len(lane_shards), self.own.model.group_size)
        for row, lane_shard in zip(found, lane_shards, strict=True):
            first = tensor[places.index(lane_shard.lane), lane_shard.first :]
            row[: lane_shard.queries] = first[: lane_shard.queries]
        return found

    def _projection(self, layer: int, name: str, tensor: Tensor) -> Tensor:
        """What Attend projects with, as wide as this shard's widest lane."""
        places = list(self._starts(layer, _input_dim))
        own = [places.index(lane_shard.lane) for lane_shard in self._lane_shards[layer]]
        active = self.own.index.active(layer)
        rank = max(lane.rank_k for lane in active)
        cut = tensor[own][..., :rank]
        if name == "centre_k":
            return cut.contiguous()
        width = max(lane.input_dim for lane in active)
        return cut[:, :width].contiguous()


def _input_dim(lane: Lane) -> int:
    return lane.input_dim


def _rank_v(lane: Lane) -> int:
    return lane.rank_v
