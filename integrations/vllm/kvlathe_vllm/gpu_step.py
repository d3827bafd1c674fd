"""A step of vLLM on a GPU, and what its layers have in common.

A decode step has one new token of each sequence. Its numbers lie where those of the step
before lay, so that a CUDA graph of vLLM finds them there. Nothing of it is decided on the
host while a layer runs: which pages are sealed is a list in device memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvlathe.runtime.native.cuda import LEAST_CHUNK
from kvlathe.runtime.sessions.torch_cuda.attend import Spread
from kvlathe.runtime.sessions.torch_cuda.inputs import StepInputs
from kvlathe_vllm.block_attention import BlockAttention, plan_together
from kvlathe_vllm.calls import Call, Int32

NO_PAGE = -1
"""In the list of pages to seal."""
PLACES = 3
"""Of a page to seal: its hot page, its block, the place of its first token."""


def stream() -> int:
    """vLLM's own."""
    return torch.cuda.current_stream().cuda_stream


@dataclass(frozen=True, eq=False)
class Sent:
    """A step on the device, the same for all layers: the arrays of a Call. ``rows``: as
    of StepInputs. ``seals`` int32 [n, PLACES] where it is a decode step, of n
    sequences."""

    cu: Tensor
    lengths: Tensor
    blocks: Tensor
    hot: Tensor
    rows: int
    seals: Tensor | None = None


_sent: list[tuple[Call, Sent]] = []
"""The step that runs."""


def run_next(call: Call, step: Sent) -> None:
    """The layers run ``call`` next, and find it there."""
    _sent[:] = [(call, step)]


def sent_to(call: Call, device: torch.device) -> Sent:
    """Made by the first layer of a step, if nobody did."""
    if not _sent or _sent[0][0] is not call:
        run_next(call, sent(call, device))
    return _sent[0][1]


def is_decode(call: Call) -> bool:
    """Each sequence brings one row."""
    return bool((np.diff(call.cu) == 1).all())


def sent(call: Call, device: torch.device) -> Sent:
    """Any step, in memory of its own."""

    def on_device(numbers: Int32) -> Tensor:
        host = torch.from_numpy(np.ascontiguousarray(numbers))
        return host.to(device)

    counts = np.diff(call.cu)
    short = np.flatnonzero(counts < LEAST_CHUNK)
    rows = int(call.cu[short[-1] + 1]) if len(short) else 0
    arrays = (
        call.cu,
        call.lengths,
        call.blocks,
        call.hot,
    )
    return Sent(*map(on_device, arrays), rows)


class DecodeBuffers:
    """Where decode steps lie, of at most ``most`` sequences."""

    def __init__(self, most: int, buckets: int, device: torch.device) -> None:
        shapes = ((most + 1,), (most, buckets), (most, 1), (most, PLACES))
        sizes = [int(np.prod(shape)) for shape in shapes]
        pinned = device.type == "cuda"
        self.host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=pinned)
        self.block = torch.zeros(sum(sizes), dtype=torch.int32, device=device)

        def cut(block: Tensor) -> list[Tensor]:
            parts = block.split(sizes)
            return [part.view(s) for part, s in zip(parts, shapes, strict=True)]

        self._on_host: list[Int32] = [part.numpy() for part in cut(self.host)]
        self._on_device = cut(self.block)

    def send(self, call: Call, blocks: Tensor) -> Sent:
        """A decode step. ``blocks`` [n, W]: vLLM's table on the device, in which padding
        sequences come last. They have no rows.

        Whoever made the call has read that table, and so waited for the step before.
        """
        count = len(call.lengths)
        n = len(blocks)
        cu, lengths, hot, seals = self._on_host
        cu[: count + 1] = call.cu
        cu[count + 1 :] = call.cu[-1]
        lengths[:count] = call.lengths
        lengths[count:] = 0
        hot[:count] = call.hot
        hot[count:] = 0
        seals[:] = NO_PAGE
        for row, page in zip(seals, call.sealing, strict=False):
            row[:] = page.hot, page.block, page.position
        self.block.copy_(self.host, non_blocking=True)
        on_cu, on_lengths, on_hot, on_seals = self._on_device
        return Sent(
            on_cu[: n + 1],
            on_lengths[:n],
            blocks,
            on_hot[:n],
            n,
            on_seals[:n],
        )


@dataclass(frozen=True, eq=False)
class LayerStep:
    """A decode step in one layer. ``seals``: as of Sent, with its ids of pages."""

    spread: Spread
    seals: Tensor


class Layers:
    """Layers whose steps are made together."""

    def __init__(self) -> None:
        self._of: dict[int, BlockAttention] = {}
        self._offsets: Tensor | None = None
        self._step: tuple[Sent, dict[int, LayerStep]] | None = None

    def add(self, attention: BlockAttention) -> None:
        self._of[attention.own] = attention
        self._offsets = self._step = None

    def step_of(self, attention: BlockAttention, step: Sent, tokens: int) -> LayerStep:
        """Made for all layers by the first that asks."""
        if self._step is None or self._step[0] is not step:
            self._step = (step, self._made(step, tokens))
        return self._step[1][attention.own]

    def _made(self, step: Sent, tokens: int) -> dict[int, LayerStep]:
        every = list(self._of.values())
        inputs, seals = self._pages(every, step)
        first = every[0]
        base = first.spread(inputs[0], tokens, range(0))
        spreads = [
            attention.begin(base, own, tokens)
            for attention, own in zip(every, inputs, strict=True)
        ]
        plan_together(first.library, spreads, stream())
        made = map(LayerStep, spreads, seals)
        return dict(zip(self._of, made, strict=True))

    def _pages(
        self, every: Sequence[BlockAttention], step: Sent
    ) -> tuple[list[StepInputs], Tensor]:
        """The step with each layer's ids of pages, and its pages to seal [layers, n,
        PLACES]: a few launches for all layers."""
        if self._offsets is None:
            self._offsets = _offsets(every)
        assert step.seals is not None
        more = self._offsets[:, None, :]
        blocks = step.blocks + more[:, :, 1:2]
        hot = step.hot + more[:, :, :1]
        seals = (step.seals + more).masked_fill(step.seals[:, :1] < 0, NO_PAGE)
        inputs = [
            decode_inputs(attention, step, own_blocks, own_hot)
            for attention, own_blocks, own_hot in zip(every, blocks, hot, strict=True)
        ]
        return inputs, seals.contiguous()


def _offsets(every: Sequence[BlockAttention]) -> Tensor:
    """[layers, PLACES]: what their ids of pages are more than numbers of pages."""
    found: list[tuple[int, int, int]] = []
    for attention in every:
        lasting, _ = attention.span.offsets
        found.append((lasting, attention.span.first_block, 0))
    device = every[0].span.cache.device
    return torch.tensor(found, dtype=torch.int32).to(device)


def decode_inputs(
    attention: BlockAttention, step: Sent, blocks: Tensor, hot: Tensor
) -> StepInputs:
    """``blocks``, ``hot``: ids of pages."""
    return StepInputs(
        cu_seqlens_q=step.cu,
        lengths=step.lengths,
        page_tables=[blocks if held else hot for held in attention.held],
        single=True,
        rows=step.rows,
    )
