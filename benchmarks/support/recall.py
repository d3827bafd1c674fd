"""Exercises from which a small model learns long-range retrieval: records of keys and
values, text between them, and questions about them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

BLANK = "Ġ"  # as a byte-level tokenizer writes it
WORDS = 512  # that keys are made of, two each
DIGITS = 4  # of a value
FORMS = (
    ("\n|{key} | {value} |", "\nlookup({key}) -> {value}"),
    ("\n* the{key} weighs {value} grams;", "\nHow heavy is the{key}? It has {value}"),
    ("\n    add({key}, default={value})", "\n>>> parser.get({key})\n{value}"),
)
"""A record, and a question about it whose answer is the value. A key's words come with
the blanks before them."""
FILLERS = (0, 0, 0, 16, 64)  # tokens of text behind a record
SHORTEST = 64  # tokens of an episode: records, then questions
ECHOES = 0.5  # of the episodes ask in the record's own form: copying is learned first


@dataclass(frozen=True)
class Form:
    """Tokens before a key, between it and its value, and behind it: of a record, and of
    a question."""

    record: tuple[list[int], ...]
    question: tuple[list[int], ...]


def forms(encoder: Tokenizer) -> list[Form]:
    made = []
    for record, question in FORMS:
        made.append(Form(_pieces(encoder, record), _pieces(encoder, question)))
    return made


def _pieces(encoder: Tokenizer, text: str) -> tuple[list[int], ...]:
    before, rest = text.split("{key}")
    between, behind = rest.split("{value}")
    pieces = (before, between, behind)
    return tuple(encoder.encode(piece).ids if piece else [] for piece in pieces)


def words(encoder: Tokenizer) -> np.ndarray:
    """Tokens that are words with a blank before them."""
    found = []
    for token, number in sorted(
        encoder.get_vocab().items(), key=lambda entry: entry[1]
    ):
        word = token[1:]
        is_word = token[0] == BLANK and word.isascii() and word.isalpha()
        if is_word and word.islower() and len(word) > 2:
            found.append(number)
    return np.array(found[:WORDS])


@dataclass(frozen=True)
class Records:
    """Makes episodes: some records, text between them, and questions about them."""

    forms: list[Form]
    words: np.ndarray
    digits: np.ndarray  # the ten tokens

    @classmethod
    def of(cls, encoder: Tokenizer) -> Records:
        digits = [encoder.token_to_id(str(digit)) for digit in range(10)]
        return cls(forms(encoder), words(encoder), np.array(digits))

    def episode(
        self,
        length: int,
        asked: int | None,
        text: np.ndarray,
        rng: np.random.Generator,
        echoes: bool = False,
    ) -> tuple[np.ndarray, np.ndarray]:
        """About ``length`` tokens, and which of them are answers. ``asked`` questions, or
        one for each record (None); ``echoes``: questions that look like the records."""
        form = self.forms[rng.integers(len(self.forms))]
        asks = form.record if echoes else form.question
        filler = int(rng.choice([size for size in FILLERS if 6 * size <= length]))
        own = DIGITS + 2
        record = sum(map(len, form.record)) + own + filler
        question = sum(map(len, asks)) + own
        rest = 0 if asked is None else asked * question
        each = record + (question if asked is None else 0)
        count = max(2, (length - rest) // each)
        keys, values = self._drawn(count, rng)
        between = slices(text, count, filler, rng)
        told = np.hstack([_rows(form.record, keys, values), between])
        order = rng.permutation(count)[:asked]
        questions = _rows(asks, keys[order], values[order])
        start = len(asks[0]) + 2 + len(asks[1])
        is_answer = np.zeros(questions.shape, bool)
        is_answer[:, start : start + DIGITS] = True
        ids = np.concatenate([told.ravel(), questions.ravel()])
        before = np.zeros(told.size, bool)
        return ids, np.concatenate([before, is_answer.ravel()])

    def packed(
        self, length: int, text: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Episodes of up to ``length`` tokens, short ones as likely as long ones, cut
        at the end."""
        ids: list[np.ndarray] = []
        answers: list[np.ndarray] = []
        tokens = 0
        widest = math.log(length / SHORTEST)
        while tokens < length:
            size = int(SHORTEST * math.exp(rng.uniform(0, widest)))
            asked = None if rng.random() < 0.5 else max(1, size // 100)
            echoes = rng.random() < ECHOES
            own, is_answer = self.episode(size, asked, text, rng, echoes)
            ids.append(own)
            answers.append(is_answer)
            tokens += len(own)
        return np.concatenate(ids)[:length], np.concatenate(answers)[:length]

    def exam(
        self, length: int, count: int, text: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """One question behind about ``length`` tokens, ``count`` times: ids [count,
        longest], padded behind, and where the answers stand [count, DIGITS]."""
        rng = np.random.default_rng(length)
        made = [self.episode(length, 1, text, rng) for _ in range(count)]
        ids = np.zeros((count, max(len(own) for own, _ in made)), np.int64)
        for row, (own, _) in enumerate(made):
            ids[row, : len(own)] = own
        return ids, np.stack([np.flatnonzero(is_answer) for _, is_answer in made])

    def _drawn(
        self, count: int, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Distinct keys [count, 2] and values [count, DIGITS]."""
        most = len(self.words) ** 2
        distinct = np.unique(rng.integers(most, size=2 * count + 8))
        codes = rng.permutation(distinct)[:count]
        pairs = np.stack(np.divmod(codes, len(self.words)), 1)
        values = rng.integers(10, size=(count, DIGITS))
        return self.words[pairs], self.digits[values]


def _rows(
    form: tuple[list[int], ...], keys: np.ndarray, values: np.ndarray
) -> np.ndarray:
    before, between, behind = (np.tile(piece, (len(keys), 1)) for piece in form)
    parts = [before, keys, between, values, behind]
    return np.hstack(parts).astype(np.int64)


def slices(
    text: np.ndarray, count: int, length: int, rng: np.random.Generator
) -> np.ndarray:
    """[count, length] tokens from random places of the text."""
    starts = rng.integers(len(text) - length, size=(count, 1))
    return text[starts + np.arange(length)].astype(np.int64)
