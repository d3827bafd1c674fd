"""The calls of cache.h that rank tokens on a GPU: observe and move."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_int32, c_int64, c_uint32, c_void_p
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.token_fields import score_fields
from kvlathe.runtime.native.cuda import AttendDecodeArgs, CudaLibrary, LayerForm
from kvlathe.runtime.native.library import ABI_VERSION

Offsets = npt.NDArray[np.int32]


class ObservePart(Structure):
    """kvlathe_observe_part of cache.h."""

    _fields_ = [
        ("page_table", c_void_p),
        ("lengths", c_void_p),
        ("lengths_stride", c_int64),
        ("page_table_stride", c_int32),
        ("fresh", c_int32),
        ("scores", c_void_p),
        ("positions", c_void_p),
    ]


class ObserveArgs(Structure):
    """kvlathe_observe_args of cache.h."""

    _fields_ = [
        ("abi_version", c_uint32),
        *((name, c_int32) for name in ("batch", "tokens", "most_rows")),
        ("call", POINTER(AttendDecodeArgs)),
        ("parts", POINTER(ObservePart)),
        ("cu_seqlens_q", c_void_p),
        ("rows", c_void_p),
        ("row_starts", c_void_p),
        ("token_positions", c_void_p),
        ("states", c_void_p),
        ("states_bytes", c_int64),
    ]


class CudaMoveArgs(Structure):
    """kvlathe_cuda_move_args of cache.h."""

    _fields_ = [
        ("abi_version", c_uint32),
        *((name, c_int32) for name in ("page_tokens", "lanes", "fields")),
        ("field", c_void_p),
        ("page_stride", c_int64),
        ("pool", c_void_p),
        ("pool_bytes", c_int64),
        ("source_pages", c_void_p),
        ("target_pages", c_void_p),
        ("places", c_void_p),
        ("places_stride", c_int64),
        ("target_count", c_int32),
        ("kept", c_int32),
        ("stream", c_void_p),
    ]


@dataclass(frozen=True)
class DeviceStep:
    """Fields of a step that observe reads; numbers that are not sizes are device
    addresses.

    ``tokens`` T, ``batch`` B, ``most_rows``: observed rows of one sequence at most.
    ``lengths`` [B, S], ``page_tables`` and ``widths`` of S buckets.
    """

    tokens: int
    batch: int
    most_rows: int
    cu_seqlens_q: int
    positions: int
    rows: int
    row_starts: int
    lengths: int
    page_tables: Sequence[int]
    widths: Sequence[int]


class LayerScores:
    """Offsets in the pages of one layer at which the numbers lie by which its lanes'
    tokens are ranked."""

    def __init__(self, layout: CacheLayout, layer: int, form: LayerForm) -> None:
        self.library, self.form, self.layout = form.library, form, layout
        self._offsets = [self._offsets_of(b, layer) for b in form.buckets]

    def _offsets_of(self, bucket: int, layer: int) -> list[Offsets]:
        """Offsets of the layer's lanes: attention, then positions where they are
        kept."""
        plan = self.layout.plan
        fields: list[list[int]] = []
        for lane in plan.index.buckets[bucket].lanes:
            if plan.lanes[lane].layer == layer:
                fields.append([at for at, _ in score_fields(self.layout, bucket, lane)])
        return [np.ascontiguousarray(column) for column in np.array(fields, np.int32).T]

    def observe(
        self, call: AttendDecodeArgs, step: DeviceStep, states: tuple[int, int]
    ) -> None:
        """Queue it, after the layer's attention ``call``. ``states``: address and bytes
        of memory for them."""
        parts = (ObservePart * len(self.form.buckets))()
        buckets = len(step.page_tables)
        for part, bucket, offsets in zip(
            parts, self.form.buckets, self._offsets, strict=True
        ):
            part.page_table = step.page_tables[bucket]
            part.page_table_stride = step.widths[bucket]
            part.lengths = step.lengths + 4 * bucket
            part.lengths_stride = buckets
            part.fresh = self.form.fresh[bucket]
            pointers = [column.ctypes.data for column in offsets]
            part.scores, part.positions, *_ = [*pointers, None, None]
        args = ObserveArgs(ABI_VERSION, step.batch, step.tokens, step.most_rows)
        args.call = ctypes.pointer(call)
        args.parts = parts
        args.cu_seqlens_q = step.cu_seqlens_q
        args.rows = step.rows
        args.row_starts = step.row_starts
        args.token_positions = step.positions
        args.states, args.states_bytes = states
        self.library.call("cuda_observe", byref(args))


@dataclass(frozen=True)
class DeviceMove:
    """Tokens of one bucket to other pages of it. Pages and places are device addresses.

    ``fields`` [lanes, fields, 2] as in token_fields; ``places``: of lane i
    ``places_stride`` int32 after those of lane i - 1. ``pages``: of the target.
    """

    fields: npt.NDArray[np.int64]
    stride: int
    source_pages: int
    target_pages: int
    places: int
    places_stride: int
    pages: int
    kept: int


def move_tokens(
    library: CudaLibrary,
    pool: tuple[int, int],
    page_tokens: int,
    move: DeviceMove,
    stream: int,
) -> None:
    """Queue it. ``pool``: address and bytes."""
    lanes, fields, _ = move.fields.shape
    args = CudaMoveArgs(ABI_VERSION, page_tokens, lanes, fields)
    args.field = move.fields.ctypes.data
    args.page_stride = move.stride
    args.pool, args.pool_bytes = pool
    args.source_pages = move.source_pages
    args.target_pages = move.target_pages
    args.places = move.places
    args.places_stride = move.places_stride
    args.target_count = move.pages
    args.kept = move.kept
    args.stream = stream
    library.call("cuda_move", byref(args))
