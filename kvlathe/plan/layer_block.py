"""One layer's portion of every bucket's page, for hosts whose pages are of one layer.

A host such as vLLM has one block table for all heads of all layers, and blocks of equal
bytes in each layer. Its block then holds, of P tokens of a layer, what pages of our
buckets hold of that layer, bucket after bucket. Full pages are in it. Pages that will
be sealed are not: 16-bit rows of the newest tokens lie in hot pages beside the blocks.

    block     bucket, bucket, ...   those from which no tokens go on
    hot page  bucket, ...           hot ones whose full pages are sealed
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvlathe.plan.formats import ALIGN
from kvlathe.plan.groups import Group
from kvlathe.plan.layer_table import BUCKET_FORM, LANE_FORM, TABLE_HEADER, layer_table
from kvlathe.plan.layout import TABLE_COLUMNS, CacheLayout
from kvlathe.plan.lives import KEEP, SEAL
from kvlathe.plan.plan import CompressionPlan

Int32 = npt.NDArray[np.int32]
OFFSETS = slice(TABLE_COLUMNS.index("k"), TABLE_COLUMNS.index("v_meta") + 1)
"""Columns of a lane table that count bytes from a page's start."""


def bare(plan: CompressionPlan, projected: Collection[int]) -> CompressionPlan:
    """The plan where q and k reach attention whole and after RoPE: lanes of which the
    indices are in ``projected`` are projected, the others are cached as they come."""
    lanes = []
    for i, lane in enumerate(plan.lanes):
        width = plan.model.head_dim
        lanes.append(
            dataclasses.replace(
                lane, input_dim=width, rope="none", planes=(), projected=i in projected
            )
        )
    return dataclasses.replace(plan, lanes=tuple(lanes))


def newest(plan: CompressionPlan, layer: int) -> int | None:
    """The newest tokens that blocks of ``layer`` hold, the one that is computed
    included; None: all of them, since some head sees all or the first ones, and one
    block has all heads."""
    sights = [
        plan.index.sight(plan.index.number(layer, lane.head))
        for lane in plan.index.active(layer)
    ]
    if any(sight.sink or not sight.is_less for sight in sights):
        return None
    own = plan.page_tokens
    return max(sight.exact or sight.recent + own for sight in sights)


def as_held(plan: CompressionPlan) -> CompressionPlan:
    """The plan as blocks count it: where ``newest`` says so, all tokens stay, whatever
    heads see of them."""
    groups: list[Group] = []
    for group in plan.groups:
        whole = tuple(
            lane
            for lane in group.lanes
            if group.life.sees.is_less and newest(plan, plan.lanes[lane].layer) is None
        )
        rest = tuple(lane for lane in group.lanes if lane not in whole)
        if rest:
            groups.append(dataclasses.replace(group, lanes=rest))
        if whole:
            life = SEAL if group.cold else KEEP
            groups.append(dataclasses.replace(group, lanes=whole, life=life))
    return dataclasses.replace(plan, groups=tuple(groups))


def held_layout(plan: CompressionPlan, hosted: bool) -> CacheLayout:
    """The pages that sequences hold where an engine runs: all that people are told of
    bytes is counted by it. ``hosted``: whether a host's blocks hold them."""
    return CacheLayout(as_held(plan) if hosted else plan)


def host_warning(plan: CompressionPlan, hosted: bool) -> str:
    """Where ``held_layout`` counts blocks as freed that a host keeps on a GPU; else
    empty."""
    if not hosted or not held_layout(plan, hosted).bounded:
        return ""
    return (
        "bytes a token are those of vLLM on a CPU: on a GPU it frees no blocks behind a "
        "window, and all tokens take memory"
    )


@dataclass(frozen=True)
class LayerBlock:
    """The block of ``layer`` of a plan, whose ``layout`` all layers share. Bytes count
    all padding."""

    layout: CacheLayout
    layer: int

    @property
    def plan(self) -> CompressionPlan:
        return self.layout.plan

    @cached_property
    def _stay(self) -> tuple[bool, ...]:
        """Whether blocks hold the pages of each bucket."""
        return tuple(bucket.stays for bucket in self.plan.index.buckets)

    @cached_property
    def _portions(self) -> tuple[tuple[int, int], ...]:
        """The place in each bucket's page where the layer's lanes begin, and their
        bytes."""
        layout = self.layout
        portions: list[tuple[int, int]] = []
        for b in range(len(self._stay)):
            first = 0
            total = 0
            for lane, size in layout.lane_bytes(b).items():
                if self.plan.lanes[lane].layer != self.layer:
                    continue
                if not total:
                    first = layout.lane_offsets(b, lane).k
                total += size
            portions.append((first, total))
        return tuple(portions)

    @cached_property
    def bases(self) -> tuple[int, ...]:
        """The place where each bucket's portion begins, in bytes from a block's or a
        hot page's start."""
        ends = {True: 0, False: 0}
        bases: list[int] = []
        for blocked, (_, size) in zip(self._stay, self._portions, strict=True):
            bases.append(ends[blocked])
            ends[blocked] += size
        return tuple(bases)

    def _bytes(self, blocked: bool) -> int:
        total = 0
        for held, portion in zip(self._stay, self._portions, strict=True):
            _, size = portion
            if held == blocked:
                total += size
        return total

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in a block: whole ones, as hosts count them."""
        step = math.lcm(ALIGN, self.plan.page_tokens)
        blocks = -(-self._bytes(True) // step)
        return blocks * step // self.plan.page_tokens

    @property
    def hot_bytes(self) -> int:
        """Bytes of a hot page; 0 where nothing is sealed."""
        return self._bytes(False)

    def rows(self, bucket: int) -> Int32:
        """[lanes of the layer there, TABLE_COLUMNS]: the bucket's lane table, counted
        from a block's or a hot page's start."""
        table = self.layout.lane_table(bucket)
        own = table[table[:, 0] == self.layer]
        first, _ = self._portions[bucket]
        own[:, OFFSETS] += self.bases[bucket] - first
        return np.ascontiguousarray(own)

    def table(self, block_stride: int, hot_stride: int) -> Int32:
        """The layer table (kvlathe/plan/layer_table.py) of such pages. Strides: bytes
        from a block, or a hot page, to the next."""
        table = layer_table(self.layout, self.layer)
        lanes = len(self.plan.index.active(self.layer))
        at = len(TABLE_HEADER) + lanes * len(LANE_FORM)
        stride_at = BUCKET_FORM.index("page_stride")
        rows_at = BUCKET_FORM.index("lanes_at")
        for bucket, held in enumerate(self._stay):
            form = table[at : at + len(BUCKET_FORM)]
            form[stride_at] = block_stride if held else hot_stride
            rows = self.rows(bucket).reshape(-1)
            first = form[rows_at]
            table[first : first + len(rows)] = rows
            at += len(BUCKET_FORM)
        return table
