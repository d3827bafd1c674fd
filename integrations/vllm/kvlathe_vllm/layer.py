"""A layer's pages in vLLM's memory: what is the same on CPUs and GPUs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvlathe.plan.layer_block import LayerBlock, in_blocks
from kvlathe.plan.layer_table import format_fields
from kvlathe.runtime.native.parts import Part
from kvlathe_vllm.heads import LayerHeads
from kvlathe_vllm.hosted import Hosted
from kvlathe_vllm.rounds import Int32, Round, Sealing
from kvlathe_vllm.span import Span


class Layer(ABC):
    """One layer. ``cache``: vLLM's uint8 [blocks, 1, P, bytes of a token]. ``dtype``: what
    q, k, v and o are multiplied in."""

    def __init__(
        self,
        engine: Hosted,
        layer: int,
        cache: Tensor,
        sequences: int,
        scale: float,
        dtype: torch.dtype,
    ) -> None:
        self.plan = engine.plan
        self.scale = scale
        self.block = LayerBlock(self.plan, layer)
        self.span = Span(
            cache,
            self.block.hot_bytes,
            sequences + 1,
        )
        self.table = self.block.table(
            self.span.block_stride,
            self.block.hot_bytes,
        )
        self.heads = LayerHeads(
            engine,
            layer,
            cache.device,
            dtype,
        )
        self.held = in_blocks(self.plan)
        ranks = [lane.rank_v for lane in self.heads.lanes]
        self.width = self.heads.group * sum(ranks)
        """Of a row of o'."""
        buckets = range(len(self.plan.buckets))
        self.rows = [self.block.rows(b) for b in buckets]

    @abstractmethod
    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        step: Round,
        sinks: Tensor | None,
        softcap: float,
    ) -> Tensor:
        """o' of packed rows; their tokens are appended."""

    @abstractmethod
    def seal_bucket(self, source: int, target: int, sealing: Sequence[Sealing]) -> None:
        """Full hot pages of bucket ``source`` into blocks, as bucket ``target``."""

    def run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rounds: Sequence[Round],
        sinks: Tensor | None,
        softcap: float,
    ) -> Tensor:
        """o [T, query heads, d] of q, k, v [T, heads, d]. Tokens are appended, and full
        pages sealed."""
        q = self.heads.select(query, self.heads.group)
        k = self.heads.select(key, 1)
        v = self.heads.values(value)
        o = q.new_zeros(len(q), self.width)
        for step in rounds:
            rows = slice(None)
            if not step.whole:
                chosen = torch.from_numpy(step.rows)
                rows = chosen.to(q.device)
            o[rows] = self.attend(
                q[rows],
                k[rows],
                v[rows],
                step,
                sinks,
                softcap,
            )
            self._seal(step.sealing)
        return self.heads.outputs(o)

    def tables(self, step: Round) -> list[Int32]:
        """The page table of each bucket, as ids of the span."""
        blocks = step.blocks + np.int32(self.span.first_block)
        hot = step.hot + np.int32(self.span.first_hot)
        tables: list[Int32] = []
        for held in self.held:
            table = blocks if held else hot
            tables.append(table)
        return tables

    def _seal(self, sealing: Sequence[Sealing]) -> None:
        """The bytes of kvlathe/plan/codec.py."""
        if not sealing:
            return
        for target, bucket in enumerate(self.plan.buckets):
            if bucket.source is not None and len(self.rows[target]):
                self.seal_bucket(bucket.source, target, sealing)

    def part(self, bucket: int) -> Part:
        """The layer's lanes of a bucket; no page table yet."""
        rows = self.rows[bucket]
        tier = self.plan.tiers[self.plan.buckets[bucket].tier]
        part = Part(*format_fields(tier))
        part.lane_count = len(rows)
        part.lanes = rows.ctypes.data
        part.page_stride = self.block.hot_bytes
        if self.held[bucket]:
            part.page_stride = self.span.block_stride
        return part
