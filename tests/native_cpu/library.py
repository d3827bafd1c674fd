"""ctypes view of plugins_cpp/include/kvlathe/cpu.h: the op on a test case, without ONNX
Runtime around it."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_int64, c_void_p
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvlathe.plan.layer_table import layer_table
from kvlathe.plan.layout import CacheLayout
from kvlathe.runtime.native.attend import AttendArgs
from kvlathe.runtime.native.library import ABI_VERSION, Native, Status
from tests.support.aarch64 import Guest
from tests.support.attend_cases import Case

AUTO, PORTABLE, AVX2, AVX512, AVX512_VNNI, AVX_VNNI, NEON, NEON_DOT, SVE = range(9)
Array = npt.NDArray[Any]


class Refused(Exception):
    """The words of the library when it refuses."""


class Op:
    """One layer of a plan in the library."""

    def __init__(self, native: Native, table: Array) -> None:
        self.lib, self.layer, status = native.lib, c_void_p(), Status()
        table = np.ascontiguousarray(table, np.int32)
        self.lib.kvlathe_layer_create.argtypes = [
            c_void_p,
            c_int64,
            POINTER(c_void_p),
            POINTER(Status),
        ]
        self.lib.kvlathe_cpu_attend.argtypes = [
            c_void_p,
            POINTER(AttendArgs),
            POINTER(Status),
        ]
        self.lib.kvlathe_layer_destroy.argtypes = [c_void_p]
        self.lib.kvlathe_layer_destroy.restype = None
        if self.lib.kvlathe_layer_create(
            table.ctypes.data, table.size, byref(self.layer), byref(status)
        ):
            raise Refused(status.message.decode())

    def __del__(self) -> None:
        self.lib.kvlathe_layer_destroy(self.layer)

    def run(self, args: AttendArgs) -> None:
        status = Status()
        if self.lib.kvlathe_cpu_attend(self.layer, byref(args), byref(status)):
            raise Refused(status.message.decode())


def aligned(values: Array, offset: int = 0) -> Array:
    """A copy that starts ``offset`` bytes after a multiple of 128."""
    raw = np.zeros(values.nbytes + 256, np.uint8)
    start = -raw.ctypes.data % 128 + offset
    out = raw[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    out[...] = values
    return out


class Call:
    """The arguments of one case, kept alive; its pool has the pages of the step's own
    tokens reserved."""

    def __init__(self, case: Case, isa: int = AUTO, threads: int = 1) -> None:
        self.case, plan = case, case.plan
        step, state = case.step(), {name: x.numpy() for name, x in case.state().items()}
        self.q, self.k, self.v = (
            np.ascontiguousarray(x.numpy()) for x in case.packed()
        )
        assert step.cos is not None and step.sin is not None
        self.memory, self.tables = reserve(case)
        hot = (
            np.float16
            if next(b.tier for b in plan.index.buckets if b.is_hot).bits_k == 16
            else np.float32
        )
        group, rows = plan.model.group_size, len(self.q)
        self.o = np.full(
            (rows, group * sum(x.rank_v for x in case.lanes)), np.nan, np.float32
        )
        self.rows = np.full((rows, sum(x.numbers for x in case.lanes)), np.nan, hot)
        self.arrays = {
            "q": self.q, "k": self.k, "v": self.v, "cos": step.cos.numpy(), "sin": step.sin.numpy(),
            "cu_seqlens_q": step.cu_seqlens_q.numpy(), "lengths": np.ascontiguousarray(case.lengths),
            "page_table_widths": np.array([t.shape[1] for t in self.tables], np.int32),
            "o": self.o, "rows": self.rows, **state,
        }  # fmt: skip
        places = sum(table.shape[1] for table in self.tables) * plan.page_tokens + max(
            case.queries
        )
        self.mass = np.full(
            (len(case.lengths), len(case.lanes), places), np.nan, np.float32
        )
        if plan.index.observes:
            self.arrays |= {
                "observation_weights": case.weights.astype(np.float32),
                "mass": self.mass,
            }
        self.pointers = (c_void_p * len(self.tables))(
            *(t.ctypes.data for t in self.tables)
        )
        self.args = AttendArgs(
            ABI_VERSION, rows, len(case.lengths), isa, threads, case.scale,
            mass_places=places, softcap=plan.model.softcap,
            page_tables=ctypes.addressof(self.pointers), pool=self.memory.ctypes.data, pool_bytes=self.memory.nbytes,
            **{name: array.ctypes.data for name, array in self.arrays.items()},
        )  # fmt: skip

    def expected_mass(self) -> Array:
        """The mass that the case says, at this call's places: its page tables hold the
        step's own tokens too."""
        case, page = self.case, self.case.plan.page_tokens
        found, old, new = np.zeros_like(self.mass), 0, 0
        wanted = case.expected_mass()
        for theirs, ours in zip(case.tables, self.tables, strict=True):
            size = min(theirs.shape[1], ours.shape[1]) * page
            found[:, :, new : new + size] = wanted[:, :, old : old + size]
            old, new = old + theirs.shape[1] * page, new + ours.shape[1] * page
        found[:, :, new:] = wanted[:, :, old:]
        return found

    def run(self, native: Native | Guest) -> tuple[Array, Array]:
        """o and rows of the real tokens. Skips the test where this machine, or the
        guest's, lacks the call's instructions."""
        table = layer_table(CacheLayout(self.case.plan), self.case.layer)
        try:
            if isinstance(native, Guest):
                reached = [*self.arrays.values(), self.memory, *self.tables]
                if said := native.attend(table, self.args, [*reached, self.pointers]):
                    raise Refused(said)
            else:
                Op(native, table).run(self.args)
        except Refused as refusal:
            if "is not available on this machine" in str(refusal):
                pytest.skip(str(refusal))
            raise
        return self.o[: self.case.total], self.rows[: self.case.total]


def reserve(case: Case) -> tuple[Array, list[Array]]:
    """The case's pool and page tables, grown by poisoned pages for the step's own
    tokens, and by those that wait."""
    from kvlathe.plan.layout import CacheLayout

    plan, strides = case.plan, CacheLayout(case.plan).page_stride
    at, tables = case.memory.nbytes, []
    for s, bucket in enumerate(plan.index.buckets):
        fresh = np.array(case.queries) * (bucket.is_hot)
        needed = -(-(case.lengths[:, s] + fresh) // plan.page_tokens)
        needed += case.waiting[:, s]
        table = np.zeros((len(needed), max(1, int(needed.max()))), np.int32)
        for b, count in enumerate(needed):
            old = min(-(-int(case.lengths[b, s]) // plan.page_tokens), int(count))
            table[b, :old] = case.tables[s][b, :old]
            for i in range(old, int(count)):
                table[b, i] = -(-at // strides[s])
                at = (int(table[b, i]) + 1) * strides[s]
        tables.append(table)
    memory = np.full(at, 255, np.uint8)
    memory[: case.memory.nbytes] = case.memory
    return aligned(memory), tables
