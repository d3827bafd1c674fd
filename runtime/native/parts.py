"""kvlathe_part of abi.h: a bucket of a plan, or some of its lanes, as every call of the
library takes it."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, c_int32, c_int64, c_void_p

import numpy as np
import numpy.typing as npt

from kvlathe.plan.index import KernelPart
from kvlathe.plan.layer_table import format_fields
from kvlathe.plan.layout import CacheLayout


class Part(Structure):
    """One bucket. ``lanes`` is host memory; page tables are where the call runs."""

    _fields_ = [
        *(
            (name, c_int32)
            for name in ("bits_k", "bits_v", "axis_k", "axis_v", "group_k", "group_v")
        ),
        ("lane_count", c_int32),
        ("page_table_stride", c_int32),
        ("lanes", c_void_p),
        ("page_stride", c_int64),
        *((name, c_void_p) for name in ("page_table", "lengths")),
        ("lengths_stride", c_int64),
        ("hidden", c_void_p),
        ("hidden_stride", c_int64),
    ]


class WindowForm(Structure):
    """kvlathe_window of abi.h."""

    _fields_ = [
        (name, c_int32) for name in ("sink", "recent", "exact", "sealed", "fresh")
    ]


def part_of(layout: CacheLayout, bucket: int, lanes: npt.NDArray[np.int32]) -> Part:
    """Bucket ``bucket`` with ``lanes``; no page table yet.

    ``lanes``: rows of the bucket's lane table. They must outlive the part.
    """
    plan = layout.plan
    part = Part(*format_fields(plan.index.buckets[bucket].tier))
    part.lane_count = len(lanes)
    part.lanes = lanes.ctypes.data
    part.page_stride = layout.page_stride[bucket]
    return part


def window_form(part: KernelPart) -> WindowForm:
    """The window that the lanes of a part see; its buckets are those of the plan."""
    sight = part.sight
    form = WindowForm(sight.sink, sight.recent, sight.exact)
    form.sealed = part.sealed
    form.fresh = part.fresh
    return form


def window_among(own: KernelPart, parts: Sequence[KernelPart]) -> WindowForm:
    """The window that the lanes of a part see, its buckets as places in ``parts``, the
    parts of a layer. Sealed parts that live alike have equally many tokens, so any of
    them does."""
    window = window_form(own)
    window.sealed = -1
    for i, part in enumerate(parts):
        if (part.fresh, part.life) != (own.fresh, own.life):
            continue
        if part.bucket == own.fresh:
            window.fresh = i
        else:
            window.sealed = i
    return window
