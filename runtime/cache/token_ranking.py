"""TokenRanking: which tokens of each lane are the most salient
(observation.ObservationWindow), and where they go (moves.Selection)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvlathe.plan.codec import noise, noise_key
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.moves import Selection, Target
from kvlathe.plan.observation import ObservationWindow
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.cache.observed_rows import ObservedRows
from kvlathe.runtime.cache.page_table import Ranking, Reservation
from kvlathe.runtime.sessions.protocols import (
    DeviceRanker,
    Scores,
    Session,
    TokenRanker,
    ranker_of,
)

Floats = npt.NDArray[np.float32]
UNSEEN = np.finfo(np.float32).max
"""The saliency of a token that no row has observed: before all that are known."""


class TokenRanking:
    """What an engine has beside its session where its plan ranks tokens: it ranks them,
    has the session move them, and resets their scores."""

    def __init__(self, ranker: TokenRanker, layout: CacheLayout) -> None:
        observation = layout.plan.observation
        assert observation is not None
        self.ranker = ranker
        self.layout = layout
        self.observation: ObservationWindow = observation
        self._keys: dict[int, list[int]] = {}

    @classmethod
    def of(cls, session: Session, layout: CacheLayout) -> TokenRanking | None:
        """None where the plan ranks no tokens. Raises KvlatheError where it does and
        the session cannot."""
        ranker = ranker_of(session, layout.plan)
        return None if ranker is None else cls(ranker, layout)

    def move(
        self, ranking: Ranking, rows: ObservedRows, tokens: Sequence[int], stop: int
    ) -> None:
        """Rank the tokens of a sequence, of whose ``tokens`` the first ``stop`` are
        cached, and move them."""
        selection, ranker = ranking.selection, self.ranker
        seen = rows.seen(tokens, stop) if self.observation.normalized else None
        keys = self._keys_of(selection.bucket)
        if isinstance(ranker, DeviceRanker):
            ranker.rank(
                selection,
                ranking.pages,
                ranking.targets,
                seen,
                keys,
            )
            return
        scores = ranker.scores(selection.bucket, ranking.pages, selection.length)
        salient = saliency(self.observation, scores, seen, keys)
        parts = selected(selection, ranked(salient, selection.newest))
        for target, pages, places in zip(
            selection.targets, ranking.targets, parts, strict=True
        ):
            ranker.move(selection.bucket, ranking.pages, target.bucket, pages, places)

    def _keys_of(self, bucket: int) -> list[int]:
        """Of the noise of a bucket's lanes; none where there is no noise."""
        if not self.observation.noise:
            return []
        if bucket not in self._keys:
            self._keys[bucket] = noise_keys(self.layout.plan, bucket)
        return self._keys[bucket]

    def reset_scores(self, done: Reservation, window_ended: bool) -> None:
        """After a committed step: where rows count only until tokens are ranked, the
        scores of those that were ranked are 0 again."""
        if self.observation.accumulated or not done.seals:
            return
        page = self.layout.plan.page_tokens
        for route in self.layout.plan.index.routes:
            hot = route.buckets[0]
            full = done.table.arrived[hot] % page == 0
            if done.tokens[hot] and (window_ended or full):
                for bucket in route.buckets:
                    self.ranker.forget(bucket, done.table.pages[bucket])

    def undo(self) -> None:
        """The step that has run is rolled back: the scores are what they were."""
        self.ranker.unobserve()


def saliency(
    observation: ObservationWindow,
    scores: Scores,
    seen: npt.NDArray[np.int64] | None = None,
    keys: Sequence[int] = (),
) -> Floats:
    """[lanes, n] from the scores of n tokens. ``seen``: observed rows at or after each
    position, for a normalized observation window; ``keys``: of each lane's noise, for a noisy
    one."""
    salient = scores.attention.astype(np.float32, copy=True)
    if observation.normalized:
        assert seen is not None and scores.position is not None
        rows = seen[scores.position]
        means = salient / np.maximum(rows, 1)
        salient = np.where(rows > 0, means, UNSEEN).astype(np.float32)
    if observation.pooling > 1:
        salient = pooled(salient, observation.pooling)
    if observation.noise:
        assert scores.position is not None
        positive = np.maximum(salient, np.finfo(np.float32).tiny)
        logs = np.log(positive.astype(np.float64))
        salient = logs + observation.noise * gumbel(keys, scores.position)
    return salient.astype(np.float32)


def gumbel(keys: Sequence[int], positions: npt.NDArray[np.int32]) -> Floats:
    """A Gumbel variate for each token [lanes, n], from its lane's key and its
    position."""
    by_lane = zip(keys, positions, strict=True)
    drawn = [noise(key, places, len(places), 1).T for key, places in by_lane]
    uniform = np.clip(np.concatenate(drawn), 2.0**-25, 1 - 2.0**-25)
    return -np.log(-np.log(uniform))


def pooled(x: Floats, width: int) -> Floats:
    """The largest of the ``width`` (odd) neighbours around each place; fewer at the
    ends. [lanes, n]"""
    half = width // 2
    margins = ((0, 0), (half, half))
    padded = np.pad(x, margins, constant_values=-np.inf)
    neighbours = np.lib.stride_tricks.sliding_window_view(padded, width, axis=1)
    return neighbours.max(-1)


def ranked(salient: Floats, newest: int) -> npt.NDArray[np.int64]:
    """Places [lanes, n], the most salient first (of equals the older); the ``newest``
    places before all others."""
    first = salient.copy()
    first[:, first.shape[1] - newest :] = np.inf
    return np.argsort(-first, axis=1, kind="stable")


def selected(
    selection: Selection, order: npt.NDArray[np.int64]
) -> list[npt.NDArray[np.int64]]:
    """For each part of a selection the places [lanes, n] that it gets, ascending: tokens
    stay in the order of age."""
    return [
        np.sort(order[:, places_in_order(target)], axis=1)
        for target in selection.targets
    ]


def places_in_order(target: Target) -> npt.NDArray[np.int64]:
    """All ranks in the spans of a target."""
    spans = [np.arange(*span) for span in target.spans]
    return np.concatenate(spans)


def noise_keys(plan: CompressionPlan, bucket: int) -> list[int]:
    """Of each lane of a bucket, in lane order."""
    lanes = [plan.lanes[index] for index in plan.index.buckets[bucket].lanes]
    return [noise_key(plan.seed, lane.layer, lane.head, 2) for lane in lanes]
