"""A layer's pages in vLLM's memory on a CPU, and libkvlathe's kernels on them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_void_p, pointer

import numpy as np
import torch
from torch import Tensor

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.layer_block import LayerBlock, in_blocks
from kvlathe.plan.layer_table import format_fields
from kvlathe.runtime.native.attend import AttendArgs, HostLayer
from kvlathe.runtime.native.cpu import SealArgs, SealPage
from kvlathe.runtime.native.library import ABI_VERSION, Status, find
from kvlathe.runtime.native.parts import Part
from kvlathe_vllm.heads import LayerHeads
from kvlathe_vllm.hosted import Hosted
from kvlathe_vllm.rounds import Int32, Round, Sealing
from kvlathe_vllm.span import Span

LEAST_OF_THREADS = 1 << 14
"""Pairs of a query and a token from which on starting threads pays."""


class CpuLayer:
    """One layer. ``cache``: vLLM's uint8 [blocks, 1, P, bytes of a token]."""

    def __init__(
        self, engine: Hosted, layer: int, cache: Tensor, sequences: int, scale: float
    ) -> None:
        """Raises KvlatheError without the native library."""
        found = find()
        if found.native is None:
            fact = "vLLM cannot attend compressed pages"
            raise KvlatheError(fact, found.reason, "build it: kvlathe native")
        self.native = found.native
        self.plan = engine.plan
        self.scale = scale
        self.block = LayerBlock(self.plan, layer)
        self.span = Span(cache, self.block.hot_bytes, sequences + 1)
        stride = self.span.block_stride
        table = self.block.table(stride, self.block.hot_bytes)
        self.form = HostLayer(self.native, table)
        self.heads = LayerHeads(engine, layer, cache.device, torch.float32)
        self.projections = self.heads.projections()
        self.held = in_blocks(self.plan)
        ranks = [lane.rank_v for lane in self.heads.lanes]
        self.width = self.heads.group * sum(ranks)
        """Of a row of o'."""
        buckets = range(len(self.plan.buckets))
        self._rows = [self.block.rows(b) for b in buckets]

    def run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rounds: Sequence[Round],
        sinks: Tensor | None,
        softcap: float,
    ) -> Tensor:
        """o [T, query heads, d] float32 of q, k, v [T, heads, d]. Tokens are appended,
        and full pages sealed."""
        q = self.heads.select(query, self.heads.group)
        k = self.heads.select(key, 1)
        v = self.heads.values(value)
        o = torch.zeros(len(q), self.width)
        for step in rounds:
            rows = torch.from_numpy(step.rows)
            if step.whole:
                self._attend(q, k, v, o, step, sinks, softcap)
            else:
                part = torch.empty(len(rows), self.width)
                own = (q[rows], k[rows], v[rows])
                self._attend(*own, part, step, sinks, softcap)
                o[rows] = part
            self._seal(step.sealing)
        return self.heads.outputs(o)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        step: Round,
        sinks: Tensor | None,
        softcap: float,
    ) -> None:
        tables = self._tables(step)
        count = len(tables)
        pointers = (c_void_p * count)()
        widths = np.zeros(count, np.int32)
        for i, table in enumerate(tables):
            pointers[i] = table.ctypes.data
            widths[i] = table.shape[1]
        args = AttendArgs(ABI_VERSION)
        args.tokens = len(q)
        args.batch = len(step.lengths)
        longest = int(step.lengths.max(initial=1))
        args.threads = 1
        if len(q) * longest >= LEAST_OF_THREADS:
            args.threads = torch.get_num_threads()
        args.scale = self.scale
        args.q = q.data_ptr()
        args.k = k.data_ptr()
        args.v = v.data_ptr()
        args.o = o.data_ptr()
        args.cu_seqlens_q = step.cu.ctypes.data
        args.lengths = step.lengths.ctypes.data
        args.page_tables = ctypes.addressof(pointers)
        args.page_table_widths = widths.ctypes.data
        if self.projections is not None:
            proj_q, proj_k, centres = self.projections
            args.proj_q = proj_q.data_ptr()
            args.proj_k = proj_k.data_ptr()
            args.centre_k = centres.data_ptr()
        args.pool = self.span.start
        args.pool_bytes = self.span.bytes
        if sinks is not None:
            args.sinks = sinks.data_ptr()
        args.softcap = softcap
        self.form.attend(args)

    def _tables(self, step: Round) -> list[Int32]:
        """The page table of each bucket, as ids of the span."""
        blocks = step.blocks + np.int32(self.span.first_block)
        hot = step.hot + np.int32(self.span.first_hot)
        tables: list[Int32] = []
        for held in self.held:
            table = blocks if held else hot
            tables.append(table)
        return tables

    def _seal(self, sealing: Sequence[Sealing]) -> None:
        """Full hot pages into their blocks, the bytes of kvlathe/plan/codec.py."""
        if not sealing:
            return
        for target, bucket in enumerate(self.plan.buckets):
            if bucket.source is not None and len(self._rows[target]):
                self._seal_bucket(bucket.source, target, sealing)

    def _seal_bucket(
        self, source: int, target: int, sealing: Sequence[Sealing]
    ) -> None:
        bucket = self.plan.buckets[target]
        tier = self.plan.tiers[bucket.tier]
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
        args.source = pointer(self._part(source))
        args.target = pointer(self._part(target))
        args.pages = rows
        args.page_count = count
        args.span_k = tier.k.span
        args.span_v = tier.v.span
        args.sums = tier.sums
        args.stochastic = tier.rounding == "stochastic"
        args.seed = self.plan.seed
        status = Status()
        if self.native.lib.kvlathe_cpu_seal(byref(args), byref(status)):
            said = status.message.decode()
            raise KvlatheError("a page cannot be sealed", said, "report this")

    def _part(self, bucket: int) -> Part:
        rows = self._rows[bucket]
        tier = self.plan.tiers[self.plan.buckets[bucket].tier]
        part = Part(*format_fields(tier))
        part.lane_count = len(rows)
        part.lanes = rows.ctypes.data
        part.page_stride = self.block.hot_bytes
        if self.held[bucket]:
            part.page_stride = self.span.block_stride
        return part
