"""How many rows of one sequence decode attention takes together (KVLATHE_BUNDLES of
abi.h), and when that is faster than each row alone (docs/native.md)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.formats import Tier
from kvlathe.plan.kernel_parts import kernel_parts
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.native.cuda import BUNDLES, MAX_BUNDLE, CudaLibrary
from kvlathe.runtime.native.room import check_layers
from kvlathe.runtime.sessions.gpu.step_buffer import ShortRows
from kvlathe.runtime.sessions.protocols import Int32

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

    def passes(self, rows: Int32, group_size: int) -> Int32:
        """How often pages of sequences that bring ``rows`` are read."""
        full, rest = np.divmod(rows, MAX_BUNDLE)
        of_full = math.ceil(MAX_BUNDLE * group_size / self.columns)
        return full * of_full - (-rest * group_size // self.columns)


COSTS = {
    16: BundleCost(40, 0.03, 0, columns=8),
    8: BundleCost(80, 0.5, 0),
    4: BundleCost(80, 0.5, 50),
    2: BundleCost(150, 0.7, 75),
}
"""By the bits of codes of one width, or 16 where nothing is quantized: chosen on an H100
(tests/runtime/sessions/bundle_times.json)."""
OTHER_COST = BundleCost(80, 0.5, 0, columns=8)
"""Of all other forms. They were not timed: it is that of 8 bits, with their columns."""


def cost_of(plan: CompressionPlan) -> BundleCost:
    """Of the kernel that takes bundles of ``plan`` (`is_general` of
    plugins_cpp/src/cuda/decode/call_params.h)."""
    parts = kernel_parts(plan)
    if not plan.model.shifts or any(part.sees_less for part in parts):
        return OTHER_COST
    tiers = [plan.tiers[bucket.tier] for bucket in plan.buckets]
    coded = [tier for tier in tiers if tier.k.is_coded or tier.v.is_coded]
    if not coded:
        return COSTS[16]
    of_layer: dict[int, set[int]] = {}
    for i, part in enumerate(parts):
        for lane in part.lanes:
            of_layer.setdefault(plan.lanes[lane].layer, set()).add(i)
    few = all(len(found) <= 2 for found in of_layer.values())
    widths = {tier.bits_k for tier in coded}
    if few and len(widths) == 1 and all(map(_is_plain, coded)):
        return COSTS.get(widths.pop(), OTHER_COST)
    return OTHER_COST


def _is_plain(tier: Tier) -> bool:
    """Whether products take its codes as they are."""
    axes, levels = (tier.axis_k, tier.axis_v), {tier.levels_k, tier.levels_v}
    whole = tier.group_v >= 32 and tier.group_v & (tier.group_v - 1) == 0
    same = tier.bits_k == tier.bits_v
    return same and whole and axes == ("rank", "token") and levels == {"even"}


def pays(
    cost: BundleCost, plan: CompressionPlan, short: ShortRows, multiprocessors: int
) -> bool:
    """Whether bundles are faster in a step that brings ``short``."""
    sequences = len(short.rows)
    if not sequences:
        return False
    layers = plan.model.layers
    lanes = np.array([len(bucket.lanes) for bucket in plan.buckets])
    kept = sum(not lane.removed for lane in plan.lanes)
    pages = short.cached @ lanes / (TOKENS * layers * multiprocessors)
    passes = cost.passes(short.rows, plan.model.group_size)
    pairs = sequences * kept / (layers * multiprocessors)
    saved = ((short.rows - passes) * pages).sum()
    more = cost.page * (passes * pages).sum()
    more += cost.pair * max(pairs - 1, 0) * passes.mean()
    return bool(saved >= cost.fixed + more)


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
