"""DiskStore: evicted blocks in a folder, each in a file of its own.

A file is a packed list of pages (parcel.py), and appears by one rename. Whatever goes
wrong here costs a block and one line in the log: its tokens are computed again.
"""

from __future__ import annotations

import os
import queue
import re
import stat
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvlathe.base.console import log
from kvlathe.base.errors import KvlatheError
from kvlathe.plan.json_fields import Sha256
from kvlathe.runtime.cache.parcel import (
    FORM,
    MOST_SAID,
    BytesLike,
    Origin,
    PageList,
    damaged,
    heard,
    pack,
    said,
    unpack,
)
from kvlathe.runtime.sessions.protocols import PLAIN

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
class StoredBlock:
    """The description at the beginning of a file. ``key``: of the block, in
    hexadecimal."""

    key: Sha256
    listed: PageList


class DiskStore:
    """Blocks of an engine of this ``origin`` in ``folder``, at most ``capacity`` bytes
    of them. ``failures``: files that could not be written or read.

    Several processes may share a folder: each counts its own bytes. Raises KvlatheError
    where the folder cannot be made, others may write or read it, or they could move it.
    """

    def __init__(
        self, folder: Path, capacity: int, origin: Origin, coding: str = PLAIN
    ) -> None:
        self.top = folder
        self.capacity = capacity
        self.origin = origin
        self.failures = 0
        self.bytes = 0
        self._lock = threading.Lock()
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self._queued: dict[bytes, Stored] = {}
        self._waiting = 0
        self._closed = False
        self._resting = 0.0
        # One thread: blocks reach the disk in the order in which they came.
        self._writer = Writer()
        self.use(coding)

    def use(self, coding: str) -> None:
        """From now on blocks are coded like this; those of another coding, or another
        version's, stay where they are. Nothing may have been asked yet."""
        self.coding = coding
        origin = self.origin
        name = f"{origin.plan:.16}-{origin.weights:.16}-{FORM}-{coding}"
        self.folder = self.top / name
        try:
            self.top.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_path(self.top)
            with suppress(FileExistsError):
                self.folder.mkdir(mode=0o700)
            _check_owner(self.folder)
            self._look()
            self._make_room()
        except OSError as error:
            raise KvlatheError(
                f"{self.folder} cannot keep evicted prefixes",
                str(error),
                "give --disk-cache a folder that you alone can write to, on a way that is yours",
            ) from error

    def _look(self) -> None:
        """Find what is there. What nobody touched for long is the first to go."""
        found: list[tuple[float, bytes, int]] = []
        for entry in os.scandir(self.folder):
            with suppress(FileNotFoundError):  # another process made room
                about = entry.stat(follow_symlinks=False)
                if not stat.S_ISREG(about.st_mode):
                    continue
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
        return key in self._sizes or key in self._queued

    def put(self, key: bytes, pages: Stored) -> None:
        """Write a block soon, in another thread. It is found from now on, unless that
        fails."""
        size = bytes_of(pages)
        with self._lock:
            full = self._waiting + size > MOST_WAITING
            if key in self or full or self._rests or self._closed:
                return
            self._waiting += size
            self._queued[key] = pages
        self._writer.submit(partial(self._write, key, pages, size))

    def get(self, key: bytes) -> Stored | None:
        """A block; None where it is gone or damaged, and then it is forgotten."""
        waiting = self._queued.get(key)
        if waiting is not None:
            return waiting
        path = self._path(key)
        try:
            pages = self._read(key, path)
            os.utime(path)
        except FileNotFoundError:  # another process made room
            self._forget(key)
            return None
        except Exception as error:  # whatever a file says, no request fails
            self.discard(key, str(error))
            return None
        with self._lock:
            if key in self._sizes:
                self._sizes.move_to_end(key)
        return pages

    def discard(self, key: bytes, reason: str) -> None:
        """Remove a block that cannot be used."""
        path = self._path(key)
        self._failed(f"{path.name} cannot be read, it is computed again: {reason}")
        self._forget(key)
        with suppress(OSError):
            path.unlink()

    def flush(self, seconds: float | None = None) -> bool:
        """Wait until everything was written, for so long at most; whether it was."""
        return self._writer.rest(seconds)

    def close(self) -> None:
        """Take nothing more, and drop what still waits."""
        self._closed = True

    @property
    def _rests(self) -> bool:
        return time.monotonic() < self._resting

    def _path(self, key: bytes) -> Path:
        return self.folder / (key.hex() + SUFFIX)

    def _read(self, key: bytes, path: Path) -> Stored:
        text, body = unpack(_content(path))
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
            if self._rests or self._closed:  # since this block came
                return
            listed = PageList.of(self.origin, pages, self.coding)
            pieces = pack(said(StoredBlock(key.hex(), listed)), pages)
            new.unlink(missing_ok=True)  # of a killed process of the same number
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with os.fdopen(os.open(new, flags, 0o600), "wb") as file:
                file.writelines(pieces)
                written = file.tell()
            new.replace(path)
            self._wrote(key, written)
        except Exception as error:  # the thread goes on
            self._resting = time.monotonic() + REST_SECONDS
            self._failed(f"{path.parent} takes no evicted prefixes: {error}")
            with suppress(OSError):
                new.unlink()
        finally:
            with self._lock:
                self._waiting -= size
                self._queued.pop(key, None)

    def _wrote(self, key: bytes, size: int) -> None:
        """Count a file, and make room for it."""
        with self._lock:
            self.bytes += size - self._sizes.pop(key, 0)
            self._sizes[key] = size
        self._make_room()

    def _make_room(self) -> None:
        """Remove the files that nobody has touched for longest, where there are too
        many."""
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


class Writer:
    """Does one work after the other, in a thread that no disk can keep a process from
    ending with: it is a daemon. It ends with its owner."""

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[Callable[[], object] | None] = (
            queue.SimpleQueue()
        )
        target = partial(_work_off, self._works)
        threading.Thread(target=target, name="kvlathe-disk-cache", daemon=True).start()
        weakref.finalize(self, self._works.put, None).atexit = False

    def submit(self, work: Callable[[], object]) -> None:
        self._works.put(work)

    def rest(self, seconds: float | None) -> bool:
        """Wait for what was submitted, for so long at most; whether it is done."""
        done = threading.Event()
        self._works.put(done.set)
        return done.wait(seconds)


def _work_off(works: queue.SimpleQueue[Callable[[], object] | None]) -> None:
    while work := works.get():
        work()
        del work  # it could keep its store alive


def _check_path(top: Path) -> None:
    """Raises OSError where somebody else could put another folder in the place of one on
    the way to ``top``: what is written there would be written elsewhere."""
    real = top.resolve()
    for folder in (real, *real.parents):
        about = folder.lstat()
        sticky = about.st_mode & stat.S_ISVTX  # as /tmp: others' entries stay theirs
        if about.st_uid not in (0, os.geteuid()):
            raise PermissionError(f"{folder} belongs to somebody else")
        if about.st_mode & 0o022 and not sticky:
            mode = about.st_mode & 0o777
            raise PermissionError(f"others may write to {folder} (mode {mode:o})")


def _check_owner(folder: Path) -> None:
    """Raises OSError for what is no folder of ours alone; a link is none, wherever it
    leads."""
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode):
        raise NotADirectoryError("it is a link or a file")
    if about.st_uid != os.geteuid() or about.st_mode & 0o077:
        said = f"others may use it (mode {about.st_mode & 0o777:o})"
        raise PermissionError(f"{said}: prompts can be told from it")


def _content(path: Path) -> bytes:
    """The content of a file of ours. Raises OSError, KvlatheError for what is none."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    with os.fdopen(os.open(path, flags), "rb") as file:
        about = os.fstat(file.fileno())
        most = MOST_WAITING + MOST_SAID
        if not stat.S_ISREG(about.st_mode) or about.st_size > most:
            raise damaged("it is no file of ours")
        return file.read(most)


def bytes_of(pages: Stored) -> int:
    total = 0
    for of_bucket in pages:
        total += sum(map(len, of_bucket))
    return total
