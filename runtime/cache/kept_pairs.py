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
    orders: list[Places] = []
    worths: list[Floats] = []
    lanes: list[int] = []
    middle = page // 2
    for of_lanes in scores:
        order = np.argsort(-of_lanes, axis=1, kind="stable")
        ranked = np.take_along_axis(of_lanes, order, 1)
        middles = ranked[:, middle::page]
        worth = middles.mean(0)
        orders.append(order)
        worths.append(worth)
        lanes.append(len(of_lanes))
    kept: list[Places] = []
    counts = _pages(worths, lanes, keep)
    for order, pages in zip(orders, counts, strict=True):
        tokens = pages * page
        best = order[:, :tokens]
        ascending = np.sort(best, axis=1)
        kept.append(ascending)
    return kept


def _pages(
    worths: Sequence[Floats], lanes: Sequence[int], keep: float
) -> npt.NDArray[np.int64]:
    """How many pages each bucket keeps: those of most worth, one at least. A page of a
    bucket costs its number of ``lanes``; the last one is taken where that is nearer to
    the share ``keep``."""
    buckets = len(worths)
    sizes = [len(worth) for worth in worths]
    bucket_of = np.repeat(np.arange(buckets), sizes)
    together = np.concatenate(worths)
    order = np.argsort(-together, kind="stable")
    ranked = bucket_of[order]
    costs = np.array(lanes)[ranked]
    ends = costs.cumsum()
    middles = ends - costs / 2
    taken = middles <= keep * ends[-1]
    taken[0] = True
    chosen = ranked[taken]
    return np.bincount(chosen, minlength=buckets)
