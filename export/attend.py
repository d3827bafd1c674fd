"""The attention op ``kvlathe::Attend`` (docs/attend.md): eager arithmetic in torch, and its node while exporting.

Sizes as in docs/attend.md: T packed tokens, B sequences, H lanes, G query heads a lane, D the widest lane input, Rk/Rv
the widest ranks, P tokens a page, N cached tokens of one sequence in one bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvlathe.export import integer
from kvlathe.export.layout import CacheLayout, sum_bytes
from kvlathe.export.plan import CompressionPlan
from kvlathe.export.tables import Form, LayerTables, pool_name

ATTRIBUTES = {"plugin_namespace": "kvlathe", "plugin_version": "1"}
HALF_OR_FLOAT = {16: torch.float16, 32: torch.float32}


@dataclass(frozen=True)
class StepTensors:
    """What every layer of one step shares: the op's inputs of the same names. ``cos``/``sin`` are None without RoPE.

    Without cached tokens (``lengths`` all 0) ``page_tables`` and ``pools`` may stay empty. ``probe_weights``: None
    where no row is observed.
    """

    cos: Tensor | None
    sin: Tensor | None
    query_starts: Tensor
    query_offsets: Tensor
    lengths: Tensor
    page_tables: list[Tensor] = field(default_factory=list)
    pools: dict[str, Tensor] = field(default_factory=dict)
    probe_weights: Tensor | None = None


@dataclass(frozen=True)
class Part:
    """Attention over one list of tokens, as a softmax state: they merge. ``mass`` is log(sum exp score) [H, G, Q, 1]
    and ``out`` the mean of the values under that softmax [H, G, Q, Rv]."""

    mass: Tensor
    out: Tensor

    @classmethod
    def of(cls, scores: Tensor, output: Callable[[Tensor], Tensor]) -> Part:
        """scores [H, G, Q, N]; ``output`` takes the mean of the values under shares of that shape."""
        scores = _wide(scores)
        mass = scores.logsumexp(-1, keepdim=True)
        return cls(mass, output((scores - mass).exp()))

    @classmethod
    def causal(cls, q: Tensor, k: Tensor, v: Tensor) -> Part:
        """q [H, G, N, Rk] already scaled, k [H, N, Rk], v [H, N, Rv]; query i sees tokens 0 .. i."""
        scores = _scores(q, k)
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        return cls.of(scores.masked_fill(later, -torch.inf), lambda shares: _means(shares, v))

    def over(self, places: Tensor) -> Part:
        """The same part for all H lanes, lane h from place places[h]; lanes at place -1 get an empty state."""
        mass = self.mass.new_full((len(places), *self.mass.shape[1:]), -torch.inf)
        out = self.out.new_zeros((len(places), *self.out.shape[1:]))
        kept = places >= 0
        mass[kept], out[kept] = self.mass[places[kept]], self.out[places[kept]]
        return Part(mass, out)

    def merge(self, other: Part) -> Part:
        """One softmax over both lists. At least one of them has tokens."""
        mass = torch.logaddexp(self.mass, other.mass)
        share = (self.mass - mass).exp(), (other.mass - mass).exp()
        return Part(mass, (share[0] * self.out + share[1] * other.out).to(self.out.dtype))


class AttendLayer(nn.Module):
    """Attend of one layer. State: ``proj_q``, ``proj_k`` [H, D, Rk] and ``centre_k`` [H, Rk] where the plan projects.

    A fresh layer of a projecting plan holds the identity; fold fills in the real matrices (a lane that is not projected
    keeps its identity). Row c of a lane's matrix belongs to element c of its input; rows and columns past its own width
    are zeros.
    """

    proj_q: Tensor
    proj_k: Tensor
    centre_k: Tensor

    def __init__(self, plan: CompressionPlan, layer: int, scale: float, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.plan, self.layer, self.scale, self.dtype = plan, layer, scale, dtype
        self.form = Form(plan)
        self.sizes = LayerTables(plan, layer)
        self.strides = CacheLayout(plan).page_stride
        if plan.projected:
            identity = torch.eye(self.sizes.D, self.sizes.Rk, dtype=dtype).repeat(self.sizes.H, 1, 1)
            self.register_buffer("proj_q", identity)
            self.register_buffer("proj_k", identity.clone())
            self.register_buffer("centre_k", torch.zeros(self.sizes.H, self.sizes.Rk, dtype=dtype))
        for name, values in self.sizes.items():
            self.register_buffer(name, torch.from_numpy(values), persistent=False)

    def table(self, name: str) -> Tensor:
        return self.get_buffer(name)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, step: StepTensors) -> tuple[Tensor, ...]:
        """q, k, v packed as in docs/attend.md -> (o [T, sum of G * rank_v], rows [T, sum of rank_k + rank_v]), and
        mass [B, H, N] where the plan has a probe.
        """
        if torch.compiler.is_exporting():
            return self._node(q, k, v, step)
        u = self.plan.unit
        q, k = self.prepare(q, k, step.cos, step.sin)
        k, v = self._hot(k, 0), self._hot(v, 1)
        rows = torch.cat([_gathered(k.transpose(0, 1).flatten(1), self.table("row_units"), u), v], -1)
        k, v = k.to(self.dtype), v.to(self.dtype)
        v = _gathered(v, self.table("v_units"), u).transpose(0, 1)
        o = self._uncached(q, k, v, step) if not bool(step.lengths.any()) else self._cached(q, k, v, step)
        o = _gathered(o.permute(2, 0, 1, 3).flatten(1), self.table("o_units"), u)
        return (o, rows) if self.plan.probe is None else (o, rows, self.mass(q, k, step))

    # -- fresh tokens --------------------------------------------------------------------------------------------
    def prepare(self, q: Tensor, k: Tensor, cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, Tensor]:
        """RoPE, projection, centre, scale: q' [H, G, T, Rk] times the softmax scale, k' [H, T, Rk]."""
        s = self.sizes
        q = self._rotated(q, "q", s.G, cos, sin).permute(1, 2, 0, 3) * self.scale
        k = self._rotated(k, "k", 1, cos, sin)[:, :, 0].transpose(0, 1)
        if self.plan.projected:
            return q @ self.proj_q.unsqueeze(1), k @ self.proj_k - self.centre_k.unsqueeze(1)
        return q, k

    def _rotated(self, x: Tensor, name: str, heads: int, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        """Packed rows -> [T, H, heads, W], rotated."""
        s = self.sizes
        if self.form.even:
            x = x.unflatten(-1, (s.H, heads, s.D))
            if self.form.rope:
                assert cos is not None and sin is not None
                x = x * torch.cat([cos, cos], -1)[:, None, None] + _turned(x) * torch.cat([sin, sin], -1)[:, None, None]
            return F.pad(x, (0, s.W - s.D))
        x, grain = F.pad(x, (0, self.form.grain)), self.form.grain
        own = _gathered(x, self.table(f"{name}_columns"), grain)
        if not self.form.rope:
            return own
        assert cos is not None and sin is not None
        partner = _gathered(x, self.table(f"{name}_partners"), grain)
        cosine = F.pad(cos, (0, 1), value=1.0)[:, self.table("cos_columns")]
        sine = F.pad(torch.cat([-sin, sin], -1), (0, 1))[:, self.table("sin_columns")]
        return own * cosine + partner * sine

    def _hot(self, x: Tensor, part: int) -> Tensor:
        return x.to(HALF_OR_FLOAT[self.form.hot_bits[part]]) if x.dtype != torch.float64 else x

    # -- attention -----------------------------------------------------------------------------------------------
    def _uncached(self, q: Tensor, k: Tensor, v: Tensor, step: StepTensors) -> Tensor:
        """Nothing is cached: each sequence is one causal square. Widths are evened out, which fused kernels want."""
        width = max(self.sizes.Rk, self.sizes.Rv)
        q, k, padded_v = (F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
        out = q.new_zeros((*q.shape[:3], width))
        for _, rows in _sequences(step):
            ks, vs = (x[:, None, rows].expand(-1, self.sizes.G, -1, -1).flatten(0, 1) for x in (k, padded_v))
            qs = q[:, :, rows].flatten(0, 1)
            fresh = F.scaled_dot_product_attention(qs[None], ks[None], vs[None], is_causal=True, scale=1.0)
            out[:, :, rows] = fresh[0].unflatten(0, (self.sizes.H, self.sizes.G))
        return out[..., : self.sizes.Rv]

    def _cached(self, q: Tensor, k: Tensor, v: Tensor, step: StepTensors) -> Tensor:
        out = q.new_zeros((*q.shape[:3], self.sizes.Rv))
        for b, rows in _sequences(step):
            parts = [Part.causal(q[:, :, rows], k[:, rows], v[:, rows])]
            for bucket in range(len(self.plan.buckets)):
                if step.lengths[b, bucket] > 0:
                    parts.append(self._cold(q[:, :, rows], b, bucket, step))
            out[:, :, rows] = reduce(Part.merge, parts).out
        return out

    def _cold(self, q: Tensor, b: int, bucket: int, step: StepTensors) -> Part:
        """Attention of sequence b over everything it has in one bucket."""
        pool, scores = self._cold_scores(q, b, bucket, step)
        part = Part.of(scores, pool.output)
        return part if self.form.shared else part.over(self.table(f"places_{bucket}"))

    def _cold_scores(self, q: Tensor, b: int, bucket: int, step: StepTensors) -> tuple[_Bucket, Tensor]:
        """Scores [Hs, G, Q, M * P] of the bucket's own lanes; -inf where there is no token."""
        count = int(step.lengths[b, bucket])
        pages = step.page_tables[bucket][b, : -(-count // self.plan.page_tokens)].long()
        if not self.form.shared:
            q = q[self.table(f"lanes_{bucket}")]
        pool = _Bucket(self, bucket, pages, step.pools, count)
        missing = torch.arange(len(pages) * self.plan.page_tokens, device=pages.device) >= count
        return pool, pool.scores(q).masked_fill(missing, -torch.inf)

    def mass(self, q: Tensor, k: Tensor, step: StepTensors) -> Tensor:
        """Probe mass [B, H, N] float32 of prepared q [H, G, T, Rk] and k [H, T, Rk] (docs/attend.md).

        A softmax of its own for the observed rows alone; the others cost nothing.
        """
        widths = [table.shape[1] * self.plan.page_tokens for table in step.page_tables] or [0] * len(self.plan.buckets)
        mass = q.new_zeros(
            (len(step.lengths), self.sizes.H, sum(widths) + len(step.query_offsets)), dtype=torch.float32
        )
        if step.probe_weights is None:
            return mass
        for b, rows in _sequences(step):
            observed = step.probe_weights[rows].nonzero()[:, 0]
            if len(observed):
                probe = q[:, :, rows][:, :, observed]
                shares = torch.cat(list(self._probe_scores(probe, k[:, rows], observed, b, step, widths)), -1).softmax(
                    -1
                )
                weights = step.probe_weights[rows][observed].to(shares.dtype)
                seen = torch.einsum("hgrn,r->hn", shares, weights)
                mass[b, :, : seen.shape[1]] = seen.to(mass.dtype)
        return mass

    def _probe_scores(
        self, q: Tensor, k: Tensor, observed: Tensor, b: int, step: StepTensors, widths: list[int]
    ) -> Iterator[Tensor]:
        """Scores [H, G, R, places] of sequence b's ``observed`` rows q over each bucket, then over its own tokens k."""
        for bucket, width in enumerate(widths):
            found = q.new_full((*q.shape[:3], width), -torch.inf, dtype=_wide(q).dtype)
            if step.lengths[b, bucket] > 0:
                scores = _wide(self._cold_scores(q, b, bucket, step)[1])
                held = slice(None) if self.form.shared else self.table(f"places_{bucket}") >= 0
                found[held, ..., : scores.shape[-1]] = scores[: len(found[held])]
            yield found
        later = torch.arange(k.shape[1], device=k.device) > observed[:, None]
        yield _wide(_scores(q, k)).masked_fill(later, -torch.inf)

    # -- export --------------------------------------------------------------------------------------------------
    def _node(self, q: Tensor, k: Tensor, v: Tensor, step: StepTensors) -> tuple[Tensor, ...]:
        """The node ``kvlathe::Attend``; its inputs are in the order of ``node_inputs``."""
        values = {"q": q, "k": k, "v": v, "cos": step.cos, "sin": step.sin, "query_starts": step.query_starts}
        values |= {"query_offsets": step.query_offsets, "lengths": step.lengths, **step.pools}
        values |= {"probe_weights": step.probe_weights}
        values |= {f"page_table_{i}": table for i, table in enumerate(step.page_tables)}
        values |= dict(self.named_buffers())
        width = sum(lane.rank_k + lane.rank_v for lane in self.sizes.lanes)
        shapes: list[tuple[int, ...]] = [
            (q.shape[0], self.sizes.G * sum(x.rank_v for x in self.sizes.lanes)),
            (q.shape[0], width),
        ]
        dtypes = [self.dtype, HALF_OR_FLOAT[max(self.form.hot_bits)]]
        if self.plan.probe is not None:
            places = sum(table.shape[1] for table in step.page_tables) * self.plan.page_tokens
            shapes += [(step.lengths.shape[0], self.sizes.H, places + step.query_offsets.shape[0])]
            dtypes += [torch.float32]
        outputs = torch.onnx.ops.symbolic_multi_out(
            "kvlathe::Attend",
            [values[name] for name in node_inputs(self.plan, self.layer)],
            attrs={"layer": self.layer, "scale": self.scale, "layout": self.sizes["layout"].tolist(), **ATTRIBUTES},
            dtypes=dtypes,
            shapes=shapes,
            version=1,
        )
        return tuple(outputs)


class _Bucket:
    """All places N = M * P of some pages [M] of one bucket, Hs lanes; the first ``count`` of them hold tokens."""

    def __init__(self, layer: AttendLayer, bucket: int, pages: Tensor, pools: dict[str, Tensor], count: int) -> None:
        self.layer, self.bucket, self.pages, self.pools, self.count = layer, bucket, pages, pools, count
        self.tier, self.integer = layer.form.tier(bucket), layer.form.integer(bucket)
        self.stride = layer.strides[bucket] // layer.plan.unit

    def scores(self, q: Tensor) -> Tensor:
        """q [Hs, G, Q, Rk] -> [Hs, G, Q, N]."""
        if not self.integer[0]:
            return _scores(q, self.values("k").to(q.dtype))
        return integer.scores(_wide(q), self.coded("k"), self._table("k_groups"))

    def output(self, shares: Tensor) -> Tensor:
        """shares [Hs, G, Q, N] -> [Hs, G, Q, Rv] in the layer's type."""
        if not self.integer[1]:
            return _means(shares, self.values("v").to(self.layer.dtype))
        coded = self.coded("v")
        if self.tier.axis_v == "token":
            return integer.outputs(shares, coded).to(self.layer.dtype)
        for part in (coded.scale, coded.minimum):
            part[:, self.count :] = 0  # of no token: it may be anything
        groups = self._table("v_groups")
        return integer.outputs_by_rank(shares, coded, groups, self.layer.plan.page_tokens).to(self.layer.dtype)

    def values(self, x: str) -> Tensor:
        """K or V [Hs, N, R] float; zeros where there is no token."""
        found = self._stored(x)
        found[:, self.count :] = 0
        return found

    def _stored(self, x: str) -> Tensor:
        bits = self.tier.bits_k if x == "k" else self.tier.bits_v
        if bits < 16:
            scale, minimum = (self._spread(x, part) for part in self.metadata(x))
            return self.codes(x) * scale + minimum
        tokens = torch.arange(self.layer.plan.page_tokens, device=self.pages.device)[:, None]
        rows = (self.pages * (self.stride * 8 // bits))[:, None, None] + tokens * self._table(f"{x}_steps")[:, 0]
        rows = rows + self._table(f"{x}_units")[:, 0]
        return self.pools[pool_name(bits)][rows].flatten(-2).flatten(1, 2)

    def coded(self, x: str) -> integer.Coded:
        """K or V for integer products."""
        return integer.Coded(self.codes(x), *self.metadata(x), self.sums(x) if self.tier.sums else None)

    def sums(self, x: str) -> Tensor:
        """The stored sums of the groups' codes, float."""
        tier = self.tier
        width = sum_bytes(tier.bits_k, tier.group_k) if x == "k" else sum_bytes(tier.bits_v, tier.group_v)
        rows = (self.pages * self.stride)[:, None] + self._table(f"{x}_sums")
        data, at = self.pools["pool_u8"][rows].flatten(1).float(), self._table(f"{x}_sums_at")
        return _by_lane(reduce(torch.add, (data[:, at + i] * 256.0**i for i in range(width))))

    def codes(self, x: str) -> Tensor:
        """uint8 [Hs, N, R]."""
        bits = self.tier.bits_k if x == "k" else self.tier.bits_v
        packed = self.pools["pool_u8"][(self.pages * self.stride)[:, None] + self._table(f"{x}_codes")]
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
        unpacked, at = ((packed[..., None] >> shifts) & ((1 << bits) - 1)).flatten(1), self._table(f"{x}_code_at")
        if self.layer.form.axis(self.bucket, x) == "rank":
            return _by_lane(_gathered(unpacked, at, self.layer.plan.unit))
        return _by_lane(unpacked.unflatten(1, (-1, self.layer.plan.page_tokens))[:, at[:, :, 0]].mT)

    def _spread(self, x: str, part: Tensor) -> Tensor:
        """Metadata of groups -> of every element [Hs, N, R]."""
        if self.layer.form.axis(self.bucket, x) == "rank":
            return part @ self._table(f"{x}_groups").to(part.dtype)
        return part.repeat_interleave(self.layer.form.steps(self.bucket, x), 1)

    def metadata(self, x: str) -> tuple[Tensor, Tensor]:
        """Scale and minimum float: [Hs, N, g] of groups along the rank, [Hs, N/n, R] along the tokens."""
        rows = (self.pages * (self.stride // 2))[:, None] + self._table(f"{x}_meta")
        meta, at = self.pools["pool_f16"][rows].flatten(1).float(), self._table(f"{x}_meta_at")
        return _by_lane(meta[:, at]), _by_lane(meta[:, at + 1])

    def _table(self, name: str) -> Tensor:
        return self.layer.table(f"{name}_{self.bucket}")


def _by_lane(x: Tensor) -> Tensor:
    """[M, Hs, 1, P, R] -> [Hs, M * P, R]."""
    return x.squeeze(2).transpose(0, 1).flatten(1, 2)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype == torch.float16 else x


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """q [H, G, Q, R], k [H, N, R] -> [H, G, Q, N]."""
    return q @ k.unsqueeze(1).mT


def _means(shares: Tensor, v: Tensor) -> Tensor:
    """shares [H, G, Q, N], v [H, N, R] -> [H, G, Q, R]."""
    return shares.to(v.dtype) @ v.unsqueeze(1)


def node_inputs(plan: CompressionPlan, layer: int) -> list[str]:
    """Names of the node's inputs, in order. They are the same for every layer of a plan."""
    form, buckets = Form(plan), range(len(plan.buckets))
    names = ["q", "k", "v", *(["cos", "sin"] if form.rope else []), "query_starts", "query_offsets", "lengths"]
    names += [f"page_table_{i}" for i in buckets] + list(form.pools)
    names += ["proj_q", "proj_k", "centre_k"] if plan.projected else []
    names += ["probe_weights"] if plan.probe is not None else []
    return names + list(LayerTables(plan, layer))


def _sequences(step: StepTensors) -> Iterator[tuple[int, slice]]:
    """(sequence, its rows) of every sequence that has queries."""
    starts = step.query_starts.tolist()
    return ((b, slice(a, z)) for b, (a, z) in enumerate(pairwise(starts)) if z > a)


def _gathered(x: Tensor, index: Tensor, size: int) -> Tensor:
    """x [T, n * size], index [..., m] -> those units of ``size`` elements of each row, [T, ..., m * size]."""
    return x.unflatten(-1, (-1, size))[:, index].flatten(-2)


def _turned(x: Tensor) -> Tensor:
    """A quarter turn of every plane (pairs i, i + width/2)."""
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)
