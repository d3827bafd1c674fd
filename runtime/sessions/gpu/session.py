"""DeviceSession: an engine on one GPU, whatever computes its steps.

Pages, weights and steps live on the GPU. A step's integers go there in one copy, and
its logits come back; nothing of the pool is ever copied. A decode step (one token of
every sequence) is a CUDA graph, captured once for each batch size. What runs the model
is a Compute: ONNX Runtime, TensorRT, or the torch decoder.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol

import numpy as np

from kvlathe.base.collector import nothing_collected
from kvlathe.plan.manifest import Limits
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.native.cuda import CudaLibrary
from kvlathe.runtime.sessions.gpu.device import (
    BYTE,
    FLOAT,
    HALF,
    INT32,
    Device,
    DeviceArray,
)
from kvlathe.runtime.sessions.gpu.pages import DevicePages
from kvlathe.runtime.sessions.gpu.states import DeviceStates, slots_of
from kvlathe.runtime.sessions.gpu.step_buffer import (
    MOST_GRAPH_ROWS,
    Bindings,
    StepArrays,
    StepBuffer,
    StepForm,
    StepKind,
    decode_widths,
    graph_batch_sizes,
    kind_of,
)
from kvlathe.runtime.sessions.protocols import (
    Float32,
    Session,
    State,
    StateAfter,
    StepPlan,
)
from kvlathe.runtime.sessions.steps import check_step

NOTHING: Bindings = {}
GraphKey = tuple[int, bool, int, bool | None]
"""Sequences, whether some have adapters, rows, and whether those of a sequence are
attended together (None: a decode)."""


class Compute(Protocol):
    """The model of an engine, which can be run. It queues work on the device's stream
    and waits for nothing, so that a step can be captured. Only where ``mass`` is asked
    for may it wait."""

    @property
    def outputs(self) -> frozenset[str]:
        """The names of what it writes: ``logits`` [R, vocab] float32, ``rows`` [T, all
        ranks] float16 (the step's K and V)."""
        ...

    @property
    def least_rows(self) -> int:
        """Rows of logits that a step must have: 0, or 1 where no graph has empty
        arrays."""
        ...

    def queue(self, step: StepArrays, outputs: Bindings) -> None:
        """Queue a step. Its K and V are in the pool once it is done."""
        ...


@dataclass(frozen=True, eq=False)
class DecodeGraph:
    """A decode step of fixed sizes as a CUDA graph, whose padding rows write nothing.
    ``arrays`` are in ``buffer``. ``replay`` queues the step that was sent there
    last."""

    buffer: StepBuffer
    arrays: StepArrays
    logits: DeviceArray
    replay: Callable[[], None]

    @classmethod
    def captured(
        cls,
        device: Device,
        buffer: StepBuffer,
        arrays: StepArrays,
        logits: DeviceArray,
        work: Callable[[], None],
    ) -> DecodeGraph:
        """``work`` queues the step in ``arrays``, whose ``logits`` it writes. Graphs of
        an engine that was closed may be in a circle: freed in the middle of a capture,
        they end it with an error."""
        buffer.clear()
        for _ in range(2):  # what runs the model takes its memory outside the capture
            work()
        device.wait()
        with nothing_collected():
            return cls(buffer, arrays, logits, device.capture(work))


class DeviceSession(DevicePages, Session):
    """A session with its pages in ``pool`` (allocate_pool), computed by ``compute``.
    ``replayed``: rows of logits of the last step, where a graph took it, else 0."""

    replayed = 0

    def __init__(
        self,
        device: Device,
        library: CudaLibrary,
        plan: CompressionPlan,
        limits: Limits,
        pool: DeviceArray,
        compute: Compute,
    ) -> None:
        """Raises KvlatheError where the GPU lacks memory."""
        super().__init__(device, library, plan, pool)
        self.limits, self.compute = limits, compute
        self._observes = plan.index.observation is not None
        self.widths = decode_widths(plan, limits)
        self.batch_sizes = graph_batch_sizes(limits.max_batch_size)
        self._graphs: dict[GraphKey, DecodeGraph] = {}
        self._buffer = StepBuffer(device, StepForm.largest(plan, limits))
        self._inputs = {**self._query_offsets(), **pool_views(pool, plan.index.unit)}
        self._states: DeviceStates | None = None
        if numbers := sum(plan.model.states):
            self._states = DeviceStates(device, numbers, slots_of(limits))
            self._inputs["states"] = self._states.memory
        self._most_rows = limits.max_batch_size
        self._logits = self._logits_of(self._most_rows)
        self._outputs = self._allocate_outputs()

    # -- steps -------------------------------------------------------------------------
    def run(self, step: StepPlan) -> Float32:
        """As Session.run."""
        return self.device.fetch(self.launch(step))

    def launch(self, step: StepPlan) -> DeviceArray:
        """``run`` without waiting: logits on the GPU, which the next step may
        overwrite."""
        check_step(step, self.limits)
        kind, rows = kind_of(step, self.widths), len(step.logit_rows)
        graph = self.graph_for(step, kind)
        self.replayed = 0 if graph is None else rows
        if graph is None:
            return self.launch_alone(step, kind, self._observes)
        self._send(step, graph.buffer, graph.arrays)
        graph.replay()
        return self._rows_of(graph.logits, rows)

    def graph_for(self, step: StepPlan, kind: StepKind) -> DecodeGraph | None:
        """The CUDA graph that takes a step; None: it runs without one."""
        if not kind.decode:
            return None
        return self._graph_of(len(step.logit_rows), step.adapters is not None)

    def launch_alone(
        self, step: StepPlan, kind: StepKind, observes: bool, more: Bindings = NOTHING
    ) -> DeviceArray:
        """Without a graph. ``observes``: rows may be observed. ``more``: what is
        written beside the logits, for those that ask."""
        logits = self.room_for(max(self.compute.least_rows, len(step.logit_rows)))
        self._queue(self.sent(step, self._buffer, kind, observes), logits, more)
        return self._rows_of(logits, len(step.logit_rows))

    def sent(
        self, step: StepPlan, buffer: StepBuffer, kind: StepKind, observes: bool
    ) -> StepArrays:
        """Queue the copy of a step's integers into ``buffer``: where they then are."""
        form = StepForm.of(step, self.compute.least_rows, observes)
        arrays = self._arrays_of(buffer, form, len(step.query_offsets), kind)
        self._send(step, buffer, arrays)
        return arrays

    def _send(self, step: StepPlan, buffer: StepBuffer, arrays: StepArrays) -> None:
        buffer.send(step, arrays.form)
        self.complete(step, arrays.arrays["input_ids"])

    def _arrays_of(
        self, buffer: StepBuffer, form: StepForm, queries: int, kind: StepKind
    ) -> StepArrays:
        """All that ``compute`` reads. ``queries``: of the step's longest sequence."""
        offsets = self._inputs["query_offsets"].view(0, (queries,), INT32)
        arrays = {**buffer.bindings(form), **self._inputs, "query_offsets": offsets}
        return StepArrays(arrays, form, kind)

    def keep_states(
        self, step: StepPlan, before: Sequence[State | None], numbers: int
    ) -> tuple[StepPlan, StateAfter]:
        """As Session.keep_states: in slots of the GPU."""
        assert self._states is not None
        return self._states.keep(step, before)

    def leave_state(self, state: State) -> None:
        """As PageMover.leave_state. Waits."""
        assert self._states is not None
        self._states.leave(state)

    def read_state(self, state: State) -> bytes:
        """As PageMover.read_state. Waits."""
        assert self._states is not None
        return super().read_state(self._states.read(state))

    def write_state(self, data: bytes) -> State:
        """As PageMover.write_state."""
        assert self._states is not None
        return self._states.made(np.frombuffer(data, np.float32))

    def lost(self) -> str:
        """As Session.lost. A GPU's fault stays: every later call tells of it."""
        try:
            self.device.wait()
        except Exception as fault:
            return repr(fault).partition("\n")[0]
        return ""

    def warm_up(self) -> None:
        """As Session.warm_up: capture the graph of every batch size."""
        for size in self.batch_sizes:
            self._graph_of(size)

    def complete(self, step: StepPlan, input_ids: DeviceArray) -> None:
        """Write the tokens of a step that the host does not know (``StepPlan.after``).
        Here it knows all of them."""
        assert step.after is None

    def _graph_of(self, batch: int, adapts: bool = False) -> DecodeGraph:
        """The CUDA graph that decodes ``batch`` sequences; ``adapts``: some of which
        have adapters."""
        size = next(n for n in self.batch_sizes if n >= batch)
        return self.graph(size, adapts, StepKind(True, size))

    def graph(self, batch: int, adapts: bool, kind: StepKind) -> DecodeGraph:
        """The graph of steps of ``batch`` sequences and ``kind.rows`` rows. ``adapts``:
        some have adapters."""
        key = batch, adapts, kind.rows, kind.bundles
        if key not in self._graphs:
            more = self._observes, self._states is not None, adapts
            rows = kind.rows
            form = StepForm(rows, batch, rows, self.widths, *more)
            buffer = StepBuffer(self.device, form)
            arrays = self._arrays_of(buffer, form, 1, kind)
            logits = self._logits if rows <= self._most_rows else self._more_logits
            given = buffer, arrays, logits, partial(self._queue, arrays, logits)
            started = time.perf_counter()
            self._graphs[key] = DecodeGraph.captured(self.device, *given)
            self.making += time.perf_counter() - started
        return self._graphs[key]

    def forget_graphs(self, adapts: Collection[bool] = (False, True)) -> None:
        """Steps are captured again: those with adapters (True), those without."""
        self.device.wait()
        for key in list(self._graphs):
            if key[1] in adapts:
                del self._graphs[key]

    def _queue(
        self, step: StepArrays, logits: DeviceArray, more: Bindings = NOTHING
    ) -> None:
        outputs = {"logits": self._rows_of(logits, step.form.rows), **more}
        for name, array in self._outputs.items():
            outputs[name] = array.view(
                0, (step.form.tokens, *array.shape[1:]), array.dtype
            )
        self.compute.queue(step, outputs)

    # -- memory ------------------------------------------------------------------------
    @property
    def columns(self) -> int:
        """The columns of the logits that are computed here."""
        return self.plan.model.vocab_size

    def _query_offsets(self) -> Bindings:
        """0 .. T - 1, of which a step reads as many as its longest sequence has."""
        tokens = self.limits.max_num_tokens
        array = self.device.allocate(tokens * INT32.itemsize, "the step")
        self.device.send(array, np.arange(tokens, dtype=INT32))
        return {"query_offsets": array.view(0, (tokens,), INT32)}

    def _allocate_outputs(self) -> Bindings:
        """Arrays that ``compute`` writes beside the logits."""
        width = sum(lane.numbers for lane in self.plan.lanes)
        tokens = max(self.limits.max_num_tokens, self.limits.max_batch_size)
        arrays: dict[str, DeviceArray] = {}
        if "rows" in self.compute.outputs:
            arrays["rows"] = self.device.allocate(
                tokens * width * HALF.itemsize, "what a step gives"
            ).view(0, (tokens, width), HALF)
        return arrays

    @cached_property
    def _more_logits(self) -> DeviceArray:
        """Those of all graphs with more rows than sequences may run at once."""
        return self._logits_of(MOST_GRAPH_ROWS)

    def room_for(self, rows: int) -> DeviceArray:
        """For so many rows of logits."""
        if rows > self.limits.max_batch_size:
            return self._logits_of(rows)
        return self._logits

    def _logits_of(self, rows: int) -> DeviceArray:
        return self.device.allocate(rows * self.columns * FLOAT.itemsize, "logits")

    def _rows_of(self, logits: DeviceArray, rows: int) -> DeviceArray:
        return logits.view(0, (rows, self.columns), FLOAT)


def pool_views(pool: DeviceArray, unit: int) -> Bindings:
    """The pool as Attend reads it: arrays [n, unit] of every 16-bit plan's formats."""
    views: dict[str, DeviceArray] = {}
    for name, dtype in (("pool_f16", HALF), ("pool_u8", BYTE)):
        views[name] = pool.view(
            0, (pool.nbytes // (dtype.itemsize * unit), unit), dtype
        )
    return views


def tensor_types(plan: CompressionPlan) -> dict[str, np.dtype]:
    """The arrays that a graph may read and write here, and their types."""
    form = StepForm(1, 1, 1, (1,) * len(plan.index.buckets))
    types = dict.fromkeys([*form.shapes, "query_offsets"], INT32)
    types |= {"pool_f16": HALF, "pool_u8": BYTE, "logits": FLOAT, "rows": HALF}
    return types
