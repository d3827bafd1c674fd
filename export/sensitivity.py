"""Sensitivity: what each lane's K and V may lose before the model's answers change, measured on the model itself.

A gradient says how a change of attention's output moves what is scored; the change itself is computed, by cutting and
coding one lane's K (or V) in every form of a grid and attending with it. To second order the score then loses

    text       KL(model || changed) = 1/2 E_y (grad log p(y) . change)^2, labels y drawn from the model (Fisher)
    questions  sum over the answer's tokens of (change of the margin / margin)^2, by random signs of the margins

Changes of different tokens and lanes are taken as independent, so losses add up. One backward pass for each sequence
and draw, and one attention of one lane for each form: no form is ever run through the whole model.
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

from kvlathe import tasks
from kvlathe.console import progress
from kvlathe.export.attend import AttendLayer
from kvlathe.export.decoder import Decoder
from kvlathe.export.sealed import Code, rounded

Array = npt.NDArray[np.floating]

TEXT_DRAWS, QUESTION_DRAWS = 2, 4
LEAST_MARGIN = 0.5
"""Logits: below this an answer is as good as undecided, and its margin says nothing of how sure it was."""


@dataclass(frozen=True)
class Form:
    """One cut of one side of a lane, and the codes it may be stored in: x' = (x - centre) into, [d, rank], read through
    ``back`` [d, rank] (q back for K, x' back^T for V).
    """

    into: Tensor
    back: Tensor
    centre: Tensor
    codes: tuple[Code, ...]


@dataclass(frozen=True)
class Seen:
    """One lane of one sequence: q [G, T, d] scaled, k and v [T, d], and ``pull`` [S, G, T, d], the gradients of S
    drawn scores by the lane's output.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    pull: Tensor


# -- what is scored ----------------------------------------------------------------------------------------------------
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
        own = logits.gather(-1, answer[:, None])[:, 0]
        margin = own - logits.scatter(-1, answer[:, None], -torch.inf).amax(-1)
        signs = torch.randint(2, margin.shape, generator=draw, device=draw.device) * 2 - 1
        return (signs * margin / margin.detach().abs().clamp(min=LEAST_MARGIN)).sum()

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
    total = sum(len(window) - 1 for window in windows)
    return [
        Reading(tuple(window), range(len(window) - 1), text_score, TEXT_DRAWS, 0.5 / (total * TEXT_DRAWS))
        for window in windows
    ]


def of_questions(questions: Sequence[tasks.Question]) -> list[Reading]:
    total = sum(len(question.answer) for question in questions)
    found = []
    for question in questions:
        ids = question.prompt + question.answer
        score = margin_score(torch.tensor(question.answer))
        rows = range(len(question.prompt) - 1, len(ids) - 1)
        found.append(Reading(ids, rows, score, QUESTION_DRAWS, 1 / (total * QUESTION_DRAWS)))
    return found


# -- observing ---------------------------------------------------------------------------------------------------------
def observed(decoder: Decoder, reading: Reading, draw: torch.Generator) -> list[list[Seen]]:
    """Every lane of every layer, [L][H]. ``decoder`` is the uncompressed model."""
    layers = [cast(AttendLayer, layer.attend) for layer in decoder.layers.values()]
    taken: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    probes: dict[int, Tensor] = {}

    def hook(index: int) -> Callable[..., tuple[Tensor, ...]]:
        def keep(layer: AttendLayer, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            q, k, v, step = inputs
            ready = layer.prepare(q, k, step.cos, step.sin)
            taken[index] = (ready[0].detach(), ready[1].detach(), v.detach())
            probes[index] = torch.zeros_like(outputs[0], requires_grad=True)
            return outputs[0] + probes[index], *outputs[1:]

        return keep

    handles = [layer.register_forward_hook(hook(i)) for i, layer in enumerate(layers)]
    try:
        logits = decoder.read(reading.ids, reading.rows)
    finally:
        for handle in handles:
            handle.remove()
    pulls: list[list[Tensor]] = []
    for n in range(reading.draws):
        asked = list(probes.values())
        pulls.append(list(torch.autograd.grad(reading.score(logits, draw), asked, retain_graph=n + 1 < reading.draws)))
    return [_lanes(decoder, *taken[i], torch.stack([pull[i] for pull in pulls])) for i in range(len(layers))]


def _lanes(decoder: Decoder, q: Tensor, k: Tensor, v: Tensor, pull: Tensor) -> list[Seen]:
    d, (heads, group) = decoder.spec.head_dim, q.shape[:2]
    v = v.unflatten(-1, (heads, -1))[..., :d]
    pull = pull.unflatten(-1, (heads, group, -1))[..., :d]
    return [Seen(q[h, ..., :d], k[h, :, :d], v[:, h], pull[:, :, h].transpose(1, 2)) for h in range(heads)]


# -- one lane's losses -------------------------------------------------------------------------------------------------
class Lane:
    """The attention of one lane over one sequence, and how far each form of K or V moves it along the pulls."""

    def __init__(self, seen: Seen, page: int) -> None:
        short = -seen.k.shape[0] % page
        self.q, self.k, self.v, self.pull = (F.pad(x, (0, 0, 0, short)) for x in (seen.q, seen.k, seen.v, seen.pull))
        self.page, self.tokens = page, self.k.shape[0]
        pages = torch.arange(self.tokens) // page
        self.mask = torch.full((self.tokens, self.tokens), -torch.inf).triu(1)
        self.own = pages[:, None] == pages[None, :]
        self.shares = self._softmax(self.q @ self.k.mT)
        self.worth = self.pull @ self.v.mT  # [S, G, T, T]: what a share of each value adds to the scores
        self.before = self._worth_of(self.shares)

    def _softmax(self, scores: Tensor) -> Tensor:
        """In the place of ``scores``."""
        return scores.add_(self.mask).softmax(-1)

    def _worth_of(self, shares: Tensor) -> Tensor:
        return torch.einsum("gtj,sgtj->sgt", shares, self.worth)

    def keys(self, forms: Iterable[Form]) -> Iterator[float]:
        """Sum of squared moves for each code of each form of K."""
        pages = torch.arange(self.tokens // self.page)
        for form in forms:
            kept, q = (self.k - form.centre) @ form.into, self.q @ form.back
            fresh = q.unflatten(1, (-1, self.page)) @ kept.unflatten(0, (-1, self.page)).mT  # [G, pages, P, P]
            for code in form.codes:
                scores = q @ rounded(kept, code, self.page).mT
                blocks = scores.view(len(q), len(pages), self.page, len(pages), self.page)
                blocks[:, pages, :, pages] = fresh.transpose(0, 1)
                yield self._moved(self._worth_of(self._softmax(scores)))

    def values(self, forms: Iterable[Form]) -> Iterator[float]:
        """Sum of squared moves for each code of each form of V."""
        elsewhere = self.shares.masked_fill(self.own, 0.0)
        here = self.shares - elsewhere
        for form in forms:
            kept = (self.v - form.centre) @ form.into
            fresh = here @ kept
            for code in form.codes:
                out = (elsewhere @ rounded(kept, code, self.page) + fresh) @ form.back.mT + form.centre
                yield self._moved((self.pull * out).sum(-1))

    def _moved(self, after: Tensor) -> float:
        """after [S, G, T]: the query heads of a token move together."""
        return float((after - self.before).sum(1).square().sum())


Forms = Callable[[str, int, int], list[Form]]
"""("k" or "v", layer, head) -> the forms of that side of that lane."""


def losses(decoder: Decoder, readings: Sequence[Reading], forms: Forms, page: int, seed: int = 0) -> Array:
    """What each code of each form costs, [2 * lanes, options], K lanes then V lanes, summed over ``readings``.

    ``decoder`` is the uncompressed model; ``page`` tokens are read as they are before they are coded.
    """
    draw = torch.Generator(torch.get_default_device()).manual_seed(seed)
    heads = decoder.spec.kv_heads
    total: dict[tuple[str, int], Array] = {}
    for reading in progress(readings, "measuring sensitivity"):
        seen = [lane for layer in observed(decoder, reading, draw) for lane in layer]
        with torch.inference_mode():
            for i, lane in enumerate(seen):
                one = Lane(lane, page)
                for side, measure in (("k", one.keys), ("v", one.values)):
                    moved = reading.weight * np.array(list(measure(forms(side, *divmod(i, heads)))))
                    total[side, i] = total.get((side, i), 0.0) + moved
    return np.stack([total[side, i] for side in "kv" for i in range(heads * decoder.spec.layers)])
