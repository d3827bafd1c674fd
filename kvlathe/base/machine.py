"""Memory and processors that this process may use: those of the machine, as far as its
control groups allow.

A container's limits are those of control groups: a process that ignores them is killed
for memory, or stands still for a part of each period because more threads run than it
has processor time for. Version 2 of the kernel's interface has one tree of folders,
version 1 one for each controller; a limit counts for everything below it.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
REST = 256 << 20
"""Bytes that stay free for whatever was not counted."""
log = logging.getLogger("kvlathe")


def memory_bytes(root: Path = ROOT) -> int:
    """Memory of the machine in bytes, or less where a control group allows less."""
    most = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for folder in _folders(root, "memory"):
        most += _numbers(folder / "memory.max") + _numbers(
            folder / "memory.limit_in_bytes"
        )
    return min(most)


def free_bytes(root: Path = ROOT) -> int:
    """Memory in bytes that this process may still take: what the kernel calls available,
    or less where a control group has less left. Files that a group has read and does not
    use are no part of what it holds: they are dropped first."""
    left = [
        _fields(root / "proc/meminfo").get("MemAvailable", memory_bytes(root) >> 10)
    ]
    left[0] <<= 10  # kilobytes
    for folder in _folders(root, "memory"):
        kept = _fields(folder / "memory.stat")
        dropped = kept.get("total_inactive_file", kept.get("inactive_file", 0))
        for limit, usage in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            for most in _numbers(folder / limit):
                left += [most - held + dropped for held in _numbers(folder / usage)]
    return max(0, min(left))


def cores(root: Path = ROOT) -> int:
    """Cores this process may use, hardware threads of one core counted once (where the
    system says so), at most the processor time that its control groups give it."""
    physical = len({_siblings(cpu) for cpu in _usable()})
    return min(physical, processors(root))


def threads(wanted: int | None, root: Path = ROOT) -> int:
    """Number of threads that compute: ``wanted``, or OMP_NUM_THREADS, or one a core.

    More than this process has processors for are not started; a warning says so.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if wanted is None and asked.isdecimal() and int(asked) > 0:
        wanted = int(asked)
    if wanted is None:
        return cores(root)
    most = processors(root)
    if wanted > most:
        log.warning(
            "%d threads are started instead of %d: this process may use %d processors.",
            most,
            wanted,
            most,
        )
    return min(wanted, most)


def processors(root: Path = ROOT) -> int:
    """Hardware threads this process may use, at most the processor time that its
    control groups give it."""
    most = [len(_usable())]
    for folder in _folders(root, "cpu"):
        limit = _numbers(folder / "cpu.max")
        limit = limit or [
            *_numbers(folder / "cpu.cfs_quota_us"),
            *_numbers(folder / "cpu.cfs_period_us"),
        ]
        if len(limit) == 2:  # microseconds of processor time in each period of so many
            most.append(math.ceil(limit[0] / limit[1]))
    return max(1, min(most))


def _usable() -> set[int]:
    """The hardware threads on which this process may be scheduled."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """This process's control group in either interface, and all that it is in. Inside a
    container the path may be the host's, of which only the end of the way up is
    there."""
    try:
        groups = [
            line.split(":", 2)
            for line in (root / "proc/self/cgroup").read_text("utf-8").splitlines()
        ]
    except (OSError, UnicodeError):
        return
    for _, controllers, path in groups:
        if controllers == "" or controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / controllers.replace("name=", "")
            top = (
                top
                if controllers == "" or top.is_dir()
                else root / "sys/fs/cgroup" / controller
            )
            below = path.strip("/").split("/")
            yield from (top.joinpath(*below[:n]) for n in range(len(below), -1, -1))


def _numbers(file: Path) -> list[int]:
    """The numbers in a file: none where it is missing or says that there is no
    limit."""
    try:
        words = file.read_text("ascii").split()
    except (OSError, UnicodeError):
        return []
    return [int(word) for word in words] if all(map(str.isdigit, words)) else []


def _fields(file: Path) -> dict[str, int]:
    """Lines of a name and a number; empty where the file is missing."""
    try:
        lines = file.read_text("ascii").splitlines()
    except (OSError, UnicodeError):
        return {}
    pairs = (line.replace(":", " ").split() for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if pair[1:] and pair[1].isdigit()}


def _siblings(cpu: int) -> str:
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return path.read_text("ascii").strip() if path.is_file() else str(cpu)
