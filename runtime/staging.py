"""Staging: a prompt on its way through the stages of a plan, which lose tokens in between (plan.Stage).

All chunks of a prompt pass one group of layers; then the rows that stay are gathered, and their chunks pass the next
group. What a scheduler must know: a prompt of n tokens has more than n rows to compute (``Sequence.next_tokens`` gives
them chunk by chunk), its K and V are cached once the last pass ends, and until then it holds the hidden states of a
pass on the host. A step may hold chunks of any stages beside decodes, which pass them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvlathe.export.plan import CompressionPlan, Pass
from kvlathe.runtime.session import Int32, StepPlan

Rows = npt.NDArray[np.float32]


@dataclass(eq=False, slots=True)
class Staging:
    """A prompt of ``tokens`` tokens. ``positions``: places in the prompt of the rows of this pass; ``done`` of them are
    computed. ``source`` [rows, D]: what they enter it with, None at the first layer. ``rows``: rows that each layer has
    computed so far.
    """

    plan: CompressionPlan
    tokens: int
    chunk: int
    positions: Int32 = field(init=False)
    rows: list[int] = field(init=False)
    done: int = 0
    source: Rows | None = None
    _passes: list[Pass] = field(init=False)
    _hidden: list[Rows] = field(default_factory=list)
    _mass: npt.NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        self._passes = list(self.plan.passes(self.tokens))
        self.positions = np.arange(self.tokens, dtype=np.int32)
        self._mass = np.zeros(self.tokens)
        self.rows = [0] * self.plan.model.layers

    @property
    def stages(self) -> range:
        """The stages of this pass."""
        return range(self._passes[0].first, self._passes[0].end)

    @property
    def last(self) -> bool:
        """Whether the prompt is cached once this pass ends."""
        return len(self._passes) == 1

    @property
    def left(self) -> int:
        """Rows of this pass to be computed."""
        return len(self.positions) - self.done

    def next_rows(self, most: int) -> int:
        """The next chunk: up to the pass's end or the grid, which counts the rows of a pass."""
        return min(self.left, self.chunk - self.done % self.chunk, most)

    def arriving(self, count: int) -> list[int]:
        """How many of ``count`` rows of this pass reach each bucket."""
        reached = {bucket for stage in self.stages for bucket in self.plan.buckets_of(stage)}
        return [count if bucket in reached else 0 for bucket in range(len(self.plan.buckets))]

    def places(self, count: int) -> list[int]:
        """Of the next ``count`` rows in the prompt."""
        return self.positions[self.done : self.done + count].tolist()

    def enter(self, step: StepPlan, sequence: int, tokens: Sequence[int]) -> None:
        """Write the next rows into the place of ``sequence`` in ``step``. ``tokens``: the prompt's ids."""
        assert self.plan.probe and step.stages is not None
        assert step.probe_weights is not None and step.hidden is not None
        start, end = step.query_starts[sequence : sequence + 2].tolist()
        rows = slice(self.done, self.done + end - start)
        places = self.positions[rows]
        step.positions[start:end] = places
        step.input_ids[start:end] = np.array(tokens, np.int32)[places]
        step.probe_weights[start:end] = places >= self.tokens - self.plan.probe.last
        step.stages[sequence] = self.stages.start, self.stages.stop
        if self.source is not None:
            step.hidden[start:end] = self.source[rows]

    def advance(self, count: int, step: StepPlan, sequence: int) -> bool:
        """``count`` rows more are computed, those of ``sequence`` in ``step``; whether that was the prompt's last."""
        for layer in (layer for stage in self.stages for layer in self.plan.layers_of(stage)):
            self.rows[layer] += count
        if not self.last:
            self._observe(count, step, sequence)
        self.done += count
        ended = not self.left
        if ended and not self.last:
            self._next()
            return False
        return ended

    def _observe(self, count: int, step: StepPlan, sequence: int) -> None:
        """Keep the rows' hidden states, and add up the attention that each row has got in the pass's last layer."""
        assert step.hidden is not None and step.mass is not None
        start = int(step.query_starts[sequence])
        self._hidden.append(step.hidden[start : start + count])
        layer = self.plan.layers_of(self._passes[0].end - 1)[-1]
        ends = np.cumsum([0, *(table.shape[1] * self.plan.page_tokens for table in step.page_tables)])
        for i, lane in enumerate(self.plan.active(layer), self.plan.kept_before(layer)):
            index = lane.layer * self.plan.model.kv_heads + lane.head
            bucket = next(b for b, x in enumerate(self.plan.buckets) if x.source is None and index in x.lanes)
            places = np.r_[ends[bucket] : ends[bucket] + self.done, ends[-1] : ends[-1] + count]
            self._mass[: self.done + count] += step.mass[sequence, i, places]

    def _next(self) -> None:
        """Only the rows that stay enter the next pass."""
        assert self.plan.probe
        kept = survivors(self._mass, self._passes[1].tokens, self.plan.probe.last)
        self.source, self.positions = np.concatenate(self._hidden)[kept], self.positions[kept]
        self.done, self._mass, self._hidden = 0, np.zeros(len(kept)), []
        del self._passes[0]


def survivors(mass: npt.NDArray[np.float64], count: int, last: int) -> npt.NDArray[np.intp]:
    """Places [count], ascending: the ``last`` ones, and of the others those of most ``mass`` (of two, the earlier)."""
    ranked = mass.copy()
    ranked[len(mass) - min(last, count) :] = np.inf
    return np.sort(np.argsort(-ranked, kind="stable")[:count])
