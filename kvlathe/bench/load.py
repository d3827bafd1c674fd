"""Requests of a load test: the papers' traces, prompts cut from real text, Poisson
arrivals.

A paper gives a trace's mean, least and largest length. A beta distribution over [least,
largest] with that mean is the plainest one that keeps all three (a lognormal or gamma
of the same mean runs past the largest); its concentration, which no paper gives, is
CONCENTRATION. Everything is drawn from one seed, so all engines get the same requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvlathe.base.errors import KvlatheError
from kvlathe.base.json_lines import read_rows

CONCENTRATION = 4.0
"""a + b of the beta distribution: 2 would be flat for a mean in the middle, larger is
narrower."""

FEWEST_NEW = 2
"""Tokens of an answer: time between tokens needs two."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a trace's prompts or answers."""

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


@dataclass(frozen=True, slots=True)
class Request:
    prompt: list[int]  # token ids
    new_tokens: int


def draw(
    lengths: Lengths, random: np.random.Generator, count: int
) -> npt.NDArray[np.float64]:
    """[count] lengths."""
    width = lengths.largest - lengths.least
    share = (lengths.mean - lengths.least) / width
    return lengths.least + width * random.beta(
        CONCENTRATION * share, CONCENTRATION * (1 - share), count
    )


def scale_for(trace: Trace, limit: int, fit: bool) -> float:
    """The factor of every length: 1, or less where the longest request would
    pass ``limit`` tokens.

    ``fit`` stretches short traces too, so that their longest request just fits.
    """
    scale = limit / (trace.longest + FEWEST_NEW)
    return scale if fit else min(1.0, scale)


def requests(
    trace: Trace,
    text: Sequence[int],
    count: int,
    limit: int,
    seed: int,
    fit: bool = False,
) -> list[Request]:
    """``count`` requests whose prompts are slices of ``text`` (token ids, read round
    and round) at random places."""
    random = np.random.default_rng(seed)
    scale = scale_for(trace, limit, fit)
    prompts = np.maximum(1, draw(trace.prompt, random, count) * scale).astype(int)
    answers = np.maximum(FEWEST_NEW, draw(trace.answer, random, count) * scale).astype(
        int
    )
    starts = random.integers(0, len(text), count)
    ring = np.resize(np.asarray(text), len(text) + int(prompts.max()))
    return [
        Request(ring[start : start + size].tolist(), int(new))
        for start, size, new in zip(starts, prompts, answers, strict=True)
    ]


def gaps(count: int, seed: int) -> npt.NDArray[np.float64]:
    """[count] times between arrivals of a Poisson process of rate 1; divide by the rate
    wanted."""
    return np.random.default_rng([seed, 1]).exponential(1.0, count)


def documents(path: Path) -> list[str]:
    """The texts of a .jsonl file of {"text": ...}. Raises KvlatheError."""
    texts = [row["text"] for row in read_rows(path, ("text",))]
    if not any(texts):
        raise KvlatheError(
            f"{path} holds no text", "prompts are cut from it", "name another file"
        )
    return texts
