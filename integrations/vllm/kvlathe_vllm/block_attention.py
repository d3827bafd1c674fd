"""The cuda backend's attention over blocks of a host: one layer over its span."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvlathe.runtime.native.cuda import (
    APPENDED,
    AttendDecodeArgs,
    CudaLibrary,
    LayerForm,
    LayerPages,
)
from kvlathe.runtime.sessions.gpu.side_memory import copies_bytes, within_share
from kvlathe.runtime.sessions.torch_cuda.attention.attend import Attention
from kvlathe.runtime.sessions.torch_cuda.attention.layer import (
    LayerAttention,
    workspace_bytes,
)
from kvlathe.runtime.sessions.torch_cuda.attention.spread import LayerCalls, Spread
from kvlathe.runtime.sessions.torch_cuda.device import current_stream
from kvlathe.runtime.sessions.torch_cuda.inputs import StepInputs
from kvlathe_vllm.layer import Layer, Most
from kvlathe_vllm.span import Span


class SpanPool:
    """A span as attention asks for its pool."""

    def __init__(self, span: Span) -> None:
        self.span = span

    @property
    def device(self) -> torch.device:
        return self.span.cache.device

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
    """The attention of one layer, number ``own``, whose pages are blocks of a host."""

    def __init__(
        self, library: CudaLibrary, layer: Layer, most: Most, rooms: Rooms
    ) -> None:
        self.own, self.span, self.held = layer.block.layer, layer.span, layer.held
        self.seals = layer.plan.index.seals
        device = layer.span.cache.device
        strides = [
            layer.span.block_stride if held else layer.block.hot_bytes
            for held in layer.held
        ]
        pages = LayerPages(layer.table, layer.rows, strides)
        one = LayerAttention(
            LayerForm(library, layer.block.layout, self.own, pages),
            torch.from_numpy(layer.table).to(device),
            layer.scale,
            layer.sinks,
        )
        size = workspace_bytes(library, [one], most.tokens)
        super().__init__(
            library,
            layer.plan,
            {self.own: one},
            SpanPool(layer.span),
            rooms.of("workspace", size, device),
            _room_for_copies(library, layer, most, rooms),
            most_bundled=1,
        )

    def begin(self, first: Spread, step: StepInputs) -> LayerCalls:
        """The rows of a decode step in the pages of this layer; not planned yet.
        ``first``: those of another layer; where windows hide pages, each layer has
        tables of its own. Pages are sealed between append and attention, so append is
        not the kernel just before."""
        spread = first.over(step)
        if first.windowed:
            spread = self.spread(step, first.tokens)
        calls = self.calls_of(spread, [self.own])
        if self.seals:
            for call in calls.calls:
                call.flags &= ~APPENDED
        return calls


def _room_for_copies(
    library: CudaLibrary, layer: Layer, most: Most, rooms: Rooms
) -> Tensor | None:
    """Room for the longest sequence, and as many tokens as a step has, within a share of
    the GPU. Those of more sequences with long pasts find no room, and are converted where
    they are attended."""
    device = layer.span.cache.device
    if device.type == "cpu" or not library.lib.kvlathe_cuda_has_prompt_kernel():
        return None
    total = torch.cuda.get_device_properties(device).total_memory
    size = copies_bytes(layer.plan, most.length + most.tokens)
    return rooms.of("copies", within_share(size, total), device)


def plan_together(library: CudaLibrary, layers: Sequence[LayerCalls]) -> None:
    """Find which block attends what, in all ``layers``: one launch, or a few."""
    planned = [call for layer in layers for call in layer.calls]
    calls = (AttendDecodeArgs * len(planned))(*planned)
    for call in calls:
        call.stream = current_stream()
    library.call("cuda_plan", calls, len(calls))
