"""CacheLayout: every byte offset of the paged cache, computed from a plan. Python and C++ read the same table.

    arena | page 0 | page 1 | ...                      a page is one contiguous range: one memcpy moves it
    page  | layer 0: lane, lane, ... | layer 1: ... |  P tokens of every lane of the bucket, all layers
          | scores |                                   where the bucket's tokens are ranked (CompressionPlan.scored)
    lane  | K | K metadata | V | V metadata |          each part 128-byte aligned; ranks are never padded

    address = base + page_id * page_stride[bucket] + slab.k          (layer and lane offsets are already in the slab)

16 and 32 bit: K and V are [token][rank]. Quantized K: [token][rank] (groups along the rank) or [rank][token] (groups
along the page's tokens), packed; likewise V. Metadata: one (scale, minimum) pair of IEEE halves for each group; then,
128-byte aligned, the sum of each group's codes where the tier stores it, little-endian in ``sum_bytes``. Scores, after
all lanes: float32 mass [lanes of the bucket, P], then int32 position of each token likewise, where the plan keeps it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvlathe.export.plan import CompressionPlan, Lane, Tier, split_tokens

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


def sum_bytes(bits: int, group: int) -> int:
    """Bytes that hold the sum of ``group`` codes of ``bits`` bits."""
    return -(-(bits + math.ceil(math.log2(group))) // 8)


def coded_bytes(rank: int, tokens: int, bits: int, axis: str, group: int) -> int:
    """Bytes of one lane's quantized K or V in a page of ``tokens`` tokens: codes and metadata, aligned; no sums."""
    return aligned(rank * tokens * bits // 8) + aligned(group_count(rank, tokens, axis, group) * META_BYTES)


@dataclass(frozen=True, slots=True)
class Slab:
    """Byte offsets of one lane from its page's start. Metadata of an unquantized part has an offset and no bytes."""

    k: int
    k_meta: int
    v: int
    v_meta: int
    groups_k: int
    groups_v: int

    @property
    def k_sums(self) -> int:
        """Where sums of K's codes begin, in tiers that store them; ``v_sums`` likewise."""
        return self.k_meta + aligned(self.groups_k * META_BYTES)

    @property
    def v_sums(self) -> int:
        return self.v_meta + aligned(self.groups_v * META_BYTES)


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
            v = k_meta + self._meta_bytes(groups_k, tier, tier.bits_k, tier.group_k)
            v_meta = v + aligned(lane.rank_v * self.plan.page_tokens * tier.bits_v // 8)
            at = v_meta + self._meta_bytes(groups_v, tier, tier.bits_v, tier.group_v)
            slabs[index] = Slab(k, k_meta, v, v_meta, groups_k, groups_v)
        return slabs, at

    def _meta_bytes(self, groups: int, tier: Tier, bits: int, group: int) -> int:
        sums = aligned(groups * sum_bytes(bits, group)) if tier.sums else 0
        return aligned(groups * META_BYTES) + sums

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
        return tuple(size + self._score_bytes(b) for b, (_, size) in enumerate(self._placed))

    def scores_at(self, bucket: int) -> int:
        """Where the scores of a bucket begin, in bytes from its page's start."""
        return self._placed[bucket][1]

    def _score_bytes(self, bucket: int) -> int:
        """Of a page: what ranking its tokens needs is kept with them, and counted."""
        if not self.plan.scored(bucket):
            return 0
        fields = 8 if self.plan.keeps_positions else 4
        return aligned(fields * len(self.plan.buckets[bucket].lanes) * self.plan.page_tokens)

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
        return self.bytes_for(self.long, sealed=True) / self.long

    @property
    def long(self) -> int:
        """Tokens of the sequence that ``bytes_per_token`` is of: very many or, where there is a budget, the most."""
        return self.plan.model.max_positions if self.bounded else 1 << 20

    @property
    def bounded(self) -> bool:
        """Whether a token costs less, the longer its sequence is."""
        return any(bucket.tokens.kind == "budget" for bucket in self.plan.buckets)

    def described(self) -> list[tuple[int, str, str, int, int, str]]:
        """For people, of each bucket: its number, number format, layers, lanes, bytes of a page, which tokens."""
        rows = []
        for i, bucket in enumerate(self.plan.buckets):
            tier, rule = self.plan.tiers[bucket.tier], bucket.tokens
            bits = f"{tier.bits_k} bit" if tier.bits_k == tier.bits_v else f"K {tier.bits_k} bit, V {tier.bits_v} bit"
            layers = sorted({self.plan.lanes[lane].layer for lane in bucket.lanes})
            where = f"{layers[0]} to {layers[-1]}" if layers[1:] else str(layers[0])
            tokens = {"all": "all", "share": f"{rule.share:.0%} by saliency", "budget": f"{rule.budget:,}"}[rule.kind]
            if self.plan.cold(i):
                tokens = "until they are sealed"
            rows.append((i, bits, where, len(bucket.lanes), self.page_stride[i], tokens))
        return rows

    def bytes_for(self, tokens: int, sealed: bool = False) -> int:
        """Bytes of all pages that hold a sequence of ``tokens`` tokens (a decode in progress: hot tail included).

        With ``sealed`` the hot pages of a plan that seals are not counted (the limit of a long sequence).
        """
        p, total = self.plan.page_tokens, 0
        for b, stride in enumerate(self.page_stride):
            if not (sealed and self.plan.cold(b)):
                total += -(-self.held(b, tokens) // p) * stride
        return total

    def prompt_bytes(self, tokens: int) -> int:
        """Bytes of all pages that hold a prompt of ``tokens`` tokens before any of them is sealed or dropped."""
        fresh = (stride for b, stride in enumerate(self.page_stride) if self.plan.buckets[b].source is None)
        return -(-tokens // self.plan.page_tokens) * sum(fresh)

    def held(self, bucket: int, tokens: int) -> int:
        """Tokens that a bucket holds once ``tokens`` have reached it and the prompt has ended (TokenRule)."""
        whole = tokens // self.plan.page_tokens * self.plan.page_tokens
        rule, cold = self.plan.buckets[bucket].tokens, self.plan.cold(bucket)
        if self.plan.buckets[bucket].source is not None:
            return self._sealed(bucket, tokens) if rule.kind == "share" else min(whole, rule.budget or whole)
        if rule.kind == "budget":
            return min(whole, rule.budget) + tokens - whole
        if cold and self.plan.buckets[cold[0]].tokens.kind == "share":
            return tokens - sum(self._sealed(c, tokens) for c in cold)
        return tokens - whole if cold else tokens

    def _sealed(self, bucket: int, tokens: int) -> int:
        """Tokens in the full pages of a bucket that has a share of them."""
        source = self.plan.buckets[bucket].source
        assert source is not None
        count = self.shares(source, tokens)[self.plan.cold(source).index(bucket)]
        return count // self.plan.page_tokens * self.plan.page_tokens

    def shares(self, fresh: int, tokens: int) -> tuple[int, ...]:
        """How ``tokens`` tokens are divided among the cold buckets of a fresh one, where they have shares."""
        return split_tokens([self.plan.buckets[c].tokens.share for c in self.plan.cold(fresh)], tokens)

    def settles_at(self, fresh: int, tokens: int) -> bool:
        """Whether tokens of a fresh bucket or its cold ones can move when its ``tokens``-th token is cached."""
        moved = any(self.held(c, tokens) != self.held(c, tokens - 1) for c in self.plan.cold(fresh))
        return moved or tokens % self.plan.page_tokens == 0


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


TABLE_VERSION = 1
TABLE_HEADER = (
    "version", "layer", "page_tokens", "group_size", "lanes", "buckets", "planes", "projected", "rope", "hot_bits",
    "input_dim", "rank_k", "pools",
)  # fmt: skip
LANE_FORM = ("head", "input_dim", "rope", "planes_at", "projected", "rank_k", "rank_v", "fresh")
BUCKET_FORM = (
    "bits_k", "bits_v", "axis_k", "axis_v", "group_k", "group_v", "page_stride", "fresh", "lane_count", "lanes_at",
)  # fmt: skip


def layer_table(plan: CompressionPlan, layer: int) -> npt.NDArray[np.int32]:
    """One layer's whole form as one packed int32 array: the Attend input ``layout``, all that native code needs.

        TABLE_HEADER | LANE_FORM of each lane | BUCKET_FORM of each bucket | lane tables of the buckets | RoPE planes

    ``*_at`` are places in this array (``planes_at`` 0: plane i turns pair i); ``fresh`` of a lane is the bucket that
    takes its new tokens. ``rope``: whether anything turns. ``input_dim``, ``rank_k`` of the header: the widest.
    ``pools``: bits 1, 2, 4 for the views pool_f32, pool_f16, pool_u8 that the op is given. Axis 0 is rank, 1 token.
    """
    layout, lanes = CacheLayout(plan), plan.active(layer)
    tables = [layout.lane_table(b) for b in range(len(plan.buckets))]
    tables = [table[table[:, 0] == layer] for table in tables]
    tiers = [plan.tiers[bucket.tier] for bucket in plan.buckets]
    active = [lane for lane in plan.lanes if not lane.removed]
    bits = {b for tier in tiers for b in (tier.bits_k, tier.bits_v)}
    pools = (32 in bits) | (2 if min(bits) < 32 else 0) | (4 if min(bits) < 16 else 0)
    hot = next(tiers[i].bits_k for i, bucket in enumerate(plan.buckets) if bucket.source is None)
    header = (
        TABLE_VERSION, layer, plan.page_tokens, plan.model.group_size, len(lanes), len(plan.buckets),
        plan.model.head_dim // 2, plan.projected, any(lane.rope != "none" for lane in active), hot,
        max(lane.input_dim for lane in lanes), max(lane.rank_k for lane in lanes), pools,
    )  # fmt: skip
    at = len(header) + len(lanes) * len(LANE_FORM) + len(tiers) * len(BUCKET_FORM)
    forms: list[int] = []
    for b, (bucket, tier, table) in enumerate(zip(plan.buckets, tiers, tables, strict=True)):
        axes = (int(tier.axis_k == "token"), int(tier.axis_v == "token"))
        sizes = (tier.bits_k, tier.bits_v, *axes, tier.group_k, tier.group_v, layout.page_stride[b])
        forms += (*sizes, bucket.source is None, len(table), at)
        at += table.size
    planes: list[int] = []
    rows: list[int] = []
    for lane in lanes:
        index = lane.layer * plan.model.kv_heads + lane.head
        fresh = next(i for i, bucket in enumerate(plan.buckets) if bucket.source is None and index in bucket.lanes)
        where = at + len(planes) if lane.rope == "planes" else 0
        rows += (lane.head, lane.input_dim, lane.rope != "none", where, lane.projected, lane.rank_k, lane.rank_v, fresh)
        planes += lane.planes if lane.rope == "planes" else ()
    return np.concatenate([header, rows, forms, *(table.reshape(-1) for table in tables), planes]).astype(np.int32)
