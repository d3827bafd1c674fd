"""PageScores: the observed attention (and position) of every ranked token, inside its
page (kvlathe/plan/layout.py), in host memory.

They are part of the page, so copying, swapping and counting pages needs no word about
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvlathe.plan.codec import Positions
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.sessions.protocols import Float32, Scores, StepPlan

Table = npt.NDArray[np.uint8]
ATTENTION = np.dtype(np.float32)
POSITION = np.dtype(np.int32)


class PageScores:
    """``rows``: of each bucket its pages as a table [page id, page_stride] of bytes."""

    def __init__(self, layout: CacheLayout, rows: Sequence[Table]) -> None:
        self.layout = layout
        self.plan = layout.plan
        self.rows = rows
        self._lanes = [bucket.lanes for bucket in self.plan.index.buckets]
        self._scored = [bucket.scored for bucket in self.plan.index.buckets]
        # Of each bucket, its lanes among those of its stage.
        self._stage_lanes: dict[int, slice | list[int]] = {}
        for stage in range(self.plan.index.graphs):
            for bucket in self.plan.index.buckets_of(stage):
                lanes = _stage_lanes(self.plan, stage, self._lanes[bucket])
                self._stage_lanes[bucket] = lanes
        self._undo: list[tuple[int, npt.NDArray[np.int32], Float32]] = []

    def _field(self, bucket: int, table: Table, kind: np.dtype) -> np.ndarray:
        """Attention or position of every token of the pages in ``table``: a view
        [pages, lanes, P]."""
        shape = (len(self._lanes[bucket]), self.plan.page_tokens)
        size = 4 * shape[0] * shape[1]
        start = self.layout.scores_at(bucket)
        if kind is POSITION:
            start += size
        return table[:, start : start + size].view(kind).reshape(len(table), *shape)

    # -- a step ------------------------------------------------------------------------
    def observe(self, parts: Iterable[tuple[StepPlan, Float32, int]]) -> None:
        """Add what observed rows attended to the scores of the pages; the step's own
        tokens begin with it.

        ``parts``: of a step, each of one stage: the part, its attention [B, lanes of
        the stage, N] (docs/attend.md), the stage.
        """
        self._undo.clear()
        for step, attention, stage in parts:
            self._add(step, attention, stage)

    def _add(self, step: StepPlan, attention: Float32, stage: int) -> None:
        """Add one part. N counts the places of the stage's buckets, then the step's new
        tokens."""
        buckets = self.plan.index.buckets_of(stage)
        pages = [step.page_tables[b].shape[1] for b in buckets]
        ends = np.cumsum([0, *pages]) * self.plan.page_tokens
        for bucket, start, end in zip(buckets, ends[:-1], ends[1:], strict=True):
            if self._scored[bucket]:
                of_lanes = attention[:, self._stage_lanes[bucket]]
                cached = of_lanes[:, :, start:end]
                self._add_to_bucket(step, bucket, cached, of_lanes[:, :, ends[-1] :])

    def _add_to_bucket(
        self, step: StepPlan, bucket: int, cached: Float32, fresh: Float32
    ) -> None:
        """``cached`` [B, lanes, places of the bucket], ``fresh`` [B, lanes, new
        tokens]."""
        for b, (start, stop) in enumerate(pairwise(step.cu_seqlens_q.tolist())):
            if start == stop:
                continue
            new = stop - start if self.plan.index.buckets[bucket].is_hot else 0
            self._add_to_sequence(step, bucket, b, cached[b], fresh[b, :, :new])
            if new and self.plan.index.keeps_positions:
                self._keep_positions(step, bucket, b)

    def _add_to_sequence(
        self, step: StepPlan, bucket: int, b: int, cached: Float32, fresh: Float32
    ) -> None:
        """``cached`` [lanes, places], ``fresh`` [lanes, new tokens] of sequence b."""
        p = self.plan.page_tokens
        start, stop = step.cu_seqlens_q[b : b + 2].tolist()
        weights = step.observation_weights
        observed = weights is not None and weights[start:stop].any()
        length = int(step.lengths[b, bucket])
        new = fresh.shape[1]
        # Without an observed row only the scores of new tokens change.
        first = 0 if observed else length // p
        pages = step.page_tables[bucket][b, first : -(-(length + new) // p)]
        if not len(pages):
            return
        scores = self._field(bucket, self.rows[bucket], ATTENTION)
        old = scores[pages]
        self._undo.append((bucket, pages, old))
        lanes = old.shape[1]
        flat = old.transpose(1, 0, 2).copy().reshape(lanes, -1)
        at = length - first * p
        flat[:, :at] += cached[:, first * p : length]
        flat[:, at : at + new] = fresh
        scores[pages] = flat.reshape(lanes, -1, p).transpose(1, 0, 2)

    def _keep_positions(self, step: StepPlan, bucket: int, b: int) -> None:
        """Write the positions of sequence b's new tokens."""
        p = self.plan.page_tokens
        start, stop = step.cu_seqlens_q[b : b + 2].tolist()
        first = int(step.lengths[b, bucket])
        places = np.arange(first, first + stop - start)
        pages = step.page_tables[bucket][b][places // p]
        within = places % p
        known = self._field(bucket, self.rows[bucket], POSITION)
        known[pages, :, within] = step.positions[start:stop, None]

    def undo(self) -> None:
        """Take back what the last step has added."""
        for bucket, pages, old in reversed(self._undo):
            self._field(bucket, self.rows[bucket], ATTENTION)[pages] = old
        self._undo.clear()

    # -- between steps -----------------------------------------------------------------
    def read(self, bucket: int, pages: Sequence[int], tokens: int) -> Scores:
        """Scores of the first ``tokens`` tokens in ``pages`` of a bucket."""
        table = self.rows[bucket][list(pages)]

        def flat(kind: np.dtype) -> np.ndarray:
            by_lane = self._field(bucket, table, kind).transpose(1, 0, 2)
            return by_lane.reshape(len(by_lane), -1)[:, :tokens]

        return Scores(
            flat(ATTENTION), flat(POSITION) if self.plan.index.keeps_positions else None
        )

    def forget(self, bucket: int, pages: Sequence[int]) -> None:
        """Set the observed attention of all tokens in ``pages`` to 0."""
        if self._scored[bucket]:
            self._field(bucket, self.rows[bucket], ATTENTION)[list(pages)] = 0

    def carry(self, source: int, page: Table, target: int, target_page: Table) -> None:
        """The scores of a sealed page [page_stride] go with its tokens where they are
        ranked on."""
        if not (self._scored[source] and self._scored[target]):
            return
        places = [self._lanes[source].index(lane) for lane in self._lanes[target]]
        kinds: list[np.dtype] = [ATTENTION]
        if self.plan.index.keeps_positions:
            kinds.append(POSITION)
        for kind in kinds:
            copy = self._field(target, target_page[None], kind)
            copy[:] = self._field(source, page[None], kind)[:, places]

    def positions(
        self, bucket: int, page: Table, lanes: Sequence[int]
    ) -> list[Positions]:
        """Positions of each lane's tokens in a page [page_stride] where they are kept,
        [P]; else 0."""
        if not (self._scored[bucket] and self.plan.index.keeps_positions):
            return [0] * len(lanes)
        known = self._field(bucket, page[None], POSITION)[0]
        return [known[self._lanes[bucket].index(lane)] for lane in sorted(lanes)]


def _stage_lanes(
    plan: CompressionPlan, stage: int, lanes: Sequence[int]
) -> slice | list[int]:
    """The places of a bucket's ``lanes`` among the kept ones of its stage; a slice,
    which copies nothing, if all are."""
    layers = plan.index.layers_of(stage)
    kept = [
        i
        for i, lane in enumerate(plan.lanes)
        if lane.layer in layers and not lane.removed
    ]
    if kept == [*lanes]:
        return slice(None)
    return [kept.index(lane) for lane in lanes]
