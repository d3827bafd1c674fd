"""Replacing a file that a manifest lists, so that a process may be killed at any
moment.

The new file is written beside the old one, under the name that ``fresh`` gives; then
the manifest is replaced; then the new file is renamed. Until the manifest is replaced
nothing has changed. After that, whoever reads the folder finishes the work
(``finish``).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Generator, Mapping
from pathlib import Path


def fresh(path: Path) -> Path:
    """The path at which a file is written before it takes its name."""
    return path.with_name(f".{path.name}.new")


@contextlib.contextmanager
def locked(folder: Path) -> Generator[None]:
    """Until the block ends, no other process holds this lock. The kernel drops it with
    a process that is killed."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def finish(
    folder: Path, records: Mapping[str, object], record_of: Callable[[Path], object]
) -> set[str]:
    """Rename the new files that a killed process left. ``records``: what the manifest
    lists by name; ``record_of``: such a record of a file.

    Returns the names of those that this user may not rename: their new files are what
    the manifest lists.
    """
    kept = set()
    for name, record in records.items():
        path = fresh(folder / name)
        if path.is_symlink() or not path.is_file() or record_of(path) != record:
            continue
        try:
            path.replace(folder / name)
        except FileNotFoundError:  # another process has just done it
            continue
        except OSError:
            kept.add(name)
    return kept
