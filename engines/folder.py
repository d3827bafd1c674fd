"""Folders that appear whole or not at all.

The work happens in a hidden sibling of the target and one rename makes it the target.
The builder holds a lock on the sibling, so that the next build of the same target can
tell what a killed process left from what another is writing.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import glob
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from kvlathe.base.console import log
from kvlathe.base.errors import KvlatheError
from kvlathe.plan.manifest import listed_files

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


Written = Callable[[Path], set[str] | None]
"""Names of the files in a folder that we wrote, None where it is none of ours."""


def check_target(
    target: Path, overwrite: bool = False, written: Written = listed_files
) -> None:
    """Raise KvlatheError unless a folder can appear at ``target``.

    ``overwrite`` lets it replace a folder that holds nothing but what ``written`` names
    (by default: an engine), or what a link leads to; the link stays.
    """
    if target.exists() or target.is_symlink():
        if not overwrite:
            raise KvlatheError(
                f"{target} exists",
                "a build never writes into a folder",
                "name another --output-dir or pass --overwrite",
            )
        _check_ours(target, written)
    home = nearest_parent(target.resolve())
    if not home.is_dir() or not os.access(home, os.W_OK | os.X_OK):
        raise KvlatheError(
            f"{home} cannot be written to",
            "it is no folder" if not home.is_dir() else "this user may not",
            f"{target} would appear in it: name another --output-dir",
        )


def _check_ours(target: Path, written: Written) -> None:
    ours = written(target)
    fact = f"{target} is nothing that --overwrite replaces"
    if ours is None:
        raise KvlatheError(fact, "it is not a finished build", "name another folder")
    if others := foreign(target, ours):
        shown = ", ".join(others[:3]) + (" ..." if len(others) > 3 else "")
        raise KvlatheError(
            fact,
            f"it holds what no build wrote ({shown})",
            "move that away, or name another folder",
        )


def foreign(folder: Path, ours: set[str]) -> list[str]:
    """Files and links of ``folder`` that are not ``ours``, and folders that hold none
    of ours."""
    kept = {folder / name for name in ours}
    around = {parent for path in kept for parent in path.parents}
    others = [p for p in folder.rglob("*") if p not in kept and p not in around]
    names = [path.relative_to(folder) for path in others]
    kept_names = [name for name in names if "__pycache__" not in name.parts]
    return sorted(str(name) for name in kept_names)


def check_file_target(target: Path) -> None:
    """Raise KvlatheError unless a new file can appear at ``target``."""
    if target.exists() or target.is_symlink():
        raise KvlatheError(
            f"{target} exists", "no file is replaced", "name another one"
        )
    home = nearest_parent(target)
    if not _takes_files(home):
        raise KvlatheError(
            f"{target} cannot be written",
            f"{home} is no folder that this user may write to",
            "name another file",
        )


def _takes_files(folder: Path) -> bool:
    """By trial: what the permissions say does not hold for root, or in /proc."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def nearest_parent(target: Path) -> Path:
    """The closest of the folders above ``target`` that exists (a file, where one stands
    in the way)."""
    return next(parent for parent in target.absolute().parents if parent.exists())


@contextmanager
def appearing(
    target: Path, overwrite: bool = False, written: Written = listed_files
) -> Generator[Path]:
    """A new folder to write into, which becomes ``target`` if the block succeeds and
    vanishes if it does not.

    SIGTERM inside the block is taken as Ctrl-C, so that it cleans up too. Raises
    KvlatheError for a full disk, where another process is making the same folder, and
    as ``check_target`` does; every other error passes through.
    """
    check_target(target, overwrite, written)
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    work, lock = _locked_folder(target)
    try:
        _remove_abandoned(target, work)
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
def whole_file(target: Path) -> Generator[Path]:
    """A path to write, which becomes ``target`` if the block succeeds and vanishes if
    it does not."""
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


def _locked_folder(target: Path) -> tuple[Path, int]:
    """A new folder beside ``target``, and the open handle that holds its lock.

    Between making and locking it, another build may have taken it for abandoned and
    removed it: then there is another attempt.
    """
    while True:
        work = Path(tempfile.mkdtemp(prefix=_prefix(target), dir=target.parent))
        try:
            lock = os.open(work, os.O_RDONLY)
        except FileNotFoundError:
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        if work.exists():
            return work, lock
        os.close(lock)


def _remove_abandoned(target: Path, own: Path) -> None:
    """Remove what killed builds of the same target left: the kernel drops a dead
    process's lock. Raises KvlatheError where a build still runs."""
    for folder in target.parent.glob(glob.escape(_prefix(target)) + "*"):
        if folder == own:
            continue
        try:
            handle = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:  # its build has just ended
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError as error:
            raise KvlatheError(
                f"{target} is being built",
                "another process is at work on it",
                "wait for that one, or name another --output-dir",
            ) from error
        finally:
            os.close(handle)


@contextmanager
def sigterm_interrupts() -> Generator[None]:
    """SIGTERM inside the block is Ctrl-C. Only the main thread may set handlers;
    elsewhere it keeps its meaning."""

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
    """One atomic step. With ``overwrite`` the two folders change places and the old one
    is removed as ``work``."""
    if overwrite and target.exists():
        if not _exchange(
            work, target
        ):  # this file system has no such call: one moment without a folder
            old = work.with_name(work.name + "-old")
            target.rename(old)
            work.rename(target)
            shutil.rmtree(old)
        return
    try:
        work.rename(target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise KvlatheError(
                f"{target} exists",
                "another process made it meanwhile",
                "name another one",
            ) from error
        raise


def _exchange(a: Path, b: Path) -> bool:
    """Linux renameat2(2) with RENAME_EXCHANGE: no moment without a folder at either
    path. False where not supported."""
    here, exchange = -100, 2
    try:
        call = ctypes.CDLL(None).renameat2
    except AttributeError:
        return False
    return (
        call(here, os.fsencode(a), here, os.fsencode(b), ctypes.c_uint(exchange)) == 0
    )


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
        "make room or name another --output-dir",
    )
