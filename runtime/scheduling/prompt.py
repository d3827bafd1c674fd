"""PromptPath: how the rows of a prompt pass the layers. Whole: every row passes all of
them. Staged: rows are lost between the stages of a plan (plan.Stage).

On a staged path all chunks of a prompt pass one group of layers; then the rows that
stay are gathered, and their chunks pass the next group. What a scheduler must know: a
prompt of n tokens has more than n rows to compute (``next_rows`` gives them chunk by
chunk), its K and V are cached once the last pass ends, and until then its session holds
the hidden states of a pass. A step may hold chunks of any stages beside decodes, which
pass them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kvlathe.plan.plan import CompressionPlan
from kvlathe.plan.stages import Pass
from kvlathe.runtime.sessions.protocols import HiddenRows, Int32, PassRows, StepPlan


class PromptPath(Protocol):
    """The meaning of a sequence's next ``count`` rows, of whose tokens ``cached`` are
    cached. A row is a token, or on a staged path what is left of one in its pass."""

    @property
    def graphs(self) -> int:
        """Stages of the plan, where rows pass them one by one; else 0."""
        ...

    @property
    def after(self) -> Whole:
        """The path of what follows the prompt."""
        ...

    @property
    def rows(self) -> list[int] | None:
        """The rows that each layer has computed so far; None where that is no
        question."""
        ...

    @property
    def sees_logits(self) -> bool:
        """Whether the next rows pass the last layer."""
        ...

    def in_chunk(self, cached: int) -> bool:
        """Whether a chunk of the prompt has begun and not ended: its tokens are hot."""
        ...

    def next_rows(self, cached: int, length: int, most: int) -> int:
        """The rows of the next chunk, at most ``most``, of a sequence of ``length``
        tokens."""
        ...

    def arriving(self, count: int) -> int | list[int]:
        """The rows that reach each bucket; one number where all buckets get them."""
        ...

    def places(self, cached: int, count: int) -> Sequence[int]:
        """The places of the rows among the sequence's tokens. May wait for the
        session."""
        ...

    def stop(self, cached: int, count: int) -> int:
        """The number of the sequence's tokens that have come after the rows, or will
        have when their pass ends."""
        ...

    def seals(self, cached: int, count: int) -> bool:
        """Whether pages seal and tokens move after the rows."""
        ...

    def ends(self, cached: int, count: int) -> bool:
        """Whether the prompt, or its pass, ends with the rows."""
        ...

    def completes(self, cached: int, count: int, length: int) -> bool:
        """Whether all ``length`` tokens are cached after the rows."""
        ...

    def enter(
        self, step: StepPlan, place: int, tokens: Sequence[int]
    ) -> PassRows | None:
        """Write the next rows into ``step``, in which the sequence has ``place``. None
        where the step's own ids and positions are right. ``tokens``: the prompt's."""
        ...

    def advance(self, count: int, rows: PassRows | None) -> int:
        """Record that ``count`` rows were computed, which were ``rows`` of their step.
        The tokens that are cached now and were not before."""
        ...


@dataclass(frozen=True, slots=True)
class Whole:
    """All rows of a prompt of ``tokens`` tokens pass all layers.

    ``chunk``: a prompt is cut at multiples of so many tokens. ``seals_every``: within a
    prompt, pages seal and tokens move at multiples of so many (0: only at its end).
    While decoding, they do after every token. So when pages seal depends on the
    sequence, never on the schedule.
    """

    tokens: int
    chunk: int
    seals_every: int
    graphs: int = field(default=0, init=False)
    rows: None = field(default=None, init=False)

    @classmethod
    def cut(cls, tokens: int, chunk: int) -> Whole:
        """Pages seal where the prompt is cut."""
        return cls(tokens, chunk, chunk)

    @property
    def after(self) -> Whole:
        return self

    @property
    def sees_logits(self) -> bool:
        return True

    def in_chunk(self, cached: int) -> bool:
        return cached < self.tokens and cached % self.chunk > 0

    def next_rows(self, cached: int, length: int, most: int) -> int:
        """The next chunk: up to the grid, or the end."""
        end = length
        if cached < self.tokens:
            end = min((cached // self.chunk + 1) * self.chunk, self.tokens)
        return min(end - cached, most)

    def arriving(self, count: int) -> int:
        return count

    def places(self, cached: int, count: int) -> range:
        return range(cached, cached + count)

    def stop(self, cached: int, count: int) -> int:
        return cached + count

    def seals(self, cached: int, count: int) -> bool:
        end = cached + count
        if end >= self.tokens:
            return True
        return self.seals_every > 0 and end % self.seals_every == 0

    def ends(self, cached: int, count: int) -> bool:
        return cached < self.tokens <= cached + count

    def completes(self, cached: int, count: int, length: int) -> bool:
        return cached + count == length

    def enter(self, step: StepPlan, place: int, tokens: Sequence[int]) -> None:
        """Its rows are tokens."""

    def advance(self, count: int, rows: PassRows | None) -> int:
        return count


@dataclass(eq=False, slots=True)
class Staged:
    """A prompt of ``tokens`` tokens that passes the stages of ``plan``.

    Of the rows of this pass ``computed`` are done. ``rows``: how many rows each layer
    has computed so far. Nothing of the prompt counts as cached before its last pass
    ends.
    """

    plan: CompressionPlan
    tokens: int
    chunk: int
    rows: list[int] = field(init=False)
    computed: int = 0
    _passes: list[Pass] = field(init=False)
    _entered: HiddenRows | None = None
    # What left the pass before, until some of it enters this one.
    _ended: HiddenRows | None = None
    _left: HiddenRows | None = None

    def __post_init__(self) -> None:
        self._passes = list(self.plan.index.passes(self.tokens))
        self.rows = [0] * self.plan.model.layers

    @property
    def graphs(self) -> int:
        return self.plan.index.graphs

    @property
    def after(self) -> Whole:
        return Whole.cut(self.tokens, self.chunk)

    @property
    def stages(self) -> range:
        """The stages of this pass."""
        current = self._passes[0]
        return range(current.first, current.end)

    @property
    def sees_logits(self) -> bool:
        """Whether this is the last pass: the prompt is cached once it ends."""
        return len(self._passes) == 1

    def in_chunk(self, cached: int) -> bool:
        return False

    @property
    def count(self) -> int:
        """Rows of this pass."""
        return self._passes[0].tokens

    @property
    def entered(self) -> HiddenRows | None:
        """The hidden states with which the rows enter this pass; None at the first
        layer. They are gathered for its first step: one that finds no memory is tried
        again."""
        if self._ended is not None:
            observation = self.plan.index.observation
            assert observation is not None
            self._entered = self._ended.stay(self.count, observation.last)
            self._ended = None
        return self._entered

    @property
    def left(self) -> int:
        """Rows of this pass to be computed."""
        return self.count - self.computed

    def next_rows(self, cached: int, length: int, most: int) -> int:
        """The next chunk: up to the pass's end or the grid, which counts the rows of a
        pass."""
        return min(self.left, self.chunk - self.computed % self.chunk, most)

    def arriving(self, count: int) -> list[int]:
        """The buckets in the layers of this pass get them."""
        reached = [0] * len(self.plan.index.buckets)
        for stage in self.stages:
            for bucket in self.plan.index.buckets_of(stage):
                reached[bucket] = count
        return reached

    def places(self, cached: int, count: int) -> Sequence[int]:
        end = self.computed + count
        entered = self.entered
        if entered is None:
            return range(self.computed, end)
        return entered.places()[self.computed : end].tolist()

    def stop(self, cached: int, count: int) -> int:
        return self.tokens

    def seals(self, cached: int, count: int) -> bool:
        return count == self.left

    def ends(self, cached: int, count: int) -> bool:
        return count == self.left

    def completes(self, cached: int, count: int, length: int) -> bool:
        ends = self.sees_logits and count == self.left
        return ends and length == self.tokens  # else known tokens come behind it

    def enter(self, step: StepPlan, place: int, tokens: Sequence[int]) -> PassRows:
        """Ids and positions are those of the rows that are still there."""
        assert step.stages is not None
        at, stop = step.cu_seqlens_q[place : place + 2].tolist()
        rows = PassRows(
            at,
            self.computed,
            self.computed + stop - at,
            self.count,
            not self.sees_logits,
            self.entered,
            self._left,
        )
        places = self._known()[rows.places]
        step.positions[rows.rows] = places
        step.input_ids[rows.rows] = np.array(tokens, np.int32)[places]
        step.stages[place] = self.stages.start, self.stages.stop
        return rows

    def _known(self) -> Int32:
        """The places [count] of the rows of this pass, or where only the session knows
        them, those of the prompt's last tokens: the last rows are these in every
        pass."""
        entered = self.entered
        if entered is not None and entered.known is not None:
            return entered.known
        return np.arange(self.tokens - self.count, self.tokens, dtype=np.int32)

    def advance(self, count: int, rows: PassRows | None) -> int:
        """The whole prompt is cached with the last row of the last pass."""
        assert rows is not None
        for stage in self.stages:
            for layer in self.plan.index.layers_of(stage):
                self.rows[layer] += count
        self._left = rows.left
        self.computed += count
        if self.left:
            return 0
        if self.sees_logits:
            return self.tokens
        self._next()
        return 0

    def _next(self) -> None:
        """Only the rows that stay enter the next pass."""
        assert self._left is not None
        del self._passes[0]
        self._ended = self._left
        self._left = None
        self.computed = 0


def path_of(plan: CompressionPlan, tokens: int, chunk: int) -> PromptPath:
    """The path of a prompt of ``tokens`` tokens that is cut at multiples of ``chunk``.
    Where tokens are ranked, they move after each slice of the prompt."""
    if len(plan.index.passes(tokens)) > 1:
        return Staged(plan, tokens, chunk)
    if plan.score is None:
        return Whole.cut(tokens, chunk)
    return Whole(tokens, chunk, plan.score.slice_tokens)
