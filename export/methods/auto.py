"""auto (ours): the rank and the bits of every lane's K and of its V and the tokens it
keeps, chosen together under one budget of bytes.

The basis is the balanced one (rotation.py). What is kept of it is turned before it is
coded: in axes where stored vectors and their readers have equal variances (Cauchy and
Schwarz: the trace of one times that of the other is least there), rotated so that no
channel sets a group's range. Groups run along the rank, one for each token, or along a
page's tokens, one for each channel. A lane keeps all tokens, or the first ones and the
newest (a window). Which form each lane takes is a knapsack over measured losses
(assignment.py, export/search/sensitivity.py); docs/auto.md.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from kvlathe.export.bases.basis import Basis, LaneBasis
from kvlathe.export.bases.rotation import Rotation, balanced_rotation
from kvlathe.export.calibration.stats import Stats
from kvlathe.export.methods.assignment import Assignment
from kvlathe.export.methods.forms import FORMATS, FORMS, GROUP, Grid, SideFormat
from kvlathe.export.methods.groups import layer_lives
from kvlathe.export.methods.lowrank import full_lanes
from kvlathe.export.methods.method import Method
from kvlathe.export.methods.options import NoOptions, RankOptions
from kvlathe.plan.formats import Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane
from kvlathe.plan.lives import Life


def rotate(stats: Stats, options: RankOptions) -> Rotation:
    """The balanced basis."""
    return balanced_rotation(stats)


METHOD = Method(
    "ranks, bits and tokens of each head, chosen together by measured sensitivity",
    NoOptions(),
    rotate=rotate,
    calibration="text",
    measured=True,
)


# -- a choice as a plan ----------------------------------------------------------------
@dataclass(frozen=True)
class Chosen:
    """Lanes, matrices and groups that a plan is made of."""

    lanes: tuple[Lane, ...]
    basis: Basis
    groups: tuple[Group, ...]


def made(
    grid: Grid, choice: Assignment, hot: Tier, windows: Sequence[int] = ()
) -> Chosen:
    """Lanes, matrices and groups of one form for every lane. ``windows``: as in
    CacheSettings.layer_windows."""
    own = layer_lives(windows, grid.page_tokens)
    whole = full_lanes(grid.stats.shape, grid.stats.rope)
    lanes: list[Lane] = []
    basis = Basis()
    members: dict[tuple[tuple[Tier, ...], Life], list[int]] = {}
    forms = zip(whole, choice.k, choice.v, choice.window, strict=True)
    for index, (lane, option_k, option_v, window) in enumerate(forms):
        rank_k, form_k = grid.options[option_k]
        rank_v, form_v = grid.options[option_v]
        life = own.get(lane.layer) or grid.lives[window]
        of_ages = zip(FORMS[form_k], FORMS[form_v], strict=True)
        tiers = [
            _tier(FORMATS[k], FORMATS[v], grid.page_tokens)
            for k, v in itertools.islice(of_ages, life.cold_tiers[-1])
        ]
        members.setdefault((tuple(tiers), life), []).append(index)
        at = lane.layer, lane.head
        cut, basis[at] = _cut(lane, rank_k, rank_v, grid)
        lanes.append(cut)
    groups = [
        Group(tuple(of_kind), hot, cold, life)
        for (cold, life), of_kind in members.items()
    ]
    return Chosen(tuple(lanes), basis, tuple(groups))


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
        coding_k=k.coding,
        coding_v=v.coding,
    )


def _group(form: SideFormat, page_tokens: int) -> int:
    """Numbers of a quantization group. Groups of tokens end with their page."""
    return min(GROUP, page_tokens) if form.stored.along_tokens else GROUP


def _cut(lane: Lane, rank_k: int, rank_v: int, grid: Grid) -> tuple[Lane, LaneBasis]:
    k = grid.cut("k", lane.layer, lane.head, rank_k)
    v = grid.cut("v", lane.layer, lane.head, rank_v)
    folded = lane.rope == "none"
    width = rank_k if folded else lane.input_dim
    lane = dataclasses.replace(
        lane, input_dim=width, rank_k=rank_k, rank_v=rank_v, projected=not folded
    )
    return lane, LaneBasis(k.back, k.into, k.centre, v.into, v.back.T, v.centre)
