"""Stores of blocks that the prefix cache had to give up: the host's memory, then a folder.

    pool --reclaim--> HostStore --least recently used--> DiskStore
    pool <--find, by the block's key---------------------'

A key hashes every token up to the block's end (prefix.py), so what it names never
changes. On disk a block is a packed list of pages (parcel.py) in a file of its own, which
appears by one rename. Whatever goes wrong there costs the block and one line in the log:
its tokens are computed again.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvlathe.base.console import log
from kvlathe.base.errors import KvlatheError
from kvlathe.plan.json_fields import Sha256
from kvlathe.runtime.cache.page_table import Pages
from kvlathe.runtime.cache.parcel import (
    PLAIN,
    BytesLike,
    Origin,
    PageList,
    damaged,
    heard,
    pack,
    said,
    unpack,
)
from kvlathe.runtime.sessions.protocols import PageMover

DISK_CACHE_BYTES = 1 << 34
"""Of a disk store, unless asked otherwise."""
MOST_WAITING = 1 << 29
"""Bytes that wait for the disk. Where it is slower than what comes, blocks are lost."""
REST_SECONDS = 60.0
"""After a file that could not be written, none is tried for so long."""
SUFFIX = ".pages"
NEW = ".new"
FILE = re.compile(f"[0-9a-f]{{64}}{SUFFIX}")
Stored = Sequence[Sequence[BytesLike]]
"""The pages of a block, of each bucket, as a PageMover gives them."""


@dataclass(frozen=True, slots=True)
class StoreSizes:
    """Memory of the host, and a folder with at most ``disk_bytes`` of files. None: no
    such store."""

    host_bytes: int | None = None
    folder: str | Path | None = None
    disk_bytes: int = DISK_CACHE_BYTES


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """What a file says of itself. ``key``: of the block, in hexadecimal."""

    key: Sha256
    listed: PageList


class DiskStore:
    """Blocks of an engine of this ``origin`` in ``folder``, at most ``capacity`` bytes of
    them. ``failures``: files that could not be written or read.

    Several processes may share a folder: each counts its own bytes. Raises KvlatheError
    where the folder cannot be made.
    """

    def __init__(self, folder: Path, capacity: int, origin: Origin) -> None:
        self.top, self.capacity, self.origin = folder, capacity, origin
        self.failures = 0
        self.bytes = 0
        self._lock = threading.Lock()
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self._waiting = 0
        self._resting = 0.0
        # One thread: blocks reach the disk in the order in which they came.
        self._writer = ThreadPoolExecutor(1, "kvlathe-disk-cache")
        self.use(PLAIN)

    def use(self, coding: str) -> None:
        """From now on blocks are coded like this; those of another coding stay where
        they are. Nothing may have been asked yet."""
        self.coding = coding
        origin = self.origin
        name = f"{origin.plan:.16}-{origin.weights:.16}-{coding}"
        self.folder = self.top / name
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._look()
        except OSError as error:
            raise KvlatheError(
                f"{self.folder} cannot keep evicted prefixes",
                str(error),
                "give --disk-cache a folder that can be written",
            ) from error

    def _look(self) -> None:
        """Find what is there. What nobody touched for long is the first to go."""
        found: list[tuple[float, bytes, int]] = []
        for entry in os.scandir(self.folder):
            about = entry.stat()
            if FILE.fullmatch(entry.name):
                key = bytes.fromhex(entry.name.removesuffix(SUFFIX))
                found.append((about.st_mtime, key, about.st_size))
            elif entry.name.endswith(NEW) and about.st_mtime < time.time() - 3600:
                Path(entry.path).unlink()  # of a process that was killed
        self._sizes.clear()
        self.bytes = 0
        for _, key, size in sorted(found):
            self._sizes[key] = size
            self.bytes += size

    def __contains__(self, key: bytes) -> bool:
        return key in self._sizes

    def put(self, key: bytes, pages: Stored) -> None:
        """Write a block soon, in another thread. It is found once it is there."""
        size = bytes_of(pages)
        with self._lock:
            full = self._waiting + size > MOST_WAITING
            if key in self._sizes or full or self._rests:
                return
            self._waiting += size
        self._writer.submit(self._write, key, pages, size)

    def get(self, key: bytes) -> Stored | None:
        """A block; None where it is gone or damaged, and then it is forgotten."""
        path = self._path(key)
        try:
            pages = self._read(key, path)
            os.utime(path)
        except FileNotFoundError:  # another process made room
            self._forget(key)
            return None
        except (OSError, KvlatheError) as error:
            self._failed(f"{path.name} cannot be read, it is computed again: {error}")
            self._forget(key)
            with suppress(OSError):
                path.unlink()
            return None
        with self._lock:
            if key in self._sizes:
                self._sizes.move_to_end(key)
        return pages

    def flush(self) -> None:
        """Wait until everything was written."""
        self._writer.submit(lambda: None).result()

    @property
    def _rests(self) -> bool:
        return time.monotonic() < self._resting

    def _path(self, key: bytes) -> Path:
        return self.folder / (key.hex() + SUFFIX)

    def _read(self, key: bytes, path: Path) -> Stored:
        text, body = unpack(path.read_bytes())
        block = heard(StoredBlock, text)
        listed = block.listed
        if block.key != key.hex() or listed.coding != self.coding:
            raise damaged("it is another block's")
        self.origin.check(listed.origin)
        return listed.split(body)

    def _write(self, key: bytes, pages: Stored, size: int) -> None:
        path = self._path(key)
        new = path.with_suffix(f".{os.getpid()}{NEW}")
        try:
            if self._rests:  # since this block came
                return
            listed = PageList.of(self.origin, pages, self.coding)
            pieces = pack(said(StoredBlock(key.hex(), listed)), pages)
            with new.open("wb") as file:
                file.writelines(pieces)
                written = file.tell()
            new.replace(path)
            self._wrote(key, written)
        except OSError as error:
            self._resting = time.monotonic() + REST_SECONDS
            self._failed(f"{path.parent} takes no evicted prefixes: {error}")
            with suppress(OSError):
                new.unlink()
        finally:
            with self._lock:
                self._waiting -= size

    def _wrote(self, key: bytes, size: int) -> None:
        """Count a file, and make room where there are too many."""
        with self._lock:
            self._sizes[key] = size
            self.bytes += size
        while self.bytes > self.capacity:
            with self._lock:
                oldest, size = self._sizes.popitem(last=False)
                self.bytes -= size
            self._path(oldest).unlink(missing_ok=True)

    def _forget(self, key: bytes) -> None:
        with self._lock:
            self.bytes -= self._sizes.pop(key, 0)

    def _failed(self, what: str) -> None:
        self.failures += 1
        log.warning("%s", what)


class HostStore:
    """Blocks in at most ``capacity`` bytes of the host's memory. The least recently used
    go ``below``."""

    def __init__(self, capacity: int, below: DiskStore | None = None) -> None:
        self.capacity, self.below = capacity, below
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
            if self.below is None or time.monotonic() > until:
                break
            self.below.put(key, pages)
            self.below.flush()

    def get(self, key: bytes) -> Stored | None:
        if key in self._blocks:
            self._blocks.move_to_end(key)
        return self._blocks.get(key)


class BlockStores:
    """What the prefix cache asks: a host store, a disk store or both, and what moves
    pages. ``host_hits``, ``disk_hits``: blocks that came back from there.

    Raises KvlatheError where there is neither.
    """

    def __init__(
        self, mover: PageMover, host: HostStore | None, disk: DiskStore | None
    ) -> None:
        if host is None and disk is None:
            raise KvlatheError("evicted prefixes have no place to go")
        self.mover, self.host, self.disk = mover, host, disk
        self.host_hits = 0
        self.disk_hits = 0

    def code(self, mover: PageMover, coding: str) -> None:
        """From now on ``mover`` codes what it reads. Nothing may have been asked yet."""
        self.mover = mover
        if self.disk is not None:
            self.disk.use(coding)

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

    def save(self, key: bytes, pages: Pages) -> None:
        """Write a block to the disk, and wait for it."""
        if self.disk is not None and key not in self.disk:
            self.disk.put(key, self._read(pages))
            self.disk.flush()

    def _read(self, pages: Pages) -> Stored:
        stored: list[list[bytes]] = []
        for bucket, ids in enumerate(pages):
            stored.append([self.mover.read_page(bucket, page) for page in ids])
        return stored

    def get(self, key: bytes) -> Stored | None:
        """The pages of a block, from the nearest store that has it."""
        found = self.host.get(key) if self.host is not None else None
        if found is not None:
            self.host_hits += 1
            return found
        if self.disk is None or key not in self.disk:
            return None
        found = self.disk.get(key)
        self.disk_hits += found is not None
        return found

    def write(self, stored: Stored, pages: Pages) -> bool:
        """Write pages of a block into the pool; False where they cannot be decoded."""
        try:
            for bucket, ids in enumerate(pages):
                for page, data in zip(ids, stored[bucket], strict=False):
                    self.mover.write_page(bucket, page, bytes(data))
        except KvlatheError as error:
            log.warning("an evicted prefix is computed again: %s", error)
            return False
        return True


def bytes_of(pages: Stored) -> int:
    total = 0
    for of_bucket in pages:
        total += sum(map(len, of_bucket))
    return total


def open_stores(mover: PageMover, origin: Origin, sizes: StoreSizes) -> BlockStores:
    """Raises KvlatheError as the stores do."""
    disk, host = None, None
    if sizes.folder is not None:
        disk = DiskStore(Path(sizes.folder), sizes.disk_bytes, origin)
    if sizes.host_bytes is not None:
        host = HostStore(sizes.host_bytes, disk)
    return BlockStores(mover, host, disk)
