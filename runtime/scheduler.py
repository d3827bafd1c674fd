"""Scheduler: which sequences run, and which tokens of them make the next step.

Sequences are admitted in the order of FairQueue, never past one that waits for room, once the pool is expected to hold
them at the fullest moment (Foresight). The guess may be wrong: a decode that finds no page sends the youngest away, to
host memory or, where the plan allows and that is cheaper, to be computed again; it is the first to come back. The
oldest is never sent away, so everyone ends.

A step takes one token of every decoding sequence, then prompt chunks, oldest first: up to max_num_tokens alone, up to
``prompt_tokens`` beside decodes, so that long prompts do not hold answers up.
"""

from __future__ import annotations

import bisect
import contextlib
import time
from collections.abc import Iterator
from collections.abc import Sequence as Items

import numpy as np

from kvlathe.engines.manifest import Limits
from kvlathe.errors import KvlatheError
from kvlathe.runtime.arena import OutOfPages
from kvlathe.runtime.fair_queue import FairQueue
from kvlathe.runtime.foresight import Costs, Foresight
from kvlathe.runtime.pool import PagePool, Swapped
from kvlathe.runtime.prefix import PrefixCache
from kvlathe.runtime.sequence import Beginning, Chunk, Sequence
from kvlathe.runtime.session import PageMover

PROMPT_TOKENS = 512
"""Prompt tokens beside decodes in one step, unless asked otherwise."""

FIRST = (0,)
"""What wants logits in a chunk of one token."""


class Scheduler:
    """``preemptions``: sequences sent away so far. ``queries``: tokens looked up in ``prefixes``."""

    def __init__(
        self,
        pool: PagePool,
        mover: PageMover,
        limits: Limits,
        prefixes: PrefixCache | None = None,
        prompt_tokens: int = PROMPT_TOKENS,
    ) -> None:
        self.pool, self.mover, self.limits, self.prefixes = pool, mover, limits, prefixes
        self.prompt_tokens = prompt_tokens
        self.waiting = FairQueue()
        self.running: list[Sequence] = []  # oldest first
        self.costs = Costs()
        self.foresight = Foresight(pool, self.costs)
        self.preemptions = self.queries = 0
        self._swapped: dict[Sequence, Swapped] = {}
        self._beginnings: list[Beginning] = []  # those that hold pages
        self._blocked = False  # the next in line found no room, and nothing has changed since
        pool.reclaim = self._reclaim

    # -- who is here -----------------------------------------------------------------------------------------------
    def check(self, sequence: Sequence) -> None:
        """Raises KvlatheError if it could never be served."""
        if not self.pool.fits([self.pool.worst_pages(sequence.most_tokens, sequence.prompt_tokens)]):
            raise KvlatheError(
                f"a sequence of up to {sequence.most_tokens} tokens does not fit",
                f"the cache has {self.pool.arena_bytes:,} bytes",
                "give the cache more memory or ask for fewer tokens",
            )

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises KvlatheError if it could never be served."""
        self.check(sequence)
        self.waiting.push(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, finished or not; its pages go back, but for those kept for others that begin alike."""
        if sequence in self.running:
            self.running.remove(sequence)
            self.remember(sequence)
            if sequence.finish_reason in ("stop", "length"):
                self.foresight.ended(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._swapped.pop(sequence, None)
        self.pool.release(sequence.table)
        self._leave(sequence)
        self._blocked = False

    def remember(self, sequence: Sequence) -> None:
        """Let later sequences that begin alike share what is cached, where the plan allows."""
        if self.prefixes and self.pool.plan.sharable:
            self.prefixes.add(sequence.table, sequence.sharable(self.prefixes.seals), sequence.salt)

    # -- one step --------------------------------------------------------------------------------------------------
    def schedule(self) -> list[Chunk]:
        """The next step's chunks, their pages reserved. Empty only if nothing is left to compute."""
        self._admit()
        for sequence in self.running:
            self._lead(sequence)
        chunks: list[Chunk] = []
        try:
            self._decodes(chunks)
            while not self._prompts(chunks) and not chunks and len(self.running) > 1:
                self.preempt()
        except BaseException:
            for chunk in chunks:
                self.pool.rollback(chunk.reservation)
            raise
        return chunks

    def forked(self) -> list[Sequence]:
        """Running sequences whose prompt has been computed by another: they have their pages now, and its logits in
        ``beginning`` to go on from."""
        found = [s for s in self.running if s.beginning and s.follows and s.beginning.table]
        for sequence in found:
            beginning = sequence.beginning
            assert beginning and beginning.table
            sequence.table, sequence.cached = self.pool.fork(beginning.table), sequence.prompt_tokens
            self._leave(sequence)
        return found

    def prompt_done(self, sequence: Sequence, logits: np.ndarray) -> None:
        """The prompt is cached and ``logits`` [vocab] follow it: others may begin there."""
        self.remember(sequence)
        beginning = sequence.beginning
        if beginning and beginning.leader is sequence and beginning.followers:
            beginning.table, beginning.logits = self.pool.fork(sequence.table), logits.copy()
            self._beginnings.append(beginning)

    def again(self, chunk: Chunk) -> Chunk:
        """The same chunk after its step was rolled back, its pages reserved anew."""
        return self._chunk(chunk.sequence, chunk.count)

    def _decodes(self, chunks: list[Chunk]) -> None:
        """One token of each decoding sequence; where pages run out, the youngest leaves."""
        decoding = [s for s in self.running if s.decoding][: self.limits.max_num_tokens]
        while len(chunks) < len(decoding):
            sequence = decoding[len(chunks)]
            try:
                room = self.pool.reserve(sequence.table, 1, seal=True)
            except OutOfPages:
                if len(self.running) == 1:
                    raise
                if self.preempt() is decoding[-1]:
                    decoding.pop()
            else:
                chunks.append(Chunk(sequence, 1, room, FIRST))

    def _prompts(self, chunks: list[Chunk]) -> bool:
        """Prompt chunks into what is left of the step. False if the pages ran out: the rest waits."""
        limit = self.limits.max_num_tokens
        room = min(limit - len(chunks), self.prompt_tokens) if chunks else limit
        for sequence in self.running:
            if sequence.decoding or sequence.follows:
                continue
            whole = sequence.next_tokens(limit)
            count = min(whole, room)
            if count < min(whole, self.pool.plan.page_tokens):
                break  # not worth a step
            try:
                chunks.append(self._chunk(sequence, count))
            except OutOfPages:
                if len(self.running) == 1:
                    raise
                self._blocked = True
                return False
            room -= count
        return True

    def _chunk(self, sequence: Sequence, count: int) -> Chunk:
        reservation = self.pool.reserve(sequence.table, sequence.arriving(count), sequence.seals_after(count))
        if sequence.cached < sequence.prompt_tokens and sequence.reports_prompt:
            return Chunk(sequence, count, reservation, range(count))
        return Chunk(sequence, count, reservation, (count - 1,) if sequence.completes(count) else ())

    # -- coming and going ------------------------------------------------------------------------------------------
    def _admit(self) -> None:
        while len(self.running) < self.limits.max_batch_size and (next_ := self.waiting.peek()):
            if self.running and (self._blocked or not self.foresight.fits([*self.running, next_])):
                self._blocked = True
                return
            try:
                self._prepare(next_)
            except OutOfPages:
                if not self.running:
                    raise
                self._blocked = True
                return
            bisect.insort(self.running, self.waiting.pop(), key=lambda s: s.arrival)
            next_.admitted = next_.admitted or time.perf_counter()

    def _prepare(self, sequence: Sequence) -> None:
        """Its pages from the host, its beginning from the prefix cache, or nothing. Raises OutOfPages."""
        if swapped := self._swapped.get(sequence):
            with self._moving(self._bytes(swapped.data)):
                sequence.table = self.pool.swap_in(swapped, self.mover)
            del self._swapped[sequence]
        self._lead(sequence)
        if self.prefixes and not (sequence.cached or sequence.follows or sequence.reports_prompt):
            self.queries += len(sequence.tokens)
            sequence.table, sequence.cached = self.prefixes.find(sequence.tokens, sequence.salt)

    def preempt(self) -> Sequence:
        """The youngest running sequence leaves; it is the first to come back."""
        sequence = self.running.pop()
        size = self._bytes(sequence.table.pages)
        if self.pool.plan.recomputable and self.costs.recompute_is_cheaper(sequence.cached, size):
            self.remember(sequence)
            self.pool.release(sequence.table)
            self.costs.lost(sequence.cached)
            sequence.cached = 0
        else:
            with self._moving(size):
                self._swapped[sequence] = self.pool.swap_out(sequence.table, self.mover)
        self.waiting.push_back(sequence)
        self._blocked = True
        self.preemptions += 1
        self.costs.judge()
        return sequence

    def _bytes(self, pages: Items[Items[object]]) -> int:
        return sum(len(ids) * stride for ids, stride in zip(pages, self.pool.strides, strict=True))

    @contextlib.contextmanager
    def _moving(self, size: int) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.costs.moved(size, time.perf_counter() - started)

    def _lead(self, sequence: Sequence) -> None:
        """Compute the prompt that it shares, if nobody does."""
        beginning = sequence.beginning
        if beginning and sequence.follows and not beginning.leader and not beginning.table:
            beginning.leader = sequence
            beginning.followers.discard(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """It follows nobody any more, and nobody follows it unless its prompt was computed."""
        beginning = sequence.beginning
        if beginning is None:
            return
        beginning.followers.discard(sequence)
        if beginning.leader is sequence and not beginning.table:
            beginning.leader = None
        if beginning.table and not beginning.followers:
            self._forget(beginning)

    def _forget(self, beginning: Beginning) -> None:
        self._beginnings.remove(beginning)
        assert beginning.table
        self.pool.release(beginning.table)
        beginning.table = beginning.leader = None

    def _reclaim(self) -> bool:
        """Give up pages that are only kept in case they are wanted again. False if there are none."""
        if self.prefixes and self.prefixes.reclaim():
            return True
        if not self._beginnings:
            return False
        self._forget(self._beginnings[0])
        return True
