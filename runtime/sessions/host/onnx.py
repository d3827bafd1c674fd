"""OrtSession: an exported model on ONNX Runtime's CPU provider, over pages in host
memory; one graph for each stage.

The pool reaches the graph as OrtValues that share the arena's memory; nothing is
copied, however large it is. The graph only reads it: its second output holds the step's
rows, which ``append`` writes to their places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from kvlathe.base import machine
from kvlathe.base.errors import KvlatheError
from kvlathe.plan.layer_table import POOLS
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.manifest import Limits
from kvlathe.plan.plan import CompressionPlan, graph_files
from kvlathe.runtime.sessions.host import passes
from kvlathe.runtime.sessions.host.pages import HostPages, typed_views
from kvlathe.runtime.sessions.host.ragged import by_size
from kvlathe.runtime.sessions.protocols import Session, StepPlan
from kvlathe.runtime.sessions.steps import check_step
from kvlathe.runtime.sessions.substeps import Substep, whole


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
        layers = plan.index.layers_of(stage)
        self.lanes = slice(
            plan.index.kept_before(layers.start), plan.index.kept_before(layers.stop)
        )
        self.pool: dict[str, ort.OrtValue] = {}
        self._check_sizes(path)

    def _check_sizes(self, path: Path) -> None:
        """Raises KvlatheError where the graph was exported for another plan: it would
        fail in its first step, or read rows as what they are not."""
        lanes = (lane for lane in self.plan.lanes if not lane.removed)
        widths = dict.fromkeys(POOLS, self.plan.index.unit) | {
            "lengths": len(self.buckets),
            "logits": self.plan.model.vocab_size,
            "rows": sum(lane.rank_k + lane.rank_v for lane in lanes),
        }
        for entry in (*self._session.get_inputs(), *self._session.get_outputs()):
            width = widths.get(entry.name)
            if width is not None and entry.shape[-1] != width:
                raise KvlatheError(
                    f"{path} does not belong to its plan",
                    f"{entry.name} has {entry.shape[-1]} columns and the plan {width}",
                    "build the engine again",
                )

    def bind(self, memory: npt.NDArray[np.uint8]) -> None:
        """Read the cache from ``memory``."""
        self.pool = {
            n: ort.OrtValue.ortvalue_from_numpy(view)
            for n, view in typed_views(memory, self.plan.index.unit).items()
            if n in self._inputs
        }

    def run(
        self, step: StepPlan, source: npt.NDArray[np.float32] | None
    ) -> list[np.ndarray]:
        """Logits [R, vocab] of the last stage, else hidden states [T, D]; the rows to
        append; what the observed rows attended, where the graph has it.

        ``source`` [T, D]: the hidden states that enter a later stage than the first.
        """
        arrays: dict[str, np.ndarray] = {
            "input_ids": step.input_ids,
            "positions": step.positions,
            "cu_seqlens_q": step.cu_seqlens_q,
            "query_offsets": step.query_offsets,
            "lengths": np.ascontiguousarray(step.lengths[:, self.buckets]),
            "logit_rows": step.logit_rows,
            "observation_weights": _weights(step),
            **{
                f"page_table_{i}": step.page_tables[b]
                for i, b in enumerate(self.buckets)
            },
        }
        if source is not None:
            half = self._inputs.get("hidden") == "tensor(float16)"
            arrays["hidden"] = (
                source.astype(np.float16) if half else np.ascontiguousarray(source)
            )
        feeds = {
            n: ort.OrtValue.ortvalue_from_numpy(a)
            for n, a in arrays.items()
            if n in self._inputs
        }
        return [
            value.numpy()
            for value in self._session.run_with_ort_values(
                self._outputs, feeds | self.pool
            )
        ]


class OrtSession(HostPages, Session):
    """Loads ``folder``'s graphs with an arena of ``arena_bytes``. Raises KvlatheError
    if ONNX Runtime refuses one."""

    attention = "the function that the ONNX model carries (standard operators, CPU)"
    """The code that runs kvlathe::Attend here."""
    substeps: Callable[[StepPlan, int, int], Iterator[Substep]] = staticmethod(by_size)
    """The way in which a stage's sequences are cut up, given the tokens of a page."""

    def __init__(
        self,
        folder: Path,
        plan: CompressionPlan,
        limits: Limits,
        arena_bytes: int,
        threads: int | None = None,
    ) -> None:
        super().__init__(CacheLayout(plan), arena_bytes)
        self.limits = limits
        options = self.options(threads)
        self.graphs = [
            Graph(folder / name, plan, i, options)
            for i, name in enumerate(graph_files(plan))
        ]
        for graph in self.graphs:
            graph.bind(self.memory)
        # Whether a step passes one graph as it is, and nothing is observed.
        self._one_graph = (
            self.substeps is whole and not plan.stages and not plan.index.observes
        )

    def options(self, threads: int | None) -> ort.SessionOptions:
        """Options with which ONNX Runtime opens the model."""
        options = ort.SessionOptions()
        options.intra_op_num_threads = machine.threads(threads)
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        if (
            self.plan.stages
        ):  # the threads of a graph that has run must not spin while the next one runs
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        return options

    def run(self, step: StepPlan) -> npt.NDArray[np.float32]:
        """Logits [R, vocab]; the step's rows are in the pool afterwards. Raises
        KvlatheError beyond the profile."""
        check_step(step, self.limits)
        if self._one_graph:
            out, rows = self.graphs[0].run(step, None)
            self.append(step, rows)
            return out.astype(np.float32, copy=False)
        logits = np.empty(
            (len(step.logit_rows), self.plan.model.vocab_size), np.float32
        )
        hidden = passes.entering(step, self._width)
        last = len(self.graphs) - 1
        observed: list[tuple[StepPlan, npt.NDArray[np.float32], int]] = []
        for stage, graph in enumerate(self.graphs):
            for substep in self.substeps(step, stage, self.plan.page_tokens):
                source = hidden[substep.tokens] if stage else None
                out, rows, *attention = graph.run(substep.step, source)
                self.append(substep.step, rows, stage)
                for attended in attention:
                    observed.append((substep.step, attended, stage))
                    passes.observe(self.plan, step, substep, attended, stage)
                    if step.observed_attention is not None:
                        self._keep_attention(step, substep, graph, attended)
                if stage == last:
                    logits[substep.logits] = out
                else:
                    hidden[substep.tokens] = out
        passes.leave(step, hidden)
        self.page_scores.observe(observed)  # once nothing can fail any more
        return logits

    def _keep_attention(
        self,
        step: StepPlan,
        substep: Substep,
        graph: Graph,
        attended: npt.NDArray[np.float32],
    ) -> None:
        """Put what a substep's observed rows ``attended`` [b, lanes, N] where it
        belongs in the step's ``observed_attention``.

        N counts the places of the graph's buckets, in the width of the substep's page
        tables, then its queries. In the step there are all buckets, in its own width.
        """
        assert step.observed_attention is not None
        page = self.plan.page_tokens
        of_step = step.observed_attention[:, graph.lanes]
        widths = [table.shape[1] * page for table in step.page_tables]
        starts = np.cumsum([0, *widths]).tolist()
        at = 0
        for bucket in graph.buckets:
            size = substep.step.page_tables[bucket].shape[1] * page
            start = starts[bucket]
            places = slice(start, start + size)
            of_step[substep.sequences, :, places] = attended[:, :, at : at + size]
            at += size
        fresh = attended[:, :, at:]
        places = slice(starts[-1], starts[-1] + fresh.shape[2])
        of_step[substep.sequences, :, places] = fresh

    @property
    def _width(self) -> int:
        """The width of the hidden states between two stages, where there are any."""
        return self.plan.model.hidden_size if len(self.graphs) > 1 else 0


def _weights(step: StepPlan) -> npt.NDArray[np.float32]:
    return (
        np.zeros(len(step.input_ids), np.float32)
        if step.observation_weights is None
        else step.observation_weights
    )
