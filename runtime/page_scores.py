"""PageScores: the probe mass (and position) of every ranked token, inside its page (export/layout.py), in host memory.

They are part of the page, so copying, swapping and counting pages needs no word about them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvlathe.export.layout import CacheLayout
from kvlathe.export.plan import CompressionPlan
from kvlathe.runtime.codec import Positions
from kvlathe.runtime.session import Float32, Scores, StepPlan

Table = npt.NDArray[np.uint8]
MASS, POSITION = np.dtype(np.float32), np.dtype(np.int32)


class PageScores:
    """``rows``: of each bucket its pages as a table [page id, page_stride] of bytes."""

    def __init__(self, layout: CacheLayout, rows: Sequence[Table]) -> None:
        self.layout, self.plan, self.rows = layout, layout.plan, rows
        self._lanes = [sorted(bucket.lanes) for bucket in self.plan.buckets]
        self._scored = [self.plan.scored(b) for b in range(len(self.plan.buckets))]
        stages = {b: i for i in range(self.plan.graphs) for b in self.plan.buckets_of(i)}
        self._mass_rows = [_rows(self.plan, stages[b], lanes) for b, lanes in enumerate(self._lanes)]
        self._undo: list[tuple[int, npt.NDArray[np.int32], Float32]] = []

    def _field(self, bucket: int, table: Table, kind: np.dtype) -> npt.NDArray:
        """Mass or position of every token of the pages in ``table``: a view [pages, lanes, P]."""
        lanes, p = len(self._lanes[bucket]), self.plan.page_tokens
        at = self.layout.scores_at(bucket) + (4 * lanes * p if kind is POSITION else 0)
        return table[:, at : at + 4 * lanes * p].view(kind).reshape(len(table), lanes, p)

    # -- a step ----------------------------------------------------------------------------------------------------
    def observe(self, parts: Iterable[tuple[StepPlan, Float32, int]]) -> None:
        """Add the masses [B, lanes of a stage, N] (docs/attend.md) of a step's parts, each of one stage, to the scores
        of their pages; the step's own tokens begin with them."""
        self._undo.clear()
        for part in parts:
            self._add(*part)

    def _add(self, step: StepPlan, mass: Float32, stage: int) -> None:
        buckets = self.plan.buckets_of(stage)
        ends = np.cumsum([0, *(step.page_tables[b].shape[1] * self.plan.page_tokens for b in buckets)])
        for bucket, start, end in zip(buckets, ends[:-1], ends[1:], strict=True):
            if self._scored[bucket]:
                of_lanes = mass[:, self._mass_rows[bucket]]
                self._observe(step, bucket, of_lanes[:, :, start:end], of_lanes[:, :, ends[-1] :])

    def _observe(self, step: StepPlan, bucket: int, cached: Float32, fresh: Float32) -> None:
        p, masses = self.plan.page_tokens, self._field(bucket, self.rows[bucket], MASS)
        for b, (start, stop) in enumerate(zip(step.query_starts[:-1], step.query_starts[1:], strict=True)):
            if start == stop:
                continue
            new = stop - start if self.plan.buckets[bucket].source is None else 0
            length = int(step.lengths[b, bucket])
            seen = step.probe_weights is not None and step.probe_weights[start:stop].any()
            first = 0 if seen else length // p  # without an observed row only the new tokens' scores change
            pages = step.page_tables[bucket][b, first : -(-(length + new) // p)]
            if not len(pages):
                continue
            old = masses[pages]
            self._undo.append((bucket, pages, old))
            flat = old.transpose(1, 0, 2).copy().reshape(old.shape[1], -1)
            at = length - first * p
            flat[:, :at] += cached[b, :, first * p : length]
            flat[:, at : at + new] = fresh[b, :, :new]
            masses[pages] = flat.reshape(old.shape[1], -1, p).transpose(1, 0, 2)
            if new and self.plan.keeps_positions:
                places = np.arange(length, length + new)
                known = self._field(bucket, self.rows[bucket], POSITION)
                known[step.page_tables[bucket][b, places // p], :, places % p] = step.positions[start:stop, None]

    def undo(self) -> None:
        """Take back what the last step has added."""
        for bucket, pages, old in reversed(self._undo):
            self._field(bucket, self.rows[bucket], MASS)[pages] = old
        self._undo.clear()

    # -- between steps ---------------------------------------------------------------------------------------------
    def read(self, bucket: int, pages: Sequence[int], tokens: int) -> Scores:
        """As Session.scores."""
        table = self.rows[bucket][list(pages)]

        def flat(kind: np.dtype) -> npt.NDArray:
            found = self._field(bucket, table, kind).transpose(1, 0, 2)
            return found.reshape(len(found), -1)[:, :tokens]

        return Scores(flat(MASS), flat(POSITION) if self.plan.keeps_positions else None)

    def forget(self, bucket: int, pages: Sequence[int]) -> None:
        """As Session.forget."""
        if self._scored[bucket]:
            self._field(bucket, self.rows[bucket], MASS)[list(pages)] = 0

    def fields(self, bucket: int, lane: int) -> list[tuple[int, int]]:
        """(offset, bytes a token) of what a page keeps for each token of a lane."""
        if not self._scored[bucket]:
            return []
        lanes, p = self._lanes[bucket], self.plan.page_tokens
        at = self.layout.scores_at(bucket) + 4 * p * lanes.index(lane)
        return [(at + 4 * p * len(lanes) * i, 4) for i in range(2 if self.plan.keeps_positions else 1)]

    def carry(self, source: int, page: Table, target: int, target_page: Table) -> None:
        """The scores of a sealed page [page_stride] go with its tokens where they are ranked on."""
        if self._scored[source] and self._scored[target]:
            chosen = [self._lanes[source].index(lane) for lane in self._lanes[target]]
            for kind in (MASS, POSITION)[: 2 if self.plan.keeps_positions else 1]:
                found = self._field(source, page[None], kind)[:, chosen]
                self._field(target, target_page[None], kind)[:] = found

    def positions(self, bucket: int, page: Table, lanes: Sequence[int]) -> list[Positions]:
        """Of each lane's tokens in a page [page_stride] where they are kept, [P]; else 0."""
        if not (self._scored[bucket] and self.plan.keeps_positions):
            return [0] * len(lanes)
        found = self._field(bucket, page[None], POSITION)[0]
        return [found[self._lanes[bucket].index(lane)] for lane in sorted(lanes)]


def _rows(plan: CompressionPlan, stage: int, lanes: Sequence[int]) -> slice | list[int]:
    """Where a bucket's ``lanes`` are among those of its stage's mass; a slice, which copies nothing, if all are."""
    layers = plan.layers_of(stage)
    kept = [i for i, lane in enumerate(plan.lanes) if lane.layer in layers and not lane.removed]
    return slice(None) if kept == list(lanes) else [kept.index(lane) for lane in lanes]
