"""A step's integers on their way to the GPU, and decode steps as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlathe.runtime.session import StepPlan
from kvlathe.runtime.step_block import StepForm


@dataclass(frozen=True)
class StepViews:
    """A step's int32 arrays inside one block."""

    input_ids: Tensor
    positions: Tensor
    query_starts: Tensor
    lengths: Tensor
    logit_rows: Tensor
    page_tables: tuple[Tensor, ...]


class StepBlock:
    """A step's arrays, of fixed sizes, in one block of int32 on the GPU and in two in pinned memory that take turns: a
    step's inputs are written while those of the step before may still be on their way."""

    def __init__(self, form: StepForm) -> None:
        self.form = form
        self.gpu = torch.zeros(form.size, dtype=torch.int32, device="cuda")
        self._hosts = [torch.zeros(form.size, dtype=torch.int32, pin_memory=True) for _ in range(2)]
        self._arrays = [form.cut(host.numpy()) for host in self._hosts]
        self._sent, self._turn = [torch.cuda.Event(), torch.cuda.Event()], 0

    def send(self, step: StepPlan) -> None:
        """Queue the copy of a step's arrays to the GPU. Rows and sequences beyond the step's belong to nobody."""
        self._turn ^= 1
        self._sent[self._turn].synchronize()  # of two steps ago
        self.form.write(step, self._arrays[self._turn])
        self.gpu.copy_(self._hosts[self._turn], non_blocking=True)
        self._sent[self._turn].record()

    def views(self) -> StepViews:
        ids, positions, starts, lengths, rows, *tables = self.form.cut(self.gpu).values()
        return StepViews(ids, positions, starts, lengths, rows, tuple(tables))


class DecodeGraph:
    """One decode step of up to ``batch`` sequences, captured."""

    def __init__(
        self, batch: int, widths: tuple[int, ...], compute: Callable[[StepViews], Tensor], memory: object
    ) -> None:
        self.block = StepBlock(StepForm(batch, batch, batch, widths))
        views = self.block.views()  # zeros: nobody's tokens
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compute(views)  # cuBLAS and the kernels set themselves up outside the capture
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=memory):  # type: ignore[arg-type]
            self.logits = compute(views)
            self.best = self.logits.argmax(-1).int()
        self.input_ids = views.input_ids

    def run(self, step: StepPlan, follow: bool = False) -> DecodeGraph:
        """Queue a step; ``logits`` [batch, vocab] and ``best`` [batch] are its own until the next. ``follow``: its
        input is ``best`` of the step before."""
        self.block.send(step)
        if follow:
            self.input_ids.copy_(self.best)
        self.graph.replay()
        return self
