"""The CUDA entries of libkvlathe.so (abi.h, cache.h, rows.h, products.h) by ctypes;
pointers are device addresses. No torch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_double,
    c_float,
    c_int32,
    c_int64,
    c_uint32,
    c_void_p,
)
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.layer_table import layer_table
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.native.library import ABI_VERSION, Native, Status, find
from kvlathe.runtime.native.parts import Part, WindowForm, part_of, window_among
from kvlathe.runtime.native.products import ProductArgs

F16, BF16 = 1, 2
OVERLAP, APPENDED, BUNDLES = 1, 2, 4
MAX_BUNDLE = 8
"""Rows of one sequence that attention takes together, at most (abi.h)."""
LEAST_CHUNK = 16
"""New tokens of a sequence from which its rows are a prompt chunk, attended in tiles
(cache.h)."""


def _ints(*names: str) -> list[tuple[str, type]]:
    return [(name, c_int32) for name in names]


def _pointers(*names: str) -> list[tuple[str, type]]:
    return [(name, c_void_p) for name in names]


class PromptPart(Structure):
    """kvlathe_prompt_part of abi.h."""

    _fields_ = [
        *_pointers("page_table", "lengths"),
        ("lengths_stride", c_int64),
        *_ints("page_table_stride", "fresh"),
        ("window", WindowForm),
        *_ints("reserved"),
    ]


class Prompts(Structure):
    """kvlathe_prompts of abi.h."""

    _fields_ = [
        *_pointers("list", "cu_seqlens_q"),
        *_ints("batch", "rows"),
        ("parts", POINTER(PromptPart)),
        ("copies", c_void_p),
        ("copies_bytes", c_int64),
        ("copies_of", c_void_p),
    ]


class AttendDecodeArgs(Structure):
    """kvlathe_attend_decode_args of abi.h."""

    _fields_ = [
        ("abi_version", c_uint32),
        *_ints("element", "batch", "group_size", "page_tokens", "part_count"),
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
        ("prompts", POINTER(Prompts)),
        ("plan", c_void_p),
        ("plan_bytes", c_int64),
        ("sinks", c_void_p),
        ("softcap", c_float),
        ("reserved", c_int32),
    ]


class SpreadArgs(Structure):
    """kvlathe_spread_args of cache.h."""

    _fields_ = [
        ("abi_version", c_uint32),
        *_ints("tokens", "batch", "buckets"),
        ("fresh", c_uint32),
        *_pointers(
            "cu_seqlens_q",
            "lengths",
            "page_tables",
            "page_table_widths",
            "sequence_of",
            "visible",
        ),
        *_pointers("spread_tables", "stream"),
        *_ints("group_size", "page_tokens"),
        *_pointers("row_lengths", "prompts", "windows", "hidden", "part_buckets"),
        *_ints("parts", "most_bundled"),
    ]


class AppendArgs(Structure):
    """kvlathe_append_args of cache.h."""

    _fields_ = [
        ("abi_version", c_uint32),
        *_ints("element", "tokens", "reserved"),
        *_pointers("q", "k", "v"),
        *((name, c_int64) for name in ("q_stride", "k_stride", "v_stride")),
        *_pointers(
            "cos",
            "sin",
            "sequence_of",
            "visible",
            "page_tables",
            "page_table_widths",
            "layout",
        ),
        *_pointers("proj_q", "proj_k", "centre_k", "pool"),
        ("pool_bytes", c_int64),
        ("q_out", c_void_p),
        ("q_out_stride", c_int64),
        *_pointers("rows", "stream"),
    ]


class SealPage(Structure):
    """kvlathe_cuda_seal_page of cache.h."""

    _fields_ = _ints("source", "target", "position")


class SealArgs(Structure):
    """kvlathe_cuda_seal_args of cache.h."""

    _fields_ = [
        ("abi_version", c_uint32),
        *_ints("element", "page_tokens", "stochastic"),
        ("seed", c_int64),
        ("source", POINTER(Part)),
        ("target", POINTER(Part)),
        ("pages", POINTER(SealPage)),
        *_ints("page_count", "reserved"),
        *((name, c_double) for name in ("span_k", "span_v")),
        ("pool", c_void_p),
        ("pool_bytes", c_int64),
        ("stream", c_void_p),
    ]


class RowsArgs(Structure):
    """kvlathe_rows_args of rows.h."""

    _fields_ = [
        ("abi_version", c_uint32),
        *_ints("element", "rows", "columns"),
        ("eps", c_float),
        ("heads", c_int32),
        ("x", c_void_p),
        ("x_stride", c_int64),
        *_pointers("weight", "out", "stream"),
    ]


class CudaLibrary:
    """The library's CUDA calls; a refusal becomes KvlatheError with its words."""

    def __init__(self, native: Native) -> None:
        """Raises KvlatheError if the library was built without CUDA."""
        self.path, lib = native.path, native.lib
        if not lib.kvlathe_has_cuda():
            raise KvlatheError(
                f"{native.path} holds no CUDA kernels",
                "it was built without nvcc",
                "build it again: kvlathe native --cuda",
            )
        lib.kvlathe_layer_create.argtypes = [
            c_void_p,
            c_int64,
            POINTER(c_void_p),
            POINTER(Status),
        ]
        lib.kvlathe_layer_destroy.argtypes, lib.kvlathe_layer_destroy.restype = (
            [c_void_p],
            None,
        )
        lib.kvlathe_cuda_attend_decode.argtypes = [
            POINTER(AttendDecodeArgs),
            POINTER(Status),
        ]
        lib.kvlathe_cuda_plan.argtypes = [
            POINTER(AttendDecodeArgs),
            c_int32,
            POINTER(Status),
        ]
        lib.kvlathe_cuda_plan_bytes.argtypes = [POINTER(c_int64), POINTER(Status)]
        lib.kvlathe_cuda_spread.argtypes = [POINTER(SpreadArgs), POINTER(Status)]
        lib.kvlathe_cuda_append.argtypes = [
            c_void_p,
            POINTER(AppendArgs),
            POINTER(Status),
        ]
        lib.kvlathe_cuda_seal.argtypes = [POINTER(SealArgs), POINTER(Status)]
        lib.kvlathe_cuda_rms_norm.argtypes = [POINTER(RowsArgs), POINTER(Status)]
        lib.kvlathe_cuda_norm_heads.argtypes = [POINTER(RowsArgs), POINTER(Status)]
        lib.kvlathe_cuda_silu_product.argtypes = [POINTER(RowsArgs), POINTER(Status)]
        lib.kvlathe_cuda_fp8_rows.argtypes = [POINTER(RowsArgs), POINTER(Status)]
        lib.kvlathe_cuda_product.argtypes = [POINTER(ProductArgs), POINTER(Status)]
        lib.kvlathe_cuda_widen.argtypes = [POINTER(ProductArgs), POINTER(Status)]
        lib.kvlathe_cuda_workspace_bytes.argtypes = [
            c_int32,
            c_int32,
            POINTER(c_int64),
            POINTER(Status),
        ]
        lib.kvlathe_cuda_prompt_list_bytes.argtypes = [c_int32, c_int32, c_int32]
        lib.kvlathe_cuda_prompt_list_bytes.restype = c_int64
        self.lib = lib

    def call(self, name: str, *arguments: object) -> None:
        """``kvlathe_<name>`` with ``arguments`` and a status."""
        status = Status()
        entry = getattr(self.lib, f"kvlathe_{name}", None)
        if entry is None:
            raise KvlatheError(
                f"{self.path} has no {name}",
                "it was built from older sources",
                "build it again: kvlathe native --cuda",
            )
        if entry(*arguments, byref(status)):
            raise KvlatheError(
                f"{name} cannot run", status.message.decode(), "report this"
            )

    def workspace_bytes(self, batch: int, heads: int) -> int:
        size = c_int64()
        self.call("cuda_workspace_bytes", batch, heads, byref(size))
        return size.value

    def plan_bytes(self) -> int:
        size = c_int64()
        self.call("cuda_plan_bytes", byref(size))
        return size.value


def cuda_library(who: str) -> CudaLibrary:
    """The native library of this process. Raises KvlatheError where ``who`` cannot have
    its CUDA kernels."""
    here = find()
    if here.native is None:
        raise KvlatheError(
            f"{who} needs the native library", here.reason, "kvlathe native --cuda"
        )
    return CudaLibrary(here.native)


@dataclass(frozen=True, eq=False)
class LayerPages:
    """The place of one layer in pages that are not those of a CacheLayout, such as
    blocks of a host. ``table``: its layer table. By bucket: its ``rows`` of the lane
    table, and the ``strides``, bytes from a page to the next."""

    table: npt.NDArray[np.int32]
    rows: Sequence[npt.NDArray[np.int32]]
    strides: Sequence[int]


class LayerForm:
    """One layer of a plan for the library: its handle, and the parts that its attention
    reads."""

    def __init__(
        self,
        library: CudaLibrary,
        layout: CacheLayout,
        layer: int,
        pages: LayerPages | None = None,
    ) -> None:
        """``pages``: None for those of ``layout``."""
        plan = layout.plan
        self.library, self.handle = library, c_void_p()
        table = layer_table(layout, layer) if pages is None else pages.table
        library.call("layer_create", table.ctypes.data, table.size, byref(self.handle))
        lanes, group = plan.index.active(layer), plan.model.group(layer)
        self.heads, self.group = len(lanes), group
        self.queries = group * sum(lane.rank_k for lane in lanes)
        self.out = group * sum(lane.rank_v for lane in lanes)
        self.fresh = [int(bucket.is_hot) for bucket in plan.index.buckets]
        own = layer_tables(layout, layer)
        self.places = list(own)
        """Numbers of its parts among those of the plan."""
        own_parts = [plan.index.parts[i] for i in self.places]
        self.buckets = [part.bucket for part in own_parts]
        self.windows = [window_among(part, own_parts) for part in own_parts]
        self._tables = list(own.values())
        if pages is not None:
            # A part has some lanes of its bucket, where these see unlike windows.
            self._tables = [
                pages.rows[b][np.isin(pages.rows[b][:, 1], rows[:, 1])]
                for b, rows in zip(self.buckets, own.values(), strict=True)
            ]
        parts = [
            part_of(layout, b, rows)
            for b, rows in zip(self.buckets, self._tables, strict=True)
        ]
        self.parts = (Part * len(parts))(*parts)
        if pages is not None:
            for part, b in zip(self.parts, self.buckets, strict=True):
                part.page_stride = pages.strides[b]

    def __del__(self) -> None:
        if self.handle:
            self.library.lib.kvlathe_layer_destroy(self.handle)


def layer_tables(layout: CacheLayout, layer: int) -> dict[int, npt.NDArray[np.int32]]:
    """By the place of a part in ``plan.index.parts``: its rows of the lane table that
    are of one layer. Parts without lanes there are left out."""
    plan = layout.plan
    first = plan.index.number(layer, 0)
    found: dict[int, npt.NDArray[np.int32]] = {}
    for i, part in enumerate(plan.index.parts):
        table = layout.lane_table(part.bucket)
        lanes = first + table[:, 1]
        rows = table[(table[:, 0] == layer) & np.isin(lanes, part.lanes)]
        if len(rows):
            found[i] = rows.copy()
    return found


class PageKernels:
    """Seals whole pages of a plan: every lane of every layer in one launch."""

    def __init__(
        self,
        library: CudaLibrary,
        plan: CompressionPlan,
        pool: int,
        pool_bytes: int,
        element: int = F16,
    ) -> None:
        """``pool``: device address of the arena."""
        self.library, self.plan, self.pool, self.pool_bytes, self.element = (
            library,
            plan,
            pool,
            pool_bytes,
            element,
        )
        layout = CacheLayout(plan)
        self._tables = [layout.lane_table(b) for b in range(len(layout.page_stride))]
        self.parts = [part_of(layout, b, table) for b, table in enumerate(self._tables)]

    def seal(
        self, fresh: int, cold: int, pages: Sequence[tuple[int, int, int]], stream: int
    ) -> None:
        """``pages``: (page of ``fresh``, page of ``cold``, position of its first
        token)."""
        jobs = (SealPage * len(pages))(*(SealPage(*page) for page in pages))
        args = self.seal_args(fresh, cold, stream)
        args.pages, args.page_count = jobs, len(pages)
        self.library.call("cuda_seal", byref(args))

    def seal_args(self, fresh: int, cold: int, stream: int) -> SealArgs:
        """Arguments that seal pages of ``fresh`` into ``cold``; no pages yet."""
        tier = self.plan.index.buckets[cold].tier
        args = SealArgs(
            ABI_VERSION,
            self.element,
            self.plan.page_tokens,
            int(tier.rounding == "stochastic"),
            self.plan.seed,
        )
        args.span_k, args.span_v = tier.k.span, tier.v.span
        args.source, args.target = (
            ctypes.pointer(self.parts[fresh]),
            ctypes.pointer(self.parts[cold]),
        )
        args.pool, args.pool_bytes, args.stream = self.pool, self.pool_bytes, stream
        return args
