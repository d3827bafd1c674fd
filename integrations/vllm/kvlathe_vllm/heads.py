"""LayerHeads: what a layer does to q, k, v and o of its heads beside attention
(export/folding/host_heads.py has the formulas). torch tensors on any device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlathe.plan.heads import Lane
from kvlathe_vllm.hosted import Hosted, Matrices

ADDED = ("centre", "shift")
"""Matrices that are added or subtracted; the others are multiplied with."""


@dataclass(frozen=True, eq=False)
class ValueMaps:
    """Maps between v and v', and between o' and o, of H lanes that are padded with
    zeros to the widest rank R.

    ``into`` [H, d, R] and ``back`` [H, R, d]. ``shift`` [H, 1, d]; None where it is 0.
    ``columns`` [sum of rank_v] and ``o_columns`` [sum of G * rank_v]: the places of
    packed columns of v' and o' among padded ones; None where no lane is padded.
    """

    into: Tensor
    back: Tensor
    shift: Tensor | None
    columns: Tensor | None
    o_columns: Tensor | None

    @classmethod
    def of(
        cls,
        lanes: Sequence[Lane],
        matrices: Sequence[Matrices],
        group: int,
        dims: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> ValueMaps:
        """The maps that ``matrices`` of ``lanes`` say, for ``group`` query heads of
        ``dims`` dimensions each."""
        widest = max(lane.rank_v for lane in lanes)
        shift = stacked(matrices, "shift", (1, dims)).to(device, dtype)
        held = torch.zeros(len(lanes), widest)  # [H, R]: 1 where a lane has a column
        for row, lane in zip(held, lanes, strict=True):
            row[: lane.rank_v] = 1
        columns = held.flatten().nonzero().flatten()
        o_columns = held.repeat_interleave(group, 0).flatten().nonzero().flatten()
        is_even = bool(held.all())
        return cls(
            stacked(matrices, "v", (dims, widest)).to(device, dtype),
            stacked(matrices, "o", (widest, dims)).to(device, dtype),
            shift if bool(shift.any()) else None,
            None if is_even else columns.to(device),
            None if is_even else o_columns.to(device),
        )

    def values(self, v: Tensor) -> Tensor:
        """v [T, H * d] -> v' [T, sum of rank_v]."""
        lanes, dims, _ = self.into.shape
        by_lane = v.reshape(len(v), lanes, dims).transpose(0, 1)  # [H, T, d]
        if self.shift is not None:
            by_lane = by_lane - self.shift
        packed = torch.bmm(by_lane, self.into).transpose(0, 1).reshape(len(v), -1)
        if self.columns is not None:
            packed = packed[:, self.columns]
        return packed.contiguous()

    def outputs(self, o: Tensor) -> Tensor:
        """o' [T, sum of G * rank_v] -> o [T, H, G * d]."""
        lanes, widest, _ = self.back.shape
        by_lane = self._widened(o).reshape(len(o), lanes, -1).transpose(0, 1)
        # [H, T * G, R] -> [H, T * G, d]
        back = torch.bmm(by_lane.reshape(lanes, -1, widest), self.back)
        if self.shift is not None:
            back = back + self.shift
        return back.reshape(lanes, len(o), -1).transpose(0, 1)

    def _widened(self, o: Tensor) -> Tensor:
        """Every lane at the widest rank, zeros behind its own."""
        if self.o_columns is None or self.columns is None:
            return o
        lanes, widest, _ = self.back.shape
        group = len(self.o_columns) // len(self.columns)
        padded = o.new_zeros(len(o), lanes * group * widest)
        padded[:, self.o_columns] = o
        return padded


def stacked(matrices: Sequence[Matrices], name: str, shape: tuple[int, int]) -> Tensor:
    """Matrix ``name`` of every lane, [H, *shape], padded with zeros; of a lane without
    it the identity, or zeros where it is added."""
    every = torch.zeros(len(matrices), *shape)
    for own, into in zip(matrices, every, strict=True):
        if name in own:
            given = torch.from_numpy(own[name])
            given = given.reshape(-1, given.shape[-1])
            height, width = given.shape
            into[:height, :width] = given
        elif name not in ADDED:
            into.fill_diagonal_(1)
    return every


class LayerHeads:
    """The heads of layer ``layer``. H lanes that are not removed, G query heads each; d
    dimensions; ``dtype`` is what it multiplies in."""

    def __init__(
        self, engine: Hosted, layer: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        plan = engine.plan
        self.lanes = plan.index.active(layer)
        self.group = plan.model.group_size
        self.dims = plan.model.head_dim
        self.dtype = dtype
        self.matrices = [engine.matrices(lane) for lane in self.lanes]
        own = [lane.head for lane in self.lanes]
        here = own if plan.is_part else list(range(plan.model.kv_heads))
        """KV heads that q, k, v and o have here: one shard of several has its own
        alone."""
        self.kept = [here.index(head) for head in own]
        self.all_kept = len(own) == len(here)
        self.sources: list[int] = []
        """The lane that answers for each of these heads."""
        for head in here:
            filled = plan.index.lane(layer, head).fill_from
            self.sources.append(own.index(head if filled is None else filled))
        self.kept_at = torch.tensor(self.kept, device=device)
        self.sources_at = torch.tensor(self.sources, device=device)
        self.maps: ValueMaps | None = None
        if any("v" in own for own in self.matrices):
            given = (self.lanes, self.matrices, self.group, self.dims)
            self.maps = ValueMaps.of(*given, device, dtype)

    def select(self, x: Tensor, each: int) -> Tensor:
        """x [T, KV heads * each, d] of the kept lanes, [T, H * each * d] in ``dtype``;
        perhaps a view."""
        rows = len(x)
        if not self.all_kept:
            x = x.reshape(rows, -1, each * self.dims)[:, self.kept_at]
        return x.reshape(rows, -1).to(self.dtype)

    def values(self, value: Tensor) -> Tensor:
        """v [T, KV heads, d] -> v' [T, sum of rank_v]."""
        own = self.select(value, 1)
        return own if self.maps is None else self.maps.values(own)

    def outputs(self, o: Tensor) -> Tensor:
        """o' [T, sum of G * rank_v] -> o [T, KV heads * G, d]."""
        if self.maps is not None:
            o = self.maps.outputs(o)
        heads = o.reshape(len(o), len(self.lanes), self.group, self.dims)
        if not self.all_kept:
            heads = heads[:, self.sources_at]
        return heads.reshape(len(o), -1, self.dims)

    def projections(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Matrices that attention projects q and k with: [H, d, Rk] twice, and centres
        [H, 1, Rk]; None where it projects nothing."""
        if not any("q" in own for own in self.matrices):
            return None
        widest = max(lane.rank_k for lane in self.lanes)
        q, k = (stacked(self.matrices, x, (self.dims, widest)) for x in ("q", "k"))
        return q, k, stacked(self.matrices, "centre", (1, widest))
