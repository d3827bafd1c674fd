"""Readings: sequences that sensitivity is measured on, the places that are scored, and
how."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlathe.tasks import tasks

TEXT_DRAWS, QUESTION_DRAWS = 2, 4
FAR_DRAWS = 2
"""Draws of a long text or question: one there costs as much as many of a short one."""
LEAST_MARGIN = 0.5
"""Logits: below this an answer is as good as undecided, and its margin says nothing of
how sure it was."""

Scored = Callable[[Tensor, torch.Generator], Tensor]


def text_score(logits: Tensor, draw: torch.Generator) -> Tensor:
    """Sum of log p(y) over all places, y drawn from the model."""
    logs = logits.log_softmax(-1)
    with torch.no_grad():
        labels = torch.multinomial(logs.exp(), 1, generator=draw)
    return logs.gather(-1, labels).sum()


def margin_score(answer: Sequence[int]) -> Scored:
    """Sum of the answer's margins, each over its own size, with random signs."""

    def score(logits: Tensor, draw: torch.Generator) -> Tensor:
        labels = torch.tensor(answer, device=logits.device)[:, None]
        own = logits.gather(-1, labels)[:, 0]
        margin = own - logits.scatter(-1, labels, -torch.inf).amax(-1)
        coins = torch.randint(2, margin.shape, generator=draw, device=draw.device)
        signs = coins * 2 - 1
        return (signs * margin / margin.detach().abs().clamp(min=LEAST_MARGIN)).sum()

    return score


@dataclass(frozen=True)
class Reading:
    """A sequence, the places whose logits are scored, and how."""

    ids: tuple[int, ...]
    rows: Sequence[int]
    score: Scored
    draws: int
    weight: float  # of a squared change of the score
    far: bool = False  # windows are priced on it, forms are not


def of_text(windows: Sequence[Sequence[int]], far: bool = False) -> list[Reading]:
    """Every token of the windows but each first one is scored."""
    total = sum(len(window) - 1 for window in windows)
    readings = []
    draws = FAR_DRAWS if far else TEXT_DRAWS
    for window in windows:
        weight = 0.5 / (total * draws)
        rows = range(len(window) - 1)
        readings.append(Reading(tuple(window), rows, text_score, draws, weight, far))
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
