"""Sequence: one request on its way through the engine. Chunk: its part of one step."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace

import numpy as np

from kvlathe.runtime.cache.observed_rows import ObservedRows
from kvlathe.runtime.cache.page_table import PageTable, Reservation
from kvlathe.runtime.scheduling.prompt_stages import PromptStages
from kvlathe.runtime.sessions.protocols import StepPlan
from kvlathe.runtime.text.guide import Guide
from kvlathe.runtime.text.sampler import Request, Sampler, TokenLogprob, logprob
from kvlathe.runtime.text.sampling_params import SamplingParams
from kvlathe.runtime.text.tokenizer import TextStream


@dataclass(eq=False, slots=True)
class SharedPrompt:
    """The prompt of a request for several answers (parallel sampling).

    The ``leader`` computes it. Then ``table`` holds its pages, and ``logits`` [vocab]
    follow it. ``followers``: the sequences that have not taken them over yet.
    """

    followers: set[Sequence] = field(default_factory=set)
    leader: Sequence | None = None
    table: PageTable | None = None
    logits: np.ndarray | None = None


@dataclass(eq=False, slots=True)
class Sequence:
    """Prompt and answer in ``tokens``; K and V of the first ``cached`` of them are in
    the pages of ``table``.

    ``chunk``: a prompt is cut, and its full pages sealed, at multiples of so many
    tokens. While decoding, pages seal as they fill. So when pages seal depends on the
    sequence, never on the schedule.

    ``guide``: where the answer is in its structure, where it is to have one.

    ``pending``: tokens after those of ``tokens`` that a GPU is choosing. The next step may
    run on them before the host knows what they are.

    ``salt``: the tenant. Sequences share pages with those of the same salt, and take
    turns with the others. ``observed_rows``: which rows are observed, where the plan has
    an observation window. ``prompt_stages``: while the prompt passes the stages of its
    plan one after the other; ``prompt_rows``: the rows that each layer computed, once it
    has. ``shared_prompt``: where several answers to one prompt were asked for.

    ``drafted``: tokens that were guessed for it and tried; ``accepted``: of these, those that
    are in its answer.

    ``arrival``: number in the queue. ``deadline``: of time.perf_counter(); the sequence
    ends then, finished or not. ``finish_reason``: stop, length, cancelled, timeout, moved
    or error; ``error`` says which. ``logprobs``: one for each token of the answer, where
    wanted; ``prompt_logprobs``: of the prompt's tokens but the first. The times are in
    seconds of time.perf_counter(), 0 before they come.
    """

    tokens: list[int]
    prompt_tokens: int
    table: PageTable
    chunk: int
    sampler: Sampler
    text: TextStream | None = None
    guide: Guide | None = None
    cached: int = 0
    pending: int = 0
    salt: bytes = b""
    observed_rows: ObservedRows | None = None
    prompt_stages: PromptStages | None = None
    prompt_rows: list[int] | None = None
    shared_prompt: SharedPrompt | None = None
    arrival: int = 0
    deadline: float = math.inf
    drafted: int = 0
    accepted: int = 0
    finish_reason: str | None = None
    error: Exception | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)
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
        shared = self.shared_prompt
        return shared is not None and self in shared.followers

    @property
    def leads(self) -> bool:
        """Whether others continue the prompt that it computes."""
        shared = self.shared_prompt
        return shared is not None and shared.leader is self

    @property
    def length(self) -> int:
        """Tokens, those that the host does not know yet among them."""
        return len(self.tokens) + self.pending

    @property
    def waits(self) -> bool:
        """Whether it cannot go on before the host knows its newest token, which was the
        last one."""
        return self.pending > 0 and not self.grows

    def late(self, counted: bool) -> bool:
        """Whether the choice of its next token depends on one that the host must know
        and does not. ``counted``: tokens are counted where they are chosen."""
        params = self.params
        looks = params.looks_back
        if counted and params.is_counted:
            looks = params.structure is not None
        return self.pending > 0 and looks

    @property
    def decoding(self) -> bool:
        """Whether its next chunk is just its newest token."""
        return self.cached + 1 == self.length > self.prompt_tokens

    def sharable(self, seals: bool) -> list[int]:
        """Tokens whose pages another sequence would compute alike: where pages seal,
        those of the prompt."""
        count = self.cached
        if seals:
            count = min(count, self.prompt_tokens)
        return self.tokens[:count]

    @property
    def most_tokens(self) -> int:
        """Tokens it may come to."""
        return self.prompt_tokens + self.params.max_new_tokens

    def next_tokens(self, budget: int) -> int:
        """How many tokens its next chunk takes where a step has room for ``budget``
        more."""
        if self.prompt_stages:
            return self.prompt_stages.next_rows(budget)
        if self.cached >= self.prompt_tokens:
            end = self.length
        else:
            border = (self.cached // self.chunk + 1) * self.chunk
            end = min(border, self.prompt_tokens)
        return min(end - self.cached, budget)

    @property
    def in_chunk(self) -> bool:
        """Whether a chunk of its prompt has begun and not ended: its tokens are hot."""
        in_prompt = self.cached < self.prompt_tokens
        return in_prompt and self.cached % self.chunk > 0

    def seals_at(self, end: int) -> bool:
        """Whether pages seal and tokens move once ``end`` tokens are cached.

        They do at the prompt's end and in decoding; within a prompt at multiples of
        ``chunk`` or, where tokens are ranked, after each slice.
        """
        if end >= self.prompt_tokens:
            return True
        observation = self.observed_rows and self.observed_rows.observation
        step = observation.slice_tokens if observation else self.chunk
        return step > 0 and end % step == 0

    # What the next ``count`` tokens mean. Of a prompt that passes stages, they are rows
    # of one pass.
    def arriving(self, count: int) -> int | list[int]:
        """How many reach each bucket; one number where all buckets get them."""
        if self.prompt_stages:
            return self.prompt_stages.arriving(count)
        return count

    def places(self, count: int) -> Items[int]:
        """Where they are among the sequence's tokens."""
        if self.prompt_stages:
            return self.prompt_stages.places(count)
        return range(self.cached, self.cached + count)

    @property
    def sees_logits(self) -> bool:
        """Whether they pass the last stage."""
        return self.prompt_stages is None or self.prompt_stages.last

    def stop(self, count: int) -> int:
        """How many of the sequence's tokens have come once they are cached, or their
        pass ends."""
        if self.prompt_stages:
            return self.prompt_tokens
        return self.cached + count

    def seals_after(self, count: int) -> bool:
        """Whether pages seal and tokens move after them."""
        if self.prompt_stages:
            return count == self.prompt_stages.left
        return self.seals_at(self.cached + count)

    def ends_prompt(self, count: int) -> bool:
        """Whether the prompt, or its pass, ends with them."""
        if self.prompt_stages:
            return count == self.prompt_stages.left
        return self.cached < self.prompt_tokens <= self.cached + count

    def completes(self, count: int) -> bool:
        """Whether every known token is cached then, so that the next one can be
        chosen."""
        if self.prompt_stages:
            return self.prompt_stages.last and count == self.prompt_stages.left
        return self.cached + count == self.length

    def advance(self, count: int, step: StepPlan, place: int) -> None:
        """Record that ``count`` tokens were computed: the sequence ``place`` of a step
        that has run."""
        stages = self.prompt_stages
        if stages is None:
            self.cached += count
        elif stages.advance(count, step.passes[place] if step.passes else None):
            self.cached = self.prompt_tokens
            self.prompt_rows = stages.rows
            self.prompt_stages = None

    @property
    def reports_prompt(self) -> bool:
        """Whether the logits after every token of the prompt are wanted."""
        return self.params.prompt_logprobs is not None

    def report_prompt(self, start: int, logits: np.ndarray) -> None:
        """Log-probabilities of the prompt's tokens after place ``start``; ``logits``
        [n, vocab] follow that place."""
        top = self.params.prompt_logprobs or 0
        for place, row in enumerate(logits, start + 1):
            # A prompt that is computed again is not reported again.
            if len(self.prompt_logprobs) + 1 == place < self.prompt_tokens:
                self.prompt_logprobs.append(logprob(row, self.tokens[place], top))

    @property
    def grows(self) -> bool:
        """Whether a next token is wanted; else only the prompt was asked about."""
        return self.length < self.most_tokens

    @property
    def request(self) -> Request:
        """What the choice of its next token depends on, beside the logits."""
        return Request(self.sampler, self.tokens, self.prompt_tokens, self.guide)

    def ids(self, count: int) -> list[int]:
        """The next ``count`` tokens to compute; 0 for those that are not known."""
        known = self.tokens[self.cached : self.cached + count]
        return known + [0] * (count - len(known))

    def accept(self, token: int, logprob: TokenLogprob | None) -> None:
        """Add the token that was chosen; ``logprob`` where the request reports it."""
        if logprob is not None:
            self.logprobs.append(logprob)
        self.tokens.append(token)
        if self.text:
            self.text.push(token)
        if self.guide:
            self.guide.accept(token)
        self.last_token = time.perf_counter()
        self.first_token = self.first_token or self.last_token

    def end(self, reason: str, error: Exception | None = None) -> None:
        """No more tokens, and why."""
        self.finish_reason = reason
        self.error = error
        self.prompt_stages = None  # hidden states go, whoever still holds the sequence
        self.last_token = self.last_token or time.perf_counter()
        self.first_token = self.first_token or self.last_token
        if self.text:
            self.text.close()


@dataclass(eq=False, slots=True)
class Chunk:
    """The next ``count`` uncached tokens of a sequence, room for them, and which of
    them want logits (0-based).

    ``drafts``: the last of them are guesses at tokens that the sequence does not have yet.
    Once the step has run, ``count`` is without those that were wrong.
    """

    sequence: Sequence
    count: int
    reservation: Reservation
    wanted: Items[int] = ()
    drafts: Items[int] = ()

    @property
    def completes(self) -> bool:
        """Whether the sequence's next token can be chosen after it."""
        if self.drafts:
            return True
        return bool(self.wanted) and self.sequence.completes(self.count)

    @property
    def ids(self) -> list[int]:
        """Its tokens; 0 for those that are not known."""
        known = self.sequence.ids(self.count - len(self.drafts))
        return [*known, *self.drafts]

    @property
    def requests(self) -> list[Request]:
        """What the choice of each token that follows it depends on: of the next one
        and, where it has drafts, of those after them."""
        sequence = self.sequence
        first = sequence.request
        requests = [first]
        for ahead in range(1, len(self.drafts) + 1):
            context: Items[int] = sequence.tokens
            if sequence.params.has_penalties:
                context = [*sequence.tokens, *self.drafts[:ahead]]
            row = replace(first, context=context, ahead=ahead)
            requests.append(row)
        return requests
