"""Laws of the pairs that a compacted prefix keeps: the share that was asked for, the
best of each lane, and budgets as one threshold over all lanes sets them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlathe.runtime.cache.kept_pairs import Floats, Places, kept_places


def scores(lanes: tuple[int, ...], tokens: int, seed: int) -> list[Floats]:
    """Scores of buckets with so many lanes: random ones, the lanes of different
    scales."""
    rng = np.random.default_rng(seed)
    shapes = [(count, tokens) for count in lanes]
    made = [rng.random(shape) * rng.random((shape[0], 1)) ** 3 for shape in shapes]
    return [of_lanes.astype(np.float32) for of_lanes in made]


buckets = st.lists(st.integers(1, 4), min_size=1, max_size=6).map(tuple)
keeps = st.floats(0.01, 1)
seeds = st.integers(0, 99)


@given(lanes=buckets, pages=st.integers(1, 8), page=st.just(16), keep=keeps, seed=seeds)
def test_the_best_pairs_of_every_lane_stay_in_whole_pages(
    lanes: tuple[int, ...], pages: int, page: int, keep: float, seed: int
) -> None:
    given_scores = scores(lanes, pages * page, seed)
    kept = kept_places(given_scores, keep, page)
    for of_lanes, places in zip(given_scores, kept, strict=True):
        count = places.shape[1]
        assert count % page == 0
        for own, of_lane in zip(of_lanes, places, strict=True):
            assert of_lane.tolist() == sorted(set(of_lane.tolist()))
            gone = np.delete(own, of_lane)
            assert not count or not len(gone) or own[of_lane].min() >= gone.max()
    total = sum(places.size for places in kept)
    slack = max(lanes) * page
    assert abs(total - keep * sum(lanes) * pages * page) <= slack


@given(tokens=st.integers(2, 60), keep=keeps, seed=seeds)
def test_pages_of_one_token_are_the_papers_threshold(
    tokens: int, keep: float, seed: int
) -> None:
    """Lanes are apart: every kept pair outdoes every one that is dropped."""
    given_scores = scores((1, 1, 1), tokens, seed)
    kept = kept_places(given_scores, keep, 1)
    pairs = list(zip(given_scores, kept, strict=True))
    stay = np.concatenate([own[0, places[0]] for own, places in pairs])
    gone = np.concatenate([np.delete(own[0], places[0]) for own, places in pairs])
    assert len(stay) == max(1, int(keep * 3 * tokens + 0.5))
    assert not len(gone) or stay.min() >= gone.max()


@pytest.mark.parametrize("lanes", [(1, 1, 1, 1), (4,), (2, 2)])
@given(seed=seeds)
def test_everything_stays_where_all_is_to_be_kept(
    lanes: tuple[int, ...], seed: int
) -> None:
    kept: list[Places] = kept_places(scores(lanes, 48, seed), 1.0, 16)
    assert all((places == np.arange(48)).all() for places in kept)


@given(seed=seeds, keeps=st.tuples(keeps, keeps).map(sorted))
def test_pairs_kept_at_a_smaller_share_are_kept_at_a_larger_one(
    seed: int, keeps: list[float]
) -> None:
    given_scores = scores((1, 2, 1), 96, seed)
    less, more = (kept_places(given_scores, keep, 16) for keep in keeps)
    for few, many in zip(less, more, strict=True):
        for own, others in zip(few, many, strict=True):
            assert set(own) <= set(others)
