"""Prompt look-up: what followed the newest tokens where they were before, in the prompt
or in the answer, is guessed to follow again (Saxena 2023, "Prompt Lookup Decoding"). No
second model is needed, and a look takes some ten microseconds.

The longest match is taken; of several, the newest. How often a guess is right is learnt
by the length of its match. It costs nothing to learn: guesses that no row was spent on
are compared with what came, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvlathe.runtime.drafting.rates import EVERYBODY, OWN, Rates, judge
from kvlathe.runtime.scheduling.sequence import Sequence

SHORTEST, LONGEST = 2, 12
"""Tokens of a match."""
AT_FIRST = [length / (length + 6) for length in range(LONGEST + 1)]
"""Share of right guesses by the length of the match, before there is evidence."""


@dataclass(slots=True)
class Text:
    """The first ``count`` tokens of a sequence, and what was guessed to follow them:
    ``guess``, by a match of ``length`` tokens."""

    rates: Rates
    tokens: npt.NDArray[np.int32]
    count: int = 0
    length: int = 0
    guess: list[int] = field(default_factory=list[int])

    def extend(self, tokens: Items[int]) -> None:
        """Append ``tokens``, the sequence's newest."""
        end = self.count + len(tokens)
        if end > len(self.tokens):
            self.tokens = np.resize(self.tokens, 2 * end)
        self.tokens[self.count : end] = tokens
        self.count = end

    def look(self, most: int) -> None:
        """Guess at most ``most`` tokens."""
        self.guess = []
        self.length, place = match(self.tokens[: self.count])
        if self.length >= SHORTEST:
            period = self.count - 1 - place
            self.guess = self.tokens[place + 1 + np.arange(most) % period].tolist()


def match(tokens: npt.NDArray[np.int32]) -> tuple[int, int]:
    """(length, place): the longest run of newest ``tokens`` that stood there before,
    side by side, and the place of its last token there. Length 0 where the very newest
    is new."""
    newest = len(tokens) - 1
    places = np.flatnonzero(tokens[:newest] == tokens[newest])
    length, place = 0, -1
    while len(places):
        length, place = length + 1, int(places[-1])
        if length == LONGEST:
            break
        before = places[places >= length] - length
        places = before[tokens[before] == tokens[newest - length]] + length
    return length, place


class PromptLookup:
    """The Drafter that needs no model."""

    def __init__(self) -> None:
        self._rates = Rates(AT_FIRST, EVERYBODY)
        self._texts: dict[Sequence, Text] = {}

    def chances(self, sequence: Sequence, most: int) -> Items[float]:
        """Drafter.chances."""
        text = self._texts.get(sequence)
        if text is None:
            rates = self._rates.copy(OWN)
            room = np.zeros(len(sequence.tokens) + 256, np.int32)
            text = self._texts[sequence] = Text(rates, room)
        came = sequence.tokens[text.count :]
        judge(text.guess, came, text.length, (text.rates, self._rates))
        text.extend(came)
        text.look(most)
        kinds = range(text.length, text.length + len(text.guess))
        return [text.rates.of(kind) for kind in kinds]

    def draft(self, counts: Mapping[Sequence, int], seconds: float) -> list[list[int]]:
        """Drafter.draft."""
        return [self._texts[one].guess[:count] for one, count in counts.items()]

    def forget(self, sequence: Sequence) -> None:
        """Drafter.forget."""
        self._texts.pop(sequence, None)
