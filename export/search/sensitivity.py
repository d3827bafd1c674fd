"""Sensitivity: what each lane's K and V may lose before the model's answers change,
measured on the model itself.

A gradient says how a change of attention's output moves what is scored; the change
itself is computed, by cutting and coding one lane's K (or V) in every form of a grid
and attending with it. To second order the score then loses

    text       KL(model || changed) = 1/2 E_y (grad log p(y) . change)^2, labels y drawn from the model (Fisher)
    questions  sum over the answer's tokens of (change of the margin / margin)^2, by random signs of the margins

Changes of different tokens and lanes are taken as independent, so losses add up. One
backward pass for each sequence and draw, a layer at a time, and one attention of one lane for each form:
no form is ever run through the whole model. Nor is a form attended with by every query:
queries are drawn by the size of their gradients, and count by their chance.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from kvlathe.base.console import working
from kvlathe.export.attention.softmax_state import capped
from kvlathe.export.methods.forms import Part
from kvlathe.export.model.layered import LayeredModel, LayerPull
from kvlathe.export.model.plain_attention import (
    PlainAttention,
    seen_from,
    softmax_beside,
)
from kvlathe.export.model.sliced_head import Slopes
from kvlathe.export.search.readings import Reading
from kvlathe.export.search.sealed import rounded
from kvlathe.plan.formats import Format
from kvlathe.plan.lives import Life
from kvlathe.plan.sight import NO_END, Sight

Array = npt.NDArray[np.floating]

QUERIES = 256
"""Queries of a sequence that are drawn to attend with every form."""
FAR_QUERIES = 96
"""The same of a far one, for forms of distant parts."""
FORWARD = 0.25
"""Share of a reading's time that its forward pass takes, for who watches."""
UNSEEN = -1e30
"""The score of a token that a query does not see: its share is 0 beside any other, and
a page of such tokens alone has no infinity to subtract."""
EVEN = 0.25
"""Share of the draws that goes to all queries alike; a small gradient may still belong
to a large change."""


@dataclass(frozen=True)
class Candidate:
    """One cut of one side of a lane, and the codes it may be stored in: x' = (x -
    centre) into, [d, rank], read through ``back`` [d, rank] (q back for K, x' back^T
    for V).
    """

    into: Tensor
    back: Tensor
    centre: Tensor
    codes: tuple[Format, ...]


@dataclass(frozen=True)
class ObservedLane:
    """One lane of one sequence: q [G, T, d] scaled, k and v [T, d], and ``pull`` [S, G,
    T, d], the gradients of S drawn scores by the lane's output.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    pull: Tensor


# -- observing -------------------------------------------------------------------------
@dataclass(frozen=True)
class ObservedLayer:
    """The lanes of one layer of one sequence, and the attention of each by scores that
    are scaled."""

    layer: int
    lanes: list[ObservedLane]
    attention: list[PlainAttention]


def observe(
    model: LayeredModel,
    reading: Reading,
    draw: torch.Generator,
    advance: Callable[[float], None],
) -> Iterator[ObservedLayer]:
    """Every layer that has a cache, the last one first. Queries of all layers that read
    it are there, as if they were more heads of its own: a change of the cache moves the
    score by them together. ``advance`` comes to 1 before the first."""
    shape = (reading.draws, len(reading.rows))
    chance = torch.rand(shape, generator=draw, device=draw.device)

    def slopes_of(logits: Tensor, rows: slice) -> Slopes:
        return reading.score(logits, chance[:, rows], rows)

    readers: dict[int, list[list[ObservedLane]]] = {}
    asked = reading.ids, reading.rows, slopes_of, advance, reading.positions
    for pulled in model.pulls(*asked):
        heads = model.spec.heads(pulled.layer).kv_heads
        source = model.spec.shape.source(pulled.layer)
        readers.setdefault(source, []).append(_lanes(pulled, heads))
        if source == pulled.layer:
            lanes = [_joined(own) for own in zip(*readers.pop(source), strict=True)]
            yield ObservedLayer(source, lanes, _attention(pulled, heads))


def _joined(readers: Sequence[ObservedLane]) -> ObservedLane:
    """One lane as several layers read it."""
    q = torch.cat([lane.q for lane in readers])
    pull = torch.cat([lane.pull for lane in readers], 1)
    return dataclasses.replace(readers[-1], q=q, pull=pull)


def _lanes(pulled: LayerPull, heads: int) -> list[ObservedLane]:
    captured = pulled.captured
    scaled = captured.q * pulled.runner.attention.scale
    q = scaled.unflatten(1, (heads, -1))  # [T, H, G, d]
    pull = pulled.pull.unflatten(2, (heads, -1))  # [S, T, H, G, d]
    lanes = []
    for head in range(heads):
        own = q[:, head].transpose(0, 1)  # [G, T, d]
        own_pull = pull[:, :, head].transpose(1, 2)  # [S, G, T, d]
        k, v = captured.k[:, head], captured.v[:, head]
        lanes.append(ObservedLane(own, k, v, own_pull))
    return lanes


def _attention(pulled: LayerPull, heads: int) -> list[PlainAttention]:
    whole = dataclasses.replace(pulled.runner.attention, scale=1.0)
    if whole.sinks is None:
        return [whole] * heads
    by_lane = whole.sinks.unflatten(0, (heads, -1))
    return [dataclasses.replace(whole, sinks=sinks) for sinks in by_lane]


# -- one lane's losses -----------------------------------------------------------------
@dataclass(frozen=True)
class Queries:
    """Some queries of a sequence: their places [R], ascending, and what each one's
    share in a sum over all of them counts [R]: one over its chance to be here."""

    places: Tensor
    weights: Tensor

    @classmethod
    def drawn(
        cls, pull: Tensor, draw: torch.Generator, count: int = QUERIES
    ) -> Queries:
        """About ``count`` queries, by the size of their gradients in ``pull`` [S, G, T,
        d]. Sums over them are those over all T on average (Horvitz and Thompson)."""
        size = pull.square().sum((0, 1, 3)).sqrt()  # [T]
        tokens = len(size)
        even = torch.full_like(size, 1 / tokens)
        total = size.sum()
        by_size = size / total if total > 0 else even
        chance = (count * torch.lerp(by_size, even, EVEN)).clamp(max=1)
        coins = torch.rand(tokens, generator=draw, device=draw.device)
        places = (coins < chance).nonzero()[:, 0]
        return cls(places, 1 / chance[places])

    @classmethod
    def all(cls, tokens: int) -> Queries:
        return cls(torch.arange(tokens), torch.ones(tokens))

    @property
    def device(self) -> torch.device:
        return self.places.device


UNSCALED = PlainAttention(1.0)


class LaneMoves:
    """The attention of one lane over one sequence, for R of its queries, and how far
    each form of K or V moves it along the pulls."""

    def __init__(
        self,
        lane: ObservedLane,
        page: int,
        queries: Queries,
        attention: PlainAttention = UNSCALED,
        parts: Sequence[Part] = (),
        positions: Tensor | None = None,
    ) -> None:
        """``attention``: the lane's in the model itself, of scores that are scaled.
        ``parts``: of the pages before a query's own, those that are read as codes.
        ``positions`` [T]: of the tokens, in whole pages; None where these have no gaps."""
        missing = -lane.k.shape[0] % page
        self.k = F.pad(lane.k, (0, 0, 0, missing))
        self.v = F.pad(lane.v, (0, 0, 0, missing))
        self.page = page
        self.queries = queries
        self.q = lane.q[:, queries.places]  # [G, R, d]
        self.pull = lane.pull[:, :, queries.places]  # [S, G, R, d]
        self.places = torch.arange(len(self.k), device=queries.device)
        self.attention = attention
        # [R, T]
        self.seen = seen_from(queries.places, self.places, attention.window)
        self.scores = capped(self.q @ self.k.mT, attention.softcap)  # [G, R, T]
        self.hidden = self._hidden(self.seen)
        self.shares = softmax_beside(self.scores + self.hidden, attention.sinks)
        # What a share of each value adds to the scores, [S, G, R, T].
        self.worth = self.pull @ self.v.mT
        self.before = self._worth_of(self.shares)  # [S, G, R]
        at = self.places if positions is None else positions
        self.parts = self._pages_of(parts, at)  # [R, parts, pages]

    def _pages_of(self, parts: Sequence[Part], positions: Tensor) -> Tensor:
        """[R, parts, pages]: 1 for a page that a query reads as codes, else 0."""
        first = positions[:: self.page]
        before = first[self.queries.places // self.page][:, None] - first
        pages = self.q.new_zeros(len(before), len(parts), len(first))
        for i, part in enumerate(parts):
            inside = (before > part.near) & (before <= part.far) | (first < part.sink)
            pages[:, i] = inside & (first >= part.skip) & (before > 0)
        return pages

    def _hidden(self, seen: Tensor) -> Tensor:
        """What hides all others than the ``seen``, added to scores. A mask would take a
        CPU longer than all else of a softmax."""
        return torch.where(seen, 0.0, UNSEEN).to(self.q.dtype)

    def _worth_of(self, shares: Tensor) -> Tensor:
        return torch.einsum("grj,sgrj->sgr", shares, self.worth)

    def keys(self, forms: Iterable[Candidate]) -> Iterator[Tensor]:
        """Sums of squared moves for each code of each form of K, [parts]: where the pages
        of that part alone are coded."""
        for form in forms:
            kept = (self.k - form.centre) @ form.into  # [T, rank]
            q = self.q @ form.back  # [G, R, rank]
            exact = self._pages(q @ kept.mT)
            for code in form.codes:
                coded = self._pages(q @ rounded(kept, code, self.page).mT)
                yield self._moved(self._mixed(exact, coded))

    def _pages(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """scores [G, R, T], lost afterwards -> log(sum exp score) of each page [G, R,
        pages], and its worth [S, G, R, pages], a mean: no token's score, however it
        moves, is lost beside those of other pages."""
        scores = capped(scores, self.attention.softcap).add_(self.hidden)
        pages = scores.unflatten(-1, (-1, self.page))
        top = pages.amax(-1, keepdim=True)
        shares = pages.sub_(top).exp_().flatten(-2)
        mass = self._by_page(shares)  # from 1 on
        worth = torch.stack([self._by_page(shares * own) for own in self.worth])
        return top[..., 0] + mass.log(), worth / mass

    def _mixed(
        self, exact: tuple[Tensor, Tensor], coded: tuple[Tensor, Tensor]
    ) -> Tensor:
        """The worth where the pages of each part are ``coded`` and all others ``exact``,
        both as ``_pages``: [S, G, R, parts]."""
        is_coded = self.parts > 0
        logs = torch.where(is_coded, coded[0][:, :, None], exact[0][:, :, None])
        shares = softmax_beside(logs.flatten(1, 2), self.attention.sinks)
        shares = shares.view_as(logs)  # [G, R, parts, pages]
        of_coded = torch.einsum("grcp,sgrp->sgrc", shares * is_coded, coded[1])
        return of_coded + torch.einsum("grcp,sgrp->sgrc", shares * ~is_coded, exact[1])

    def values(self, forms: Iterable[Candidate]) -> Iterator[Tensor]:
        """The same for each code of each form of V."""
        shares = self.shares.unflatten(-1, (-1, self.page))  # [G, R, pages, P]
        for form in forms:
            kept = (self.v - form.centre) @ form.into  # [T, rank]
            pull = self.pull @ form.back  # [S, G, R, rank]
            start = (pull * (self.shares @ kept)).sum(-1) + self.pull @ form.centre
            for code in form.codes:
                error = rounded(kept, code, self.page) - kept  # [T, rank]
                error = error.unflatten(0, (-1, self.page))
                moved = torch.einsum("grpj,pjd->grpd", shares, error)
                worth = torch.einsum("sgrd,grpd->sgrp", pull, moved)
                yield self._moved(start[..., None] + self._by_part(worth))

    def _by_page(self, x: Tensor) -> Tensor:
        """[..., T] -> sums of its pages, [..., pages]."""
        return x.unflatten(-1, (-1, self.page)).sum(-1)

    def _by_part(self, x: Tensor) -> Tensor:
        """[..., R, pages] -> sums of the pages of each part, [..., R, parts]."""
        return torch.einsum("...rp,rcp->...rc", x, self.parts)

    def windows(
        self, firsts: Iterable[tuple[int, Tensor]], positions: Tensor
    ) -> Iterator[Tensor]:
        """Sum of squared moves for each window: its sink, and [T], the first position
        after the sink that the query at each place sees. ``positions`` [T]: of the
        tokens, which may have gaps."""
        for sink, first in firsts:
            recent = positions >= first[self.queries.places][:, None]  # [R, T]
            hidden = self._hidden(self.seen & (recent | (positions < sink)))
            shares = softmax_beside(self.scores + hidden, self.attention.sinks)
            yield self._moved(self._worth_of(shares)[..., None])[0]

    def _moved(self, after: Tensor) -> Tensor:
        """after [S, G, R, parts] -> [parts], left where they are: reading them would make
        a GPU wait for every form. The query heads of a token move together."""
        moves = (after - self.before[..., None]).sum(1)  # [S, R, parts]
        weights = self.queries.weights.to(moves.dtype)
        return torch.einsum("src,r->c", moves.square(), weights)


Candidates = Callable[[str, int, int], list[Candidate]]
"""("k" or "v", layer, head) -> the forms of that side of that lane."""


def _no_forms(side: str, layer: int, head: int) -> list[Candidate]:
    return []


@dataclass(frozen=True)
class Distant:
    """Parts that are priced on far readings, and the forms that are."""

    parts: Sequence[Part]
    forms: Candidates


@dataclass(frozen=True, eq=False)
class Losses:
    """Cost of each form, in units of the score: ``forms`` [parts, 2 * lanes, options],
    pages of one part coded, K lanes then V lanes; ``windows`` [lanes, windows];
    ``distant`` as ``forms``, of distant parts."""

    forms: Array
    windows: Array
    distant: Array


@dataclass(frozen=True)
class Asked:
    """The forms that lanes are moved by over one sequence: as in ``losses``.
    ``positions``: of its tokens, in whole pages."""

    positions: Sequence[int]
    page: int
    forms: Candidates
    parts: Sequence[Part]
    windows: Sequence[Life]
    distant: Distant
    device: torch.device

    @cached_property
    def firsts(self) -> list[tuple[int, Tensor]]:
        """Those of every window, as in ``LaneMoves.windows``."""
        at = self.positions, self.page, self.device
        return [first_seen(life.reaches, *at) for life in self.windows]

    def near(
        self, layer: ObservedLayer, head: int, draw: torch.Generator
    ) -> Iterator[tuple[str, Iterator[Tensor]]]:
        """What moves of a near reading are of, and they."""
        lane = layer.lanes[head]
        queries = Queries.drawn(lane.pull, draw)
        moves = LaneMoves(lane, self.page, queries, layer.attention[head], self.parts)
        yield "k", moves.keys(self.forms("k", layer.layer, head))
        yield "v", moves.values(self.forms("v", layer.layer, head))

    def far(
        self, layer: ObservedLayer, head: int, draw: torch.Generator
    ) -> Iterator[tuple[str, Iterator[Tensor]]]:
        """The same of a far one."""
        lane, attention = layer.lanes[head], layer.attention[head]
        positions = torch.tensor(self.positions, device=self.device)
        moves = LaneMoves(lane, self.page, Queries.drawn(lane.pull, draw), attention)
        windows = moves.windows(self.firsts, positions)
        yield "window", (lost[None] for lost in windows)
        parts = self.distant.parts
        if not parts:
            return
        few = Queries.drawn(lane.pull, draw, FAR_QUERIES)
        moves = LaneMoves(lane, self.page, few, attention, parts, positions)
        forms = self.distant.forms
        yield "distant k", moves.keys(forms("k", layer.layer, head))
        yield "distant v", moves.values(forms("v", layer.layer, head))


def losses(
    model: LayeredModel,
    readings: Sequence[Reading],
    forms: Candidates,
    windows: Sequence[Life],
    page: int,
    seed: int = 0,
    parts: Sequence[Part] = (),
    distant: Distant | None = None,
) -> Losses:
    """Measure the cost of each code of each form in each of ``parts``, and of each window,
    summed over ``readings``.

    ``page`` tokens are read as they are before they are coded. Readings that are ``far``
    price the windows, and the forms of ``distant`` parts; the others the forms.
    """
    draw = torch.Generator(model.device).manual_seed(seed)
    lanes = len(model.spec.shape.places)
    distant = distant or Distant((), _no_forms)
    widths = {"k": len(parts), "v": len(parts), "window": 1}
    widths |= {"distant k": len(distant.parts), "distant v": len(distant.parts)}
    sums: dict[str, list[Array]] = {
        kind: [np.zeros((1, width))] * lanes for kind, width in widths.items()
    }
    sums["window"] = [np.zeros((len(windows), 1))] * lanes
    with working("measuring sensitivity", len(readings)) as advance:
        for reading in readings:
            # What fills up the last page comes after all of them.
            missing = -len(reading.ids) % page
            positions = (*reading.positions, *[NO_END] * missing)
            asked = Asked(positions, page, forms, parts, windows, distant, model.device)
            layers = observe(model, reading, draw, lambda x: advance(x * FORWARD))
            for observed in layers:
                before = model.spec.shape.lanes_before(observed.layer)
                for head in range(len(observed.lanes)):
                    with torch.inference_mode():
                        moves = asked.far if reading.far else asked.near
                        for kind, moved in moves(observed, head, draw):
                            own = sums[kind]
                            own[before + head] = _plus(
                                own[before + head], reading, moved
                            )
                    advance((1 - FORWARD) / lanes)
    of_forms, of_distant = (
        np.moveaxis(np.stack(sums[f"{name}k"] + sums[f"{name}v"]), -1, 0)
        for name in ("", "distant ")
    )
    return Losses(of_forms, np.stack(sums["window"])[..., 0], of_distant)


def _plus(losses: Array, reading: Reading, moved: Iterable[Tensor]) -> Array:
    """``losses`` and what a reading adds to each of them."""
    squares = list(moved)
    if not squares:
        return losses
    return losses + reading.weight * torch.stack(squares).double().cpu().numpy()


def first_seen(
    sight: Sight, positions: Sequence[int], page: int, device: torch.device
) -> tuple[int, Tensor]:
    """The window's sink, and for every one of ``positions`` the first after the sink
    that it sees."""
    firsts = [sight.first_seen(position, page) for position in positions]
    return sight.sink, torch.tensor(firsts, device=device)
