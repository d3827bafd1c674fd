"""kvlathe::Attend on one GPU by the native kernels: a step is spread over its queries
and the attention of all layers is planned once, then each layer appends its fresh
tokens and attends. Everything is asynchronous on the current stream and may be captured
into a CUDA graph.

Sizes as in docs/attend.md. All floating tensors are of one 16-bit type.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from copy import copy
from ctypes import Array, addressof, byref, c_int32, c_void_p, pointer
from functools import partial

import torch
from torch import Tensor

from kvlathe.plan.index import KernelPart
from kvlathe.plan.layer_table import layer_table
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.native.cuda import (
    APPENDED,
    BUNDLES,
    F16,
    OVERLAP,
    AppendArgs,
    AttendDecodeArgs,
    CudaLibrary,
    LayerForm,
    PromptPart,
    Prompts,
    SpreadArgs,
)
from kvlathe.runtime.native.library import ABI_VERSION
from kvlathe.runtime.native.parts import Part, WindowForm, window_form
from kvlathe.runtime.sessions.torch_cuda.attention import bundles
from kvlathe.runtime.sessions.torch_cuda.attention.inputs import StepInputs
from kvlathe.runtime.sessions.torch_cuda.attention.mass import LargestShares
from kvlathe.runtime.sessions.torch_cuda.attention.observer import Observer
from kvlathe.runtime.sessions.torch_cuda.model.rows import ELEMENTS


class Attention:
    """The attention of every layer of a plan over one pool."""

    def __init__(
        self,
        library: CudaLibrary,
        plan: CompressionPlan,
        scales: Sequence[float],
        pool: Tensor,
        most_rows: int,
        copies: Tensor | None = None,
        sinks: Sequence[Tensor] = (),
    ) -> None:
        """``pool``: uint8 on the GPU. ``sinks`` [H, G] float32 of each layer, where the
        model has sink logits. ``most_rows``: tokens of the largest step.
        ``copies``: uint8 there, room for 16-bit copies of sealed pages
        (`copies_bytes`)."""
        layout, every = CacheLayout(plan), range(plan.model.layers)
        forms = [LayerForm(library, layout, layer) for layer in every]
        tables = [layer_table(layout, layer) for layer in every]
        layouts = [torch.from_numpy(table).to(pool.device) for table in tables]
        self._set_up(library, plan, scales, pool, forms, layouts, most_rows)
        self.most_bundled = bundles.most_bundled(library, plan)
        self.sinks = self.shares.sinks = sinks
        if copies is not None:
            self.copies = copies

    def _set_up(
        self,
        library: CudaLibrary,
        plan: CompressionPlan,
        scales: Sequence[float],
        pool: Tensor,
        forms: Sequence[LayerForm],
        layouts: Sequence[Tensor],
        most_rows: int,
    ) -> None:
        """Everything that a step needs, from the ``forms`` and ``layouts`` of layers."""
        self.library, self.plan, self.scales, self.pool = library, plan, scales, pool
        self.forms, self.layouts = forms, layouts
        size = max(library.workspace_bytes(most_rows, form.heads) for form in forms)
        bytes_of = partial(torch.zeros, dtype=torch.uint8, device=pool.device)
        self.workspace, self.copies = self._workspace_of(size), bytes_of(0)
        self.fresh = sum(
            1 << bucket.number for bucket in plan.index.buckets if bucket.is_hot
        )
        self.parts = plan.index.parts
        self.bundling = bundles.Bundling(plan)
        self.sinks: Sequence[Tensor] = ()
        self.observer = Observer(plan, forms, pool, most_rows)
        self.shares = LargestShares(plan, scales, pool)

    def _workspace_of(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self.pool.device)

    def spread(
        self, step: StepInputs, tokens: int, layers: range | None = None
    ) -> Spread:
        """What each of ``tokens`` rows may read in ``layers`` (None: in all)."""
        most = 1 if step.single else self.most_bundled
        most = self.bundling.rows(most, step.short, self.pool.device)
        done = Spread(step, tokens, self._list_size(step, tokens), self.parts, most > 1)
        done.layers = range(len(self.forms)) if layers is None else layers
        args = SpreadArgs(
            ABI_VERSION,
            tokens,
            len(step.lengths),
            len(self.plan.index.buckets),
            self.fresh,
        )
        args.cu_seqlens_q = step.cu_seqlens_q.data_ptr()
        args.lengths = step.lengths.data_ptr()
        args.page_tables, args.page_table_widths = done.addresses, done.widths
        args.sequence_of = done.sequence_of.data_ptr()
        args.visible = done.visible.data_ptr()
        wanted = done.wanted()
        args.spread_tables, args.stream = _address(wanted), _stream()
        args.parts = len(self.parts)
        buckets = _ints([part.bucket for part in self.parts])
        args.part_buckets = _address(buckets)
        forms = [window_form(part) for part in self.parts]
        array_of = WindowForm * len(forms)
        windows = array_of(*forms)
        if done.windowed:
            args.windows = addressof(windows)
            args.page_tokens = self.plan.page_tokens
        if done.hidden is not None:
            args.hidden = done.hidden.data_ptr()
        args.group_size, args.row_lengths = (
            self.plan.model.group_size,
            done.row_lengths.data_ptr(),
        )
        args.prompts = None if done.prompts is None else done.prompts.data_ptr()
        args.most_bundled = most
        self.library.call("cuda_spread", byref(args))
        done.calls = self._calls(done, tokens)
        if done.rows:
            self.plan_calls(done)
        return done

    def plan_calls(self, spread: Spread) -> None:
        """Find which block attends what, in all its layers: part of `spread`, apart for
        benchmarks."""
        for call in spread.calls:
            call.stream = _stream()
        self.library.call("cuda_plan", spread.calls, len(spread.calls))

    def _calls(self, spread: Spread, tokens: int) -> Array[AttendDecodeArgs]:
        """The attention of each of its layers, but for its q, o and stream."""
        calls = (AttendDecodeArgs * len(spread.layers))()
        if spread.rows:
            size = self.library.plan_bytes()
            spread.plan = torch.empty(
                len(calls), size, dtype=torch.uint8, device=self.pool.device
            )
        for i, (args, layer) in enumerate(zip(calls, spread.layers, strict=True)):
            form = self.forms[layer]
            # The plan is the same for both 16-bit types; `run` says which it is.
            sizes = (
                ABI_VERSION,
                F16,
                tokens,
                self.plan.model.group_size,
                self.plan.page_tokens,
                len(form.parts),
            )
            ctypes.pointer(args)[0] = AttendDecodeArgs(*sizes, self.scales[layer])
            args.softcap = self.plan.model.softcap
            if self.sinks:
                args.sinks = self.sinks[layer].data_ptr()
            args.parts, args.q_stride, args.o_stride = (
                spread.parts_of(form),
                form.queries,
                form.out,
            )
            args.pool, args.pool_bytes = self.pool.data_ptr(), self.pool.numel()
            args.workspace, args.workspace_bytes = (
                self.workspace.data_ptr(),
                self.workspace.numel(),
            )
            # The kernel before is append: it writes neither lengths, page tables nor
            # plan, and in a decode step one row a sequence. Other rows read what it
            # writes for the rows before them.
            args.flags = OVERLAP | (APPENDED if spread.step.single else 0)
            if spread.bundled:
                args.flags |= BUNDLES
            if spread.rows:
                args.plan = spread.plan[i].data_ptr()
                args.plan_bytes = spread.plan.shape[1]
            if spread.prompts is not None:
                args.prompts = pointer(spread.prompts_of(form, self.copies))
        return calls

    def _list_size(self, step: StepInputs, tokens: int) -> int:
        """Bytes of the list of prompt chunks; 0 for a step without any, and where the
        GPU has no kernel for them. Without a list warps may attend alone."""
        chunks = step.chunks and not step.single
        if not (chunks and self.library.lib.kvlathe_cuda_has_prompt_kernel()):
            return 0
        return self.library.lib.kvlathe_cuda_prompt_list_bytes(
            tokens, len(step.lengths), self.plan.model.group_size
        )

    def run(
        self, spread: Spread, layer: int, q: Tensor, k: Tensor, v: Tensor, angles: tuple[Tensor, Tensor] | None,
        weights: Mapping[str, Tensor],
    ) -> Tensor:  # fmt: skip
        """q, k, v: rows before RoPE, views of one matrix are fine -> o [T, sum of G *
        rank_v]; the pool has k' and v'.

        ``weights``: proj_q, proj_k, centre_k where the plan projects.
        """
        queries = self.append(spread, layer, q, k, v, angles, weights)
        return self.attend(spread, layer, queries)

    def append(
        self, spread: Spread, layer: int, q: Tensor, k: Tensor, v: Tensor, angles: tuple[Tensor, Tensor] | None,
        weights: Mapping[str, Tensor],
    ) -> Tensor:  # fmt: skip
        """The first half of `run`: k' and v' go to the pool -> q' [T, sum of G * rank_k].
        Pages that it fills may be sealed before `attend`."""
        queries = q.new_empty(len(q), self.forms[layer].queries)
        self._append(layer, q, k, v, angles, spread, weights, queries)
        return queries

    def attend(self, spread: Spread, layer: int, queries: Tensor) -> Tensor:
        """The second half of `run`, of q' [T, sum of G * rank_k]."""
        out = queries.new_empty(len(queries), self.forms[layer].out)
        args = spread.calls[spread.layers.index(layer)]
        args.element, args.q, args.o, args.stream = (
            ELEMENTS[queries.dtype],
            queries.data_ptr(),
            out.data_ptr(),
            _stream(),
        )
        self.library.call("cuda_attend_decode", byref(args))
        self.observer.queue(args, layer, spread.step)
        self.shares.queue(layer, queries, spread.step)
        return out

    def _append(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, angles: tuple[Tensor, Tensor] | None, spread: Spread,
        weights: Mapping[str, Tensor], queries: Tensor,
    ) -> None:  # fmt: skip
        args = AppendArgs(ABI_VERSION, ELEMENTS[q.dtype], len(q))
        args.q, args.k, args.v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        args.q_stride, args.k_stride, args.v_stride = (
            q.stride(0),
            k.stride(0),
            v.stride(0),
        )
        if angles is not None:
            args.cos, args.sin = angles[0].data_ptr(), angles[1].data_ptr()
        args.sequence_of, args.visible = (
            spread.sequence_of.data_ptr(),
            spread.visible.data_ptr(),
        )
        args.page_tables, args.page_table_widths = spread.addresses, spread.widths
        args.layout = self.layouts[layer].data_ptr()
        for name in (
            ("proj_q", "proj_k", "centre_k") if self.plan.index.projected else ()
        ):
            setattr(args, name, weights[name].data_ptr())
        args.pool, args.pool_bytes = self.pool.data_ptr(), self.pool.numel()
        args.q_out, args.q_out_stride, args.stream = (
            queries.data_ptr(),
            queries.stride(0),
            _stream(),
        )
        self.library.call("cuda_append", self.forms[layer].handle, byref(args))


class Spread:
    """A step as the kernels take it: row by row. Keeps what the calls point to."""

    def __init__(
        self,
        step: StepInputs,
        tokens: int,
        list_size: int,
        parts: Sequence[KernelPart],
        bundled: bool = False,
    ) -> None:
        """``list_size``: bytes of the list of prompt chunks, or 0 for none. ``bundled``:
        rows of a sequence are attended together."""
        new = step.lengths.new_empty
        self.rows = step.rows if list_size else tokens
        """Those that are attended one by one come first."""
        self.parts = parts
        self.layers = range(0)
        self.windowed = any(part.sees_less for part in parts)
        self.sequence_of = new(tokens)
        self.visible = self.row_lengths = new(tokens, step.lengths.shape[1])
        self.bundled = bundled and bool(self.rows)
        if list_size or self.windowed or bundled:
            self.row_lengths = new(tokens, len(parts))
        self.hidden = None
        if any(part.sight.exact for part in parts):
            self.hidden = new(tokens, len(parts), 2)
        self.prompts = new(list_size // 4) if list_size else None
        self.calls, self.plan = (AttendDecodeArgs * 0)(), new(0)
        self._point_at(step)

    def _point_at(self, step: StepInputs) -> None:
        self.step, self._kept = step, []
        self.tables = [self._table(part) for part in self.parts]
        self._addresses = _addresses(step.page_tables)
        self._widths = _ints([table.shape[1] for table in step.page_tables])
        self.addresses, self.widths = _address(self._addresses), _address(self._widths)

    def over(self, step: StepInputs) -> Spread:
        """The rows of a decode step that has other pages; no calls yet."""
        other = copy(self)
        other._point_at(step)
        return other

    def _table(self, part: KernelPart) -> Tensor:
        """The page table of its rows: one of their own where several are of one sequence,
        or see less than it has."""
        given = self.step.page_tables[part.bucket]
        is_shared = self.step.single and not part.sees_less
        if not self.rows or is_shared:
            return given
        return given.new_empty(self.rows, given.shape[1])

    def wanted(self) -> Array[c_void_p]:
        """The addresses of the rows' own page tables; null where they have none."""
        pointers: list[int | None] = []
        for part, table in zip(self.parts, self.tables, strict=True):
            given = self.step.page_tables[part.bucket]
            pointers.append(None if table is given else table.data_ptr())
        count = len(pointers)
        array_of = c_void_p * count
        return array_of(*pointers)

    def parts_of(self, form: LayerForm) -> Array[Part]:
        """What one layer's attention reads."""
        parts = type(form.parts).from_buffer_copy(form.parts)
        for part, place in zip(parts, form.places, strict=True):
            part.page_table, part.page_table_stride = (
                self.tables[place].data_ptr(),
                self.tables[place].shape[1],
            )
            part.lengths = self.row_lengths.data_ptr() + 4 * place
            part.lengths_stride = self.row_lengths.shape[1]
            if self.hidden is not None and self.parts[place].sight.exact:
                first = self.hidden.data_ptr()
                offset = 8 * place
                part.hidden = first + offset
                part.hidden_stride = self.hidden.stride(0)
        self._kept.append(parts)
        return parts

    def prompts_of(self, form: LayerForm, copies: Tensor) -> Prompts:
        """The step's chunks for one layer's attention. ``copies``: room for those of
        sealed pages."""
        assert self.prompts is not None
        lengths, buckets = self.step.lengths, self.step.lengths.shape[1]
        parts = (PromptPart * len(form.parts))()
        for part, b, window in zip(parts, form.buckets, form.windows, strict=True):
            table = self.step.page_tables[b]
            part.page_table, part.page_table_stride, part.fresh = (
                table.data_ptr(),
                table.shape[1],
                form.fresh[b],
            )
            part.lengths, part.lengths_stride = lengths.data_ptr() + 4 * b, buckets
            part.window = window
        shared = self.step.copies_of
        prompts = Prompts(
            self.prompts.data_ptr(),
            self.step.cu_seqlens_q.data_ptr(),
            len(lengths),
            self.rows,
            parts,
            copies.data_ptr(),
            copies.numel(),
            None if shared is None else shared.data_ptr(),
        )
        self._kept += [parts, prompts]
        return prompts


def _ints(numbers: Sequence[int]) -> Array[c_int32]:
    count = len(numbers)
    array_of = c_int32 * count
    return array_of(*numbers)


def _addresses(tensors: Sequence[Tensor]) -> object:
    pointers = [x.data_ptr() for x in tensors]
    array_of = c_void_p * len(pointers)
    return array_of(*pointers)


def _address(array: object) -> c_void_p:
    return c_void_p(addressof(array))  # type: ignore[arg-type]


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream
