"""A layer's pages in vLLM's memory on a CPU, and libkvlathe's kernels on them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_void_p, pointer

import numpy as np
import torch
from torch import Tensor

from kvlathe.base.errors import KvlatheError
from kvlathe.runtime.native.attend import AttendArgs, HostLayer
from kvlathe.runtime.native.cpu import SealArgs, SealPage
from kvlathe.runtime.native.library import ABI_VERSION, Status, find
from kvlathe_vllm.calls import Call, Int32, Sealing
from kvlathe_vllm.hosted import Hosted
from kvlathe_vllm.layer import Layer, Most

LEAST_OF_THREADS = 1 << 14
"""Pairs of a query and a token from which on starting threads pays."""


class CpuLayer(Layer):
    """In float32."""

    def __init__(
        self,
        engine: Hosted,
        layer: int,
        cache: Tensor,
        most: Most,
        scale: float,
        sinks: Tensor | None = None,
        softcap: float = 0.0,
    ) -> None:
        """``softcap`` of scores; 0 for none. Raises KvlatheError without the native
        library."""
        found = find()
        if found.native is None:
            raise KvlatheError(
                "vLLM cannot attend compressed pages",
                found.reason,
                "build it: kvlathe native",
            )
        super().__init__(engine, layer, cache, most, scale, torch.float32, sinks)
        self.softcap = softcap
        self.native = found.native
        self.form = HostLayer(self.native, self.table)
        self.projections = self.heads.projections()

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        step: Call,
    ) -> Tensor:
        """The library appends and attends in one call. Where pages are to be sealed
        between the two, a first call appends, and attends no sealed page; the second
        writes the same rows again."""
        q, k, v = (x.contiguous() for x in (q, k, v))
        if step.seals_first:
            self._attend(q, k, v, step, self._unsealed(step))
            self.seal(step.sealing)
        o = self._attend(q, k, v, step, step.lengths)
        if not step.seals_first:
            self.seal(step.sealing)
        return o

    def _unsealed(self, step: Call) -> Int32:
        """Lengths without what is sealed."""
        lengths = step.lengths.copy()
        for bucket in self.plan.index.buckets:
            if not bucket.is_hot:
                lengths[:, bucket.number] = 0
        return lengths

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        step: Call,
        lengths: Int32,
    ) -> Tensor:
        o = torch.empty(len(q), self.width)
        tables = [self._ids(held, step) for held in self.held]
        count = len(tables)
        pointers = (c_void_p * count)()
        widths = np.zeros(count, np.int32)
        for i, table in enumerate(tables):
            pointers[i] = table.ctypes.data
            widths[i] = table.shape[1]
        args = AttendArgs(ABI_VERSION)
        args.tokens = len(q)
        args.batch = len(lengths)
        args.threads = 1
        if len(q) * int(lengths.max(initial=1)) >= LEAST_OF_THREADS:
            args.threads = torch.get_num_threads()
        args.scale = self.scale
        args.q = q.data_ptr()
        args.k = k.data_ptr()
        args.v = v.data_ptr()
        args.o = o.data_ptr()
        args.cu_seqlens_q = step.cu.ctypes.data
        args.lengths = lengths.ctypes.data
        args.page_tables = ctypes.addressof(pointers)
        args.page_table_widths = widths.ctypes.data
        if self.projections is not None:
            proj_q, proj_k, centres = self.projections
            args.proj_q = proj_q.data_ptr()
            args.proj_k = proj_k.data_ptr()
            args.centre_k = centres.data_ptr()
        args.pool = self.span.start
        args.pool_bytes = self.span.bytes
        if self.sinks is not None:
            args.sinks = self.sinks.data_ptr()
        args.softcap = self.softcap
        self.form.attend(args)
        return o

    def _ids(self, held: bool, step: Call) -> Int32:
        """A page table as ids of the span."""
        if held:
            return step.blocks + np.int32(self.span.first_block)
        ids = [[self.span.hot_id(int(page))] for page in step.hot[:, 0]]
        return np.array(ids, np.int32)

    def seal_bucket(self, source: int, target: int, sealing: Sequence[Sealing]) -> None:
        tier = self.plan.index.buckets[target].tier
        page = self.plan.page_tokens
        count = len(sealing)
        firsts = np.array([x.position for x in sealing])
        positions = (firsts[:, None] + np.arange(page)).astype(np.uint32)
        rows = (SealPage * count)()
        for i, one in enumerate(sealing):
            row = rows[i]
            row.source = self.span.hot_page(one.hot)
            row.target = self.span.block_page(one.block)
            row.positions = positions[i].ctypes.data
        args = SealArgs(ABI_VERSION)
        args.page_tokens = page
        args.threads = 1
        args.source = pointer(self.part(source))
        args.target = pointer(self.part(target))
        args.pages = rows
        args.page_count = count
        args.span_k = tier.k.span
        args.span_v = tier.v.span
        args.sums = tier.sums
        args.stochastic = tier.rounding == "stochastic"
        args.seed = self.plan.seed
        status = Status()
        if self.native.lib.kvlathe_cpu_seal(byref(args), byref(status)):
            raise KvlatheError(
                "a page cannot be sealed", status.message.decode(), "report this"
            )
