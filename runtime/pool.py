"""PagePool: which pages of one arena belong to whom. Accounting only; a Session moves the bytes.

    arena   | slab 0 | slab 1 | slab 2 | ...         a slab covers bytes [s * slab_bytes, (s + 1) * slab_bytes)
    bucket  |  5  6  |        | 14 15 |              and lends the page ids that lie wholly inside it to one bucket

The address of a page is ``page_id * page_stride[bucket]`` for every bucket (export/layout.py), so a slab that changes
hands changes nothing but who may use its bytes. A slab whose pages are all free returns to the arena. A plan of one
bucket has one slab and wastes nothing; else the slab size is chosen so that the pages cut by slab borders cost least.

A step is a transaction: ``reserve`` takes every page it can need, then ``commit`` or ``rollback``. Nothing else holds
pages, so a step that fails or is abandoned leaks none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import gcd

from kvlathe.errors import KvlatheError
from kvlathe.export.layout import CacheLayout
from kvlathe.runtime.session import PageMover

MAX_SLAB_PAGES = 32
"""Of the bucket with the largest pages. More waste less at slab borders, fewer return to the arena sooner."""


class OutOfPages(KvlatheError):
    """The arena has no room for a reservation now. A scheduler waits or preempts; nothing was taken."""


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
    """Room for ``tokens`` more tokens of one sequence, and the page moves that belong to the step."""

    table: PageTable
    tokens: int
    added: list[int]  # pages appended to table.pages, for each bucket
    copies: list[Copy] = field(default_factory=list)
    seals: list[Seal] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Swapped:
    """A sequence outside the arena: the bytes of its pages and its lengths, for each bucket."""

    data: list[list[bytes]]
    lengths: list[int]


@dataclass(slots=True)
class _Slab:
    """Pages next..end-1 were never used since the slab was adopted (their memory is untouched); ``free`` came back."""

    next: int
    end: int
    free: list[int] = field(default_factory=list)
    used: int = 0

    def take(self) -> int:
        self.used += 1
        if self.free:
            return self.free.pop()
        self.next += 1
        return self.next - 1

    @property
    def full(self) -> bool:
        return not self.free and self.next == self.end


class PagePool:
    """Pages of every bucket of ``layout`` in an arena of ``arena_bytes``.

    Raises KvlatheError if the arena cannot give every bucket a page.
    """

    def __init__(self, layout: CacheLayout, arena_bytes: int) -> None:
        self.layout, self.plan = layout, layout.plan
        self.strides = layout.page_stride
        self.slab_bytes = slab_size(self.strides, arena_bytes)
        slabs = arena_bytes // self.slab_bytes if self.slab_bytes else 0
        if slabs < len(self.strides):
            least = sum(self.strides) if len(self.strides) == 1 else 2 * max(self.strides) * len(self.strides)
            raise KvlatheError(
                f"a cache of {arena_bytes:,} bytes is too small for this plan",
                "every page table needs room for a page at the least",
                f"give it {least:,} bytes or more",
            )
        self.arena_bytes = slabs * self.slab_bytes
        self.reclaim: Callable[[], bool] = lambda: False
        """Asked to give up pages that are only kept in case they are wanted again; False once there are none."""
        self._idle = list(range(slabs - 1, -1, -1))
        self._slabs: list[dict[int, _Slab]] = [{} for _ in self.strides]
        self._open: list[dict[int, None]] = [{} for _ in self.strides]  # slabs with room, as ordered sets
        self._owners: list[Counter[int]] = [Counter() for _ in self.strides]
        self._cold = [self.plan.cold(b) for b in range(len(self.strides))]
        self._fresh = [b for b, bucket in enumerate(self.plan.buckets) if bucket.source is None]

    # -- what is used ----------------------------------------------------------------------------------------------
    @property
    def pages_in_use(self) -> list[int]:
        return [len(owners) for owners in self._owners]

    @property
    def bytes_in_use(self) -> int:
        """Bytes of the pages that somebody owns, a shared page counted once."""
        return sum(n * stride for n, stride in zip(self.pages_in_use, self.strides, strict=True))

    @property
    def bytes_free(self) -> int:
        return self.arena_bytes - self.bytes_in_use

    def owners(self, bucket: int, page: int) -> int:
        return self._owners[bucket][page]

    def worst_pages(self, tokens: int) -> list[int]:
        """Pages of each bucket that a sequence growing to ``tokens`` tokens can need at one time."""
        p, hot = self.plan.page_tokens, self.plan.prefill_chunk
        return [
            tokens // p if bucket.source is not None else -(-(min(tokens, hot) if self._cold[b] else tokens) // p)
            for b, bucket in enumerate(self.plan.buckets)
        ]

    def fits(self, demands: Sequence[Sequence[int]]) -> bool:
        """Whether an empty pool surely holds all ``demands`` (pages of each bucket) together."""
        slabs = 0
        for stride, *counts in zip(self.strides, *demands, strict=True):
            least = self.slab_bytes // stride - (self.slab_bytes % stride > 0)
            slabs += -(-sum(counts) // least)
        return slabs * self.slab_bytes <= self.arena_bytes

    # -- pages -----------------------------------------------------------------------------------------------------
    def take(self, counts: Sequence[int]) -> list[list[int]]:
        """``counts[b]`` pages of each bucket b, all or none. Raises OutOfPages."""
        taken: list[list[int]] = [[] for _ in counts]
        try:
            for bucket, count in enumerate(counts):
                for _ in range(count):
                    taken[bucket].append(self._take(bucket))
        except OutOfPages:
            self.drop(taken)
            raise
        return taken

    def share(self, pages: Sequence[Sequence[int]]) -> None:
        """One more owner for each page."""
        for owners, ids in zip(self._owners, pages, strict=True):
            for page in ids:
                owners[page] += 1

    def drop(self, pages: Sequence[Sequence[int]]) -> None:
        """One owner less for each page; a page without owners is free."""
        for bucket, ids in enumerate(pages):
            for page in ids:
                self._drop(bucket, page)

    def _take(self, bucket: int) -> int:
        open_slabs = self._open[bucket]
        if not open_slabs:
            self._adopt(bucket)
        index = next(reversed(open_slabs))
        slab = self._slabs[bucket][index]
        page = slab.take()
        if slab.full:
            del open_slabs[index]
        self._owners[bucket][page] = 1
        return page

    def _adopt(self, bucket: int) -> None:
        while not self._idle and not self._open[bucket] and self.reclaim():
            pass
        if self._open[bucket]:
            return
        if not self._idle:
            raise OutOfPages(
                f"the cache of {self.arena_bytes:,} bytes is full",
                f"{self.bytes_in_use:,} bytes are in use",
                "send less at a time or give the cache more memory",
            )
        index, stride = self._idle.pop(), self.strides[bucket]
        start = index * self.slab_bytes
        self._slabs[bucket][index] = _Slab(-(-start // stride), (start + self.slab_bytes) // stride)
        self._open[bucket][index] = None

    def _drop(self, bucket: int, page: int) -> None:
        owners = self._owners[bucket]
        if owners[page] > 1:
            owners[page] -= 1
            return
        if not owners.pop(page, 0):
            raise ValueError(f"page {page} of bucket {bucket} is dropped but nobody owns it")
        index = page * self.strides[bucket] // self.slab_bytes
        slab = self._slabs[bucket][index]
        slab.used -= 1
        slab.free.append(page)
        self._open[bucket][index] = None
        if not slab.used:
            del self._slabs[bucket][index], self._open[bucket][index]
            self._idle.append(index)

    # -- sequences -------------------------------------------------------------------------------------------------
    def open(self) -> PageTable:
        return PageTable([[] for _ in self.strides], [0] * len(self.strides))

    def reserve(self, table: PageTable, tokens: int, seal: bool = False) -> Reservation:
        """Take every page that appending ``tokens`` tokens can need; with ``seal`` also those to seal full pages into.

        ``table.pages`` then includes the new pages of the fresh buckets. Raises OutOfPages; nothing was taken then.
        """
        p = self.plan.page_tokens
        counts, cows, full = [0] * len(self.strides), [], {}
        for b in self._fresh:
            held, pages = table.lengths[b], table.pages[b]
            counts[b] = -(-(held + tokens) // p) - len(pages)
            if held % p and self._owners[b][pages[held // p]] > 1:
                cows.append(b)
                counts[b] += 1
            if seal and self._cold[b]:
                full[b] = (held + tokens) // p
                for cold in self._cold[b]:
                    counts[cold] += full[b]
        taken = self.take(counts)
        done = Reservation(table, tokens, [0] * len(counts))
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
            table.lengths[b] += done.tokens
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
        for b, ids in enumerate(taken):
            for page, data in zip(ids, swapped.data[b], strict=True):
                mover.write_page(b, page, data)
        return PageTable(taken, list(swapped.lengths))


def slab_size(strides: Sequence[int], arena_bytes: int) -> int:
    """Bytes of a slab: the whole arena for one bucket, else the multiple of the largest stride that wastes least.

    A border cuts stride - gcd(slab, stride) bytes of a bucket's pages on average. At least two pages of each bucket fit
    in a slab, and four slabs for each bucket in the arena where it is large enough.
    """
    largest = max(strides)
    if len(strides) == 1:
        return arena_bytes // largest * largest
    most = min(MAX_SLAB_PAGES, arena_bytes // (4 * len(strides) * largest))
    sizes = [n * largest for n in range(max(2, most // 2), max(2, most) + 1)]
    return min(sizes, key=lambda size: sum(stride - gcd(size, stride) for stride in strides) / size)
