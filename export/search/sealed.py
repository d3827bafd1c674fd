"""SealedAttend: attention over one whole sequence as its decode would compute it, full
pages read as they are sealed.

A token sees its own page in the hot format and every earlier page as the codes that
sealing leaves, which is what an engine computes on a one-page grid (LLM.logits). No
pool and no page table: keys and values are rounded in place, so a plan that quantizes
can be scored before there is an engine. The codes are those of kvlathe/plan/codec.py,
in torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlathe.base.errors import KvlatheError
from kvlathe.export.attention import integer
from kvlathe.export.attention.eager import AttendLayer
from kvlathe.export.attention.softmax_state import SoftmaxState, capped
from kvlathe.export.attention.step import StepTensors
from kvlathe.export.attention.windows import NEVER, LaneWindows
from kvlathe.export.model.decoder import Decoder
from kvlathe.export.search.fused import LaneTokens
from kvlathe.plan.codec import FITS, nearest_codes, worths
from kvlathe.plan.formats import NORMAL_TOP, Format, Tier
from kvlathe.plan.heads import Lane
from kvlathe.plan.noise import noise, noise_key
from kvlathe.plan.plan import CompressionPlan
from kvlathe.plan.sight import Sight

SCORES_AT_ONCE = 1 << 21
"""Scores of old tokens in memory at a time: what a CPU's caches hold (eight times as
many take twice the time)."""


def reading(decoder: Decoder) -> Decoder:
    """``decoder``, whose ``logits`` from now on are those of token-by-token decode.

    Raises KvlatheError for a plan that chooses among tokens: what a page then holds
    depends on later queries.
    """
    plan = decoder.plan
    if plan.index.ranked or plan.stages:
        raise KvlatheError(
            "this plan cannot be scored before it is built",
            "it chooses tokens by the attention they get",
            "leave out --accuracy: the build says what it loses",
        )
    if plan.index.seals:
        for layer in decoder.layers.values():
            assert isinstance(layer.attend, AttendLayer)
            layer.attend = SealedAttend.of(layer.attend)
    return decoder


class SealedAttend(AttendLayer):
    """An AttendLayer whose steps begin with nothing cached and read every full page as
    it is sealed."""

    @classmethod
    def of(cls, layer: AttendLayer) -> SealedAttend:
        made = cls.__new__(cls)
        made.__dict__.update(layer.__dict__)  # the same tables and matrices
        return made

    @cached_property
    def seals(self) -> list[Seal]:
        """The seal of each active lane of this layer."""
        index = self.plan.index
        seals = []
        for lane in self.sizes.lanes:
            group = index.groups[index.number(lane.layer, lane.head)]
            tier = group.cold[-1] if group.cold else None
            seals.append(Seal(self.plan, lane, tier, group.life.stay_hot))
        return seals

    @cached_property
    def young(self) -> list[Young]:
        """The codes of each active lane's newest tokens."""
        index = self.plan.index
        found: list[Young] = []
        for lane, seal in zip(self.sizes.lanes, self.seals, strict=True):
            group = index.groups[index.number(lane.layer, lane.head)]
            life = group.life
            newest = life.newest_apart
            own = dataclasses.replace(seal, tier=group.cold[0]) if newest else seal
            found.append(Young(own, newest, life.first_apart))
        return found

    @property
    def windows(self) -> LaneWindows | None:
        """The windows in which lanes see earlier pages, where tokens move after each."""
        index = self.plan.index
        sights: list[Sight] = []
        for lane in self.sizes.lanes:
            sights.append(
                index.groups[index.number(lane.layer, lane.head)].life.reaches
            )
        device = self.table("layout").device
        return LaneWindows.of_sights(sights, self.plan.page_tokens, device)

    def _uncached(self, q: Tensor, k: Tensor, v: Tensor, step: StepTensors) -> Tensor:
        """q [H, G, T, Rk], k [H, T, Rk], v [H, T, Rv] -> [H, G, T, Rv]; each sequence
        from its first token."""
        outputs = []
        for start, end in pairwise(step.cu_seqlens_q.tolist()):
            if end > start:
                rows = slice(start, end)
                outputs.append(self._sequence(q[:, :, rows], k[:, rows], v[:, rows]))
        return torch.cat(outputs, 2)

    def _uncached_at(
        self, places: Tensor, q: Tensor, k: Tensor, v: Tensor, step: StepTensors
    ) -> Tensor:
        if self.is_plain:
            return self._fused(q, k, v, places)
        return self._uncached(q, k, v, step)[:, :, places]

    def _sequence(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One sequence, as ``_uncached``: each token's own page, then the sealed ones
        before it, so many queries at a time that SCORES_AT_ONCE holds."""
        if self.is_plain:
            return self._fused(q, k, v)
        page = self.plan.page_tokens
        tokens = k.shape[1]
        fresh = _own_page(q, k, v, page, self.windows, self.plan.model.softcap)
        fresh = self.settled(fresh)
        whole = (tokens - 1) // page * page
        if not whole:
            return fresh.out
        heads, group = q.shape[:2]
        pages_at_once = SCORES_AT_ONCE // (heads * group * whole * page)
        step = max(1, pages_at_once) * page
        tiers = self._as_read(q, k[:, :whole], v[:, :whole])
        outputs = [fresh.out[:, :, :page]]
        for start in range(page, tokens, step):
            rows = slice(start, min(start + step, tokens))
            state = _rows(fresh, rows)
            for tier in tiers:
                state = state.merge(self._earlier(tier, rows))
            outputs.append(state.out)
        return torch.cat(outputs, 2)

    @cached_property
    def is_plain(self) -> bool:
        """Whether attention is one softmax over numbers as they are read back."""
        by_codes = any(tier.arithmetic != "float" for tier in self.plan.index.tiers)
        return self.plan.model.shifts and not by_codes

    def _fused(
        self, q: Tensor, k: Tensor, v: Tensor, places: Tensor | None = None
    ) -> Tensor:
        """``_sequence`` lane by lane, at ``places`` [R] alone where they are given."""
        page = self.plan.page_tokens
        whole = (k.shape[1] - 1) // page * page
        outputs = []
        for head, seal in enumerate(self.seals):
            young = self.young[head]
            sealed = seal(k[head, :whole], v[head, :whole])
            newest = young.seal(k[head, :whole], v[head, :whole])
            read_k, read_v = (
                torch.cat([own[: young.first], older[young.first :]])
                for own, older in zip(newest, sealed, strict=True)
            )
            lane = LaneTokens(
                k[head],
                v[head],
                read_k,
                read_v,
                page,
                self.windows and self.windows.of(head),
                *newest,
                young.recent,
            )
            outputs.append(lane.attended(q[head], places))
        return torch.stack(outputs)

    def _as_read(self, q: Tensor, k: Tensor, v: Tensor) -> list[ReadTier]:
        """Whole pages as they are read: older ones, then the newest where some lane has
        another tier for those. k and v [H, N, rank]."""
        tiers = [ReadTier.of(self.seals, q, k, v, self.young, old=True)]
        if any(young.recent for young in self.young):
            seals = [young.seal for young in self.young]
            tiers.append(ReadTier.of(seals, q, k, v, self.young, old=False))
        return tiers

    def _earlier(self, tier: ReadTier, rows: slice) -> SoftmaxState:
        """Attention of the queries ``rows`` over the pages of a tier before each one's
        own; there is at least one such page."""
        page = self.plan.page_tokens
        q = tier.queries[:, :, rows]
        count = min(tier.keys.shape[1], (rows.stop - 1) // page * page)
        keys = tier.keys[:, None, :count]  # [H, 1, N, Rk]
        values = tier.values[:, None, :count]  # [H, 1, N, Rv]
        place = torch.arange(rows.start, rows.stop, device=q.device)
        token = torch.arange(count, device=q.device)
        # [T, N]: pages between the token's and the query's own
        pages = place[:, None] // page - token[None, :] // page
        later = pages <= 0
        scores = capped(q @ keys.mT, self.plan.model.softcap)  # [H, G, T, N]
        scores = scores.masked_fill(later, -torch.inf)
        hidden = tier.elsewhere(pages, token, page)  # [H, T, N]
        if self.windows is not None:
            hidden = hidden | self.windows.hidden(place[None], token[None])
        scores = scores.masked_fill((hidden & ~later)[:, None], NEVER)

        def output(shares: Tensor) -> Tensor:
            by_lane = zip(tier.seals, shares, strict=True)
            rounded = [seal.shares(own) for seal, own in by_lane]
            return (torch.stack(rounded).to(values.dtype) @ values).to(self.dtype)

        return SoftmaxState.of(scores, output)


@dataclass(frozen=True)
class Young:
    """The codes of a lane's newest tokens, ``recent`` of them, and of its ``first`` ones;
    0 and 0 where they are those of all."""

    seal: Seal
    recent: int
    first: int


@dataclass(frozen=True)
class ReadTier:
    """Whole pages of every lane as one tier has them: ``queries`` [H, G, T, Rk] as
    products with its codes take them, ``keys`` and ``values`` [H, N, rank] as they are
    read back. Of the pages before a query's own it shows the ``recent`` tokens nearest
    to it and the ``first`` ones, [H, 1, 1], or, where it is ``old``, all but these."""

    seals: Sequence[Seal]
    queries: Tensor
    keys: Tensor
    values: Tensor
    recent: Tensor
    first: Tensor
    old: bool

    @classmethod
    def of(
        cls,
        seals: Sequence[Seal],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        young: Sequence[Young],
        old: bool,
    ) -> ReadTier:
        """The pages of all lanes, each read through its own seal."""
        queries, keys, values = [], [], []
        for seal, lane_q, lane_k, lane_v in zip(seals, q, k, v, strict=True):
            read_k, read_v = seal(lane_k, lane_v)
            queries.append(seal.queries(lane_q))
            keys.append(read_k)
            values.append(read_v)
        read = [torch.stack(every) for every in (queries, keys, values)]
        numbers = [(one.recent, one.first) for one in young]
        recent, first = torch.tensor(numbers, device=k.device).T[..., None, None]
        return cls(seals, read[0], read[1], read[2], recent, first, old)

    def elsewhere(self, pages: Tensor, token: Tensor, page: int) -> Tensor:
        """[H, T, N]: which tokens, at the places ``token`` [N], another tier shows, so many
        ``pages`` [T, N] of ``page`` tokens before the query's."""
        near = (pages * page <= self.recent) | (token < self.first)
        return near if self.old else ~near


def _own_page(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    page: int,
    windows: LaneWindows | None,
    softcap: float = 0.0,
) -> SoftmaxState:
    """Causal attention of every token over what it sees of its own page."""
    tokens = k.shape[1]
    missing = -tokens % page
    q, k, v = (F.pad(x, (0, 0, 0, missing)) for x in (q, k, v))  # to whole pages
    # [H * pages, P, rank]
    k, v = (x.unflatten(-2, (-1, page)).flatten(0, 1) for x in (k, v))
    heads = q.shape[0]
    pages = q.shape[2] // page
    by_page = q.unflatten(2, (pages, page)).transpose(1, 2)  # [H, pages, G, P, Rk]
    hidden = None
    if windows is not None:
        by_lane: list[Tensor] = []
        for own in torch.arange(pages * page, device=q.device).split(page):
            of_lanes = own[None]
            by_lane.append(windows.hidden(of_lanes, of_lanes))
        hidden = torch.stack(by_lane, 1).flatten(0, 1)  # [H * pages, P, P]
    state = SoftmaxState.causal(by_page.flatten(0, 1), k, v, hidden, softcap)

    def in_sequence(x: Tensor) -> Tensor:
        """[H * pages, G, P, ...] -> [H, G, T, ...]."""
        by_head = x.unflatten(0, (heads, pages)).transpose(1, 2)
        return by_head.flatten(2, 3)[:, :, :tokens]

    return SoftmaxState(in_sequence(state.lse), in_sequence(state.out))


def _rows(state: SoftmaxState, rows: slice) -> SoftmaxState:
    """The state of some queries."""
    return SoftmaxState(state.lse[:, :, rows], state.out[:, :, rows])


@dataclass(frozen=True)
class Seal:
    """Effect of sealing one lane in ``tier`` (None: none), and of attending its codes
    on q and on shares.

    A lane narrower than the widest of its layer comes padded; only its own ranks are
    coded. The ``first`` tokens are never sealed.
    """

    plan: CompressionPlan
    lane: Lane
    tier: Tier | None
    first: int = 0

    def __call__(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k, v [whole pages, rank] -> the same as they are read back, float32."""
        if self.tier is None:
            return k, v
        read = self._read_back(k, self.lane.rank_k, self.tier.k, 0)
        if self.lane.values_in_keys:
            return read, read[:, : v.shape[1]]
        return read, self._read_back(v, self.lane.rank_v, self.tier.v, 1)

    def _read_back(self, x: Tensor, rank: int, form: Format, side: int) -> Tensor:
        """x [whole pages, at least rank] with its first ``rank`` dims rounded; ``side``
        is 0 for K and 1 for V."""
        if not form.is_coded:
            return x
        own = x[:, :rank].float()
        padding = x[:, rank:].float()
        own = rounded(own, form, self.plan.page_tokens, self._noise(own, side))
        read = torch.cat([own, padding], -1)
        return torch.cat([x[: self.first].float(), read[self.first :]])

    def _noise(self, x: Tensor, side: int) -> Tensor | None:
        if self.tier is None or self.tier.rounding == "nearest":
            return None
        key = noise_key(self.plan.seed, self.lane.layer, self.lane.head, side)
        return torch.from_numpy(noise(key, 0, *x.shape)).to(x.device)

    def queries(self, q: Tensor) -> Tensor:
        """q [G, T, Rk] as the product with codes takes it: 8-bit codes in the groups of
        the keys."""
        tier = self.tier
        if tier is None or tier.arithmetic == "float" or not tier.k.is_coded:
            return q
        sizes = tier.k.group_sizes(self.lane.rank_k, self.plan.page_tokens)
        # each [G, T, g]
        *groups, rest = q.float().split([*sizes, q.shape[-1] - sum(sizes)], -1)
        coded = [self._in_codes(group, integer.LEVELS_Q) for group in groups]
        return torch.cat([*coded, rest], -1)

    def shares(self, shares: Tensor) -> Tensor:
        """shares [G, T, N] of whole pages: one 8-bit scale for each group of tokens,
        then divided by their sum.

        As they are where V's groups run along the rank: only plans that drop tokens
        multiply such codes, and those are not scored here.
        """
        t = self.tier
        if t is None or t.arithmetic == "float" or not t.v.along_tokens:
            return shares
        split = shares.float().unflatten(-1, (-1, t.v.group))  # [G, T, N / g, g]
        coded = self._in_codes(split, integer.LEVELS).flatten(-2)
        return coded / coded.sum(-1, keepdim=True).clamp(min=integer.LEAST_SCALE)

    def _in_codes(self, x: Tensor, levels: int) -> Tensor:
        """x, partitions in its last axis, as products with codes take it."""
        if self.tier is None or not self.tier.sums:
            code = integer.Rounded.symmetric(x, levels)
        else:
            code = integer.Rounded.asymmetric(x, torch.ones_like(x, dtype=torch.bool))
        low = 0.0 if code.low is None else code.low
        return code.step * code.whole + low


# -- codes -----------------------------------------------------------------------------
def rounded(x: Tensor, form: Format, page: int, dither: Tensor | None = None) -> Tensor:
    """x [whole pages of tokens, rank] float32 as it is read back from its codes.

    ``dither`` [tokens, rank] in [0, 1): codes are rounded down after adding it; None:
    to the nearest.
    """
    sizes = list(form.group_sizes(x.shape[-1], page))
    along = -1 if form.along_rank else -2
    # each [pages, P, g], or [pages, g, rank] along tokens
    groups = x.unflatten(0, (-1, page)).split(sizes, along)
    dithers: Sequence[Tensor | None] = [None] * len(sizes)
    if dither is not None:
        dithers = dither.unflatten(0, (-1, page)).split(sizes, along)
    read = []
    for group, own in zip(groups, dithers, strict=True):
        read.append(_coded(group, own, form, along))
    return torch.cat(read, along).flatten(0, 1)


def _coded(x: Tensor, dither: Tensor | None, form: Format, along: int) -> Tensor:
    """One group along an axis: codes for the metadata that halves can hold, and what
    they stand for."""
    if form.coding == "normal":
        return _fitted(x, form, along)
    if form.coding == "float8":
        return _as_floats(x, form, along)
    top = form.top
    low = x.amin(along, keepdim=True)
    width = x.amax(along, keepdim=True) - low
    scale = (width * form.span / top).half().float()
    cut_off = (1 - form.span) / 2  # of the range, at either end
    low = (low + width * cut_off).half().float()
    exact = torch.where(scale > 0, (x - low) / scale, 0.0)
    codes = exact.round() if dither is None else (exact + dither).floor().float()
    return codes.clamp(0, top) * scale + low


def _fitted(x: Tensor, form: Format, along: int) -> Tensor:
    """One group of normal codes, fitted as kvlathe/plan/codec.py does it."""
    wide = x.double()
    ends = form.top / 2
    squares = wide.square()
    mean = squares.sum(along, keepdim=True) / x.shape[along]
    magnitude = NORMAL_TOP[form.bits] * mean.sqrt()
    worth, read = _nearest(x, form, magnitude)
    for _ in range(FITS - 1):
        levels = worth.double() - ends
        squares = levels.square()
        product = (wide * levels).sum(along, keepdim=True)
        magnitude = (ends * product / squares.sum(along, keepdim=True)).abs()
        worth, read = _nearest(x, form, magnitude)
    return read


def _as_floats(x: Tensor, form: Format, along: int) -> Tensor:
    """One group of 8-bit floats: their scale is the least half that clips nothing."""
    largest = x.abs().amax(along, keepdim=True) / form.top
    largest = largest.clamp(max=torch.finfo(torch.float16).max)
    nearest = largest.half()
    above = (nearest.view(torch.int16) + 1).view(torch.float16)
    scale = torch.where(nearest.float() < largest, above, nearest).float()
    exact = torch.where(scale > 0, x / scale, 0.0)
    return exact.clamp(-form.top, form.top).to(torch.float8_e4m3fn).float() * scale


def _nearest(x: Tensor, form: Format, magnitude: Tensor) -> tuple[Tensor, Tensor]:
    """(levels, values) of the nearest codes for a magnitude."""
    of_byte = worths(form)[nearest_codes(form)]
    stored = magnitude.float().half().float()
    scale = stored * form.decoding.step
    above = x + stored
    nearest = torch.where(scale > 0, above / scale, 0.0).round().clamp(0, form.top)
    worth = torch.tensor(of_byte, device=x.device)[nearest.int()]
    return worth, worth * scale - stored
