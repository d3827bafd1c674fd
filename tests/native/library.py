"""ctypes view of plugins_cpp/include/kvlathe/abi.h, and a way to build the library for
the tests."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_char,
    c_float,
    c_int32,
    c_int64,
    c_uint32,
    c_void_p,
)
from pathlib import Path

from kvlathe.runtime.native.library import ABI_VERSION as ABI_VERSION

F32, F16, BF16 = 0, 1, 2
OVERLAP, APPENDED = 1, 2
OK, BAD_VERSION, BAD_ARGUMENT, MISALIGNED, TOO_SMALL, UNSUPPORTED, DEVICE_ERROR = range(
    7
)
ROOT = Path(__file__).resolve().parents[2]


class Status(Structure):
    _fields_ = [("code", c_int32), ("message", c_char * 508)]


class Part(Structure):
    _fields_ = [
        *(
            (name, c_int32)
            for name in ("bits_k", "bits_v", "axis_k", "axis_v", "group_k", "group_v")
        ),
        ("lane_count", c_int32),
        ("page_table_stride", c_int32),
        ("lanes", c_void_p),
        ("page_stride", c_int64),
        ("page_table", c_void_p),
        ("lengths", c_void_p),
        ("lengths_stride", c_int64),
        ("hidden", c_void_p),
        ("hidden_stride", c_int64),
    ]


class AttendDecodeArgs(Structure):
    _fields_ = [
        ("abi_version", c_uint32),
        *(
            (name, c_int32)
            for name in ("element", "batch", "group_size", "page_tokens", "part_count")
        ),
        ("scale", c_float),
        ("flags", c_int32),
        ("parts", POINTER(Part)),
        ("pool", c_void_p),
        ("pool_bytes", c_int64),
        ("q", c_void_p),
        ("q_stride", c_int64),
        ("o", c_void_p),
        ("o_stride", c_int64),
        ("workspace", c_void_p),
        ("workspace_bytes", c_int64),
        ("stream", c_void_p),
        ("prompts", c_void_p),
        ("plan", c_void_p),
        ("plan_bytes", c_int64),
        ("sinks", c_void_p),
        ("softcap", c_float),
        ("reserved", c_int32),
    ]


class NativeError(Exception):
    def __init__(self, code: int, message: str) -> None:
        self.code = code
        super().__init__(message)


class Library:
    """libkvlathe.so; a refusal of the library becomes NativeError."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.lib = ctypes.CDLL(str(path))
        self.lib.kvlathe_abi_version.restype = c_uint32
        for entry in (
            self.lib.kvlathe_cpu_attend_decode,
            self.lib.kvlathe_cuda_attend_decode,
        ):
            entry.argtypes = [POINTER(AttendDecodeArgs), POINTER(Status)]
        self.lib.kvlathe_cuda_plan.argtypes = [
            POINTER(AttendDecodeArgs),
            c_int32,
            POINTER(Status),
        ]
        self.lib.kvlathe_cuda_plan_bytes.argtypes = [POINTER(c_int64), POINTER(Status)]
        self.lib.kvlathe_cuda_workspace_bytes.argtypes = [
            c_int32,
            c_int32,
            POINTER(c_int64),
            POINTER(Status),
        ]

    @property
    def has_cuda(self) -> bool:
        return bool(self.lib.kvlathe_has_cuda())

    @staticmethod
    def _checked(code: int, status: Status) -> None:
        if code != OK:
            raise NativeError(code, status.message.decode())

    def attend_decode(self, args: AttendDecodeArgs, device: str = "cpu") -> None:
        """``device``: cpu or cuda."""
        status = Status()
        entry = (
            self.lib.kvlathe_cuda_attend_decode
            if device == "cuda"
            else self.lib.kvlathe_cpu_attend_decode
        )
        self._checked(entry(byref(args), byref(status)), status)

    def plan(self, calls: Sequence[AttendDecodeArgs]) -> None:
        """Plans calls of one step, each with memory for its plan."""
        status = Status()
        array = (AttendDecodeArgs * len(calls))(*calls)
        self._checked(
            self.lib.kvlathe_cuda_plan(array, len(calls), byref(status)), status
        )

    def plan_bytes(self) -> int:
        status, size = Status(), c_int64()
        self._checked(
            self.lib.kvlathe_cuda_plan_bytes(byref(size), byref(status)), status
        )
        return size.value

    def workspace_bytes(self, batch: int, heads: int) -> int:
        status, size = Status(), c_int64()
        self._checked(
            self.lib.kvlathe_cuda_workspace_bytes(
                batch, heads, byref(size), byref(status)
            ),
            status,
        )
        return size.value
