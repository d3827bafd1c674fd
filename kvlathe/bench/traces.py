"""Prompt and answer lengths of the papers' data sets, in tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lengths:
    mean: float
    least: float
    largest: float


@dataclass(frozen=True, slots=True)
class Trace:
    prompt: Lengths
    answer: Lengths

    @property
    def longest(self) -> float:
        """Most tokens of a request, prompt and answer."""
        return self.prompt.largest + self.answer.largest


TRACES = {
    "imdb": Trace(Lengths(315, 106, 821), Lengths(37, 16, 87)),
    "arxiv": Trace(Lengths(6300, 1600, 14100), Lengths(243, 29, 464)),
    "cocktail": Trace(Lengths(16200, 9400, 28800), Lengths(159, 44, 246)),
    "humaneval": Trace(Lengths(204, 75, 697), Lengths(139, 11, 552)),
    "pg19": Trace(Lengths(277, 138, 419), Lengths(61500, 24300, 97500)),
}
"""ZACK, table 3; HACK, table 4 (the same four); FDC, table 6 (pg19)."""
