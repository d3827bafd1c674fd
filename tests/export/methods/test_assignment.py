"""The form that every lane takes: the knapsack, and few formats and windows, against
every choice there is."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize

from kvlathe.base.errors import KvlatheError
from kvlathe.engines.targets import cuda
from kvlathe.export.bases import allocate
from kvlathe.export.methods import assignment
from kvlathe.export.methods.assignment import Priced
from kvlathe.export.methods.composition import CacheSettings
from kvlathe.export.methods.compression import parse
from kvlathe.export.methods.forms import FORMATS, OF_KEYS, OF_VALUES, PAIRS, Grid
from kvlathe.export.search import measured
from kvlathe.plan.layout import CacheLayout
from tests.support.nightly import rest_nightly
from tests.support.priced_cases import priced, shuffle

FORM = CacheSettings(16)


# -- the knapsack ----------------------------------------------------------------------
tables = st.tuples(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 5))


@given(tables, st.floats(0, 1))
def test_the_cheapest_choice_is_the_best_of_all(
    table: tuple[int, int, int], share: float
) -> None:
    seed, rows, options = table
    rng = np.random.default_rng(seed)
    loss, cost = (
        rng.exponential(size=(rows, options)) ** 3,
        rng.integers(1, 40, (rows, options)) * 8,
    )
    least, most = int(cost.min(-1).sum()), int(cost.max(-1).sum())
    budget = least + round(share * (most - least))
    every = np.stack(
        np.meshgrid(*[np.arange(options)] * rows, indexing="ij"), -1
    ).reshape(-1, rows)
    allowed = cost[np.arange(rows), every].sum(-1) <= budget
    found = allocate.cheapest(loss, cost, budget)
    assert cost[np.arange(rows), found].sum() <= budget
    best = loss[np.arange(rows), every].sum(-1)[allowed].min()
    assert loss[np.arange(rows), found].sum() == pytest.approx(best, rel=1e-9)
    with pytest.raises(KvlatheError, match="cannot be reached"):
        allocate.cheapest(loss, cost, least - 1)


def test_a_coarser_table_stays_within_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(0)
    loss, cost = rng.exponential(size=(20, 6)), rng.integers(1, 1000, (20, 6))
    budget = int(cost.mean(-1).sum())
    exact = np.take_along_axis(
        loss, allocate.cheapest(loss, cost, budget)[:, None], 1
    ).sum()
    monkeypatch.setattr(allocate, "MOST_CELLS", 20 * 500)
    found = allocate.cheapest(loss, cost, budget)
    assert np.take_along_axis(cost, found[:, None], 1).sum() <= budget
    assert exact <= np.take_along_axis(loss, found[:, None], 1).sum() <= 1.2 * exact


@pytest.mark.parametrize("most", rest_nightly([10**5, 10**6], 10**5))
def test_a_budget_in_few_units_is_kept_and_costs_little(most: int) -> None:
    rng = np.random.default_rng(1)
    loss, cost = rng.exponential(size=(20, 6)), rng.integers(1, most, (20, 6))
    budget = int(cost.mean(-1).sum())
    found, exact = (
        allocate.cheapest(loss, cost, budget, units) for units in (2000, None)
    )
    assert np.take_along_axis(cost, found[:, None], 1).sum() <= budget
    best = np.take_along_axis(loss, exact[:, None], 1).sum()
    assert np.take_along_axis(loss, found[:, None], 1).sum() <= 1.02 * best


# -- choices ---------------------------------------------------------------------------
def test_sizes_share_their_bounds_and_choose_as_they_do_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = priced(3)
    sizes = [found.least, 2 * found.least, 5 * found.least]
    alone = [dataclasses.replace(found).chosen(size) for size in sizes]
    found.chosen(3 * found.least)
    monkeypatch.delattr(Priced, "_paid")  # what bounds are made of is there already
    for size, own in zip(sizes, alone, strict=True):
        shared = found.chosen(size)
        for one, other in zip(
            dataclasses.astuple(shared), dataclasses.astuple(own), strict=True
        ):
            np.testing.assert_array_equal(one, other)


def program(
    found: Priced,
    pairs: Iterable[tuple[int, int]],
    lives: Sequence[int],
    budget: int,
) -> float:
    """The least loss within some pairs of formats and some lives, as a mixed integer
    program: x picks one way for each lane."""
    format_of = [FORMATS.index(form) for _, form in found.grid.options]
    options = range(len(format_of))
    ways = [
        (k, v, life)
        for k, v in itertools.product(options, repeat=2)
        if (format_of[k], format_of[v]) in set(pairs)
        for life in lives
    ]
    k, v, life = np.array(ways).T
    lanes, sizes = found.lanes, found.grid.sizes
    whole = np.array([found.grid.lives[place].stay_hot > 0 for place in life])
    coded, stays = found.loss[:, :lanes, k] + found.loss[:, lanes:, v]
    loss = np.where(whole, stays, coded) + found.window_loss[:, life]
    pages = found.grid.pages[life]
    ranks = np.array([rank for rank, _ in found.grid.options])
    hot = (ranks[k] + ranks[v]) * 64 * 2 * (1 + whole)  # pages of 16-bit numbers
    cost = np.tile((sizes[k] + sizes[v]) * pages + hot, (lanes, 1))
    one = np.kron(np.eye(lanes), np.ones(len(k)))
    limits = [
        optimize.LinearConstraint(one, 1, 1),
        optimize.LinearConstraint(cost.reshape(1, -1), 0, budget),
    ]
    answer = optimize.milp(
        loss.ravel(),
        constraints=limits,
        integrality=np.ones(loss.size),
        bounds=optimize.Bounds(0, 1),
    )
    return float(answer.fun) if answer.success else np.inf


@cache
def small(seed: int, windowed: bool = True, paired: bool = False) -> Priced:
    """Two lanes, few ranks: every choice of formats can be solved."""
    whole = priced(seed, windowed=windowed)
    keep = [0, 1, whole.lanes, whole.lanes + 1]
    grid = Grid(whole.grid.stats, 64, 0, 512, 16, windowed)
    grid.__dict__["options"] = grid.options[:12]
    lives = len(grid.lives)
    loss = whole.loss[:, keep, :12]
    return Priced(grid, loss, whole.window_loss[:2, :lives], paired)


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("share", rest_nightly([0.15, 0.3, 0.6], 0.3))
def test_the_choice_is_the_best_of_all_formats_and_windows(
    share: float, paired: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = slice(None, None, 2)  # of the formats: each pair of them is a program
    monkeypatch.setattr(assignment, "OF_KEYS", OF_KEYS[few])
    monkeypatch.setattr(assignment, "OF_VALUES", OF_VALUES[few])
    found = small(4, paired=paired)
    budget = found.least + int(share * (found.most - found.least))
    lives = range(len(found.grid.lives))
    all_tokens, windows = lives[:2], lives[2:]
    best = min(
        program(found, pairs, (whole, *windows), budget)
        for pairs in found._pair_sets()
        for whole in all_tokens
    )
    choice = found.chosen(budget)
    assert found.bytes(choice) <= budget
    assert best * (1 - 1e-9) <= found.lost(choice) <= 1.02 * best


def test_bounds_are_below_what_is_found() -> None:
    found = small(6)
    budget = (found.least + found.most) // 3
    for bound, allowed in found._bounds(budget)[::5]:
        choice = found._within(allowed, budget)
        assert choice is None or bound <= found.lost(choice) * (1 + 1e-9)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_kernels_that_read_pairs_get_them_and_no_windows(share: float) -> None:
    found = dataclasses.replace(priced(5, windowed=False), paired=True)
    budget = found.least + int(share * (found.most - found.least))
    choice = found.chosen(budget)
    plan, _ = measured.plan_of(parse("auto"), found, choice, FORM)
    cuda.check_plan("cuda", plan)
    pairs = {(FORMATS[k], FORMATS[v]) for k, v in found._format_pairs}
    assert pairs == set(PAIRS) and not plan.index.sees_less
    assert found.bytes(choice) <= budget
    with pytest.raises(KvlatheError, match="cannot be reached"):
        found.chosen(found.least - 1)
    assert found.bytes(found.chosen(found.least)) == found.least


@pytest.mark.parametrize("share", [0.03, 0.2, 0.5])
def test_a_plan_has_the_bytes_and_few_formats_and_windows(share: float) -> None:
    found = priced(3)
    budget = found.least + int(share * (found.most - found.least))
    choice = found.chosen(budget)
    plan, _ = measured.plan_of(parse("auto"), found, choice, FORM)
    layout, tokens = CacheLayout(plan), found.grid.tokens
    strides = zip(plan.index.buckets, layout.page_stride, strict=True)
    filled = sum(stride for bucket, stride in strides if bucket.is_hot)
    held = layout.bytes_for(tokens) + filled
    assert held == found.bytes(choice) <= budget
    windows = {group.life for group in plan.groups if group.life.drops}
    assert all(life.sees.is_less for life in windows)
    assert len(windows) <= assignment.MOST_WINDOWS
    for side in (0, 1):
        formats = {tier.formats[side] for tier in plan.index.tiers[1:]}
        assert len(formats) <= assignment.MOST_FORMATS


def test_a_lane_that_nothing_depends_on_gets_the_least() -> None:
    found = priced(2)
    found.loss[:, [1, found.lanes + 1]] = 0.0
    found.window_loss[1] = 0.0
    choice = found.chosen((found.least + found.most) // 4)
    options, pages = found.grid.options, found.grid.pages
    assert options[choice.k[1]][0] == options[choice.v[1]][0] == 16
    assert pages[choice.window[1]] == pages[choice.window].min()
    sizes = found.grid.sizes
    assert sizes[choice.k[1]] < sizes[choice.k].mean() / 2


def test_dealing_forms_to_other_lanes_costs_the_same_bytes() -> None:
    found = priced(7)
    choice = found.chosen((found.least + found.most) // 4)
    dealt = shuffle(choice)
    assert found.bytes(dealt) == found.bytes(choice)
    assert found.lost(dealt) > found.lost(choice)
