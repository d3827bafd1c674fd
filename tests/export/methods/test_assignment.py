"""The form that every lane takes: the knapsack, and few formats and windows, against
every choice there is."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
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
from kvlathe.export.methods.assignment import Pairs, Priced
from kvlathe.export.methods.composition import CacheSettings
from kvlathe.export.methods.compression import parse
from kvlathe.export.methods.forms import FORMATS, FORMS, OF_KEYS, OF_VALUES, PAIRS, Grid
from kvlathe.export.search import measured
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.lives import Life, Paging
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
    monkeypatch.delattr(Priced, "_unlimited")  # it is there already
    for size, own in zip(sizes, alone, strict=True):
        shared = found.chosen(size)
        for one, other in zip(
            dataclasses.astuple(shared), dataclasses.astuple(own), strict=True
        ):
            np.testing.assert_array_equal(one, other)


def program(
    found: Priced, pairs: tuple[Pairs, Pairs], lives: Iterable[Life], budget: int
) -> float:
    """The least loss within some pairs of forms and some lives, as a mixed integer
    program: x picks one way for each lane."""
    grid = found.grid
    ways: list[tuple[int, int, int]] = []
    options = [*enumerate(grid.options)]
    for life in lives:
        place = grid.lives.index(life)
        allowed = {*pairs[life.newest_apart > 0]}
        both = itertools.product(options, repeat=2)
        ways += [
            (k, v, place) for (k, (_, a)), (v, (_, b)) in both if (a, b) in allowed
        ]
    k, v, life = np.array(ways).T
    lanes = found.lanes
    loss = np.stack(
        [
            found.loss[life, lane, k] + found.loss[life, lanes + lane, v]
            for lane in range(lanes)
        ]
    )
    loss += found.window_loss[:, life]
    sizes = np.array(
        [
            [bytes_of(grid, option, place) for place in range(len(grid.lives))]
            for option in range(len(options))
        ]
    )
    cost = np.tile(sizes[k, life] + sizes[v, life], (lanes, 1))
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


def bytes_of(grid: Grid, option: int, place: int) -> int:
    """Bytes of one side of a lane, by the pages that its life says."""
    life = grid.lives[place]
    rank, form = grid.options[option]
    at = Paging(64, life.cold_tiers[-1])
    hot, *cold = life.written(grid.tokens // 64 * 64, at)
    total = (hot + 64) * rank * 2  # the page that is being filled, too
    for tokens, code in zip(cold, FORMS[form], strict=False):
        total += tokens // 64 * FORMATS[code].stored.page_bytes(rank, 64)
    return total


@cache
def small(seed: int, windowed: bool = True, paired: bool = False) -> Priced:
    """Two lanes, few ranks: every choice of formats can be solved."""
    whole = priced(seed, windowed=windowed)
    keep = [0, 1, whole.lanes, whole.lanes + 1]
    grid = Grid(whole.grid.stats, 64, 0, 512, 16, windowed)
    grid.__dict__["options"] = grid.options[: len(FORMS) + 3]
    lives = [whole.grid.lives.index(life) for life in grid.lives]
    loss = whole.loss[np.ix_(lives, keep, range(len(FORMS) + 3))]
    return Priced(grid, loss, whole.window_loss[:2, lives], paired)


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("share", rest_nightly([0.15, 0.3, 0.6], 0.3))
def test_the_choice_is_the_best_of_all_formats_and_windows(
    share: float, paired: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each pair of a few formats, and of those of ages, is a program.
    monkeypatch.setattr(assignment, "OF_KEYS", OF_KEYS[3:6])
    monkeypatch.setattr(assignment, "OF_VALUES", OF_VALUES[-3:])
    found = small(4, paired=paired)
    budget = found.least + int(share * (found.most - found.least))
    by_age: dict[int, list[Life]] = {}
    for life in found.grid.lives:
        by_age.setdefault(life.newest_apart, []).append(life)
    all_tokens, windows = by_age[0][:2], by_age[0][2:]
    assert len(all_tokens) == len(windows) == 2
    ages = [] if paired else [by_age[128], by_age[256]]
    best = min(
        program(found, (pairs, (pair,)), (whole, *windows, *aged), budget)
        for pairs in found._sets
        for pair in (found._aged_pairs if ages else [(0, 0)])
        for whole in all_tokens
        for aged in ages or [[]]
    )
    choice = found.chosen(budget)
    assert found.bytes(choice) <= budget
    assert best * (1 - 1e-9) <= found.lost(choice) <= 1.02 * best


def test_bounds_are_below_what_is_found() -> None:
    found = small(6)
    budget = (found.least + found.most) // 3
    for bound, allowed in found._candidates(budget)[::2]:
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
    windows = {group.life.reaches for group in plan.groups if group.life.drops}
    assert all(sight.is_less for sight in windows)
    assert len(windows) <= assignment.MOST_WINDOWS
    assert len({group.life.newest_apart for group in plan.groups} - {0}) <= 1
    assert len({group.cold for group in plan.groups if group.life.newest_apart}) <= 1
    for side in (0, 1):
        formats = {
            tier.formats[side]
            for group in plan.groups
            for tier in group.cold
            if not group.life.newest_apart
        }
        assert len(formats) <= assignment.MOST_FORMATS


def test_a_lane_that_nothing_depends_on_gets_the_least() -> None:
    found = priced(2)
    found.loss[:, [1, found.lanes + 1]] = 0.0
    found.window_loss[1] = 0.0
    choice = found.chosen((found.least + found.most) // 4)
    options, pages = found.grid.options, found.grid.pages
    assert options[choice.k[1]][0] == options[choice.v[1]][0] == 16
    assert pages[0, choice.window[1]] == pages[0, choice.window].min()
    sizes = found.grid.sizes[0]
    assert sizes[choice.k[1]] < sizes[choice.k].mean() / 2


def test_dealing_forms_to_other_lanes_costs_the_same_bytes() -> None:
    found = priced(7)
    choice = found.chosen((found.least + found.most) // 4)
    dealt = shuffle(choice)
    assert found.bytes(dealt) == found.bytes(choice)
    assert found.lost(dealt) > found.lost(choice)
