"""kvlathe::Attend on one GPU by the native kernels: a step is spread over its queries
and the attention of all layers is planned once, then each layer appends its fresh
tokens and attends. Everything is asynchronous on the current stream and may be captured
into a CUDA graph.

Sizes as in docs/attend.md. All floating tensors are of one 16-bit type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import byref, pointer
from typing import Protocol, Self

import torch
from torch import Tensor

from kvlathe.plan.kernel_forms import has_tiles
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.native.cuda import (
    APPENDED,
    BUNDLES,
    F16,
    OVERLAP,
    AppendArgs,
    AttendDecodeArgs,
    CudaLibrary,
    SpreadArgs,
)
from kvlathe.runtime.native.library import ABI_VERSION
from kvlathe.runtime.native.parts import WindowForm, window_form
from kvlathe.runtime.sessions.gpu.step_buffer import StepKind
from kvlathe.runtime.sessions.torch_cuda.attention import bundles
from kvlathe.runtime.sessions.torch_cuda.attention.layer import (
    LayerAttention,
    Pool,
    layers_of,
    workspace_bytes,
)
from kvlathe.runtime.sessions.torch_cuda.attention.observing import (
    LargestShares,
    Observer,
)
from kvlathe.runtime.sessions.torch_cuda.attention.spread import (
    LayerCalls,
    Spread,
    address,
    ints,
)
from kvlathe.runtime.sessions.torch_cuda.device import current_stream
from kvlathe.runtime.sessions.torch_cuda.inputs import StepInputs
from kvlathe.runtime.sessions.torch_cuda.model.decoder import Angles
from kvlathe.runtime.sessions.torch_cuda.model.rows import ELEMENTS


class StepObserver(Protocol):
    """Is told of each layer's attention, and keeps what observed rows attend."""

    def queue(
        self, layer: int, call: AttendDecodeArgs, queries: Tensor, step: StepInputs
    ) -> None:
        """``call``: the layer's attention, with its q and its stream. ``queries``: q'
        [T, sum of G * rank_k]."""
        ...


class Attention:
    """The attention of some layers of a plan over one pool."""

    def __init__(
        self,
        library: CudaLibrary,
        plan: CompressionPlan,
        layers: Mapping[int, LayerAttention],
        pool: Pool,
        workspace: Tensor,
        copies: Tensor | None = None,
        observers: Sequence[StepObserver] = (),
        most_bundled: int = 1,
    ) -> None:
        """``layers`` by their numbers. ``workspace`` uint8 on the GPU
        (`workspace_bytes`). ``copies``: uint8 there, room for 16-bit copies of sealed
        pages (`copies_bytes`). ``most_bundled``: rows of a sequence that are attended
        together, at most."""
        self.library, self.plan, self.layers, self.pool = library, plan, layers, pool
        self.workspace = workspace
        self.copies = workspace.new_empty(0) if copies is None else copies
        self.observers = observers
        self.most_bundled = most_bundled
        self.parts = plan.index.parts
        self.bundling = bundles.Bundling(plan)
        self.fresh = sum(
            1 << bucket.number for bucket in plan.index.buckets if bucket.is_hot
        )

    @classmethod
    def of_plan(
        cls,
        library: CudaLibrary,
        plan: CompressionPlan,
        scales: Sequence[float],
        pool: Tensor,
        most_rows: int,
        copies: Tensor | None = None,
        sinks: Sequence[Tensor] = (),
    ) -> Self:
        """Every layer of a plan. ``pool``: uint8 on the GPU. ``sinks`` [H, G] float32 of
        each layer, where the model has sink logits. ``most_rows``: tokens of the largest
        step."""
        layers = layers_of(library, plan, scales, pool.device, sinks)
        size = workspace_bytes(library, layers.values(), most_rows)
        workspace = torch.zeros(size, dtype=torch.uint8, device=pool.device)
        observers: list[StepObserver] = []
        if plan.index.observation is not None:
            forms = {i: layer.form for i, layer in layers.items()}
            observers.append(Observer(plan, forms, pool.device, most_rows))
        if plan.index.compaction is not None:
            observers.append(LargestShares(plan, scales, pool, sinks))
        most = bundles.most_bundled(library, plan)
        return cls(library, plan, layers, pool, workspace, copies, observers, most)

    @property
    def tiled(self) -> bool:
        """Whether the GPU has a kernel for prompts of the plan in tiles."""
        here = self.library.lib.kvlathe_cuda_has_prompt_kernel()
        return bool(here) and has_tiles(self.plan)

    # -- a step ------------------------------------------------------------------------
    def prepare(
        self, step: StepInputs, tokens: int, layers: Sequence[int] | None = None
    ) -> LayerCalls:
        """Queue all that ``layers`` (None: all) have in common in a step of ``tokens``
        rows: what each row may read, and which block attends what."""
        spread = self.spread(step, tokens)
        calls = self.calls_of(spread, list(self.layers) if layers is None else layers)
        if spread.rows:
            self.plan_calls(calls)
        return calls

    def bundles(self, kind: StepKind) -> bool:
        """Whether rows of a sequence are attended together in a step without chunks."""
        most = self.most_bundled
        return self.bundling.rows(most, kind.short, self.pool.device) > 1

    def spread(self, step: StepInputs, tokens: int) -> Spread:
        """Queue what each of ``tokens`` rows may read."""
        most = 1 if step.kind.decode else self.most_bundled
        # Without tiles a chunk's rows are as many as read the same tokens.
        if step.kind.bundles is not None:
            most = most if step.kind.bundles else 1
        elif has_tiles(self.plan) or not step.kind.chunks:
            most = self.bundling.rows(most, step.kind.short, self.pool.device)
        lists = self._list_sizes(step, tokens)
        spread = Spread.empty(step, tokens, lists, self.parts, most > 1)
        args = SpreadArgs(
            ABI_VERSION,
            tokens,
            len(step.lengths),
            len(self.plan.index.buckets),
            self.fresh,
        )
        args.cu_seqlens_q = step.cu_seqlens_q.data_ptr()
        args.lengths = step.lengths.data_ptr()
        args.page_tables = address(spread.page_tables)
        args.page_table_widths = address(spread.widths)
        args.sequence_of = spread.sequence_of.data_ptr()
        args.visible = spread.visible.data_ptr()
        wanted = spread.own_tables()
        args.spread_tables, args.stream = address(wanted), current_stream()
        args.parts = len(self.parts)
        buckets = ints([part.bucket for part in self.parts])
        args.part_buckets = address(buckets)
        windows = (WindowForm * len(self.parts))(*map(window_form, self.parts))
        if spread.windowed:
            args.windows = address(windows)
            args.page_tokens = self.plan.page_tokens
        if spread.hidden is not None:
            args.hidden = spread.hidden.data_ptr()
        args.row_lengths = spread.row_lengths.data_ptr()
        args.most_bundled = most
        if not spread.prompts:
            self.library.call("cuda_spread", byref(args))
        # Where layers are unlike, each list takes a call, which fills the rest alike.
        for group, prompts in spread.prompts.items():
            args.group_size, args.prompts = group, prompts.data_ptr()
            self.library.call("cuda_spread", byref(args))
        return spread

    def calls_of(self, spread: Spread, layers: Sequence[int]) -> LayerCalls:
        """The attention of ``layers``; not planned yet."""
        calls = (AttendDecodeArgs * len(layers))()
        size = self.library.plan_bytes() if spread.rows else 0
        plan = torch.empty(
            len(layers), size, dtype=torch.uint8, device=self.pool.device
        )
        kept: list[object] = []
        for i, (args, number) in enumerate(zip(calls, layers, strict=True)):
            layer = self.layers[number]
            form = layer.form
            # The plan is the same for both 16-bit types; `attend` says which it is.
            pointer(args)[0] = AttendDecodeArgs(
                ABI_VERSION,
                F16,
                spread.tokens,
                form.group,
                self.plan.page_tokens,
                len(form.parts),
                layer.scale,
            )
            args.softcap = self.plan.model.softcap
            if layer.sinks is not None:
                args.sinks = layer.sinks.data_ptr()
            parts = spread.parts_of(form)
            args.parts = parts
            args.q_stride, args.o_stride = form.queries, form.out
            args.pool, args.pool_bytes = self.pool.data_ptr(), self.pool.numel()
            args.workspace = self.workspace.data_ptr()
            args.workspace_bytes = self.workspace.numel()
            # The kernel before is append: it writes neither lengths, page tables nor
            # plan, and in a decode step one row a sequence. Other rows read what it
            # writes for the rows before them.
            args.flags = OVERLAP | (APPENDED if spread.step.kind.decode else 0)
            if spread.bundled:
                args.flags |= BUNDLES
            if spread.rows:
                args.plan, args.plan_bytes = plan[i].data_ptr(), size
            kept.append(parts)
            if spread.prompts:
                prompts = spread.prompts_of(form, self.copies)
                args.prompts = pointer(prompts)
                kept.append(prompts)
        return LayerCalls(spread, layers, calls, plan, kept)

    def plan_calls(self, calls: LayerCalls) -> None:
        """Find which block attends what, in all its layers: part of `prepare`, apart for
        benchmarks."""
        for call in calls.calls:
            call.stream = current_stream()
        self.library.call("cuda_plan", calls.calls, len(calls.calls))

    def _list_sizes(self, step: StepInputs, tokens: int) -> dict[int, int]:
        """Bytes of the list of prompt chunks by query heads a KV head; none for a step
        without any, and where the GPU has no kernel for them. Without a list warps may
        attend alone."""
        if step.kind.decode or not step.kind.chunks or not self.tiled:
            return {}
        size_of = self.library.lib.kvlathe_cuda_prompt_list_bytes
        groups = {layer.form.group for layer in self.layers.values()}
        return {group: size_of(tokens, len(step.lengths), group) for group in groups}

    # -- a layer -----------------------------------------------------------------------
    def run(
        self,
        calls: LayerCalls,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        angles: Angles | None,
        weights: Mapping[str, Tensor],
    ) -> Tensor:
        """q, k, v: rows before RoPE, views of one matrix are fine -> o [T, sum of G *
        rank_v]; the pool has k' and v'. None in place of k and v where another layer's
        are there.

        ``weights``: proj_q, proj_k, centre_k where the plan projects.
        """
        queries = self.append(calls, layer, q, k, v, angles, weights)
        return self.attend(calls, layer, queries)

    def append(
        self,
        calls: LayerCalls,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        angles: Angles | None,
        weights: Mapping[str, Tensor],
    ) -> Tensor:
        """The first half of `run`: k' and v' go to the pool -> q' [T, sum of G * rank_k].
        Pages that it fills may be sealed before `attend`."""
        queries = q.new_empty(len(q), self.layers[layer].form.queries)
        self._append(layer, q, k, v, angles, calls.spread, weights, queries)
        return queries

    def attend(self, calls: LayerCalls, layer: int, queries: Tensor) -> Tensor:
        """The second half of `run`, of q' [T, sum of G * rank_k]."""
        out = queries.new_empty(len(queries), self.layers[layer].form.out)
        args = calls.calls[calls.layers.index(layer)]
        args.element = ELEMENTS[queries.dtype]
        args.q, args.o = queries.data_ptr(), out.data_ptr()
        args.stream = current_stream()
        self.library.call("cuda_attend_decode", byref(args))
        for observer in self.observers:
            observer.queue(layer, args, queries, calls.spread.step)
        return out

    def _append(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        angles: Angles | None,
        spread: Spread,
        weights: Mapping[str, Tensor],
        queries: Tensor,
    ) -> None:
        args = AppendArgs(ABI_VERSION, ELEMENTS[q.dtype], len(q))
        args.q, args.q_stride = q.data_ptr(), q.stride(0)
        if k is not None and v is not None:
            args.k, args.k_stride = k.data_ptr(), k.stride(0)
            args.v, args.v_stride = v.data_ptr(), v.stride(0)
        if angles is not None:
            args.cos, args.sin = angles[0].data_ptr(), angles[1].data_ptr()
        args.sequence_of = spread.sequence_of.data_ptr()
        args.visible = spread.visible.data_ptr()
        args.page_tables = address(spread.page_tables)
        args.page_table_widths = address(spread.widths)
        args.layout = self.layers[layer].layout.data_ptr()
        for name in (
            ("proj_q", "proj_k", "centre_k") if self.plan.index.projected else ()
        ):
            setattr(args, name, weights[name].data_ptr())
        args.pool, args.pool_bytes = self.pool.data_ptr(), self.pool.numel()
        args.q_out, args.q_out_stride = queries.data_ptr(), queries.stride(0)
        args.stream = current_stream()
        self.library.call("cuda_append", self.layers[layer].form.handle, byref(args))
