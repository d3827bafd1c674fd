"""Sensitivity: what each lane's K and V may lose before the model's answers change,
measured on the model itself.

A gradient says how a change of attention's output moves what is scored; the change
itself is computed, by cutting and coding one lane's K (or V) in every form of a grid
and attending with it. To second order the score then loses

    text       KL(model || changed) = 1/2 E_y (grad log p(y) . change)^2, labels y drawn from the model (Fisher)
    questions  sum over the answer's tokens of (change of the margin / margin)^2, by random signs of the margins

Changes of different tokens and lanes are taken as independent, so losses add up. One
backward pass for each sequence and draw, and one attention of one lane for each form:
no form is ever run through the whole model. Nor is a form attended with by every query:
queries are drawn by the size of their gradients, and count by their chance.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from kvlathe.base.console import progress
from kvlathe.export.attention.eager import AttendLayer
from kvlathe.export.model.decoder import Decoder
from kvlathe.export.model.plain_attention import PlainAttention, seen_tokens
from kvlathe.export.search.readings import Reading
from kvlathe.export.search.sealed import rounded
from kvlathe.plan.formats import Format
from kvlathe.plan.lives import Life, Sight

Array = npt.NDArray[np.floating]

QUERIES = 256
"""Queries of a sequence that are drawn to attend with every form."""
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
def observe(
    decoder: Decoder, reading: Reading, draw: torch.Generator
) -> list[ObservedLane]:
    """Every lane, layer by layer. ``decoder`` is the uncompressed model."""
    layers = [cast(AttendLayer, layer.attend) for layer in decoder.layers.values()]
    inputs_of: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    change_of: dict[int, Tensor] = {}  # zeros added to outputs, to take gradients by
    places_of: dict[int, Tensor] = {}  # of a layer that computes only these tokens

    def hook(index: int) -> Callable[..., tuple[Tensor, ...]]:
        def keep(
            layer: AttendLayer, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]
        ) -> tuple[Tensor, ...]:
            q, k, v, step = inputs
            output, *more = outputs
            q, k = layer.prepare(q, k, step.cos, step.sin)[:2]
            inputs_of[index] = (q.detach(), k.detach(), v.detach())
            change_of[index] = torch.zeros_like(output, requires_grad=True)
            if step.places is not None:
                places_of[index] = step.places
            return output + change_of[index], *more

        return keep

    handles = [layer.register_forward_hook(hook(i)) for i, layer in enumerate(layers)]
    try:
        logits = decoder.read(reading.ids, reading.rows)
    finally:
        for handle in handles:
            handle.remove()
    changes = list(change_of.values())
    pulls: list[tuple[Tensor, ...]] = []
    for left in reversed(range(reading.draws)):
        score = reading.score(logits, draw)
        pulls.append(torch.autograd.grad(score, changes, retain_graph=left > 0))
    lanes = []
    for i, of_layer in enumerate(zip(*pulls, strict=True)):
        pull = torch.stack(of_layer)  # [S, T, H G d]
        if i in places_of:
            tokens = pull.new_zeros((len(pull), len(reading.ids), pull.shape[-1]))
            pull = tokens.index_copy(1, places_of[i], pull)
        lanes += _lanes(decoder, *inputs_of[i], pull)
    return lanes


def _lanes(
    decoder: Decoder, q: Tensor, k: Tensor, v: Tensor, pull: Tensor
) -> list[ObservedLane]:
    """One layer's lanes: q [H, G, T, ..] and k [H, T, ..] as attention multiplies them,
    v [T, H ..], pull [S, T, H G ..], all padded beyond the head's d dims."""
    d = decoder.spec.head_dim
    heads, group = q.shape[:2]
    v = v.unflatten(-1, (heads, -1))[..., :d]  # [T, H, d]
    pull = pull.unflatten(-1, (heads, group, -1))[..., :d]  # [S, T, H, G, d]
    lanes = []
    for head in range(heads):
        own_pull = pull[:, :, head].transpose(1, 2)  # [S, G, T, d]
        lanes.append(
            ObservedLane(q[head, ..., :d], k[head, :, :d], v[:, head], own_pull)
        )
    return lanes


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
    ) -> None:
        """``attention``: the lane's in the model itself, of scores that are scaled."""
        missing = -lane.k.shape[0] % page
        self.k = F.pad(lane.k, (0, 0, 0, missing))
        self.v = F.pad(lane.v, (0, 0, 0, missing))
        self.page = page
        self.queries = queries
        self.q = lane.q[:, queries.places]  # [G, R, d]
        self.pull = lane.pull[:, :, queries.places]  # [S, G, R, d]
        device = queries.device
        self.places = torch.arange(len(self.k), device=device)
        self.attention = attention
        every = seen_tokens(len(self.k), attention.window, device)
        self.seen = every[queries.places]  # [R, T]
        self.page_of = queries.places // page
        # [R, T]: a token of the query's page
        self.own = self.places // page == self.page_of[:, None]
        self.shares = self._softmax(self.q @ self.k.mT)  # [G, R, T]
        # What a share of each value adds to the scores, [S, G, R, T].
        self.worth = self.pull @ self.v.mT
        self.before = self._worth_of(self.shares)  # [S, G, R]

    def _softmax(self, scores: Tensor) -> Tensor:
        return self.attention.shares(scores, self.seen)

    def _worth_of(self, shares: Tensor) -> Tensor:
        return torch.einsum("grj,sgrj->sgr", shares, self.worth)

    def keys(self, forms: Iterable[Candidate]) -> Iterator[Tensor]:
        """Sum of squared moves for each code of each form of K."""
        rows = torch.arange(len(self.page_of), device=self.queries.device)
        for form in forms:
            kept = (self.k - form.centre) @ form.into  # [T, rank]
            q = self.q @ form.back  # [G, R, rank]
            own_page = kept.unflatten(0, (-1, self.page))[self.page_of]  # [R, P, rank]
            # [R, G, P]: scores of hot tokens
            fresh = torch.einsum("grd,rpd->rgp", q, own_page)
            for code in form.codes:
                scores = q @ rounded(kept, code, self.page).mT  # [G, R, T]
                pages = scores.unflatten(-1, (-1, self.page))  # [G, R, pages, P]
                pages[:, rows, self.page_of] = fresh.transpose(0, 1)
                shares = self._softmax(scores)
                yield self._moved(self._worth_of(shares))

    def values(self, forms: Iterable[Candidate]) -> Iterator[Tensor]:
        """Sum of squared moves for each code of each form of V."""
        elsewhere = self.shares.masked_fill(self.own, 0.0)
        here = self.shares - elsewhere
        for form in forms:
            kept = (self.v - form.centre) @ form.into  # [T, rank]
            fresh = here @ kept  # [G, R, rank]
            for code in form.codes:
                sealed = elsewhere @ rounded(kept, code, self.page)
                out = (sealed + fresh) @ form.back.mT + form.centre
                yield self._moved((self.pull * out).sum(-1))

    def windows(self, firsts: Iterable[tuple[int, Tensor]]) -> Iterator[Tensor]:
        """Sum of squared moves for each window: its sink, and [T], the first token
        after the sink that the query at each place sees."""
        for sink, first in firsts:
            recent = self.places >= first[self.queries.places][:, None]  # [R, T]
            seen = self.shares * (recent | (self.places < sink))  # [G, R, T]
            whole = seen.sum(-1, keepdim=True)  # [G, R, 1]
            if self.attention.sinks is not None:
                whole = whole + 1 - self.shares.sum(-1, keepdim=True)
            yield self._moved(self._worth_of(seen / whole))

    def _moved(self, after: Tensor) -> Tensor:
        """after [S, G, R] -> one number, left where it is: reading it would make a GPU
        wait for every form. The query heads of a token move together."""
        return ((after - self.before).sum(1).square() * self.queries.weights).sum()


Candidates = Callable[[str, int, int], list[Candidate]]
"""("k" or "v", layer, head) -> the forms of that side of that lane."""


@dataclass(frozen=True, eq=False)
class Losses:
    """Cost of each form, in units of the score: ``forms`` [2 * lanes, options], K
    lanes then V lanes; ``windows`` [lanes, windows]."""

    forms: Array
    windows: Array


def losses(
    decoder: Decoder,
    readings: Sequence[Reading],
    forms: Candidates,
    windows: Sequence[Life],
    page: int,
    seed: int = 0,
) -> Losses:
    """Measure the cost of each code of each form, and of each window, summed over
    ``readings``.

    ``decoder`` is the uncompressed model; ``page`` tokens are read as they are before
    they are coded. Readings that are ``far`` price the windows, the others the forms.
    """
    device = decoder.device
    draw = torch.Generator(device).manual_seed(seed)
    heads = decoder.spec.kv_heads
    lanes = heads * decoder.spec.layers
    of_keys: list[Array] = [np.zeros(1)] * lanes
    of_values: list[Array] = [np.zeros(1)] * lanes
    of_windows: list[Array] = [np.zeros(len(windows))] * lanes
    for reading in progress(readings, "measuring sensitivity"):
        observed_lanes = observe(decoder, reading, draw)
        tokens = len(reading.ids)
        firsts = [_first_seen(window.sees, tokens, page, device) for window in windows]
        with torch.inference_mode():
            for i, lane in enumerate(observed_lanes):
                layer, head = divmod(i, heads)
                queries = Queries.drawn(lane.pull, draw)
                moves = LaneMoves(lane, page, queries, _attention(decoder, layer, head))
                if reading.far:
                    of_windows[i] = _plus(of_windows[i], reading, moves.windows(firsts))
                    continue
                keys = moves.keys(forms("k", layer, head))
                values = moves.values(forms("v", layer, head))
                of_keys[i] = _plus(of_keys[i], reading, keys)
                of_values[i] = _plus(of_values[i], reading, values)
    return Losses(np.stack([*of_keys, *of_values]), np.stack(of_windows))


def _attention(decoder: Decoder, layer: int, head: int) -> PlainAttention:
    """Attention of one lane of the uncompressed model, whose queries come scaled."""
    attend = cast(AttendLayer, decoder.layers[str(layer)].attend)
    sinks = attend.sinks[head] if decoder.plan.model.sinks else None
    return dataclasses.replace(PlainAttention.of(decoder.spec, layer, sinks), scale=1.0)


def _plus(losses: Array, reading: Reading, moved: Iterable[Tensor]) -> Array:
    """``losses`` and what a reading adds to each of them."""
    squares = list(moved)
    if not squares:
        return losses
    return losses + reading.weight * torch.stack(squares).double().cpu().numpy()


def _first_seen(
    sight: Sight, tokens: int, page: int, device: torch.device
) -> tuple[int, Tensor]:
    """The window's sink, and for every place the first token after the sink that it
    sees."""
    whole_pages = -(-tokens // page) * page
    firsts = [sight.first_seen(place, page) for place in range(whole_pages)]
    return sight.sink, torch.tensor(firsts, device=device)
