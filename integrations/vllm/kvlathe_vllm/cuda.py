"""Layers whose blocks are on a GPU: the calls of the cuda backend on vLLM's blocks.

A step queues spread, plan, append, seal and attention on vLLM's stream. A layer seals
pages before its attention where that reads them, else after it. Of a decode step that
graphs may hold (gpu_step.py) all layers are spread and planned at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, byref, cast, pointer

import torch
from torch import Tensor

from kvlathe.runtime.native.cuda import (
    CudaLibrary,
    SealArgs,
    SealPage,
    cuda_library,
)
from kvlathe.runtime.native.library import ABI_VERSION
from kvlathe.runtime.sessions.torch_cuda.device import current_stream
from kvlathe.runtime.sessions.torch_cuda.inputs import StepInputs
from kvlathe.runtime.sessions.torch_cuda.model.rows import ELEMENTS
from kvlathe_vllm.block_attention import BlockAttention
from kvlathe_vllm.calls import Call, Sealing
from kvlathe_vllm.gpu_step import Layers, LayerStep, Sent, sent_to
from kvlathe_vllm.hosted import Hosted
from kvlathe_vllm.layer import Layer, Most

_layers: list[tuple[Hosted, Layers]] = []
"""The engine of this process, and its layers."""


def layers_of(engine: Hosted) -> Layers:
    if not _layers or _layers[0][0] is not engine:
        _layers[:] = [(engine, Layers())]
    return _layers[0][1]


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
        sinks: Tensor | None = None,
    ) -> None:
        """Raises KvlatheError without the CUDA kernels."""
        super().__init__(engine, layer, cache, most, scale, dtype, sinks)
        self.library = library or cuda_library("vLLM with compressed blocks")
        self.layers = layers_of(engine)
        self.attention = BlockAttention(self.library, self, most, self.layers.rooms)
        self.layers.add(self.attention)
        self.dtype = dtype
        self.weights: dict[str, Tensor] = {}
        found = self.heads.projections()
        if found is not None:
            names = ("proj_q", "proj_k", "centre_k")
            for name, matrix in zip(names, found, strict=True):
                self.weights[name] = matrix.to(cache.device, dtype).contiguous()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Call) -> Tensor:
        own, attention = self.block.layer, self.attention
        on_device = sent_to(step, self.span.cache.device)
        if on_device.seals is not None:
            return self._decode(q, k, v, on_device)
        calls = attention.prepare(self._inputs(on_device), len(q))
        queries = attention.append(calls, own, q, k, v, None, self.weights)
        if step.seals_first:
            self.seal(step.sealing)
        o = attention.attend(calls, own, queries)
        if not step.seals_first:
            self.seal(step.sealing)
        return o

    def _decode(self, q: Tensor, k: Tensor, v: Tensor, step: Sent) -> Tensor:
        """A row reads its own page in 16 bit, whether it is sealed or not. So pages are
        sealed before the attention, where sequences that share them find them."""
        own = self.block.layer
        made = self.layers.step_of(self.attention, step, len(q))
        queries = self.attention.append(made.calls, own, q, k, v, None, self.weights)
        self._seal_listed(made)
        return self.attention.attend(made.calls, own, queries)

    def _inputs(self, step: Sent) -> StepInputs:
        """The step with the page ids of this layer's span."""
        lasting, passing = self.span.offsets
        hot = step.hot + lasting
        # A row of a decode step begins or fills a page, and never both.
        if not step.inputs.kind.decode:
            hot = torch.where(step.hot >= self.span.hot_pages, step.hot + passing, hot)
        return step.in_layer(self.held, step.blocks + self.span.first_block, hot)

    def seal_bucket(self, source: int, target: int, sealing: Sequence[Sealing]) -> None:
        pages = (SealPage * len(sealing))()
        for i, one in enumerate(sealing):
            page = pages[i]
            page.source = self.span.hot_id(one.hot)
            page.target = self.span.first_block + one.block
            page.position = one.position
        args = self._seal_args(source, target)
        args.pages = pages
        args.page_count = len(sealing)
        self.library.call("cuda_seal", byref(args))

    def _seal_listed(self, step: LayerStep) -> None:
        """Pages of a list on the device."""
        for bucket in self.plan.index.buckets:
            target = bucket.number
            if bucket.is_hot or not len(self.rows[target]):
                continue
            args = self._seal_args(bucket.hot, target)
            args.pages = cast(step.seals.data_ptr(), POINTER(SealPage))
            args.page_count = len(step.seals)
            self.library.call("cuda_seal_listed", byref(args))

    def _seal_args(self, source: int, target: int) -> SealArgs:
        """No pages yet."""
        tier = self.plan.index.buckets[target].tier
        args = SealArgs(ABI_VERSION)
        args.element = ELEMENTS[self.dtype]
        args.page_tokens = self.plan.page_tokens
        args.stochastic = tier.rounding == "stochastic"
        args.seed = self.plan.seed
        args.source = pointer(self.part(source))
        args.target = pointer(self.part(target))
        args.span_k = tier.k.span
        args.span_v = tier.v.span
        args.pool = self.span.start
        args.pool_bytes = self.span.bytes
        args.stream = current_stream()
        return args
