"""Ranking: which tokens of each lane are the most salient (plan.Probe), and where they go (settle.Choice)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvlathe.export.plan import CompressionPlan, Probe
from kvlathe.runtime.codec import noise, noise_key
from kvlathe.runtime.pool import Ranking
from kvlathe.runtime.probes import Probes
from kvlathe.runtime.session import Scores, Session
from kvlathe.runtime.settle import Choice

Floats = npt.NDArray[np.float32]
UNSEEN = np.finfo(np.float32).max
"""The saliency of a token that no row has observed: before all that are known."""


def carry_out(
    session: Session, plan: CompressionPlan, ranking: Ranking, probes: Probes, tokens: Sequence[int], stop: int
) -> None:
    """Rank the tokens of a sequence, of whose ``tokens`` the first ``stop`` are cached, and move them."""
    choice = ranking.choice
    scores = session.scores(choice.bucket, ranking.pages, choice.length)
    seen = probes.seen(tokens, stop) if plan.probe and plan.probe.normalized else None
    assert plan.probe
    salient = saliency(plan.probe, scores, seen, noise_keys(plan, choice.bucket))
    order = ranked(salient, choice.newest)
    for (bucket, _), pages, places in zip(choice.to, ranking.targets, chosen(choice, order), strict=True):
        session.move(choice.bucket, ranking.pages, bucket, pages, places)


def saliency(
    probe: Probe, scores: Scores, seen: npt.NDArray[np.int64] | None = None, keys: Sequence[int] = ()
) -> Floats:
    """[lanes, n] from the scores of n tokens. ``seen``: observed rows at or after each position, for a normalized
    probe; ``keys``: of each lane's noise, for a noisy one."""
    found = scores.mass.astype(np.float32, copy=True)
    if probe.normalized:
        assert seen is not None and scores.position is not None
        rows = seen[scores.position]
        found = np.where(rows > 0, found / np.maximum(rows, 1), UNSEEN).astype(np.float32)
    if probe.pooling > 1:
        found = pooled(found, probe.pooling)
    if probe.noise:
        assert scores.position is not None
        lots = np.concatenate([noise(key, at, len(at), 1).T for key, at in zip(keys, scores.position, strict=True)])
        gumbel = -np.log(-np.log(np.clip(lots, 2.0**-25, 1 - 2.0**-25)))
        found = np.log(np.maximum(found, np.finfo(np.float32).tiny)) + probe.noise * gumbel
    return found.astype(np.float32)


def pooled(x: Floats, width: int) -> Floats:
    """The largest of the ``width`` (odd) neighbours around each place; fewer at the ends. [lanes, n]"""
    half = width // 2
    padded = np.pad(x, ((0, 0), (half, half)), constant_values=-np.inf)
    return np.lib.stride_tricks.sliding_window_view(padded, width, axis=1).max(-1)


def ranked(salient: Floats, newest: int) -> npt.NDArray[np.int64]:
    """Places [lanes, n], the most salient first (of equals the older); the ``newest`` places before all others."""
    first = salient.copy()
    first[:, first.shape[1] - newest :] = np.inf
    return np.argsort(-first, axis=1, kind="stable")


def chosen(choice: Choice, order: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """For each part of a choice the places [lanes, n] that it gets, ascending: tokens stay in the order of age."""
    return [np.sort(np.concatenate([order[:, a:z] for a, z in spans], axis=1), axis=1) for _, spans in choice.to]


def noise_keys(plan: CompressionPlan, bucket: int) -> list[int]:
    """Of each lane of a bucket, in lane order."""
    lanes = (plan.lanes[i] for i in sorted(plan.buckets[bucket].lanes))
    return [noise_key(plan.seed, lane.layer, lane.head, 2) for lane in lanes]
