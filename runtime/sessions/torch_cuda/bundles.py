"""How many rows of one sequence decode attention takes together (KVLATHE_BUNDLES of
abi.h), and when that is faster than each row alone (docs/native.md)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.kernel_parts import kernel_parts
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.native.cuda import BUNDLES, MAX_BUNDLE, CudaLibrary
from kvlathe.runtime.native.room import check_layers
from kvlathe.runtime.sessions.gpu.step_buffer import ShortRows

MOST_BUNDLED = MAX_BUNDLE
"""Rows of a bundle at most. 1: none."""
TOKENS = 64
"""Of the pages that costs are counted in."""


@dataclass(frozen=True)
class BundleCost:
    """What bundles take more than single rows, in pages of one KV head: so many could
    one multiprocessor have read for one row more.

    ``fixed``: of a call. ``page``: of each page that is read. ``pair``: of each
    (sequence, KV head) above one a multiprocessor. ``columns``: rows times query heads
    that read pages together; what is more reads them again.
    """

    fixed: float
    page: float
    pair: float
    columns: int = 16

    def pays(self, rows: float, group_size: int, pages: float, pairs: float) -> bool:
        """``rows``: of a sequence, on the mean. ``pages``, ``pairs``: of a layer, on one
        multiprocessor."""
        passes = math.ceil(rows * group_size / self.columns)
        more = self.page * pages + self.pair * max(pairs - 1, 0)
        return (rows - passes) * pages >= self.fixed + passes * more


COSTS = {
    16: BundleCost(40, 0.2, 0, columns=8),
    8: BundleCost(80, 0.5, 0),
    4: BundleCost(80, 0.5, 50),
    2: BundleCost(150, 0.7, 25),
}
"""By the bits of codes of one width, or 16 where nothing is quantized: chosen on an H100
(tests/runtime/sessions/bundle_times.json)."""
OTHER_COST = BundleCost(80, 0.5, 0, columns=8)
"""Of all other forms. They were not timed: it is that of 8 bits, with their columns."""


def cost_of(plan: CompressionPlan) -> BundleCost:
    """Of the kernel that takes bundles of ``plan``."""
    parts = kernel_parts(plan)
    if any(part.sees_less for part in parts):
        return OTHER_COST
    tiers = [plan.tiers[bucket.tier] for bucket in plan.buckets]
    codes = {tier.bits_k for tier in tiers} | {tier.bits_v for tier in tiers}
    codes.discard(16)
    if not codes:
        return COSTS[16]
    plain = all(
        (tier.axis_k, tier.axis_v) == ("rank", "token")
        and tier.levels_k == tier.levels_v == "even"
        for tier in tiers
    )
    if plain and len(codes) == 1 and len(parts) <= 2:
        return COSTS.get(codes.pop(), OTHER_COST)
    return OTHER_COST


def pays(
    cost: BundleCost, plan: CompressionPlan, short: ShortRows, multiprocessors: int
) -> bool:
    """Whether bundles are faster in a step that brings ``short``."""
    if not short.sequences:
        return False
    tokens = sum(
        cached * len(bucket.lanes)
        for cached, bucket in zip(short.cached, plan.buckets, strict=True)
    )
    pages = tokens / TOKENS / plan.model.layers / multiprocessors
    pairs = short.sequences * plan.model.kv_heads / multiprocessors
    return cost.pays(short.each, plan.model.group_size, pages, pairs)


def multiprocessors(device: torch.device) -> int:
    """Of the GPU; 1 where the kernels run on a CPU."""
    if device.type == "cpu":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def most_bundled(library: CudaLibrary, plan: CompressionPlan) -> int:
    """Rows of a sequence that are attended together: 1 in models of more query heads than
    the kernels have room for, and where the GPU has too little shared memory."""
    if MOST_BUNDLED == 1:
        return 1
    try:
        check_layers(library, plan, BUNDLES)
    except KvlatheError:
        return 1
    return MOST_BUNDLED
