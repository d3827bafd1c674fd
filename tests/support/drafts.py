"""Drafters and costs for tests of speculation."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items

import numpy as np

from kvlathe.runtime.scheduling.allowance import Allowance
from kvlathe.runtime.scheduling.parts.speculation import Drafter, Speculation
from kvlathe.runtime.scheduling.row_costs import RowCosts
from kvlathe.runtime.scheduling.sequence import Sequence
from tests.support.fake_session import VOCABULARY, following


class FreeRows(RowCosts):
    """More rows cost nothing: whatever is guessed is tried."""

    def times(self, rows: int, sequences: int) -> float:
        return 1.0


class Endless(Allowance):
    """Guessing may lose any time."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 1e9

    def ran(self, plain: float, lost: float) -> None:
        """It stays so."""


class Prophet:
    """Knows what FakeSession will say, and says something else with the probability
    ``error``: any token of the vocabulary."""

    def __init__(self, seed: int, error: float) -> None:
        self.random, self.error = np.random.default_rng(seed), error
        self.known: set[Sequence] = set()

    def chances(self, sequence: Sequence, most: int) -> Items[float]:
        self.known.add(sequence)
        return [0.9] * int(self.random.integers(0, most + 1))

    def draft(self, counts: Mapping[Sequence, int], seconds: float) -> list[list[int]]:
        return [self.guess(sequence.tokens, n) for sequence, n in counts.items()]

    def guess(self, tokens: list[int], count: int) -> list[int]:
        text = list(tokens)
        for _ in range(count):
            token = following(text)
            if self.errs():
                token = int(self.random.integers(VOCABULARY))
            text.append(token)
        return text[len(tokens) :]

    def errs(self) -> bool:
        return self.random.random() < self.error

    def forget(self, sequence: Sequence) -> None:
        self.known.discard(sequence)


class Reader(Prophet):
    """As Prophet, where ``texts`` are what a model says."""

    def __init__(self, seed: int, error: float, texts: Items[Items[int]]) -> None:
        super().__init__(seed, error)
        self.texts = texts

    def guess(self, tokens: list[int], count: int) -> list[int]:
        guess: list[int] = []
        for text in self.texts:
            if [*text[: len(tokens)]] == tokens:
                guess = [*text[len(tokens) : len(tokens) + count]]
        return [(token + 1) % 50 if self.errs() else token for token in guess]


def trying(drafter: Drafter, ends: frozenset[int] = frozenset()) -> Speculation:
    """Speculation that tries all that a drafter says."""
    made = Speculation(drafter, 6, ends)
    return whatever_is_guessed(made)


def whatever_is_guessed(made: Speculation) -> Speculation:
    """It tries all."""
    made.costs, made.allowance = FreeRows(), Endless()
    return made
