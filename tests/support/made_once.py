"""Dear things are made once for all processes of a test run."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Generator
from functools import cache
from pathlib import Path

FOLDER = "KVLATHE_TEST_RUN"
"""The variable that names the run's folder. Workers and the processes that tests start
inherit it from the first process."""


@contextlib.contextmanager
def locked(path: Path) -> Generator[None]:
    """Hold the lock file ``path``; processes wait for each other."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@cache
def run_folder() -> Path:
    """The folder of this test run. The process that makes it removes it at its end."""
    if given := os.environ.get(FOLDER):
        return Path(given)
    folder = Path(tempfile.mkdtemp(prefix="kvlathe-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ[FOLDER] = str(folder)
    return folder


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """The folder ``name`` of this test run, filled by ``make``. Read only.

    Where ``make`` fails, the next that asks tries again.
    """
    base = run_folder()
    folder, draft = base / name, base / f"{name}.draft"
    with locked(base / f"{name}.lock"):
        if not folder.exists():
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir()
            make(draft)
            draft.rename(folder)
    return folder
