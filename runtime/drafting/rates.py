"""Rates: how often guesses of a kind were right, of late."""

from __future__ import annotations

from collections.abc import Sequence as Items

OWN = 0.1
"""Weight of the newest guess, for the sequence that it was made for."""
EVERYBODY = 0.02
"""The same, for those that come after it."""


class Rates:
    """Share of right guesses, by kind of guess. ``weight``: that of the newest."""

    def __init__(self, shares: Items[float], weight: float) -> None:
        self._shares, self._weight = list(shares), weight

    def copy(self, weight: float) -> Rates:
        return Rates(self._shares, weight)

    def of(self, kind: int) -> float:
        """Kinds past the last are as the last."""
        return self._shares[min(kind, len(self._shares) - 1)]

    def add(self, kind: int, right: bool) -> None:
        kind = min(kind, len(self._shares) - 1)
        self._shares[kind] += self._weight * (right - self._shares[kind])


def judge(guess: Items[int], came: Items[int], first: int, known: Items[Rates]) -> None:
    """A guess was made, and these tokens came: count those that were right, and the
    first that was not. Token i of it is of the kind ``first`` + i."""
    for place, (guessed, token) in enumerate(zip(guess, came, strict=False)):
        for rates in known:
            rates.add(first + place, guessed == token)
        if guessed != token:
            return
