"""Random plans and steps for the laws of Attend, with a float64 reference and a cache
written byte by byte.

Nothing here uses export/attention/tables.py: addresses come from CacheLayout's lane
offsets, group by group and token by token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st

from kvlathe.export.attention.step import StepTensors
from kvlathe.plan.formats import (
    NORMAL,
    WHOLE_RANK,
    Bits,
    Format,
    Tier,
    groups_along_rank,
)
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane, ModelShape
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.lives import SEAL, Budget, Compact, Divide, Window
from kvlathe.plan.plan import CompressionPlan
from kvlathe.plan.token_score import ObservationWindow

Array = npt.NDArray[np.float64]
VIEWS = {"pool_f32": np.float32, "pool_f16": np.float16, "pool_u8": np.uint8}


def plan_of(
    lanes: list[Lane],
    groups: Sequence[Group],
    head_dim: int,
    group: int,
    page: int = 16,
) -> CompressionPlan:
    layers, heads = lanes[-1].layer + 1, lanes[-1].head + 1
    shape = ModelShape(layers, heads * group, heads, head_dim, 64, 97, 256)
    if any(lane.values_in_keys for lane in lanes):
        shape = dataclasses.replace(shape, latent=head_dim // 2)
    return CompressionPlan(
        shape,
        tuple(lanes),
        tuple(groups),
        page_tokens=page,
        prefill_chunk=page,
    )


# -- plans -----------------------------------------------------------------------------


Rope = Literal["full", "none", "planes"]
ROPES: tuple[Rope, ...] = ("full", "none", "planes")
HOT_BITS: tuple[Bits, ...] = (16, 32)


@st.composite
def plans(
    draw: st.DrawFn, arithmetic: str = "float", has_scoring: bool = True
) -> CompressionPlan:
    """Two layers of mixed lanes: ranks, planes, no RoPE, removed heads; fresh, split
    and quantized buckets."""
    head_dim, heads, group = (
        draw(st.sampled_from([16, 20, 32, 48])),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
    )
    kinds = st.one_of(st.just(ROPES), *(st.just((rope,)) for rope in ROPES))
    kind, projected = draw(kinds), draw(st.booleans())
    once = kind == ("none",) and not projected and draw(st.booleans())
    lanes = []
    for layer in range(2):
        for head in range(heads):
            if head > 0 and draw(st.integers(0, 3)) == 0:
                lanes.append(Lane(layer, head, 0, 0, 0, "none", fill_from=0))
                continue
            rope: Rope = draw(st.sampled_from(kind))
            chosen = (
                draw(st.sets(st.integers(0, head_dim // 2 - 1), min_size=1))
                if rope == "planes"
                else ()
            )
            width = 2 * len(chosen) or head_dim
            rank_k = 16 * draw(st.integers(1, 3)) if projected else -(-width // 16) * 16
            rank_v = 16 * draw(st.integers(1, rank_k // 16 if once else 3))
            lanes.append(
                Lane(
                    layer,
                    head,
                    width,
                    rank_k,
                    rank_v,
                    rope,
                    tuple(sorted(chosen)),
                    projected,
                    values_in_keys=once,
                )
            )
    hot: Bits = draw(st.sampled_from(HOT_BITS))
    groups = draw(st.sampled_from(groupings(lanes, Tier(hot, hot))))
    for i, one in enumerate(groups):
        if not one.cold and draw(st.booleans()):
            tier = draw(quantized_tiers(arithmetic))
            cold = (one_form(tier) if once else tier,)
            groups[i] = dataclasses.replace(one, cold=cold, life=SEAL)
    page = draw(st.sampled_from([16, 32]))
    plan = plan_of(lanes, groups, head_dim, group, page)
    if has_scoring:
        plan = scored(plan, draw)
    kind = draw(st.sampled_from(["plain", "observing", "windowed", "compacting"]))
    if kind == "windowed":
        return windowed(plan, draw)
    if kind == "compacting":
        return compacting(plan)
    return plan if kind == "plain" else observing(plan)


def one_form(tier: Tier) -> Tier:
    """The tier where V is written as K is."""
    k = tier.k
    return dataclasses.replace(
        tier,
        bits_v=k.bits,
        axis_v=k.axis,
        group_v=k.group,
        span_v=k.span,
        coding_v=k.coding,
        sums=False,
    )


def stored_once(plan: CompressionPlan, once: bool) -> CompressionPlan:
    """The plan where V is the beginning of K, or else apart."""
    lanes = tuple(
        dataclasses.replace(lane, values_in_keys=once and not lane.removed)
        for lane in plan.lanes
    )
    return dataclasses.replace(plan, lanes=lanes)


def scored(plan: CompressionPlan, draw: st.DrawFn) -> CompressionPlan:
    """The plan, or that of a model with bounded scores, sinks, or both."""
    softcap, sinks = draw(
        st.sampled_from([(0.0, False), (0.0, True), (1.5, False), (2.5, True)])
    )
    model = dataclasses.replace(plan.model, softcap=softcap, sinks=sinks)
    return dataclasses.replace(plan, model=model)


def windowed(plan: CompressionPlan, draw: st.DrawFn) -> CompressionPlan:
    """The plan where some groups have a window, to the page or to the token."""
    page = plan.page_tokens
    by_page = st.builds(Window, *[st.integers(0, 3).map(lambda n: n * page)] * 2)
    exact = st.integers(1, 3 * page).map(lambda n: Window.of_tokens(n, page))
    both = st.builds(lambda a, b: dataclasses.replace(a, sink=b.sink), exact, by_page)
    groups = [
        dataclasses.replace(group, life=draw(by_page | both))
        if draw(st.booleans())
        else group
        for group in plan.groups
    ]
    return dataclasses.replace(plan, groups=tuple(groups))


def compacting(plan: CompressionPlan) -> CompressionPlan:
    """The plan where prefixes can be compacted."""
    groups = [dataclasses.replace(group, life=Compact(0.5)) for group in plan.groups]
    return dataclasses.replace(plan, groups=tuple(groups))


def observing(plan: CompressionPlan) -> CompressionPlan:
    """The plan with an observation window: what was sealed is divided in two shares,
    what stays hot has a budget."""
    groups: list[Group] = []
    for group in plan.groups:
        own = dataclasses.replace(group, cold=(), life=Budget(plan.page_tokens))
        if group.cold:
            shared = Divide((0.5, 0.5))
            own = dataclasses.replace(group, cold=2 * group.cold, life=shared)
        groups.append(own)
    observation = ObservationWindow(last=1)
    return dataclasses.replace(plan, groups=tuple(groups), score=observation)


def quantized_tiers(arithmetic: str = "float") -> st.SearchStrategy[Tier]:
    bits, axes = st.sampled_from([2, 3, 4, 8, 16]), st.sampled_from(["rank", "token"])
    groups = st.sampled_from([16, 32])
    fixed = fixed_tiers(groups, arithmetic)
    if arithmetic == "int":
        rank, token, products = st.just("rank"), st.just("token"), st.just("int")
        by_token = st.builds(
            Tier,
            bits,
            bits,
            rank,
            token,
            groups,
            st.just(16),
            products,
            sums=st.booleans(),
        )
        by_rank = st.builds(Tier, bits, bits, rank, rank, groups, groups, products)
        return by_token | by_rank | fixed
    evenly = st.builds(Tier, bits, bits, axes, axes, st.just(32), groups)
    return evenly | fixed | float_tiers()


def fixed_tiers(
    groups: st.SearchStrategy[int], arithmetic: str
) -> st.SearchStrategy[Tier]:
    """V's levels, or both sides', are the normal's."""
    bits, rank = st.sampled_from(sorted(NORMAL)), st.just("rank")
    normal, either = st.just("normal"), st.sampled_from(["affine", "normal"])
    return st.builds(
        Tier,
        bits,
        bits,
        rank,
        rank,
        groups,
        groups,
        st.just(arithmetic),
        coding_k=either,
        coding_v=normal,
    )


def float_tiers() -> st.SearchStrategy[Tier]:
    """V's codes, or both sides', are 8-bit floats."""
    one_group, axis = st.just(WHOLE_RANK), st.just("rank")
    shape = (axis, axis, one_group, one_group)
    either, floats = st.sampled_from(["affine", "float8"]), st.just("float8")
    eight = st.just(8)
    return st.builds(Tier, eight, eight, *shape, coding_k=either, coding_v=floats)


def groupings(lanes: list[Lane], hot: Tier) -> list[list[Group]]:
    """All lanes together; even and odd ones apart; all but one with cold pages in the
    format of the hot ones."""
    kept = tuple(i for i, lane in enumerate(lanes) if not lane.removed)
    return [
        [Group(kept, hot)],
        [Group(kept[::2], hot), Group(kept[1::2], hot)],
        [Group(kept[:1], hot), Group(kept[1:], hot, (hot,), SEAL)],
    ]


# -- one step of one layer -------------------------------------------------------------


class Case:
    """Packed inputs, projections and a poisoned cache for one step of one layer;
    ``expected`` is the reference.

    ``queries`` [B] and ``lengths`` [B][S]; ``spare`` rows and sequences pad the step's
    capacity. ``waiting`` [B, S]: pages behind the tokens that queries see, poisoned in
    what kernels get.
    """

    scale = 0.3

    def __init__(
        self,
        plan: CompressionPlan,
        layer: int,
        queries: list[int],
        lengths: list[list[int]],
        seed: int,
        spare: int = 0,
    ) -> None:
        self.plan, self.layer, self.spare, self.rng = (
            plan,
            layer,
            spare,
            np.random.default_rng(seed),
        )
        self.lanes, self.total = plan.index.active(layer), sum(queries)
        self.queries = queries + [0] * spare
        self.lengths = np.array(
            lengths + [[0] * len(plan.index.buckets)] * spare, np.int32
        )
        self.waiting = np.zeros_like(self.lengths)
        normal, heads = self.rng.normal, range(plan.model.group_size)
        self.q = [
            [normal(size=(self.total, lane.input_dim)) for _ in heads]
            for lane in self.lanes
        ]
        self.k = [normal(size=(self.total, lane.input_dim)) for lane in self.lanes]
        self.v = [
            padded(k, lane.rank_k)[:, : lane.rank_v]
            if lane.values_in_keys
            else normal(size=(self.total, lane.rank_v))
            for lane, k in zip(self.lanes, self.k, strict=True)
        ]
        self.angles = normal(size=(self.total, plan.model.head_dim // 2)) * 3
        self.projections = [self._projection(lane) for lane in self.lanes]
        shape = (len(self.lanes), plan.model.group_size)
        sinks = normal(size=shape) if plan.model.sinks else np.full(shape, -np.inf)
        self.sinks = sinks.astype(np.float32).astype(np.float64)
        self.weights = self.rng.integers(0, 2, self.total).astype(np.float32)
        if plan.index.compaction:
            self.weights = -self.weights
        self.cached: dict[
            tuple[int, int, int], tuple[Array, Array]
        ] = {}  # (sequence, bucket, head) -> K, V
        self._fill_cache()

    def __repr__(self) -> str:
        return f"Case({self.plan}, layer {self.layer}, queries {self.queries}, lengths {self.lengths.tolist()})"

    def _projection(self, lane: Lane) -> tuple[Array, Array, Array]:
        shape = (lane.input_dim, lane.rank_k)
        if not lane.projected:
            return np.eye(*shape), np.eye(*shape), np.zeros(lane.rank_k)
        return (
            self.rng.normal(size=shape) / 4,
            self.rng.normal(size=shape) / 4,
            self.rng.normal(size=lane.rank_k),
        )

    # -- what the op gets --------------------------------------------------------------
    def packed(self, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        """q, k, v."""
        rows = ([x for heads in self.q for x in heads], self.k, self.v)
        spare = ((0, self.spare), (0, 0))
        return [
            torch.from_numpy(
                np.pad(np.concatenate(x, 1), spare, constant_values=3.0)
            ).to(dtype)
            for x in rows
        ]

    def state(self, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        """proj_q, proj_k, centre_k, zero-padded; sinks, in single precision."""
        sinks = {"sinks": torch.from_numpy(self.sinks.astype(np.float32))}
        if not self.plan.model.sinks:
            sinks = {}
        if not self.plan.index.projected:
            return sinks
        wide, rank = (
            max(lane.input_dim for lane in self.lanes),
            max(lane.rank_k for lane in self.lanes),
        )
        padded = [
            np.zeros((len(self.lanes), *shape))
            for shape in ((wide, rank), (wide, rank), (rank,))
        ]
        for h, matrices in enumerate(self.projections):
            for target, matrix in zip(padded, matrices, strict=True):
                target[h][tuple(slice(n) for n in matrix.shape)] = matrix
        names = ("proj_q", "proj_k", "centre_k")
        return {
            name: torch.from_numpy(x).to(dtype)
            for name, x in zip(names, padded, strict=True)
        } | sinks

    def step(self, dtype: torch.dtype = torch.float32) -> StepTensors:
        angles = torch.from_numpy(np.pad(self.angles, ((0, self.spare), (0, 0)))).to(
            dtype
        )
        return StepTensors(
            angles.cos(),
            angles.sin(),
            torch.tensor(np.cumsum([0, *self.queries]), dtype=torch.int32),
            torch.arange(max(self.queries), dtype=torch.int32),
            torch.from_numpy(self.lengths),
            [torch.from_numpy(table) for table in self.tables],
            {
                n: torch.from_numpy(
                    self.memory.view(kind).reshape(-1, self.plan.index.unit)
                )
                for n, kind in VIEWS.items()
            },
            torch.from_numpy(
                np.pad(self.weights, (0, self.spare), constant_values=np.nan)
            ),
        )

    # -- the reference -----------------------------------------------------------------
    def expected(self) -> tuple[Array, Array]:
        """o and rows of the real tokens in float64; only the hot format and the cache
        are rounded."""
        hot = self.plan.index.hot_bits
        outs, keys, values = [], [], []
        for lane, qs, k, v, (a, b, centre), sinks in zip(
            self.lanes,
            self.q,
            self.k,
            self.v,
            self.projections,
            self.sinks,
            strict=True,
        ):
            keys.append(rounded(self._turned(k, lane) @ b - centre, hot))
            values.append(rounded(v, hot))
            outs += [
                self._attended(
                    self._turned(q, lane) @ a * self.scale,
                    keys[-1],
                    values[-1],
                    lane,
                    sink,
                )
                for q, sink in zip(qs, sinks, strict=True)
            ]
        rows = keys if self.plan.index.values_in_keys else keys + values
        return np.concatenate(outs, 1), np.concatenate(rows, 1)

    def expected_mass(self) -> Array:
        """Observed attention [B, H, N] in float64, head by head and row by row: its
        sum or, where prefixes are compacted, the largest."""
        hot = self.plan.index.hot_bits
        widths = [table.shape[1] * self.plan.page_tokens for table in self.tables]
        starts = np.cumsum([0, *widths])
        mass = np.zeros(
            (len(self.queries), len(self.lanes), starts[-1] + max(self.queries))
        )
        for h, (lane, qs, k, (a, b, centre)) in enumerate(
            zip(self.lanes, self.q, self.k, self.projections, strict=True)
        ):
            k = rounded(self._turned(k, lane) @ b - centre, hot)
            for q, sink in zip(qs, self.sinks[h], strict=True):
                q = self._turned(q, lane) @ a * self.scale
                row = 0
                for s, count in enumerate(self.queries):
                    for i in range(count):
                        keys, at = (
                            [k[row - i : row + 1]],
                            [starts[-1] + np.arange(i + 1)],
                        )
                        for bucket in range(len(widths)):
                            if (s, bucket, lane.head) in self.cached:
                                keys.append(self.cached[s, bucket, lane.head][0])
                                at.append(starts[bucket] + np.arange(len(keys[-1])))
                        p = self._shares(np.concatenate(keys) @ q[row], sink)
                        own, given = mass[s, h], self.weights[row] * p
                        places = np.concatenate(at)
                        if self.plan.index.compaction:
                            own[places] = np.maximum(own[places], -given)
                        else:
                            own[places] += given
                        row += 1
        return mass

    def _turned(self, x: Array, lane: Lane) -> Array:
        """RoPE as a product of complex numbers."""
        if lane.rope == "none":
            return x
        half = lane.input_dim // 2
        planes = list(lane.planes) if lane.rope == "planes" else list(range(half))
        z = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * self.angles[:, planes])
        return np.concatenate([z.real, z.imag], 1)

    def _shares(self, scores: Array, sink: float) -> Array:
        """The softmax of one row's scores, bounded and beside its sink."""
        if softcap := self.plan.model.softcap:
            scores = softcap * np.tanh(scores / softcap)
        e = np.exp(scores - scores.max())
        return e / (e.sum() + np.exp(sink - scores.max()))

    def _attended(self, q: Array, k: Array, v: Array, lane: Lane, sink: float) -> Array:
        """One query head: plain softmax over all that is cached and the sequence's own
        tokens so far."""
        out, start = np.zeros((self.total, lane.rank_v)), 0
        buckets = sorted(
            range(len(self.plan.index.buckets)),
            key=lambda s: self.plan.index.buckets[s].is_hot,
        )
        for b, count in enumerate(self.queries):
            old = [
                self.cached[b, s, lane.head]
                for s in buckets
                if (b, s, lane.head) in self.cached
            ]
            rows = slice(start, start + count)
            ks = np.concatenate([*(x for x, _ in old), k[rows]])
            vs = np.concatenate([*(x for _, x in old), v[rows]])
            scores, shares = q[rows] @ ks.T, np.zeros((count, len(ks)))
            for i in range(count):
                seen = self._seen(lane, len(ks) - count + i + 1)
                shares[i, seen] = self._shares(scores[i, seen], sink)
            out[rows] = shares @ vs
            start += count
        return out

    def _seen(self, lane: Lane, count: int) -> list[int] | slice:
        """The places, of ``count`` tokens that a lane holds, sealed ones first, that
        the newest one's query sees."""
        index = lane.layer * self.plan.model.kv_heads + lane.head
        sight = self.plan.index.sight(index)
        if not sight.is_less:
            return slice(count)
        page, seen = self.plan.page_tokens, range(count)
        own = (count - 1) // page
        pages = {own - i for i in range(sight.recent // page + 1)}
        newest = {t for t in seen if t // page in pages}
        if sight.exact:
            newest = set(seen[-sight.exact :])
        return sorted(newest | {t for t in seen if t < sight.sink})

    # -- the cache ---------------------------------------------------------------------
    def _fill_cache(self) -> None:
        """Random pages in a shuffled order in one memory, everything else NaN; unused
        table entries are any page."""
        self.layout, p, size, spans = (
            CacheLayout(self.plan),
            self.plan.page_tokens,
            0,
            [],
        )
        for s, stride in enumerate(self.layout.page_stride):
            first, count = (
                -(-size // stride),
                int((-(-self.lengths[:, s] // p)).sum()) + 1,
            )
            spans.append((first, count))
            size = (first + count) * stride
        self.memory, self.tables = np.full(-(-size // 256) * 256, 255, np.uint8), []
        for s, (first, count) in enumerate(spans):
            ids = iter((first + self.rng.permutation(count)).astype(np.int32))
            spare = next(ids)
            width = max(1, *(-(-self.lengths[:, s] // p)))
            rows = [[next(ids) for _ in range(-(-n // p))] for n in self.lengths[:, s]]
            self.tables.append(
                np.array([row + [spare] * (width - len(row)) for row in rows], np.int32)
            )
            for b, row in enumerate(rows):
                for lane in self.lanes:
                    if (
                        lane.layer * self.plan.model.kv_heads + lane.head
                        in self.plan.index.buckets[s].lanes
                    ):
                        self.cached[b, s, lane.head] = self._fill(
                            s, lane, row, int(self.lengths[b, s])
                        )

    def _fill(
        self, bucket: int, lane: Lane, pages: list[np.int32], length: int
    ) -> tuple[Array, Array]:
        """Write ``length`` random tokens of one lane; the K and V that a reader must
        see."""
        tier = self.plan.index.buckets[bucket].tier
        offsets = self.layout.lane_offsets(
            bucket, lane.layer * self.plan.model.kv_heads + lane.head
        )
        sums = (offsets.k_sums, offsets.v_sums) if tier.sums else (None, None)
        k = (tier.k, lane.rank_k, offsets.k, offsets.k_meta, sums[0])
        v = (tier.v, lane.rank_v, offsets.v, offsets.v_meta, sums[1])
        seen: tuple[list[Array], list[Array]] = ([], [])
        parts = [(seen[0], k)] if lane.values_in_keys else [(seen[0], k), (seen[1], v)]
        for j, page in enumerate(pages):
            left = length - j * self.plan.page_tokens
            base = int(page) * self.layout.page_stride[bucket]
            for found, (form, rank, at, meta, own_sums) in parts:
                if form.is_coded:
                    summed = None if own_sums is None else base + own_sums
                    codes = self._codes(form, rank, base + at, base + meta, summed)
                    found.append(codes[:left])
                else:
                    count = min(left, self.plan.page_tokens)
                    found.append(self._floats(base + at, count, rank, form.bits))
        empty = np.zeros((0, lane.rank_k)), np.zeros((0, lane.rank_v))
        keys = np.concatenate([empty[0], *seen[0]])
        if lane.values_in_keys:
            return keys, keys[:, : lane.rank_v]
        return keys, np.concatenate([empty[1], *seen[1]])

    def _floats(self, at: int, tokens: int, rank: int, bits: int) -> Array:
        x = self.rng.normal(size=(tokens, rank)).astype(
            np.float16 if bits == 16 else np.float32
        )
        self._write(at, x)
        return x.astype(np.float64)

    def _codes(
        self, form: Format, rank: int, at: int, meta: int, sums: int | None
    ) -> Array:
        """A whole page of random codes; its values [tokens, rank], worked out group by
        group."""
        tokens, bits = self.plan.page_tokens, form.bits
        by_rank = form.axis == "rank"
        shape = (tokens, rank) if by_rank else (rank, tokens)
        lines = self.rng.integers(0, 1 << bits, shape)
        if form.coding == "float8":
            lines[lines % 128 == 127] = 0  # no number, never written
        self._write(at, packed(lines, bits))
        along_tokens = [
            min(form.group, tokens - i) for i in range(0, tokens, form.group)
        ]
        sizes = groups_along_rank(rank, form.group) if by_rank else along_tokens
        count = len(sizes) * len(lines)
        if form.coding == "float8":
            half = np.abs(self.rng.normal(size=count) / 448).astype(np.float16)
            self._write(meta, half)
            pairs = half.astype(np.float64)[:, None] * [1, 0]
        elif form.coding == "normal":
            half = np.abs(self.rng.normal(size=count)).astype(np.float16)
            self._write(meta, half)
            pairs = half.astype(np.float64)[:, None] * [2 / 255, -1]
        else:
            halves = self.rng.normal(size=(count, 2)) / [(1 << bits) - 1, 1]
            halves[:, 0] = np.abs(halves[:, 0])  # a scale is a range over its levels
            self._write(meta, halves.astype(np.float16))
            pairs = halves.astype(np.float16).astype(np.float64)
        if sums is not None:
            width = 1 if (2**bits - 1) * form.group < 256 else 2
            totals = [
                int(x.sum()).to_bytes(width, "little")
                for line in lines
                for x in split(line, sizes)
            ]
            self._write(sums, np.frombuffer(b"".join(totals), np.uint8))
        worth = np.array(form.table)[lines]
        if form.coding == "float8":
            theirs = lines.astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
            worth = theirs.astype(np.float64)
        pair = iter(pairs)
        values = [
            np.concatenate([x * s + m for x, (s, m) in zip(split(line, sizes), pair)])  # noqa: B905
            for line in worth
        ]
        return np.array(values) if by_rank else np.array(values).T

    def _write(self, at: int, values: npt.NDArray) -> None:
        self.memory[at : at + values.nbytes] = (
            np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        )


THREES = (
    ((0, 0), (0, 1), (0, 2)),
    ((0, 3), (0, 4), (0, 5)),
    ((1, 0), (1, 1), (1, 2)),
    ((1, 3), (1, 4), (1, 5)),
    ((2, 0), (2, 1), (2, 2)),
    ((2, 3), (2, 4), (2, 5)),
    ((0, 6), (0, 7), (2, 6)),
    ((1, 6), (1, 7), (2, 7)),
)
"""(run, bit of its byte) of each bit of eight codes of 3 bits."""


def packed(lines: npt.NDArray, bits: int) -> npt.NDArray[np.uint8]:
    """Rows of codes as they lie in a page, placed bit by bit."""
    if bits != 3:
        own_bits = lines[..., None] >> np.arange(bits) & 1
        return np.packbits(own_bits.astype(np.uint8), bitorder="little")
    blocks = [_threes(lines[:, i : i + 64]) for i in range(0, lines.shape[1], 64)]
    return np.packbits(np.concatenate(blocks, 1), bitorder="little")


def _threes(lines: npt.NDArray) -> npt.NDArray[np.uint8]:
    """The bits of a block, [rows, 3 * codes]."""
    placed = np.zeros((len(lines), 3, lines.shape[1] // 8, 8), np.uint8)
    for code, places in enumerate(THREES):
        for bit, (run, at) in enumerate(places):
            placed[:, run, :, at] = lines[:, code::8] >> bit & 1
    return placed.reshape(len(lines), -1)


def split(line: npt.NDArray, sizes: tuple[int, ...] | list[int]) -> list[npt.NDArray]:
    return np.split(line, np.cumsum(sizes)[:-1])


def padded(x: Array, width: int) -> Array:
    """x [T, n] with zeros up to ``width``."""
    return np.pad(x, ((0, 0), (0, width - x.shape[1])))


def rounded(x: Array, bits: int) -> Array:
    """The float64 values of x in the hot format (from single, as the op computes)."""
    single = x.astype(np.float32)
    stored = single.astype(np.float16) if bits == 16 else single
    return stored.astype(np.float64)


def _live_alike(plan: CompressionPlan, lengths: list[int]) -> None:
    """Check one sequence: what lives alike holds equally many sealed tokens."""
    held: dict[object, int] = {}
    for bucket in plan.index.buckets:
        if not bucket.is_hot:
            key = bucket.hot, bucket.life
            lengths[bucket.number] = held.setdefault(key, lengths[bucket.number])


@st.composite
def cases(draw: st.DrawFn, arithmetic: str = "float", has_scoring: bool = True) -> Case:
    """Ragged steps of random plans: prefill, decode and idle sequences, empty and full
    buckets, spare capacity."""
    plan, batch = draw(plans(arithmetic, has_scoring)), draw(st.integers(1, 4))
    queries = draw(
        st.lists(st.integers(0, 5), min_size=batch, max_size=batch).filter(any)
    )
    length = st.one_of(st.just(0), st.integers(0, 3 * plan.page_tokens))
    lengths = [[draw(length) for _ in plan.index.buckets] for _ in range(batch)]
    if plan.index.sees_less:  # only full pages are sealed
        whole = [1 if b.is_hot else plan.page_tokens for b in plan.index.buckets]
        lengths = [
            [n // p * p for n, p in zip(row, whole, strict=True)] for row in lengths
        ]
        for row in lengths:
            _live_alike(plan, row)
    return Case(
        plan,
        draw(st.integers(0, 1)),
        queries,
        lengths,
        draw(st.integers(0, 99)),
        draw(st.integers(0, 2)),
    )
