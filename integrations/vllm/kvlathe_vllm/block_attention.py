"""The cuda backend's attention over blocks of a host: one layer over its span."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from typing import cast

import torch
from torch import Tensor

from kvlathe.plan.layer_block import LayerBlock
from kvlathe.runtime.native.cuda import (
    APPENDED,
    AttendDecodeArgs,
    CudaLibrary,
    LayerForm,
)
from kvlathe.runtime.sessions.gpu.side_memory import copies_bytes, within_share
from kvlathe.runtime.sessions.torch_cuda.attention.attend import Attention, Spread
from kvlathe.runtime.sessions.torch_cuda.attention.inputs import StepInputs
from kvlathe_vllm.calls import Int32
from kvlathe_vllm.layer import Layer, Most
from kvlathe_vllm.span import Span


class BlockForm(LayerForm):
    """A layer whose pages are blocks of a host."""

    def __init__(
        self, library: CudaLibrary, block: LayerBlock, table: Int32, stride: int
    ) -> None:
        """``stride``: bytes from a block to the next."""
        super().__init__(
            library,
            block.layout,
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
        self.own_rows = [block.rows(b) for b in self.buckets]
        for i, bucket in enumerate(self.buckets):
            part = self.parts[i]
            part.lanes = self.own_rows[i].ctypes.data
            part.page_stride = block.hot_bytes
            if block.plan.index.buckets[bucket].stays:
                part.page_stride = stride


class Pool:
    """A span as attention asks for its pool."""

    def __init__(self, span: Span) -> None:
        self.span = span
        self.device = span.cache.device

    def data_ptr(self) -> int:
        return self.span.start

    def numel(self) -> int:
        return self.span.bytes


class Rooms:
    """Memory that all layers of an engine use, since they run one after the other on one
    stream. What a CUDA graph may hold is kept when a layer needs more."""

    def __init__(self) -> None:
        self._every: dict[str, list[Tensor]] = {}

    def of(self, use: str, size: int, device: torch.device) -> Tensor:
        """Bytes for a use; zeros at first."""
        rooms = self._every.setdefault(use, [])
        for room in rooms:
            if room.device == device and len(room) >= size:
                return room
        if device.type == "cuda":
            # Zeros would be written when the graph runs, and not now.
            assert not torch.cuda.is_current_stream_capturing()
        room = torch.zeros(size, dtype=torch.uint8, device=device)
        rooms.append(room)
        return room


class BlockAttention(Attention):
    """Of layer ``own``. Lists of all layers hold it alone."""

    @property
    def tiled(self) -> bool:
        """Whether the GPU has a kernel for prompts in tiles."""
        return bool(self.library.lib.kvlathe_cuda_has_prompt_kernel())

    def __init__(
        self,
        library: CudaLibrary,
        layer: Layer,
        scale: float,
        most: Most,
        rooms: Rooms,
    ) -> None:
        self.rooms = rooms
        self.own = layer.block.layer
        self.span = layer.span
        count = self.own + 1
        form = BlockForm(
            library,
            layer.block,
            layer.table,
            layer.span.block_stride,
        )
        table = torch.from_numpy(layer.table)
        layout = table.to(layer.span.cache.device)
        self._set_up(
            library,
            layer.plan,
            [scale] * count,
            cast(Tensor, Pool(layer.span)),
            [form] * count,
            [layout] * count,
            most.tokens,
        )
        if self.tiled:
            self.copies = self._room_for_copies(most)
        self.most_bundled = 1
        self.seals = layer.plan.index.seals
        self.held = layer.held

    def _workspace_of(self, size: int) -> Tensor:
        return self.rooms.of(
            "workspace",
            size,
            self.span.cache.device,
        )

    def _room_for_copies(self, most: Most) -> Tensor:
        """For the longest sequence, and as many tokens as a step has, within a share of the
        GPU. Those of more sequences with long pasts find no room, and are converted where
        they are attended."""
        device = self.span.cache.device
        total = torch.cuda.get_device_properties(device).total_memory
        size = copies_bytes(self.plan, most.length + most.tokens)
        return self.rooms.of(
            "copies",
            within_share(size, total),
            device,
        )

    def begin(self, spread: Spread, step: StepInputs, tokens: int) -> Spread:
        """The rows of a decode step in the pages of this layer; not planned yet. Pages
        are sealed between append and attention, so append is not the kernel just before."""
        own = spread.over(step)
        own.layers = range(self.own, self.own + 1)
        own.calls = self._calls(own, tokens)
        if self.seals:
            for call in own.calls:
                call.flags &= ~APPENDED
        return own


def plan_together(library: CudaLibrary, spreads: Sequence[Spread], stream: int) -> None:
    """Find which block attends what, in the layers of all: one launch, or a few."""
    planned = [call for spread in spreads for call in spread.calls]
    count = len(planned)
    calls = (AttendDecodeArgs * count)(*planned)
    for call in calls:
        call.stream = stream
    library.call("cuda_plan", calls, count)
