"""Guessing layer: a layer that was trained beside a model to guess further tokens
(multi-token prediction, DeepSeek-V3, arXiv 2412.19437, section 2.2).

It is a DraftModel of one layer, whose row of a token reads, beside it, what the model's
head read at the place before. Behind a guess that is what the layer itself gave. The
model's own rows are known from the end of the prompt on: so its cache begins there, and
anew wherever they have a gap, as after a sequence was computed again.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import replace

from kvlathe.runtime.drafting.draft_model import DraftModel
from kvlathe.runtime.drafting.hidden_rows import MOST, HiddenRows, hidden_bytes
from kvlathe.runtime.scheduling.engine import Engine
from kvlathe.runtime.scheduling.prompt import Whole
from kvlathe.runtime.scheduling.sequence import Chunk, Sequence
from kvlathe.runtime.scheduling.step import Step, StepPart
from kvlathe.runtime.sessions.protocols import HiddenRow, StepPlan


class GuessingLayer(DraftModel, StepPart):
    """The WatchingDrafter, and the part of its ``engine``'s steps that has their rows
    read hidden states."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        limits = engine.scheduler.limits
        self._hidden = HiddenRows(MOST * limits.max_batch_size)
        rows = hidden_bytes(engine.pool.plan, limits)
        engine.memory = {**engine.memory, "hidden_rows": rows}
        self._owners: dict[Sequence, Sequence] = {}  # by what is known of them here
        self._gave: dict[Sequence, HiddenRow] = {}  # the newest row of each, forks too
        engine.context.parts = [*engine.context.parts, self]

    # -- the model's steps -------------------------------------------------------------
    def begins(self, step: Step) -> None:
        """WatchingDrafter.begins."""
        self._hidden.begins(step)

    def watch(self, step: Step) -> None:
        """WatchingDrafter.watch."""
        self._hidden.watch(step)

    def chances(self, sequence: Sequence, most: int) -> Items[float]:
        """Drafter.chances."""
        if self._hidden.of(sequence) is None:
            return ()
        return super().chances(sequence, most)

    def draft(self, counts: Mapping[Sequence, int], seconds: float) -> list[list[int]]:
        """Drafter.draft."""
        try:
            return super().draft(counts, seconds)
        finally:
            self._gave.clear()

    def forget(self, sequence: Sequence) -> None:
        """Drafter.forget."""
        self._hidden.forget(sequence)
        copy = self._copies.get(sequence)
        if copy is not None:
            self._owners.pop(copy.known, None)
        super().forget(sequence)

    # -- its own steps -----------------------------------------------------------------
    def before(self, step: Step, plan: StepPlan) -> StepPlan:
        """StepPart.before."""
        step.context.session.keep_hidden()
        rows: list[HiddenRow] = []
        for chunk in step.chunks:
            rows += self._rows(chunk)
        return replace(plan, hidden=rows)

    def after(self, step: Step) -> None:
        """StepPart.after."""
        hidden = step.context.session.hidden()
        row = -1
        for chunk in step.chunks:
            row += len(chunk.wanted)
            if chunk.wanted:
                self._gave[chunk.sequence] = hidden, row

    def _rows(self, chunk: Chunk) -> list[HiddenRow]:
        """The rows that a chunk reads beside its tokens: for a fork, what the layer gave."""
        known = chunk.sequence
        owner = self._owners.get(known)
        if owner is None:
            return [self._gave[known]]
        trail = self._hidden.of(owner)
        assert trail is not None
        place = self._copies[owner].first + known.cached - 1
        return trail.of(place, chunk.count)

    def _open(self, sequence: Sequence, tokens: list[int]) -> Sequence:
        opened = super()._open(sequence, tokens)
        opened.prompt_tokens = 0
        opened.path = Whole.cut(0, self._pool.plan.prefill_chunk)
        return opened

    def _is_ready(self, sequence: Sequence) -> bool:
        """Begins anew where the rows between what is cached here and what is remembered
        are not known."""
        copy, trail = self._copies[sequence], self._hidden.of(sequence)
        if trail is None:
            return False
        if not copy.first or copy.first + copy.known.cached <= trail.first:
            self._owners.pop(copy.known, None)
            self._pool.release(copy.known.table)
            copy.known = self._open(sequence, [])
            copy.first = trail.first + 1
            self._owners[copy.known] = sequence
        return super()._is_ready(sequence)

    def _chunk(
        self, sequence: Sequence, forks: dict[Sequence, Sequence], guess: list[int]
    ) -> Chunk:
        chunk = super()._chunk(sequence, forks, guess)
        if guess and chunk.sequence not in self._gave:
            known = self._copies[sequence].known
            self._gave[chunk.sequence] = self._gave[known]
        return chunk
