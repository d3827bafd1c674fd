"""GraphSession: a model in one graph or several, a stage each, over pages in host
memory. A subclass says what a graph is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.manifest import Limits
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.sessions.host import passes
from kvlathe.runtime.sessions.host.pages import HostPages
from kvlathe.runtime.sessions.host.ragged import by_size
from kvlathe.runtime.sessions.protocols import Hidden, Session, StepPlan
from kvlathe.runtime.sessions.steps import check_step
from kvlathe.runtime.sessions.substeps import Substep, whole


class StageGraph(Protocol):
    """One stage of a model: its ``buckets``, and its ``lanes`` among those that are
    kept."""

    @property
    def buckets(self) -> Sequence[int]: ...
    @property
    def lanes(self) -> slice: ...

    def bind(self, memory: npt.NDArray[np.uint8]) -> None:
        """Read the cache from ``memory``."""
        ...

    def run(
        self, step: StepPlan, source: npt.NDArray[np.float32] | None
    ) -> list[np.ndarray]:
        """Logits [R, vocab] of the last stage, else hidden states [T, D]; the rows to
        append; what the observed rows attended, where the plan asks for it; states
        after the step, where layers keep some; of the last stage hidden states [R, D],
        where the session gives them.

        ``source`` [T, D]: the hidden states that enter a later stage than the first.
        """
        ...


class GraphSession(HostPages, Session):
    """Runs ``graphs`` over an arena of ``arena_bytes``."""

    substeps: Callable[[StepPlan, int, int], Iterator[Substep]] = staticmethod(by_size)
    """The way in which a stage's sequences are cut up, given the tokens of a page."""

    def __init__(
        self,
        plan: CompressionPlan,
        limits: Limits,
        arena_bytes: int,
        graphs: Sequence[StageGraph],
    ) -> None:
        super().__init__(CacheLayout(plan), arena_bytes)
        self.limits = limits
        self.graphs = graphs
        if any(plan.model.states):
            self.substeps = (
                by_size  # what keeps a state pads sequences, whatever attends
            )
        for graph in graphs:
            graph.bind(self.memory)
        self._hidden = np.empty((0, 0), np.float32)
        # Whether a step passes one graph as it is, and nothing is observed.
        self._one_graph = (
            self.substeps is whole and not plan.stages and not plan.index.observes
        )

    def run(self, step: StepPlan) -> npt.NDArray[np.float32]:
        """Logits [R, vocab]; the step's rows are in the pool afterwards. Raises
        KvlatheError beyond the profile."""
        check_step(step, self.limits)
        if self._one_graph:
            out, rows, *given = self.graph_of(0, step).run(step, None)
            self._hidden = given[0] if given else self._hidden
            self.append(step, rows)
            return out.astype(np.float32, copy=False)
        vocabulary = self.plan.model.vocab_size
        logits = np.empty((len(step.logit_rows), vocabulary), np.float32)
        hidden = passes.entering(step, self._width)
        last = len(self.graphs) - 1
        gives = "hidden_states" in self.capabilities
        if gives:
            size = len(logits), self.plan.model.hidden_size
            self._hidden = np.empty(size, np.float32)
        observed: list[tuple[StepPlan, npt.NDArray[np.float32], int]] = []
        for stage, graph in enumerate(self.graphs):
            for substep in self.substeps(step, stage, self.plan.page_tokens):
                source = hidden[substep.tokens] if stage else None
                runs = self.graph_of(stage, substep.step)
                out, rows, *attention = runs.run(substep.step, source)
                if gives and stage == last:
                    self._hidden[substep.logits] = attention.pop()
                if step.states_after is not None:
                    step.states_after[substep.sequences] = attention.pop()
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

    def hidden(self) -> Hidden:
        """As Session.hidden."""
        return self._hidden

    def graph_of(self, stage: int, step: StepPlan) -> StageGraph:
        """The graph that runs a step through a stage."""
        return self.graphs[stage]

    def _keep_attention(
        self,
        step: StepPlan,
        substep: Substep,
        graph: StageGraph,
        attended: npt.NDArray[np.float32],
    ) -> None:
        """Put what a substep's observed rows ``attended`` [b, lanes, N] where it belongs
        in the step's ``observed_attention``.

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


def observation_weights(step: StepPlan) -> npt.NDArray[np.float32]:
    return (
        np.zeros(len(step.input_ids), np.float32)
        if step.observation_weights is None
        else step.observation_weights
    )
