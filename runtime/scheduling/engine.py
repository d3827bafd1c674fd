"""Engine: the loop. Schedule, run, seal, commit, sample; what fails before the commit
has changed nothing.

A session that samples where its logits are is given a step before the tokens of the one
before it are known here: the host prepares step n + 1 while the GPU computes step n. A
sequence that step n ends has then run a token too far; nobody is told of it, and its
pages go back as they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from functools import partial
from typing import TypeVar

import numpy as np

from kvlathe.base.errors import DeviceLost, KvlatheError
from kvlathe.base.memory import LESS_MEMORY, OutOfMemory, within_memory
from kvlathe.runtime.cache.page_table import PageMoves
from kvlathe.runtime.cache.pool import PagePool
from kvlathe.runtime.cache.token_ranking import TokenRanking
from kvlathe.runtime.scheduling.apart import run_apart
from kvlathe.runtime.scheduling.choosing import (
    NO_TOKEN,
    Choice,
    Computed,
    Flight,
    Masking,
    Rows,
    chosen,
    logits_of_prompt,
    needs_logits,
)
from kvlathe.runtime.scheduling.packing import pack
from kvlathe.runtime.scheduling.scheduler import Scheduler
from kvlathe.runtime.scheduling.sequence import Chunk, Sequence
from kvlathe.runtime.scheduling.step_room import tokens_of
from kvlathe.runtime.scheduling.verifying import Choosing
from kvlathe.runtime.sessions.protocols import (
    FullPage,
    OnDevice,
    Session,
    StepPlan,
    TokenCounter,
    TokenSampler,
)
from kvlathe.runtime.text.sampler import StepRows, TokenLogprob, rows_of, sample

T = TypeVar("T")


class Engine:
    """Runs sequences through a session. ``stop_ids`` end a sequence (unless its
    parameters ignore them)."""

    def __init__(
        self,
        session: Session,
        pool: PagePool,
        scheduler: Scheduler,
        stop_ids: Iterable[int],
    ) -> None:
        """Raises KvlatheError where the plan needs what the session cannot do."""
        self.session, self.pool, self.scheduler = session, pool, scheduler
        self.ranking = TokenRanking.of(session, pool.layout)
        self.sampler: TokenSampler | None = (
            session if isinstance(session, TokenSampler) else None
        )
        self.stop_ids = frozenset(stop_ids)
        self._flight: Flight | None = None
        self._asked = StepRows()
        self._landed = 0.0

    def step(self) -> list[Sequence]:
        """One packed step. Returns the sequences that got a token or ended; those that
        ended are no longer scheduled.

        A step that fails is halved until each chunk that fails runs by itself. Those
        sequences end with ``error``, the others go on.
        """
        if self.sampler is None or not self.scheduler.running:
            self._landed = time.perf_counter()
        changed = self._overdue()
        if self.scheduler.speculation.eager:
            changed += self._land()
        chunks = self.scheduler.schedule()
        changed += self._fork()
        guessed = any(chunk.drafts for chunk in chunks)
        if self.sampler is None or guessed:
            changed += self._land()
            return list(dict.fromkeys(changed + self._run(chunks)))
        flight = None
        if any(map(needs_logits, chunks)):
            for chunk in chunks:
                self.pool.rollback(chunk.reservation)
        elif chunks:
            flight = self._launch(chunks)
        changed += self._land()
        self._flight = flight
        if flight and flight.sampling is None:
            changed += self._queue(flight)
        if flight or not chunks:
            return list(dict.fromkeys(changed))
        # With all tokens known, one step at a time.
        going_on = [chunk for chunk in chunks if not chunk.sequence.finish_reason]
        again = [self.scheduler.again(chunk, chunk.count) for chunk in going_on]
        changed += self._run(again)
        return list(dict.fromkeys(changed))  # some have got two tokens

    def _run(self, chunks: Items[Chunk]) -> list[Sequence]:
        """A step whose tokens are waited for."""
        changed: list[Sequence] = []
        tokens = sum(chunk.count - len(chunk.drafts) for chunk in chunks)
        for chunk, computed in run_apart(chunks, self._tried, self.scheduler.again):
            if isinstance(computed, Exception):
                changed.append(self.fail(chunk.sequence, computed))
            elif self._take(chunk, computed):
                changed.append(chunk.sequence)
        self.scheduler.ran(chunks, tokens, self._since_last())
        return changed

    def _since_last(self) -> float:
        """Seconds since tokens were known last; now they are again. What the host does
        between two steps is a part of them, where nothing else runs meanwhile."""
        now = time.perf_counter()
        seconds = now - self._landed
        self._landed = now
        return seconds

    def _launch(self, chunks: Items[Chunk]) -> Flight | None:
        """Queue a step, and the choice of the tokens that follow it unless that depends
        on tokens which are not known. None if it cannot run: nothing has changed
        then."""
        grown = [c.sequence for c in chunks if c.sequence.grows and c.completes]
        tokens = sum(chunk.count for chunk in chunks)
        counted = isinstance(self.sampler, TokenCounter)
        flight = Flight(grown, tokens, chunks, self._flight is not None, counted)
        try:
            self.transact(chunks, partial(self._start, flight))
        except Exception as error:  # it is tried again in parts, which say why
            self.check_device(error)
            return None
        for sequence in grown:
            if not sequence.answered and not sequence.pending:
                self.scheduler.prompt_done(sequence, None)
            sequence.pending += 1
        return flight

    def _start(self, flight: Flight, step: StepPlan) -> None:
        assert self.sampler is not None
        flight.choose = self.sampler.start(step)
        if not flight.late:
            flight.queue(self._asked, known=False)

    def _queue(self, flight: Flight) -> list[Sequence]:
        """Queue the choice of a launched step's tokens: those before them are known
        now. The sequences that end because that fails."""
        try:
            flight.queue(self._asked, known=True)
        except Exception as error:
            self._flight = None
            return self._crashed(flight, error)
        return []

    def _land(self) -> list[Sequence]:
        """Wait for the tokens of the step that was launched, and give them to their
        sequences."""
        flight, self._flight = self._flight, None
        if flight is None:
            return []
        try:
            assert flight.sampling is not None
            sampled = flight.sampling.result()
        except Exception as error:  # the GPU's own
            return self._crashed(flight, error)
        changed: list[Sequence] = []
        choices = chosen(flight.sequences, sampled)
        for sequence, choice in zip(flight.sequences, choices, strict=True):
            sequence.pending -= 1
            if not sequence.finish_reason:
                self._grow(sequence, *choice)
                changed.append(sequence)
        seconds = self._since_last()
        self.scheduler.ran(flight.chunks, flight.tokens, seconds, flight.ahead)
        return changed

    def _crashed(self, flight: Flight, error: Exception) -> list[Sequence]:
        """End the sequences whose tokens could not be chosen."""
        self.check_device(error)
        for sequence in flight.sequences:
            sequence.pending -= 1
        going_on = [s for s in flight.sequences if not s.finish_reason]
        return [self.fail(sequence, error) for sequence in going_on]

    def rest(self) -> list[Sequence]:
        """Wait for the step that was launched last. Returns the sequences that it
        changed."""
        return self._land()

    def move_out(self, sequence: Sequence) -> None:
        """End a sequence here that goes on elsewhere."""
        self._end(sequence, "moved")

    def check_device(self, error: Exception | None = None) -> None:
        """Wait for the device, and raise DeviceLost where nothing can run any more.
        ``error``: what failed because of that, perhaps."""
        if isinstance(error, DeviceLost):
            raise error
        reason = self.session.lost() if isinstance(self.session, OnDevice) else ""
        if reason:
            fact, remedy = (
                "the GPU is lost",
                "look at its driver's log, and start again",
            )
            raise DeviceLost(fact, reason, remedy) from error

    def _fork(self) -> list[Sequence]:
        """Start the sequences whose prompt another one has just computed, each with a
        token of its own."""
        forked = self.scheduler.forked()
        growing = [sequence for sequence in forked if sequence.grows]
        choices: dict[Sequence, Choice] = {}
        if growing:
            logits = np.stack([logits_of_prompt(sequence) for sequence in growing])
            requests = [sequence.request for sequence in growing]
            with Masking(requests) as masking:
                sampled = sample(logits, rows_of(requests, masking.result()))
            for sequence in growing:
                sequence.sampler.drawn += 1
            choices = dict(zip(growing, chosen(growing, sampled), strict=True))
        for sequence in forked:
            self._grow(sequence, *choices.get(sequence, NO_TOKEN))
        return forked

    def _take(self, chunk: Chunk, computed: Computed) -> bool:
        """Give a sequence what its part of a step computed; whether it got a token or
        ended."""
        sequence = chunk.sequence
        rows = computed.logits
        if sequence.reports_prompt:
            sequence.report_prompt(sequence.cached - chunk.count, rows)
        if sequence.cached < len(sequence.tokens):
            return False
        if not sequence.answered:
            self.scheduler.prompt_done(sequence, rows[-1] if len(rows) else None)
        if chunk.drafts:
            self.scheduler.speculation.tried(chunk)
        for choice in computed.choices or [NO_TOKEN]:
            if not sequence.finish_reason:
                self._grow(sequence, *choice)
        return True

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence between two steps, whatever it is doing."""
        if not sequence.finish_reason:
            self._end(sequence, "cancelled")

    def fail(self, sequence: Sequence, error: Exception) -> Sequence:
        """End a sequence that cannot go on."""
        return self._end(sequence, "error", error)

    def _tried(self, chunks: Items[Chunk]) -> list[Computed] | Exception:
        """As apart.Attempt."""
        if not self.scheduler.room.holds(chunks):
            for chunk in chunks:
                self.pool.rollback(chunk.reservation)
            return OutOfMemory("an earlier step of as many tokens found no memory")
        try:
            return self._compute(chunks)
        except Exception as error:  # a session may raise anything
            self.check_device(error)
            return error

    def _compute(self, chunks: Items[Chunk]) -> list[Computed]:
        """Run the chunks as one step and choose the tokens that follow them."""
        choosing = Choosing.of(chunks)
        with Masking(choosing.requests) as masking:
            call = partial(choosing.run, self.session, self.sampler, masking, self.pool)
            computed = self.transact(chunks, call)
        for chunk, one in zip(chunks, computed, strict=True):
            chunk.sequence.sampler.drawn += len(one.choices)
        return computed

    def run(self, chunks: Items[Chunk]) -> Rows:
        """Logits [rows wanted, vocab]. The chunks' tokens are cached afterwards; if
        anything fails, none of them is."""
        return self.transact(chunks, self.session.run)

    def transact(self, chunks: Items[Chunk], call: Callable[[StepPlan], T]) -> T:
        """What ``call`` gives for the chunks as one step.

        A transaction: pages are copied before it; full pages are sealed and ranked
        tokens moved after it; then everything counts. If anything fails, nothing does.
        Raises OutOfMemory where memory was missing; later steps are smaller then.
        """
        tokens, work = tokens_of(chunks), partial(self.attempt, chunks, call)
        fact = f"there is no memory for a step of {tokens:,} tokens"
        try:
            result = within_memory(work, fact, LESS_MEMORY)
        except OutOfMemory:
            self.scheduler.room.failed(tokens)
            raise
        self.scheduler.room.ran()
        return result

    def attempt(self, chunks: Items[Chunk], call: Callable[[StepPlan], T]) -> T:
        """As ``transact``, but errors stay as they are and no later step is smaller."""
        moving: list[tuple[Chunk, PageMoves]] = []
        for chunk in chunks:
            if chunk.reservation.moves:
                moving.append((chunk, chunk.reservation.moves))
        try:
            for _, moves in moving:
                for copy in moves.copies:
                    self.session.copy_page(copy.bucket, copy.source, copy.target)
            step = pack(chunks, self._flight.rows if self._flight else None)
            result = call(step)
            self._seal_and_move(moving)
        except BaseException:
            for chunk in chunks:
                self.pool.rollback(chunk.reservation)
            raise
        for place, chunk in enumerate(chunks):
            self.pool.commit(chunk.reservation)
            if self.ranking is not None:
                ended = chunk.sequence.ends_prompt(chunk.count)
                self.ranking.reset_scores(chunk.reservation, ended)
            chunk.sequence.advance(chunk.count, step, place)
        return result

    def _seal_and_move(self, moving: Items[tuple[Chunk, PageMoves]]) -> None:
        """Seal the pages that are full now, then move tokens to where they rank."""
        full: list[FullPage] = []
        for _, moves in moving:
            full += moves.seals
        try:
            if full:
                self.session.seal(full)
            for chunk, moves in moving:
                if moves.rankings:
                    self._rank(chunk, moves)
        except BaseException:
            if self.ranking is not None:
                self.ranking.undo()
            raise

    def _rank(self, chunk: Chunk, moves: PageMoves) -> None:
        """Move the tokens of one sequence to where they rank."""
        ranking = self.ranking
        assert ranking is not None, "a plan whose tokens move has a ranking"
        sequence = chunk.sequence
        for one in moves.rankings:
            assert sequence.observed_rows
            stop = sequence.stop(chunk.count)
            ranking.move(one, sequence.observed_rows, sequence.tokens, stop)

    def _grow(
        self,
        sequence: Sequence,
        token: int | KvlatheError | None,
        logprob: TokenLogprob | None,
    ) -> None:
        """Add the token that was chosen, and end the sequence if it was the last. None:
        only the prompt was asked about."""
        guide = sequence.guide
        failure = guide.failure if guide else None
        if failure is not None:
            token = failure
        if isinstance(token, KvlatheError):
            self.fail(sequence, token)
            return
        if token is not None:
            sequence.accept(token, logprob)
            params = sequence.params
            is_end = token in self.stop_ids and not params.ignore_eos
            stopped = sequence.text is not None and sequence.text.stopped
            whole = guide is not None and guide.stopped
            if is_end or token in params.stop_ids or stopped or whole:
                self._end(sequence, "stop")
                return
        if len(sequence.tokens) == sequence.most_tokens:
            self._end(sequence, "length")

    def _end(
        self, sequence: Sequence, reason: str, error: Exception | None = None
    ) -> Sequence:
        """Say why, and give the pages back."""
        sequence.end(reason, error)
        self.scheduler.remove(sequence)
        return sequence

    def _overdue(self) -> list[Sequence]:
        """End those whose deadline has passed."""
        now = time.perf_counter()
        everybody = (*self.scheduler.running, *self.scheduler.waiting)
        late = [sequence for sequence in everybody if sequence.deadline < now]
        return [self._end(sequence, "timeout") for sequence in late]
