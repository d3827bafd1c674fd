"""auto (ours): the rank and the bits of every lane's K and of its V, chosen together under one budget of bytes.

The basis is the balanced one (rotation.py). What is kept of it is turned before it is coded: in axes where stored
vectors and their readers have equal variances (Cauchy and Schwarz: the trace of one times that of the other is least
there), spun so that no channel sets a group's range. Groups run along the rank, one for each token, or along a page's
tokens, one for each channel. Which form each side of each lane takes is a knapsack over measured losses
(export/sensitivity.py, export/allocate.py); docs/auto.md.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvlathe.export import allocate
from kvlathe.export.basis import Basis, LaneBasis
from kvlathe.export.layout import coded_bytes
from kvlathe.export.methods.lowrank import full_lanes
from kvlathe.export.methods.options import Options
from kvlathe.export.methods.spin import turn
from kvlathe.export.plan import RANK_MULTIPLE, Bucket, Lane, Tier
from kvlathe.export.rotation import Rotation, balanced, balanced_rotation
from kvlathe.export.stats import Stats

SUMMARY = "ranks and bits of each head's K and V, chosen together by measured sensitivity"
CALIBRATION: Literal["random", "text"] = "text"

Array = npt.NDArray[np.floating]
Choice = npt.NDArray[np.int64]

GROUP = 128
"""Channels in a group along the rank: heads up to this size have one a token. Along the tokens a page is one."""
SPAN = {"rank": {8: 1.0, 4: 0.95, 2: 0.65}, "token": {8: 1.0, 4: 1.0, 2: 0.8}}
"""Of a group's range, what codes cover. Along the rank: least squared error for 64 to 128 normal numbers; spun ones
nearly are that. A channel's numbers in a page have fewer outliers; theirs were measured on calibration text.
"""


@dataclass(frozen=True, slots=True)
class Format:
    """Of one side's codes."""

    bits: Literal[8, 4, 2]
    axis: Literal["rank", "token"]

    @property
    def span(self) -> float:
        return SPAN[self.axis][self.bits]


FORMATS = tuple(Format(bits, axis) for axis in ("rank", "token") for bits in (8, 4, 2))
PAIRS = tuple((Format(bits, "rank"), Format(bits, "token")) for bits in (8, 4, 2))
"""K's and V's format of a lane, where kernels read no others."""
MOST_FORMATS = 2
"""That a side may use in one plan: each pair of formats is a bucket, which costs time in every step."""
PRICES = 128
"""Of a byte, tried for a bound."""


def rotate(stats: Stats, options: Options) -> Rotation:
    """The balanced basis."""
    return balanced_rotation(stats)


@dataclass(frozen=True)
class Cut:
    """One side of one lane cut to a rank and turned: stored as (x - centre) into, read through ``back`` [d, rank]."""

    into: Array
    back: Array
    centre: Array


@dataclass(frozen=True, eq=False)
class Grid:
    """Every form that a side of a lane may take: option i is a rank and a format."""

    stats: Stats
    page_tokens: int
    seed: int

    @cached_property
    def options(self) -> list[tuple[int, Format]]:
        most = allocate.whole(self.stats.shape.head_dim)
        return list(itertools.product(range(RANK_MULTIPLE, most + 1, RANK_MULTIPLE), FORMATS))

    @cached_property
    def _rotation(self) -> Rotation:
        return balanced_rotation(self.stats)

    @cached_property
    def sizes(self) -> Choice:
        """Bytes of one side of a lane in a sealed page, [options]."""
        return np.array([coded_bytes(rank, self.page_tokens, x.bits, x.axis, GROUP) for rank, x in self.options])

    def cut(self, side: str, layer: int, head: int, rank: int) -> Cut:
        found, at, d = self._rotation, (layer, head), self.stats.shape.head_dim
        rng = np.random.default_rng((self.seed, layer, head, int(side == "v")))
        spin = turn(rank, rng)[: min(rank, d)]
        if side == "k":
            return Cut(found.b[at][:, :rank] @ spin, found.a[at][:, :rank] @ spin, found.centre_k[at])
        into, back = found.a_v[at][:, :rank], found.o_v[at][:rank].T
        seen = self.stats.whole.second("v", True)[at]
        axes = balanced(into.T @ seen @ into, back.T @ self.stats.wo_gram[at] @ back)
        return Cut(into @ axes.into @ spin, back @ axes.back @ spin, found.centre_v[at])


# -- choosing ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Priced:
    """The grid with its prices: ``loss`` [2 lanes, options], K lanes then V lanes. ``paired``: a lane takes PAIRS."""

    grid: Grid
    loss: Array
    paired: bool = False

    @cached_property
    def cost(self) -> Choice:
        """Bytes a page, like ``loss``."""
        return np.repeat(self.grid.sizes[None], len(self.loss), 0)

    def chosen(self, budget: int) -> Choice:
        """The best option of every row, [2 lanes], of at most ``budget`` bytes a page and MOST_FORMATS formats a side.

        Raises KvlatheError where the smallest cost more.
        """
        return self._of_pairs(budget) if self.paired else self._of_any(budget)

    @property
    def least(self) -> int:
        """Bytes a page of the smallest choice."""
        if not self.paired:
            return int(self.cost.min(-1).sum())
        smallest = [[self.grid.sizes[self._own == FORMATS.index(x)].min() for x in pair] for pair in PAIRS]
        return len(self.loss) // 2 * int(np.sum(smallest, -1).min())

    @cached_property
    def _own(self) -> Choice:
        """The format of every option, as a number."""
        return np.array([FORMATS.index(x) for _, x in self.grid.options])

    def _of_pairs(self, budget: int) -> Choice:
        """Every option of a lane is then one of K and one of V."""
        allocate.require(budget, self.least)
        best: tuple[float, Choice] | None = None
        lanes = len(self.loss) // 2
        for some in itertools.combinations(PAIRS, MOST_FORMATS):
            ways = [itertools.product(*(np.flatnonzero(self._own == FORMATS.index(x)) for x in pair)) for pair in some]
            k, v = np.array(list(itertools.chain(*ways))).T
            loss, cost = self.loss[:lanes, k] + self.loss[lanes:, v], self.cost[:lanes, k] + self.cost[lanes:, v]
            if cost.min(-1).sum() > budget:
                continue
            found = allocate.cheapest(loss, cost, budget)
            total = float(np.take_along_axis(loss, found[:, None], 1).sum())
            if best is None or total < best[0]:
                best = total, np.concatenate([k[found], v[found]])
        assert best is not None
        return best[1]

    def _of_any(self, budget: int) -> Choice:
        """Branch and bound over the formats: those whose bound is above what another choice has lost need no search."""
        best: tuple[float, Choice] | None = None
        for bound, allowed in self._bounds(budget):
            if best is not None and bound >= best[0]:
                break
            if np.where(allowed, self.cost, budget + 1).min(-1).sum() > budget:
                continue
            found = allocate.cheapest(np.where(allowed, self.loss, np.inf), self.cost, budget)
            total = float(np.take_along_axis(self.loss, found[:, None], 1).sum())
            if best is None or total < best[0]:
                best = total, found
        return allocate.cheapest(self.loss, self.cost, budget) if best is None else best[1]

    def _bounds(self, budget: int) -> list[tuple[float, npt.NDArray[np.bool_]]]:
        """For every choice of formats, least first, what it loses at the least, and the options [2 lanes, options] that
        it allows. At any price of a byte the sum of least (loss + price x bytes) less that of the budget is a bound.
        """
        own = self._own
        sets = list(itertools.combinations(range(len(FORMATS)), MOST_FORMATS))
        prices = np.geomspace(1e-12, 1, PRICES) * self.loss.max() / self.cost.min()
        paid = np.empty((2, len(sets), PRICES))
        for i, price in enumerate(prices):
            each = self.loss + price * self.cost
            least = np.stack([each[:, own == n].min(-1) for n in range(len(FORMATS))])  # [formats, rows]
            for j, some in enumerate(sets):
                paid[:, j, i] = least[list(some)].min(0).reshape(2, -1).sum(-1)
        found = []
        for (i, keys), (j, values) in itertools.product(enumerate(sets), repeat=2):
            allowed = np.repeat([np.isin(own, keys), np.isin(own, values)], len(self.loss) // 2, 0)
            found.append((float((paid[0, i] + paid[1, j] - prices * budget).max()), allowed))
        return sorted(found, key=lambda one: one[0])


# -- a choice as a plan ------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Chosen:
    """What a plan is made of. ``tiers`` are cold; every lane is in the bucket of one of them."""

    lanes: tuple[Lane, ...]
    basis: Basis
    tiers: tuple[Tier, ...]
    buckets: tuple[Bucket, ...]


def made(grid: Grid, choice: Choice, hot: Tier) -> Chosen:
    """Lanes, matrices and buckets of one option for every row, K lanes then V lanes."""
    forms = [grid.options[i] for i in choice]
    shape, keys, values = grid.stats.shape, forms[: len(forms) // 2], forms[len(forms) // 2 :]
    lanes, basis, members = [], Basis(), dict[Tier, list[int]]()
    for i, (lane, (rank_k, k), (rank_v, v)) in enumerate(
        zip(full_lanes(shape, grid.stats.rope), keys, values, strict=True)
    ):
        cut, basis[lane.layer, lane.head] = _cut(lane, rank_k, rank_v, grid)
        lanes.append(cut)
        of_k, of_v = (min(GROUP, grid.page_tokens) if x.axis == "token" else GROUP for x in (k, v))
        tier = Tier(k.bits, v.bits, k.axis, v.axis, of_k, of_v, span_k=k.span, span_v=v.span)
        members.setdefault(tier, []).append(i)
    cold = tuple(Bucket(1 + n, tuple(own), source=0) for n, own in enumerate(members.values()))
    return Chosen(tuple(lanes), basis, (hot, *members), (Bucket(0, tuple(range(len(lanes)))), *cold))


def _cut(lane: Lane, rank_k: int, rank_v: int, grid: Grid) -> tuple[Lane, LaneBasis]:
    k, v = (grid.cut(side, lane.layer, lane.head, rank) for side, rank in (("k", rank_k), ("v", rank_v)))
    folded = lane.rope == "none"
    width = rank_k if folded else lane.input_dim
    lane = dataclasses.replace(lane, input_dim=width, rank_k=rank_k, rank_v=rank_v, projected=not folded)
    return lane, LaneBasis(k.back, k.into, k.centre, v.into, v.back.T, v.centre)


def shuffled(choice: Choice, rng: np.random.Generator, lanes: int) -> Choice:
    """The same options dealt to other lanes, K among K and V among V: equal bytes, no adaptation."""
    return np.concatenate([rng.permutation(choice[:lanes]), rng.permutation(choice[lanes:])])
