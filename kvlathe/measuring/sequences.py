"""Sequences that a measurement reads: windows of held-out text, and exercises made of
its tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvlathe.export.search.exercises import KINDS, LEAST, NEAR, Exercise
from kvlathe.tasks.held_out import HeldOut

LENGTHS = (1024, 4096)
"""Tokens of the shorter windows; the longest are as long as what is served."""
SCORED = 1024
"""Places of a window that are scored, its last ones: of a longer one they tell what its
shorter ones do not."""
WINDOWS, MORE_WINDOWS = 2, 4
"""Windows of the shortest length, and those that are added where there is time."""
FEW_TOKENS = 256
"""Tokens that tell of a plan that removes nothing that it does not."""
RANKED_SHARE, RANKED_SCORED = 4, 256
"""A plan that ranks the tokens of a prompt has a window's last fourth at most scored,
and no more than so many places: the rest is the prompt."""


@dataclass(frozen=True)
class Passage:
    """A sequence of token ids and the places ``rows`` whose next token is predicted.
    ``near``: how many of its first tokens the uncompressed model reads it without for
    comparison, where it is an exercise. ``start``: the position of its first token."""

    ids: tuple[int, ...]
    rows: tuple[int, ...]
    near: int | None = None
    start: int = 0

    @property
    def targets(self) -> list[int]:
        return [self.ids[row + 1] for row in self.rows]

    def cut(self, tokens: int) -> Passage:
        """Its first ``tokens`` tokens, those of them scored that were before."""
        rows = tuple(row for row in self.rows if row < tokens - 1)
        rows = rows or (tokens - 2,)
        return Passage(self.ids[:tokens], rows, start=self.start)


@dataclass(frozen=True)
class Group:
    """Passages of one length, measured or left out together. ``later``: how early it is
    given up where time is short, whatever its length."""

    tokens: int
    passages: tuple[Passage, ...]
    later: int = 0

    @property
    def read(self) -> int:
        """Tokens that both models read of it."""
        return sum(len(passage.ids) for passage in self.passages)


def short(held_out: HeldOut, longest: int) -> list[Group]:
    """A single window of few tokens."""
    tokens = min(FEW_TOKENS, longest)
    window = tuple(held_out.window(tokens))
    return [Group(tokens, (Passage(window, tuple(range(tokens - 1))),))]


def groups(held_out: HeldOut, longest: int, ranked: bool, seed: int) -> list[Group]:
    """Everything that is worth measuring, the most telling first."""
    lengths = sorted({min(tokens, longest) for tokens in (*LENGTHS, longest)})

    def text(tokens: int, count: int, later: int = 0) -> Group:
        most = SCORED
        if ranked:
            most = min(RANKED_SCORED, max(1, tokens // RANKED_SHARE))
        first = max(0, tokens - 1 - most)
        rows = tuple(range(first, tokens - 1))
        windows = [tuple(held_out.window(tokens)) for _ in range(count)]
        return Group(tokens, tuple(Passage(ids, rows) for ids in windows), later)

    shortest = lengths[0]
    found = [text(tokens, WINDOWS if tokens == shortest else 1) for tokens in lengths]
    stream = [token for group in found for x in group.passages for token in x.ids]
    tried: list[Group] = []
    for tokens in lengths:
        if exercises := tuple(_exercises(stream, tokens, seed)):
            tried.append(Group(tokens, exercises, 0 if tokens == shortest else 1))
    first, rest = found[:1] + tried[:1], found[1:] + tried[1:]
    return [*first, *rest, text(shortest, MORE_WINDOWS, later=2)]


def _exercises(stream: Sequence[int], tokens: int, seed: int) -> Iterator[Passage]:
    """One exercise of each kind."""
    if tokens < LEAST:
        return
    for kind, make in enumerate(KINDS):
        exercise = make(stream, tokens, np.random.default_rng((seed, tokens, kind, 1)))
        yield _passage(exercise)


def _passage(exercise: Exercise) -> Passage:
    rows = tuple(place - 1 for place in exercise.answers)
    return Passage(exercise.ids, rows, max(0, exercise.start - NEAR))
