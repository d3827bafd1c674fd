"""Sequence: one request on its way through the engine. Chunk: its part of one step. pack: chunks become a StepPlan."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from kvlathe.runtime.pool import PageTable, Reservation
from kvlathe.runtime.probes import Probes
from kvlathe.runtime.sampler import Sampler, SamplingParams, TokenLogprob, logprob
from kvlathe.runtime.session import Int32, StepPlan
from kvlathe.runtime.staging import Staging
from kvlathe.runtime.tokenizer import TextStream


@dataclass(eq=False, slots=True)
class Beginning:
    """A prompt that several sequences continue. The ``leader`` computes it; then ``table`` holds its pages and
    ``logits`` [vocab] what follows it, for the ``followers``, those that have not begun yet."""

    followers: set[Sequence] = field(default_factory=set)
    leader: Sequence | None = None
    table: PageTable | None = None
    logits: np.ndarray | None = None


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
    salt: bytes = b""  # the tenant: sequences share pages with those of the same salt, and take turns with the others
    probes: Probes | None = None  # which of its rows are observed, where the plan has a probe
    staging: Staging | None = None  # while its prompt passes the stages of its plan one after the other
    prompt_rows: list[int] | None = None  # of a staged prompt: the rows that each layer computed
    beginning: Beginning | None = None
    arrival: int = 0  # number in the queue
    deadline: float = math.inf  # of time.perf_counter(): it ends then, finished or not
    finish_reason: str | None = None  # stop, length, cancelled, timeout, error
    error: Exception | None = None  # why, where the reason is error
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # of the prompt's tokens but the first
    started: float = field(default_factory=time.perf_counter)  # seconds
    admitted: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0

    @property
    def params(self) -> SamplingParams:
        return self.sampler.params

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]

    @property
    def answered(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def follows(self) -> bool:
        """Whether another sequence computes its prompt."""
        return self.beginning is not None and self in self.beginning.followers

    @property
    def decoding(self) -> bool:
        """Whether its next chunk is its newest token alone."""
        return self.cached + 1 == len(self.tokens) > self.prompt_tokens

    def sharable(self, seals: bool) -> list[int]:
        """Tokens whose pages another sequence would compute alike: where pages seal, those of the prompt."""
        return self.tokens[: min(self.cached, self.prompt_tokens) if seals else self.cached]

    @property
    def most_tokens(self) -> int:
        """Tokens it may come to."""
        return self.prompt_tokens + self.params.max_new_tokens

    def next_tokens(self, budget: int) -> int:
        """How many tokens its next chunk takes where a step has room for ``budget`` more."""
        if self.staging:
            return self.staging.next_rows(budget)
        border = (self.cached // self.chunk + 1) * self.chunk
        end = len(self.tokens) if self.cached >= self.prompt_tokens else min(border, self.prompt_tokens)
        return min(end - self.cached, budget)

    def seals_at(self, end: int) -> bool:
        """Whether full pages seal once ``end`` tokens are cached: on the grid, at the prompt's end, in decoding.

        A prompt whose tokens are ranked seals at its end only.
        """
        return end >= self.prompt_tokens or (end % self.chunk == 0 and (self.probes is None or not self.probes.probe))

    # What the next ``count`` tokens mean, which may be rows of one pass of a staged prompt.
    def arriving(self, count: int) -> int | list[int]:
        """How many reach each bucket; one number where all buckets get them."""
        return self.staging.arriving(count) if self.staging else count

    def places(self, count: int) -> Items[int]:
        """Where they are among the sequence's tokens."""
        return self.staging.places(count) if self.staging else range(self.cached, self.cached + count)

    @property
    def sees_logits(self) -> bool:
        """Whether they pass the last stage."""
        return self.staging is None or self.staging.last

    def seals_after(self, count: int) -> bool:
        return count == self.staging.left if self.staging else self.seals_at(self.cached + count)

    def ends_prompt(self, count: int) -> bool:
        """Whether the prompt, or its pass, ends with them."""
        if self.staging:
            return count == self.staging.left
        return self.cached < self.prompt_tokens <= self.cached + count

    def completes(self, count: int) -> bool:
        """Whether every known token is cached then, so that the next one can be chosen."""
        if self.staging:
            return self.staging.last and count == self.staging.left
        return self.cached + count == len(self.tokens)

    def advance(self, count: int, step: StepPlan, place: int) -> None:
        """They are computed: the sequence's part, at ``place``, of a step that has run."""
        if self.staging is None:
            self.cached += count
        elif self.staging.advance(count, step, place):
            self.cached, self.prompt_rows, self.staging = self.prompt_tokens, self.staging.rows, None

    @property
    def reports_prompt(self) -> bool:
        """Whether the logits after every token of the prompt are wanted."""
        return self.params.prompt_logprobs is not None

    def report_prompt(self, start: int, logits: np.ndarray) -> None:
        """Log-probabilities of the prompt's tokens after place ``start``; ``logits`` [n, vocab] follow that place."""
        for place, row in enumerate(logits, start + 1):
            if len(self.prompt_logprobs) + 1 == place < self.prompt_tokens:  # not a second time
                self.prompt_logprobs.append(logprob(row, self.tokens[place], self.params.prompt_logprobs or 0))

    def accept(self, logits: np.ndarray) -> int:
        """Choose the next token from ``logits`` [vocab] and add it."""
        token = self.sampler.choose(logits, self.tokens, self.prompt_tokens)
        if self.params.logprobs is not None:
            self.logprobs.append(logprob(logits, token, self.params.logprobs))
        self.tokens.append(token)
        if self.text:
            self.text.push(token)
        self.last_token = time.perf_counter()
        self.first_token = self.first_token or self.last_token
        return token

    def end(self, reason: str, error: Exception | None = None) -> None:
        """No more tokens, and why."""
        self.finish_reason, self.error = reason, error
        self.last_token = self.last_token or time.perf_counter()
        self.first_token = self.first_token or self.last_token
        if self.text:
            self.text.close()


@dataclass(eq=False, slots=True)
class Chunk:
    """The next ``count`` uncached tokens of a sequence, room for them, and which of them want logits (0-based)."""

    sequence: Sequence
    count: int
    reservation: Reservation
    wanted: Items[int] = ()


def pack(chunks: Items[Chunk]) -> StepPlan:
    """The chunks side by side, no padding."""
    sequences = [chunk.sequence for chunk in chunks]
    counts = np.array([chunk.count for chunk in chunks], np.int32)
    starts = np.zeros(len(chunks) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    cached = np.array([sequence.cached for sequence in sequences], np.int32)
    places = np.arange(starts[-1], dtype=np.int32) - np.repeat(starts[:-1], counts)
    fresh = (c.sequence.tokens[c.sequence.cached : c.sequence.cached + c.count] for c in chunks)
    step = StepPlan(
        input_ids=np.fromiter(chain.from_iterable(fresh), np.int32, int(starts[-1])),
        positions=places + np.repeat(cached, counts),
        query_starts=starts,
        query_offsets=np.arange(counts.max(), dtype=np.int32),
        lengths=np.array([sequence.table.lengths for sequence in sequences], np.int32),
        page_tables=tuple(map(_page_table, zip(*(sequence.table.rows for sequence in sequences), strict=True))),
        logit_rows=np.array([s + i for s, c in zip(starts.tolist(), chunks, strict=False) for i in c.wanted], np.int32),
    )
    step = _staged(step, chunks) if any(sequence.staging for sequence in sequences) else step
    return _observed(step, chunks) if any(sequence.probes for sequence in sequences) else step


def _observed(step: StepPlan, chunks: Items[Chunk]) -> StepPlan:
    """The step with the weights of its rows, whose positions it has."""
    weights = np.zeros(len(step.input_ids), np.float32)
    for chunk, start in zip(chunks, step.query_starts.tolist(), strict=False):
        if chunk.sequence.probes:
            rows = slice(start, start + chunk.count)
            first, last = step.positions[rows][[0, -1]].tolist()
            found = chunk.sequence.probes.weights(chunk.sequence.tokens, first, last + 1)
            weights[rows] = found[step.positions[rows] - first]
    return dataclasses.replace(step, probe_weights=weights)


def _staged(step: StepPlan, chunks: Items[Chunk]) -> StepPlan:
    """The step with the rows of staged prompts: the tokens that are still there, and what they enter with."""
    plan = next(chunk.sequence.staging.plan for chunk in chunks if chunk.sequence.staging)
    tokens, lanes = len(step.input_ids), sum(not lane.removed for lane in plan.lanes)
    width = sum(table.shape[1] for table in step.page_tables) * plan.page_tokens + len(step.query_offsets)
    step = dataclasses.replace(
        step,
        stages=np.tile(np.array([0, plan.graphs], np.int32), (len(chunks), 1)),
        probe_weights=np.zeros(tokens, np.float32),
        mass=np.zeros((len(chunks), lanes, width), np.float32),
        hidden=np.zeros((tokens, plan.model.hidden_size), np.float32),
    )
    for i, chunk in enumerate(chunks):
        if chunk.sequence.staging:
            chunk.sequence.staging.enter(step, i, chunk.sequence.tokens)
    return step


def _page_table(rows: Items[Int32]) -> Int32:
    """[B, longest row, at least 1]; short rows end in page 0, which nobody reads past a sequence's length."""
    lengths = np.fromiter(map(len, rows), np.intp, len(rows))
    table = np.zeros((len(rows), max(1, int(lengths.max()))), np.int32)
    taken = np.arange(table.shape[1]) < lengths[:, None]
    table[taken] = np.concatenate(rows)
    return table
