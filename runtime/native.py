"""The native library libkvlathe.so: where it is, whether it may be used, and why not. Everything also runs without it.

Looked for: the file KVLATHE_LIBRARY, beside this package, and in a checkout's build/native. KVLATHE_NATIVE=0: not used.
KVLATHE_ISA (portable, avx2, avx512, avx512vnni) chooses the CPU kernels' instruction set; by default the best there is.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_char, c_char_p, c_double, c_int32, c_int64, c_uint32, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

import kvlathe
from kvlathe.errors import KvlatheError
from kvlathe.export.layout import CacheLayout
from kvlathe.export.plan import CompressionPlan
from kvlathe.runtime.codec import Bytes, Positions

ABI_VERSION = 5
LIBRARY = "libkvlathe.so"
Table = npt.NDArray[np.uint8]


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
        *((name, c_double) for name in ("span_k", "span_v")),
        *((name, c_int32) for name in ("sums", "stochastic")),
        ("seed", c_int64),
        ("positions", c_void_p),
        ("positions_stride", c_int64),
    ]


class MoveArgs(Structure):
    """kvlathe_move_args of cpu.h."""

    _fields_ = [
        ("abi_version", c_uint32),
        *((name, c_int32) for name in ("page_tokens", "lanes", "fields")),
        ("field", c_void_p),
        ("page_stride", c_int64),
        ("source", c_void_p),
        ("source_bytes", c_int64),
        ("source_pages", c_void_p),
        ("source_count", c_int64),
        ("target", c_void_p),
        ("target_bytes", c_int64),
        ("target_pages", c_void_p),
        ("target_count", c_int64),
        ("places", c_void_p),
        ("kept", c_int64),
        *((name, c_int32) for name in ("threads", "reserved")),
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
            lib.kvlathe_cpu_isa.argtypes, lib.kvlathe_cpu_isa.restype = [POINTER(Status)], c_char_p
            lib.kvlathe_cpu_seal.argtypes = [POINTER(SealArgs), POINTER(Status)]
            lib.kvlathe_cpu_move.argtypes = [POINTER(MoveArgs), POINTER(Status)]
            found = lib.kvlathe_abi_version()
        except (OSError, AttributeError) as error:
            raise KvlatheError(f"{path} cannot be loaded", str(error), "build it again: kvlathe native") from error
        if found != ABI_VERSION:
            fact, reason = f"{path} has ABI version {found}", f"this kvlathe speaks {ABI_VERSION}"
            raise KvlatheError(fact, reason, "build it again: kvlathe native")
        status = Status()
        if not (isa := lib.kvlathe_cpu_isa(byref(status))):
            raise KvlatheError("the native kernels cannot run", status.message.decode(), "unset KVLATHE_ISA")
        return cls(path, lib, isa.decode(), bool(lib.kvlathe_has_cuda()))


@dataclass(frozen=True)
class Found:
    """``native`` or, in words, why there is none."""

    native: Native | None
    reason: str = ""


@cache
def find() -> Found:
    """The library of this process. A broken or outdated one counts as none, and the reason says so.

    Raises KvlatheError where KVLATHE_ISA asks for what this machine lacks.
    """
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
        if os.environ.get("KVLATHE_ISA"):
            raise
        return Found(None, str(error))


class PageWriter:
    """Writes whole pages of a plan natively, the bytes that runtime/host_pages.py writes."""

    def __init__(self, native: Native, plan: CompressionPlan, threads: int = 1, isa: int = 0) -> None:
        self.native, self.plan, self.threads, self.isa = native, plan, threads, isa
        layout = CacheLayout(plan)
        self._tables = [layout.lane_table(b) for b in range(len(plan.buckets))]
        self._parts = [self._part(layout, b) for b in range(len(plan.buckets))]

    def _part(self, layout: CacheLayout, bucket: int) -> Part:
        tier, table = self.plan.tiers[self.plan.buckets[bucket].tier], self._tables[bucket]
        axes = (int(tier.axis_k == "token"), int(tier.axis_v == "token"))
        sizes = (tier.bits_k, tier.bits_v, *axes, tier.group_k, tier.group_v, len(table), 0)
        return Part(*sizes, table.ctypes.data, layout.page_stride[bucket], None, None, 0)

    def seal(self, fresh: int, source: Bytes, cold: int, target: Bytes, positions: Sequence[Positions]) -> None:
        """Write the lanes of bucket ``cold`` from page ``source`` of bucket ``fresh`` into page ``target`` (bytes), as
        HostPages.encode."""
        tier = self.plan.tiers[self.plan.buckets[cold].tier]
        drawn = tier.rounding == "stochastic"
        places = self._places(positions) if drawn else np.zeros((1, 1), np.uint32)
        parts = (ctypes.pointer(self._parts[fresh]), ctypes.pointer(self._parts[cold]))
        sizes = (self.plan.page_tokens, self.isa, self.threads)
        args = SealArgs(ABI_VERSION, *sizes, *parts, source.ctypes.data, target.ctypes.data)
        args.span_k, args.span_v, args.sums, args.stochastic = tier.span_k, tier.span_v, tier.sums, drawn
        args.seed, args.positions, args.positions_stride = self.plan.seed, places.ctypes.data, places.shape[1]
        status = Status()
        if self.native.lib.kvlathe_cpu_seal(byref(args), byref(status)):
            raise KvlatheError("a page cannot be sealed", status.message.decode(), "report this")

    def _places(self, positions: Sequence[Positions]) -> npt.NDArray[np.uint32]:
        """Of every lane's tokens in their sequence, modulo 2^32 [lanes, P]."""
        count = np.arange(self.plan.page_tokens)
        found = [at.astype(np.int64) if isinstance(at, np.ndarray) else at + count for at in positions]
        return (np.array(found, np.int64) & 0xFFFFFFFF).astype(np.uint32)

    def move(
        self,
        fields: npt.NDArray[np.int64],
        source: Table,
        pages: Sequence[int],
        target: Table,
        target_pages: Sequence[int],
        places: npt.NDArray[np.int64],
    ) -> None:
        """Copy the tokens ``places`` [lanes, n] of ``pages`` of ``source`` [page id, bytes of a page] into
        ``target_pages`` of ``target``. ``fields`` [lanes, fields, 2]: offset and bytes a token of what moves."""
        lists = [np.ascontiguousarray(x, np.int64) for x in (fields, pages, target_pages, places)]
        field, from_pages, to_pages, kept = (x.ctypes.data for x in lists)
        lanes, each = fields.shape[:2]
        args = MoveArgs(
            ABI_VERSION, self.plan.page_tokens, lanes, each, field, source.shape[1],
            source.ctypes.data, source.nbytes, from_pages, len(pages),
            target.ctypes.data, target.nbytes, to_pages, len(target_pages),
            kept, places.shape[1], self.threads, 0,
        )  # fmt: skip
        status = Status()
        if self.native.lib.kvlathe_cpu_move(byref(args), byref(status)):
            raise KvlatheError("tokens cannot be moved", status.message.decode(), "report this")
