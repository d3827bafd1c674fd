"""A step's integers on their way to a GPU: one block of int32, one copy.

A decode step (one token of every sequence) runs in a CUDA graph of the next larger
batch size, so its arrays have fixed sizes. Padding rows and sequences stay zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.manifest import Limits
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.native.cuda import LEAST_CHUNK
from kvlathe.runtime.sessions.adapters import row_numbers
from kvlathe.runtime.sessions.gpu.device import INT32, Device, DeviceArray
from kvlathe.runtime.sessions.protocols import Int32, StepPlan

GRAPH_BATCH_SIZES = (
    *(1, 2, 4, 8, 12, 16, 24, 32),
    *(48, 64, 96, 128, 192, 256, 384, 512),
)
"""Batch sizes that get a CUDA graph; a batch runs in the next larger one."""
MOST_GRAPH_ROWS = 128
"""Rows of the largest graph that takes several of a sequence."""
ALIGNED = 64
"""Elements: arrays begin at multiples of 256 bytes."""

Bindings = Mapping[str, DeviceArray]
"""Arrays on the GPU by the name that the exported graph gives them."""


@dataclass(frozen=True, eq=False)
class ShortRows:
    """The n sequences of a step that bring rows, but no prompt chunk. ``rows`` [n]: how
    many each. ``cached`` [n, S]: their tokens in each of S buckets before the step."""

    rows: Int32
    cached: Int32


NO_SHORT_ROWS = ShortRows(np.zeros(0, np.int32), np.zeros((0, 0), np.int32))


@dataclass(frozen=True)
class StepKind:
    """The kind of a step, by what its sequences bring.

    ``decode``: one token each, so that a CUDA graph takes the step. ``rows``: all rows
    from this one on are of prompt chunks, long enough to be attended in tiles.
    ``short``: the other sequences, of a step that is no decode. ``chunks``: whether
    there are prompt chunks. ``counts`` [B]: rows of each sequence of such a step.
    ``bundles``: whether rows of a sequence are attended together, where a CUDA graph
    takes such a step; None: it is still to be decided.
    """

    decode: bool
    rows: int
    short: ShortRows = NO_SHORT_ROWS
    chunks: bool = False
    counts: tuple[int, ...] = ()
    bundles: bool | None = None

    @property
    def captured(self) -> bool:
        """Whether a CUDA graph takes it."""
        return self.decode or self.bundles is not None


@dataclass(frozen=True, eq=False)
class StepArrays:
    """A step on the GPU, as whatever runs the model takes it: ``arrays`` by the names
    that the exported graph gives them, of the sizes of ``form``."""

    arrays: Bindings
    form: StepForm
    kind: StepKind


def kind_of(step: StepPlan, widths: Sequence[int]) -> StepKind:
    """``widths``: pages in the page tables of a CUDA graph."""
    if _is_decode(step, widths):
        return StepKind(True, len(step.input_ids))
    counts = np.diff(step.cu_seqlens_q)
    short = np.flatnonzero((counts > 0) & (counts < LEAST_CHUNK))
    if not len(short):
        return StepKind(False, 0, chunks=True, counts=tuple(counts.tolist()))
    rows = int(step.cu_seqlens_q[short[-1] + 1])
    chunks = bool((counts >= LEAST_CHUNK).any())
    brought = ShortRows(counts[short], step.lengths[short])
    return StepKind(False, rows, brought, chunks, tuple(counts.tolist()))


def _is_decode(step: StepPlan, widths: Sequence[int]) -> bool:
    if not len(step.input_ids) == len(step.logit_rows) == len(step.cu_seqlens_q) - 1:
        return False
    return len(step.query_offsets) == 1 and fits_graph(step, widths)


def fits_graph(step: StepPlan, widths: Sequence[int]) -> bool:
    """Whether the pages of a step's sequences, each of which brings rows, fit in tables
    of ``widths``."""
    for table, width in zip(step.page_tables, widths, strict=True):
        if table.shape[1] > width:
            return False
    return bool((step.cu_seqlens_q[1:] > step.cu_seqlens_q[:-1]).all())


def graph_rows(rows: int) -> int | None:
    """Rows of the graph that takes a step of several rows a sequence, of so many; None:
    too many for any."""
    return next((n for n in GRAPH_BATCH_SIZES if rows <= n <= MOST_GRAPH_ROWS), None)


def graph_batch_sizes(largest: int) -> tuple[int, ...]:
    """The batch sizes that get a graph in an engine of ``largest`` sequences."""
    return (*[size for size in GRAPH_BATCH_SIZES if size < largest], largest)


@dataclass(frozen=True)
class StepForm:
    """Sizes of a step: tokens, sequences, rows of logits, and the pages of each
    bucket's table. ``observes``: it says which rows are observed. ``keeps``: it says
    where states are. ``adapts``: it says which adapter each row has."""

    tokens: int
    batch: int
    rows: int
    widths: tuple[int, ...]
    observes: bool = False
    keeps: bool = False
    adapts: bool = False

    @classmethod
    def of(
        cls, step: StepPlan, least_rows: int = 0, observes: bool = False
    ) -> StepForm:
        """Just large enough for a step, with ``least_rows`` rows of logits or more."""
        return cls(
            len(step.input_ids),
            len(step.cu_seqlens_q) - 1,
            max(least_rows, len(step.logit_rows)),
            tuple(table.shape[1] for table in step.page_tables),
            observes,
            step.state_slots is not None,
            step.adapters is not None,
        )

    @classmethod
    def largest(cls, plan: CompressionPlan, limits: Limits) -> StepForm:
        """The form that holds any step that an engine takes."""
        pages = -(-limits.max_seq_len // plan.page_tokens) + 1
        tokens = limits.max_num_tokens
        widths = (pages,) * len(plan.index.buckets)
        more = plan.index.observes, bool(plan.model.states), True
        return cls(tokens, limits.max_batch_size, tokens, widths, *more)

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {
            "input_ids": (self.tokens,),
            "positions": (self.tokens,),
            "cu_seqlens_q": (self.batch + 1,),
            "lengths": (self.batch, len(self.widths)),
            "logit_rows": (self.rows,),
        }
        for bucket, width in enumerate(self.widths):
            shapes[f"page_table_{bucket}"] = (self.batch, width)
        if self.observes:
            shapes["observed_rows"] = (self.tokens,)
            shapes["observed_starts"] = (self.batch + 1,)
        if self.keeps:
            shapes["state_slots"] = (2, self.batch)
        if self.adapts:
            shapes["adapters"] = (self.tokens,)
        return shapes

    @cached_property
    def places(self) -> Mapping[str, int]:
        """The place where each array begins in the block, in elements."""
        places: dict[str, int] = {}
        end = 0
        for name, shape in self.shapes.items():
            places[name] = end
            end += _aligned(shape)
        return places

    @cached_property
    def size(self) -> int:
        """The size of the block, in elements."""
        return sum(_aligned(shape) for shape in self.shapes.values())

    def cut(self, block: Int32) -> dict[str, Int32]:
        """The arrays, as views of a block."""
        arrays: dict[str, Int32] = {}
        for name, shape in self.shapes.items():
            start = self.places[name]
            arrays[name] = block[start : start + prod(shape)].reshape(shape)
        return arrays

    def write(self, step: StepPlan, arrays: Mapping[str, Int32]) -> None:
        """Write a step of at most these sizes into the arrays of a block.

        The block holds zeros, or an earlier step.
        """
        tokens, rows = len(step.input_ids), len(step.logit_rows)
        batch = len(step.cu_seqlens_q) - 1
        arrays["input_ids"][:tokens] = step.input_ids
        arrays["positions"][:tokens] = step.positions
        arrays["cu_seqlens_q"][: batch + 1] = step.cu_seqlens_q
        arrays["cu_seqlens_q"][batch + 1 :] = tokens
        arrays["lengths"][:batch] = step.lengths
        arrays["lengths"][batch:] = 0
        arrays["logit_rows"][:rows] = step.logit_rows
        arrays["logit_rows"][rows:] = 0
        for bucket, table in enumerate(step.page_tables):
            arrays[f"page_table_{bucket}"][:batch, : table.shape[1]] = table
        if self.observes:
            rows = observed_rows(step)
            arrays["observed_rows"][: len(rows)] = rows
            arrays["observed_starts"][: batch + 1] = np.searchsorted(
                rows, step.cu_seqlens_q
            )
            arrays["observed_starts"][batch + 1 :] = len(rows)
        if self.keeps:
            assert step.state_slots is not None
            arrays["state_slots"][:, :batch] = step.state_slots.T
            arrays["state_slots"][:, batch:] = 0
        if self.adapts:
            assert step.adapters is not None
            numbers = row_numbers(step.adapters, step.cu_seqlens_q, self.tokens)
            arrays["adapters"][:] = numbers


def observed_rows(step: StepPlan) -> Int32:
    """The rows of a step that are observed, ascending."""
    weights = step.observation_weights
    if weights is None:
        return np.zeros(0, np.int32)
    return np.flatnonzero(weights[: step.cu_seqlens_q[-1]]).astype(np.int32)


def _aligned(shape: tuple[int, ...]) -> int:
    return -(-prod(shape) // ALIGNED) * ALIGNED


def decode_widths(plan: CompressionPlan, limits: Limits) -> tuple[int, ...]:
    """The most pages that a decoding sequence can have in each bucket."""
    p = plan.page_tokens
    most = -(-limits.max_seq_len // p)
    hot = -(-min(limits.max_seq_len, plan.prefill_chunk + p) // p) + 1
    widths = [most] * len(plan.index.buckets)
    for route in plan.index.routes:
        worst = route.worst_pages(limits.max_seq_len, limits.max_seq_len)
        for bucket, pages in zip(route.buckets, worst, strict=True):
            widths[bucket] = min(most, pages)
        first, *cold = route.buckets
        if cold:
            widths[first] = min(hot, most)
    return tuple(widths)


class StepBuffer:
    """A step's integers: a block on the GPU, and two in pinned memory that take turns.

    So a step is written while the one before may still be on its way.
    """

    def __init__(self, device: Device, form: StepForm) -> None:
        """``form``: of the largest step."""
        self.device, self.form = device, form
        size = form.size * INT32.itemsize
        self.block = device.allocate(size, "the step")
        self._hosts = [device.pinned(size).view(np.int32) for _ in range(2)]
        self._arrays = [form.cut(host) for host in self._hosts]
        self._sent: list[Callable[[], None]] = [lambda: None, lambda: None]
        self._turn = 0

    def send(self, step: StepPlan, form: StepForm) -> None:
        """Queue the copy of a step in ``form``.

        Raises KvlatheError for a form that does not fit.
        """
        if form.size > self.form.size:
            raise KvlatheError(
                f"a step with page tables of {form.widths} pages does not fit",
                f"there is room for {self.form.widths}",
                "build with a larger --max-seq-len",
            )
        self._turn ^= 1
        host = self._hosts[self._turn][: form.size]
        self._sent[self._turn]()  # the copy of two steps ago
        form.write(
            step, self._arrays[self._turn] if form is self.form else form.cut(host)
        )
        self.device.send(self.block, host)
        self._sent[self._turn] = self.device.mark()

    def clear(self) -> None:
        """Queue zeros: a step of padding rows."""
        self.device.send(self.block, np.zeros(self.form.size, INT32))

    def bindings(self, form: StepForm) -> Bindings:
        """The arrays of a step in ``form``, as they lie in the block."""
        arrays: dict[str, DeviceArray] = {}
        for name, shape in form.shapes.items():
            arrays[name] = self.block.view(
                INT32.itemsize * form.places[name], shape, INT32
            )
        return arrays
