"""The attention op ``kvlathe::Attend`` (docs/attend.md): eager arithmetic in torch, and its node while exporting.

Sizes as in docs/attend.md: T packed tokens, B sequences, H lanes, G query heads a lane, D the widest lane input, Rk/Rv
the widest ranks, P tokens a page, N cached tokens of one sequence in one bucket.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvlathe.export.layout import CacheLayout
from kvlathe.export.plan import CompressionPlan
from kvlathe.export.tables import Form, LayerTables, pool_name

ATTRIBUTES = {"plugin_namespace": "kvlathe", "plugin_version": "1"}
HALF_OR_FLOAT = {16: torch.float16, 32: torch.float32}


@dataclass(frozen=True)
class StepTensors:
    """What every layer of one step shares: the op's inputs of the same names. ``cos``/``sin`` are None without RoPE.

    Without cached tokens (``lengths`` all 0) ``page_tables`` and ``pools`` may stay empty.
    """

    cos: Tensor | None
    sin: Tensor | None
    query_starts: Tensor
    query_offsets: Tensor
    lengths: Tensor
    page_tables: list[Tensor] = field(default_factory=list)
    pools: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """Attention over one list of tokens, as a softmax state: they merge. ``mass`` is log(sum exp score) [H, G, Q, 1]
    and ``out`` the mean of the values under that softmax [H, G, Q, Rv]."""

    mass: Tensor
    out: Tensor

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Part:
        """q [H, G, Q, Rk] already scaled, k [H, N, Rk], v [H, N, Rv]; ``causal``: query i sees tokens 0 .. i."""
        scores = (q @ k.unsqueeze(1).mT).float() if q.dtype == torch.float16 else q @ k.unsqueeze(1).mT
        if causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        mass = scores.logsumexp(-1, keepdim=True)
        return cls(mass, (scores - mass).exp().to(v.dtype) @ v.unsqueeze(1))

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

    def forward(self, q: Tensor, k: Tensor, v: Tensor, step: StepTensors) -> tuple[Tensor, Tensor]:
        """q, k, v packed as in docs/attend.md -> (o [T, sum of G * rank_v], rows [T, sum of rank_k + rank_v])."""
        if torch.compiler.is_exporting():
            return self._node(q, k, v, step)
        u = self.plan.unit
        q, k = self.prepare(q, k, step.cos, step.sin)
        k, v = self._hot(k, 0), self._hot(v, 1)
        rows = torch.cat([_gathered(k.transpose(0, 1).flatten(1), self.table("row_units"), u), v], -1)
        k, v = k.to(self.dtype), v.to(self.dtype)
        v = _gathered(v, self.table("v_units"), u).transpose(0, 1)
        o = self._uncached(q, k, v, step) if not bool(step.lengths.any()) else self._cached(q, k, v, step)
        return _gathered(o.permute(2, 0, 1, 3).flatten(1), self.table("o_units"), u), rows

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
            parts = [Part.of(q[:, :, rows], k[:, rows], v[:, rows], causal=True)]
            for bucket in range(len(self.plan.buckets)):
                if step.lengths[b, bucket] > 0:
                    parts.append(self._cold(q[:, :, rows], b, bucket, step))
            out[:, :, rows] = reduce(Part.merge, parts).out
        return out

    def _cold(self, q: Tensor, b: int, bucket: int, step: StepTensors) -> Part:
        """Attention of sequence b over everything it has in one bucket."""
        count = int(step.lengths[b, bucket])
        pages = step.page_tables[bucket][b, : -(-count // self.plan.page_tokens)].long()
        k, v = (self._read(x, bucket, pages, step.pools)[:, :count].to(self.dtype) for x in ("k", "v"))
        if self.form.shared:
            return Part.of(q, k, v, causal=False)
        lanes = self.table(f"lanes_{bucket}")
        return Part.of(q[lanes], k, v, causal=False).over(self.table(f"places_{bucket}"))

    def _read(self, x: str, bucket: int, pages: Tensor, pools: dict[str, Tensor]) -> Tensor:
        """K or V of all tokens of ``pages`` [M] -> [Hs, M * P, R] float."""
        tier = self.form.tier(bucket)
        bits, stride = (tier.bits_k if x == "k" else tier.bits_v), self.strides[bucket] // self.plan.unit
        if bits >= 16:
            tokens = torch.arange(self.plan.page_tokens, device=pages.device)[:, None]
            rows = (pages * (stride * 8 // bits))[:, None, None] + tokens * self.table(f"{x}_steps_{bucket}")[:, 0]
            rows = rows + self.table(f"{x}_units_{bucket}")[:, 0]
            return pools[pool_name(bits)][rows].flatten(-2).flatten(1, 2)
        codes = pools["pool_u8"][(pages * stride)[:, None] + self.table(f"{x}_codes_{bucket}")]
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
        codes = ((codes[..., None] >> shifts) & ((1 << bits) - 1)).flatten(1)
        meta = pools["pool_f16"][(pages * (stride // 2))[:, None] + self.table(f"{x}_meta_{bucket}")].flatten(1).float()
        code_at, meta_at = self.table(f"{x}_code_at_{bucket}"), self.table(f"{x}_meta_at_{bucket}")
        values = codes[:, code_at] * meta[:, meta_at] + meta[:, meta_at + 1]
        return values.squeeze(2).transpose(0, 1).flatten(1, 2)

    # -- export --------------------------------------------------------------------------------------------------
    def _node(self, q: Tensor, k: Tensor, v: Tensor, step: StepTensors) -> tuple[Tensor, Tensor]:
        """The node ``kvlathe::Attend``; its inputs are in the order of ``node_inputs``."""
        values = {"q": q, "k": k, "v": v, "cos": step.cos, "sin": step.sin, "query_starts": step.query_starts}
        values |= {"query_offsets": step.query_offsets, "lengths": step.lengths, **step.pools}
        values |= {f"page_table_{i}": table for i, table in enumerate(step.page_tables)}
        values |= dict(self.named_buffers())
        width = sum(lane.rank_k + lane.rank_v for lane in self.sizes.lanes)
        out, rows = torch.onnx.ops.symbolic_multi_out(
            "kvlathe::Attend",
            [values[name] for name in node_inputs(self.plan, self.layer)],
            attrs={"layer": self.layer, "scale": self.scale, **ATTRIBUTES},
            dtypes=(self.dtype, HALF_OR_FLOAT[max(self.form.hot_bits)]),
            shapes=((q.shape[0], self.sizes.G * sum(x.rank_v for x in self.sizes.lanes)), (q.shape[0], width)),
            version=1,
        )
        return out, rows


def node_inputs(plan: CompressionPlan, layer: int) -> list[str]:
    """Names of the node's inputs, in order. They are the same for every layer of a plan."""
    form, buckets = Form(plan), range(len(plan.buckets))
    names = ["q", "k", "v", *(["cos", "sin"] if form.rope else []), "query_starts", "query_offsets", "lengths"]
    names += [f"page_table_{i}" for i in buckets] + list(form.pools)
    names += ["proj_q", "proj_k", "centre_k"] if plan.projected else []
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
