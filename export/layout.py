"""CacheLayout: every byte offset of the paged cache, computed from a plan. Python and C++ read the same table.

    arena | page 0 | page 1 | ...                      a page is one contiguous range: one memcpy moves it
    page  | layer 0: lane, lane, ... | layer 1: ... |  P tokens of every lane of the bucket, all layers
    lane  | K | K metadata | V | V metadata |          each part 128-byte aligned; ranks are never padded

    address = base + page_id * page_stride[bucket] + slab.k          (layer and lane offsets are already in the slab)

16 and 32 bit: K and V are [token][rank]. Quantized K: [token][rank] (groups along the rank) or [rank][token] (groups
along the page's tokens), packed; likewise V. Metadata: one (scale, minimum) pair of IEEE halves for each group.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvlathe.export.plan import CompressionPlan, Lane, Tier

ALIGN = 128
META_BYTES = 4
TABLE_COLUMNS = ("layer", "head", "rank_k", "rank_v", "k", "k_meta", "v", "v_meta", "groups_k", "groups_v")


def aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def groups_along_rank(rank: int, group: int) -> tuple[int, ...]:
    """Sizes of the quantization groups of ``rank`` channels: one, or near-equal multiples of 16 up to ``group``."""
    count = -(-rank // group)
    steps, extra = divmod(rank // 16, count)
    return tuple(16 * (steps + (i < extra)) for i in range(count))


def group_count(rank: int, tokens: int, axis: str, group: int) -> int:
    """Quantization groups of one lane's K or V in one page of ``tokens`` tokens."""
    return tokens * len(groups_along_rank(rank, group)) if axis == "rank" else rank * -(-tokens // group)


@dataclass(frozen=True, slots=True)
class Slab:
    """Byte offsets of one lane from its page's start. Metadata of an unquantized part has an offset and no bytes."""

    k: int
    k_meta: int
    v: int
    v_meta: int
    groups_k: int
    groups_v: int


@dataclass(frozen=True)
class CacheLayout:
    plan: CompressionPlan

    @cached_property
    def _placed(self) -> tuple[tuple[dict[int, Slab], int], ...]:
        return tuple(self._place(b) for b in range(len(self.plan.buckets)))

    def _place(self, bucket: int) -> tuple[dict[int, Slab], int]:
        tier = self.plan.tiers[self.plan.buckets[bucket].tier]
        at, slabs = 0, {}
        for index in sorted(self.plan.buckets[bucket].lanes):
            lane = self.plan.lanes[index]
            groups_k, groups_v = self._groups(lane, tier)
            k = at
            k_meta = k + aligned(lane.rank_k * self.plan.page_tokens * tier.bits_k // 8)
            v = k_meta + aligned(groups_k * META_BYTES)
            v_meta = v + aligned(lane.rank_v * self.plan.page_tokens * tier.bits_v // 8)
            at = v_meta + aligned(groups_v * META_BYTES)
            slabs[index] = Slab(k, k_meta, v, v_meta, groups_k, groups_v)
        return slabs, at

    def _groups(self, lane: Lane, tier: Tier) -> tuple[int, int]:
        p = self.plan.page_tokens
        k = group_count(lane.rank_k, p, tier.axis_k, tier.group_k) if tier.bits_k < 16 else 0
        v = group_count(lane.rank_v, p, tier.axis_v, tier.group_v) if tier.bits_v < 16 else 0
        return k, v

    def slab(self, bucket: int, lane: int) -> Slab:
        """``lane`` is an index into plan.lanes."""
        return self._placed[bucket][0][lane]

    @cached_property
    def page_stride(self) -> tuple[int, ...]:
        """Bytes of a page of each bucket."""
        return tuple(size for _, size in self._placed)

    def lane_table(self, bucket: int) -> npt.NDArray[np.int32]:
        """[lanes of the bucket, TABLE_COLUMNS] int32: what C++ reads. Sorted by (layer, head)."""
        rows = []
        for index in sorted(self.plan.buckets[bucket].lanes):
            lane, s = self.plan.lanes[index], self.slab(bucket, index)
            rows.append(
                (lane.layer, lane.head, lane.rank_k, lane.rank_v, s.k, s.k_meta, s.v, s.v_meta, s.groups_k, s.groups_v)
            )
        return np.array(rows, np.int32).reshape(-1, len(TABLE_COLUMNS))

    def bytes_per_token(self) -> float:
        """Bytes one token costs once its page is full and, where the plan seals, sealed. All padding counted."""
        return self.bytes_for(1 << 20, sealed=True) / (1 << 20)

    def bytes_for(self, tokens: int, sealed: bool = False) -> int:
        """Bytes of all pages that hold a sequence of ``tokens`` tokens (a decode in progress: hot tail included).

        With ``sealed`` the hot page of a plan that seals is not counted (the limit of a long sequence).
        """
        p, total = self.plan.page_tokens, 0
        for i, bucket in enumerate(self.plan.buckets):
            if bucket.source is None:
                held = tokens if not self.plan.cold(i) else (0 if sealed else tokens % p)
            elif bucket.tokens.kind == "budget":
                held = min(bucket.tokens.budget, tokens // p * p)
            else:
                held = round(tokens // p * p * bucket.tokens.share)
            total += -(-held // p) * self.page_stride[i]
        return total


Places = npt.NDArray[np.int64]


def element_places(rank: int, tokens: int, axis: str, group: int) -> tuple[Places, Places]:
    """Where element (token, channel) of a quantized K or V slab lies: its code and its group, both [tokens, rank].

    Code i of b bits is bits (i * b) % 8 and up of byte i * b // 8 (lowest bits first); the (scale, minimum) of group j
    are halves 2 j and 2 j + 1 of the metadata.
    """
    token, channel = np.arange(tokens)[:, None], np.arange(rank)[None, :]
    if axis == "rank":
        sizes = groups_along_rank(rank, group)
        of_channel = np.repeat(np.arange(len(sizes)), sizes)
        return token * rank + channel, token * len(sizes) + of_channel[None, :]
    return channel * tokens + token, channel * -(-tokens // group) + token // group
