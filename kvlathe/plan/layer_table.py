"""The layer table: one layer's whole form as int32 numbers, which native code reads."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvlathe.plan.formats import Tier
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.plan import CompressionPlan

POOLS = ("pool_f32", "pool_f16", "pool_u8")
"""The typed views of the cache, in the order of their bits in the table."""
TABLE_VERSION = 1
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
)
BUCKET_FORM = (
    "bits_k", "bits_v", "axis_k", "axis_v", "group_k", "group_v", "page_stride", "fresh", "lane_count", "lanes_at",
)  # fmt: skip


def format_fields(tier: Tier) -> tuple[int, int, int, int, int, int]:
    """The first six of BUCKET_FORM: what native code is told of a bucket's formats.
    Axis 0 is rank, 1 token."""
    k, v = tier.formats
    axis_k = int(k.axis == "token")
    axis_v = int(v.axis == "token")
    return k.bits, v.bits, axis_k, axis_v, k.group, v.group


def layer_table(plan: CompressionPlan, layer: int) -> npt.NDArray[np.int32]:
    """One layer's whole form as one packed int32 array: the Attend input ``layout``,
    all that native code needs.

        TABLE_HEADER | LANE_FORM of each lane | BUCKET_FORM of each bucket | lane tables of the buckets | RoPE planes

    ``*_at`` are places in this array (``planes_at`` 0: plane i turns pair i); ``fresh``
    of a lane is the bucket that takes its new tokens. ``rope``: whether anything turns.
    ``input_dim``, ``rank_k`` of the header: the widest.
    ``pools``: bits 1, 2, 4 for the views pool_f32, pool_f16, pool_u8 that the op is
    given. Axis 0 is rank, 1 token.
    """
    layout, lanes = CacheLayout(plan), plan.active(layer)
    tables = [layout.lane_table(b) for b in range(len(plan.buckets))]
    tables = [table[table[:, 0] == layer] for table in tables]
    tiers = [plan.tiers[bucket.tier] for bucket in plan.buckets]
    active = [lane for lane in plan.lanes if not lane.removed]
    views = {view for tier in tiers for form in tier.formats for view in form.pools}
    pools = sum(1 << i for i, view in enumerate(POOLS) if view in views)
    header = (
        TABLE_VERSION, layer, plan.page_tokens, plan.model.group_size, len(lanes), len(plan.buckets),
        plan.model.head_dim // 2, plan.projected, any(lane.rope != "none" for lane in active), plan.hot_bits,
        max(lane.input_dim for lane in lanes), max(lane.rank_k for lane in lanes), pools,
    )  # fmt: skip
    at = len(header) + len(lanes) * len(LANE_FORM) + len(tiers) * len(BUCKET_FORM)
    forms: list[int] = []
    for b, (bucket, tier, table) in enumerate(
        zip(plan.buckets, tiers, tables, strict=True)
    ):
        forms += (
            *format_fields(tier),
            layout.page_stride[b],
            bucket.source is None,
            len(table),
            at,
        )
        at += table.size
    planes: list[int] = []
    rows: list[int] = []
    for lane in lanes:
        index = lane.layer * plan.model.kv_heads + lane.head
        fresh = next(
            i
            for i, bucket in enumerate(plan.buckets)
            if bucket.source is None and index in bucket.lanes
        )
        where = at + len(planes) if lane.rope == "planes" else 0
        rows += (
            lane.head,
            lane.input_dim,
            lane.rope != "none",
            where,
            lane.projected,
            lane.rank_k,
            lane.rank_v,
            fresh,
        )
        planes += lane.planes if lane.rope == "planes" else ()
    return np.concatenate(
        [header, rows, forms, *(table.reshape(-1) for table in tables), planes]
    ).astype(np.int32)
