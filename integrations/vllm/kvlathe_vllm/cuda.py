"""Layers whose blocks are on a GPU: the calls of the cuda backend on vLLM's blocks.

A step queues spread, plan, append, attention and seal on vLLM's stream; pages are sealed
before the attention where it reads them. There are no CUDA graphs: vLLM leaves attention
out of those it makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref, pointer
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from kvlathe.plan.layer_block import LayerBlock, in_blocks
from kvlathe.runtime.native.cuda import (
    LEAST_CHUNK,
    CudaLibrary,
    LayerForm,
    SealArgs,
    SealPage,
    cuda_library,
)
from kvlathe.runtime.native.library import ABI_VERSION
from kvlathe.runtime.sessions.torch_cuda.attend import Attention, StepInputs
from kvlathe.runtime.sessions.torch_cuda.rows import ELEMENTS
from kvlathe_vllm.calls import Call, Int32, Sealing
from kvlathe_vllm.hosted import Hosted
from kvlathe_vllm.layer import Layer, Most
from kvlathe_vllm.span import Span


def stream() -> int:
    """vLLM's own."""
    return torch.cuda.current_stream().cuda_stream


@dataclass(frozen=True)
class Sent:
    """A step on the device, the same for all layers. ``rows``: as of StepInputs;
    ``single``: each sequence has one row, and none is sealed before it is attended."""

    cu: Tensor
    lengths: Tensor
    blocks: Tensor
    hot: Tensor
    is_passing: Tensor
    single: bool
    rows: int


_sent: list[tuple[Call, Sent]] = []
"""The step that runs."""


def sent_to(step: Call, span: Span) -> Sent:
    """Made by the first layer of a step."""
    if not _sent or _sent[0][0] is not step:
        _sent[:] = [(step, _send(step, span))]
    return _sent[0][1]


def _send(step: Call, span: Span) -> Sent:
    device = span.cache.device

    def on_device(numbers: Int32) -> Tensor:
        host = torch.from_numpy(np.ascontiguousarray(numbers))
        return host.to(device)

    hot = on_device(step.hot)
    counts = np.diff(step.cu)
    short = np.flatnonzero(counts < LEAST_CHUNK)
    rows = int(step.cu[short[-1] + 1]) if len(short) else 0
    single = bool((counts == 1).all()) and not step.seals_first
    return Sent(
        on_device(step.cu),
        on_device(step.lengths),
        on_device(step.blocks),
        hot,
        hot >= span.hot_pages,
        single,
        rows,
    )


class BlockForm(LayerForm):
    """A layer whose pages are blocks of a host."""

    def __init__(
        self, library: CudaLibrary, block: LayerBlock, table: Int32, stride: int
    ) -> None:
        """``stride``: bytes from a block to the next."""
        super().__init__(
            library,
            block.plan,
            block.layer,
        )
        library.lib.kvlathe_layer_destroy(self.handle)
        address = table.ctypes.data
        library.call(
            "layer_create",
            address,
            table.size,
            byref(self.handle),
        )
        held = in_blocks(block.plan)
        self.own_rows = [block.rows(b) for b in self.buckets]
        for i, bucket in enumerate(self.buckets):
            part = self.parts[i]
            part.lanes = self.own_rows[i].ctypes.data
            part.page_stride = block.hot_bytes
            if held[bucket]:
                part.page_stride = stride


class BlockAttention(Attention):
    """The attention of one layer over its span; lists of all layers hold it alone."""

    def __init__(
        self, library: CudaLibrary, layer: CudaLayer, scale: float, rows: int
    ) -> None:
        count = layer.block.layer + 1
        device = layer.span.cache.device
        form = BlockForm(
            library,
            layer.block,
            layer.table,
            layer.span.block_stride,
        )
        table = torch.from_numpy(layer.table)
        layout = table.to(device)
        self._set_up(
            library,
            layer.plan,
            [scale] * count,
            cast(Tensor, Pool(layer.span)),
            [form] * count,
            [layout] * count,
            rows,
        )
        self.most_bundled = 1


class Pool:
    """A span as attention asks for its pool."""

    def __init__(self, span: Span) -> None:
        self.span = span
        self.device = span.cache.device

    def data_ptr(self) -> int:
        return self.span.start

    def numel(self) -> int:
        return self.span.bytes


class CudaLayer(Layer):
    """In the 16-bit type that vLLM computes in."""

    def __init__(
        self,
        engine: Hosted,
        layer: int,
        cache: Tensor,
        most: Most,
        scale: float,
        dtype: torch.dtype,
        library: CudaLibrary | None = None,
    ) -> None:
        """Raises KvlatheError without the CUDA kernels."""
        super().__init__(
            engine,
            layer,
            cache,
            most,
            scale,
            dtype,
        )
        self.library = library or cuda_library("vLLM with compressed blocks")
        self.attention = BlockAttention(self.library, self, scale, most.tokens)
        self.dtype = dtype
        self.weights: dict[str, Tensor] = {}
        found = self.heads.projections()
        if found is not None:
            names = (
                "proj_q",
                "proj_k",
                "centre_k",
            )
            for name, matrix in zip(names, found, strict=True):
                moved = matrix.to(cache.device, dtype)
                self.weights[name] = moved.contiguous()

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        step: Call,
        sinks: Tensor | None,
        softcap: float,
    ) -> Tensor:
        """``softcap`` is the plan's."""
        own, rows = self.block.layer, len(q)
        if sinks is not None:
            self.attention.sinks = [sinks] * (own + 1)
        layers = range(own, own + 1)
        inputs = self._inputs(step)
        spread = self.attention.spread(inputs, rows, layers)
        weights = self.weights
        queries = self.attention.append(spread, own, q, k, v, None, weights)
        if step.seals_first:
            self.seal(step.sealing)
        o = self.attention.attend(spread, own, queries)
        if not step.seals_first:
            self.seal(step.sealing)
        return o

    def _inputs(self, step: Call) -> StepInputs:
        """The step with the page ids of this layer's span."""
        sent = sent_to(step, self.span)
        blocks = sent.blocks + self.span.first_block
        lasting, passing = (sent.hot + offset for offset in self.span.offsets)
        hot = torch.where(sent.is_passing, passing, lasting)
        tables = [blocks if held else hot for held in self.held]
        return StepInputs(
            cu_seqlens_q=sent.cu,
            lengths=sent.lengths,
            page_tables=tables,
            single=sent.single,
            rows=sent.rows,
        )

    def seal_bucket(self, source: int, target: int, sealing: Sequence[Sealing]) -> None:
        bucket = self.plan.buckets[target]
        tier = self.plan.tiers[bucket.tier]
        pages = (SealPage * len(sealing))()
        for i, one in enumerate(sealing):
            page = pages[i]
            page.source = self.span.hot_id(one.hot)
            page.target = self.span.first_block + one.block
            page.position = one.position
        args = SealArgs(ABI_VERSION)
        args.element = ELEMENTS[self.dtype]
        args.page_tokens = self.plan.page_tokens
        args.stochastic = tier.rounding == "stochastic"
        args.seed = self.plan.seed
        args.source = pointer(self.part(source))
        args.target = pointer(self.part(target))
        args.pages = pages
        args.page_count = len(sealing)
        args.span_k = tier.k.span
        args.span_v = tier.v.span
        args.pool = self.span.start
        args.pool_bytes = self.span.bytes
        args.stream = stream()
        self.library.call("cuda_seal", byref(args))
