"""The layer table: one layer's whole form as int32 numbers, which native code reads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvlathe.plan.formats import Tier
from kvlathe.plan.heads import Lane
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.plan import CompressionPlan

POOLS = ("pool_f32", "pool_f16", "pool_u8")
"""The typed views of the cache, in the order of their bits in the table."""
TABLE_VERSION = 3
TABLE_HEADER = (
    "version", "layer", "page_tokens", "group_size", "lanes", "buckets", "planes", "projected", "rope", "hot_bits",
    "input_dim", "rank_k", "pools",
)  # fmt: skip
LANE_FORM = (
    "head",
    "input_dim",
    "rope",
    "planes_at",
    "projected",
    "rank_k",
    "rank_v",
    "fresh",
    "sink",
    "recent",
    "exact",
)
BUCKET_FORM = (
    "bits_k", "bits_v", "axis_k", "axis_v", "group_k", "group_v", "page_stride", "fresh", "lane_count", "lanes_at",
)  # fmt: skip


def format_fields(tier: Tier) -> tuple[int, int, int, int, int, int]:
    """The first six of BUCKET_FORM: what native code is told of a bucket's formats."""
    k, v = tier.formats
    return k.bits, v.bits, k.axis_number, v.axis_number, k.group, v.group


def layer_table(layout: CacheLayout, layer: int) -> npt.NDArray[np.int32]:
    """One layer's whole form as one packed int32 array: the Attend input ``layout``,
    all that native code needs. A plan's ``layout`` is best made once for all its layers.

        TABLE_HEADER | LANE_FORM of each lane | BUCKET_FORM of each bucket | lane tables of the buckets | RoPE planes

    ``*_at`` are places in this array (``planes_at`` 0: plane i turns pair i); ``fresh``
    of a lane is its hot bucket; ``sink``, ``recent``, ``exact``
    say what it sees (sight.Sight). Where V is a part of K, both have one place. ``rope``: whether anything turns.
    ``input_dim``, ``rank_k`` of the header: the widest.
    ``pools``: bits 1, 2, 4 for the views pool_f32, pool_f16, pool_u8 that the op is
    given.
    """
    plan = layout.plan
    lanes = plan.index.active(layer)
    tables = _lane_tables(layout, layer)
    header = _header(plan, layer)
    lanes_end = len(header) + len(lanes) * len(LANE_FORM)
    tables_at = lanes_end + len(tables) * len(BUCKET_FORM)
    planes_at = tables_at + sum(table.size for table in tables)
    rows, planes = _lane_forms(plan, lanes, planes_at)
    forms = _bucket_forms(layout, tables, tables_at)
    flat = [table.reshape(-1) for table in tables]
    return np.concatenate([header, rows, forms, *flat, planes]).astype(np.int32)


def _lane_tables(layout: CacheLayout, layer: int) -> list[npt.NDArray[np.int32]]:
    """The rows of each bucket's lane table that are of this layer."""
    tables = map(layout.lane_table, range(len(layout.plan.index.buckets)))
    return [table[table[:, 0] == layer] for table in tables]


def _header(plan: CompressionPlan, layer: int) -> tuple[int, ...]:
    """TABLE_HEADER of a layer."""
    lanes = plan.index.active(layer)
    turns = any(lane.rope != "none" for lane in plan.lanes if not lane.removed)
    tiers = [bucket.tier for bucket in plan.index.buckets]
    views = {view for tier in tiers for form in tier.formats for view in form.pools}
    pools = sum(1 << i for i, view in enumerate(POOLS) if view in views)
    widest_input = max(lane.input_dim for lane in lanes)
    widest_k = max(lane.rank_k for lane in lanes)
    return (
        TABLE_VERSION, layer, plan.page_tokens, plan.model.group(layer), len(lanes), len(plan.index.buckets),
        plan.model.heads(layer).head_dim // 2, plan.index.projected, turns, plan.index.hot_bits, widest_input, widest_k,
        pools,
    )  # fmt: skip


def _bucket_forms(
    layout: CacheLayout, tables: Sequence[npt.NDArray[np.int32]], at: int
) -> list[int]:
    """BUCKET_FORM of each bucket, one after the other. The lane tables begin at
    ``at``."""
    forms: list[int] = []
    for bucket, table in zip(layout.plan.index.buckets, tables, strict=True):
        stride = layout.page_stride[bucket.number]
        forms += (*format_fields(bucket.tier), stride, bucket.is_hot, len(table), at)
        at += table.size
    return forms


def _lane_forms(
    plan: CompressionPlan, lanes: Sequence[Lane], at: int
) -> tuple[list[int], list[int]]:
    """LANE_FORM of each lane, one after the other; and the planes that RoPE turns. The
    planes begin at ``at``."""
    rows: list[int] = []
    planes: list[int] = []
    for lane in lanes:
        own = lane.planes if lane.rope == "planes" else ()
        planes_at = at + len(planes) if lane.rope == "planes" else 0
        turns = lane.rope != "none"
        number = plan.index.number(lane.layer, lane.head)
        fresh = plan.index.hot_bucket[number]
        sight = plan.index.sight(number)
        rows += (lane.head, lane.input_dim, turns, planes_at)
        rows += (lane.projected, lane.rank_k, lane.rank_v, fresh)
        rows += (sight.sink, sight.recent, sight.exact)
        planes += own
    return rows, planes
