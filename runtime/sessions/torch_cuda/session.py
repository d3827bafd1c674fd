"""TorchSession: steps of the torch decoder, whose tokens are sampled on the GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Protocol, cast
from weakref import WeakSet

import torch
from torch import Tensor

from kvlathe.base.memory import LESS_MEMORY, within_memory
from kvlathe.plan.kernel_forms import UNPROVEN
from kvlathe.plan.manifest import Limits
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.native.cuda import CudaLibrary
from kvlathe.runtime.sessions.adapters import LoadedAdapter, distinct
from kvlathe.runtime.sessions.gpu.device import Device, DeviceArray
from kvlathe.runtime.sessions.gpu.pages import DevicePages
from kvlathe.runtime.sessions.gpu.session import Compute, DecodeGraph, DeviceSession
from kvlathe.runtime.sessions.gpu.step_buffer import (
    MOST_GRAPH_ROWS,
    StepKind,
    fits_graph,
    graph_rows,
)
from kvlathe.runtime.sessions.protocols import (
    Capability,
    Choose,
    Hidden,
    Int64,
    Sampling,
    StepPlan,
)
from kvlathe.runtime.sessions.torch_cuda.device import bytes_of, tensor_of
from kvlathe.runtime.sessions.torch_cuda.page_sums import PageSums
from kvlathe.runtime.sessions.torch_cuda.sampling import sampling
from kvlathe.runtime.sessions.torch_cuda.sampling.counts import TokenCounts
from kvlathe.runtime.text.sampler import SamplingRows


class HiddenCompute(Compute, Protocol):
    """A Compute that has hidden states, as TorchCompute does."""

    hidden: Tensor | None
    kept: Tensor | None
    given: Tensor | None

    def room(self, rows: int) -> Tensor:
        """Room for hidden states [rows, D]."""
        ...

    def bundles(self, kind: StepKind) -> bool:
        """Whether rows of a sequence are attended together in a step without chunks."""
        ...


class TorchSession(DeviceSession):
    """A DeviceSession whose tokens are sampled on the GPU: logits never leave it, and
    the next step takes its tokens there."""

    capabilities: frozenset[Capability] = DevicePages.capabilities.union(
        ("samples", "counts_tokens", "page_sums", "hidden_states")
    )
    captures_guesses = True
    """Whether CUDA graphs take steps with several rows a sequence, too."""
    _tokens: Tensor | None = None  # of the step before
    _counts: TokenCounts | None = None

    def start(self, step: StepPlan) -> Choose:
        """As Session.start."""
        return partial(self._choose, tensor_of(self.launch(step)))

    def graph_for(self, step: StepPlan, kind: StepKind) -> DecodeGraph | None:
        """As DeviceSession.graph_for. A step of guesses has logits of all its rows."""
        rows = graph_rows(len(step.input_ids))
        whole = len(step.logit_rows) == len(step.input_ids) and not kind.chunks
        able = self.captures_guesses and self._states is None and not self._observes
        able = able and os.environ.get(UNPROVEN) == "1"
        if (
            kind.decode
            or not (able and whole and rows)
            or not fits_graph(step, self.widths)
        ):
            return super().graph_for(step, kind)
        batch = next(n for n in self.batch_sizes if n >= len(step.lengths))
        rows = max(rows, batch)
        guessed = StepKind(False, rows, bundles=self.computes.bundles(kind))
        return self.graph(batch, step.adapters is not None, guessed)

    @property
    def computes(self) -> HiddenCompute:
        """Its compute, which has hidden states."""
        return cast("HiddenCompute", self.compute)

    def keep_hidden(self) -> None:
        """As Session.keep_hidden. Graphs are captured again that do not keep it."""
        if self.computes.kept is None:
            most = max(*self.batch_sizes, MOST_GRAPH_ROWS)
            self.computes.kept = self.computes.room(most)
            self.forget_graphs()

    @torch.inference_mode()
    def hidden(self) -> Hidden:
        """As Session.hidden: a copy, as the next step may overwrite it."""
        found = self.computes.hidden
        if self.replayed:
            assert self.computes.kept is not None
            found = self.computes.kept[: self.replayed]
        assert found is not None
        return found.clone()

    def _choose(self, logits: Tensor, rows: SamplingRows) -> Sampling:
        if self._counts is None and rows.penalties is not None:
            self._counts = TokenCounts(logits.shape[1], logits.device)
        chosen = sampling.sample(logits, rows, self._counts)
        self._tokens = chosen.tokens
        return chosen

    @cached_property
    def _page_sums(self) -> PageSums:
        return PageSums(bytes_of(self.pool))

    def row_sums(self, bucket: int, pages: Sequence[int]) -> Callable[[], Int64]:
        """As Session.row_sums."""
        return self._page_sums.of(self.strides[bucket], pages)

    @torch.inference_mode()
    def complete(self, step: StepPlan, input_ids: DeviceArray) -> None:
        if step.after is None:
            return
        assert self._tokens is not None
        ids = tensor_of(input_ids)[: len(step.after)]
        rows = torch.from_numpy(step.after).to(ids.device, non_blocking=True)
        # Where the logits were no numbers there is no token: the sequence ends.
        sampled = self._tokens[rows.clamp(min=0)].clamp(min=0)
        ids.copy_(torch.where(rows >= 0, sampled, ids))


class GuessingSession(TorchSession):
    """A TorchSession of a decoder that guesses tokens: its rows read a hidden state
    beside their token (``StepPlan.hidden``)."""

    def __init__(
        self,
        device: Device,
        library: CudaLibrary,
        plan: CompressionPlan,
        limits: Limits,
        pool: DeviceArray,
        compute: Compute,
    ) -> None:
        super().__init__(device, library, plan, limits, pool, compute)
        most = max(limits.max_num_tokens, max(self.batch_sizes))
        self.computes.given = self.computes.room(most)

    @torch.inference_mode()
    def launch(self, step: StepPlan) -> DeviceArray:
        """As DeviceSession.launch."""
        assert step.hidden is not None and self.computes.given is not None
        rows = [cast("Tensor", hidden)[row] for hidden, row in step.hidden]
        self.computes.given[: len(rows)].copy_(torch.stack(rows))
        return super().launch(step)


class Adaptable(Protocol):
    """A decoder that adds what adapters do."""

    def load_adapters(self, adapters: Sequence[LoadedAdapter]) -> None:
        """Have these adapters, and no others."""
        ...


class AdaptingSession(TorchSession):
    """A TorchSession whose steps may have LoRA adapters. Those that somebody still has
    stay on the GPU: when another one is taken, the others are left out, and the graphs
    of steps with adapters are captured again."""

    capabilities: frozenset[Capability] = TorchSession.capabilities.union(("adapters",))

    def __init__(
        self,
        device: Device,
        library: CudaLibrary,
        plan: CompressionPlan,
        limits: Limits,
        pool: DeviceArray,
        compute: Compute,
        decoder: Adaptable,
    ) -> None:
        super().__init__(device, library, plan, limits, pool, compute)
        self._decoder = decoder
        self._adapters: WeakSet[LoadedAdapter] = WeakSet()

    def launch(self, step: StepPlan) -> DeviceArray:
        """As DeviceSession.launch. Takes adapters that it does not have, as it has none
        after a sleep."""
        for adapter in distinct(step.adapters or ()):
            self.take_adapter(adapter)
        return super().launch(step)

    def take_adapter(self, adapter: LoadedAdapter) -> None:
        if adapter in self._adapters:
            return
        self.forget_graphs((True,))  # their matrices will lie elsewhere
        there = distinct([*self._adapters, adapter])
        fact = f"there is no memory for the adapter {adapter.name}"
        within_memory(partial(self._decoder.load_adapters, there), fact, LESS_MEMORY)
        self._adapters.add(adapter)

    def drop_adapter(self, adapter: LoadedAdapter) -> None:
        """Its memory comes back when the next one is taken and no sequence has it."""
