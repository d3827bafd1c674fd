"""Random plans and steps for the Attend laws, with an independent float64 reference and a cache written byte by byte."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st

from kvlathe.export.attend import StepTensors
from kvlathe.export.layout import CacheLayout, group_count, groups_along_rank
from kvlathe.export.plan import Bucket, CompressionPlan, Lane, ModelShape, Tier

Array = npt.NDArray[np.float64]
HALF = np.dtype(np.float16)


def plan_of(
    lanes: list[Lane], tiers: list[Tier], buckets: list[Bucket], head_dim: int, group: int, page: int = 16
) -> CompressionPlan:
    layers, heads = lanes[-1].layer + 1, lanes[-1].head + 1
    shape = ModelShape(layers, heads * group, heads, head_dim, 64, 97, 256)
    return CompressionPlan(shape, tuple(lanes), tuple(tiers), tuple(buckets), page_tokens=page, prefill_chunk=page)


@st.composite
def plans(draw: st.DrawFn) -> CompressionPlan:
    """Two layers of mixed lanes: ranks, planes, no RoPE, removed heads; fresh, split and quantized buckets."""
    head_dim, heads = draw(st.sampled_from([16, 20, 32, 48])), draw(st.integers(1, 3))
    group, kind = draw(st.integers(1, 3)), draw(st.sampled_from(["full", "none", "planes", "mixed"]))
    projected = draw(st.booleans())
    lanes = []
    for layer in range(2):
        for head in range(heads):
            if head > 0 and draw(st.integers(0, 3)) == 0:
                lanes.append(Lane(layer, head, 0, 0, 0, "none", fill_from=0))
                continue
            rope = draw(st.sampled_from(["full", "none", "planes"])) if kind == "mixed" else kind
            planes = (
                tuple(sorted(draw(st.sets(st.integers(0, head_dim // 2 - 1), min_size=1)))) if rope == "planes" else ()
            )
            width = 2 * len(planes) if planes else head_dim
            rank_k = 16 * draw(st.integers(1, 3)) if projected else -(-width // 16) * 16
            lanes.append(Lane(layer, head, width, rank_k, 16 * draw(st.integers(1, 3)), rope, planes, projected))
    kept = tuple(i for i, lane in enumerate(lanes) if not lane.removed)
    hot = draw(st.sampled_from([16, 32]))
    tiers = [Tier(hot, hot)]
    split = draw(st.integers(0, 2))
    if split == 0 or len(kept) < 2:
        buckets = [Bucket(0, kept)]
    elif split == 1:
        buckets = [Bucket(0, kept[::2]), Bucket(0, kept[1::2])]
    else:
        buckets = [Bucket(0, kept), Bucket(0, kept[1:], source=0)]
    for source in range(len(buckets)):
        if draw(st.booleans()) and buckets[source].source is None:
            bits = st.sampled_from([2, 4, 8, 16])
            axes = st.sampled_from(["rank", "token"])
            tiers.append(Tier(draw(bits), draw(bits), draw(axes), draw(axes), 32, draw(st.sampled_from([16, 32]))))
            buckets.append(Bucket(len(tiers) - 1, buckets[source].lanes, source=source))
    return plan_of(lanes, tiers, buckets, head_dim, group, draw(st.sampled_from([16, 32])))


@dataclass(repr=False)
class Case:
    """One step of one layer: packed inputs, a poisoned cache, projections; ``expected`` computes the reference."""

    plan: CompressionPlan
    layer: int
    scale: float
    queries: list[int]
    lengths: npt.NDArray[np.int32]
    q: list[list[Array]]  # [lane][query head] [T, input_dim]
    k: list[Array]
    v: list[Array]
    proj: list[tuple[Array, Array, Array]]  # A, B, centre of each lane
    angles: Array  # [T, head_dim / 2]
    cached: dict[tuple[int, int, int], tuple[Array, Array]]  # (sequence, bucket, lane index) -> K, V
    tables: list[npt.NDArray[np.int32]]
    memory: npt.NDArray[np.uint8]
    extra_rows: int

    def __repr__(self) -> str:
        return f"Case({self.plan}, layer {self.layer}, queries {self.queries}, lengths {self.lengths.tolist()})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))

    @property
    def lanes(self) -> tuple[Lane, ...]:
        return self.plan.active(self.layer)

    @property
    def total(self) -> int:
        return sum(self.queries)

    def index(self, lane: Lane) -> int:
        return lane.layer * self.plan.model.kv_heads + lane.head

    def packed(self, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q = np.concatenate([x for heads in self.q for x in heads], 1)
        rows = [
            np.pad(x, ((0, self.extra_rows), (0, 0)), constant_values=3.0)
            for x in (q, *(np.concatenate(y, 1) for y in (self.k, self.v)))
        ]
        return tuple(torch.from_numpy(x).to(dtype) for x in rows)  # type: ignore[return-value]

    def state(self, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        """proj_q, proj_k, centre_k, zero-padded."""
        if not self.plan.projected:
            return {}
        wide, rank = max(x.input_dim for x in self.lanes), max(x.rank_k for x in self.lanes)
        a, b, c = np.zeros((2, len(self.lanes), wide, rank)), None, np.zeros((len(self.lanes), rank))
        for h, (lane, (pa, pb, pc)) in enumerate(zip(self.lanes, self.proj, strict=True)):
            a[0, h, : lane.input_dim, : lane.rank_k], a[1, h, : lane.input_dim, : lane.rank_k] = pa, pb
            c[h, : lane.rank_k] = pc
        return {
            "proj_q": torch.tensor(a[0], dtype=dtype),
            "proj_k": torch.tensor(a[1], dtype=dtype),
            "centre_k": torch.tensor(c, dtype=dtype),
        }

    def step(self, dtype: torch.dtype = torch.float32) -> StepTensors:
        angles = torch.from_numpy(np.pad(self.angles, ((0, self.extra_rows), (0, 0)))).to(dtype)
        starts = np.concatenate([[0], np.cumsum(self.queries)]).astype(np.int32)
        u = self.plan.unit
        views = {
            f"pool_{n}": self.memory.view(t).reshape(-1, u)
            for n, t in (("f32", np.float32), ("f16", HALF), ("u8", np.uint8))
        }
        return StepTensors(
            angles.cos(),
            angles.sin(),
            torch.from_numpy(starts),
            torch.arange(max(1, *self.queries, 1), dtype=torch.int32),
            torch.from_numpy(self.lengths),
            [torch.from_numpy(t) for t in self.tables],
            {name: torch.from_numpy(view) for name, view in views.items()},
        )

    def expected(self) -> tuple[Array, Array]:
        """o and rows of the real tokens, float64; only the hot format and the cache are rounded."""
        hot = next(self.plan.tiers[b.tier] for b in self.plan.buckets if b.source is None).bits_k
        outs, keys, values = [], [], []
        for h, lane in enumerate(self.lanes):
            a, b, centre = self.proj[h]
            k = rounded(self.turn(self.k[h], lane) @ b - centre, hot)
            v = rounded(self.v[h], hot)
            keys.append(k), values.append(v)
            for q in self.q[h]:
                outs.append(self.attended(self.turn(q, lane) @ a * self.scale, k, v, lane))
        return np.concatenate(outs, 1), np.concatenate(keys + values, 1)

    def turn(self, x: Array, lane: Lane) -> Array:
        if lane.rope == "none":
            return x
        planes = list(lane.planes) if lane.rope == "planes" else list(range(lane.input_dim // 2))
        z = (x[:, : lane.input_dim // 2] + 1j * x[:, lane.input_dim // 2 :]) * np.exp(1j * self.angles[:, planes])
        return np.concatenate([z.real, z.imag], 1)

    def attended(self, q: Array, k: Array, v: Array, lane: Lane) -> Array:
        out, start = np.zeros((self.total, lane.rank_v)), 0
        for b, count in enumerate(self.queries):
            old = [
                self.cached[b, s, self.index(lane)]
                for s in range(len(self.plan.buckets))
                if (b, s, self.index(lane)) in self.cached
            ]
            for i in range(start, start + count):
                ks = np.concatenate([x for x, _ in old] + [k[start : i + 1]])
                vs = np.concatenate([x for _, x in old] + [v[start : i + 1]])
                p = np.exp(ks @ q[i] - (ks @ q[i]).max())
                out[i] = p @ vs / p.sum()
            start += count
        return out


def rounded(x: Array, bits: int) -> Array:
    """The float64 values of x in the hot format (from single, as the op computes)."""
    x = x.astype(np.float32)
    return (x.astype(np.float16) if bits == 16 else x).astype(np.float64)


@st.composite
def cases(draw: st.DrawFn, plan: st.SearchStrategy[CompressionPlan] | None = None) -> Case:
    chosen = draw(plan if plan is not None else plans())
    batch = draw(st.integers(1, 4))
    queries = draw(st.lists(st.integers(0, 5), min_size=batch, max_size=batch).filter(any))
    limit = 3 * chosen.page_tokens
    lengths = draw(
        st.lists(
            st.lists(
                st.one_of(st.just(0), st.integers(0, limit)), min_size=len(chosen.buckets), max_size=len(chosen.buckets)
            ),
            min_size=batch,
            max_size=batch,
        )
    )
    pad = draw(st.integers(0, 2))
    return make_case(
        chosen, draw(st.integers(0, chosen.model.layers - 1)), queries, lengths, draw(st.integers(0, 99)), pad, pad
    )


def make_case(
    plan: CompressionPlan,
    layer: int,
    queries: list[int],
    lengths: list[list[int]],
    seed: int,
    extra_rows: int = 0,
    extra_batch: int = 0,
) -> Case:
    rng = np.random.default_rng(seed)
    total, lanes = sum(queries), plan.active(layer)
    q = [[rng.normal(size=(total, x.input_dim)) for _ in range(plan.model.group_size)] for x in lanes]
    k, v = [rng.normal(size=(total, x.input_dim)) for x in lanes], [rng.normal(size=(total, x.rank_v)) for x in lanes]
    proj = []
    for lane in lanes:
        shape = (lane.input_dim, lane.rank_k)
        eye, zero = np.eye(*shape), np.zeros(lane.rank_k)
        random = (rng.normal(size=shape) / 4, rng.normal(size=shape) / 4, rng.normal(size=lane.rank_k))
        proj.append(random if lane.projected else (eye, eye, zero))
    queries = queries + [0] * extra_batch
    padded = np.array(lengths + [[0] * len(plan.buckets)] * extra_batch, np.int32)
    layout, p = CacheLayout(plan), plan.page_tokens
    cached, tables, memory = {}, [], [np.full(layout.page_stride[0] * 0, 255, np.uint8)]
    pages = [int(-(-padded[:, s] // p).sum()) + 1 for s in range(len(plan.buckets))]
    bases = np.cumsum([0] + [n * size for n, size in zip(pages, layout.page_stride, strict=True)])
    # One memory for all buckets: page ids count strides of their own bucket, so each bucket's first page is rounded up.
    first = [-(-int(base) // size) for base, size in zip(bases + 0, layout.page_stride, strict=False)]
    size, spans = 0, []
    for s, count in enumerate(pages):
        first[s] = -(-size // layout.page_stride[s])
        size = (first[s] + count) * layout.page_stride[s]
    memory = np.full(-(-size // 256) * 256, 255, np.uint8)
    for s, count in enumerate(pages):
        ids = (first[s] + rng.permutation(count)).astype(np.int32)
        width = max(1, int((-(-padded[:, s] // p)).max()))
        table, at = np.full((len(padded), width), ids[-1], np.int32), 0
        for b, length in enumerate(padded[:, s]):
            need = -(-int(length) // p)
            table[b, :need] = ids[at : at + need]
            at += need
            for index in plan.buckets[s].lanes:
                if plan.lanes[index].layer == layer:
                    cached[b, s, index] = fill(plan, layout, s, index, memory, table[b], int(length), rng)
        tables.append(table)
    return Case(
        plan,
        layer,
        0.3,
        queries,
        padded,
        q,
        k,
        v,
        proj,
        rng.normal(size=(total, plan.model.head_dim // 2)) * 3,
        cached,
        tables,
        memory,
        extra_rows,
    )


def fill(
    plan: CompressionPlan,
    layout: CacheLayout,
    bucket: int,
    index: int,
    memory: npt.NDArray[np.uint8],
    table: npt.NDArray[np.int32],
    length: int,
    rng: np.random.Generator,
) -> tuple[Array, Array]:
    """Write ``length`` random tokens of one lane; return the K and V that a reader must see."""
    tier, lane, slab = plan.tiers[plan.buckets[bucket].tier], plan.lanes[index], layout.slab(bucket, index)
    parts = []
    for rank, bits, axis, group, at, meta in (
        (lane.rank_k, tier.bits_k, tier.axis_k, tier.group_k, slab.k, slab.k_meta),
        (lane.rank_v, tier.bits_v, tier.axis_v, tier.group_v, slab.v, slab.v_meta),
    ):
        seen = []
        for j in range(-(-length // plan.page_tokens)):
            count = min(plan.page_tokens, length - j * plan.page_tokens)
            page = int(table[j]) * layout.page_stride[bucket]
            if bits >= 16:
                x = rng.normal(size=(count, rank)).astype(np.float16 if bits == 16 else np.float32)
                memory[page + at :][: x.nbytes] = x.view(np.uint8).reshape(-1)
                seen.append(x.astype(np.float64))
            else:
                seen.append(
                    fill_codes(memory, page + at, page + meta, rank, plan.page_tokens, bits, axis, group, rng)[:count]
                )
        parts.append(np.concatenate(seen) if seen else np.zeros((0, rank)))
    return parts[0], parts[1]


def fill_codes(
    memory: npt.NDArray[np.uint8],
    at: int,
    meta: int,
    rank: int,
    tokens: int,
    bits: int,
    axis: str,
    group: int,
    rng: np.random.Generator,
) -> Array:
    """A whole page of random codes; its values [tokens, rank], worked out group by group."""
    codes = rng.integers(0, 1 << bits, tokens * rank)
    packed = np.zeros(tokens * rank * bits // 8, np.uint8)
    for place in range(8 // bits):
        packed |= (codes[place :: 8 // bits] << (bits * place)).astype(np.uint8)
    memory[at : at + len(packed)] = packed
    pairs = rng.normal(size=(group_count(rank, tokens, axis, group), 2)).astype(np.float16)
    memory[meta : meta + pairs.nbytes] = pairs.view(np.uint8).reshape(-1)
    sizes = (
        groups_along_rank(rank, group) if axis == "rank" else [min(group, tokens - i) for i in range(0, tokens, group)]
    )
    lines = codes.reshape(tokens, rank) if axis == "rank" else codes.reshape(rank, tokens)
    values, pair = np.zeros(lines.shape), iter(pairs.astype(np.float64))
    for i in range(len(lines)):
        start = 0
        for size in sizes:
            scale, minimum = next(pair)
            values[i, start : start + size] = lines[i, start : start + size] * scale + minimum
            start += size
    return values if axis == "rank" else values.T
