"""Draft model: a smaller engine with the same vocabulary guesses token after token
(speculative decoding, Leviathan et al. 2023, arXiv 2211.17192).

It draws each token as the large model will, with the same parameters and the same
random number. So both choose the same token wherever they nearly agree.

Its cache follows the sequences: what is known of them is cached and sealed there as in
any decode. Guesses are appended to a fork of the pages, which is given up afterwards.
So nothing stays of them, and no page is ever sealed with one.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from kvlathe.base.memory import OutOfMemory
from kvlathe.runtime.cache.arena import OutOfPages
from kvlathe.runtime.drafting.rates import EVERYBODY, OWN, Rates, judge
from kvlathe.runtime.scheduling.admission import Mean
from kvlathe.runtime.scheduling.engine import Engine
from kvlathe.runtime.scheduling.prompt import Whole
from kvlathe.runtime.scheduling.sequence import Chunk, PrefillChunk, Sequence
from kvlathe.runtime.text.masks import after
from kvlathe.runtime.text.sampler import NO_TOKEN, Request

AT_FIRST = [0.7] * 16
"""Share of right guesses by their place, before there is evidence."""
LAG = 16
"""Tokens, at most, that are cached by the step that guesses the next one."""
FIRST = 64
"""Tokens of a prompt that are computed at once before it is known how long they take."""
RETRY = 16
"""Looks at a sequence that brought no guess, after which one is tried again."""


@dataclass(eq=False, slots=True)
class Copy:
    """A sequence's copy in the draft engine: ``known`` are its tokens there, from place
    ``first`` on. ``guess``: the last one, of the tokens that followed ``seen``.
    ``rests``: looks since."""

    known: Sequence
    rates: Rates
    first: int = 0
    guess: list[int] = field(default_factory=list[int])
    seen: int = 0
    rests: int = 0


class DraftModel:
    """The Drafter that has an ``engine`` of its own."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self._pool = engine, engine.pool
        self._limits = engine.scheduler.limits
        most = self._limits.max_num_tokens // (LAG + 1)
        self._together = min(self._limits.max_batch_size, max(1, most))
        self._rates = Rates(AT_FIRST, EVERYBODY)
        self._copies: dict[Sequence, Copy] = {}
        self._token = Mean(weight=0.5)  # seconds of a token of a prompt
        self._until = 0.0  # prompts may be computed

    def chances(self, sequence: Sequence, most: int) -> Items[float]:
        """Drafter.chances."""
        most = min(most, self._limits.max_seq_len - len(sequence.tokens))
        if most < 1:
            return ()
        copy = self._copy(sequence)
        judge(copy.guess, sequence.tokens[copy.seen :], 0, (copy.rates, self._rates))
        copy.guess = []
        copy.rests += 1
        if copy.rests % RETRY == 0:
            return (1.0,)
        return [copy.rates.of(place) for place in range(most)]

    def draft(self, counts: Mapping[Sequence, int], seconds: float) -> list[list[int]]:
        """Drafter.draft: all sequences together, a token of each in a step. Of one
        whose prompt is not cached here, as much of it is computed instead as there is
        time for."""
        guesses: dict[Sequence, list[int]] = {one: [] for one in counts}
        self._until = time.perf_counter() + seconds
        going = [one for one in counts if self._is_ready(one)][: self._together]
        going.sort(key=self._unknown)  # a step has the shortest chunks first
        forks: dict[Sequence, Sequence] = {}
        try:
            while going:
                going = self._token_each(going, forks, guesses)
                going = [one for one in going if len(guesses[one]) < counts[one]]
        except (OutOfPages, OutOfMemory):
            pass  # what was guessed so far is a guess
        finally:
            for fork in forks.values():
                self._pool.release(fork.table)
        for sequence, guess in guesses.items():
            copy = self._copies[sequence]
            copy.guess, copy.seen = guess, len(sequence.tokens)
            copy.rests = 0 if guess else copy.rests
        return list(guesses.values())

    def forget(self, sequence: Sequence) -> None:
        """Drafter.forget."""
        copy = self._copies.pop(sequence, None)
        if copy is not None:
            self._pool.release(copy.known.table)

    def _copy(self, sequence: Sequence) -> Copy:
        copy = self._copies.get(sequence)
        if copy is None:
            copy = self._copies[sequence] = Copy(
                self._open(sequence, []), self._rates.copy(OWN)
            )
        return copy

    def _open(self, sequence: Sequence, tokens: list[int]) -> Sequence:
        """A sequence of the draft engine, without pages."""
        prompt, table = sequence.prompt_tokens, self._pool.open()
        path = Whole.cut(prompt, self._pool.plan.prefill_chunk)
        return Sequence(tokens, prompt, table, path, sequence.sampler)

    def _unknown(self, sequence: Sequence) -> int:
        """Tokens that are known and not cached."""
        known = self._copies[sequence].known
        return len(known.tokens) - known.cached

    def _is_ready(self, sequence: Sequence) -> bool:
        """Cache a step's worth of what is not cached, but for the newest token; whether
        little else is left."""
        copy = self._copies[sequence]
        known = copy.known
        known.tokens += sequence.tokens[copy.first + len(known.tokens) :]
        left = len(known.tokens) - 1 - known.cached
        if left <= 0 or (left <= LAG and known.cached):
            return True
        started = time.perf_counter()
        most = FIRST
        if self._token.value:
            most = int((self._until - started) / self._token.value)
        most = max(0, min(most, self._limits.max_num_tokens))
        count = min(left, known.next_tokens(most))
        if count < min(left, LAG):
            return False
        try:
            room = self._pool.reserve(known.table, count, known.seals_after(count))
            self.engine.run([PrefillChunk(known, count, room)])
        except (OutOfPages, OutOfMemory):
            return False
        self._token.add((time.perf_counter() - started) / count)
        return known.cached == len(known.tokens) - 1

    def _token_each(
        self,
        going: Items[Sequence],
        forks: dict[Sequence, Sequence],
        guesses: Mapping[Sequence, list[int]],
    ) -> list[Sequence]:
        """Guess the next token of each; those that can go on."""
        chunks: list[Chunk] = []
        try:
            for sequence in going:
                chunks.append(self._chunk(sequence, forks, guesses[sequence]))
        except OutOfPages:
            for chunk in chunks:
                self._pool.rollback(chunk.reservation)
            raise
        asked = [self._asked(sequence, guesses[sequence]) for sequence in going]
        tokens = self.engine.sample(chunks, asked)
        for sequence, token in zip(going, tokens, strict=True):
            guesses[sequence].append(token)
        going_on: list[Sequence] = []
        for sequence in going:
            if guesses[sequence][-1] == NO_TOKEN:
                guesses[sequence].pop()
            else:
                going_on.append(sequence)
        return going_on

    def _chunk(
        self, sequence: Sequence, forks: dict[Sequence, Sequence], guess: list[int]
    ) -> Chunk:
        """All that is known and not cached; behind a guess that guess alone, in a fork
        of the pages."""
        known = self._copies[sequence].known
        if guess:
            fork = forks.get(sequence)
            if fork is None:
                fork = self._open(sequence, list(known.tokens))
                fork.table = self._pool.fork(known.table)
                fork.cached = known.cached
                forks[sequence] = fork
            fork.tokens.append(guess[-1])
            room = self._pool.reserve(fork.table, 1)
            return PrefillChunk(fork, 1, room, (0,))
        count = self._unknown(sequence)
        room = self._pool.reserve(known.table, count, seal=True)
        return PrefillChunk(known, count, room, (count - 1,))

    def _asked(self, sequence: Sequence, ahead: list[int]) -> Request:
        """The request of the token behind those ``ahead``: as the large model's, with
        the same random number."""
        guide = sequence.guide
        return dataclasses.replace(
            sequence.request,
            context=[*sequence.tokens, *ahead],
            ahead=len(ahead),
            guide=guide and after(guide, ahead),
        )
