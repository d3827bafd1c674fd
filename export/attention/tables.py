"""The index arrays that Attend needs: where each lane's data lies in packed rows and in
the cache's pages.

The eager op and the ONNX function gather by the same arrays, so one place knows the
addresses. A *unit* is ``plan.index.unit`` elements: what one gather moves. A lane narrower
than the widest of its layer repeats its first unit (or code) of the same token, which
is finite: padded K columns meet zero columns of q', padded V columns are dropped when o
is packed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvlathe.export.attention.windows import window_tables
from kvlathe.plan.codec import Places, element_places
from kvlathe.plan.formats import Format, Tier
from kvlathe.plan.heads import Lane
from kvlathe.plan.layer_table import POOLS, layer_table
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.packing import BLOCK, lane_pieces
from kvlathe.plan.plan import CompressionPlan

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True)
class PlanFacts:
    """Plan-wide facts that specialise Attend; everything that differs between layers is
    an array (see LayerTables)."""

    plan: CompressionPlan

    @cached_property
    def _active(self) -> tuple[Lane, ...]:
        return tuple(lane for lane in self.plan.lanes if not lane.removed)

    @cached_property
    def even(self) -> bool:
        """All lanes have one input width, one kind of RoPE and equally many queries:
        packed q and k are reshaped, not gathered."""
        input_dims = {lane.input_dim for lane in self._active}
        ropes = {lane.rope for lane in self._active}
        if len({self.plan.model.group(lane.layer) for lane in self._active}) > 1:
            return False
        return len(input_dims) == len(ropes) == 1 and "planes" not in ropes

    @cached_property
    def rope(self) -> bool:
        return any(lane.rope != "none" for lane in self._active)

    @cached_property
    def grain(self) -> int:
        """Elements that the gather of uneven inputs moves at once: divides every
        rotated half and every plain width."""
        widths = (
            lane.input_dim // (1 if lane.rope == "none" else 2) for lane in self._active
        )
        return math.gcd(self.plan.index.unit, *widths)

    @cached_property
    def shared(self) -> bool:
        """Every bucket holds every lane."""
        return all(
            len(bucket.lanes) == len(self._active) for bucket in self.plan.index.buckets
        )

    @cached_property
    def hot_bits(self) -> tuple[int, int]:
        """Bits in which fresh K and V are rounded and stored."""
        tier = self.plan.index.hot_tier
        return tier.k.bits, tier.v.bits

    def tier(self, bucket: int) -> Tier:
        return self.plan.index.buckets[bucket].tier

    def integer(self, bucket: int) -> tuple[bool, bool]:
        """Whether K and V of a bucket are multiplied as codes."""
        tier = self.tier(bucket)
        exact = tier.arithmetic == "int"
        return exact and tier.k.is_coded, exact and tier.v.is_coded

    def format(self, bucket: int, x: str) -> Format:
        """The format of K or V ("k" or "v") in a bucket."""
        return self.tier(bucket).of(x)

    def together(self, form: Format) -> int:
        """Codes that one gather moves: of a token, or of a channel in a page."""
        page = self.plan.page_tokens
        if form.along_rank:
            return self.plan.index.unit
        if form.runs == 1:
            return page
        return math.gcd(page, BLOCK)

    def piece(self, form: Format) -> int:
        """Bytes that they have in one run."""
        return self.together(form) // form.together

    def steps(self, bucket: int, x: str) -> int:
        """Tokens from one place of metadata to the next: 1, or what divides all groups
        that run along the tokens."""
        form = self.format(bucket, x)
        return math.gcd(self.plan.page_tokens, form.group) if form.along_tokens else 1

    @cached_property
    def pools(self) -> tuple[str, ...]:
        """The typed views of the cache that the plan's tiers need (quantization
        metadata is read as halves)."""
        names: set[str] = set()
        for tier in self.plan.index.tiers:
            for form in tier.formats:
                names |= form.pools
        return tuple(name for name in POOLS if name in names)


class LayerTables(dict[str, Int32]):
    """The arrays of one layer by node input name, in node order, and the layer's sizes.

    H lanes, G query heads a lane, D the widest input, Rk/Rv the widest ranks, W the
    width of unpacked inputs (D before a projection, else Rk), P tokens a page, g the
    grain, u the unit; Hs lanes of this layer in bucket s (at least one row: a bucket
    without a lane here reads its page's start and nobody looks).
        q_columns [H, G, W/g], k_columns [H, 1, W/g]     grains of the packed input; its width/g stands for zeros
        q_partners, k_partners                           the same for the other half of each RoPE pair
        cos_columns [H, 1, W], sin_columns [H, 1, W]     columns of [cos, 1] and of [-sin, sin, 0]
        v_units [H, Rv/u]                                units of packed v
        row_units [(sum rank_k)/u], o_units              units of [H, Rk] (of [H, G, Rv]) that packing keeps; where
                                                         V is in K in some layers alone, of [H, Rk] and packed v
        lanes_s [Hs], places_s [H]                       bucket s: its lanes; each lane's place there (-1: absent)
        k_units_s [Hs, 1, 1, 1, Rk/u], v_units_s         unit rows of token 0 from the page's start, 16 and 32 bit
        k_steps_s [Hs, 1, 1, 1, 1], v_steps_s            unit rows from one token to the next
        k_codes_s [Hs*C], k_meta_s [Hs*E] (and v)        rows of u bytes of the codes, of u halves of the metadata
    groups along the rank, g of them in the widest:
        k_code_at_s [Hs, 1, P, Rk/u * runs]              bytes of u codes, in pieces of one byte run each (Format.runs)
        k_meta_at_s [Hs, 1, P, g], k_groups_s [Hs, g, Rk]    each group's scale; 1 where a channel belongs to a group
    groups along the tokens, whose borders are multiples of n = PlanFacts.steps:
        k_code_at_s [Hs, 1, 1, Rk * units * runs]        bytes of each channel's P codes, likewise
        k_meta_at_s [Hs, 1, P/n, Rk]                     the scale of the group of every n-th token
        k_sums_s [Hs*F], k_sums_at_s (and v)             stored sums: rows of u bytes; each group's first byte
    where the plan has windows:
        window_buckets, window_sealed [H, S]             1 where a bucket, a cold bucket, holds the lane
        window_sink, window_recent, window_exact [H, 1]  its window; exact: very many where only whole pages count
        layout [n]                                       all of this for native code (layer_table.py), always last
    """

    def __init__(self, plan: CompressionPlan, layer: int) -> None:
        super().__init__()
        self.plan, self.layer, self.facts, self.layout = (
            plan,
            layer,
            PlanFacts(plan),
            CacheLayout(plan),
        )
        self.lanes = plan.index.active(layer)
        self.H, self.G = len(self.lanes), plan.model.group(layer)
        self.D = max(lane.input_dim for lane in self.lanes)
        self.Rk = max(lane.rank_k for lane in self.lanes)
        self.Rv = max(lane.rank_v for lane in self.lanes)
        self.W = self.D if plan.index.projected else self.Rk
        if not self.facts.even:
            self._inputs()
        self._packing()
        for bucket in range(len(plan.index.buckets)):
            self._bucket(bucket)
        if plan.index.sees_less:
            for name, values in window_tables(plan, layer).items():
                self._put(name, values)
        self._put("layout", layer_table(self.layout, layer))

    def _put(self, name: str, values: npt.ArrayLike) -> None:
        self[name] = np.ascontiguousarray(values, np.int32)

    # -- packed rows -------------------------------------------------------------------
    def _inputs(self) -> None:
        """Unpacking of lanes with different widths or RoPE."""
        g, width = self.facts.grain, self.W
        for name, heads in (("q", self.G), ("k", 1)):
            total = heads * sum(lane.input_dim for lane in self.lanes)
            columns = np.full((self.H, heads, width), total)
            partners = columns.copy()
            start = 0
            for h, lane in enumerate(self.lanes):
                for i in range(heads):
                    columns[h, i, : lane.input_dim] = start + np.arange(lane.input_dim)
                    if lane.rope != "none":
                        partners[h, i, : lane.input_dim] = start + np.roll(
                            np.arange(lane.input_dim), lane.input_dim // 2
                        )
                    start += lane.input_dim
            self._put(f"{name}_columns", columns[..., ::g] // g)
            if self.facts.rope:
                self._put(f"{name}_partners", partners[..., ::g] // g)
        if self.facts.rope:
            self._rope_columns()

    def _rope_columns(self) -> None:
        count = self.planes
        cos, sin = (
            np.full((self.H, self.W), count),
            np.full((self.H, self.W), 2 * count),
        )
        for h, lane in enumerate(self.lanes):
            if lane.rope != "none":
                planes = np.array(
                    lane.planes if lane.rope == "planes" else range(lane.input_dim // 2)
                )
                cos[h, : lane.input_dim] = np.concatenate([planes, planes])
                sin[h, : lane.input_dim] = np.concatenate([planes, planes + count])
        self._put("cos_columns", cos[:, None])
        self._put("sin_columns", sin[:, None])

    @property
    def planes(self) -> int:
        """Columns of cos and sin."""
        return self.plan.model.heads(self.layer).head_dim // 2

    def _packing(self) -> None:
        u, g = self.plan.index.unit, self.G
        ranks_k = np.array([lane.rank_k // u for lane in self.lanes])
        ranks_v = np.array([lane.rank_v // u for lane in self.lanes])
        self._put(
            "v_units", _padded(np.cumsum(ranks_v) - ranks_v, ranks_v, self.Rv // u)
        )
        of_k = _kept(ranks_k, self.Rk // u)
        if self.plan.index.some_in_keys:  # K and V of rows are gathered together
            apart = 0 if self.lanes[0].values_in_keys else int(ranks_v.sum())
            of_k = np.concatenate([of_k, self.H * self.Rk // u + np.arange(apart)])
        self._put("row_units", of_k)
        self._put("o_units", _kept(np.repeat(ranks_v, g), self.Rv // u))

    # -- pages -------------------------------------------------------------------------
    def _bucket(self, bucket: int) -> None:
        first = self.plan.index.number(self.layer, 0)
        held = [
            h
            for h, lane in enumerate(self.lanes)
            if first + lane.head in self.plan.index.buckets[bucket].lanes
        ]
        if not self.facts.shared:
            places = np.full(self.H, -1)
            places[held] = np.arange(len(held))
            self._put(f"lanes_{bucket}", held or [0])
            self._put(f"places_{bucket}", places)
        lanes = [self.lanes[h] for h in held]
        offsets_of = [
            self.layout.lane_offsets(bucket, first + lane.head) for lane in lanes
        ]
        tier = self.facts.tier(bucket)
        for x, widest in (("k", self.Rk), ("v", self.Rv)):
            form, name = tier.of(x), f"{x}_%s_{bucket}"
            ranks, rows, at, metas = (
                [getattr(lane, f"rank_{x}") for lane in lanes],
                [lane.row(x) for lane in lanes],
                [getattr(offsets, x) for offsets in offsets_of],
                [getattr(offsets, f"{x}_meta") for offsets in offsets_of],
            )
            if not form.is_coded:
                self._units(name, ranks, rows, widest, at, form.bits)
                continue
            # a bucket without a lane here reads something of its page, which nobody
            # looks at
            nobody = [self.plan.index.unit]
            ranks, rows = ranks or nobody, rows or nobody
            self._codes(name, widest, at or [0], form, ranks, rows)
            groups = [
                element_places(form, row, self.plan.page_tokens)[1][:, :rank]
                for rank, row in zip(ranks, rows, strict=True)
            ]
            if form.along_rank:
                self._groups(name, widest, [numbers[0] for numbers in groups])
                groups = [_once(numbers) for numbers in groups]
                widest = max(numbers.shape[1] for numbers in groups)
            else:
                groups = [numbers[:: self.facts.steps(bucket, x)] for numbers in groups]
            self._metas(name, widest, metas or [0], groups, form.halves)
            if form.sums:
                sums = [getattr(offsets, f"{x}_sums") for offsets in offsets_of] or [0]
                self._numbered(name, "sums", widest, sums, groups, form.sum_bytes)

    def _units(
        self,
        name: str,
        ranks: list[int],
        rows: list[int],
        widest: int,
        offsets: list[int],
        bits: int,
    ) -> None:
        """Units of the first ``ranks`` of so many numbers in the lanes' ``rows``."""
        u = self.plan.index.unit
        counts, steps = (np.array(x or [0]) // u for x in (ranks, rows))
        first = np.array(offsets or [0]) * 8 // bits // u
        self._put(
            name % "units", _padded(first, counts, widest // u)[:, None, None, None]
        )
        self._put(name % "steps", steps[:, None, None, None, None])

    def _codes(
        self,
        name: str,
        widest: int,
        at: list[int],
        form: Format,
        ranks: list[int],
        rows: list[int],
    ) -> None:
        """Bytes of the codes of each lane, which begin ``at`` these bytes: the first
        ``ranks`` of so many in the lanes' ``rows``."""
        u, p = self.plan.index.unit, self.plan.page_tokens
        counts = [form.element_bytes(row * p) // u for row in rows]
        most = max(counts)
        self._put(name % "codes", _rows_from([x // u for x in at], counts, most))
        size = self.facts.piece(form)
        code_at: list[Places] = []
        for h, (rank, row) in enumerate(zip(ranks, rows, strict=True)):
            channels = _widened(np.arange(rank), widest)
            own = lane_pieces(form, row, p, channels, self.facts.together(form))
            code_at.append(h * most * u // size + own)
        self._put(name % "code_at", np.stack(code_at)[:, None])

    def _metas(
        self,
        name: str,
        widest: int,
        at: list[int],
        groups: list[Places],
        halves: int,
    ) -> None:
        """Metadata of each lane, by group number: [tokens or groups of them, rank or
        groups of it]."""
        self._numbered(
            name, "meta", widest, [offset // 2 for offset in at], groups, halves
        )

    def _numbered(
        self,
        name: str,
        kind: str,
        widest: int,
        at: list[int],
        groups: list[Places],
        size: int,
    ) -> None:
        """``size`` elements for each group number, in unit rows that begin ``at`` these
        elements of a page."""
        u = self.plan.index.unit
        rows = [-(-size * (int(numbers.max()) + 1) // u) for numbers in groups]
        most = max(rows)
        self._put(name % kind, _rows_from([x // u for x in at], rows, most))
        places = [
            h * most * u + size * _widened(numbers, widest)
            for h, numbers in enumerate(groups)
        ]
        self._put(name % f"{kind}_at", np.stack(places)[:, None])

    def _groups(self, name: str, widest: int, numbers: list[Places]) -> None:
        """[Hs, g, Rk] from the group number of each channel."""
        member = np.zeros(
            (len(numbers), max(int(x[-1]) + 1 for x in numbers), widest), np.int64
        )
        for h, of_channel in enumerate(numbers):
            member[h, of_channel, np.arange(len(of_channel))] = 1
        self._put(name % "groups", member)


def _once(numbers: Places) -> Places:
    """Group numbers [P, rank] of groups along the rank, each group once: [P, g]."""
    _, firsts = np.unique(numbers[0], return_index=True)
    return numbers[:, firsts]


def _widened(places: Places, widest: int) -> Places:
    """[..., n] -> [..., widest], padded by the first."""
    return places[
        ..., np.where(np.arange(widest) < places.shape[-1], np.arange(widest), 0)
    ]


def _rows_from(starts: list[int], counts: list[int], most: int) -> Places:
    """Rows of each lane, ``most`` of them: its own, then its first again."""
    row = np.arange(most)
    return np.concatenate(
        [
            start + np.where(row < n, row, 0)
            for start, n in zip(starts, counts, strict=True)
        ]
    )


def _padded(
    starts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], widest: int
) -> npt.NDArray[np.int64]:
    """Units starts[h] .. starts[h]+counts[h]-1 of each h, padded to ``widest`` by the
    first one. [len, widest]."""
    unit = np.arange(widest)[None, :]
    return starts[:, None] + np.where(unit < counts[:, None], unit, 0)


def _kept(counts: npt.NDArray[np.int64], widest: int) -> npt.NDArray[np.int64]:
    """The first counts[h] of every ``widest`` units."""
    return np.concatenate(
        [h * widest + np.arange(count) for h, count in enumerate(counts)]
    )
