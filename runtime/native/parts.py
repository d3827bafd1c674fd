"""kvlathe_part of abi.h: one bucket of a plan, as every call of the library takes it."""

from __future__ import annotations

from ctypes import Structure, c_int32, c_int64, c_void_p

import numpy as np
import numpy.typing as npt

from kvlathe.plan.layer_table import format_fields
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.plan import CompressionPlan


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


def part_of(plan: CompressionPlan, bucket: int, lanes: npt.NDArray[np.int32]) -> Part:
    """Bucket ``bucket`` with ``lanes``; no page table yet.

    ``lanes``: rows of the bucket's lane table. They must outlive the part.
    """
    tier = plan.tiers[plan.buckets[bucket].tier]
    part = Part(*format_fields(tier))
    part.lane_count = len(lanes)
    part.lanes = lanes.ctypes.data
    part.page_stride = CacheLayout(plan).page_stride[bucket]
    return part
