"""OrtSession: an exported model on ONNX Runtime's CPU provider, over pages in host
memory; one graph for each stage.

The pool reaches the graph as OrtValues that share the arena's memory; nothing is
copied, however large it is. The graph only reads it: its second output holds the step's
rows, which ``append`` writes to their places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from kvlathe.base import machine
from kvlathe.base.errors import KvlatheError
from kvlathe.plan.adapter_maps import ADAPTERS_FILE, adapter_graph
from kvlathe.plan.layer_table import POOLS
from kvlathe.plan.manifest import GIVEN, LAST_HIDDEN, Limits
from kvlathe.plan.plan import CompressionPlan, graph_files
from kvlathe.runtime.sessions.adapters import LoadedAdapter
from kvlathe.runtime.sessions.host.adapter_feeds import AdapterFeeds
from kvlathe.runtime.sessions.host.graphs import (
    GraphSession,
    StageGraph,
    observation_weights,
)
from kvlathe.runtime.sessions.host.pages import typed_views
from kvlathe.runtime.sessions.protocols import Float32, StepPlan

FIRST_ROW = np.zeros(1, np.int32)
OF_WANTED = ("logits", LAST_HIDDEN)
"""Outputs that have the rows that were asked for."""


class Bound:
    """The inputs of a session, bound once and written over from step to step: to make
    and convert ONNX Runtime's values anew takes 90 us a step, as long as a tenth of a
    small model's."""

    def __init__(self, session: ort.InferenceSession) -> None:
        self._session = session
        self._binding = session.io_binding()
        self._names = {entry.name for entry in session.get_inputs()}
        self._held: dict[str, np.ndarray] = {}

    def write(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Feed copies of those that are inputs: for what is small."""
        for name, array in arrays.items():
            if name not in self._names:
                continue
            held = self._held.get(name)
            if held is None or held.shape != array.shape or held.dtype != array.dtype:
                self.lend(name, np.array(array, order="C"))
            else:
                held[...] = array

    def lend(self, name: str, array: np.ndarray) -> None:
        """Feed the array itself, which must be contiguous."""
        self._held[name] = array
        self.bind(name, ort.OrtValue.ortvalue_from_numpy(array))

    def bind(self, name: str, value: ort.OrtValue) -> None:
        self._binding.bind_ortvalue_input(name, value)

    def run(self, outputs: Sequence[str]) -> list[np.ndarray]:
        """The outputs, which are the caller's."""
        for name in outputs:
            self._binding.bind_output(name, "cpu")
        try:
            self._session.run_with_iobinding(self._binding)
            return self._binding.copy_outputs_to_cpu()
        finally:
            self._binding.clear_binding_outputs()


class Graph:
    """One stage's graph: what it is fed and what it gives."""

    def __init__(
        self, path: Path, plan: CompressionPlan, stage: int, options: ort.SessionOptions
    ) -> None:
        try:
            self._session = ort.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # ONNX Runtime's own exceptions have no common base
            raise KvlatheError(
                f"ONNX Runtime {ort.__version__} cannot load {path}",
                str(error),
                "build the engine again",
            ) from error
        self.stage, self.plan, self.buckets = (
            stage,
            plan.part(stage),
            plan.index.buckets_of(stage),
        )
        self._inputs = {entry.name: entry.type for entry in self._session.get_inputs()}
        self._outputs = [entry.name for entry in self._session.get_outputs()]
        self.gives_hidden = LAST_HIDDEN in self._outputs
        layers = plan.index.layers_of(stage)
        self.lanes = slice(
            plan.index.kept_before(layers.start), plan.index.kept_before(layers.stop)
        )
        self.pool: dict[str, ort.OrtValue] = {}
        self._bound = Bound(self._session)
        shapes = {entry.name: entry.shape for entry in self._session.get_inputs()}
        self.adapters = AdapterFeeds(shapes, self._inputs)
        self._check_sizes(path)

    def _check_sizes(self, path: Path) -> None:
        """Raises KvlatheError where the graph was exported for another plan: it would
        fail in its first step, or read rows as what they are not."""
        lanes = (lane for lane in self.plan.lanes if not lane.removed)
        widths = dict.fromkeys(POOLS, self.plan.index.unit) | {
            "lengths": len(self.buckets),
            "logits": self.plan.model.vocab_size,
            "rows": sum(lane.numbers for lane in lanes),
            "states": sum(self.plan.model.states),
            **dict.fromkeys((GIVEN, LAST_HIDDEN), self.plan.model.hidden_size),
        }
        graph = (*self._session.get_inputs(), *self._session.get_outputs())
        for entry in graph:
            width = widths.get(entry.name)
            if width is not None and entry.shape[-1] != width:
                raise KvlatheError(
                    f"{path} does not belong to its plan",
                    f"{entry.name} has {entry.shape[-1]} columns and the plan {width}",
                    "build the engine again",
                )

    def bind(self, memory: npt.NDArray[np.uint8]) -> None:
        """Read the cache from ``memory``."""
        views = typed_views(memory, self.plan.index.unit)
        self.pool = {
            n: ort.OrtValue.ortvalue_from_numpy(view)
            for n, view in views.items()
            if n in self._inputs
        }
        for name, value in self.pool.items():
            self._bound.bind(name, value)

    def run(
        self, step: StepPlan, source: npt.NDArray[np.float32] | None
    ) -> list[np.ndarray]:
        """Logits [R, vocab] of the last stage, else hidden states [T, D]; the rows to
        append; what the observed rows attended, states after the step and hidden states
        of rows of logits, where the graph has them.

        ``source`` [T, D]: the hidden states that enter a later stage than the first.
        """
        arrays: dict[str, np.ndarray] = {
            "input_ids": step.input_ids,
            "positions": step.positions,
            "cu_seqlens_q": step.cu_seqlens_q,
            "query_offsets": step.query_offsets,
            "lengths": step.lengths[:, self.buckets],
            # ONNX Runtime reduces what is empty to a wrong shape: one row for none.
            "logit_rows": step.logit_rows if len(step.logit_rows) else FIRST_ROW,
            "observation_weights": observation_weights(step),
            **{
                f"page_table_{i}": step.page_tables[b]
                for i, b in enumerate(self.buckets)
            },
        }
        self._bound.write(arrays)
        given = {"hidden": source, "states": step.states}
        if step.hidden is not None:
            given[GIVEN] = np.stack([cast("Float32", x)[i] for x, i in step.hidden])
        for name, rows in given.items():
            if rows is not None:
                half = self._inputs.get(name) == "tensor(float16)"
                kind = np.float16 if half else np.float32
                self._bound.lend(name, np.ascontiguousarray(rows, kind))
        if step.adapters is not None:
            for name, value in self.adapters.of(step).items():
                self._bound.bind(name, value)
        wanted = len(step.logit_rows)
        found = zip(self._outputs, self._bound.run(self._outputs), strict=True)
        return [x[:wanted] if name in OF_WANTED else x for name, x in found]


class OrtSession(GraphSession):
    """Loads ``folder``'s graphs with an arena of ``arena_bytes``. Raises KvlatheError
    if ONNX Runtime refuses one."""

    attention = "the function that the ONNX model carries (standard operators, CPU)"
    """The code that runs kvlathe::Attend here."""

    def __init__(
        self,
        folder: Path,
        plan: CompressionPlan,
        limits: Limits,
        arena_bytes: int,
        threads: int | None = None,
    ) -> None:
        options = self.options(threads, plan)
        graphs = [
            Graph(folder / name, plan, i, options)
            for i, name in enumerate(graph_files(plan))
        ]
        super().__init__(plan, limits, arena_bytes, graphs)
        if graphs[-1].gives_hidden:
            self.capabilities = self.capabilities.union(("hidden_states",))
        self._taking: list[Graph] = []
        if (folder / ADAPTERS_FILE).is_file():
            self.capabilities = self.capabilities.union(("adapters",))
        self._load_taking = partial(self._graphs_taking, folder, options)

    def _graphs_taking(self, folder: Path, options: ort.SessionOptions) -> list[Graph]:
        """The graphs that take adapters."""
        names = map(adapter_graph, graph_files(self.plan))
        graphs = [
            Graph(folder / name, self.plan, i, options) for i, name in enumerate(names)
        ]
        for graph in graphs:
            graph.bind(self.memory)
        return graphs

    def graph_of(self, stage: int, step: StepPlan) -> StageGraph:
        """Steps in which nobody has an adapter run as if there were none."""
        if step.adapters is None:
            return self.graphs[stage]
        self._taking = self._taking or self._load_taking()
        return self._taking[stage]

    def take_adapter(self, adapter: LoadedAdapter) -> None:
        """Loads the graphs, whose weights are then in memory twice, with the first
        adapter."""
        self._taking = self._taking or self._load_taking()

    def drop_adapter(self, adapter: LoadedAdapter) -> None:
        for graph in self._taking:
            graph.adapters.forget(adapter)

    def options(self, threads: int | None, plan: CompressionPlan) -> ort.SessionOptions:
        """Options with which ONNX Runtime opens the model."""
        options = ort.SessionOptions()
        options.intra_op_num_threads = machine.threads(threads)
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        # A plan of buffers takes time by the square of the nodes: minutes where every
        # head has a form of its own. Without it runs are as fast and take no more.
        options.enable_mem_reuse = False
        # A pattern is kept for every combination of shapes that ever ran, without end:
        # the memory of a server grew by 1 KB a request of a new length. Runs are as
        # fast without.
        options.enable_mem_pattern = False
        if (
            plan.stages
        ):  # the threads of a graph that has run must not spin while the next one runs
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        return options
