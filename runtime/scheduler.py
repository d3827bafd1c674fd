"""Scheduler: which sequences run, and which tokens of them make the next step. First come, first served.

A sequence is admitted once the pool surely holds what everything running and it can grow to, so running sequences do
not run out of pages. Should slabs be too scattered all the same, the youngest is swapped to host memory until there is
room. A step takes one token of every decoding sequence, then prompt chunks, oldest first, up to max_num_tokens.
"""

from __future__ import annotations

from collections import deque

from kvlathe.engines.manifest import Limits
from kvlathe.errors import KvlatheError
from kvlathe.runtime.arena import OutOfPages
from kvlathe.runtime.pool import PagePool, Swapped
from kvlathe.runtime.prefix import PrefixCache
from kvlathe.runtime.sequence import Chunk, Sequence
from kvlathe.runtime.session import PageMover


class Scheduler:
    def __init__(self, pool: PagePool, mover: PageMover, limits: Limits, prefixes: PrefixCache | None = None) -> None:
        self.pool, self.mover, self.limits, self.prefixes = pool, mover, limits, prefixes
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._swapped: dict[Sequence, Swapped] = {}

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises KvlatheError if it could never be served."""
        if not self.pool.fits([self.pool.worst_pages(sequence.most_tokens)]):
            raise KvlatheError(
                f"a sequence of up to {sequence.most_tokens} tokens does not fit",
                f"the cache has {self.pool.arena_bytes:,} bytes",
                "give the cache more memory or ask for fewer tokens",
            )
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, finished or not; its pages go back, but for those kept for others that begin alike."""
        if sequence in self.running:
            self.running.remove(sequence)
            if self.prefixes:
                self.prefixes.add(sequence.table, sequence.sharable(self.prefixes.seals), sequence.salt)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._swapped.pop(sequence, None)
        self.pool.release(sequence.table)

    def schedule(self) -> list[Chunk]:
        """The next step's chunks, their pages reserved. Empty only if nothing is left to do."""
        self._admit()
        while True:
            chunks = self._chunks()
            if chunks or len(self.running) < 2:
                return chunks
            self.preempt()

    def _chunks(self) -> list[Chunk]:
        budget, chunks = self.limits.max_num_tokens, []
        for sequence in sorted(self.running, key=lambda s: s.cached < s.prompt_tokens):
            whole = sequence.next_tokens(self.limits.max_num_tokens)
            count = min(whole, budget)
            if not count or (count < whole and chunks and chunks[-1].count > 1):
                break  # a chunk is cut only if no other chunk is in the step
            end = sequence.cached + count
            try:
                reservation = self.pool.reserve(sequence.table, count, sequence.seals_at(end))
            except OutOfPages:
                if len(self.running) == 1:
                    raise
                continue
            wanted = (count - 1,) if end == len(sequence.tokens) else ()
            chunks.append(Chunk(sequence, count, reservation, wanted))
            budget -= count
        return chunks

    def _admit(self) -> None:
        demands = [self.pool.worst_pages(s.most_tokens) for s in self.running]
        while self.waiting and len(self.running) < self.limits.max_batch_size:
            sequence = self.waiting[0]
            demands.append(self.pool.worst_pages(sequence.most_tokens))
            if not self.pool.fits(demands):
                return
            try:
                if sequence in self._swapped:
                    sequence.table = self.pool.swap_in(self._swapped[sequence], self.mover)
                    del self._swapped[sequence]
                elif self.prefixes and not sequence.cached:
                    sequence.table, sequence.cached = self.prefixes.find(sequence.tokens, sequence.salt)
            except OutOfPages:
                return
            self.running.append(self.waiting.popleft())

    def preempt(self) -> None:
        """Move the youngest running sequence to host memory; it is the first to come back."""
        sequence = self.running.pop()
        self._swapped[sequence] = self.pool.swap_out(sequence.table, self.mover)
        self.waiting.appendleft(sequence)
