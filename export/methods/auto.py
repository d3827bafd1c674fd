"""auto (ours): the rank and the bits of every lane's K and of its V, chosen together under one budget of bytes.

The basis is the balanced one (rotation.py). What is kept of it is turned before it is coded: in axes where stored
vectors and their readers have equal variances (Cauchy and Schwarz: the trace of one times that of the other is least
there), spun so that no channel sets a group's range. Groups run along the rank, one for each token. Which form each
side of each lane takes is a knapsack over measured losses (export/sensitivity.py, export/allocate.py); docs/auto.md.
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

BITS: tuple[Literal[8, 4, 2], ...] = (8, 4, 2)
GROUP = 128
"""Channels in a group: heads up to this size have one group a token."""
SPAN = {8: 1.0, 4: 0.95, 2: 0.65}
"""Of a group's range, what codes cover: least squared error for 64 to 128 normal numbers; spun ones nearly are that."""
FORMATS = 2
"""Number formats that a side may use in one plan: each pair of formats is a bucket, which costs time in every step."""


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
    """Every form that a side of a lane may take: option i has rank ``ranks[i]`` and ``bits[i]``."""

    stats: Stats
    page_tokens: int
    seed: int

    @cached_property
    def options(self) -> list[tuple[int, Literal[8, 4, 2]]]:
        most = allocate.whole(self.stats.shape.head_dim)
        return list(itertools.product(range(RANK_MULTIPLE, most + 1, RANK_MULTIPLE), BITS))

    @cached_property
    def _rotation(self) -> Rotation:
        return balanced_rotation(self.stats)

    @cached_property
    def sizes(self) -> Choice:
        """Bytes of one side of a lane in a sealed page, [options]."""
        return np.array([coded_bytes(rank, self.page_tokens, bits, "rank", GROUP) for rank, bits in self.options])

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
    """The grid with its prices: ``loss`` [2 lanes, options], K lanes then V lanes."""

    grid: Grid
    loss: Array

    @cached_property
    def cost(self) -> Choice:
        """Bytes a page, like ``loss``."""
        return np.repeat(self.grid.sizes[None], len(self.loss), 0)

    def chosen(self, budget: int) -> Choice:
        """The best option of every row, [2 lanes], of at most ``budget`` bytes a page and FORMATS formats a side."""
        bits, lanes = np.array([b for _, b in self.grid.options]), len(self.loss) // 2
        best: tuple[float, Choice] | None = None
        for pair in itertools.product(itertools.combinations(BITS, FORMATS), repeat=2):
            allowed = np.repeat(np.array([np.isin(bits, side) for side in pair]), lanes, 0)
            if np.where(allowed, self.cost, budget + 1).min(-1).sum() > budget:
                continue
            found = allocate.cheapest(np.where(allowed, self.loss, np.inf), self.cost, budget)
            total = float(np.take_along_axis(self.loss, found[:, None], 1).sum())
            if best is None or total < best[0]:
                best = total, found
        return allocate.cheapest(self.loss, self.cost, budget) if best is None else best[1]


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
    for i, (lane, (rank_k, bits_k), (rank_v, bits_v)) in enumerate(
        zip(full_lanes(shape, grid.stats.rope), keys, values, strict=True)
    ):
        cut, basis[lane.layer, lane.head] = _cut(lane, rank_k, rank_v, grid)
        lanes.append(cut)
        tier = Tier(bits_k, bits_v, "rank", "rank", GROUP, GROUP, span_k=SPAN[bits_k], span_v=SPAN[bits_v])
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
