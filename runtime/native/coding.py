"""The calls of coding.h, by ctypes: bytes in fewer bytes, bit-exact (docs/cold_pages.md)."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_int32,
    c_int64,
    c_uint32,
    c_void_p,
)
from dataclasses import dataclass
from threading import local

import numpy as np
import numpy.typing as npt

from kvlathe.base.errors import KvlatheError
from kvlathe.runtime.native.library import ABI_VERSION, Native, Status, find

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Matrix:
    """Columns of numbers: row r of column c is at byte ``at + r * row_stride + c *
    column_stride``."""

    at: int
    columns: int
    row_stride: int
    column_stride: int


@dataclass(frozen=True, slots=True)
class Part:
    """Numbers of one kind, of ``rows`` rows and ``width`` bytes (1, 2 or 4). Byte i of
    all of them is a plane. ``turn``: bits that a number is turned left before, so that
    its exponent fills a byte (0; 1 for bfloat16 and float32)."""

    rows: int
    width: int
    turn: int
    matrices: tuple[Matrix, ...]

    @property
    def columns(self) -> int:
        return sum(matrix.columns for matrix in self.matrices)

    @property
    def bytes(self) -> int:
        return self.rows * self.columns * self.width


class CodedMatrix(Structure):
    """kvlathe_coded_matrix of coding.h."""

    _fields_ = [
        (name, c_int64) for name in ("at", "columns", "row_stride", "column_stride")
    ]


class CodedPart(Structure):
    """kvlathe_coded_part of coding.h."""

    _fields_ = [
        *((name, c_int32) for name in ("rows", "width", "turn", "matrices")),
        ("matrix", POINTER(CodedMatrix)),
    ]


class CodedPage(Structure):
    """kvlathe_coded_page of coding.h."""

    _fields_ = [
        ("abi_version", c_uint32),
        ("parts", c_int32),
        ("part", POINTER(CodedPart)),
        ("bytes", c_int64),
    ]


def coding_library() -> Native:
    """The native library, where it codes pages. Raises KvlatheError where there is
    none, or an older one."""
    found = find()
    if found.native is None:
        raise KvlatheError(
            "cold pages cannot be coded",
            found.reason,
            "build the native library: kvlathe native",
        )
    if not hasattr(found.native.lib, "kvlathe_encode_page"):
        raise KvlatheError(
            "cold pages cannot be coded",
            f"{found.native.path} is of an older kvlathe",
            "build it again: kvlathe native",
        )
    return found.native


class Coder:
    """Codes pages of ``size`` bytes that ``parts`` divide: every byte is in one of
    them."""

    def __init__(self, native: Native, parts: Sequence[Part], size: int) -> None:
        self.size = size
        self._own = local()
        self._lib = native.lib
        form, data = POINTER(CodedPage), c_char_p
        self._lib.kvlathe_coded_bound.argtypes = [form, POINTER(Status)]
        self._lib.kvlathe_coded_bound.restype = c_int64
        self._lib.kvlathe_encode_page.argtypes = [
            form, c_void_p, c_void_p, c_int64, POINTER(c_int64), POINTER(Status)
        ]  # fmt: skip
        self._lib.kvlathe_decode_page.argtypes = [
            form, data, c_int64, c_void_p, POINTER(Status)
        ]  # fmt: skip
        rows = (CodedPart * len(parts))()
        for row, part in zip(rows, parts, strict=True):
            matrices = (CodedMatrix * len(part.matrices))()
            for matrix, of in zip(matrices, part.matrices, strict=True):
                matrix.at = of.at
                matrix.columns = of.columns
                matrix.row_stride = of.row_stride
                matrix.column_stride = of.column_stride
            row.rows = part.rows
            row.width = part.width
            row.turn = part.turn
            row.matrices = len(part.matrices)
            row.matrix = matrices
        self._form = CodedPage(ABI_VERSION, len(parts), rows, size)
        status = Status()
        self.bound = self._lib.kvlathe_coded_bound(byref(self._form), byref(status))
        if self.bound < 0:
            raise KvlatheError(
                "pages of this form cannot be coded",
                status.message.decode(),
                "report this",
            )

    def encode(self, page: Bytes) -> bytes:
        """The bytes [size] of a page in fewer, mostly."""
        out = self._scratch("out", self.bound)
        written = c_int64()
        status = Status()
        if self._lib.kvlathe_encode_page(
            byref(self._form), page.ctypes.data, out.ctypes.data, out.size,
            byref(written), byref(status),
        ):  # fmt: skip
            raise KvlatheError(
                "a page cannot be coded", status.message.decode(), "report this"
            )
        return out[: written.value].tobytes()

    def decode(self, data: bytes) -> bytes:
        """The bytes of the page again. Raises KvlatheError for data that cannot be a
        page's."""
        page = self._scratch("page", self.size)
        status = Status()
        if self._lib.kvlathe_decode_page(
            byref(self._form), data, len(data), page.ctypes.data, byref(status)
        ):
            raise KvlatheError(
                "a cold page cannot be read",
                status.message.decode(),
                "compute the sequence again",
            )
        return page.tobytes()

    def _scratch(self, name: str, size: int) -> Bytes:
        """Memory of this thread, the same in every call: the system clears what is
        new."""
        if not hasattr(self._own, name):
            setattr(self._own, name, np.empty(size, np.uint8))
        return getattr(self._own, name)
