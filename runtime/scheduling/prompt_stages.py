"""PromptStages: a prompt on its way through the stages of a plan, which lose tokens in
between (plan.Stage).

All chunks of a prompt pass one group of layers; then the rows that stay are gathered,
and their chunks pass the next group. What a scheduler must know: a prompt of n tokens
has more than n rows to compute (``Sequence.next_tokens`` gives them chunk by chunk),
its K and V are cached once the last pass ends, and until then it holds the hidden
states of a pass on the host. A step may hold chunks of any stages beside decodes, which
pass them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvlathe.plan.heads import Lane
from kvlathe.plan.plan import CompressionPlan, Pass
from kvlathe.runtime.sessions.protocols import Int32, StepPlan

Rows = npt.NDArray[np.float32]


@dataclass(eq=False, slots=True)
class PromptStages:
    """A prompt of ``tokens`` tokens.

    ``positions``: places in the prompt of the rows of this pass; ``computed`` of them
    are done. ``source`` [rows, D]: the hidden states with which they enter it, None at
    the first layer. ``rows``: how many rows each layer has computed so far.
    """

    plan: CompressionPlan
    tokens: int
    chunk: int
    positions: Int32 = field(init=False)
    rows: list[int] = field(init=False)
    computed: int = 0
    source: Rows | None = None
    _passes: list[Pass] = field(init=False)
    _hidden: list[Rows] = field(default_factory=list)
    _attention: npt.NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        self._passes = list(self.plan.passes(self.tokens))
        self.positions = np.arange(self.tokens, dtype=np.int32)
        self._attention = np.zeros(self.tokens)
        self.rows = [0] * self.plan.model.layers

    @property
    def stages(self) -> range:
        """The stages of this pass."""
        current = self._passes[0]
        return range(current.first, current.end)

    @property
    def last(self) -> bool:
        """Whether the prompt is cached once this pass ends."""
        return len(self._passes) == 1

    @property
    def left(self) -> int:
        """Rows of this pass to be computed."""
        return len(self.positions) - self.computed

    def next_rows(self, most: int) -> int:
        """The next chunk: up to the pass's end or the grid, which counts the rows of a
        pass."""
        to_border = self.chunk - self.computed % self.chunk
        return min(self.left, to_border, most)

    def arriving(self, count: int) -> list[int]:
        """How many of ``count`` rows of this pass reach each bucket."""
        reached = [0] * len(self.plan.buckets)
        for stage in self.stages:
            for bucket in self.plan.buckets_of(stage):
                reached[bucket] = count
        return reached

    def places(self, count: int) -> list[int]:
        """Of the next ``count`` rows in the prompt."""
        end = self.computed + count
        return self.positions[self.computed : end].tolist()

    def enter(self, step: StepPlan, sequence: int, tokens: Sequence[int]) -> None:
        """Write the next rows into the place of ``sequence`` in ``step``. ``tokens``:
        the prompt's ids."""
        assert self.plan.observation and step.stages is not None
        assert step.observation_weights is not None and step.hidden is not None
        start, end = step.cu_seqlens_q[sequence : sequence + 2].tolist()
        rows = slice(self.computed, self.computed + end - start)
        places = self.positions[rows]
        step.positions[start:end] = places
        step.input_ids[start:end] = np.array(tokens, np.int32)[places]
        step.observation_weights[start:end] = (
            places >= self.tokens - self.plan.observation.last
        )
        step.stages[sequence] = self.stages.start, self.stages.stop
        if self.source is not None:
            step.hidden[start:end] = self.source[rows]

    def advance(self, count: int, step: StepPlan, sequence: int) -> bool:
        """Record that ``count`` rows were computed, those of ``sequence`` in ``step``;
        whether that was the prompt's last."""
        for stage in self.stages:
            for layer in self.plan.layers_of(stage):
                self.rows[layer] += count
        if not self.last:
            self._observe(count, step, sequence)
        self.computed += count
        ended = not self.left
        if ended and not self.last:
            self._next()
            return False
        return ended

    def _observe(self, count: int, step: StepPlan, sequence: int) -> None:
        """Keep the rows' hidden states, and add up the attention that each row has got
        in the pass's last layer."""
        assert step.hidden is not None and step.observed_attention is not None
        plan = self.plan
        start = int(step.cu_seqlens_q[sequence])
        rows = step.hidden[start : start + count]
        self._hidden.append(rows)
        # Places of the observed attention: each bucket's cached tokens, then the new ones.
        pages = [table.shape[1] for table in step.page_tables]
        firsts = np.cumsum([0, *pages]) * plan.page_tokens
        of_new = firsts[-1] + np.arange(count)
        last_stage = self._passes[0].end - 1
        layer = plan.layers_of(last_stage)[-1]
        attention = step.observed_attention[sequence]
        total = self._attention[: self.computed + count]
        for i, lane in enumerate(plan.active(layer), plan.kept_before(layer)):
            bucket = self._fresh_bucket(lane)
            of_cached = firsts[bucket] + np.arange(self.computed)
            places = np.concatenate([of_cached, of_new])
            total += attention[i, places]

    def _fresh_bucket(self, lane: Lane) -> int:
        """The bucket that new tokens of a lane reach."""
        index = lane.layer * self.plan.model.kv_heads + lane.head
        return next(
            b
            for b, bucket in enumerate(self.plan.buckets)
            if bucket.source is None and index in bucket.lanes
        )

    def _next(self) -> None:
        """Only the rows that stay enter the next pass."""
        observation = self.plan.observation
        assert observation
        count = self._passes[1].tokens
        kept = survivors(self._attention, count, observation.last)
        self.source = np.concatenate(self._hidden)[kept]
        self.positions = self.positions[kept]
        self.computed = 0
        self._attention = np.zeros(len(kept))
        self._hidden = []
        del self._passes[0]


def survivors(
    attention: npt.NDArray[np.float64], count: int, last: int
) -> npt.NDArray[np.intp]:
    """Places [count], ascending: the ``last`` ones, and of the others those of most
    accumulated ``attention`` (of two equal ones the earlier)."""
    ranked = attention.copy()
    ranked[len(ranked) - min(last, count) :] = np.inf
    return np.sort(np.argsort(-ranked, kind="stable")[:count])
