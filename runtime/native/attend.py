"""kvlathe_cpu_attend of libkvlathe.so (cpu.h), by ctypes: attention of one layer."""

from __future__ import annotations

from ctypes import (
    POINTER,
    Structure,
    byref,
    c_float,
    c_int32,
    c_int64,
    c_uint32,
    c_void_p,
)

import numpy as np
import numpy.typing as npt

from kvlathe.base.errors import KvlatheError
from kvlathe.runtime.native.library import Native, Status


class Parallel(Structure):
    """kvlathe_parallel of cpu.h."""

    _fields_ = [("run", c_void_p), ("context", c_void_p)]


class AttendArgs(Structure):
    """kvlathe_attend_args of cpu.h."""

    _fields_ = [
        ("abi_version", c_uint32),
        *((name, c_int32) for name in ("tokens", "batch", "isa", "threads")),
        ("scale", c_float),
        *((name, c_void_p) for name in ("q", "k", "v", "cos", "sin")),
        *((name, c_void_p) for name in ("cu_seqlens_q", "lengths", "page_tables")),
        *((name, c_void_p) for name in ("page_table_widths", "proj_q", "proj_k")),
        *((name, c_void_p) for name in ("centre_k", "pool")),
        ("pool_bytes", c_int64),
        *((name, c_void_p) for name in ("o", "rows")),
        ("parallel", Parallel),
        *((name, c_void_p) for name in ("observation_weights", "mass")),
        ("mass_places", c_int64),
        ("sinks", c_void_p),
        ("softcap", c_float),
    ]


class HostLayer:
    """One layer of a plan in the library, for a host that calls it without ONNX
    Runtime."""

    def __init__(self, native: Native, table: npt.NDArray[np.int32]) -> None:
        """``table``: kvlathe/plan/layer_table.py. Raises KvlatheError for one that the
        library refuses."""
        self.lib = native.lib
        self.handle = c_void_p()
        create = (c_void_p, c_int64, POINTER(c_void_p), POINTER(Status))
        attend = (c_void_p, POINTER(AttendArgs), POINTER(Status))
        self.lib.kvlathe_layer_create.argtypes = create
        self.lib.kvlathe_cpu_attend.argtypes = attend
        self.lib.kvlathe_layer_destroy.argtypes = [c_void_p]
        self.lib.kvlathe_layer_destroy.restype = None
        status = Status()
        address = table.ctypes.data
        if self.lib.kvlathe_layer_create(
            address, table.size, byref(self.handle), byref(status)
        ):
            raise _refusal("a layer cannot be read", status)

    def __del__(self) -> None:
        self.lib.kvlathe_layer_destroy(self.handle)

    def attend(self, args: AttendArgs) -> None:
        """Append and attend. Raises KvlatheError with the library's words."""
        status = Status()
        if self.lib.kvlathe_cpu_attend(self.handle, byref(args), byref(status)):
            raise _refusal("a step cannot be attended", status)


def _refusal(fact: str, status: Status) -> KvlatheError:
    return KvlatheError(fact, status.message.decode(), "report this")
