"""The native library libkvlathe.so: where it is, whether it may be used, and why not. Everything also runs without it.

Looked for: the file KVLATHE_LIBRARY, beside this package, and in a checkout's build/native. KVLATHE_NATIVE=0: not used.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, Structure, byref, c_char, c_int32, c_int64, c_uint32, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

import kvlathe
from kvlathe.errors import KvlatheError
from kvlathe.export.layout import CacheLayout
from kvlathe.export.plan import CompressionPlan

ABI_VERSION = 2
LIBRARY = "libkvlathe.so"


class Status(Structure):
    _fields_ = [("code", c_int32), ("message", c_char * 508)]


class Part(Structure):
    """kvlathe_part of abi.h."""

    _fields_ = [
        *((name, c_int32) for name in ("bits_k", "bits_v", "axis_k", "axis_v", "group_k", "group_v")),
        ("lane_count", c_int32),
        ("page_table_stride", c_int32),
        ("lanes", c_void_p),
        ("page_stride", c_int64),
        *((name, c_void_p) for name in ("page_table", "lengths")),
        ("lengths_stride", c_int64),
    ]


class SealArgs(Structure):
    """kvlathe_seal_args of cpu.h."""

    _fields_ = [
        ("abi_version", c_uint32),
        *((name, c_int32) for name in ("page_tokens", "isa", "threads")),
        *((name, POINTER(Part)) for name in ("source", "target")),
        *((name, c_void_p) for name in ("source_page", "target_page")),
    ]


@dataclass(frozen=True)
class Native:
    """A loaded library. ``isa``: the instruction set that its CPU kernels use here; ``cuda``: it holds CUDA kernels."""

    path: Path
    lib: ctypes.CDLL
    isa: str
    cuda: bool

    @classmethod
    def load(cls, path: Path) -> Native:
        """Raises KvlatheError for a file that is no such library or has another ABI."""
        try:
            lib = ctypes.CDLL(str(path))
            lib.kvlathe_abi_version.restype = c_uint32
            lib.kvlathe_cpu_isa.restype = ctypes.c_char_p
            lib.kvlathe_cpu_seal.argtypes = [POINTER(SealArgs), POINTER(Status)]
            found = lib.kvlathe_abi_version()
        except (OSError, AttributeError) as error:
            raise KvlatheError(f"{path} cannot be loaded", str(error), "build it again: kvlathe native") from error
        if found != ABI_VERSION:
            fact, reason = f"{path} has ABI version {found}", f"this kvlathe speaks {ABI_VERSION}"
            raise KvlatheError(fact, reason, "build it again: kvlathe native")
        return cls(path, lib, lib.kvlathe_cpu_isa().decode(), bool(lib.kvlathe_has_cuda()))


@dataclass(frozen=True)
class Found:
    """``native`` or, in words, why there is none."""

    native: Native | None
    reason: str = ""


@cache
def find() -> Found:
    """The library of this process. A broken or outdated one counts as none, and the reason says so."""
    if os.environ.get("KVLATHE_NATIVE") == "0":
        return Found(None, "KVLATHE_NATIVE=0 turns it off")
    package = Path(kvlathe.__file__).parent
    chosen = os.environ.get("KVLATHE_LIBRARY")
    places = [Path(chosen)] if chosen else [package / LIBRARY, package.parent / "build" / "native" / LIBRARY]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        return Found(
            None, f"no {LIBRARY} in {' or '.join(str(place.parent) for place in places)}; kvlathe native builds it"
        )
    try:
        return Found(Native.load(path))
    except KvlatheError as error:
        return Found(None, str(error))


class Sealer:
    """Seals full pages of a plan natively, on the calling thread (a page takes well under a millisecond)."""

    def __init__(self, native: Native, plan: CompressionPlan) -> None:
        self.native, self.plan = native, plan
        layout = CacheLayout(plan)
        self._tables = [layout.lane_table(b) for b in range(len(plan.buckets))]
        self._parts = [self._part(layout, b) for b in range(len(plan.buckets))]

    def _part(self, layout: CacheLayout, bucket: int) -> Part:
        tier, table = self.plan.tiers[self.plan.buckets[bucket].tier], self._tables[bucket]
        axes = (int(tier.axis_k == "token"), int(tier.axis_v == "token"))
        sizes = (tier.bits_k, tier.bits_v, *axes, tier.group_k, tier.group_v, len(table), 0)
        return Part(*sizes, table.ctypes.data, layout.page_stride[bucket], None, None, 0)

    def seal(self, fresh: int, source: npt.NDArray[np.uint8], cold: int, target: npt.NDArray[np.uint8]) -> None:
        """Write the lanes of bucket ``cold`` from page ``source`` of bucket ``fresh`` into page ``target`` (bytes)."""
        parts = (ctypes.pointer(self._parts[fresh]), ctypes.pointer(self._parts[cold]))
        args = SealArgs(ABI_VERSION, self.plan.page_tokens, 0, 1, *parts, source.ctypes.data, target.ctypes.data)
        status = Status()
        if self.native.lib.kvlathe_cpu_seal(byref(args), byref(status)):
            raise KvlatheError("a page cannot be sealed", status.message.decode(), "report this")
