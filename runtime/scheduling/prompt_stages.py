"""PromptStages: a prompt on its way through the stages of a plan, which lose tokens in
between (plan.Stage).

All chunks of a prompt pass one group of layers; then the rows that stay are gathered,
and their chunks pass the next group. What a scheduler must know: a prompt of n tokens
has more than n rows to compute (``Sequence.next_tokens`` gives them chunk by chunk),
its K and V are cached once the last pass ends, and until then its session holds the
hidden states of a pass. A step may hold chunks of any stages beside decodes, which pass
them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvlathe.plan.plan import CompressionPlan
from kvlathe.plan.stages import Pass
from kvlathe.runtime.sessions.protocols import HiddenRows, Int32, PassRows, StepPlan


@dataclass(eq=False, slots=True)
class PromptStages:
    """A prompt of ``tokens`` tokens.

    Of the rows of this pass ``computed`` are done. ``rows``: how many rows each layer has
    computed so far.
    """

    plan: CompressionPlan
    tokens: int
    chunk: int
    rows: list[int] = field(init=False)
    computed: int = 0
    _passes: list[Pass] = field(init=False)
    _entered: HiddenRows | None = None
    _ended: HiddenRows | None = (
        None  # what left the pass before, until some of it enters
    )
    _left: HiddenRows | None = None

    def __post_init__(self) -> None:
        self._passes = list(self.plan.index.passes(self.tokens))
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
    def count(self) -> int:
        """Rows of this pass."""
        return self._passes[0].tokens

    @property
    def entered(self) -> HiddenRows | None:
        """The hidden states with which the rows enter this pass; None at the first layer.
        They are gathered for its first step: one that finds no memory is tried again."""
        if self._ended is not None:
            observation = self.plan.observation
            assert observation is not None
            self._entered = self._ended.stay(self.count, observation.last)
            self._ended = None
        return self._entered

    @property
    def left(self) -> int:
        """Rows of this pass to be computed."""
        return self.count - self.computed

    def next_rows(self, most: int) -> int:
        """The next chunk: up to the pass's end or the grid, which counts the rows of a
        pass."""
        to_border = self.chunk - self.computed % self.chunk
        return min(self.left, to_border, most)

    def arriving(self, count: int) -> list[int]:
        """How many of ``count`` rows of this pass reach each bucket."""
        reached = [0] * len(self.plan.index.buckets)
        for stage in self.stages:
            for bucket in self.plan.index.buckets_of(stage):
                reached[bucket] = count
        return reached

    def places(self, count: int) -> Sequence[int]:
        """Of the next ``count`` rows in the prompt. May wait for the session."""
        end = self.computed + count
        entered = self.entered
        if entered is None:
            return range(self.computed, end)
        return entered.places()[self.computed : end].tolist()

    def enter(self, step: StepPlan, sequence: int, tokens: Sequence[int]) -> PassRows:
        """Write the next rows into the place of ``sequence`` in ``step``, and say what
        they are. ``tokens``: the prompt's ids."""
        assert step.stages is not None
        at, stop = step.cu_seqlens_q[sequence : sequence + 2].tolist()
        end = self.computed + stop - at
        rows = PassRows(
            at,
            self.computed,
            end,
            self.count,
            not self.last,
            self.entered,
            self._left,
        )
        places = self._known()[rows.places]
        ids = np.array(tokens, np.int32)
        step.positions[rows.rows] = places
        step.input_ids[rows.rows] = ids[places]
        step.stages[sequence] = self.stages.start, self.stages.stop
        return rows

    def _known(self) -> Int32:
        """The places [count] of the rows of this pass, or where only the session knows
        them, those of the prompt's last tokens: the last rows are these in every pass."""
        entered = self.entered
        if entered is not None and entered.known is not None:
            return entered.known
        first = self.tokens - self.count
        return np.arange(first, self.tokens, dtype=np.int32)

    def advance(self, count: int, rows: PassRows | None) -> bool:
        """Record that ``count`` rows were computed, which are ``rows`` of their step;
        whether that was the prompt's last."""
        assert rows is not None
        for stage in self.stages:
            for layer in self.plan.index.layers_of(stage):
                self.rows[layer] += count
        self._left = rows.left
        self.computed += count
        ended = not self.left
        if ended and not self.last:
            self._next()
            return False
        return ended

    def _next(self) -> None:
        """Only the rows that stay enter the next pass."""
        assert self._left is not None
        del self._passes[0]
        self._ended = self._left
        self._left = None
        self.computed = 0
