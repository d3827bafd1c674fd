"""A layer's pages in vLLM's memory: what is the same on CPUs and GPUs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlathe.plan.layer_table import format_fields
from kvlathe.runtime.native.parts import Part
from kvlathe_vllm.calls import Call, Sealing
from kvlathe_vllm.heads import LayerHeads
from kvlathe_vllm.hosted import Hosted
from kvlathe_vllm.hot_pages import lasting_pages, passing_pages
from kvlathe_vllm.span import Span


@dataclass(frozen=True)
class Most:
    """The most that a step of vLLM brings."""

    sequences: int
    tokens: int
    length: int
    """Tokens of a sequence."""
    guesses: bool = False
    """Whether some of the tokens may be taken back."""


class Layer(ABC):
    """One layer. ``cache``: vLLM's uint8 [blocks, 1, P, bytes of a token]. ``dtype``:
    what q, k, v and o are multiplied in. ``sinks`` float32 [KV heads, G]: sink logits
    of all heads that vLLM has here, where the model has some."""

    def __init__(
        self,
        engine: Hosted,
        layer: int,
        cache: Tensor,
        most: Most,
        scale: float,
        dtype: torch.dtype,
        sinks: Tensor | None = None,
    ) -> None:
        self.plan = engine.plan
        self.scale = scale
        self.block = engine.blocks[layer]
        self.span = Span(
            cache,
            self.block.hot_bytes,
            lasting_pages(most.sequences, most.guesses) + 1,
            passing_pages(most.tokens, most.sequences, self.plan.page_tokens),
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
        self.sinks = None
        if sinks is not None:
            self.sinks = sinks[self.heads.kept_at].contiguous()
        self.held = [bucket.stays for bucket in self.plan.index.buckets]
        self.width = self.heads.group * sum(lane.rank_v for lane in self.heads.lanes)
        """Elements of a row of o'."""
        self.rows = [self.block.rows(b) for b in range(len(self.plan.index.buckets))]

    @abstractmethod
    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        step: Call,
    ) -> Tensor:
        """o' of packed rows; their tokens are appended, and full pages sealed."""

    @abstractmethod
    def seal_bucket(self, source: int, target: int, sealing: Sequence[Sealing]) -> None:
        """Full hot pages of bucket ``source`` into blocks, as bucket ``target``."""

    def run(self, query: Tensor, key: Tensor, value: Tensor, step: Call) -> Tensor:
        """o [T, query heads, d] of q, k, v [T, heads, d]. Tokens are appended, and full
        pages sealed."""
        q = self.heads.select(query, self.heads.group)
        o = self.attend(q, self.heads.select(key, 1), self.heads.values(value), step)
        for passing, page in step.kept:
            self.span.keep(passing, page)
        return self.heads.outputs(o)

    def seal(self, sealing: Sequence[Sealing]) -> None:
        """The bytes of kvlathe/plan/codec.py."""
        if not sealing:
            return
        for bucket in self.plan.index.buckets:
            if not bucket.is_hot and len(self.rows[bucket.number]):
                self.seal_bucket(bucket.hot, bucket.number, sealing)

    def part(self, bucket: int) -> Part:
        """The layer's lanes of a bucket; no page table yet."""
        rows = self.rows[bucket]
        part = Part(*format_fields(self.plan.index.buckets[bucket].tier))
        part.lane_count = len(rows)
        part.lanes = rows.ctypes.data
        part.page_stride = self.block.hot_bytes
        if self.held[bucket]:
            part.page_stride = self.span.block_stride
        return part
