"""Sensitivity: what each lane's K and V may lose before the model's answers change,
measured on the model itself.

A gradient says how a change of attention's output moves what is scored; the change
itself is computed, by cutting and coding one lane's K (or V) in every form of a grid
and attending with it. To second order the score then loses

    text       KL(model || changed) = 1/2 E_y (grad log p(y) . change)^2, labels y drawn from the model (Fisher)
    questions  sum over the answer's tokens of (change of the margin / margin)^2, by random signs of the margins

Changes of different tokens and lanes are taken as independent, so losses add up. One
backward pass for each sequence and draw, and one attention of one lane for each form:
no form is ever run through the whole model.
"""

from __future__ import annotations

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
from kvlathe.export.search.sealed import rounded
from kvlathe.plan.formats import Format
from kvlathe.tasks import tasks

Array = npt.NDArray[np.floating]

TEXT_DRAWS, QUESTION_DRAWS = 2, 4
LEAST_MARGIN = 0.5
"""Logits: below this an answer is as good as undecided, and its margin says nothing of
how sure it was."""


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


# -- what is scored --------------------------------------------------------------------
Scored = Callable[[Tensor, torch.Generator], Tensor]


def text_score(logits: Tensor, draw: torch.Generator) -> Tensor:
    """Sum of log p(y) over all places, y drawn from the model."""
    logs = logits.log_softmax(-1)
    with torch.no_grad():
        labels = torch.multinomial(logs.exp(), 1, generator=draw)
    return logs.gather(-1, labels).sum()


def margin_score(answer: Tensor) -> Scored:
    """Sum of the answer's margins, each over its own size, with random signs."""

    def score(logits: Tensor, draw: torch.Generator) -> Tensor:
        labels = answer[:, None]
        own = logits.gather(-1, labels)[:, 0]
        others = logits.scatter(-1, labels, -torch.inf)
        margin = own - others.amax(-1)
        coins = torch.randint(2, margin.shape, generator=draw, device=draw.device)
        signs = coins * 2 - 1
        size = margin.detach().abs().clamp(min=LEAST_MARGIN)
        return (signs * margin / size).sum()

    return score


@dataclass(frozen=True)
class Reading:
    """A sequence, the places whose logits are scored, and how."""

    ids: tuple[int, ...]
    rows: range
    score: Scored
    draws: int
    weight: float  # of a squared change of the score


def of_text(windows: Sequence[Sequence[int]]) -> list[Reading]:
    """Every token of the windows but each first one is scored."""
    total = sum(len(window) - 1 for window in windows)
    readings = []
    for window in windows:
        weight = 0.5 / (total * TEXT_DRAWS)
        rows = range(len(window) - 1)
        readings.append(Reading(tuple(window), rows, text_score, TEXT_DRAWS, weight))
    return readings


def of_questions(questions: Sequence[tasks.Question]) -> list[Reading]:
    """The tokens of the answers are scored."""
    total = sum(len(question.answer) for question in questions)
    readings = []
    for question in questions:
        weight = 1 / (total * QUESTION_DRAWS)
        ids = question.prompt + question.answer
        score = margin_score(torch.tensor(question.answer))
        rows = range(len(question.prompt) - 1, len(ids) - 1)
        readings.append(Reading(ids, rows, score, QUESTION_DRAWS, weight))
    return readings


# -- observing -------------------------------------------------------------------------
def observed(
    decoder: Decoder, reading: Reading, draw: torch.Generator
) -> list[ObservedLane]:
    """Every lane, layer by layer. ``decoder`` is the uncompressed model."""
    layers = [cast(AttendLayer, layer.attend) for layer in decoder.layers.values()]
    inputs_of: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    change_of: dict[int, Tensor] = {}  # zeros added to outputs, to take gradients by

    def hook(index: int) -> Callable[..., tuple[Tensor, ...]]:
        def keep(
            layer: AttendLayer, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]
        ) -> tuple[Tensor, ...]:
            q, k, v, step = inputs
            output, *more = outputs
            q, k = layer.prepare(q, k, step.cos, step.sin)[:2]
            inputs_of[index] = (q.detach(), k.detach(), v.detach())
            change_of[index] = torch.zeros_like(output, requires_grad=True)
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
        lanes += _lanes(decoder, *inputs_of[i], torch.stack(of_layer))
    return lanes


def _lanes(
    decoder: Decoder, q: Tensor, k: Tensor, v: Tensor, pull: Tensor
) -> list[ObservedLane]:
    """One layer's lanes: q [H, G, T, ..] and k [H, T, ..] as attention multiplies them,
    v [T, H ..], pull [S, T, H G ..], all padded beyond the head's d dims."""
    d = decoder.spec.head_dim
    heads, group = q.shape[:2]
    v = v.unflatten(-1, (heads, -1))[..., :d]
    pull = pull.unflatten(-1, (heads, group, -1))[..., :d]
    lanes = []
    for head in range(heads):
        own_pull = pull[:, :, head].transpose(1, 2)
        lane_q = q[head, ..., :d]
        lane_k = k[head, :, :d]
        lanes.append(ObservedLane(lane_q, lane_k, v[:, head], own_pull))
    return lanes


# -- one lane's losses -----------------------------------------------------------------
class LaneMoves:
    """The attention of one lane over one sequence, and how far each form of K or V
    moves it along the pulls."""

    def __init__(self, lane: ObservedLane, page: int) -> None:
        missing = -lane.k.shape[0] % page
        self.q, self.k, self.v, self.pull = (
            F.pad(x, (0, 0, 0, missing)) for x in (lane.q, lane.k, lane.v, lane.pull)
        )
        self.page = page
        self.tokens = self.k.shape[0]
        pages = torch.arange(self.tokens) // page
        self.mask = torch.full((self.tokens, self.tokens), -torch.inf).triu(1)
        self.own = pages[:, None] == pages[None, :]
        self.shares = self._softmax(self.q @ self.k.mT)
        # What a share of each value adds to the scores, [S, G, T, T].
        self.worth = self.pull @ self.v.mT
        self.before = self._worth_of(self.shares)

    def _softmax(self, scores: Tensor) -> Tensor:
        """In the place of ``scores``."""
        return scores.add_(self.mask).softmax(-1)

    def _worth_of(self, shares: Tensor) -> Tensor:
        return torch.einsum("gtj,sgtj->sgt", shares, self.worth)

    def keys(self, forms: Iterable[Candidate]) -> Iterator[float]:
        """Sum of squared moves for each code of each form of K."""
        pages = torch.arange(self.tokens // self.page)
        count = len(pages)
        for form in forms:
            kept = (self.k - form.centre) @ form.into
            q = self.q @ form.back
            q_by_page = q.unflatten(1, (-1, self.page))
            kept_by_page = kept.unflatten(0, (-1, self.page))
            fresh = q_by_page @ kept_by_page.mT  # [G, pages, P, P]
            for code in form.codes:
                scores = q @ rounded(kept, code, self.page).mT
                blocks = scores.view(len(q), count, self.page, count, self.page)
                blocks[:, pages, :, pages] = fresh.transpose(0, 1)
                shares = self._softmax(scores)
                yield self._moved(self._worth_of(shares))

    def values(self, forms: Iterable[Candidate]) -> Iterator[float]:
        """Sum of squared moves for each code of each form of V."""
        elsewhere = self.shares.masked_fill(self.own, 0.0)
        here = self.shares - elsewhere
        for form in forms:
            kept = (self.v - form.centre) @ form.into
            fresh = here @ kept
            for code in form.codes:
                sealed = elsewhere @ rounded(kept, code, self.page)
                out = (sealed + fresh) @ form.back.mT + form.centre
                yield self._moved((self.pull * out).sum(-1))

    def _moved(self, after: Tensor) -> float:
        """after [S, G, T]: the query heads of a token move together."""
        moves = (after - self.before).sum(1)
        return float(moves.square().sum())


Candidates = Callable[[str, int, int], list[Candidate]]
"""("k" or "v", layer, head) -> the forms of that side of that lane."""


def losses(
    decoder: Decoder,
    readings: Sequence[Reading],
    forms: Candidates,
    page: int,
    seed: int = 0,
) -> Array:
    """What each code of each form costs, [2 * lanes, options], K lanes then V lanes,
    summed over ``readings``.

    ``decoder`` is the uncompressed model; ``page`` tokens are read as they are before
    they are coded.
    """
    draw = torch.Generator(torch.get_default_device()).manual_seed(seed)
    heads = decoder.spec.kv_heads
    lanes = heads * decoder.spec.layers
    of_keys: list[Array] = [np.zeros(1)] * lanes
    of_values: list[Array] = [np.zeros(1)] * lanes
    for reading in progress(readings, "measuring sensitivity"):
        observed_lanes = observed(decoder, reading, draw)
        with torch.inference_mode():
            for i, lane in enumerate(observed_lanes):
                at = divmod(i, heads)
                moves = LaneMoves(lane, page)
                keys = np.array(list(moves.keys(forms("k", *at))))
                values = np.array(list(moves.values(forms("v", *at))))
                of_keys[i] = of_keys[i] + reading.weight * keys
                of_values[i] = of_values[i] + reading.weight * values
    return np.stack([*of_keys, *of_values])
