"""The form that every lane takes: the least sum of measured losses under one budget of
bytes.

A lane's loss is that of its K's form, of its V's and of its window; its bytes are those
of its forms' pages, as many as its window holds, and of its hot page. A plan may use few number formats and
windows, since each pair is a bucket and costs time in every step. Which ones is branch
and bound; which lane takes which is a knapsack (export/bases/allocate.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvlathe.export.bases import allocate
from kvlathe.export.methods.forms import (
    FORMATS,
    OF_KEYS,
    OF_VALUES,
    PAIRS,
    Array,
    Grid,
    Places,
    SideFormat,
)

MOST_FORMATS = 2
"""That a side may use in one plan."""
MOST_WINDOWS = 4
"""Beside lanes that keep all tokens: with two, plans of 8,192 tokens had to do without the
longest, and with three they lose a twentieth more (docs/history/auto.md)."""
PRICES = 128
"""Prices of a byte that are tried for a bound."""
UNITS = 20_000
"""That a budget is counted in: the knapsack rounds bytes up to one."""
CLOSE = 1.005
"""A choice of formats that may lose this much less than the best is not searched."""


@dataclass(frozen=True, eq=False)
class Assignment:
    """For every lane the options of its K and V and its window, places in ``Grid``'s
    options and lives: [lanes] each."""

    k: Places
    v: Places
    window: Places


@dataclass(frozen=True)
class Allowed:
    """The forms that one plan uses: pairs of K's and V's format, places in FORMATS, and token
    lives, places in ``Grid.lives``."""

    pairs: tuple[tuple[int, int], ...]
    lives: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Priced:
    """The grid with its prices: ``loss`` [2, 2 lanes, options], K lanes then V lanes, all
    pages coded or the first as they are; ``window_loss`` [lanes, lives], 0 where all
    tokens are kept. ``paired``: a lane takes PAIRS.
    """

    grid: Grid
    loss: Array
    window_loss: Array
    paired: bool = False

    @property
    def lanes(self) -> int:
        return len(self.window_loss)

    def lost(self, choice: Assignment) -> float:
        """The sum of its losses."""
        lanes = np.arange(self.lanes)
        whole = self.grid.whole_first[choice.window]
        of_keys = self.loss[whole, lanes, choice.k]
        of_values = self.loss[whole, self.lanes + lanes, choice.v]
        of_windows = self.window_loss[lanes, choice.window]
        return float((of_keys + of_values + of_windows).sum())

    def bytes(self, choice: Assignment) -> int:
        """Bytes of the grid's sequence."""
        sizes = self.grid.bytes
        of_lanes = sizes[choice.k, choice.window] + sizes[choice.v, choice.window]
        return int(of_lanes.sum())

    @property
    def least(self) -> int:
        """Bytes of the smallest choice."""
        smallest = min(
            self._smallest(k) + self._smallest(v) for k, v in self._format_pairs
        )
        return self.lanes * smallest

    @property
    def most(self) -> int:
        """Bytes of the largest choice."""
        largest = int(self.grid.bytes.max())
        return 2 * self.lanes * largest

    def chosen(self, budget: int) -> Assignment:
        """The best choice of at most ``budget`` bytes, MOST_FORMATS formats a side and
        MOST_WINDOWS windows.

        Raises KvlatheError where the smallest costs more.
        """
        allocate.require(budget, self.least)
        best: Assignment | None = None
        lost = np.inf
        for bound, allowed in self._bounds(budget):
            if bound * CLOSE >= lost:
                break
            found = self._within(allowed, budget)
            if found is not None and self.lost(found) < lost:
                best, lost = found, self.lost(found)
        assert best is not None
        return best

    # -- one choice of formats and windows ---------------------------------------------
    def _within(self, allowed: Allowed, budget: int) -> Assignment | None:
        """The knapsack over what is allowed; None where nothing fits."""
        fronts = [self._front(lane, allowed) for lane in range(self.lanes)]
        width = max(map(len, fronts))
        padded = np.stack([_padded(front, width) for front in fronts])
        loss = padded[..., 0]
        cost = padded[..., 1].astype(np.int64)
        if cost.min(-1).sum() > budget:
            return None
        picks = allocate.cheapest(loss, cost, budget, max(UNITS, 100 * self.lanes))
        _, _, k, v, window = padded[np.arange(self.lanes), picks].astype(np.int64).T
        return Assignment(k, v, window)

    def _front(self, lane: int, allowed: Allowed) -> Array:
        """The lane's ways that no other beats in both loss and bytes, fewest bytes
        first: rows of loss, bytes, K's option, V's option, life."""
        ways = []
        row = self.lanes + lane  # of its V
        for (k, v), life in itertools.product(allowed.pairs, allowed.lives):
            loss = self.loss[self.grid.whole_first[life]]
            both = itertools.product(
                self._side_front(loss[lane], k), self._side_front(loss[row], v)
            )
            of_k, of_v = np.array(list(both)).T  # options, [ways] each
            lost = loss[lane, of_k] + loss[row, of_v] + self.window_loss[lane, life]
            sizes = self.grid.bytes[of_k, life] + self.grid.bytes[of_v, life]
            columns = [lost, sizes, of_k, of_v, np.full(len(lost), life)]
            ways.append(np.stack(columns, 1))  # [ways, 5]
        return _pareto(np.concatenate(ways))

    def _side_front(self, loss: Array, form: int) -> Places:
        """Options of one format that are on the front of one side of a lane, by their
        ``loss`` [options]."""
        options = self._options_in(form)
        sizes = self.grid.sizes[options].astype(float)
        return options[_pareto_places(np.stack([loss[options], sizes], 1))]

    # -- which formats and windows -----------------------------------------------------
    @cached_property
    def _format_pairs(self) -> list[tuple[int, int]]:
        """That a lane may take, K's and V's."""
        if self.paired:
            return [(FORMATS.index(k), FORMATS.index(v)) for k, v in PAIRS]
        return list(itertools.product(_places(OF_KEYS), _places(OF_VALUES)))

    def _life_sets(self) -> list[tuple[int, ...]]:
        """All tokens, the first ones coded or not, and as many windows as a plan may
        have."""
        first = len(self.grid.lives) - len(self.grid.windows)
        places = range(first, len(self.grid.lives))
        windows = itertools.combinations(places, min(MOST_WINDOWS, len(places)))
        return [(whole, *few) for few in windows for whole in range(first)]

    def _pair_sets(self) -> list[tuple[tuple[int, int], ...]]:
        if self.paired:
            return list(itertools.combinations(self._format_pairs, MOST_FORMATS))
        both = itertools.product(
            itertools.combinations(_places(OF_KEYS), MOST_FORMATS),
            itertools.combinations(_places(OF_VALUES), MOST_FORMATS),
        )
        return [tuple(itertools.product(keys, values)) for keys, values in both]

    def _bounds(self, budget: int) -> list[tuple[float, Allowed]]:
        """Every choice of formats and windows with what it loses at the least, least
        first.

        At any price of a byte the sum of least (loss + price x bytes) less that of the
        budget is a bound (Lagrange).
        """
        bounds = self._least_paid - self._byte_prices[:, None] * budget
        lower = bounds.max(0)
        order = np.argsort(lower, kind="stable")
        return [(float(lower[i]), self._every_allowed[i]) for i in order]

    @cached_property
    def _every_allowed(self) -> list[Allowed]:
        every = itertools.product(self._pair_sets(), self._life_sets())
        return [Allowed(pairs, lives) for pairs, lives in every]

    @cached_property
    def _byte_prices(self) -> Array:
        scale = max(self.loss.max(), self.window_loss.max()) / self.grid.bytes.min()
        return scale * np.geomspace(1e-12, 1, PRICES)

    @cached_property
    def _least_paid(self) -> Array:
        """[prices, choices]: sums of least (loss + price x bytes) at every price of a
        byte. Budgets share them."""
        pair_at = {pair: i for i, pair in enumerate(self._format_pairs)}
        rows: list[list[int]] = []
        for pairs in self._pair_sets():
            rows.append([pair_at[pair] for pair in pairs])
        members = np.array(rows).T  # [pairs of a set, sets]
        life_sets = self._life_sets()
        sums = np.empty((PRICES, len(rows), len(life_sets)))
        for at_price, price in zip(sums, self._byte_prices, strict=True):
            by_life = np.moveaxis(self._paid(price), -1, 0)  # [lives, pairs, lanes]
            by_set = by_life[:, members].min(1)  # [lives, sets, lanes]
            for i, lives in enumerate(life_sets):
                at_price[:, i] = by_set[list(lives)].min(0).sum(-1)
        return sums.reshape(PRICES, -1)

    def _paid(self, price: float) -> Array:
        """[pairs, lanes, lives]: least loss + price x bytes of each pair of formats
        in each life."""
        losses = self.loss[self.grid.whole_first]  # [lives, rows, options]
        priced = np.moveaxis(losses, 0, -1) + price * self.grid.bytes
        keys = []
        values = []
        for form in range(len(FORMATS)):
            least = priced[:, self._options_in(form)].min(1)
            keys.append(least[: self.lanes])
            values.append(least[self.lanes :])
        paid = []
        for k, v in self._format_pairs:
            both = keys[k] + values[v]
            paid.append(both + self.window_loss)
        return np.stack(paid)

    @cached_property
    def _format_of(self) -> Places:
        """[options]: the place in FORMATS of every option's format."""
        formats = [form for _, form in self.grid.options]
        return np.array([FORMATS.index(form) for form in formats])

    def _options_in(self, form: int) -> Places:
        """The options of one format, a place in FORMATS."""
        return np.flatnonzero(self._format_of == form)

    def _smallest(self, form: int) -> int:
        return int(self.grid.bytes[self._options_in(form)].min())


def _places(formats: Sequence[SideFormat]) -> list[int]:
    return [FORMATS.index(form) for form in formats]


def _pareto_places(table: Array) -> npt.NDArray[np.int64]:
    """Rows of (loss, bytes, ...) that lose less than all that are as small, fewest
    bytes first."""
    losses, sizes = table[:, 0], table[:, 1]
    order = np.lexsort((losses, sizes))
    loss = losses[order]
    return order[loss < np.insert(np.minimum.accumulate(loss)[:-1], 0, np.inf)]


def _pareto(table: Array) -> Array:
    return table[_pareto_places(table)]


def _padded(front: Array, width: int) -> Array:
    """``width`` rows; what is missing repeats the smallest, which is never worth it."""
    return np.concatenate([front, np.repeat(front[:1], width - len(front), 0)])
