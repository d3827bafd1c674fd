"""StagedSession: an EvictingSession whose prompts lose rows between the stages of its plan.

Layers that the same sequences pass are queued together, over these sequences alone. What
leaves them stays on the GPU, and so do the places of the rows that stay: the host knows
only how many there are. A decode step passes all layers, in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kvlathe.plan.manifest import Limits
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.native.cuda import CudaLibrary
from kvlathe.runtime.sessions.gpu.device import Device, DeviceArray
from kvlathe.runtime.sessions.gpu.session import Compute
from kvlathe.runtime.sessions.gpu.step_buffer import (
    StepBuffer,
    StepForm,
    kind_of,
)
from kvlathe.runtime.sessions.protocols import Int32, PassRows, StepPlan
from kvlathe.runtime.sessions.steps import check_step
from kvlathe.runtime.sessions.substeps import segments
from kvlathe.runtime.sessions.torch_cuda.device import tensor_of
from kvlathe.runtime.sessions.torch_cuda.inputs import TorchStep
from kvlathe.runtime.sessions.torch_cuda.tokens.evicting import EvictingSession


@dataclass(frozen=True, eq=False)
class DeviceRows:
    """As HiddenRows. ``hidden`` [n, D]; ``positions`` int32 [n], None for 0 .. n - 1;
    ``attention`` float64 [n]: what observed rows gave each in the pass's last layer, once
    the pass has ended."""

    hidden: Tensor
    positions: Tensor | None
    attention: Tensor | None = None

    known = None
    """The host would wait for them."""

    def places(self) -> Int32:
        if self.positions is None:
            count = len(self.hidden)
            return np.arange(count, dtype=np.int32)
        return self.positions.cpu().numpy()

    @torch.inference_mode()
    def stay(self, count: int, last: int) -> DeviceRows:
        assert self.attention is not None
        kept = survivors(self.attention, count, last)
        positions = kept
        if self.positions is not None:
            positions = self.positions[kept]
        hidden = self.hidden[kept]
        return DeviceRows(hidden, positions.int())


def survivors(attention: Tensor, count: int, last: int) -> Tensor:
    """As survivors of host/passes.py."""
    ranked = attention.clone()
    first = len(ranked) - min(last, count)
    ranked[first:] = torch.inf
    order = torch.argsort(
        ranked,
        descending=True,
        stable=True,
    )
    kept = order[:count]
    return kept.sort().values


class LayerCompute(Compute, Protocol):
    """A Compute that can stop between two layers."""

    def run(
        self, step: TorchStep, layers: range, x: Tensor | None = None
    ) -> Tensor: ...

    def logits(self, step: TorchStep, x: Tensor) -> Tensor: ...


class StagedSession(EvictingSession):
    """A session of a plan with stages."""

    def __init__(
        self,
        device: Device,
        library: CudaLibrary,
        plan: CompressionPlan,
        limits: Limits,
        pool: DeviceArray,
        compute: LayerCompute,
    ) -> None:
        super().__init__(device, library, plan, limits, pool, compute)
        self.staged = compute
        self._buffers = [self._buffer]

    def launch(self, step: StepPlan) -> DeviceArray:
        if step.passes is None:
            return super().launch(step)
        check_step(step, self.limits)
        self._scores.remember(step)
        return self._launch_stages(step)

    @torch.inference_mode()
    def _launch_stages(self, step: StepPlan) -> DeviceArray:
        """The segments of a step, one after the other."""
        rows = len(step.logit_rows)
        logits = self._rows_of(self.room_for(rows), rows)
        every = np.arange(len(step.lengths))
        hidden = _entering(step)
        for i, (stages, share) in enumerate(segments(step, self.plan.index.graphs)):
            inputs = self._inputs_of(i, share.step)
            sequences = every[share.sequences].tolist()
            own = [hidden[b] for b in sequences if b in hidden]
            x = torch.cat(own) if own else None
            x = self.staged.run(inputs, self._layers_of(stages), x)
            if stages.stop == self.plan.index.graphs:
                computed = self.staged.logits(inputs, x)
                tensor_of(logits).copy_(computed)
            counts = np.diff(share.step.cu_seqlens_q)
            parts = x.split(counts.tolist())
            hidden |= zip(sequences, parts, strict=True)
        self._leave(step, hidden)
        return logits

    def _layers_of(self, stages: range) -> range:
        first = self.plan.index.layers_of(stages[0])
        last = self.plan.index.layers_of(stages[-1])
        return range(first.start, last.stop)

    def _inputs_of(self, place: int, step: StepPlan) -> TorchStep:
        """A segment on the GPU; ``step`` is its share of a whole step. Each segment of a
        step has a buffer of its own, so that none waits for another."""
        if place == len(self._buffers):
            largest = StepForm.largest(self.plan, self.limits)
            self._buffers.append(StepBuffer(self.device, largest))
        kind = kind_of(step, self.widths)
        inputs = TorchStep.of(self.sent(step, self._buffers[place], kind, True))
        self._place(step, inputs.positions)
        return inputs

    def _place(self, step: StepPlan, positions: Tensor) -> None:
        """Write the ``positions`` of a share that the host does not know."""
        for part in filter(None, step.passes or ()):
            if part.entered is not None:
                known = device_rows(part.entered).positions
                assert known is not None
                positions[part.rows] = known[part.places]

    def _leave(self, step: StepPlan, hidden: dict[int, Tensor]) -> None:
        """Keep what the rows of prompts leave a pass with."""
        for b, part in enumerate(step.passes or ()):
            if part is None or not part.leaves:
                continue
            left = _left(part, hidden[b])
            left.hidden[part.places] = hidden[b]
            if part.ends:
                given = self._attention(step, b, part.count)
                left = replace(left, attention=given)
            part.left = left

    def _attention(self, step: StepPlan, sequence: int, rows: int) -> Tensor:
        """What the rows of a pass were given in its last layer, [rows]."""
        assert step.stages is not None
        last = int(step.stages[sequence, 1]) - 1
        layers = self.plan.index.layers_of(last)
        tables = [table[sequence] for table in step.page_tables]
        return self._scores.given(
            layers[-1],
            tables,
            rows,
        )


def device_rows(rows: object) -> DeviceRows:
    assert isinstance(rows, DeviceRows)
    return rows


def _entering(step: StepPlan) -> dict[int, Tensor]:
    """The hidden states of sequences that enter past stage 0."""
    hidden: dict[int, Tensor] = {}
    for b, part in enumerate(step.passes or ()):
        if part is not None and part.entered is not None:
            entered = device_rows(part.entered)
            hidden[b] = entered.hidden[part.places]
    return hidden


def _left(part: PassRows, hidden: Tensor) -> DeviceRows:
    """What has left so far, and room for the rest. ``hidden``: of the next rows."""
    if part.left is not None:
        return device_rows(part.left)
    width = hidden.shape[1]
    room = hidden.new_empty(part.count, width)
    positions = None
    if part.entered is not None:
        positions = device_rows(part.entered).positions
    return DeviceRows(room, positions)
