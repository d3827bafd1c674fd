"""Files of tensors: opened, checked, and let go of page by page. They hold numbers and
nothing that could run."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvlathe.base.errors import KvlatheError
from kvlathe.base.gguf_files import SUFFIX
from kvlathe.base.lfs_pointers import refuse_pointer
from kvlathe.export.gguf.tensors import GgufTensors
from kvlathe.export.model.shards import DOWNLOAD

DTYPES = ("F64", "F32", "F16", "BF16")


class Header(Protocol):
    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...


class TensorFile(Protocol):
    """The methods of safetensors' open file that are used."""

    def keys(self) -> Iterable[str]: ...
    def get_tensor(self, name: str) -> Tensor: ...
    def get_slice(self, name: str) -> Header: ...


def open_tensors(path: Path) -> TensorFile:
    """The file, its header read. Raises KvlatheError."""
    refuse_pointer(path)
    if path.suffix == SUFFIX:
        return GgufTensors(path)
    try:
        return safe_open(path, framework="pt")  # type: ignore[no-any-return]
    except (SafetensorError, OSError) as error:
        raise KvlatheError(
            f"{path} cannot be read", f"it is truncated or damaged ({error})", DOWNLOAD
        ) from error


def finite(tensor: Tensor, name: str) -> Tensor:
    """``tensor``. Raises KvlatheError where it holds NaN or infinite numbers."""
    low, high = torch.aminmax(
        tensor
    )  # both are NaN if any element is: one pass, no copy
    if not torch.isfinite(low + high):
        raise KvlatheError(
            f"the tensor {name} holds NaN or infinite numbers",
            "no sound result comes of it",
            DOWNLOAD,
        )
    return tensor


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def forget(view: Tensor, copy: Tensor) -> None:
    """Let go of the memory of ``view``, a tensor in a mapped file that ``copy`` was
    made of: a checkpoint larger than memory is then never in it as a whole. The file and
    the system's cache of it stay; reading it again maps it again.

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
