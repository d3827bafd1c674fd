"""A ShardGroup over NCCL, by ctypes: torch brings the library along.

Calls go to the current stream, without a stream or an event of their own. So a CUDA
graph holds them like any kernel. Numbers are those of nccl.h, NCCL 2.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_char,
    c_char_p,
    c_int,
    c_size_t,
    c_void_p,
)
from functools import cache

import torch
from torch import Tensor

from kvlathe.base.errors import KvlatheError
from kvlathe.runtime.sessions.torch_cuda.device import current_stream

UNIQUE_ID_BYTES = 128
SUM = 0
TYPES = {
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
LOCAL = {"NCCL_SOCKET_IFNAME": "lo"}
"""Workers are processes of one host: NCCL finds them by loopback, and listens nowhere
else."""


class UniqueId(Structure):
    """What the workers of one communicator know it by."""

    _fields_ = [("internal", c_char * UNIQUE_ID_BYTES)]


@cache
def library() -> ctypes.CDLL:
    """Raises KvlatheError where it cannot be loaded."""
    try:
        lib = ctypes.CDLL("libnccl.so.2")  # torch has loaded it
    except OSError as error:
        raise KvlatheError(
            "several workers need NCCL",
            str(error),
            "install a torch that was built for CUDA",
        ) from error
    comm, stream = c_void_p, c_void_p
    buffers = [c_void_p, c_void_p, c_size_t, c_int]
    lib.ncclGetUniqueId.argtypes = [POINTER(UniqueId)]
    lib.ncclCommInitRank.argtypes = [POINTER(comm), c_int, UniqueId, c_int]
    lib.ncclAllReduce.argtypes = [*buffers, c_int, comm, stream]
    lib.ncclAllGather.argtypes = [*buffers, comm, stream]
    lib.ncclCommAbort.argtypes = [comm]
    lib.ncclGetErrorString.argtypes = [c_int]
    lib.ncclGetErrorString.restype = c_char_p
    return lib


def _call(name: str, *arguments: object) -> None:
    status = getattr(library(), name)(*arguments)
    if status:
        words = library().ncclGetErrorString(status).decode()
        raise KvlatheError(f"{name} failed", words, "set NCCL_DEBUG=INFO to see why")


def unique_id() -> bytes:
    """Of a new communicator; its first worker makes it. Others reach it by loopback,
    where NCCL_SOCKET_IFNAME says nothing else."""
    for name, value in LOCAL.items():
        os.environ.setdefault(name, value)
    made = UniqueId()
    _call("ncclGetUniqueId", byref(made))
    return bytes(made)


class NcclGroup:
    """A ShardGroup of processes with one GPU each. Making it waits for all of them."""

    def __init__(self, shared: bytes, shard: int, size: int) -> None:
        """``shared``: the ``unique_id`` of all. Raises KvlatheError where NCCL does."""
        self.shard = shard
        self.size = size
        self._comm = c_void_p()
        known = UniqueId.from_buffer_copy(shared)
        _call("ncclCommInitRank", byref(self._comm), size, known, shard)

    def sum(self, x: Tensor) -> Tensor:
        address = x.data_ptr()
        kind = TYPES[x.dtype]
        assert x.is_contiguous()
        _call(
            "ncclAllReduce",
            address,
            address,
            x.numel(),
            kind,
            SUM,
            self._comm,
            current_stream(),
        )
        return x

    def gather(self, x: Tensor) -> Tensor:
        own = x.contiguous()
        every = own.new_empty(self.size, *own.shape)
        kind = TYPES[own.dtype]
        _call(
            "ncclAllGather",
            own.data_ptr(),
            every.data_ptr(),
            own.numel(),
            kind,
            self._comm,
            current_stream(),
        )
        return every

    def abort(self) -> None:
        comm, self._comm = self._comm, c_void_p()
        if comm:
            library().ncclCommAbort(comm)
