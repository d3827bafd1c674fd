"""Spread: a step as the kernels take it, row by row."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from ctypes import Array, addressof, c_int32, c_void_p
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from kvlathe.plan.index import KernelPart
from kvlathe.runtime.native.cuda import (
    AttendDecodeArgs,
    LayerForm,
    PromptPart,
    Prompts,
)
from kvlathe.runtime.native.parts import Part
from kvlathe.runtime.sessions.torch_cuda.inputs import StepInputs


@dataclass(frozen=True, eq=False)
class Spread:
    """The T rows of ``step``, of B sequences in S buckets, as attention reads them in the
    ``parts`` of a plan. Its tensors are int32 on the device; one kernel fills them.

    ``rows``: those before this one are attended one by one, or bundled; the others in
    tiles, as prompt chunks. ``bundled``: rows of a sequence are attended together.
    ``sequence_of`` [T]; ``visible`` [T, S]: tokens that each row sees of a bucket.
    ``row_lengths`` [T, parts] or, where that is the same, ``visible``: tokens that each
    row reads of a part. ``hidden`` [T, parts, 2]: tokens between that it does not see,
    where windows are exact. ``prompts``: the list of prompt chunks, if there are any, by
    query heads a KV head.
    ``tables``: of each part, a page table [rows, M] or that of the sequences [B, M].
    """

    step: StepInputs
    parts: Sequence[KernelPart]
    rows: int
    bundled: bool
    sequence_of: Tensor
    visible: Tensor
    row_lengths: Tensor
    hidden: Tensor | None
    prompts: Mapping[int, Tensor]
    tables: Sequence[Tensor]

    @classmethod
    def empty(
        cls,
        step: StepInputs,
        tokens: int,
        list_sizes: Mapping[int, int],
        parts: Sequence[KernelPart],
        bundled: bool,
    ) -> Spread:
        """Room for a step of ``tokens`` rows. ``list_sizes``: bytes of each list of
        prompt chunks."""
        new = step.lengths.new_empty
        rows = step.kind.rows if list_sizes else tokens
        visible = new(tokens, step.lengths.shape[1])  # [T, S]
        is_by_part = bool(list_sizes) or bundled or any(x.sees_less for x in parts)
        is_exact = any(part.sight.exact for part in parts)
        return cls(
            step,
            parts,
            rows,
            bundled and bool(rows),
            sequence_of=new(tokens),
            visible=visible,
            row_lengths=new(tokens, len(parts)) if is_by_part else visible,
            hidden=new(tokens, len(parts), 2) if is_exact else None,
            prompts={group: new(size // 4) for group, size in list_sizes.items()},
            tables=[_table(step, rows, part) for part in parts],
        )

    def over(self, step: StepInputs) -> Spread:
        """The rows of a decode step that has other pages."""
        tables = [_table(step, self.rows, part) for part in self.parts]
        return dataclasses.replace(self, step=step, tables=tables)

    @property
    def tokens(self) -> int:
        return len(self.sequence_of)

    @property
    def windowed(self) -> bool:
        """Whether some rows see less than all that came before."""
        return any(part.sees_less for part in self.parts)

    @cached_property
    def page_tables(self) -> Array[c_void_p]:
        """The addresses of the sequences' page tables, by bucket."""
        addresses = [table.data_ptr() for table in self.step.page_tables]
        return (c_void_p * len(addresses))(*addresses)

    @cached_property
    def widths(self) -> Array[c_int32]:
        """The pages in a row of each of these."""
        return ints([table.shape[1] for table in self.step.page_tables])

    def own_tables(self) -> Array[c_void_p]:
        """The addresses of the rows' own page tables; null where they have none."""
        pointers: list[int | None] = []
        for part, table in zip(self.parts, self.tables, strict=True):
            given = self.step.page_tables[part.bucket]
            pointers.append(None if table is given else table.data_ptr())
        return (c_void_p * len(pointers))(*pointers)

    def parts_of(self, form: LayerForm) -> Array[Part]:
        """The parts that one layer's attention reads."""
        parts = type(form.parts).from_buffer_copy(form.parts)
        for part, place in zip(parts, form.places, strict=True):
            part.page_table = self.tables[place].data_ptr()
            part.page_table_stride = self.tables[place].shape[1]
            part.lengths = self.row_lengths.data_ptr() + 4 * place
            part.lengths_stride = self.row_lengths.shape[1]
            if self.hidden is not None and self.parts[place].sight.exact:
                part.hidden = self.hidden.data_ptr() + 8 * place
                part.hidden_stride = self.hidden.stride(0)
        return parts

    def prompts_of(self, form: LayerForm, copies: Tensor) -> Prompts:
        """The step's chunks for one layer's attention. ``copies``: room for those of
        sealed pages. It keeps the parts that it points to."""
        lengths, buckets = self.step.lengths, self.step.lengths.shape[1]
        parts = (PromptPart * len(form.parts))()
        for part, b, window in zip(parts, form.buckets, form.windows, strict=True):
            table = self.step.page_tables[b]
            part.page_table, part.page_table_stride = table.data_ptr(), table.shape[1]
            part.fresh = form.fresh[b]
            part.lengths, part.lengths_stride = lengths.data_ptr() + 4 * b, buckets
            part.window = window
        shared = self.step.copies_of
        return Prompts(
            self.prompts[form.group].data_ptr(),
            self.step.cu_seqlens_q.data_ptr(),
            len(lengths),
            self.rows,
            parts,
            copies.data_ptr(),
            copies.numel(),
            None if shared is None else shared.data_ptr(),
        )


@dataclass(frozen=True, eq=False)
class LayerCalls:
    """The attention of ``layers`` in a step. ``calls``: of each, all but its q, o and
    stream. ``plan`` uint8 [layers, bytes]: which block of a GPU attends what; empty where
    no row is attended by itself. ``kept``: memory of the host that calls point to."""

    spread: Spread
    layers: Sequence[int]
    calls: Array[AttendDecodeArgs]
    plan: Tensor
    kept: Sequence[object]


def _table(step: StepInputs, rows: int, part: KernelPart) -> Tensor:
    """The page table of its rows: one of their own where several are of one sequence, or
    see less than it has."""
    given = step.page_tables[part.bucket]
    is_shared = step.kind.decode and not part.sees_less
    if not rows or is_shared:
        return given
    return given.new_empty(rows, given.shape[1])


def ints(numbers: Sequence[int]) -> Array[c_int32]:
    return (c_int32 * len(numbers))(*numbers)


def address(array: object) -> c_void_p:
    return c_void_p(addressof(array))  # type: ignore[arg-type]
