"""Which KV pairs of a compacted prefix stay, from the pairs' scores: those of highest
score among all lanes (arXiv 2505.23416), in whole pages.

A bucket's lanes keep equally many tokens. So where every lane has a bucket of its own,
budgets differ from head to head, as the paper's do; where all lanes share one bucket,
they are the paper's uniform budgets.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Places = npt.NDArray[np.int64]


def kept_places(scores: Sequence[Floats], keep: float, page: int) -> list[Places]:
    """Of each bucket the places [lanes, m], ascending, that stay of its scores [lanes,
    n]: m whole pages of ``page`` tokens, of all buckets together the share ``keep``.

    A page of a lane's ranked pairs is worth the score in its middle. So a page stays
    where the score that divides kept pairs from others would keep most of it.
    """
    orders = [np.argsort(-of_lanes, axis=1, kind="stable") for of_lanes in scores]
    worths: list[Floats] = []
    for of_lanes, order in zip(scores, orders, strict=True):
        ranked = np.take_along_axis(of_lanes, order, 1)
        middles = ranked[:, page // 2 :: page]
        worths.append(middles.mean(0))
    lanes = [len(of_lanes) for of_lanes in scores]
    counts = _pages(worths, lanes, keep)
    return [
        np.sort(order[:, : count * page], axis=1)
        for order, count in zip(orders, counts, strict=True)
    ]


def _pages(
    worths: Sequence[Floats], lanes: Sequence[int], keep: float
) -> npt.NDArray[np.int64]:
    """How many pages each bucket keeps: those of most worth, one at least. A page of a
    bucket costs its number of ``lanes``; the last one is taken where that is nearer to
    the share ``keep``."""
    bucket_of = np.repeat(np.arange(len(worths)), [len(worth) for worth in worths])
    order = np.argsort(-np.concatenate(worths), kind="stable")
    costs = np.array(lanes)[bucket_of[order]]
    ends = costs.cumsum()
    taken = ends - costs / 2 <= keep * ends[-1]
    taken[0] = True
    return np.bincount(bucket_of[order][taken], minlength=len(worths))
