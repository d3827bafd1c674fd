"""SealedAttend: attention over one whole sequence as its decode would compute it, full pages read as they are sealed.

A token sees its own page in the hot format and every earlier page as the codes that sealing leaves, which is what an
engine computes on a one-page grid (LLM.logits). No pool and no page table: keys and values are rounded in place, so a
plan that quantizes can be scored before there is an engine. The codes are those of runtime/codec.py, in torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlathe.errors import KvlatheError
from kvlathe.export import integer
from kvlathe.export.attend import AttendLayer, Part, StepTensors
from kvlathe.export.decoder import Decoder
from kvlathe.export.layout import groups_along_rank
from kvlathe.export.plan import CompressionPlan, Lane, Tier

SCORES_AT_ONCE = 1 << 21
"""Scores of old tokens in memory at a time: what a CPU's caches hold (eight times as many take twice the time)."""


def reading(decoder: Decoder) -> Decoder:
    """``decoder``, whose ``logits`` from now on are those of token-by-token decode.

    Raises KvlatheError for a plan that chooses among tokens: what a page then holds depends on later queries.
    """
    plan = decoder.plan
    if plan.ranked or plan.stages:
        raise KvlatheError(
            "this plan cannot be scored before it is built",
            "it chooses tokens by the attention they get",
            "choose its options, and look at kvlathe eval",
        )
    if any(bucket.source is not None for bucket in plan.buckets):
        for layer in decoder.layers.values():
            assert isinstance(layer.attend, AttendLayer)
            layer.attend = SealedAttend.of(layer.attend)
    return decoder


class SealedAttend(AttendLayer):
    """An AttendLayer whose steps begin with nothing cached and read every full page as it is sealed."""

    @classmethod
    def of(cls, layer: AttendLayer) -> SealedAttend:
        made = cls(layer.plan, layer.layer, layer.scale, layer.dtype)
        made.load_state_dict(layer.state_dict(), assign=True)
        return made

    @cached_property
    def seals(self) -> list[Seal]:
        """How each active lane of this layer is sealed."""
        heads = self.plan.model.kv_heads
        tiers = {
            lane: self.plan.tiers[bucket.tier]
            for bucket in self.plan.buckets
            if bucket.source is not None
            for lane in bucket.lanes
        }
        return [Seal(self.plan, lane, tiers.get(lane.layer * heads + lane.head)) for lane in self.sizes.lanes]

    def _uncached(self, q: Tensor, k: Tensor, v: Tensor, step: StepTensors) -> Tensor:
        """q [H, G, T, Rk], k [H, T, Rk], v [H, T, Rv] -> [H, G, T, Rv]; each sequence from its first token."""
        starts = step.query_starts.tolist()
        rows = [slice(a, z) for a, z in pairwise(starts) if z > a]
        return torch.cat([self._sequence(q[:, :, at], k[:, at], v[:, at]) for at in rows], 2)

    def _sequence(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        page, tokens = self.plan.page_tokens, k.shape[1]
        fresh = _own_page(q, k, v, page)
        whole = (tokens - 1) // page * page
        if not whole:
            return fresh.out
        pairs = zip(self.seals, k, v, strict=True)
        keys, values = (torch.stack(x) for x in zip(*(seal(a[:whole], b[:whole]) for seal, a, b in pairs), strict=True))
        queries = torch.stack([seal.queries(x) for seal, x in zip(self.seals, q, strict=True)])
        step = max(1, SCORES_AT_ONCE // (q.shape[0] * q.shape[1] * whole * page)) * page
        found = [fresh.out[:, :, :page]]
        for start in range(page, tokens, step):
            rows = slice(start, min(start + step, tokens))
            old = self._earlier(queries[:, :, rows], keys, values, start)
            found.append(_rows(fresh, rows).merge(old).out)
        return torch.cat(found, 2)

    def _earlier(self, q: Tensor, keys: Tensor, values: Tensor, start: int) -> Part:
        """Attention of queries ``start``.. over the sealed pages before each one's own; there is at least one."""
        page, last = self.plan.page_tokens, start + q.shape[2]
        seen = min(keys.shape[1], (last - 1) // page * page)
        place, token = torch.arange(start, last, device=q.device), torch.arange(seen, device=q.device)
        later = token[None, :] // page >= place[:, None] // page
        scores = (q @ keys[:, None, :seen].mT).masked_fill(later, -torch.inf)

        def output(shares: Tensor) -> Tensor:
            whole = torch.stack([seal.shares(x) for seal, x in zip(self.seals, shares, strict=True)])
            return (whole.to(values.dtype) @ values[:, None, :seen]).to(self.dtype)

        return Part.of(scores, output)


def _own_page(q: Tensor, k: Tensor, v: Tensor, page: int) -> Part:
    """Causal attention of every token over its own page."""
    tokens = k.shape[1]
    short = -tokens % page
    q, k, v = (F.pad(x, (0, 0, 0, short)) for x in (q, k, v))
    by_page = (x.unflatten(-2, (-1, page)) for x in (k, v))
    k, v = (x.flatten(0, 1) for x in by_page)
    heads, pages = q.shape[0], q.shape[2] // page
    part = Part.causal(q.unflatten(2, (pages, page)).transpose(1, 2).flatten(0, 1), k, v)

    def whole(x: Tensor) -> Tensor:
        return x.unflatten(0, (heads, pages)).transpose(1, 2).flatten(2, 3)[:, :, :tokens]

    return Part(whole(part.mass), whole(part.out))


def _rows(part: Part, rows: slice) -> Part:
    return Part(part.mass[:, :, rows], part.out[:, :, rows])


@dataclass(frozen=True)
class Seal:
    """What sealing in ``tier`` (None: nothing) does to one lane, and what attending its codes does to q and to shares.

    A lane narrower than the widest of its layer comes padded; only its own ranks are coded.
    """

    plan: CompressionPlan
    lane: Lane
    tier: Tier | None

    def __call__(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k, v [whole pages, rank] -> the same as they are read back, float32."""
        if self.tier is None:
            return k, v
        t, rank_k, rank_v = self.tier, self.lane.rank_k, self.lane.rank_v
        sides = (
            (k, rank_k, Code(t.bits_k, t.axis_k, t.group_k, t.span_k)),
            (v, rank_v, Code(t.bits_v, t.axis_v, t.group_v, t.span_v)),
        )
        read = []
        for side, (x, rank, code) in enumerate(sides):
            if code.bits >= 16:
                read.append(x)
                continue
            own = x[:, :rank].float()
            own = rounded(own, code, self.plan.page_tokens, self._noise(own, side))
            read.append(torch.cat([own, x[:, rank:].float()], -1))
        return read[0], read[1]

    def _noise(self, x: Tensor, side: int) -> Tensor | None:
        if self.tier is None or self.tier.rounding == "nearest":
            return None
        return noise((self.plan.seed, self.lane.layer, self.lane.head, side), *x.shape).to(x.device)

    def queries(self, q: Tensor) -> Tensor:
        """q [G, T, Rk] as the product with codes takes it: 8-bit codes in the groups of the keys."""
        if self.tier is None or self.tier.arithmetic == "float" or self.tier.bits_k >= 16:
            return q
        groups = groups_along_rank(self.lane.rank_k, self.tier.group_k)
        parts = q.float().split([*groups, q.shape[-1] - sum(groups)], -1)
        return torch.cat([*(self._in_codes(part, integer.LEVELS_Q) for part in parts[:-1]), parts[-1]], -1)

    def shares(self, shares: Tensor) -> Tensor:
        """shares [G, T, N] of whole pages: one 8-bit scale for each group of tokens, then divided by their sum.

        As they are where V's groups run along the rank: only plans that drop tokens multiply such codes, and those are
        not scored here.
        """
        t = self.tier
        if t is None or t.arithmetic == "float" or t.bits_v >= 16 or t.axis_v == "rank":
            return shares
        split = shares.float().unflatten(-1, (-1, t.group_v))
        coded = self._in_codes(split, integer.LEVELS).flatten(-2)
        return coded / coded.sum(-1, keepdim=True).clamp(min=integer.LEAST_SCALE)

    def _in_codes(self, x: Tensor, levels: int) -> Tensor:
        """x, partitions in its last axis, as products with codes take it."""
        if self.tier is None or not self.tier.sums:
            code = integer.Rounded.symmetric(x, levels)
        else:
            code = integer.Rounded.asymmetric(x, torch.ones_like(x, dtype=torch.bool))
        return code.step * code.whole + (0.0 if code.low is None else code.low)


# -- codes -------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Code:
    """How numbers are coded: one side of a Tier."""

    bits: int
    axis: str
    group: int
    span: float = 1.0


def rounded(x: Tensor, code: Code, page: int, dither: Tensor | None = None) -> Tensor:
    """x [whole pages of tokens, rank] float32 as it is read back from its codes.

    ``dither`` [tokens, rank] in [0, 1): codes are rounded down after adding it; None: to the nearest.
    """
    pages = x.unflatten(0, (-1, page))
    noises = None if dither is None else dither.unflatten(0, (-1, page))
    if code.axis == "rank":
        sizes, along = list(groups_along_rank(x.shape[-1], code.group)), -1
    else:
        sizes, along = [min(code.group, page - at) for at in range(0, page, code.group)], -2
    pieces = pages.split(sizes, along)
    dithers = [None] * len(sizes) if noises is None else noises.split(sizes, along)
    return torch.cat([_coded(a, b, code, along) for a, b in zip(pieces, dithers, strict=True)], along).flatten(0, 1)


def _coded(x: Tensor, dither: Tensor | None, code: Code, along: int) -> Tensor:
    """One group along an axis: codes for the (scale, minimum) that halves can hold, and what they stand for."""
    levels = (1 << code.bits) - 1
    low, width = x.amin(along, keepdim=True), x.amax(along, keepdim=True) - x.amin(along, keepdim=True)
    scale = (width * code.span / levels).half().float()
    low = (low + width * ((1 - code.span) / 2)).half().float()
    exact = torch.where(scale > 0, (x - low) / scale, 0.0)
    codes = exact.round() if dither is None else (exact + dither).floor().float()
    return codes.clamp(0, levels) * scale + low


STEP, MASK = 0x9E3779B9, 0xFFFFFFFF


def _mixed(x: Tensor) -> Tensor:
    """MurmurHash3's finalizer on 32-bit numbers held in int64."""
    x = _times(x ^ (x >> 16), 0x85EBCA6B)
    x = _times(x ^ (x >> 13), 0xC2B2AE35)
    return x ^ (x >> 16)


def _times(x: Tensor, factor: int) -> Tensor:
    """Modulo 2^32, without leaving int64."""
    return (x * (factor & 0xFFFF) + ((x * (factor >> 16) & 0xFFFF) << 16)) & MASK


def noise(key: tuple[int, ...], tokens: int, rank: int) -> Tensor:
    """[tokens, rank]: what is added to the codes of the channels of tokens 0.. before they are rounded down (the hash
    of docs/quantization.md).
    """
    found = torch.zeros(1, 1, dtype=torch.int64)
    for number in (*(torch.tensor([[n & MASK]]) for n in key), torch.arange(tokens)[:, None], torch.arange(rank)[None]):
        found = _mixed(((found ^ number) + STEP) & MASK)
    return (found >> 8).double() * 2.0**-24
