"""A step of vLLM on a GPU, and what its layers have in common.

A decode step's numbers lie where those of the step before lay, so that a CUDA graph of
vLLM finds them there. A decode step has one new token of each sequence. Nothing of it
is decided on the host while a layer runs: which pages are sealed is a list in device
memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvlathe.runtime.native.cuda import LEAST_CHUNK
from kvlathe.runtime.sessions.gpu.step_buffer import StepKind
from kvlathe.runtime.sessions.torch_cuda.attention.spread import LayerCalls
from kvlathe.runtime.sessions.torch_cuda.inputs import StepInputs
from kvlathe_vllm.block_attention import BlockAttention, Rooms, plan_together
from kvlathe_vllm.calls import Call, Int32, copies_of, is_decode

NO_PAGE = -1
"""In the list of pages to seal."""
PLACES = 3
"""Numbers of a page to seal: its hot page, its block, the place of its first token."""

AT_ONCE = 2
"""Steps of which the host may still write one while the GPU has not read the other."""


@dataclass(frozen=True, eq=False)
class Sent:
    """A step on the device, the same for all layers: the arrays of a Call. ``inputs``
    have no page tables yet: numbers of ``blocks`` [n, W] and of ``hot`` pages [n, 1]
    are other ids of pages in each layer. In a step of ``kind.decode`` no page is sealed
    before it is attended. ``seals`` int32 [n, PLACES] of a decode step of n sequences
    that graphs may hold."""

    inputs: StepInputs
    blocks: Tensor
    hot: Tensor
    seals: Tensor | None = None

    def in_layer(self, held: Sequence[bool], blocks: Tensor, hot: Tensor) -> StepInputs:
        """The step in a layer, where ``blocks`` and ``hot`` are its ids of pages.
        ``held``: of each bucket, whether blocks hold its pages."""
        tables = [blocks if is_held else hot for is_held in held]
        return dataclasses.replace(self.inputs, page_tables=tables)


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


def sent(call: Call, device: torch.device) -> Sent:
    """Any step, in memory of its own."""

    def on_device(numbers: Int32) -> Tensor:
        there = torch.from_numpy(np.ascontiguousarray(numbers))
        if device.type == "cuda":  # else the host waits for the step before
            there = there.pin_memory()
        return there.to(device, non_blocking=True)

    decodes = is_decode(call)
    short = np.flatnonzero(np.diff(call.cu) < LEAST_CHUNK)
    rows = int(call.cu[short[-1] + 1]) if len(short) else 0
    inputs = StepInputs(
        on_device(call.cu),
        on_device(call.lengths),
        (),
        StepKind(decodes and not call.seals_first, rows, chunks=True),
        copies_of=None if decodes else on_device(copies_of(call, LEAST_CHUNK)),
    )
    return Sent(inputs, on_device(call.blocks), on_device(call.hot))


class Places:
    """Arrays of a decode step, in one block of int32."""

    def __init__(self, block: Tensor, most: int, buckets: int) -> None:
        cu, lengths, hot, seals = block.split(Places.sizes(most, buckets))
        self.cu = cu
        self.lengths = lengths.view(most, buckets)
        self.hot = hot.view(most, 1)
        self.seals = seals.view(most, PLACES)

    @staticmethod
    def sizes(most: int, buckets: int) -> list[int]:
        """Sizes of the arrays, in elements."""
        return [
            most + 1,
            most * buckets,
            most,
            most * PLACES,
        ]

    def write(self, call: Call) -> None:
        """Sequences behind those of the call are padding: they have no rows."""
        count = len(call.lengths)
        self.cu.fill_(int(call.cu[-1]))
        self.lengths.zero_()
        self.hot.zero_()
        self.seals.fill_(NO_PAGE)
        self.cu[: count + 1] = torch.from_numpy(call.cu)
        self.lengths[:count] = torch.from_numpy(call.lengths)
        self.hot[:count] = torch.from_numpy(call.hot)
        pages = [
            (
                page.hot,
                page.block,
                page.position,
            )
            for page in call.sealing
        ]
        if pages:
            self.seals[: len(pages)] = torch.tensor(pages, dtype=torch.int32)


class HostBlock:
    """A step's numbers on their way to the device: int32 [size]."""

    def __init__(self, size: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.block = torch.zeros(size, dtype=torch.int32, pin_memory=on_gpu)
        self._read = torch.cuda.Event() if on_gpu else None

    def wait(self) -> None:
        """Until what was written here is on the device."""
        if self._read is not None:
            self._read.synchronize()

    def send(self, there: Tensor) -> None:
        there.copy_(self.block, non_blocking=True)
        if self._read is not None:
            self._read.record()


class DecodeBuffers:
    """Memory in which decode steps lie, of at most ``most`` sequences."""

    def __init__(self, most: int, buckets: int, device: torch.device) -> None:
        size = sum(Places.sizes(most, buckets))
        self._hosts = [HostBlock(size, device) for _ in range(AT_ONCE)]
        self._places = [Places(host.block, most, buckets) for host in self._hosts]
        self._turn = 0
        self.block = torch.zeros(
            size,
            dtype=torch.int32,
            device=device,
        )
        self._there = Places(self.block, most, buckets)

    def send(self, call: Call, blocks: Tensor) -> Sent:
        """A decode step, of pieces that are the sequences in their order (`is_decode`).
        ``blocks`` [n, W]: vLLM's table on the device, in which padding sequences come
        last."""
        self._turn = (self._turn + 1) % AT_ONCE
        host = self._hosts[self._turn]
        host.wait()
        self._places[self._turn].write(call)
        host.send(self.block)
        n = len(blocks)
        there = self._there
        inputs = StepInputs(there.cu[: n + 1], there.lengths[:n], (), StepKind(True, n))
        return Sent(inputs, blocks, there.hot[:n], there.seals[:n])


@dataclass(frozen=True, eq=False)
class LayerStep:
    """A decode step in one layer. ``seals``: as of Sent, with its ids of pages."""

    calls: LayerCalls
    seals: Tensor


class Layers:
    """Layers whose steps are made together."""

    def __init__(self) -> None:
        self.rooms = Rooms()
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
        spread = every[0].spread(inputs[0], tokens)
        made = {
            attention.own: LayerStep(attention.begin(spread, own), own_seals)
            for attention, own, own_seals in zip(every, inputs, seals, strict=True)
        }
        plan_together(every[0].library, [step.calls for step in made.values()])
        return made

    def _pages(
        self, every: Sequence[BlockAttention], step: Sent
    ) -> tuple[list[StepInputs], Tensor]:
        """The step with each layer's ids of pages, and its pages to seal [layers, n,
        PLACES]: a few launches for all layers."""
        offsets = self._offsets
        if offsets is None:
            offsets = self._offsets = _offsets(every)
        assert step.seals is not None
        to_hot, to_block, _ = offsets[:, :, None, None].unbind(1)
        blocks = step.blocks + to_block
        hot = step.hot + to_hot
        seals = step.seals + offsets[:, None]
        seals.masked_fill_(step.seals[:, :1] < 0, NO_PAGE)
        inputs = [
            step.in_layer(attention.held, blocks[i], hot[i])
            for i, attention in enumerate(every)
        ]
        return inputs, seals


def _offsets(every: Sequence[BlockAttention]) -> Tensor:
    """[layers, PLACES]: what their ids of pages are more than numbers of pages."""
    found: list[tuple[int, int, int]] = []
    for attention in every:
        lasting, _ = attention.span.offsets
        found.append((lasting, attention.span.first_block, 0))
    return torch.tensor(found, dtype=torch.int32).to(every[0].span.cache.device)
