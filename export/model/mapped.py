"""Pages of a mapped file that were read and are not needed again: a checkpoint larger
than memory is then never in it as a whole."""

from __future__ import annotations

import ctypes
import mmap
from functools import cache

from torch import Tensor


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def forget(view: Tensor, copy: Tensor) -> None:
    """Let go of the memory of ``view``, a tensor in a mapped file that ``copy`` was
    made of. The file and the system's cache of it stay; reading it again maps it again.

    Nothing happens where ``copy`` is no copy.
    """
    if copy.untyped_storage().data_ptr() == view.untyped_storage().data_ptr():
        return
    page = mmap.PAGESIZE
    start = -(-view.data_ptr() // page) * page
    end = (view.data_ptr() + view.nbytes) // page * page
    if end > start:
        length = ctypes.c_size_t(end - start)
        _libc().madvise(ctypes.c_void_p(start), length, mmap.MADV_DONTNEED)
