"""The parts in which the CUDA kernels take the buckets of a plan (kvlathe_part of abi.h).

Rows of a step have one page table and one length a part. Lanes with different windows see
different tokens of a bucket, so each window of a bucket is a part.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvlathe.plan.plan import CompressionPlan
from kvlathe.plan.token_rules import NO_END, SEES_ALL, Window


@dataclass(frozen=True)
class KernelPart:
    """The lanes of a bucket that see alike. Their new tokens go to bucket ``fresh``, their
    full pages to bucket ``sealed`` (-1: they stay)."""

    bucket: int
    lanes: tuple[int, ...]
    window: Window
    fresh: int
    sealed: int

    @property
    def sees_less(self) -> bool:
        """Whether its lanes see less than all that came before."""
        return self.window.recent < NO_END or self.window.exact > 0


def kernel_parts(plan: CompressionPlan) -> list[KernelPart]:
    """Bucket after bucket. One without lanes, as a shard may have, is a part as well: page
    tables and lengths are by bucket."""
    windows = _windows(plan)
    sealed: dict[int, int] = {}
    for b, bucket in enumerate(plan.buckets):
        if bucket.source is not None:
            sealed |= dict.fromkeys(bucket.lanes, b)
    parts: list[KernelPart] = []
    for b, bucket in enumerate(plan.buckets):
        alike: dict[Window, list[int]] = {}
        for lane in bucket.lanes:
            window = windows.get(lane, SEES_ALL)
            alike.setdefault(window, []).append(lane)
        if not alike:
            alike[SEES_ALL] = []
        for window, lanes in alike.items():
            fresh = b
            cold = max((sealed.get(lane, -1) for lane in lanes), default=-1)
            if bucket.source is not None:
                fresh = bucket.source
                cold = b
            parts.append(KernelPart(b, tuple(lanes), window, fresh, cold))
    return parts


def most_slots(plan: CompressionPlan) -> int:
    """Buckets that hold one lane, at most."""
    counts = [0] * len(plan.lanes)
    for bucket in plan.buckets:
        for lane in bucket.lanes:
            counts[lane] += 1
    return max(counts)


def most_in_a_layer(plan: CompressionPlan) -> int:
    """Buckets that hold lanes of one layer, at most."""
    buckets: dict[int, set[int]] = {}
    for b, bucket in enumerate(plan.buckets):
        for lane in bucket.lanes:
            layer = plan.lanes[lane].layer
            buckets.setdefault(layer, set()).add(b)
    return max(len(of_layer) for of_layer in buckets.values())


def _windows(plan: CompressionPlan) -> dict[int, Window]:
    """What lanes see; those that see all are left out."""
    windows: dict[int, Window] = {}
    for bucket in plan.buckets:
        if isinstance(bucket.tokens, Window):
            windows |= dict.fromkeys(bucket.lanes, bucket.tokens)
    return windows
