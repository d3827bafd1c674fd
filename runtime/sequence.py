"""Sequence: one request on its way through the engine. Chunk: its part of one step. pack: chunks become a StepPlan."""

from __future__ import annotations

import time
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np

from kvlathe.runtime.pool import PageTable, Reservation
from kvlathe.runtime.sampler import Sampler, SamplingParams, TokenLogprob, logprob
from kvlathe.runtime.session import Int32, StepPlan
from kvlathe.runtime.tokenizer import TextStream


@dataclass(eq=False, slots=True)
class Sequence:
    """Prompt and answer in ``tokens``; K and V of the first ``cached`` of them are in the pages of ``table``.

    ``chunk``: the fixed grid, in tokens from the sequence's start, on which a prompt is cut and its full pages sealed.
    While decoding, pages seal as they fill. So when pages seal depends on the sequence alone, never on the schedule.
    """

    tokens: list[int]
    prompt_tokens: int
    table: PageTable
    chunk: int
    sampler: Sampler
    text: TextStream | None = None
    cached: int = 0
    salt: bytes = b""  # sequences share pages with those of the same salt
    finish_reason: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)  # seconds
    first_token: float = 0.0
    last_token: float = 0.0

    @property
    def params(self) -> SamplingParams:
        return self.sampler.params

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]

    def sharable(self, seals: bool) -> list[int]:
        """Tokens whose pages another sequence would compute alike: where pages seal, those of the prompt."""
        return self.tokens[: min(self.cached, self.prompt_tokens) if seals else self.cached]

    @property
    def most_tokens(self) -> int:
        """Tokens it may come to."""
        return self.prompt_tokens + self.params.max_new_tokens

    def next_tokens(self, budget: int) -> int:
        """How many tokens its next chunk takes where a step has room for ``budget`` more."""
        border = (self.cached // self.chunk + 1) * self.chunk
        end = len(self.tokens) if self.cached >= self.prompt_tokens else min(border, self.prompt_tokens)
        return min(end - self.cached, budget)

    def seals_at(self, end: int) -> bool:
        """Whether full pages seal once ``end`` tokens are cached: on the grid, at the prompt's end, in decoding."""
        return end % self.chunk == 0 or end >= self.prompt_tokens

    def accept(self, logits: np.ndarray) -> int:
        """Choose the next token from ``logits`` [vocab] and add it."""
        token = self.sampler.choose(logits, self.tokens)
        if self.params.logprobs is not None:
            self.logprobs.append(logprob(logits, token, self.params.logprobs))
        self.tokens.append(token)
        if self.text:
            self.text.push(token)
        self.last_token = time.perf_counter()
        self.first_token = self.first_token or self.last_token
        return token


@dataclass(eq=False, slots=True)
class Chunk:
    """The next ``count`` uncached tokens of a sequence, room for them, and which of them want logits (0-based)."""

    sequence: Sequence
    count: int
    reservation: Reservation
    wanted: Items[int] = ()


def pack(chunks: Items[Chunk]) -> StepPlan:
    """The chunks side by side, no padding."""
    counts = [chunk.count for chunk in chunks]
    starts = np.zeros(len(chunks) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    ids: list[int] = []
    positions: list[int] = []
    for chunk in chunks:
        sequence, end = chunk.sequence, chunk.sequence.cached + chunk.count
        ids += sequence.tokens[sequence.cached : end]
        positions += range(sequence.cached, end)
    return StepPlan(
        input_ids=np.array(ids, np.int32),
        positions=np.array(positions, np.int32),
        query_starts=starts,
        query_offsets=np.arange(max(counts), dtype=np.int32),
        lengths=np.array([chunk.sequence.table.lengths for chunk in chunks], np.int32),
        page_tables=tuple(map(_page_table, zip(*(chunk.sequence.table.pages for chunk in chunks), strict=True))),
        logit_rows=np.array([s + i for s, chunk in zip(starts, chunks, strict=False) for i in chunk.wanted], np.int32),
    )


def _page_table(rows: Items[list[int]]) -> Int32:
    """[B, longest row, at least 1]; short rows end in page 0, which nobody reads past a sequence's length."""
    table = np.zeros((len(rows), max(1, *map(len, rows))), np.int32)
    for row, pages in zip(table, rows, strict=True):
        row[: len(pages)] = pages
    return table
