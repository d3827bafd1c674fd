"""KV pairs of a compacted prefix that stay, chosen by their scores: those of highest
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
    """The places [lanes, m] of each bucket, ascending, that stay of its scores [lanes,
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
        orders.append(order)
        worths.append(np.take_along_axis(of_lanes, order, 1)[:, middle::page].mean(0))
        lanes.append(len(of_lanes))
    kept: list[Places] = []
    for order, pages in zip(orders, _pages(worths, lanes, keep), strict=True):
        kept.append(np.sort(order[:, : pages * page], axis=1))
    return kept


def _pages(
    worths: Sequence[Floats], lanes: Sequence[int], keep: float
) -> npt.NDArray[np.int64]:
    """The number of pages that each bucket keeps: those of most worth, one at least. A
    page of a bucket costs its number of ``lanes``; the last one is taken where that is
    nearer to the share ``keep``."""
    buckets = len(worths)
    bucket_of = np.repeat(np.arange(buckets), [len(worth) for worth in worths])
    ranked = bucket_of[np.argsort(-np.concatenate(worths), kind="stable")]
    costs = np.array(lanes)[ranked]
    ends = costs.cumsum()
    taken = ends - costs / 2 <= keep * ends[-1]
    taken[0] = True
    return np.bincount(ranked[taken], minlength=buckets)
