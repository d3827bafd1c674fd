"""What a layer does to q, k, v and o of its heads beside attention (export/folding/
host_heads.py has the formulas). torch tensors on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from kvlathe_vllm.hosted import Hosted

ADDED = ("centre", "shift")
"""What is added or subtracted; the others are multiplied with."""


class LayerHeads:
    """Of layer ``layer``. H lanes that are not removed, G query heads each; d dimensions;
    ``dtype`` is what it multiplies in."""

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
        """KV heads that q, k, v and o have here: one shard of several has its own alone."""
        self.kept = [here.index(head) for head in own]
        self.all_kept = len(own) == len(here)
        self.sources: list[int] = []
        """Of each of these heads: which lane answers for it."""
        for head in here:
            filled = plan.index.lane(layer, head).fill_from
            source = head if filled is None else filled
            self.sources.append(own.index(source))
        self.kept_at = torch.tensor(self.kept, device=device)
        self.sources_at = torch.tensor(self.sources, device=device)
        self.plain = not any("v" in own for own in self.matrices)
        if not self.plain:
            self._read(device)

    def _read(self, device: torch.device) -> None:
        """V [H, d, Rv], O [H, Rv, d] and the shifts [H, 1, d], padded with zeros; where
        packed columns of v' and o' lie among padded ones."""
        self.widest = max(lane.rank_v for lane in self.lanes)
        shape = (self.dims, self.widest)
        into = self._stacked("v", shape)
        back = self._stacked("o", (self.widest, self.dims))
        shifts = self._stacked("shift", (1, self.dims))
        self.v = into.to(device, self.dtype)
        self.o = back.to(device, self.dtype)
        self.shift = shifts.to(device, self.dtype)
        self.shifted = bool(self.shift.any())
        held = torch.zeros(len(self.lanes), self.widest)
        for row, lane in zip(held, self.lanes, strict=True):
            row[: lane.rank_v] = 1
        of_heads = held.repeat_interleave(self.group, 0)
        self.even = bool(held.all())
        columns = held.flatten().nonzero()
        o_columns = of_heads.flatten().nonzero()
        self.columns = columns.flatten().to(device)
        self.o_columns = o_columns.flatten().to(device)

    def _stacked(self, name: str, shape: tuple[int, int]) -> Tensor:
        """Matrix ``name`` of every lane, [H, *shape], padded with zeros; of a lane without
        it the identity, or zeros where it is added."""
        rows, columns = shape
        stacked = torch.zeros(len(self.lanes), rows, columns)
        for own, into in zip(self.matrices, stacked, strict=True):
            if name in own:
                given = torch.from_numpy(own[name])
                given = given.reshape(-1, given.shape[-1])
                height, width = given.shape
                into[:height, :width] = given
            elif name not in ADDED:
                into.fill_diagonal_(1)
        return stacked

    def select(self, x: Tensor, each: int) -> Tensor:
        """x [T, KV heads * each, d] of the kept lanes, [T, H * each * d] in ``dtype``;
        perhaps a view."""
        rows = len(x)
        if not self.all_kept:
            heads = x.reshape(rows, -1, each * self.dims)
            x = heads[:, self.kept_at]
        packed = x.reshape(rows, -1)
        return packed.to(self.dtype)

    def values(self, value: Tensor) -> Tensor:
        """v [T, KV heads, d] -> v' [T, sum of rank_v]."""
        flat = self.select(value, 1)
        if self.plain:
            return flat
        rows = len(flat)
        by_row = flat.reshape(rows, -1, self.dims)
        v = by_row.transpose(0, 1)
        if self.shifted:
            v = v - self.shift
        projected = torch.bmm(v, self.v)
        packed = projected.transpose(0, 1).reshape(rows, -1)
        if not self.even:
            packed = packed[:, self.columns]
        return packed.contiguous()

    def outputs(self, o: Tensor) -> Tensor:
        """o' [T, sum of G * rank_v] -> o [T, KV heads * G, d]."""
        rows = len(o)
        lanes = len(self.lanes)
        if not self.plain:
            o = self._turned_back(o)
        heads = o.reshape(rows, lanes, self.group, self.dims)
        if not self.all_kept:
            heads = heads[:, self.sources_at]
        return heads.reshape(rows, -1, self.dims)

    def _turned_back(self, o: Tensor) -> Tensor:
        """o' -> o [T, H, G * d] of the kept lanes."""
        rows = len(o)
        lanes = len(self.lanes)
        wide = self._widened(o).reshape(rows, lanes, -1)
        by_lane = wide.transpose(0, 1)
        heads = by_lane.reshape(lanes, -1, self.widest)
        back = torch.bmm(heads, self.o)
        if self.shifted:
            back = back + self.shift
        by_row = back.reshape(lanes, rows, -1)
        return by_row.transpose(0, 1)

    def _widened(self, o: Tensor) -> Tensor:
        """Every lane at the widest rank, zeros behind its own."""
        if self.even:
            return o
        heads = len(self.lanes) * self.group
        padded = o.new_zeros(len(o), heads * self.widest)
        padded[:, self.o_columns] = o
        return padded

    def projections(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """What attention projects q and k with: [H, d, Rk] twice, and centres [H, 1,
        Rk]; None where it projects nothing."""
        if not any("q" in own for own in self.matrices):
            return None
        widest = max(lane.rank_k for lane in self.lanes)
        shape = (self.dims, widest)
        q = self._stacked("q", shape)
        k = self._stacked("k", shape)
        centres = self._stacked("centre", (1, widest))
        return q, k, centres
