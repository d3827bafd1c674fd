"""The CPU entries of libkvlathe.so that change pages (cpu.h), by ctypes."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_double,
    c_int32,
    c_int64,
    c_uint32,
    c_void_p,
    pointer,
)

import numpy as np
import numpy.typing as npt

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.codec import Bytes, Positions
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.native.library import ABI_VERSION, Native, Status
from kvlathe.runtime.native.parts import Part, part_of

Table = npt.NDArray[np.uint8]
SealedPage = tuple[Bytes, Bytes, Sequence[Positions]]
"""The bytes of a full page, those of the page it is written to, and each lane's
positions."""


class SealPage(Structure):
    """kvlathe_cpu_seal_page of cpu.h."""

    _fields_ = [(name, c_void_p) for name in ("source", "target", "positions")]


class SealArgs(Structure):
    """kvlathe_cpu_seal_args of cpu.h."""

    _fields_ = [
        ("abi_version", c_uint32),
        *((name, c_int32) for name in ("page_tokens", "isa", "threads")),
        *((name, POINTER(Part)) for name in ("source", "target")),
        ("pages", POINTER(SealPage)),
        ("page_count", c_int64),
        *((name, c_double) for name in ("span_k", "span_v")),
        *((name, c_int32) for name in ("sums", "stochastic")),
        ("seed", c_int64),
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


class PageWriter:
    """Writes whole pages of a plan natively, the bytes that
    runtime/sessions/host/pages.py writes."""

    def __init__(
        self, native: Native, plan: CompressionPlan, threads: int = 1, isa: int = 0
    ) -> None:
        """``threads``: to start for a call. ``isa``: kvlathe_isa of cpu.h; 0: the
        best."""
        self.native = native
        self.plan = plan
        self.threads = threads
        self.isa = isa
        lib = native.lib
        lib.kvlathe_cpu_seal.argtypes = [POINTER(SealArgs), POINTER(Status)]
        lib.kvlathe_cpu_move.argtypes = [POINTER(MoveArgs), POINTER(Status)]
        layout = CacheLayout(plan)
        self._tables = [layout.lane_table(b) for b in range(len(layout.page_stride))]
        self._parts = [
            part_of(layout, b, table) for b, table in enumerate(self._tables)
        ]

    def seal(self, fresh: int, cold: int, pages: Sequence[SealedPage]) -> None:
        """Quantize ``pages`` of bucket ``fresh`` into pages of bucket ``cold``: every
        lane of ``cold``, the bytes that HostPages.encode writes."""
        tier = self.plan.index.buckets[cold].tier
        stochastic = tier.rounding == "stochastic"
        nothing = np.zeros((1, 1), np.uint32)
        places = [self._places(page[2]) if stochastic else nothing for page in pages]
        rows = (SealPage * len(pages))()
        for row, (source, target, _), place in zip(rows, pages, places, strict=True):
            row.source = source.ctypes.data
            row.target = target.ctypes.data
            row.positions = place.ctypes.data
        parts = (pointer(self._parts[fresh]), pointer(self._parts[cold]))
        sizes = (self.plan.page_tokens, self.isa, self.threads)
        args = SealArgs(ABI_VERSION, *sizes, *parts, rows, len(pages))
        args.span_k = tier.k.span
        args.span_v = tier.v.span
        args.sums = tier.sums
        args.stochastic = stochastic
        args.seed = self.plan.seed
        args.positions_stride = self.plan.page_tokens
        status = Status()
        if self.native.lib.kvlathe_cpu_seal(byref(args), byref(status)):
            raise KvlatheError(
                "a page cannot be sealed", status.message.decode(), "report this"
            )

    def _places(self, positions: Sequence[Positions]) -> npt.NDArray[np.uint32]:
        """Places of every lane's tokens in their sequence, modulo 2^32 [lanes, P]."""
        count = np.arange(self.plan.page_tokens)
        of_lanes = [
            at.astype(np.int64) if isinstance(at, np.ndarray) else at + count
            for at in positions
        ]
        return (np.array(of_lanes, np.int64) & 0xFFFFFFFF).astype(np.uint32)

    def move(
        self,
        fields: npt.NDArray[np.int64],
        source: Table,
        pages: Sequence[int],
        target: Table,
        target_pages: Sequence[int],
        places: npt.NDArray[np.int64],
    ) -> None:
        """Copy the tokens ``places`` [lanes, n] of ``pages`` of ``source`` [page id,
        bytes of a page] into ``target_pages`` of ``target``. ``fields`` [lanes, fields,
        2]: offset and bytes a token of what moves."""
        lists = [
            np.ascontiguousarray(x, np.int64)
            for x in (fields, pages, target_pages, places)
        ]
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
            raise KvlatheError(
                "tokens cannot be moved", status.message.decode(), "report this"
            )
