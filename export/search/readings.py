"""Readings: sequences that sensitivity is measured on, the places that are scored, and
how.

A score is a sum over its places, so that its gradient may be taken some of them at a
time. Chance comes in as numbers in [0, 1), one for each draw and place: how many are
taken at a time changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlathe.export.model.sliced_head import Slopes
from kvlathe.tasks import tasks

PIECE = 512
"""Tokens in a row, where positions have gaps."""
TEXT_DRAWS, QUESTION_DRAWS = 2, 4
FAR_DRAWS = 2
"""Draws of a long text or question: one there costs as much as many of a short one."""
LEAST_MARGIN = 0.5
"""Logits: below this an answer is as good as undecided, and its margin says nothing of
how sure it was."""

Scored = Callable[[Tensor, Tensor, slice], Slopes]
"""(logits [R, V] of some of the scored places, chance [S, R] of each draw, which of
them) -> the gradients of the S draws' scores. The logits may be overwritten."""


def text_score(logits: Tensor, chance: Tensor, rows: slice) -> Slopes:
    """Sum of log p(y) over the places, y drawn from the model."""
    shares = logits.sub_(logits.amax(-1, keepdim=True)).exp_()
    shares /= shares.sum(-1, keepdim=True)
    below = shares.cumsum(-1)  # [R, V]
    reached = chance.to(below.dtype) * below[:, -1]  # [S, R]
    drawn = torch.searchsorted(below, reached.T.contiguous(), right=True)  # [R, S]
    labels = drawn.T.clamp(max=shares.shape[-1] - 1)[..., None]  # [S, R, 1]
    return Slopes(labels, torch.ones_like(labels, dtype=shares.dtype), shares)


def margin_score(answer: Sequence[int]) -> Scored:
    """Sum of the answer's margins, each over its own size, with random signs."""

    def score(logits: Tensor, chance: Tensor, rows: slice) -> Slopes:
        labels = torch.tensor(answer[rows], device=logits.device)[:, None]
        own = logits.gather(-1, labels)
        others, best = logits.scatter_(-1, labels, -torch.inf).max(-1, keepdim=True)
        size = (own - others).abs().clamp(min=LEAST_MARGIN)  # [R, 1]
        signs = torch.where(chance < 0.5, -1.0, 1.0)[..., None]  # [S, R, 1]
        slopes = signs / size
        tokens = torch.cat([labels, best], -1).expand(len(chance), -1, -1)
        return Slopes(tokens, torch.cat([slopes, -slopes], -1))

    return score


def spread(tokens: int, gaps: int) -> tuple[int, ...]:
    """Positions of ``tokens`` tokens that leave out ``gaps`` positions, about equally
    many between any two pieces of PIECE tokens. The first is 0, the last piece whole.

    A model that turns by positions (RoPE) then looks as far as in a sequence of
    ``tokens + gaps`` tokens, and reads only so many.
    """
    last = (tokens - 1) // PIECE
    if not last:
        return tuple(range(tokens))
    pieces = (last - (tokens - 1 - place) // PIECE for place in range(tokens))
    return tuple(place + gaps * piece // last for place, piece in enumerate(pieces))


@dataclass(frozen=True)
class Reading:
    """A sequence, the places whose logits are scored, and how."""

    ids: tuple[int, ...]
    rows: Sequence[int]
    score: Scored
    draws: int
    weight: float  # of a squared change of the score
    far: bool = False  # windows are priced on it, forms are not
    gaps: int = 0  # positions that no token has

    @property
    def positions(self) -> tuple[int, ...]:
        return spread(len(self.ids), self.gaps)


def of_text(
    windows: Sequence[Sequence[int]], far: bool = False, gaps: int = 0
) -> list[Reading]:
    """Every token of the windows but each first one is scored."""
    total = sum(len(window) - 1 for window in windows)
    readings = []
    draws = FAR_DRAWS if far else TEXT_DRAWS
    for window in windows:
        weight = 0.5 / (total * draws)
        rows = range(len(window) - 1)
        scored = rows, text_score, draws, weight
        readings.append(Reading(tuple(window), *scored, far, gaps))
    return readings


def of_questions(
    questions: Sequence[tasks.Question], far: bool = False
) -> list[Reading]:
    """The tokens of the answers are scored."""
    total = sum(len(question.answer) for question in questions)
    readings = []
    draws = FAR_DRAWS if far else QUESTION_DRAWS
    for question in questions:
        weight = 1 / (total * draws)
        ids = question.prompt + question.answer
        score = margin_score(question.answer)
        rows = range(len(question.prompt) - 1, len(ids) - 1)
        readings.append(Reading(ids, rows, score, draws, weight, far))
    return readings
