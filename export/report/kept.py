"""What a plan keeps of every head, as arrays [layers, KV heads]."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.plan import CompressionPlan

Array = npt.NDArray[np.floating]


@dataclass(frozen=True, slots=True)
class Kept:
    """Of every head, in a sequence of ``tokens`` tokens.

    ``ranks_*`` in dimensions, ``bits_*`` of a cached number (the mean over the head's
    tokens, metadata aside), ``share`` of the tokens.
    """

    tokens: int
    ranks_k: Array
    ranks_v: Array
    bits_k: Array
    bits_v: Array
    share: Array

    @property
    def mean_bits(self) -> float:
        """Of a cached number, over all that is cached."""
        numbers = self.share * (self.ranks_k + self.ranks_v)
        bits_k = self.ranks_k * self.bits_k
        bits_v = self.ranks_v * self.bits_v
        bits = self.share * (bits_k + bits_v)
        total = max(1.0, numbers.sum())
        return float(bits.sum() / total)

    @property
    def mean_share(self) -> float:
        """Of the tokens, over all heads that are not removed."""
        return float(self.share[self.ranks_k > 0].mean())


def kept(plan: CompressionPlan) -> Kept:
    """What every head keeps of the longest sequence that the model takes."""
    layout = CacheLayout(plan)
    held_tokens = layout.all_held(layout.long)
    held = np.zeros(len(plan.lanes))
    bits_k = np.zeros(len(plan.lanes))
    bits_v = np.zeros(len(plan.lanes))
    for bucket, tokens in zip(plan.index.buckets, held_tokens, strict=True):
        lanes = list(bucket.lanes)
        held[lanes] += tokens
        bits_k[lanes] += tokens * bucket.tier.k.bits
        bits_v[lanes] += tokens * bucket.tier.v.bits
    at_least_one = np.maximum(held, 1)
    ranks_k = np.array([lane.rank_k for lane in plan.lanes], float)
    ranks_v = np.array([lane.rank_v for lane in plan.lanes], float)
    shape = (plan.model.layers, plan.model.kv_heads)
    return Kept(
        tokens=layout.long,
        ranks_k=ranks_k.reshape(shape),
        ranks_v=ranks_v.reshape(shape),
        bits_k=(bits_k / at_least_one).reshape(shape),
        bits_v=(bits_v / at_least_one).reshape(shape),
        share=(held / layout.long).reshape(shape),
    )
