"""CacheLayout: every byte offset of the paged cache, computed from a plan. Python and
C++ read the same table.

    arena | page 0 | page 1 | ...                      a page is one contiguous range: one memcpy moves it
    page  | layer 0: lane, lane, ... | layer 1: ... |  P tokens of every lane of the bucket, all layers
          | scores |                                   where the bucket's tokens are ranked (Bucket.scored)
    lane  | K | K metadata | V | V metadata |          each part 128-byte aligned; ranks are never padded
          | K | K metadata |                           where V is the beginning of K (Lane.values_in_keys)

    address = base + page_id * page_stride[bucket] + offsets.k          (layer and lane offsets are already in them)

16 and 32 bit: K and V are [token][rank]. Quantized K: [token][rank] (groups along the
rank) or [rank][token] (groups along the page's tokens), packed; likewise V. Metadata:
one (scale, minimum) pair of IEEE halves for each group, or one half where levels are
fixed; then, 128-byte aligned, the sum
of each group's codes where the tier stores it, little-endian in ``sum_bytes``. Scores,
after all lanes: float32 mass [lanes of the bucket, P], then int32 position of each
token likewise, where the plan keeps it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvlathe.plan.formats import META_BYTES, aligned
from kvlathe.plan.index import Bucket
from kvlathe.plan.plan import CompressionPlan, ShardPlan

TABLE_COLUMNS = (
    "layer",
    "head",
    "rank_k",
    "rank_v",
    "k",
    "k_meta",
    "v",
    "v_meta",
    "groups_k",
    "groups_v",
)


@dataclass(frozen=True, slots=True)
class LaneOffsets:
    """Byte offsets of one lane from its page's start. Metadata of an unquantized part
    has an offset and no bytes."""

    k: int
    k_meta: int
    v: int
    v_meta: int
    groups_k: int
    groups_v: int

    @property
    def k_bytes(self) -> int:
        """Bytes of K, without metadata."""
        return self.k_meta - self.k

    @property
    def v_bytes(self) -> int:
        """The same of V; 0 where it is a part of K."""
        return 0 if self.v == self.k else self.v_meta - self.v

    @property
    def k_sums(self) -> int:
        """The place where sums of K's codes begin, in tiers that store them; ``v_sums``
        likewise."""
        return self.k_meta + aligned(self.groups_k * META_BYTES)

    @property
    def v_sums(self) -> int:
        return self.v_meta + aligned(self.groups_v * META_BYTES)


@dataclass(frozen=True)
class CacheLayout:
    plan: CompressionPlan

    @cached_property
    def _placed(self) -> tuple[tuple[dict[int, LaneOffsets], int], ...]:
        return tuple(self._place(bucket) for bucket in self.plan.index.buckets)

    def _place(self, bucket: Bucket) -> tuple[dict[int, LaneOffsets], int]:
        tier = bucket.tier
        p = self.plan.page_tokens
        at, offsets_of = 0, {}
        for index in bucket.lanes:
            lane = self.plan.lanes[index]
            k = at
            k_meta = k + tier.k.data_bytes(lane.rank_k, p)
            at = k_meta + tier.k.meta_bytes(lane.rank_k, p)
            groups_k = tier.k.group_count(lane.rank_k, p)
            if lane.values_in_keys:
                shared = LaneOffsets(k, k_meta, k, k_meta, groups_k, groups_k)
                offsets_of[index] = shared
                continue
            v = at
            v_meta = v + tier.v.data_bytes(lane.rank_v, p)
            at = v_meta + tier.v.meta_bytes(lane.rank_v, p)
            offsets_of[index] = LaneOffsets(
                k, k_meta, v, v_meta, groups_k, tier.v.group_count(lane.rank_v, p)
            )
        return offsets_of, at

    def lane_offsets(self, bucket: int, lane: int) -> LaneOffsets:
        """``lane`` is an index into plan.lanes."""
        return self._placed[bucket][0][lane]

    @cached_property
    def page_stride(self) -> tuple[int, ...]:
        """Bytes of a page of each bucket."""
        if isinstance(self.plan, ShardPlan) and self.plan.strides:
            return self.plan.strides
        return self.filled

    @cached_property
    def filled(self) -> tuple[int, ...]:
        """Bytes of a page of each bucket that hold something: all of them, but for a
        shard that has less than another one."""
        return tuple(
            size + self._score_bytes(bucket)
            for bucket, (_, size) in zip(
                self.plan.index.buckets, self._placed, strict=True
            )
        )

    def lane_bytes(self, bucket: int) -> dict[int, int]:
        """Bytes that each lane of a bucket takes in its pages."""
        placed, end = self._placed[bucket]
        lanes = list(placed)
        borders = [offsets.k for offsets in placed.values()]
        borders.append(end)
        return {lane: borders[i + 1] - borders[i] for i, lane in enumerate(lanes)}

    def scores_at(self, bucket: int) -> int:
        """The place where the scores of a bucket begin, in bytes from its page's
        start."""
        return self._placed[bucket][1]

    def _score_bytes(self, bucket: Bucket) -> int:
        """Bytes of a page for scores: they are kept with its tokens, and counted."""
        if not bucket.scored:
            return 0
        fields = 8 if self.plan.index.keeps_positions else 4
        return aligned(fields * len(bucket.lanes) * self.plan.page_tokens)

    def lane_table(self, bucket: int) -> npt.NDArray[np.int32]:
        """[lanes of the bucket, TABLE_COLUMNS] int32: what C++ reads. Sorted by (layer,
        head)."""
        return self._lane_tables[bucket]

    @cached_property
    def _lane_tables(self) -> tuple[npt.NDArray[np.int32], ...]:
        return tuple(map(self._lane_table, self.plan.index.buckets))

    def _lane_table(self, bucket: Bucket) -> npt.NDArray[np.int32]:
        rows = []
        for index in bucket.lanes:
            lane, s = self.plan.lanes[index], self.lane_offsets(bucket.number, index)
            rows.append(
                (
                    lane.layer,
                    lane.head,
                    lane.rank_k,
                    lane.rank_v,
                    s.k,
                    s.k_meta,
                    s.v,
                    s.v_meta,
                    s.groups_k,
                    s.groups_v,
                )
            )
        table = np.array(rows, np.int32).reshape(-1, len(TABLE_COLUMNS))
        table.flags.writeable = False  # all who ask have the same one
        return table

    def bytes_per_token(self, longest: int | None = None) -> float:
        """Bytes one token costs once its page is full and, where the plan seals,
        sealed. All padding counted. ``longest``: as in ``long``."""
        tokens = self.long(longest)
        return self.bytes_for(tokens, sealed=True) / tokens

    def long(self, longest: int | None = None) -> int:
        """Tokens of the sequence that ``bytes_per_token`` is of: very many or, where
        tokens cost less the longer it is, the ``longest`` that is served (None: that
        the model takes)."""
        return (longest or self.plan.model.max_positions) if self.bounded else 1 << 20

    @property
    def bounded(self) -> bool:
        """Whether a token costs less, the longer its sequence is."""
        return self.plan.index.drops

    def described(self) -> list[tuple[int, str, str, int, int, str]]:
        """For people, of each bucket: its number, number format, layers, lanes, bytes
        of a page, which tokens."""
        rows = []
        for i, bucket in enumerate(self.plan.index.buckets):
            k, v = (form.words for form in bucket.tier.formats)
            layers = sorted({self.plan.lanes[lane].layer for lane in bucket.lanes})
            where = str(layers[0])
            if layers[1:]:
                where += f" to {layers[-1]}"
            rows.append(
                (
                    i,
                    k if k == v else f"K {k}, V {v}",
                    where,
                    len(bucket.lanes),
                    self.page_stride[i],
                    bucket.words,
                )
            )
        return rows

    def bytes_for(self, tokens: int, sealed: bool = False) -> int:
        """Bytes of all pages that hold a sequence of ``tokens`` tokens (a decode in
        progress: hot tail included).

        With ``sealed`` the hot pages of a plan that seals are not counted (the limit of
        a long sequence).
        """
        total = 0
        held = self.all_written(tokens)
        for bucket in self.plan.index.buckets:
            if bucket.stays or not sealed:
                pages = -(-held[bucket.number] // self.plan.page_tokens)
                total += pages * self.page_stride[bucket.number]
        return total

    def all_held(self, tokens: int) -> list[int]:
        """Tokens in each bucket once ``tokens`` have reached the hot ones and moved."""
        held = [0] * len(self.page_stride)
        for route in self.plan.index.routes:
            for bucket, count in zip(route.buckets, route.held(tokens), strict=True):
                held[bucket] = count
        return held

    def all_written(self, tokens: int) -> list[int]:
        """Tokens in pages of each bucket then: those that are held, and those of pages
        that wait."""
        found = [0] * len(self.page_stride)
        for route in self.plan.index.routes:
            for bucket, count in zip(route.buckets, route.written(tokens), strict=True):
                found[bucket] = count
        return found

    def pages_of(self, lengths: Sequence[int], arrived: Sequence[int]) -> list[int]:
        """Pages of each bucket of a sequence, from what a page table says of it: tokens
        that each bucket holds, and that have arrived there."""
        tokens = list(lengths)
        for route in self.plan.index.routes:
            hot = route.buckets[0]
            settled = arrived[hot] - lengths[hot] + route.stay_hot
            for b, count in zip(route.buckets, route.written(settled), strict=True):
                if self.plan.index.buckets[b].waits:
                    tokens[b] = count
        return [-(-count // self.plan.page_tokens) for count in tokens]
