"""Scheduler: which sequences run, and which tokens of them make the next step.

Sequences are admitted in the order of FairQueue, never past one that waits for room,
once the pool is expected to hold them at the fullest moment (Admission). The guess may
be wrong: a decode that finds no page sends the youngest away, to host memory or, where
the plan allows and that is cheaper, to be computed again; it is the first to come back.
The oldest is never sent away, so everyone ends.

A step takes one token of every decoding sequence, then prompt chunks, oldest first: up
to max_num_tokens without decodes, up to ``prompt_tokens`` beside decodes, so that long
prompts do not hold answers up.
"""

from __future__ import annotations

import bisect
import contextlib
import time
from collections.abc import Callable, Generator
from collections.abc import Sequence as Items
from operator import attrgetter
from typing import NamedTuple, TypeVar

import numpy as np

from kvlathe.base import machine
from kvlathe.base.errors import KvlatheError
from kvlathe.plan.manifest import Limits
from kvlathe.runtime.cache.arena import OutOfPages
from kvlathe.runtime.cache.page_table import Swapped
from kvlathe.runtime.cache.pool import PagePool
from kvlathe.runtime.cache.prefix import PrefixCache
from kvlathe.runtime.scheduling.admission import Admission, Costs
from kvlathe.runtime.scheduling.fair_queue import FairQueue
from kvlathe.runtime.scheduling.parts.speculation import Speculation
from kvlathe.runtime.scheduling.sequence import (
    Chunk,
    DecodeChunk,
    PrefillChunk,
    Sequence,
)
from kvlathe.runtime.scheduling.shared_prompts import SharedPrompts
from kvlathe.runtime.scheduling.step import StepRoom
from kvlathe.runtime.sessions.protocols import PageMover

T = TypeVar("T")
PROMPT_TOKENS = 512
"""Prompt tokens beside decodes in one step, unless asked otherwise."""

REPORTED = 512
"""Prompt tokens whose logits are reported, in one step: their rows cross to the
host."""

ONLY_ROW = (0,)  # logit rows of a one-token chunk


class Scheduled(NamedTuple):
    """The work of the next step: the newest token of each answer, and parts of
    prompts. Their pages are reserved; the shortest come first."""

    decodes: list[DecodeChunk]
    prefills: list[PrefillChunk]

    @property
    def chunks(self) -> list[Chunk]:
        """All of them, the shortest first."""
        chunks: list[Chunk] = [*self.decodes, *self.prefills]
        chunks.sort(key=attrgetter("count"))
        return chunks


class Scheduler:
    """``running``: oldest first. ``preemptions``: sequences sent away so far.
    ``queries``: tokens looked up in ``prefixes``."""

    def __init__(
        self,
        pool: PagePool,
        mover: PageMover,
        limits: Limits,
        prefixes: PrefixCache | None = None,
        prompt_tokens: int = PROMPT_TOKENS,
    ) -> None:
        self.pool = pool
        self.mover = mover
        self.limits = limits
        self.prefixes = prefixes
        self.prompt_tokens = prompt_tokens
        self.waiting = FairQueue()
        self.running: list[Sequence] = []
        self.speculation = Speculation()
        self.costs = Costs()
        self.room = StepRoom()
        self.admission = Admission(pool, self.costs, limits.max_num_tokens)
        self._seals = pool.plan.index.seals
        self.preemptions = 0
        self.queries = 0
        self._swapped: dict[Sequence, Swapped] = {}
        self._shared = SharedPrompts(pool)
        self._blocked = False
        self._borrowers = 0
        self.stalled = False
        """Whether the last step had no chunks, and borrowed pages may come back."""
        pool.reclaim = self._reclaim

    @property
    def blocked(self) -> bool:
        """Whether the next in line found no room, and nothing has changed since."""
        return self._blocked

    # -- who is here -------------------------------------------------------------------
    def check(self, sequence: Sequence) -> None:
        """Raises KvlatheError if it could never be served."""
        if not self.pool.has_room_for(sequence.most_tokens, sequence.prompt_tokens):
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
        """Forget a sequence, finished or not. Its pages go back, but for those kept for
        others with the same prefix."""
        if sequence in self.running:
            self.running.remove(sequence)
            self.remember(sequence)
            if sequence.finish_reason in ("stop", "length"):
                self.admission.ended(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._swapped.pop(sequence, None)
        self.speculation.forget(sequence)
        self.pool.release(sequence.table)
        self._shared.leave(sequence)
        self._blocked = False

    def remember(self, sequence: Sequence) -> None:
        """Let later sequences with the same prefix share what is cached, where the
        plan allows."""
        if self.prefixes and self.pool.plan.index.sharable:
            self.prefixes.add(
                sequence.table,
                sequence.sharable(self.prefixes.seals),
                sequence.prefix_salt,
            )

    def _remember_windows(self, sequence: Sequence) -> None:
        """Keep for others the windows at a border of a prompt's chunks: the next chunk
        may drop their pages."""
        prefixes, cached = self.prefixes, sequence.cached
        if prefixes is None or not prefixes.drops or not cached:
            return
        if cached <= sequence.prompt_tokens and cached % prefixes.block == 0:
            self.remember(sequence)

    # -- one step ----------------------------------------------------------------------
    def schedule(self) -> Scheduled:
        """The next step's chunks. There are none only if nothing is left to compute, or all wait
        for tokens that are being chosen."""
        self._admit()
        for sequence in self.running:
            if sequence.shared_prompt is not None:
                self._shared.lead(sequence)
        decodes: list[DecodeChunk] = []
        prefills: list[PrefillChunk] = []
        try:
            self._decode(decodes)
            others = len(self.running) > len(decodes)
            while others and not self._prefill(prefills, decodes):
                if decodes or prefills or len(self.running) == 1:
                    break
                self.preempt()
        except BaseException:
            for chunk in (*decodes, *prefills):
                self.pool.rollback(chunk.reservation)
            raise
        self.stalled = not decodes and not prefills and self._borrowers > 0
        return Scheduled(decodes, prefills)

    def forked(self) -> list[Sequence]:
        """As SharedPrompts.forked, of those that run."""
        return self._shared.forked(self.running) if self._shared.computed else []

    def prompt_done(self, sequence: Sequence, logits: np.ndarray | None) -> None:
        """The prompt is cached: others may continue it. ``logits`` [vocab] follow it;
        they are there where the sequence leads others."""
        self.remember(sequence)
        self._shared.done(sequence, logits)

    def again(self, chunk: Chunk) -> Chunk:
        """A chunk after its step was rolled back, its pages reserved anew; none for
        guesses."""
        if chunk.is_prefill:
            return self._prefill_chunk(chunk.sequence, chunk.count)
        return self._decode_chunk(chunk.sequence, ())

    def ran(
        self, chunks: Items[Chunk], tokens: int, seconds: float, ahead: bool = True
    ) -> None:
        """A step has run; ``tokens`` without those that were guessed. ``ahead``: as
        Speculation.ran."""
        self.costs.ran(tokens, len(chunks), seconds)
        if self.speculation.drafter is not None:
            self.speculation.tried(chunks)
            if tokens == len(chunks):
                self.speculation.ran(chunks, seconds, ahead)
            else:
                self.speculation.ran_beside_prompts(chunks)

    @property
    def _step_tokens(self) -> int:
        """Tokens that a step may take."""
        limit, most = self.limits.max_num_tokens, self.room.most
        return limit if most is None else min(limit, most)

    def _decode(self, chunks: list[DecodeChunk]) -> None:
        """One token of each decoding sequence; where pages run out, the youngest
        leaves."""
        decoding = [s for s in self.running if s.decodes]
        most = self._step_tokens
        del decoding[most:]
        guesses: dict[Sequence, list[int]] = {}
        if self.speculation.drafter is not None:
            room = most - sum([1 + sequence.behind for sequence in decoding])
            guesses = self.speculation.guesses(decoding, self.pool, room)
        while len(chunks) < len(decoding):
            sequence = decoding[len(chunks)]
            try:
                chunks.append(self._decode_chunk(sequence, guesses.get(sequence, ())))
            except OutOfPages:
                if len(self.running) == 1 and not self._borrowers:
                    raise
                if self.preempt() is decoding[-1]:
                    decoding.pop()

    def _decode_chunk(self, sequence: Sequence, guess: Items[int]) -> DecodeChunk:
        """Its newest token, those behind and, where there are pages for it, what is
        guessed to follow."""
        behind = sequence.behind
        count = behind + 1 + len(guess)
        try:
            room = self.pool.reserve(sequence.table, count, seal=True)
        except OutOfPages:
            if not guess:
                raise
            return self._decode_chunk(sequence, ())
        wanted = range(behind, count) if count > 1 else ONLY_ROW
        return DecodeChunk(sequence, count, room, wanted, completes=True, drafts=guess)

    def _prefill(self, chunks: list[PrefillChunk], decodes: Items[DecodeChunk]) -> bool:
        """Prompt chunks into what is left of a step of ``decodes``. False if the pages
        ran out: the rest waits."""
        limit = self._step_tokens
        room = limit
        if decodes:
            taken = sum([chunk.count for chunk in decodes])
            room = min(limit - taken, self.prompt_tokens)
        reported = REPORTED
        for sequence in self._in_turn():
            if sequence.decoding or sequence.follows or sequence.waits:
                continue
            whole = sequence.next_tokens(limit)
            if sequence.reports_prompt:
                whole = min(whole, reported)
                reported -= whole
                if not whole:
                    continue
            count = min(whole, room)
            if count < min(whole, self.pool.plan.page_tokens):
                break  # not worth a step
            try:
                chunks.append(self._prefill_chunk(sequence, count))
            except OutOfPages:
                if len(self.running) == 1 and not self._borrowers:
                    raise
                self._blocked = True
                return False
            room -= count
        return True

    def _in_turn(self) -> list[Sequence]:
        """Those that run, oldest first. Where pages seal, a chunk that has begun ends
        before others begin, so that few are hot at a time; prefixes there are whole
        chunks."""
        if not self._seals:
            return self.running
        return sorted(self.running, key=lambda sequence: not sequence.in_chunk)

    def _prefill_chunk(self, sequence: Sequence, count: int) -> PrefillChunk:
        self._remember_windows(sequence)
        reservation = self.pool.reserve(
            sequence.table, sequence.arriving(count), sequence.seals_after(count)
        )
        in_prompt = sequence.cached < sequence.prompt_tokens
        reports = in_prompt and sequence.reports_prompt
        completes = sequence.completes(count)
        wanted: Items[int] = (count - 1,) if completes else ()
        if reports:
            wanted = range(count)
        needs_logits = reports or (in_prompt and sequence.leads)
        return PrefillChunk(
            sequence, count, reservation, wanted, completes, needs_logits
        )

    # -- coming and going --------------------------------------------------------------
    def _admit(self) -> None:
        """Let those who wait run, in order, until one of them finds no room."""
        while self.waiting.entered and len(self.running) < self.limits.max_batch_size:
            sequence = self.waiting.peek()
            assert sequence is not None
            if self.running and not self._expects_room(sequence):
                self._blocked = True
                return
            try:
                self._prepare(sequence)
            except OutOfPages:
                if not self.running and not self._borrowers:
                    raise
                self._blocked = True
                return
            bisect.insort(self.running, self.waiting.pop(), key=lambda s: s.arrival)
            sequence.admitted = sequence.admitted or time.perf_counter()

    def _expects_room(self, sequence: Sequence) -> bool:
        """Whether ``sequence`` is expected to fit beside those that run."""
        if self._blocked:
            return False
        return self.admission.fits([*self.running, sequence])

    def _prepare(self, sequence: Sequence) -> None:
        """Bring its pages back from the host, or find its first pages in the prefix
        cache. Raises OutOfPages."""
        self.bring_back(sequence)
        self._shared.lead(sequence)
        if sequence.cached or sequence.follows or sequence.reports_prompt:
            return
        if self.prefixes:
            self.queries += len(sequence.tokens)
            table, cached = self.prefixes.find(sequence.tokens, sequence.prefix_salt)
            sequence.table = table
            sequence.cached = cached
            if sequence.reused < 0:  # later it finds what it computed itself
                sequence.reused = cached

    def bring_back(self, sequence: Sequence) -> None:
        """Its pages are in the pool again, where they were on the host. Raises
        OutOfPages."""
        if swapped := self._swapped.get(sequence):
            with self._moving(self._bytes(swapped.data)):
                sequence.table = self.pool.swap_in(swapped, self.mover)
            del self._swapped[sequence]

    @contextlib.contextmanager
    def borrowed_pages(self) -> Generator[None]:
        """Context for work outside the scheduler that keeps pages across steps
        (compaction). While open, running out of pages means wait, not fail: these pages
        will be returned."""
        self._borrowers += 1
        try:
            yield
        finally:
            self._borrowers -= 1
            self._blocked = False

    def make_room(self, take: Callable[[], T]) -> T:
        """Return what ``take`` gives, which takes pages for others than those that run.
        They make room for it, and come back by themselves. Raises OutOfPages."""
        while True:
            try:
                return take()
            except OutOfPages:
                if not self.running:
                    raise
                self.preempt()

    def preempt(self, moves: bool | None = None) -> Sequence:
        """The youngest running sequence leaves; it is the first to come back.
        ``moves``: its pages move to the host, or are computed again where the plan
        allows; None: whichever takes less time."""
        sequence = self.running[-1]
        self._put_away(sequence, moves)
        self.running.pop()  # only now: what fails above still runs, and is told
        self.waiting.push_back(sequence)
        self._blocked = True
        self.preemptions += 1
        self.costs.judge()
        return sequence

    @property
    def lends(self) -> bool:
        """Whether others have pages that come back by themselves."""
        return self._borrowers > 0

    def vacate(self) -> None:
        """Empty the pool of all that is the scheduler's: who runs leaves, to come back
        by itself, and what was only kept is given up. Pages move where the host has
        room: what is computed again differs by rounding, and a draw may part there."""
        for sequence in self.waiting:
            if any(sequence.table.pages):
                self._put_away(sequence, self._fits_host(sequence))
        while self.running:
            self.preempt(self._fits_host(self.running[-1]))
        while self._reclaim():
            pass

    def _fits_host(self, sequence: Sequence) -> bool:
        """Whether the host has room now for a sequence's pages. Each has its own copy,
        of pages that it shares, too."""
        size = self._bytes(sequence.table.pages)
        return size < machine.free_bytes() - machine.REST

    def _put_away(self, sequence: Sequence, moves: bool | None) -> None:
        """Take a sequence's pages from the pool. ``moves`` as ``preempt``."""
        size = self._bytes(sequence.table.pages)
        if moves is None:
            moves = not self._recomputes(sequence, size)
        if moves or not self._recomputable(sequence):
            with self._moving(size):
                self._swapped[sequence] = self.pool.swap_out(sequence.table, self.mover)
            return
        self.remember(sequence)
        self.pool.release(sequence.table)
        self.costs.lost(sequence.cached)
        sequence.cached = sequence.behind = 0

    def _recomputable(self, sequence: Sequence) -> bool:
        return not sequence.table.base and self.pool.plan.index.recomputable

    def _recomputes(self, sequence: Sequence, size: int) -> bool:
        """Whether a sequence of ``size`` bytes had better be computed again than moved
        to the host and back."""
        if not self._recomputable(sequence):
            return False
        return self.costs.recompute_is_cheaper(sequence.cached, size)

    def _bytes(self, pages: Items[Items[object]]) -> int:
        """Bytes of ``pages``, given for each bucket."""
        by_bucket = zip([len(ids) for ids in pages], self.pool.strides, strict=True)
        return sum(count * stride for count, stride in by_bucket)

    @contextlib.contextmanager
    def _moving(self, size: int) -> Generator[None]:
        started = time.perf_counter()
        yield
        self.costs.moved(size, time.perf_counter() - started)

    def _reclaim(self) -> bool:
        """Give up pages that are only kept in case they are wanted again. False if
        there are none."""
        if self.prefixes and self.prefixes.reclaim():
            return True
        return self._shared.reclaim() or self._move_waiting()

    def _move_waiting(self) -> bool:
        """Move the pages of one that waits to the host: of an adopted sequence, which
        came with them."""
        for sequence in self.waiting:
            if any(sequence.table.pages):
                self._put_away(sequence, moves=True)
                return True
        return False
