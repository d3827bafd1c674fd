"""PagePool: which pages belong to which sequence, and how a step takes more of them. Accounting only.

A step is a transaction: ``reserve`` takes every page it can need, then ``commit`` or ``rollback``. Nothing else holds
pages, so a step that fails or is abandoned leaks none. A Session moves the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvlathe.export.layout import CacheLayout
from kvlathe.runtime.arena import PageArena
from kvlathe.runtime.session import PageMover


@dataclass(eq=False, slots=True)
class PageTable:
    """One sequence: for each bucket its page ids, oldest first, and how many committed tokens they hold."""

    pages: list[list[int]]
    lengths: list[int]


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy on write, to be done before the step runs."""

    bucket: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Seal:
    """A full page to be sealed after the step has run; ``cold_pages`` in the order of ``plan.cold(fresh)``.

    ``position``: place of its first token in the sequence.
    """

    fresh: int
    page: int
    cold_pages: tuple[int, ...]
    position: int


@dataclass(eq=False, slots=True)
class Reservation:
    """Room for ``tokens`` more tokens of one sequence in each bucket, and the page moves that belong to the step."""

    table: PageTable
    tokens: list[int]  # of each fresh bucket
    added: list[int]  # pages appended to table.pages, for each bucket
    copies: list[Copy] = field(default_factory=list)
    seals: list[Seal] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Swapped:
    """A sequence outside the arena: the bytes of its pages and its lengths, for each bucket."""

    data: list[list[bytes]]
    lengths: list[int]


class PagePool(PageArena):
    """Pages of every bucket of ``layout`` in an arena of ``arena_bytes``, and the page tables of sequences."""

    def __init__(self, layout: CacheLayout, arena_bytes: int) -> None:
        super().__init__(layout.page_stride, arena_bytes)
        self.layout, self.plan = layout, layout.plan
        self._cold = [self.plan.cold(b) for b in range(len(self.strides))]
        self._fresh = [b for b, bucket in enumerate(self.plan.buckets) if bucket.source is None]

    def open(self) -> PageTable:
        return PageTable([[] for _ in self.strides], [0] * len(self.strides))

    def worst_pages(self, tokens: int) -> list[int]:
        """Pages of each bucket that a sequence growing to ``tokens`` tokens can need at one time."""
        p, hot = self.plan.page_tokens, self.plan.prefill_chunk
        return [
            tokens // p if bucket.source is not None else -(-(min(tokens, hot) if self._cold[b] else tokens) // p)
            for b, bucket in enumerate(self.plan.buckets)
        ]

    def reserve(self, table: PageTable, tokens: int | Sequence[int], seal: bool = False) -> Reservation:
        """Take every page that appending ``tokens`` tokens (to each fresh bucket, or a number for each) can need; with
        ``seal`` also those to seal full pages of the buckets into that get some.

        ``table.pages`` then includes the new pages of the fresh buckets. Raises OutOfPages; nothing was taken then.
        """
        each = [tokens] * len(self.strides) if isinstance(tokens, int) else list(tokens)
        p = self.plan.page_tokens
        counts, cows, full = [0] * len(self.strides), [], {}
        for b in self._fresh:
            held, pages = table.lengths[b], table.pages[b]
            counts[b] = -(-(held + each[b]) // p) - len(pages)
            if each[b] and held % p and self._owners[b][pages[held // p]] > 1:
                cows.append(b)
                counts[b] += 1
            if seal and each[b] and self._cold[b]:
                full[b] = (held + each[b]) // p
                for cold in self._cold[b]:
                    counts[cold] += full[b]
        taken = self.take(counts)
        done = Reservation(table, each, [0] * len(counts))
        for b in cows:
            place, target = table.lengths[b] // p, taken[b].pop()
            done.copies.append(Copy(b, table.pages[b][place], target))
            table.pages[b][place] = target
        for b in self._fresh:
            table.pages[b] += taken[b]
            done.added[b] = len(taken[b])
        for b, count in full.items():
            cold = [taken[c] for c in self._cold[b]]
            sealed = table.lengths[self._cold[b][0]]  # a cold bucket keeps every token, so this many went before
            done.seals += [
                Seal(b, table.pages[b][i], tuple(ids[i] for ids in cold), sealed + i * p) for i in range(count)
            ]
        return done

    def commit(self, done: Reservation) -> None:
        """The step has run and its seals are done: the tokens are there."""
        table = done.table
        for b in self._fresh:
            table.lengths[b] += done.tokens[b]
        for copy in done.copies:
            self._drop(copy.bucket, copy.source)
        for seal in done.seals:
            table.pages[seal.fresh].remove(seal.page)
            table.lengths[seal.fresh] -= self.plan.page_tokens
            self._drop(seal.fresh, seal.page)
            for cold, page in zip(self._cold[seal.fresh], seal.cold_pages, strict=True):
                table.pages[cold].append(page)
                table.lengths[cold] += self.plan.page_tokens

    def rollback(self, done: Reservation) -> None:
        """The step did not happen: every page goes back, the table is what it was."""
        table = done.table
        for seal in done.seals:
            for cold, page in zip(self._cold[seal.fresh], seal.cold_pages, strict=True):
                self._drop(cold, page)
        for b, count in enumerate(done.added):
            for _ in range(count):
                self._drop(b, table.pages[b].pop())
        for copy in done.copies:
            pages = table.pages[copy.bucket]
            pages[pages.index(copy.target)] = copy.source
            self._drop(copy.bucket, copy.target)

    def truncate(self, table: PageTable, bucket: int, tokens: int) -> None:
        """After ``Session.evict``: the bucket keeps ``tokens`` tokens; the pages behind them go back."""
        keep = -(-tokens // self.plan.page_tokens)
        for page in table.pages[bucket][keep:]:
            self._drop(bucket, page)
        del table.pages[bucket][keep:]
        table.lengths[bucket] = tokens

    def fork(self, table: PageTable) -> PageTable:
        """A second sequence over the same pages; whoever writes to a shared page first gets its own copy."""
        self.share(table.pages)
        return PageTable([list(ids) for ids in table.pages], list(table.lengths))

    def release(self, table: PageTable) -> None:
        """Give everything back. The table is empty and may be released again."""
        self.drop(table.pages)
        table.pages = [[] for _ in self.strides]
        table.lengths = [0] * len(self.strides)

    def swap_out(self, table: PageTable, mover: PageMover) -> Swapped:
        """Move a sequence to host memory and release its pages."""
        data = [[mover.read_page(b, page) for page in ids] for b, ids in enumerate(table.pages)]
        swapped = Swapped(data, list(table.lengths))
        self.release(table)
        return swapped

    def swap_in(self, swapped: Swapped, mover: PageMover) -> PageTable:
        """Raises OutOfPages; ``swapped`` is unchanged then."""
        taken = self.take([len(pages) for pages in swapped.data])
        try:
            for b, ids in enumerate(taken):
                for page, data in zip(ids, swapped.data[b], strict=True):
                    mover.write_page(b, page, data)
        except BaseException:
            self.drop(taken)
            raise
        return PageTable(taken, list(swapped.lengths))
