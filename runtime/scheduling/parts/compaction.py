"""PairScores: the part of a step that repeats a prefix to compact it. It has the
session say what the rows attend, and keeps the most that any of them gave each KV pair
(requests/compaction.py)."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.scheduling.step import Step, StepPart
from kvlathe.runtime.sessions.protocols import Float32, StepPlan


class PairScores(StepPart):
    """Scores of the first ``count`` tokens of a sequence. ``scores`` [kept lanes,
    tokens]."""

    def __init__(self, plan: CompressionPlan, count: int) -> None:
        self._plan = plan
        lanes = [i for i, lane in enumerate(plan.lanes) if not lane.removed]
        self._row_of = {lane: i for i, lane in enumerate(lanes)}
        self.scores: Float32 = np.zeros((len(lanes), count), np.float32)
        self._given: Float32 | None = None  # of the step that runs
        self._widths: list[int] = []

    def rows(self, bucket: int) -> list[int]:
        """The rows with the scores of a bucket's lanes."""
        return [self._row_of[lane] for lane in self._plan.index.buckets[bucket].lanes]

    def before(self, step: Step, plan: StepPlan) -> StepPlan:
        """All rows of a step of one sequence are observed. What they attend comes as
        [1, lanes, N]: N counts the places of each bucket, then the new tokens."""
        page = self._plan.page_tokens
        self._widths = [table.shape[1] * page for table in plan.page_tables]
        places = sum(self._widths) + len(plan.query_offsets)
        self._given = np.zeros((1, len(self.scores), places), np.float32)
        weights: npt.NDArray[np.float32] = np.full(len(plan.input_ids), -1, np.float32)
        return dataclasses.replace(
            plan, observation_weights=weights, observed_attention=self._given
        )

    def after(self, step: Step) -> None:
        """Keep the largest that its rows gave each pair."""
        assert self._given is not None
        start = 0
        for b, width in enumerate(self._widths):
            if self._plan.index.buckets[b].is_hot:
                rows = self.rows(b)
                cached = self._given[0, rows, start : start + self.scores.shape[1]]
                self.scores[rows] = np.maximum(self.scores[rows], cached)
            start += width
        self._given = None

    def undo(self, step: Step) -> None:
        self._given = None
