"""The attention op ``kvlathe::Attend`` (docs/attend.md): eager arithmetic in torch, and
its node while exporting.

Sizes as in docs/attend.md: T packed tokens, B sequences, H lanes, G query heads a lane,
D the widest lane input, Rk/Rv the widest ranks, P tokens a page, N cached tokens of one
sequence in one bucket.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvlathe.export.attention.cached_tokens import CachedTokens, gathered
from kvlathe.export.attention.node import attend_node
from kvlathe.export.attention.softmax_state import (
    SoftmaxState,
    capped,
    scores_of,
    widened,
)
from kvlathe.export.attention.step import StepTensors, sequences
from kvlathe.export.attention.tables import LayerTables, PlanFacts
from kvlathe.export.attention.windows import NEVER, LaneWindows, seen_from
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.plan import CompressionPlan

HALF_OR_FLOAT = {16: torch.float16, 32: torch.float32}


class AttendLayer(nn.Module):
    """Attend of one layer. State: ``proj_q``, ``proj_k`` [H, D, Rk] and ``centre_k``
    [H, Rk] where the plan projects; ``sinks`` [H, G] where the model has them.

    A fresh layer of a projecting plan holds the identity; fold fills in the real
    matrices (a lane that is not projected keeps its identity). Row c of a lane's matrix
    belongs to element c of its input; rows and columns past its own width are zeros.
    """

    proj_q: Tensor
    proj_k: Tensor
    centre_k: Tensor
    sinks: Tensor

    def __init__(
        self,
        plan: CompressionPlan,
        layer: int,
        scale: float,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.plan, self.layer, self.scale, self.dtype = plan, layer, scale, dtype
        self.facts = PlanFacts(plan)
        self.sizes = LayerTables(plan, layer)
        self._strides: tuple[int, ...] | None = None
        if plan.index.projected:
            identity = torch.eye(self.sizes.D, self.sizes.Rk, dtype=dtype).repeat(
                self.sizes.H, 1, 1
            )
            self.register_buffer("proj_q", identity)
            self.register_buffer("proj_k", identity.clone())
            self.register_buffer(
                "centre_k", torch.zeros(self.sizes.H, self.sizes.Rk, dtype=dtype)
            )
        if plan.model.sinks:
            self.register_buffer("sinks", torch.zeros(self.sizes.H, self.sizes.G))
        for name, values in self.sizes.items():
            self.register_buffer(name, torch.from_numpy(values), persistent=False)

    def table(self, name: str) -> Tensor:
        return self.get_buffer(name)

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes of a page of each bucket: only cached tokens need them."""
        if self._strides is None:
            self._strides = tuple(CacheLayout(self.plan).page_stride)
        return self._strides

    @property
    def windows(self) -> LaneWindows | None:
        """The windows in which lanes see the tokens before them; None where they see
        all."""
        if not self.plan.index.sees_less:
            return None
        sink, recent, exact = (
            self.table(f"window_{x}") for x in ("sink", "recent", "exact")
        )
        return LaneWindows(sink, recent, exact, self.plan.page_tokens)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, step: StepTensors
    ) -> tuple[Tensor, ...]:
        """q, k, v packed as in docs/attend.md -> (o [T, sum of G * rank_v], rows [T,
        sum of rank_k + rank_v]), and mass [B, H, N] where the plan has an observation
        window. Where ``step`` has places, o is that of these R tokens.
        """
        if torch.compiler.is_exporting():
            return self._node(q, k, v, step)
        u = self.plan.index.unit
        q, k = self.prepare(q, k, step.cos, step.sin)
        k, v = self._hot(k, 0), self._hot(v, 1)
        rows = self._rows(k.transpose(0, 1).flatten(1), v)
        k, v = k.to(self.dtype), v.to(self.dtype)
        v = gathered(v, self.table("v_units"), u).transpose(0, 1)
        if step.places is not None:
            o = self._uncached_at(step.places, q, k, v, step)
        elif bool(step.lengths.any()):
            o = self._cached(q, k, v, step)
        else:
            o = self._uncached(q, k, v, step)
        o = gathered(o.permute(2, 0, 1, 3).flatten(1), self.table("o_units"), u)
        return (
            (o, rows)
            if not self.plan.index.observes
            else (o, rows, self.mass(q, k, step))
        )

    def _rows(self, k: Tensor, v: Tensor) -> Tensor:
        """The rows to append from k [T, H * Rk] and packed v."""
        index, units = self.plan.index, self.table("row_units")
        if index.some_in_keys:
            return gathered(torch.cat([k, v], -1), units, index.unit)
        rows = gathered(k, units, index.unit)
        return rows if index.values_in_keys else torch.cat([rows, v], -1)

    # -- fresh tokens ------------------------------------------------------------------
    def prepare(
        self, q: Tensor, k: Tensor, cos: Tensor | None, sin: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """RoPE, projection, centre, scale: q' [H, G, T, Rk] times the softmax scale, k'
        [H, T, Rk]."""
        s = self.sizes
        q = self._rotated(q, "q", s.G, cos, sin).permute(1, 2, 0, 3) * self.scale
        k = self._rotated(k, "k", 1, cos, sin)[:, :, 0].transpose(0, 1)
        if self.plan.index.projected:
            return q @ self.proj_q.unsqueeze(
                1
            ), k @ self.proj_k - self.centre_k.unsqueeze(1)
        return q, k

    def _rotated(
        self, x: Tensor, name: str, heads: int, cos: Tensor | None, sin: Tensor | None
    ) -> Tensor:
        """Packed rows -> [T, H, heads, W], rotated."""
        s = self.sizes
        if self.facts.even:
            x = x.unflatten(-1, (s.H, heads, s.D))
            if self.facts.rope:
                assert cos is not None and sin is not None
                cosines = torch.cat([cos, cos], -1)[:, None, None]
                sines = torch.cat([sin, sin], -1)[:, None, None]
                x = x * cosines + _turned(x) * sines
            return F.pad(x, (0, s.W - s.D))
        grain = self.facts.grain
        x = F.pad(x, (0, grain))
        own = gathered(x, self.table(f"{name}_columns"), grain)
        if not self.facts.rope:
            return own
        assert cos is not None and sin is not None
        partner = gathered(x, self.table(f"{name}_partners"), grain)
        cosines = F.pad(cos, (0, 1), value=1.0)
        cosines = cosines[:, self.table("cos_columns")]
        sines = torch.cat([-sin, sin], -1)
        sines = F.pad(sines, (0, 1))
        sines = sines[:, self.table("sin_columns")]
        return own * cosines + partner * sines

    def _hot(self, x: Tensor, part: int) -> Tensor:
        if x.dtype == torch.float64:
            return x
        return x.to(HALF_OR_FLOAT[self.facts.hot_bits[part]])

    # -- attention ---------------------------------------------------------------------
    def _uncached(self, q: Tensor, k: Tensor, v: Tensor, step: StepTensors) -> Tensor:
        """Nothing is cached: each sequence is one causal square."""
        if not self.plan.model.shifts:
            return self._cached(q, k, v, step)
        out = q.new_zeros((*q.shape[:3], self.sizes.Rv))
        for _, rows in sequences(step):
            seen = self._seen(rows.stop - rows.start)
            out[:, :, rows] = self._softmax(q[:, :, rows], k[:, rows], v[:, rows], seen)
        return out

    def _uncached_at(
        self, places: Tensor, q: Tensor, k: Tensor, v: Tensor, step: StepTensors
    ) -> Tensor:
        """``_uncached`` of one sequence, at these places [R] alone: [H, G, R, Rv]."""
        if not self.plan.model.shifts:
            return self._uncached(q, k, v, step)[:, :, places]
        every = torch.arange(k.shape[1], device=places.device)
        seen = seen_from(places, every, self.windows, self.sizes.G)
        return self._softmax(q[:, :, places], k, v, seen)

    def _softmax(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
        """One sequence's q [H, G, Q, Rk] over its k [H, N, Rk] and v [H, N, Rv] -> [H,
        G, Q, Rv]; ``seen`` None is causal. Widths are evened out, which fused kernels
        want.
        """
        width = max(self.sizes.Rk, self.sizes.Rv)
        q, k, v = (F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
        qs = q.flatten(0, 1)
        ks = self._of_queries(k)
        vs = self._of_queries(v)
        return F.scaled_dot_product_attention(
            qs[None], ks[None], vs[None], seen, is_causal=seen is None, scale=1.0
        )[0].unflatten(0, (self.sizes.H, self.sizes.G))[..., : self.sizes.Rv]

    def _of_queries(self, x: Tensor) -> Tensor:
        """[H, N, R] -> [H * G, N, R]: each head's rows for each of its query heads."""
        return x[:, None].expand(-1, self.sizes.G, -1, -1).flatten(0, 1)

    def _seen(self, tokens: int) -> Tensor | None:
        """The tokens that each query of one whole sequence sees, [1, H * G, Q, N]; None
        where it sees all up to its own."""
        if self.windows is None:
            return None
        places = torch.arange(tokens, device=self.table("layout").device)
        return seen_from(places, places, self.windows, self.sizes.G)

    def _cached(self, q: Tensor, k: Tensor, v: Tensor, step: StepTensors) -> Tensor:
        out = q.new_zeros((*q.shape[:3], self.sizes.Rv))
        buckets = range(len(self.plan.index.buckets))
        for b, rows in sequences(step):
            own_q = q[:, :, rows]
            own_k = k[:, rows]
            states = [self._own(own_q, own_k, v[:, rows], b, step)]
            for bucket in buckets:
                if step.lengths[b, bucket] > 0:
                    states.append(self._cold(own_q, b, bucket, step))
            out[:, :, rows] = self.settled(reduce(SoftmaxState.merge, states)).out
        return out

    def settled(self, state: SoftmaxState) -> SoftmaxState:
        """The softmax over all tokens, with the model's sinks."""
        return state.beside(self.sinks) if self.plan.model.sinks else state

    def _own(
        self, q: Tensor, k: Tensor, v: Tensor, b: int, step: StepTensors
    ) -> SoftmaxState:
        """Attention of sequence b over the step's own tokens."""
        softcap = self.plan.model.softcap
        if self.windows is None:
            return SoftmaxState.causal(q, k, v, softcap=softcap)
        places = self._places(b, k.shape[1], step)
        return SoftmaxState.causal(
            q, k, v, self.windows.hidden(places, places), softcap
        )

    def _places(self, b: int, count: int, step: StepTensors) -> Tensor:
        """Places [H, count] of the step's own tokens of sequence b among all that each
        lane holds of it."""
        held = self._held("window_buckets", b, step)
        return held + torch.arange(count, device=held.device)

    def _held(self, buckets: str, b: int, step: StepTensors) -> Tensor:
        """Tokens of sequence b that each lane has in some of its buckets, [H, 1]."""
        return (self.table(buckets) * step.lengths[b]).sum(1, keepdim=True)

    def _hidden(self, b: int, bucket: int, queries: int, step: StepTensors) -> Tensor:
        """The cached places of a bucket that the windows of its lanes hide, [Hs, 1, Q,
        N]."""
        assert self.windows is not None
        page = self.plan.page_tokens
        end = -(-int(step.lengths[b, bucket]) // page) * page
        tokens = torch.arange(end, device=step.lengths.device)[None]
        if self.plan.index.buckets[bucket].is_hot:
            tokens = tokens + self._held("window_sealed", b, step)
        hidden = self.windows.hidden(self._places(b, queries, step), tokens)
        if not self.facts.shared:
            hidden = hidden[self.table(f"lanes_{bucket}")]
        return hidden[:, None]

    def _cold(self, q: Tensor, b: int, bucket: int, step: StepTensors) -> SoftmaxState:
        """Attention of sequence b over everything it has in one bucket."""
        pool, scores = self._cold_scores(q, b, bucket, step)
        state = SoftmaxState.of(scores, pool.output)
        if self.facts.shared:
            return state
        return state.over(self.table(f"places_{bucket}"))

    def _cold_scores(
        self, q: Tensor, b: int, bucket: int, step: StepTensors
    ) -> tuple[CachedTokens, Tensor]:
        """Scores [Hs, G, Q, M * P] of the bucket's own lanes; -inf where there is no
        token."""
        count = int(step.lengths[b, bucket])
        pages = step.page_tables[bucket][b, : -(-count // self.plan.page_tokens)].long()
        if not self.facts.shared:
            q = q[self.table(f"lanes_{bucket}")]
        pool = CachedTokens(self, bucket, pages, step.pools, count)
        missing = (
            torch.arange(len(pages) * self.plan.page_tokens, device=pages.device)
            >= count
        )
        scores = capped(pool.scores(q), self.plan.model.softcap)
        if self.windows is not None:
            hidden = self._hidden(b, bucket, q.shape[2], step)
            scores = widened(scores).masked_fill(hidden, NEVER)
        return pool, scores.masked_fill(missing, -torch.inf)

    def mass(self, q: Tensor, k: Tensor, step: StepTensors) -> Tensor:
        """Observed attention [B, H, N] float32 of prepared q [H, G, T, Rk] and k [H, T,
        Rk] (docs/attend.md).

        A softmax of its own for the observed rows alone; the others cost nothing.
        """
        widths = [
            table.shape[1] * self.plan.page_tokens for table in step.page_tables
        ] or [0] * len(self.plan.index.buckets)
        mass = q.new_zeros(
            (len(step.lengths), self.sizes.H, sum(widths) + len(step.query_offsets)),
            dtype=torch.float32,
        )
        if step.observation_weights is None:
            return mass
        for b, rows in sequences(step):
            observed = step.observation_weights[rows].nonzero()[:, 0]
            if len(observed):
                parts = self._observed_scores(
                    q[:, :, rows][:, :, observed], k[:, rows], observed, b, step, widths
                )
                shares = self._shares(torch.cat(list(parts), -1))
                weights = step.observation_weights[rows][observed].to(shares.dtype)
                if self.plan.index.compaction:
                    seen = (shares * -weights[:, None]).amax((1, 2))
                else:
                    seen = torch.einsum("hgrn,r->hn", shares, weights)
                mass[b, :, : seen.shape[1]] = seen.to(mass.dtype)
        return mass

    def _shares(self, scores: Tensor) -> Tensor:
        """scores [H, G, R, places] of all that the model's softmax sees -> the same of
        shares."""
        lse = scores.logsumexp(-1, keepdim=True)
        return (scores - self.settled(SoftmaxState(lse, lse)).lse).exp()

    def _observed_scores(
        self,
        q: Tensor,
        k: Tensor,
        observed: Tensor,
        b: int,
        step: StepTensors,
        widths: list[int],
    ) -> Iterator[Tensor]:
        """Scores [H, G, R, places] of sequence b's ``observed`` rows q over each
        bucket, then over its own tokens k."""
        for bucket, width in enumerate(widths):
            padded = q.new_full(
                (*q.shape[:3], width), -torch.inf, dtype=widened(q).dtype
            )
            if step.lengths[b, bucket] > 0:
                scores = widened(self._cold_scores(q, b, bucket, step)[1])
                held = (
                    slice(None)
                    if self.facts.shared
                    else self.table(f"places_{bucket}") >= 0
                )
                padded[held, ..., : scores.shape[-1]] = scores[: len(padded[held])]
            yield padded
        later = torch.arange(k.shape[1], device=k.device) > observed[:, None]
        scores = capped(scores_of(q, k), self.plan.model.softcap)
        yield widened(scores).masked_fill(later, -torch.inf)

    # -- export ------------------------------------------------------------------------
    def _node(
        self, q: Tensor, k: Tensor, v: Tensor, step: StepTensors
    ) -> tuple[Tensor, ...]:
        """The same as one node of the exported graph."""
        values: dict[str, Tensor | None] = {"q": q, "k": k, "v": v}
        values |= {"cos": step.cos, "sin": step.sin}
        values |= {
            "cu_seqlens_q": step.cu_seqlens_q,
            "query_offsets": step.query_offsets,
            "lengths": step.lengths,
            "observation_weights": step.observation_weights,
        }
        values |= step.pools
        values |= {f"page_table_{i}": table for i, table in enumerate(step.page_tables)}
        values |= dict(self.named_buffers())
        dtypes = self.dtype, HALF_OR_FLOAT[max(self.facts.hot_bits)]
        return attend_node(self.plan, self.layer, self.scale, values, dtypes)


def _turned(x: Tensor) -> Tensor:
    """A quarter turn of every plane (pairs i, i + width/2)."""
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)
