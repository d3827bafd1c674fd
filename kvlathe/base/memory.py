"""Memory that runs out: which errors say so, whatever library raises them, and what a
user is told."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from typing import TypeVar

from kvlathe.base.errors import DeviceLost, KvlatheError

T = TypeVar("T")
WORDS = (
    "out of memory",  # torch, the CUDA runtime and the native library
    "_STATUS_ALLOC_FAILED",  # cuBLAS and cuDNN
    "Failed to allocate memory",  # ONNX Runtime's arenas
    "can't allocate memory",  # torch on a CPU
)
LESS_MEMORY = (
    "free memory, give the cache less (--cache-size, --gpu-memory-utilization), "
    "or run fewer sequences (--max-batch-size)"
)
MOST_WORDS = 300
"""Characters of a library's own words that are passed on."""


class OutOfMemory(KvlatheError):
    """A device, or the host, has no memory for something now. Less of it may run."""


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory was missing, and less of it may run."""
    if isinstance(error, DeviceLost):
        return False
    if isinstance(error, OutOfMemory | MemoryError):
        return True
    said = str(error)
    return any(words in said for words in WORDS)


def give_back() -> None:
    """Give the system what objects that have gone held: the collector's cycles, those it
    was told to leave alone among them, then free memory of the C library and of torch's
    GPU."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    gc.collect()
    if frozen:
        gc.freeze()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def within_memory(work: Callable[[], T], fact: str, remedy: str) -> T:
    """Return the result of ``work``. Raises OutOfMemory with ``fact`` where memory was
    missing.

    The library's own error does not go on: its traceback would hold the memory of what
    has failed while less of it is tried.
    """
    try:
        return work()
    except OutOfMemory:
        raise
    except Exception as error:
        if not out_of_memory(error):
            raise
        missing = missing_memory(error, fact, remedy)
    raise missing


def missing_memory(error: Exception, fact: str, remedy: str) -> OutOfMemory:
    """An ``out_of_memory`` error in our words, with the reason in its own."""
    if isinstance(error, OutOfMemory):
        return error
    reason = str(error).partition("\n")[0][:MOST_WORDS] or type(error).__name__
    return OutOfMemory(fact, reason, remedy)
