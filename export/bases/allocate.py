"""Allocation under one budget: ranks from spectra, or any forms from measured losses.

Ranks: K and V lanes are rows alike, [rows, d] in, [rows] multiples of 16 out, each at
least 16. A row may have fewer ``dims`` [rows] than the widest; it has zeros after them.
Bytes of a page are proportional to the ranks (16 ranks of 16 tokens fill
whole 128-byte lines), so budgets are sums of ranks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.heads import RANK_MULTIPLE

Array = npt.NDArray[np.floating]
Ranks = npt.NDArray[np.int64]

EXACT = 1e-12
"""Shares of the total that rounding cannot tell from nothing."""


def whole(d: int) -> int:
    """The rank that keeps all of ``d`` dims: d rounded up to a multiple of 16."""
    return -(-d // RANK_MULTIPLE) * RANK_MULTIPLE


def _whole_rows(dims: Ranks) -> Ranks:
    """``whole`` of each row."""
    return -(-dims // RANK_MULTIPLE) * RANK_MULTIPLE


def by_rate(spectrum: Array, dims: Ranks, rate: float) -> Ranks:
    """The papers' shared rate r (FDC Eq. 1, ZACK Eq. 6): the smallest count whose
    removed singular values sum to at most r of the total, rounded up to a multiple of
    16. At r = 0 everything is kept."""
    if rate <= 0:
        return _whole_rows(dims)
    total = np.maximum(spectrum.sum(-1, keepdims=True), 1e-300)
    tails = np.cumsum(spectrum[:, ::-1], -1)[:, ::-1]
    removed = tails / total  # [rows, d]: the share that goes with dims i..
    count = (removed > rate + EXACT).sum(-1)
    return np.maximum(-(-count // RANK_MULTIPLE), 1) * RANK_MULTIPLE


def rate_within(spectrum: Array, dims: Ranks, budget: int) -> float:
    """The smallest rate r whose ranks sum to at most ``budget`` (to 1e-6)."""
    if by_rate(spectrum, dims, 0.0).sum() <= budget:
        return 0.0
    low, high = 0.0, 1.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        if by_rate(spectrum, dims, middle).sum() <= budget:
            high = middle
        else:
            low = middle
    return high


def uniform(dims: Ranks, budget: int) -> Ranks:
    """The same rank for every row, or all that it has. Rows are K lanes then V lanes; a
    step that all V lanes cannot have goes to the K lanes.
    """
    most = _whole_rows(dims)

    def after(steps: int) -> Ranks:
        ranks = np.array([max((steps + 1) // 2, 1), max(steps // 2, 1)]) * RANK_MULTIPLE
        return np.minimum(np.repeat(ranks, len(dims) // 2), most)

    steps = 2
    while after(steps + 1).sum() <= budget and (after(steps) < most).any():
        steps += 1
    return after(steps)


def by_loss(loss: Array, dims: Ranks, budget: int) -> Ranks:
    """Greedy: blocks of 16 dims in order of what their removal would cost, until
    ``budget`` is spent.

    ``loss`` [rows, d] is each dim's own cost, all rows in one unit. Blocks of a row
    fall in cost, so greedy is optimal.
    """
    rows, d = loss.shape
    blocks = np.zeros((rows, whole(d)))
    blocks[:, :d] = loss
    cost = blocks.reshape(rows, -1, RANK_MULTIPLE).sum(-1)
    cost = np.minimum.accumulate(cost, -1)
    cost[:, 0] = np.inf
    own = _whole_rows(dims) // RANK_MULTIPLE
    lacked = np.arange(cost.shape[1]) >= own[:, None]
    dearest = np.argsort(-np.where(lacked, -np.inf, cost).ravel(), kind="stable")
    dearest = dearest[: own.sum()]
    row_of = dearest[: max(budget // RANK_MULTIPLE, rows)] // cost.shape[1]
    return np.bincount(row_of, minlength=rows) * RANK_MULTIPLE


MOST_CELLS = 1 << 27
"""Most cells of the table that ``cheapest`` fills, a byte or two each."""


def require(budget: int, least: int) -> None:
    """Raise KvlatheError where not even the smallest forms, ``least`` bytes a page, fit
    ``budget``."""
    if least > budget:
        raise KvlatheError(
            f"{budget:,} bytes a page cannot be reached",
            f"the smallest form of every head needs {least:,}",
            "ask for more",
        )


def cheapest(
    loss: Array, cost: Ranks, budget: int, most_units: int | None = None
) -> Ranks:
    """One option for every row, [rows], with the least sum of losses among those whose
    costs sum to at most ``budget``.

    ``loss``, ``cost`` [rows, options], costs positive. Exact, by dynamic programming
    over the budget (multiple-choice knapsack), unless that is more than MOST_CELLS
    steps: costs are then rounded up to a coarser unit. So they are where the budget
    would have more than ``most_units``. What cannot lower the sum is not spent. Raises
    KvlatheError if the cheapest options cost more than the budget.
    """
    require(budget, int(cost.min(-1).sum()))
    rows, options = loss.shape
    unit = int(np.gcd.reduce(cost, axis=None))
    most = min(most_units or MOST_CELLS, MOST_CELLS // rows)
    while budget // unit >= most:
        unit *= 2
    units = -(-cost // unit)
    room = max(budget // unit, int(units.min(-1).sum()))
    best = np.zeros(room + 1)  # the least loss of the rows so far, by units spent
    choices = np.zeros((rows, room + 1), np.min_scalar_type(options))
    for row in range(rows):
        reached = _one_more_row(best, loss[row], units[row])
        choices[row] = reached.argmin(0)
        best = reached.min(0)
    enough = best <= best[room] + EXACT * abs(best[room])
    return _traced_back(choices, units, int(np.flatnonzero(enough)[0]))


def _one_more_row(best: Array, losses: Array, sizes: Ranks) -> Array:
    """[options, room + 1]: the least loss of the rows so far and one more, by the
    option that it takes and by the units spent."""
    room = len(best) - 1
    reached = np.full((len(losses), room + 1), np.inf)
    for option, size in enumerate(sizes):
        if size <= room:
            reached[option, size:] = best[: room + 1 - size] + losses[option]
    return reached


def _traced_back(
    choices: npt.NDArray[np.integer], units: Ranks, spent: int
) -> npt.NDArray[np.int64]:
    """[rows]: the options that led to ``spent`` units, from ``choices`` [rows, units
    spent] of every row."""
    rows = len(choices)
    options = np.zeros(rows, np.int64)
    for row in reversed(range(rows)):
        options[row] = choices[row, spent]
        spent -= int(units[row, options[row]])
    return options
