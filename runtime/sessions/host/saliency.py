"""The most salient tokens of each lane (kvlathe/plan/token_score.py), from the scores in
their pages, or from their keys and values, in numpy. torch_cuda/tokens/ computes the
same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvlathe.plan.codec import noise
from kvlathe.plan.formula import evaluate
from kvlathe.plan.moves import Selection, Target
from kvlathe.plan.token_score import ObservationWindow
from kvlathe.runtime.sessions.protocols import Scores

Floats = npt.NDArray[np.float32]
UNSEEN = np.finfo(np.float32).max
"""The saliency of a token that no row has observed: before all that are known."""


def saliency(
    observation: ObservationWindow,
    scores: Scores,
    seen: npt.NDArray[np.int64] | None = None,
    keys: Sequence[int] = (),
) -> Floats:
    """[lanes, n] from the scores of n tokens. ``seen``: observed rows at or after each
    position, for a normalized observation window; ``keys``: of each lane's noise, for a
    noisy one."""
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
        logs = np.log(np.maximum(salient, np.finfo(np.float32).tiny).astype(np.float64))
        salient = logs + observation.noise * gumbel(keys, scores.position)
    return salient.astype(np.float32)


def by_formula(
    text: str, lanes: Iterable[Mapping[str, npt.NDArray[np.float64]]]
) -> npt.NDArray[np.float64]:
    """[lanes, n] by a formula of what each lane has cached, of n tokens. What is no number
    ranks last; nothing ranks before the newest tokens."""
    with np.errstate(all="ignore"):
        salient = np.stack([evaluate(text, inputs) for inputs in lanes])
    return np.nan_to_num(salient, nan=-np.inf, neginf=-np.inf)


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
    padded = np.pad(x, ((0, 0), (half, half)), constant_values=-np.inf)
    return np.lib.stride_tricks.sliding_window_view(padded, width, axis=1).max(-1)


def ranked(salient: npt.NDArray[np.floating], newest: int) -> npt.NDArray[np.int64]:
    """Places [lanes, n], the most salient first (of equals the older); the ``newest``
    places before all others."""
    first = salient.copy()
    first[:, first.shape[1] - newest :] = np.inf
    return np.argsort(-first, axis=1, kind="stable")


def selected(
    selection: Selection, order: npt.NDArray[np.int64]
) -> list[npt.NDArray[np.int64]]:
    """For each part of a selection the places [lanes, n] that it gets, ascending:
    tokens stay in the order of age."""
    return [
        np.sort(order[:, places_in_order(target)], axis=1)
        for target in selection.targets
    ]


def places_in_order(target: Target) -> npt.NDArray[np.int64]:
    """All ranks in the spans of a target."""
    return np.concatenate([np.arange(*span) for span in target.spans])
