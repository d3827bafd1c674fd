"""Folders that appear whole or not at all.

The work happens in a hidden sibling of the target and one rename makes it the target. The builder holds a lock on the
sibling, so that the next build of the same target can tell what a killed process left from what another is writing.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from kvlathe.console import log
from kvlathe.engines.manifest import MANIFEST_FILE
from kvlathe.errors import KvlatheError

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_target(target: Path, overwrite: bool = False, proof: str = MANIFEST_FILE) -> None:
    """Raise KvlatheError unless a folder can appear at ``target``. ``proof``: a file of what may be replaced."""
    if target.exists() or target.is_symlink():
        if not overwrite:
            raise KvlatheError(
                f"{target} exists",
                "a build never writes into a folder",
                "name another --output_dir or pass --overwrite",
            )
        if not (target / proof).is_file():
            raise KvlatheError(
                f"{target} is nothing that --overwrite replaces", f"it has no {proof}", "name another folder"
            )
    home = nearest_parent(target)
    if not home.is_dir() or not os.access(home, os.W_OK | os.X_OK):
        raise KvlatheError(f"{home} cannot be written to", f"{target} would appear in it", "name another --output_dir")


def nearest_parent(target: Path) -> Path:
    """The closest folder above ``target`` that exists."""
    return next(parent for parent in target.absolute().parents if parent.exists())


@contextmanager
def appearing(target: Path, overwrite: bool = False, proof: str = MANIFEST_FILE) -> Iterator[Path]:
    """A new folder to write into, which becomes ``target`` if the block succeeds and vanishes if it does not.

    SIGTERM inside the block is taken as Ctrl-C, so that it cleans up too. Raises KvlatheError for a full disk and for a
    target that exists (with ``overwrite``: that does not hold the file ``proof``); every other error passes through.
    """
    check_target(target, overwrite, proof)
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(target)
    work = Path(tempfile.mkdtemp(prefix=_prefix(target), dir=target.parent))
    lock = os.open(work, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with sigterm_interrupts():
            yield work
            work.chmod(0o777 & ~_umask())  # mkdtemp made it private
            _rename(work, target, overwrite)
    except KeyboardInterrupt:
        log.warning("interrupted: nothing was written to %s", target)
        raise
    except Exception as error:
        shutil.rmtree(work, ignore_errors=True)  # before the free bytes are counted
        if _disk_is_full(error):
            raise _full_disk(target) from error
        raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
        os.close(lock)


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """A path to write, which becomes ``target`` if the block succeeds and vanishes if it does not."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with sigterm_interrupts():
            yield part
            part.replace(target)
    except OSError as error:
        part.unlink(missing_ok=True)
        if _disk_is_full(error):
            raise _full_disk(target) from error
        raise
    finally:
        part.unlink(missing_ok=True)


def _prefix(target: Path) -> str:
    return f".{target.name}.building-"


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _remove_abandoned(target: Path) -> None:
    """Remove what killed builds of the same target left: the kernel drops a dead process's lock."""
    for folder in target.parent.glob(_prefix(target) + "*"):
        handle = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            log.warning("another process is building %s", target)
        finally:
            os.close(handle)


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """SIGTERM inside the block is Ctrl-C. Only the main thread may set handlers; elsewhere it keeps its meaning."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _rename(work: Path, target: Path, overwrite: bool) -> None:
    """One atomic step. With ``overwrite`` the two folders change places and the old one is removed as ``work``."""
    if overwrite and target.exists():
        if not _exchange(work, target):  # this file system has no such call: one moment without a folder
            old = work.with_name(work.name + "-old")
            target.rename(old)
            work.rename(target)
            shutil.rmtree(old)
        return
    try:
        work.rename(target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise KvlatheError(f"{target} exists", "another process made it meanwhile", "name another one") from error
        raise


def _exchange(a: Path, b: Path) -> bool:
    """Linux renameat2(2) with RENAME_EXCHANGE: no moment without a folder at either path. False where not supported."""
    here, exchange = -100, 2
    try:
        call = ctypes.CDLL(None).renameat2
    except AttributeError:
        return False
    return call(here, os.fsencode(a), here, os.fsencode(b), ctypes.c_uint(exchange)) == 0


def _disk_is_full(error: BaseException | None) -> bool:
    """Libraries wrap the operating system's error, some of them as text alone."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL_DISK:
            return True
        if os.strerror(errno.ENOSPC) in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _full_disk(target: Path) -> KvlatheError:
    free = shutil.disk_usage(nearest_parent(target)).free
    return KvlatheError(
        f"{target} could not be written",
        f"its disk is full ({free:,} bytes are free now that the unfinished folder is removed)",
        "make room or name another --output_dir",
    )
