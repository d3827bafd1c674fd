"""Large memory on 2 MB pages, where Linux offers them on request (madvise).

Decoding reads every weight once a token, one after the other: with 4 KB pages much of
the time goes into finding where each page lies (measured on lathe-27m: 8 to 15 % of a
step). Elsewhere, and where the kernel refuses, nothing happens.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import re
from collections.abc import Iterator
from pathlib import Path

from kvlathe.base.errors import KvlatheError

MADV_COLLAPSE = 25  # Linux 6.1: now, by copying; the pages keep their contents
LEAST = 4 << 20
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ 0\s*(\[heap\])?$")


def reserve(size: int) -> mmap.mmap:
    """``size`` bytes of zeros that cost nothing until touched, then memory in steps of
    2 MB. Raises KvlatheError where the system has no room for so many."""
    try:
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise KvlatheError(
            f"a cache of {size:,} bytes cannot be had", str(error), "ask for less"
        ) from error
    with contextlib.suppress(AttributeError, OSError):  # no such advice on this system
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def collapse() -> None:
    """Move everything private that holds 4 MB or more. Takes about as long as copying
    that memory."""
    path = Path("/proc/self/smaps")
    try:
        advise = ctypes.CDLL(None).madvise
        ranges = list(_large(path.read_text("ascii", "replace").splitlines()))
    except (OSError, AttributeError, TypeError):
        return
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for start, end in ranges:
        advise(start, end - start, MADV_COLLAPSE)


def _large(lines: list[str]) -> Iterator[tuple[int, int]]:
    """Start and end of private anonymous mappings of which LEAST bytes and most pages
    are in memory."""
    span: tuple[int, int] | None = None
    for line in lines:
        if found := _MAPPING.match(line):
            span = int(found[1], 16), int(found[2], 16)
        elif re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            span = None
        elif span and line.startswith("Rss:"):
            resident = int(line.split()[1]) * 1024
            if resident >= LEAST and resident >= 0.75 * (span[1] - span[0]):
                yield span
