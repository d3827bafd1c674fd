"""OrtSession: an exported model on ONNX Runtime's CPU provider, over pages in host memory; one graph for each stage.

The pool reaches the graph as OrtValues that share the arena's memory; nothing is copied, however large it is. The graph
only reads it: its second output holds the step's rows, which ``append`` writes to their places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from kvlathe.engines.manifest import Limits
from kvlathe.errors import KvlatheError
from kvlathe.export.layout import CacheLayout
from kvlathe.export.plan import CompressionPlan, graph_files
from kvlathe.runtime import machine
from kvlathe.runtime.host_pages import HostPages, typed_views
from kvlathe.runtime.ragged import Share, by_size
from kvlathe.runtime.session import StepPlan
from kvlathe.runtime.step_block import check_step


class Graph:
    """One stage's graph: what it is fed and what it gives."""

    def __init__(self, path: Path, plan: CompressionPlan, stage: int, options: ort.SessionOptions) -> None:
        try:
            self._session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime's own exceptions have no common base
            raise KvlatheError(
                f"ONNX Runtime {ort.__version__} cannot load {path}", str(error), "build the engine again"
            ) from error
        self.stage, self.plan, self.buckets = stage, plan.part(stage), plan.buckets_of(stage)
        self._inputs = {entry.name: entry.type for entry in self._session.get_inputs()}
        self._outputs = [entry.name for entry in self._session.get_outputs()]
        layers = plan.layers_of(stage)
        self.lanes = slice(plan.kept_before(layers.start), plan.kept_before(layers.stop))
        self.pool: dict[str, ort.OrtValue] = {}

    def bind(self, memory: npt.NDArray[np.uint8]) -> None:
        """Read the cache from ``memory``."""
        views = typed_views(memory, self.plan.unit)
        self.pool = {n: ort.OrtValue.ortvalue_from_numpy(view) for n, view in views.items() if n in self._inputs}

    def run(self, step: StepPlan, source: npt.NDArray[np.float32] | None) -> list[npt.NDArray]:
        """Logits [R, vocab] of the last stage, else hidden states [T, D]; rows to append; mass, where the graph has it.
        ``source`` [T, D]: what enters a later stage than the first."""
        arrays: dict[str, npt.NDArray] = {
            "input_ids": step.input_ids,
            "positions": step.positions,
            "query_starts": step.query_starts,
            "query_offsets": step.query_offsets,
            "lengths": np.ascontiguousarray(step.lengths[:, self.buckets]),
            "logit_rows": step.logit_rows,
            "probe_weights": _weights(step),
            **{f"page_table_{i}": step.page_tables[b] for i, b in enumerate(self.buckets)},
        }
        if source is not None:
            half = self._inputs.get("hidden") == "tensor(float16)"
            arrays["hidden"] = source.astype(np.float16) if half else np.ascontiguousarray(source)
        feeds = {n: ort.OrtValue.ortvalue_from_numpy(a) for n, a in arrays.items() if n in self._inputs}
        return [value.numpy() for value in self._session.run_with_ort_values(self._outputs, feeds | self.pool)]


class OrtSession(HostPages):
    """Loads ``folder``'s graphs with an arena of ``arena_bytes``. Raises KvlatheError if ONNX Runtime refuses one."""

    attention = "the function that the ONNX model carries (standard operators, CPU)"
    """What runs kvlathe::Attend here."""
    shares: Callable[[StepPlan, int], Iterator[Share]] = staticmethod(by_size)
    """How what passes a stage is cut up."""

    def __init__(
        self, folder: Path, plan: CompressionPlan, limits: Limits, arena_bytes: int, threads: int | None = None
    ) -> None:
        super().__init__(CacheLayout(plan), arena_bytes)
        self.limits = limits
        options = self.options(threads)
        self.graphs = [Graph(folder / name, plan, i, options) for i, name in enumerate(graph_files(plan))]
        for graph in self.graphs:
            graph.bind(self.memory)

    def options(self, threads: int | None) -> ort.SessionOptions:
        """How ONNX Runtime opens the model."""
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads or machine.cores()
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        if self.plan.stages:  # the threads of a graph that has run must not spin while the next one runs
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        return options

    def run(self, step: StepPlan) -> npt.NDArray[np.float32]:
        """Logits [R, vocab]; the step's rows are in the pool afterwards. Raises KvlatheError beyond the profile."""
        check_step(step, self.limits)
        logits = np.empty((len(step.logit_rows), self.plan.model.vocab_size), np.float32)
        hidden, last, observed = self._between(step), len(self.graphs) - 1, []
        for stage, graph in enumerate(self.graphs):
            for share in self.shares(step, stage):
                out, rows, *mass = graph.run(share.step, hidden[share.tokens] if stage else None)
                self.append(share.step, rows, stage)
                if mass and step.mass is not None:
                    self._keep_mass(step, share, graph, mass[0])
                observed += [(share.step, found, stage) for found in mass]
                if stage == last:
                    logits[share.logits] = out
                else:
                    hidden[share.tokens] = out
        self.page_scores.observe(observed)  # once nothing can fail any more
        return logits

    def _keep_mass(self, step: StepPlan, share: Share, graph: Graph, mass: npt.NDArray[np.float32]) -> None:
        """Put a share's mass [b, lanes, N of its buckets and queries] where it belongs in the step's."""
        assert step.mass is not None
        p, at = self.plan.page_tokens, 0
        ends = np.cumsum([0, *(table.shape[1] * p for table in step.page_tables)]).tolist()
        for start, end in (*((ends[b], ends[b + 1]) for b in graph.buckets), (ends[-1], step.mass.shape[2])):
            size = min(end - start, mass.shape[2] - at)
            step.mass[share.sequences, graph.lanes, start : start + size] = mass[:, :, at : at + size]
            at += size

    def _between(self, step: StepPlan) -> npt.NDArray[np.float32]:
        """The hidden states of the step's tokens between two stages [T, D]."""
        if step.hidden is not None or len(self.graphs) == 1:
            return np.empty((0, 0), np.float32) if step.hidden is None else step.hidden
        return np.empty((len(step.input_ids), self.plan.model.hidden_size), np.float32)


def _weights(step: StepPlan) -> npt.NDArray[np.float32]:
    return np.zeros(len(step.input_ids), np.float32) if step.probe_weights is None else step.probe_weights
