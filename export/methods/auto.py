"""auto (ours): the rank and the bits of every lane's K and of its V, chosen together
under one budget of bytes.

The basis is the balanced one (rotation.py). What is kept of it is turned before it is
coded: in axes where stored vectors and their readers have equal variances (Cauchy and
Schwarz: the trace of one times that of the other is least there), rotated so that no
channel sets a group's range. Groups run along the rank, one for each token, or along a
page's tokens, one for each channel. Which form each side of each lane takes is a
knapsack over measured losses (export/search/sensitivity.py, export/bases/allocate.py);
docs/auto.md.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvlathe.export.bases import allocate
from kvlathe.export.bases.basis import Basis, LaneBasis
from kvlathe.export.bases.rotation import Rotation, balanced, balanced_rotation
from kvlathe.export.calibration.stats import Stats
from kvlathe.export.methods.hadamard import hadamard
from kvlathe.export.methods.lowrank import full_lanes
from kvlathe.export.methods.options import Options
from kvlathe.plan.formats import Format, Tier
from kvlathe.plan.heads import RANK_MULTIPLE, Lane
from kvlathe.plan.plan import Bucket

SUMMARY = (
    "ranks and bits of each head's K and V, chosen together by measured sensitivity"
)
CALIBRATION: Literal["random", "text"] = "text"

Array = npt.NDArray[np.floating]
Choice = npt.NDArray[np.int64]

GROUP = 128
"""Channels in a group along the rank: heads up to this size have one a token. Along the
tokens a page is one."""
SPAN = {"rank": {8: 1.0, 4: 0.95, 2: 0.65}, "token": {8: 1.0, 4: 1.0, 2: 0.8}}
"""Of a group's range, what codes cover. Along the rank: least squared error for 64 to
128 normal numbers; rotated ones nearly are that. A channel's numbers in a page have fewer
outliers; theirs were measured on calibration text.
"""


@dataclass(frozen=True, slots=True)
class SideFormat:
    """Of one side's codes."""

    bits: Literal[8, 4, 2]
    axis: Literal["rank", "token"]

    @property
    def span(self) -> float:
        return SPAN[self.axis][self.bits]

    @property
    def stored(self) -> Format:
        """As a page holds it."""
        return Format(self.bits, self.axis, GROUP, self.span)


FORMATS = tuple(
    SideFormat(bits, axis) for axis in ("rank", "token") for bits in (8, 4, 2)
)
PAIRS = tuple(
    (SideFormat(bits, "rank"), SideFormat(bits, "token")) for bits in (8, 4, 2)
)
"""K's and V's format of a lane, where kernels read no others."""
MOST_FORMATS = 2
"""That a side may use in one plan: each pair of formats is a bucket, which costs time
in every step."""
PRICES = 128
"""Of a byte, tried for a bound."""


def rotate(stats: Stats, options: Options) -> Rotation:
    """The balanced basis."""
    return balanced_rotation(stats)


@dataclass(frozen=True)
class Cut:
    """One side of one lane cut to a rank and turned: stored as (x - centre) into, read
    through ``back`` [d, rank]."""

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
    def options(self) -> list[tuple[int, SideFormat]]:
        most = allocate.whole(self.stats.shape.head_dim)
        ranks = range(RANK_MULTIPLE, most + 1, RANK_MULTIPLE)
        return list(itertools.product(ranks, FORMATS))

    @cached_property
    def _rotation(self) -> Rotation:
        return balanced_rotation(self.stats)

    @cached_property
    def sizes(self) -> Choice:
        """Bytes of one side of a lane in a sealed page, [options]."""
        sizes = []
        for rank, form in self.options:
            sizes.append(form.stored.page_bytes(rank, self.page_tokens))
        return np.array(sizes)

    def cut(self, side: str, layer: int, head: int, rank: int) -> Cut:
        """``side`` "k" or "v" of a lane at a rank. V is also turned into the axes in
        which stored values and their readers have equal variances."""
        bases = self._rotation
        at = (layer, head)
        rng = np.random.default_rng((self.seed, layer, head, int(side == "v")))
        turn = hadamard(rank, rng)[: min(rank, self.stats.shape.head_dim)]
        if side == "k":
            into = bases.b[at][:, :rank]
            back = bases.a[at][:, :rank]
            return Cut(into @ turn, back @ turn, bases.centre_k[at])
        into = bases.a_v[at][:, :rank]
        back = bases.o_v[at][:rank].T
        values = self.stats.whole.second("v", True)[at]
        readers = self.stats.wo_gram[at]
        axes = balanced(into.T @ values @ into, back.T @ readers @ back)
        into = into @ axes.into @ turn
        back = back @ axes.back @ turn
        return Cut(into, back, bases.centre_v[at])


# -- choosing --------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Priced:
    """The grid with its prices: ``loss`` [2 lanes, options], K lanes then V lanes.
    ``paired``: a lane takes PAIRS."""

    grid: Grid
    loss: Array
    paired: bool = False

    @cached_property
    def cost(self) -> Choice:
        """Bytes a page, like ``loss``."""
        sizes = self.grid.sizes[None]
        return np.repeat(sizes, len(self.loss), 0)

    def chosen(self, budget: int) -> Choice:
        """The best option of every row, [2 lanes], of at most ``budget`` bytes a page
        and MOST_FORMATS formats a side.

        Raises KvlatheError where the smallest cost more.
        """
        return self._of_pairs(budget) if self.paired else self._of_any(budget)

    @property
    def least(self) -> int:
        """Bytes a page of the smallest choice."""
        if not self.paired:
            return int(self.cost.min(-1).sum())
        smallest = min(
            self._sizes_in(form_k).min() + self._sizes_in(form_v).min()
            for form_k, form_v in PAIRS
        )
        return self._lanes * int(smallest)

    @property
    def _lanes(self) -> int:
        return len(self.loss) // 2

    @cached_property
    def _format_of(self) -> Choice:
        """[options]: the place in FORMATS of every option's format."""
        formats = (form for _, form in self.grid.options)
        return np.array([FORMATS.index(form) for form in formats])

    def _options_in(self, form: SideFormat) -> Choice:
        """The options of one format."""
        wanted = FORMATS.index(form)
        return np.flatnonzero(self._format_of == wanted)

    def _sizes_in(self, form: SideFormat) -> Choice:
        """Bytes a page of the options of one format."""
        return self.grid.sizes[self._options_in(form)]

    def _of_pairs(self, budget: int) -> Choice:
        """Every option of a lane is then one of K and one of V."""
        allocate.require(budget, self.least)
        best: tuple[float, Choice] | None = None
        lanes = self._lanes
        for pairs in itertools.combinations(PAIRS, MOST_FORMATS):
            k, v = self._options_of_pairs(pairs)
            loss = self.loss[:lanes, k] + self.loss[lanes:, v]
            cost = self.cost[:lanes, k] + self.cost[lanes:, v]
            if cost.min(-1).sum() > budget:
                continue
            options = allocate.cheapest(loss, cost, budget)
            lost = total(loss, options)
            if best is None or lost < best[0]:
                best = lost, np.concatenate([k[options], v[options]])
        assert best is not None
        return best[1]

    def _options_of_pairs(
        self, pairs: Iterable[tuple[SideFormat, SideFormat]]
    ) -> tuple[Choice, Choice]:
        """Every option of K beside every option of V, in one of the ``pairs``."""
        options: list[tuple[int, int]] = []
        for form_k, form_v in pairs:
            of_k = self._options_in(form_k)
            of_v = self._options_in(form_v)
            options += itertools.product(of_k, of_v)
        k, v = np.array(options).T
        return k, v

    def _of_any(self, budget: int) -> Choice:
        """Branch and bound over the formats: those whose bound is above what another
        choice has lost need no search."""
        best: tuple[float, Choice] | None = None
        for bound, allowed in self._bounds(budget):
            if best is not None and bound >= best[0]:
                break
            cost = np.where(allowed, self.cost, budget + 1)
            if cost.min(-1).sum() > budget:
                continue
            loss = np.where(allowed, self.loss, np.inf)
            options = allocate.cheapest(loss, self.cost, budget)
            lost = total(self.loss, options)
            if best is None or lost < best[0]:
                best = lost, options
        if best is None:
            return allocate.cheapest(self.loss, self.cost, budget)
        return best[1]

    def _bounds(self, budget: int) -> list[tuple[float, npt.NDArray[np.bool_]]]:
        """For every choice of formats, least first, what it loses at the least, and the
        options [2 lanes, options] that it allows. At any price of a byte the sum of
        least (loss + price x bytes) less that of the budget is a bound (Lagrange).
        """
        sets = list(itertools.combinations(range(len(FORMATS)), MOST_FORMATS))
        prices = np.geomspace(1e-12, 1, PRICES) * self.loss.max() / self.cost.min()
        paid = self._paid(sets, prices)
        bounds = []
        for (i, keys), (j, values) in itertools.product(enumerate(sets), repeat=2):
            bound = (paid[0, i] + paid[1, j] - prices * budget).max()
            in_keys = np.isin(self._format_of, keys)
            in_values = np.isin(self._format_of, values)
            allowed = np.repeat([in_keys, in_values], self._lanes, 0)
            bounds.append((float(bound), allowed))
        return sorted(bounds, key=lambda pair: pair[0])

    def _paid(self, sets: Sequence[tuple[int, ...]], prices: Array) -> Array:
        """[2, sets, prices]: the sum of least (loss + price x bytes) over the lanes of
        K, and of V, whose formats are of one set."""
        paid = np.empty((2, len(sets), len(prices)))
        for i, price in enumerate(prices):
            priced = self.loss + price * self.cost
            least = np.empty((len(FORMATS), len(priced)))
            for form in range(len(FORMATS)):
                least[form] = priced[:, self._format_of == form].min(-1)
            for j, forms in enumerate(sets):
                by_side = least[list(forms)].min(0).reshape(2, -1)
                paid[:, j, i] = by_side.sum(-1)
        return paid


def total(loss: Array, options: Choice) -> float:
    """The sum of the losses [rows, options] of one option a row."""
    losses = np.take_along_axis(loss, options[:, None], 1)
    return float(losses.sum())


# -- a choice as a plan ----------------------------------------------------------------
@dataclass(frozen=True)
class Chosen:
    """What a plan is made of. ``tiers`` are cold; every lane is in the bucket of one of
    them."""

    lanes: tuple[Lane, ...]
    basis: Basis
    tiers: tuple[Tier, ...]
    buckets: tuple[Bucket, ...]


def made(grid: Grid, choice: Choice, hot: Tier) -> Chosen:
    """Lanes, matrices and buckets of one option for every row, K lanes then V lanes."""
    whole = full_lanes(grid.stats.shape, grid.stats.rope)
    of_keys = choice[: len(whole)]
    of_values = choice[len(whole) :]
    lanes: list[Lane] = []
    basis = Basis()
    members: dict[Tier, list[int]] = {}
    for lane, option_k, option_v in zip(whole, of_keys, of_values, strict=True):
        rank_k, k = grid.options[option_k]
        rank_v, v = grid.options[option_v]
        members.setdefault(_tier(k, v, grid.page_tokens), []).append(len(lanes))
        cut, basis[lane.layer, lane.head] = _cut(lane, rank_k, rank_v, grid)
        lanes.append(cut)
    fresh = Bucket(0, tuple(range(len(lanes))))
    cold = []
    for tier, of_tier in enumerate(members.values(), start=1):
        cold.append(Bucket(tier, tuple(of_tier), source=0))
    return Chosen(tuple(lanes), basis, (hot, *members), (fresh, *cold))


def _tier(k: SideFormat, v: SideFormat, page_tokens: int) -> Tier:
    return Tier(
        k.bits,
        v.bits,
        k.axis,
        v.axis,
        _group(k, page_tokens),
        _group(v, page_tokens),
        span_k=k.span,
        span_v=v.span,
    )


def _group(form: SideFormat, page_tokens: int) -> int:
    """Numbers of a quantization group. Groups of tokens end with their page."""
    return min(GROUP, page_tokens) if form.axis == "token" else GROUP


def _cut(lane: Lane, rank_k: int, rank_v: int, grid: Grid) -> tuple[Lane, LaneBasis]:
    k = grid.cut("k", lane.layer, lane.head, rank_k)
    v = grid.cut("v", lane.layer, lane.head, rank_v)
    folded = lane.rope == "none"
    width = rank_k if folded else lane.input_dim
    lane = dataclasses.replace(
        lane, input_dim=width, rank_k=rank_k, rank_v=rank_v, projected=not folded
    )
    return lane, LaneBasis(k.back, k.into, k.centre, v.into, v.back.T, v.centre)


def shuffled(choice: Choice, rng: np.random.Generator, lanes: int) -> Choice:
    """The same options dealt to other lanes, K among K and V among V: equal bytes, no
    adaptation."""
    keys = rng.permutation(choice[:lanes])
    values = rng.permutation(choice[lanes:])
    return np.concatenate([keys, values])
