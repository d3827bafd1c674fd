"""TokenRanking: the part of a step that says which rows are observed, and by what
tokens are ordered that move.

Scores grow in the pages while a step runs, and the session orders tokens by them
(``PageMoves.selections``). What the scores mean is ObservationWindow's to say; here
stands only what the session cannot know: which rows count, and how many of them have
seen a token.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from kvlathe.plan.codec import noise_key
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.plan import CompressionPlan
from kvlathe.plan.token_score import ObservationWindow
from kvlathe.runtime.cache.page_table import PageChange
from kvlathe.runtime.scheduling.sequence import Chunk
from kvlathe.runtime.scheduling.step import Step, StepPart
from kvlathe.runtime.sessions.page_moves import PageSelection, ScoreReset
from kvlathe.runtime.sessions.protocols import StepPlan


class TokenRanking(StepPart):
    """The part of steps that ranks tokens by attention, where the plan says so."""

    def __init__(self, layout: CacheLayout, observation: ObservationWindow) -> None:
        self.layout = layout
        self.observation = observation
        self._keys: dict[int, list[int]] = {}

    @classmethod
    def parts(cls, layout: CacheLayout) -> list[StepPart]:
        """The part of a plan whose score is an observation window; none of others."""
        observation = layout.plan.index.observation
        return [] if observation is None else [cls(layout, observation)]

    def before(self, step: Step, plan: StepPlan) -> StepPlan:
        """``plan`` with the observation weights of its rows."""
        weights = np.zeros(len(plan.input_ids), np.float32)
        starts = plan.cu_seqlens_q[:-1].tolist()
        for chunk, start in zip(step.chunks, starts, strict=True):
            observed = chunk.sequence.observed_rows
            if observed is None:
                continue
            rows = slice(start, start + chunk.count)
            positions = plan.positions[rows]
            first, last = positions[[0, -1]].tolist()
            known = observed.weights(chunk.sequence.tokens, first, last + 1)
            weights[rows] = known[positions - first]
        return dataclasses.replace(plan, observation_weights=weights)

    def after(self, step: Step) -> None:
        """Complete the selections of each chunk, and have scores reset that no later
        selection is to see."""
        for chunk in step.chunks:
            change = chunk.reservation.change
            if change is not None:
                moves = change.moves
                moves.selections = [
                    self._completed(chunk, one) for one in moves.selections
                ]
                moves.resets = self._resets(chunk, change)

    def undo(self, step: Step) -> None:
        step.context.session.roll_back()

    def _completed(self, chunk: Chunk, one: PageSelection) -> PageSelection:
        """A selection with what its tokens are ordered by, beside their scores."""
        sequence, seen = chunk.sequence, None
        if self.observation.normalized:
            assert sequence.observed_rows is not None
            seen = sequence.observed_rows.seen(
                sequence.tokens, sequence.stop(chunk.count)
            )
        return dataclasses.replace(
            one, seen=seen, keys=self._keys_of(one.selection.bucket)
        )

    def _keys_of(self, bucket: int) -> list[int]:
        """The keys of the noise of a bucket's lanes; none where there is no noise."""
        if not self.observation.noise:
            return []
        if bucket not in self._keys:
            self._keys[bucket] = noise_keys(self.layout.plan, bucket)
        return self._keys[bucket]

    def _resets(self, chunk: Chunk, change: PageChange) -> list[ScoreReset]:
        """Resets for rows that count only until tokens are ranked: the scores of those
        that were ranked are 0 again: at the prompt's end, and with every full page."""
        done = chunk.reservation
        if self.observation.accumulated or not done.seals:
            return []
        ended = chunk.sequence.ends_prompt(chunk.count)
        page = self.layout.plan.page_tokens
        resets: list[ScoreReset] = []
        for route in self.layout.plan.index.routes:
            hot = route.buckets[0]
            arrived = done.table.arrived[hot] + done.tokens[hot]
            if done.tokens[hot] and (ended or arrived % page == 0):
                resets += [ScoreReset(b, change.after[b]) for b in route.buckets]
        return resets


def noise_keys(plan: CompressionPlan, bucket: int) -> list[int]:
    """The key of each lane of a bucket, in lane order."""
    lanes = [plan.lanes[index] for index in plan.index.buckets[bucket].lanes]
    return [noise_key(plan.seed, lane.layer, lane.head, 2) for lane in lanes]
