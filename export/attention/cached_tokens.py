"""CachedTokens: K and V of one sequence in one bucket, read from the pool's pages.

Sizes: M pages, P tokens a page, N = M * P places, Hs lanes of the bucket, R the widest
rank.
"""

from __future__ import annotations

from functools import reduce
from typing import Protocol

import torch
from torch import Tensor

from kvlathe.export.attention import integer
from kvlathe.export.attention.softmax_state import means_of, scores_of, widened
from kvlathe.export.attention.tables import PlanFacts
from kvlathe.plan.codec import worths
from kvlathe.plan.formats import Format
from kvlathe.plan.packing import byte_codes
from kvlathe.plan.plan import CompressionPlan


class TabledLayer(Protocol):
    """The fields that are read of an AttendLayer."""

    plan: CompressionPlan
    facts: PlanFacts

    @property
    def strides(self) -> tuple[int, ...]: ...

    dtype: torch.dtype

    def table(self, name: str) -> Tensor: ...


class CachedTokens:
    """All places N = M * P of some pages [M] of one bucket, Hs lanes; the first
    ``count`` of them hold tokens."""

    def __init__(
        self,
        layer: TabledLayer,
        bucket: int,
        pages: Tensor,
        pools: dict[str, Tensor],
        count: int,
    ) -> None:
        self.layer = layer
        self.bucket = bucket
        self.pages = pages
        self.pools = pools
        self.count = count
        self.tier, self.integer = layer.facts.tier(bucket), layer.facts.integer(bucket)
        self.stride = layer.strides[bucket] // layer.plan.index.unit

    def scores(self, q: Tensor) -> Tensor:
        """q [Hs, G, Q, Rk] -> [Hs, G, Q, N]."""
        if not self.integer[0]:
            return scores_of(q, self.values("k").to(q.dtype))
        return integer.scores(widened(q), self.coded("k"), self._table("k_groups"))

    def output(self, shares: Tensor) -> Tensor:
        """shares [Hs, G, Q, N] -> [Hs, G, Q, Rv] in the layer's type."""
        if not self.integer[1]:
            return means_of(shares, self.values("v").to(self.layer.dtype))
        coded = self.coded("v")
        if self.tier.v.along_tokens:
            return integer.outputs(shares, coded).to(self.layer.dtype)
        for metadata in (coded.scale, coded.minimum):
            metadata[:, self.count :] = 0  # of no token: it may be anything
        return integer.outputs_by_rank(
            shares, coded, self._table("v_groups"), self.layer.plan.page_tokens
        ).to(self.layer.dtype)

    def values(self, x: str) -> Tensor:
        """K or V [Hs, N, R] float; zeros where there is no token."""
        stored = self._stored(x)
        stored[:, self.count :] = 0
        return stored

    def _stored(self, x: str) -> Tensor:
        form = self.tier.of(x)
        if form.is_coded:
            scale, minimum = self.metadata(x)
            values = self.codes(x) * self._spread(x, scale)
            return values if minimum is None else values + self._spread(x, minimum)
        page_tokens = self.layer.plan.page_tokens
        tokens = torch.arange(page_tokens, device=self.pages.device).unsqueeze(1)
        page_elements = self.stride * 8 // form.bits
        first_rows = (self.pages * page_elements)[:, None, None]
        steps = self._table(f"{x}_steps")[:, 0]
        units = self._table(f"{x}_units")[:, 0]
        rows = first_rows + tokens * steps + units  # [H, pages, P, units]
        return self.pools[form.pool][rows].flatten(-2).flatten(1, 2)

    def coded(self, x: str) -> integer.Coded:
        """K or V for integer products."""
        scale, minimum = self.metadata(x)
        assert minimum is not None  # whole numbers have one (Decoding.is_whole)
        sums = self.sums(x) if self.tier.sums else None
        return integer.Coded(self.codes(x), scale, minimum, sums)

    def sums(self, x: str) -> Tensor:
        """The stored sums of the groups' codes, float."""
        width = self.tier.of(x).sum_bytes
        rows = (self.pages * self.stride)[:, None] + self._table(f"{x}_sums")
        data = self.pools["pool_u8"][rows].flatten(1).float()
        at = self._table(f"{x}_sums_at")
        # Little-endian: byte i counts 256**i.
        parts = (data[:, at + i] * 256.0**i for i in range(width))
        return _by_lane(reduce(torch.add, parts))

    def codes(self, x: str) -> Tensor:
        """The worth of each code [Hs, N, R]: uint8 where it is a whole number."""
        form = self.tier.of(x)
        facts = self.layer.facts
        rows = (self.pages * self.stride)[:, None] + self._table(f"{x}_codes")
        data = self.pools["pool_u8"][rows].flatten(1)
        every_piece = data.unflatten(1, (-1, facts.piece(form)))
        chosen = every_piece[:, self._table(f"{x}_code_at")]
        codes = unpacked(chosen.unflatten(-2, (-1, form.runs)), form).flatten(-2)
        if form.along_tokens:
            channels = codes.unflatten(-1, (-1, self.layer.plan.page_tokens))
            codes = channels.squeeze(-3).mT
        return _by_lane(codes)

    def _spread(self, x: str, part: Tensor) -> Tensor:
        """Metadata of groups -> of every element [Hs, N, R]."""
        if self.tier.of(x).along_rank:
            return part @ self._table(f"{x}_groups").to(part.dtype)
        return part.repeat_interleave(self.layer.facts.steps(self.bucket, x), 1)

    def metadata(self, x: str) -> tuple[Tensor, Tensor | None]:
        """Scale and minimum float, None where it is 0: [Hs, N, g] of groups along the
        rank, [Hs, N/n, R] along the tokens."""
        rows = (self.pages * (self.stride // 2))[:, None] + self._table(f"{x}_meta")
        meta, at = (
            self.pools["pool_f16"][rows].flatten(1).float(),
            self._table(f"{x}_meta_at"),
        )
        first = _by_lane(meta[:, at])
        decoding = self.tier.of(x).decoding
        if decoding.has_minimum:
            return first, _by_lane(meta[:, at + 1])
        minimum = first * decoding.lowest if decoding.lowest else None
        return first * decoding.step, minimum

    def _table(self, name: str) -> Tensor:
        return self.layer.table(f"{name}_{self.bucket}")


def unpacked(data: Tensor, form: Format) -> Tensor:
    """Bytes [..., runs, n] -> what the codes are worth [..., n * together]: uint8 where
    it is a whole number."""
    if not form.needs_table:
        return data.squeeze(-2)
    device = data.device
    shares = torch.from_numpy(byte_codes(form)).to(device)
    codes = shares[torch.arange(form.runs, device=device)[:, None], data.int()].sum(-3)
    return torch.from_numpy(worths(form)).to(device)[codes.flatten(-2)]


def _by_lane(x: Tensor) -> Tensor:
    """[M, Hs, 1, P, R] -> [Hs, M * P, R]."""
    return x.squeeze(2).transpose(0, 1).flatten(1, 2)


def gathered(x: Tensor, index: Tensor, size: int) -> Tensor:
    """x [T, n * size], index [..., m] -> those units of ``size`` elements of each row,
    [T, ..., m * size]."""
    return x.unflatten(-1, (-1, size))[:, index].flatten(-2)
