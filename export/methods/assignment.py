"""The form that every lane takes: the least sum of measured losses under one budget of
bytes.

A lane's loss is that of its K's form, of its V's and of its window; its bytes are those
of its forms' pages, as many as its window holds, and of its hot page. A plan may use few
number formats and windows, since each pair is a bucket and costs time in every step.
Which ones is a descent for each choice of windows; which lane takes which is a knapsack
(export/bases/allocate.py).
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
    AGED,
    FORMATS,
    FORMS,
    OF_KEYS,
    OF_VALUES,
    PAIRS,
    Array,
    Grid,
    Places,
    SideFormat,
)

MOST_FORMATS = 2
"""That a side may use in one plan where older tokens are as newer ones; for the others it
has one pair."""
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


Pairs = tuple[tuple[int, int], ...]
"""K's and V's form, places in FORMS."""


@dataclass(frozen=True)
class Allowed:
    """The forms that one plan uses where older tokens are as newer ones, and where they are
    ``aged``; and token lives, places in ``Grid.lives``."""

    plain: Pairs
    aged: Pairs
    lives: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Priced:
    """The grid with its prices: ``loss`` [lives, 2 lanes, options], K lanes then V lanes,
    of what each life holds; ``window_loss`` [lanes, lives], 0 where all tokens are kept.
    ``paired``: a lane takes PAIRS.
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
        of_keys = self.loss[choice.window, lanes, choice.k]
        of_values = self.loss[choice.window, self.lanes + lanes, choice.v]
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
        for bound, allowed in self._candidates(budget):
            if bound * CLOSE >= lost:
                break
            found = self._within(allowed, budget, lost / CLOSE)
            if found is not None and self.lost(found) < lost:
                best, lost = found, self.lost(found)
        assert best is not None
        return best

    # -- one choice of formats and windows ---------------------------------------------
    def _within(
        self, allowed: Allowed, budget: int, most: float = np.inf
    ) -> Assignment | None:
        """The knapsack over what is allowed; None where nothing fits, or nothing that
        loses less than ``most``."""
        fronts = [self._front(lane, allowed) for lane in range(self.lanes)]
        if np.isfinite(most):
            fronts = self._below(fronts, budget, most)
            if not all(map(len, fronts)):
                return None
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
        for life in allowed.lives:
            loss, size = self.loss[life], self.grid.bytes[:, life]
            for k, v in allowed.aged if self._is_aged[life] else allowed.plain:
                fronts = self._side_front(lane, life, k), self._side_front(row, life, v)
                of_k, of_v = map(np.ravel, np.meshgrid(*fronts))  # [ways] each
                lost = loss[lane, of_k] + loss[row, of_v] + self.window_loss[lane, life]
                columns = lost, size[of_k] + size[of_v], of_k, of_v, life + 0 * of_k
                ways.append(np.stack(columns, 1))
        return _pareto(np.concatenate(ways))  # from [ways, 5]

    def _below(self, fronts: Sequence[Array], budget: int, most: float) -> list[Array]:
        """Of each lane's ways those that may be in a choice which loses less than
        ``most``: with another, all lanes together lose more (``_candidates``)."""
        bounds, paid = self._bounds(fronts, budget)
        tight = bounds.argmax()
        more = paid[tight] - paid[tight].min(-1, keepdims=True)
        may = bounds[tight] + more < most
        return [
            front[own[: len(front)]] for front, own in zip(fronts, may, strict=True)
        ]

    def _bounds(self, fronts: Sequence[Array], budget: int) -> tuple[Array, Array]:
        """Bounds of a choice from the ways of each lane, [prices], and what each way
        costs, [prices, lanes, ways]."""
        width = max(map(len, fronts))
        padded = np.stack([_padded(front, width) for front in fronts])
        paid = padded[..., 0] + self._byte_prices[:, None, None] * padded[..., 1]
        return paid.min(-1).sum(-1) - self._byte_prices * budget, paid

    def _side_front(self, row: int, life: int, form: int) -> Places:
        """Options of one form that are on the front of one side of a lane in a life, by
        loss and bytes. Choices share them."""
        found = self._fronts.get((row, life, form))
        if found is None:
            options = self._options_in(form)
            table = self.loss[life, row, options], 1.0 * self.grid.bytes[options, life]
            places = _pareto_places(np.stack(table, 1))
            found = self._fronts[row, life, form] = options[places]
        return found

    @cached_property
    def _fronts(self) -> dict[tuple[int, int, int], Places]:
        return {}

    # -- which formats and windows -----------------------------------------------------
    @cached_property
    def _format_pairs(self) -> list[tuple[int, int]]:
        """That a lane may take where older tokens are as newer ones, K's and V's."""
        if self.paired:
            return [(FORMATS.index(k), FORMATS.index(v)) for k, v in PAIRS]
        return list(itertools.product(_places(OF_KEYS), _places(OF_VALUES)))

    @cached_property
    def _is_aged(self) -> list[bool]:
        """The lives that have older tokens apart, by their places."""
        return [life.newest_apart > 0 for life in self.grid.lives]

    def _life_sets(self) -> list[tuple[int, ...]]:
        """All tokens, the first ones coded or not, and as many windows as a plan may
        have; and the same where the newest tokens of one age are apart."""
        whole: list[int] = []
        windows: list[int] = []
        ages: dict[int, dict[int, int]] = {}
        for place, life in enumerate(self.grid.lives):
            if life.newest_apart:
                ages.setdefault(life.newest_apart, {})[life.reaches.recent] = place
            else:
                (windows if life.drops else whole).append(place)
        sets: list[tuple[int, ...]] = []
        few = itertools.combinations(windows, min(MOST_WINDOWS, len(windows)))
        for chosen, own, aged in itertools.product(few, whole, ages.values() or [{}]):
            plain = own, *chosen
            reaches = [self.grid.lives[place].reaches.recent for place in plain]
            sets.append((*plain, *(aged[x] for x in reaches if x in aged)))
        return sets

    @cached_property
    def _sets(self) -> list[Pairs]:
        """Pairs of forms of a plan where older tokens are as newer ones, K's and V's."""
        if self.paired:
            return list(itertools.combinations(self._format_pairs, MOST_FORMATS))
        keys, values = (
            itertools.combinations(_places(side), MOST_FORMATS)
            for side in (OF_KEYS, OF_VALUES)
        )
        both = itertools.product(keys, values)
        return [tuple(itertools.product(*of_sides)) for of_sides in both]

    @cached_property
    def _aged_pairs(self) -> Pairs:
        """The same where they have fewer bits; a plan has one."""
        return tuple(itertools.product(_aged(OF_KEYS), _aged(OF_VALUES)))

    def _candidates(self, budget: int) -> list[tuple[float, Allowed]]:
        """For each choice of windows the formats that cost least, with what it loses at
        the least; least first.

        At any price of a byte the sum of least (loss + price x bytes) less that of the
        budget is a bound (Lagrange). Formats are those of least bound at one price: that
        of the best choice so, where that of one without limits was the price.
        """
        bounds = self._unlimited - self._byte_prices * budget
        _, best = self._descents(budget, self._byte_prices[bounds.argmax()])[0]
        fronts = [self._front(lane, best) for lane in range(self.lanes)]
        bounds, _ = self._bounds(fronts, budget)
        return self._descents(budget, self._byte_prices[bounds.argmax()])

    def _descents(self, budget: int, price: float) -> list[tuple[float, Allowed]]:
        """``_candidates`` at one price of a byte."""
        tables = self._paid(price)
        found: list[tuple[float, Allowed]] = []
        for lives in self._life_sets():
            least = [np.full((1, self.lanes), np.inf)] * 2
            for life in lives:
                kind = self._is_aged[life]
                least[kind] = np.minimum(least[kind], tables[life])
            paid, formats, pair = _descended(*least)
            pairs = self._aged_pairs[pair : pair + 1]
            bound = paid - price * budget
            found.append((bound, Allowed(self._sets[formats], pairs, lives)))
        return sorted(found, key=lambda one: one[0])

    @cached_property
    def _byte_prices(self) -> Array:
        scale = max(self.loss.max(), self.window_loss.max()) / self.grid.bytes.min()
        return scale * np.geomspace(1e-12, 1, PRICES)

    @cached_property
    def _unlimited(self) -> Array:
        """[prices]: the sum of least (loss + price x bytes) where every lane may take any
        form. Budgets share it."""
        sums = np.empty(PRICES)
        for place, price in enumerate(self._byte_prices):
            paid = (self.loss + price * self.grid.bytes.T[:, None]).min(-1)
            both = paid[:, : self.lanes] + paid[:, self.lanes :] + self.window_loss.T
            sums[place] = both.min(0).sum()  # from [lives, lanes]
        return sums

    def _paid(self, price: float) -> list[Array]:
        """[choices, lanes] of each life: the least loss + price x bytes of what each of
        ``_sets`` allows there, or each of ``_aged_pairs``."""
        paid: list[Array] = []
        for life, is_aged in enumerate(self._is_aged):
            priced = self.loss[life] + price * self.grid.bytes[:, life]
            least = [priced[:, self._options_in(x)].min(1) for x in range(len(FORMS))]
            pairs = self._aged_pairs if is_aged else self._format_pairs
            keys, values = np.array(pairs).T
            rows = np.stack(least)  # [forms, 2 lanes]
            both = rows[keys, : self.lanes] + rows[values, self.lanes :]
            if not is_aged:
                both = both[self._members].min(1)
            paid.append(both + self.window_loss[:, life])
        return paid

    @cached_property
    def _members(self) -> Places:
        """Places in ``_format_pairs`` of each of ``_sets``, [sets, pairs of a set]."""
        at = {pair: i for i, pair in enumerate(self._format_pairs)}
        rows: list[list[int]] = []
        for pairs in self._sets:
            rows.append([at[pair] for pair in pairs])
        return np.array(rows)

    @cached_property
    def _options_of(self) -> list[Places]:
        """The options of every one of FORMS."""
        forms = np.array([form for _, form in self.grid.options])
        return [np.flatnonzero(forms == form) for form in range(len(FORMS))]

    def _options_in(self, form: int) -> Places:
        return self._options_of[form]

    def _smallest(self, form: int) -> int:
        return int(self.grid.bytes[self._options_in(form)].min())


def _places(formats: Sequence[SideFormat]) -> list[int]:
    return [FORMATS.index(form) for form in formats]


def _aged(formats: Sequence[SideFormat]) -> list[int]:
    """Those of FORMS that newest and older tokens have."""
    own = set(_places(formats))
    return [FORMS.index(form) for form in AGED if own.issuperset(form)]


def _descended(plain: Array, aged: Array) -> tuple[float, int, int]:
    """The least sum over lanes of the lesser of one row of ``plain`` and one of ``aged``
    [choices, lanes], and the two rows: from the best of ``plain`` on one of the two is
    chosen anew, in turn, while that helps."""
    one, least = int(plain.sum(-1).argmin()), np.inf
    while True:
        sums = np.minimum(plain[one], aged).sum(-1)
        other = int(sums.argmin())
        if not sums[other] < least:
            return float(least), one, other
        least = sums[other]
        one = int(np.minimum(plain, aged[other]).sum(-1).argmin())


def _pareto_places(table: Array) -> npt.NDArray[np.int64]:
    """Rows of (loss, bytes, ...) that lose less than all that are as small, fewest
    bytes first."""
    losses, sizes = table[:, 0], table[:, 1]
    order = np.lexsort((losses, sizes))
    loss = losses[order]
    best = np.full(len(loss), np.inf)  # of those that are as small
    np.minimum.accumulate(loss[:-1], out=best[1:])
    return order[loss < best]


def _pareto(table: Array) -> Array:
    return table[_pareto_places(table)]


def _padded(front: Array, width: int) -> Array:
    """``width`` rows; what is missing repeats the smallest, which is never worth it."""
    return np.concatenate([front, np.repeat(front[:1], width - len(front), 0)])
