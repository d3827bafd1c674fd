"""How many rows of one sequence decode attention takes together (KVLATHE_BUNDLES of
abi.h), and when that is faster than each row alone (docs/native.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.formats import Tier
from kvlathe.plan.index import KernelPart
from kvlathe.plan.kernel_forms import is_wide
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.native.cuda import BUNDLES, MAX_BUNDLE, CudaLibrary
from kvlathe.runtime.native.room import check_layers
from kvlathe.runtime.sessions.gpu.step_buffer import ShortRows
from kvlathe.runtime.sessions.protocols import Int32

Float64 = npt.NDArray[np.float64]

MOST_BUNDLED = MAX_BUNDLE
"""Rows of a bundle at most. 1: none."""
TOKENS = 64
"""Of a page, as costs count them: of the pages that were timed."""


@dataclass(frozen=True)
class BundleCost:
    """What bundles cost beside single rows. The unit is the time in which one
    multiprocessor attends one more row over TOKENS tokens of a KV head.

    ``fixed``: of a call. ``page``: of each page, each time that it is read. ``pair``: of
    each (sequence, KV head) above one a multiprocessor. ``columns``: rows times query
    heads that read pages together; what is more reads them again.
    """

    fixed: float
    page: float
    pair: float
    columns: int = 16

    def passes(self, rows: Int32, group_size: int) -> Int32:
        """Times [n] that the pages of sequences are read, which bring ``rows`` [n]:

            full * ceil(MAX_BUNDLE * group_size / columns)
            + ceil(rest * group_size / columns)

        with full = rows // MAX_BUNDLE and rest = rows % MAX_BUNDLE."""
        full, rest = np.divmod(rows, MAX_BUNDLE)
        of_full = -(-MAX_BUNDLE * group_size // self.columns)
        return full * of_full + -(-rest * group_size // self.columns)


COSTS = {
    16: BundleCost(40, 0.03, 0, columns=8),
    8: BundleCost(80, 0.5, 0),
    4: BundleCost(80, 0.5, 50),
    2: BundleCost(150, 0.7, 75),
}
"""By the bits of codes of one width, or 16 where nothing is quantized: chosen on an H100
(tests/runtime/sessions/torch_cuda/attention/bundle_times.json)."""
OTHER_COST = BundleCost(80, 0.5, 0, columns=8)
"""Of all other forms. They were not timed: it is that of 8 bits, with their columns."""


def cost_of(plan: CompressionPlan) -> BundleCost:
    """Of the kernel that takes bundles of most layers of ``plan``."""
    of_layer: dict[int, list[KernelPart]] = {}
    for part in plan.index.parts:
        layers = {plan.lanes[lane].layer for lane in part.lanes}
        for layer in sorted(layers):
            own = of_layer.setdefault(layer, [])
            own.append(part)
    costs: Counter[BundleCost] = Counter()
    for parts in of_layer.values():
        cost = _cost_of_layer(plan, parts)
        costs[cost] += 1
    return max(costs, key=costs.__getitem__)


def _cost_of_layer(plan: CompressionPlan, parts: Sequence[KernelPart]) -> BundleCost:
    """As `is_general` of plugins_cpp/src/cuda/decode/call_params.h decides. Where the
    two differ a step is slower than it could be, and as right."""
    if not plan.model.shifts or is_wide(plan):
        return OTHER_COST
    widths: set[int] = set()
    for part in parts:
        tier = plan.index.buckets[part.bucket].tier
        if part.sight.exact:
            return OTHER_COST
        if not tier.is_coded:
            continue
        if not _is_plain(tier):
            return OTHER_COST
        widths.add(tier.bits_k)
    most_parts = 2 if widths else 3
    if len(parts) > most_parts or len(widths) > 1:
        return OTHER_COST
    width = widths.pop() if widths else 16
    return COSTS.get(width, OTHER_COST)


def _is_plain(tier: Tier) -> bool:
    """Whether products take its codes as they are."""
    if tier.k.name != tier.v.name or not tier.k.has_minimum:
        return False
    if not (tier.k.along_rank and tier.v.along_tokens):
        return False
    group = tier.group_v
    return group >= 32 and group & (group - 1) == 0


class Bundling:
    """Decides in which steps of a plan rows of a sequence are attended together."""

    def __init__(self, plan: CompressionPlan) -> None:
        self.plan = plan
        self.cost = cost_of(plan)
        self._reads = [_reads(plan, part.lanes) for part in plan.index.parts]
        kept = [i for i, lane in enumerate(plan.lanes) if not lane.removed]
        self._lanes = _reads(plan, kept)

    def rows(self, most: int, short: ShortRows, device: torch.device) -> int:
        """Rows of a bundle, at most ``most``, in a step that brings ``short``."""
        if most > 1 and self.pays(short, multiprocessors(device)):
            return most
        return 1

    def pays(self, short: ShortRows, multiprocessors: int) -> bool:
        """Whether bundles are faster in a step that brings ``short``.

        With ``rows``, ``pages`` and ``passes`` [n] of its n sequences; ``pages`` (over all
        lanes) and ``pairs`` of a sequence and a KV head are those of one layer on one
        multiprocessor. Sums are over sequences and query heads a KV head, by which
        ``passes`` differ:

            saved = sum((rows - passes) * pages)
            price = fixed + page * sum(passes * pages)
                    + pair * max(pairs - 1, 0) * mean(passes)
            pays  = saved >= price
        """
        if not len(short.rows):
            return False
        cost = self.cost
        sms = self.plan.model.layers * multiprocessors
        every = self._lanes.total()
        pairs = len(short.rows) * every / sms
        saved, price = 0.0, cost.fixed
        for group, tokens in self._tokens(short).items():
            pages = tokens / TOKENS / sms  # [n]
            passes = cost.passes(short.rows, group)  # [n]
            saved += ((short.rows - passes) * pages).sum()
            price += cost.page * (passes * pages).sum()
            share = self._lanes[group] / every
            price += share * cost.pair * max(pairs - 1, 0) * passes.mean()
        return bool(saved >= price)

    def _tokens(self, short: ShortRows) -> dict[int, Float64]:
        """By query heads a KV head: the tokens [n] that a row of each sequence reads, in
        sum over all lanes: min(cached, sink + recent + P) in each."""
        found = {group: np.zeros(len(short.rows)) for group in self._lanes}
        for part, reads in zip(self.plan.index.parts, self._reads, strict=True):
            seen = part.sight.most + self.plan.page_tokens
            of_lane = np.minimum(short.cached[:, part.bucket], seen)  # [n]
            for group, lanes in reads.items():
                found[group] += lanes * of_lane
        return found


def _reads(plan: CompressionPlan, lanes: Sequence[int]) -> Counter[int]:
    """Count of some lanes that a step reads, by query heads a KV head. One that several
    layers read counts for each."""
    reads: Counter[int] = Counter()
    for lane in lanes:
        layer = plan.lanes[lane].layer
        reads[plan.model.group(layer)] += plan.model.readers(layer)
    return reads


def multiprocessors(device: torch.device) -> int:
    """Of the GPU; 1 where the kernels run on a CPU."""
    if device.type == "cpu":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def most_bundled(library: CudaLibrary, plan: CompressionPlan) -> int:
    """Rows of a sequence that may be attended together: 1 in models of more query heads
    than the kernels have room for, and where the GPU has too little shared memory."""
    if MOST_BUNDLED == 1:
        return 1
    try:
        check_layers(library, plan, BUNDLES)
    except KvlatheError:
        return 1
    return MOST_BUNDLED
