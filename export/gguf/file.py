"""GgufFile: the header of a GGUF file, and its tensors as mapped bytes.

The form is that of ggml (docs/gguf.md there), versions 2 and 3: metadata as names and
values, a table of tensors, then their data. It holds numbers and text, and nothing that
could run. The header is read here, because the gguf package makes an array of every
token: 8 s and 0.5 GB for a vocabulary of 152,000, where this takes 0.3 s.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvlathe.base.errors import KvlatheError
from kvlathe.base.extras import require
from kvlathe.base.lfs_pointers import refuse_pointer

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
"""Type of a value -> numpy's name of it."""
TEXT, ARRAY = 8, 9
READ = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
)
"""Types of tensors that are read."""
DOWNLOAD = "download the file again"

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """``shape`` in torch's order; ``kind``: ggml's name of its type; ``start``: of its
    bytes in the file. ``row_bytes``: of one row, the last dimension."""

    name: str
    shape: tuple[int, ...]
    kind: str
    start: int
    row_bytes: int

    @property
    def rows(self) -> int:
        return prod(self.shape[:-1])

    @property
    def size(self) -> int:
        """In bytes."""
        return self.rows * self.row_bytes


class GgufFile:
    """A GGUF file: ``metadata`` by name, ``tensors`` by ggml's name.

    Opening it reads the header. Raises KvlatheError for a file that is no GGUF, is
    damaged or one part of several, and for types of tensors that are not read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        refuse_pointer(path)
        try:
            with path.open("rb") as stream:
                self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # an empty file cannot be mapped
            raise KvlatheError(
                f"{path} cannot be read", str(error), DOWNLOAD
            ) from error
        try:
            header = _Header(self._map)
            self.metadata: Mapping[str, object] = header.metadata
            table = header.table()
        except _NotGguf as error:
            raise KvlatheError(
                f"{path} cannot be read",
                str(error),
                "give a GGUF file of version 2 or 3",
            ) from error
        except (struct.error, ValueError, KeyError, TypeError) as error:
            raise self._damaged(str(error)) from error
        self._check_whole()
        self.tensors = {one.name: one for one in self._placed(table, header.place)}

    @property
    def architecture(self) -> str:
        """ggml's name of the model's kind; empty where the file names none."""
        return str(self.metadata.get("general.architecture", ""))

    def rows_of(self, tensor: StoredTensor) -> Bytes:
        """[rows, bytes of a row]: a view of the mapped file."""
        flat = np.frombuffer(self._map, np.uint8, tensor.size, tensor.start)
        return flat.reshape(tensor.rows, tensor.row_bytes)

    def forget(self) -> None:
        """Let go of the memory of what was read: the file and the system's cache of it
        stay."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def _check_whole(self) -> None:
        parts = self.metadata.get("split.count", 0)
        if isinstance(parts, int) and parts > 1:
            raise KvlatheError(
                f"{self.path} is one of {parts} parts",
                "a model is read from one file",
                "join them with llama-gguf-split --merge",
            )

    def _placed(
        self, table: list[tuple[str, tuple[int, ...], int, int]], place: int
    ) -> list[StoredTensor]:
        """The tensors of a table that ends at ``place``."""
        step = self.metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(step, int) or step < 1:
            raise self._damaged(f"general.alignment is {step!r}")
        data = -(-place // step) * step
        placed: list[StoredTensor] = []
        for name, shape, kind, offset in table:
            known, block, size = _type(kind)
            if known not in READ:
                raise KvlatheError(
                    f"{self.path.name} stores {name} as {known}",
                    f"the types that are read are {', '.join(READ)}",
                    "give a file in one of them",
                )
            if not shape or shape[-1] % block:
                raise self._damaged(f"{name} has shape {list(shape)} in {known}")
            row = shape[-1] // block * size
            one = StoredTensor(name, shape, known, data + offset, row)
            if one.start + one.size > len(self._map):
                raise self._damaged(f"{name} ends behind the file")
            placed.append(one)
        return placed

    def _damaged(self, why: str) -> KvlatheError:
        return KvlatheError(
            f"{self.path} cannot be read",
            f"it is truncated or damaged ({why})",
            DOWNLOAD,
        )


class _NotGguf(Exception): ...


class _Header:
    """Reads a header from its start; ``place``: of the next byte."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self.place = data, len(MAGIC)
        if data[: self.place] != MAGIC:
            raise _NotGguf("it does not begin as a GGUF file")
        version = self._count("<u4")
        if version not in VERSIONS:
            raise _NotGguf(
                f"it is a GGUF file of version {version}, or of another byte order"
            )
        self._tensors, pairs = self._count("<u8"), self._count("<u8")
        self.metadata: dict[str, object] = {}
        for _ in range(pairs):
            name = self._text()
            self.metadata[name] = self._value(self._count("<u4"))

    def table(self) -> list[tuple[str, tuple[int, ...], int, int]]:
        """(name, shape, type, offset) of every tensor."""
        return [self._tensor() for _ in range(self._tensors)]

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text()
        dims = [self._count("<u8") for _ in range(self._count("<u4"))]
        return name, tuple(reversed(dims)), self._count("<u4"), self._count("<u8")

    def _bytes(self, count: int) -> bytes:
        found = self._data[self.place : self.place + count]
        if len(found) < count:
            raise ValueError("the header ends early")
        self.place += count
        return found

    def _numbers(self, form: str, count: int) -> list[object]:
        kind = np.dtype(form)
        return np.frombuffer(self._bytes(count * kind.itemsize), kind).tolist()

    def _count(self, form: str) -> int:
        (number,) = self._numbers(form, 1)
        assert isinstance(number, int)
        return number

    def _text(self) -> str:
        (count,) = struct.unpack_from("<Q", self._data, self.place)  # 150,000 of them
        self.place += 8
        return self._bytes(count).decode("utf-8", "surrogateescape")

    def _value(self, kind: int) -> object:
        if kind == TEXT:
            return self._text()
        if kind != ARRAY:
            return self._numbers(SCALARS[kind], 1)[0]
        inner, count = self._count("<u4"), self._count("<u8")
        if inner in SCALARS:
            return self._numbers(SCALARS[inner], count)
        return [self._value(inner) for _ in range(count)]


def _type(kind: int) -> tuple[str, int, int]:
    """Name, elements and bytes of a block of ggml's type ``kind``."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        known = GGMLQuantizationType(kind)
    except ValueError:
        return f"type {kind}", 1, 1
    return (known.name, *GGML_QUANT_SIZES[known])


def require_library() -> None:
    """Raise KvlatheError where the gguf package is not installed."""
    require("GGUF files cannot be read here", "export", "gguf")
