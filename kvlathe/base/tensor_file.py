"""Safetensors files, read by numpy alone: a header of JSON, then numbers.

The form is https://huggingface.co/docs/safetensors; the header is believed in nothing
that the file does not hold.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt

from kvlathe.base.errors import KvlatheError
from kvlathe.base.lfs_pointers import refuse_pointer

DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
"""Number formats that are read, as numpy has them; BF16 is the upper half of F32."""
MOST_HEADER = 100 << 20
"""Bytes: the format's own bound."""
NO_HEADER = (TypeError, AttributeError, RecursionError)
"""Errors of a header that is JSON of another form."""
PREFIX = 8
"""Bytes before the header, which say its length."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a file: ``start`` in bytes, from the file's beginning."""

    dtype: str
    shape: tuple[int, ...]
    start: int


class ArrayFile:
    """The tensors in ``path``, and the SHA-256 ``digest`` of it. Opening reads all of
    it, once: what becomes of the file later changes nothing. Raises KvlatheError for a
    file that is truncated or damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        refuse_pointer(path)
        try:
            data = path.read_bytes()
            self._bytes = np.frombuffer(data, np.uint8)
            self.entries = self._read_header()
        except (OSError, ValueError, LookupError, *NO_HEADER) as error:
            raise KvlatheError(
                f"{path} cannot be read",
                f"it is truncated or damaged ({error})",
                "download or save it again",
            ) from error
        self.digest = hashlib.sha256(data).hexdigest()

    def _read_header(self) -> dict[str, Entry]:
        size = int(self._bytes[:PREFIX].view("<u8")[0])
        first = PREFIX + size
        if size > MOST_HEADER or first > len(self._bytes):
            raise ValueError("its header is longer than the file")
        said = cast(
            "dict[str, dict[str, object]]",
            json.loads(self._bytes[PREFIX:first].tobytes()),
        )
        return {
            name: self._entry(name, one, PREFIX + size)
            for name, one in said.items()
            if name != "__metadata__"
        }

    def _entry(self, name: str, said: dict[str, object], first: int) -> Entry:
        begin, end = cast("list[int]", said["data_offsets"])
        shape = tuple(cast("list[int]", said["shape"]))
        if not all(type(x) is int and x >= 0 for x in (begin, end, *shape)):
            raise ValueError(f"{name} has a size that is none")
        entry = Entry(str(said["dtype"]), shape, first + begin)
        known = DTYPES.get(entry.dtype)
        wanted = math.prod(shape) * np.dtype(known).itemsize if known else end - begin
        if end - begin != wanted or first + end > len(self._bytes):
            raise ValueError(f"{name} does not have the bytes that it says")
        return entry

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """A copy in float32. Raises KvlatheError for NaN and infinite numbers."""
        entry = self.entries[name]
        kind = np.dtype(DTYPES[entry.dtype])
        end = entry.start + math.prod(entry.shape) * kind.itemsize
        stored = np.array(self._bytes[entry.start : end]).view(kind)
        if entry.dtype == "BF16":
            stored = (stored.astype(np.uint32) << 16).view(np.float32)
        found = stored.reshape(entry.shape).astype(np.float32)
        if not np.isfinite(found).all():
            raise KvlatheError(
                f"the tensor {name} holds NaN or infinite numbers",
                "no sound result comes of it",
                "download or save it again",
            )
        return found
