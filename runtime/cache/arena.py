"""PageArena: page ids of several page sizes over one arena, lent in slabs and
ref-counted. It never touches the memory.

    arena   | slab 0 | slab 1 | slab 2 | ...         a slab covers bytes [s * slab_bytes, (s + 1) * slab_bytes)
    bucket  |  5  6  |        | 14 15 |              and lends the page ids that lie wholly inside it to one bucket

The address of a page is ``page_id * strides[bucket]`` for every bucket
(kvlathe/plan/layout.py), so a slab that changes hands changes nothing but who may use
its bytes. A slab whose pages are all free returns to the arena. Pages of one size waste
nothing; else the slab size is chosen so that the pages cut by slab borders cost least.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvlathe.base.errors import KvlatheError

MAX_SLAB_PAGES = 32
"""The most pages in a slab of the bucket with the largest pages. More waste less at
slab borders, fewer return to the arena sooner."""


class OutOfPages(KvlatheError):
    """The arena has no room for a reservation now. A scheduler waits or preempts;
    nothing was taken."""


@dataclass(slots=True)
class _Slab:
    """Pages next..end-1 were never used since the slab was adopted (their memory is
    untouched); ``free`` came back."""

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


class PageArena:
    """Pages of ``strides[bucket]`` bytes in an arena of ``arena_bytes``.

    Raises KvlatheError if the arena cannot give every bucket a page.
    """

    def __init__(self, strides: Sequence[int], arena_bytes: int) -> None:
        self.strides = tuple(strides)
        self.slab_bytes = slab_size(self.strides, arena_bytes)
        slabs = arena_bytes // self.slab_bytes if self.slab_bytes else 0
        if slabs < len(self.strides):
            least = max(self.slab_bytes, max(self.strides)) * len(self.strides)
            raise KvlatheError(
                f"a cache of {arena_bytes:,} bytes is too small for this plan",
                "every page table needs room for a page at the least",
                f"give it {least:,} bytes or more",
            )
        self.arena_bytes = slabs * self.slab_bytes
        self.reclaim: Callable[[], bool] = lambda: False
        """Asked to give up pages that are only kept in case they are wanted again;
        False once there are none."""
        self._idle = list(range(slabs - 1, -1, -1))
        # Pages of each bucket that any slab surely lends.
        self._least = np.array(_whole(self.slab_bytes, self.strides), np.int64)
        self._slabs: list[dict[int, _Slab]] = [{} for _ in self.strides]
        self._open: list[dict[int, None]] = [
            {} for _ in self.strides
        ]  # slabs with room, as ordered sets
        self._owners: list[Counter[int]] = [Counter() for _ in self.strides]

    # -- what is used ------------------------------------------------------------------
    @property
    def pages_in_use(self) -> list[int]:
        return [len(owners) for owners in self._owners]

    @property
    def bytes_in_use(self) -> int:
        """Bytes of the pages that somebody owns, a shared page counted once."""
        return sum(
            n * stride
            for n, stride in zip(self.pages_in_use, self.strides, strict=True)
        )

    def owners(self, bucket: int, page: int) -> int:
        return self._owners[bucket][page]

    def fits(self, demands: Sequence[Sequence[int]]) -> bool:
        """Whether an empty pool surely holds all ``demands`` (pages of each bucket)
        together."""
        return self.holds(np.asarray(demands, np.int64).sum(0, keepdims=True))

    def holds(self, totals: npt.NDArray[np.int64]) -> bool:
        """Whether an empty pool surely holds each of ``totals`` [n, buckets] pages, one
        after the other."""
        return (
            int((-(-totals // self._least)).sum(1).max()) * self.slab_bytes
            <= self.arena_bytes
        )

    # -- pages -------------------------------------------------------------------------
    def take(self, counts: Sequence[int]) -> list[list[int]]:
        """``counts[b]`` pages of each bucket b, all or none. Raises OutOfPages."""
        taken: list[list[int]] = [[] for _ in counts]
        try:
            for bucket, count in enumerate(counts):
                for _ in range(count):
                    taken[bucket].append(self._take(bucket))
        except BaseException:
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
        self._slabs[bucket][index] = _Slab(
            -(-start // stride), (start + self.slab_bytes) // stride
        )
        self._open[bucket][index] = None

    def _drop(self, bucket: int, page: int) -> None:
        owners = self._owners[bucket]
        if owners[page] > 1:
            owners[page] -= 1
            return
        if not owners.pop(page, 0):
            raise ValueError(
                f"page {page} of bucket {bucket} is dropped but nobody owns it"
            )
        index = page * self.strides[bucket] // self.slab_bytes
        slab = self._slabs[bucket][index]
        slab.used -= 1
        slab.free.append(page)
        self._open[bucket][index] = None
        if not slab.used:
            del self._slabs[bucket][index], self._open[bucket][index]
            self._idle.append(index)


def slab_size(strides: Sequence[int], arena_bytes: int) -> int:
    """Bytes of a slab: the whole arena for one bucket, else the multiple of the largest
    stride that wastes least.

    A border cuts up to a page of each bucket, so large slabs waste less there. Half of
    each bucket's last slab is idle, so small slabs waste less of a small arena. Any
    slab holds a page of each bucket.
    """
    largest = max(strides)
    if len(strides) == 1:
        return arena_bytes // largest * largest

    def waste(size: int) -> float:
        lent = sum(
            n * stride for n, stride in zip(_whole(size, strides), strides, strict=True)
        )
        cut = 1 - lent / (len(strides) * size)
        return cut + len(strides) * size / (2 * max(arena_bytes, 1))

    sizes = [n * largest for n in range(1, MAX_SLAB_PAGES + 1)]
    return min((size for size in sizes if min(_whole(size, strides))), key=waste)


def _whole(size: int, strides: Sequence[int]) -> list[int]:
    """Pages of each bucket that surely lie wholly inside any slab of ``size`` bytes."""
    counts: list[int] = []
    for stride in strides:
        count, rest = divmod(size, stride)
        counts.append(count - (rest > 0))
    return counts
