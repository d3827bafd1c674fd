"""Stores of blocks that the prefix cache had to give up: the host's memory, then a
folder.

    pool --reclaim--> HostStore --least recently used--> DiskStore (disk_store.py)
    pool <--find, by the block's key---------------------'

A key hashes every token up to the block's end (prefix.py), so what it names never
changes. Whatever goes wrong costs the block: its tokens are computed again.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvlathe.base.errors import KvlatheError
from kvlathe.runtime.cache.disk_store import DiskStore, Stored, bytes_of
from kvlathe.runtime.cache.page_table import Pages
from kvlathe.runtime.cache.parcel import Origin
from kvlathe.runtime.sessions.protocols import PLAIN, PageMover

DISK_CACHE_BYTES = 1 << 34
"""The size of a disk store, unless asked otherwise."""


@dataclass(frozen=True, slots=True)
class StoreSizes:
    """Memory of the host, and a folder with at most ``disk_bytes`` of files. None: no
    such store."""

    host_bytes: int | None = None
    folder: str | Path | None = None
    disk_bytes: int = DISK_CACHE_BYTES


class HostStore:
    """Blocks in at most ``capacity`` bytes of the host's memory. The least recently
    used go ``below``."""

    def __init__(self, capacity: int, below: DiskStore | None = None) -> None:
        self.capacity = capacity
        self.below = below
        self.bytes = 0
        self._blocks: OrderedDict[bytes, Stored] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def put(self, key: bytes, pages: Stored) -> None:
        """Keep a block that is not there."""
        self._blocks[key] = pages
        self.bytes += bytes_of(pages)
        while self.bytes > self.capacity:
            oldest, gone = self._blocks.popitem(last=False)
            self.bytes -= bytes_of(gone)
            if self.below is not None:
                self.below.put(oldest, gone)

    def save(self, until: float) -> None:
        """Write blocks below, the last used ones first, until time.monotonic() says
        so."""
        for key, pages in reversed(self._blocks.items()):
            left = until - time.monotonic()
            if self.below is None or left <= 0:
                break
            self.below.put(key, pages)
            self.below.flush(left)

    def get(self, key: bytes) -> Stored | None:
        if key in self._blocks:
            self._blocks.move_to_end(key)
        return self._blocks.get(key)

    def discard(self, key: bytes) -> None:
        gone = self._blocks.pop(key, ())
        self.bytes -= bytes_of(gone)


class BlockStores:
    """The stores that the prefix cache asks: a host store, a disk store or both, and
    what moves pages, of ``page_bytes`` in each bucket. ``host_hits``, ``disk_hits``:
    blocks that came back from there.

    Raises KvlatheError where there is neither.
    """

    def __init__(
        self,
        mover: PageMover,
        page_bytes: Sequence[int],
        host: HostStore | None,
        disk: DiskStore | None,
    ) -> None:
        if host is None and disk is None:
            raise KvlatheError("evicted prefixes have no place to go")
        self.mover = mover
        self.host = host
        self.disk = disk
        self._page_bytes = page_bytes
        self.host_hits = 0
        self.disk_hits = 0

    def use(self, mover: PageMover) -> None:
        """From now on ``mover`` moves pages, and codes what it reads as it does.
        Nothing may have been asked yet."""
        self.mover = mover
        if self.disk is not None:
            self.disk.use(mover.coding)

    def __contains__(self, key: bytes) -> bool:
        on_host = self.host is not None and key in self.host
        return on_host or (self.disk is not None and key in self.disk)

    def put(self, key: bytes, pages: Pages) -> None:
        """Keep a block that loses its pages."""
        if key in self:
            return
        store = self.host or self.disk
        assert store is not None
        store.put(key, self._read(pages))

    def save(self, key: bytes, pages: Pages, until: float) -> None:
        """Write a block to the disk, and wait for it until time.monotonic() says so."""
        if self.disk is not None and key not in self.disk:
            self.disk.put(key, self._read(pages))
            self.disk.flush(until - time.monotonic())

    def _read(self, pages: Pages) -> Stored:
        stored: list[list[bytes]] = []
        for bucket, ids in enumerate(pages):
            stored.append([self.mover.read_page(bucket, page) for page in ids])
        return stored

    def get(self, key: bytes, counts: Sequence[int]) -> Stored | None:
        """The pages of a block, from the nearest store that has it: ``counts`` of each
        bucket. What comes from the disk is on the host then, where there is a store."""
        found = self.host.get(key) if self.host is not None else None
        if found is not None:
            self.host_hits += 1
            return found
        if self.disk is None or key not in self.disk:
            return None
        found = self.disk.get(key)
        if found is None:
            return None
        if not self._fits(found, counts):
            self.disk.discard(key, "its pages are not those of a block")
            return None
        self.disk_hits += 1
        if self.host is not None:
            self.host.put(key, found)
        return found

    def _fits(self, stored: Stored, counts: Sequence[int]) -> bool:
        """Whether these are the pages of a block. Coded ones say their size only when
        they are decoded."""
        if [len(of_bucket) for of_bucket in stored] != list(counts):
            return False
        if self.mover.coding != PLAIN:
            return True
        for of_bucket, size in zip(stored, self._page_bytes, strict=True):
            if any(len(page) != size for page in of_bucket):
                return False
        return True

    def write(self, key: bytes, stored: Stored, pages: Pages) -> bool:
        """Write pages of a block into the pool. False where they cannot be decoded; no
        store has them then."""
        try:
            for bucket, ids in enumerate(pages):
                for page, data in zip(ids, stored[bucket], strict=False):
                    self.mover.write_page(bucket, page, bytes(data))
        except Exception as error:  # whatever a file says, no request fails
            if self.host is not None:
                self.host.discard(key)
            if self.disk is not None:
                self.disk.discard(key, str(error))
            return False
        return True

    def close(self) -> None:
        """Drop what still waits for the disk."""
        if self.disk is not None:
            self.disk.close()


def open_stores(
    mover: PageMover, page_bytes: Sequence[int], origin: Origin, sizes: StoreSizes
) -> BlockStores:
    """Raises KvlatheError as the stores do."""
    disk, host = None, None
    if sizes.folder is not None:
        disk = DiskStore(Path(sizes.folder), sizes.disk_bytes, origin, mover.coding)
    if sizes.host_bytes is not None:
        host = HostStore(sizes.host_bytes, disk)
    return BlockStores(mover, page_bytes, host, disk)
