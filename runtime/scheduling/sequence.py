"""Sequence: one request on its way through the engine. Chunk: its part of one step, a
PrefillChunk or a DecodeChunk."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvlathe.base.errors import KvlatheError
from kvlathe.runtime.cache.observed_rows import ObservedRows
from kvlathe.runtime.cache.page_table import PageTable, Reservation
from kvlathe.runtime.scheduling.prompt import PromptPath
from kvlathe.runtime.sessions.adapters import LoadedAdapter
from kvlathe.runtime.sessions.protocols import PassRows
from kvlathe.runtime.text.masks import Guide, after
from kvlathe.runtime.text.sampler import Request, Sampler, TokenLogprob, logprob
from kvlathe.runtime.text.sampling_params import SamplingParams
from kvlathe.runtime.text.tokenizer import TextStream

Rows = npt.NDArray[np.float32]
"""Logits, [rows, vocab]."""
Choice = tuple[int | KvlatheError | None, TokenLogprob | None]
"""A sequence's next token, or why it has none, and its log-probability if reported."""
ADAPTER_SALT = b"\0adapter\0"
"""Between a tenant and the digest of an adapter. No tenant's key has a zero."""
NO_TOKEN: Choice = (None, None)
"""The choice of a sequence that does not grow in a step."""


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

    ``path``: how the rows of its prompt pass the layers, and when its pages seal.

    ``guide``: where the answer is in its structure, where it is to have one.

    ``pending``: tokens after those of ``tokens`` that a GPU is choosing. The next step
    may run on them before the host knows what they are.
    ``behind``: tokens before the newest that the next decode computes once more: they
    stood before guesses, some of which were wrong, and its state is that before them.

    ``salt``: the tenant. Sequences share pages with those of the same salt, and take
    turns with the others. ``adapter``: what its tokens pass beside the engine's maps.
    ``observed_rows``: which rows are observed, where the plan
    has an observation window. ``prompt_rows``: the rows that each layer computed, once
    a prompt has passed the stages of its plan. ``shared_prompt``: where several answers
    to one prompt were asked for.

    ``reused``: tokens of its prompt that the prefix cache had; -1 until it was asked.
    ``drafted``: tokens that were guessed for it and tried; ``accepted``: of these,
    those that are in its answer.

    ``arrival``: number in the queue. ``priority``: of a tenant's sequences that wait,
    those with a lower one go first. ``deadline``: of time.perf_counter(); the sequence
    ends then, finished or not. ``finish_reason``: stop, length, cancelled, timeout,
    moved or error; ``error`` says which. ``logprobs``: one for each token of the
    answer, where wanted; ``prompt_logprobs``: of the prompt's tokens but the first. The
    times are in seconds of time.perf_counter(), 0 before they come.
    """

    tokens: list[int]
    prompt_tokens: int
    table: PageTable
    path: PromptPath
    sampler: Sampler
    text: TextStream | None = None
    guide: Guide | None = None
    cached: int = 0
    pending: int = 0
    behind: int = 0
    salt: bytes = b""
    adapter: LoadedAdapter | None = None
    observed_rows: ObservedRows | None = None
    prompt_rows: list[int] | None = None
    shared_prompt: SharedPrompt | None = None
    arrival: int = 0
    priority: int = 0
    deadline: float = math.inf
    reused: int = -1
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
    def prefix_salt(self) -> bytes:
        """Sequences share prefixes with those of the same tenant and adapter."""
        if self.adapter is None:
            return self.salt
        return self.salt + ADAPTER_SALT + self.adapter.digest

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
            looks = params.is_guided
        return self.pending > 0 and looks

    @property
    def decoding(self) -> bool:
        """Whether its next chunk is just its newest token, and those ``behind``."""
        return self.cached + self.behind + 1 == self.length > self.prompt_tokens

    @property
    def decodes(self) -> bool:
        """Whether the next step takes its newest token, known here or not."""
        return self.decoding and (not self.pending or self.grows)

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

    # -- what the next rows mean, which its path says ----------------------------------
    def next_tokens(self, budget: int) -> int:
        """The rows that its next chunk takes where a step has room for ``budget``
        more."""
        return self.path.next_rows(self.cached, self.length, budget)

    @property
    def in_chunk(self) -> bool:
        """As PromptPath.in_chunk."""
        return self.path.in_chunk(self.cached)

    def arriving(self, count: int) -> int | list[int]:
        """As PromptPath.arriving."""
        return self.path.arriving(count)

    def places(self, count: int) -> Items[int]:
        """As PromptPath.places."""
        return self.path.places(self.cached, count)

    @property
    def sees_logits(self) -> bool:
        """As PromptPath.sees_logits."""
        return self.path.sees_logits

    def stop(self, count: int) -> int:
        """As PromptPath.stop."""
        return self.path.stop(self.cached, count)

    def seals_after(self, count: int) -> bool:
        """As PromptPath.seals."""
        return self.path.seals(self.cached, count)

    def ends_prompt(self, count: int) -> bool:
        """As PromptPath.ends."""
        return self.path.ends(self.cached, count)

    def completes(self, count: int) -> bool:
        """Whether every known token is cached then, so that the next one can be
        chosen."""
        return self.path.completes(self.cached, count, self.length)

    def advance(self, count: int, rows: PassRows | None) -> None:
        """Record that the next ``count`` rows were computed, which were ``rows`` of
        their step."""
        path = self.path
        added = path.advance(count, rows)
        self.cached += added
        self.behind = 0
        if added and path.rows is not None:  # the last pass of a prompt has ended
            self.prompt_rows = path.rows
            self.path = path.after

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
        most = self.prompt_tokens + self.sampler.params.max_new_tokens
        return len(self.tokens) + self.pending < most

    @property
    def request(self) -> Request:
        """Everything that the choice of its next token depends on, beside the
        logits."""
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
        self.path = (
            self.path.after
        )  # hidden states go, whoever still holds the sequence
        self.last_token = self.last_token or time.perf_counter()
        self.first_token = self.first_token or self.last_token
        if self.text:
            try:
                self.text.close()
            except Exception as failure:  # it ends nobody else
                self.finish_reason, self.error = "error", error or failure


@dataclass(eq=False, slots=True)
class Chunk:
    """A sequence's part of one step: its next ``count`` rows, room for them, and which
    of them want logits (0-based).

    ``completes``: whether the sequence's next token can be chosen after it.
    ``needs_logits``: whether the host must see logits: to report the prompt's, or for
    others that continue the same prompt. ``drafts``: its last rows are of tokens that
    are guessed. Once the step has run, ``logits`` [wanted, vocab] are what the wanted
    rows gave, where the host has them; ``choices`` the tokens that follow, where the
    sequence grows, and ``count`` is without guesses that were wrong: 0 where its state
    must be that before all of them.
    """

    sequence: Sequence
    count: int
    reservation: Reservation
    wanted: Items[int] = ()
    completes: bool = False
    needs_logits: bool = False
    drafts: Items[int] = ()
    logits: Rows | None = None
    choices: Items[Choice] = ()
    is_prefill: ClassVar[bool] = False

    @property
    def ids(self) -> list[int]:
        """Its tokens; 0 for those that are not known."""
        return self.sequence.ids(self.count)

    @property
    def requests(self) -> list[Request]:
        """Everything that the choice of each token that follows it depends on."""
        return [self.sequence.request]

    @property
    def extra(self) -> int:
        """Rows beside those that a step without guesses has."""
        return 0

    @property
    def stayed(self) -> int:
        """Guesses that were right."""
        return max(0, len(self.choices) - 1)

    def advance(self, rows: PassRows | None) -> None:
        """Record that it was computed, as ``rows`` of its step."""
        self.sequence.advance(self.count, rows)

    def first(self, count: int) -> Chunk:
        """The same with ``count`` rows, to be reserved anew."""
        return replace(self, count=count)


class PrefillChunk(Chunk):
    """Tokens of a prompt, or of a sequence that is computed again."""

    __slots__ = ()
    is_prefill = True


class DecodeChunk(Chunk):
    """The newest token of an answer, after those that are computed once more, and
    ``drafts`` after it. The rows from the newest on want logits."""

    __slots__ = ()

    @property
    def ids(self) -> list[int]:
        known = self.count - len(self.drafts)
        return [*self.sequence.ids(known), *self.drafts]

    @property
    def extra(self) -> int:
        return self.wanted[0] + len(self.drafts)

    @property
    def requests(self) -> list[Request]:
        """The requests of the next token and, where it has drafts, of those after
        them."""
        sequence = self.sequence
        last = sequence.request
        requests = [last]
        for ahead, token in enumerate(self.drafts, 1):
            guide, context = last.guide, last.context
            if guide is not None:
                guide = after(guide, [token])
            if sequence.params.has_penalties:
                context = [*context, token]
            last = replace(last, context=context, ahead=ahead, guide=guide)
            requests.append(last)
        return requests

    def advance(self, rows: PassRows | None) -> None:
        self.sequence.cached += self.count
        before = self.wanted[0] + len(self.choices)
        self.sequence.behind = 0 if self.count else before

    def first(self, count: int) -> Chunk:
        """Without guesses; where it has none, ``count`` of its tokens."""
        if self.drafts:
            return replace(self, drafts=())
        return PrefillChunk(self.sequence, count, self.reservation)
