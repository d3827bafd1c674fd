"""HeldOut: text to measure on of which nothing was read before, as token ids.

Documents come from files; what any price or statistic has read of them is cut out, by
what it says and not by where it stands. Where they end, sentences are made up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from kvlathe.tasks import tasks
from kvlathe.tasks.line_retrieval import ADJECTIVES, NOUNS

SHARED = 32
"""Tokens in a row that a document may not share with what was read."""
SHORTEST = 64
"""Tokens of the shortest piece of a document that is used."""
VERBS = ("finds", "holds", "hides", "keeps", "lifts", "meets", "moves", "opens", "sees")
ENDS = (
    "beside the {} {}",
    "under a {} {}",
    "before the {} {} comes back",
    "and nobody asks for the {} {}",
    "because the {} {} was not there",
    "with {} more of the {} {}",
)


class HeldOut:
    """Windows of documents of ``files``, each from another document while there are
    any, then of made-up sentences; of random tokens below ``vocabulary`` without an
    ``encoder``, or with one that knows no words. Nothing of ``read`` is in them."""

    def __init__(
        self,
        files: Sequence[Path],
        encoder: tasks.Encoder | None,
        vocabulary: int,
        read: Iterable[Sequence[int]] = (),
        seed: int = 0,
    ) -> None:
        self._encoder = encoder
        self._vocabulary = vocabulary
        self._random = np.random.default_rng((seed, vocabulary))
        self._known = {run for ids in read for run in runs(ids)}
        self._pieces = self._of_files(files if encoder else ())
        self._rest: list[list[int]] = []  # of documents that windows have begun
        self._kinds: list[str] = []

    @property
    def described(self) -> str:
        """The kinds of text of the windows so far, in words."""
        return " and ".join(dict.fromkeys(self._kinds)) or "no text"

    def window(self, tokens: int) -> list[int]:
        """The next ``tokens`` tokens."""
        window: list[int] = []
        while len(window) < tokens:
            piece, kind = self._next()
            self._kinds.append(kind)
            missing = tokens - len(window)
            window += piece[:missing]
            if len(piece) - missing >= SHORTEST:
                self._rest.append(piece[missing:])
        return window

    def _next(self) -> tuple[list[int], str]:
        if piece := next(self._pieces, None):
            return piece, "held-out text"
        if self._rest:
            return self._rest.pop(0), "held-out text"
        if self._encoder is not None:
            text = sentences(self._random, 64)
            made = self._encoder.encode(text, add_special_tokens=False)
            if len(made) >= SHORTEST:
                return made, "made-up sentences"
            self._encoder = None  # it knows none of these words
        drawn = self._random.integers(self._vocabulary, size=1024)
        return drawn.tolist(), "random tokens"

    def _of_files(self, files: Sequence[Path]) -> Iterator[list[int]]:
        """The pieces of all documents, from the last one on: what reads a file begins
        where it begins."""
        assert self._encoder is not None or not files
        for path in files:
            for text in tasks.read_texts(path)[::-1]:
                assert self._encoder is not None
                ids = self._encoder.encode(text, add_special_tokens=False)
                yield from self._unread(ids)

    def _unread(self, ids: list[int]) -> Iterator[list[int]]:
        """The pieces of a document that share no run with what was read."""
        start = 0
        for place, run in enumerate(runs(ids)):
            if run in self._known:
                # The run's last token ends what may be used before it.
                if place + SHARED - 1 - start >= SHORTEST:
                    yield ids[start : place + SHARED - 1]
                start = place + 1
        if len(ids) - start >= SHORTEST:
            yield ids[start:]


def runs(ids: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every SHARED tokens in a row."""
    whole = tuple(ids)
    for start in range(len(whole) - SHARED + 1):
        yield whole[start : start + SHARED]


def sentences(random: np.random.Generator, count: int) -> str:
    """``count`` sentences of common words. They say nothing, but no two texts are
    alike, and each comes back to what was named before."""
    named: list[str] = []
    said = []
    for _ in range(count):
        adjective, other = random.choice(ADJECTIVES, 2)
        noun, thing = random.choice(NOUNS, 2)
        if named and random.random() < 0.5:
            noun = random.choice(named)
        named.append(noun)
        end = random.choice(ENDS)
        if end.count("{}") == 3:
            end = end.format(int(random.integers(2, 90)), other, thing)
        else:
            end = end.format(other, thing)
        said.append(f"The {adjective} {noun} {random.choice(VERBS)} it {end}.")
    return " ".join(said)
