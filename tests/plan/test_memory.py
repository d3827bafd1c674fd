"""Laws of the memory table: its bytes are those that a pool gives and takes."""

from __future__ import annotations

import pytest

from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.memory import memory_table, uncompressed_pages
from kvlathe.runtime.cache.pool import PagePool
from tests.support.fake_session import SHAPE
from tests.support.runtime_cases import plans, ranked_plans

CASES = {**plans(SHAPE, page=32, chunk=64), **ranked_plans(SHAPE, page=16, chunk=32)}


@pytest.mark.parametrize("kind", CASES)
def test_a_sequence_holds_steady_bytes_and_never_more_than_the_peak(kind: str) -> None:
    layout = CacheLayout(CASES[kind])
    (row,) = memory_table(layout, 200, 3)
    pool = PagePool(layout, 1 << 24)
    table, most = pool.open(), 0
    for start in range(0, 200, layout.plan.prefill_chunk):
        count = min(layout.plan.prefill_chunk, 200 - start)
        settles = start + count == 200 or not layout.plan.index.ranked
        done = pool.reserve(table, count, settles)
        most = max(most, pool.bytes_in_use)
        pool.commit(done)
    assert pool.bytes_in_use == row["steady"]
    assert row["steady"] <= most <= row["peak"]
    assert row["batch_peak"] == 3 * row["peak"]


def test_rows_are_of_lengths_that_the_engine_allows() -> None:
    layout = CacheLayout(CASES["one"])
    assert [row["tokens"] for row in memory_table(layout, 512, 1)] == [512]
    lengths = [row["tokens"] for row in memory_table(layout, 8192, 1)]
    assert lengths == [1024, 4096, 8192]


@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 200])
def test_a_plan_that_removes_nothing_holds_what_it_is_compared_with(
    tokens: int,
) -> None:
    """Pages are compared with pages: uncompressed is never half of itself."""
    layout = CacheLayout(CASES["one"])
    plan = layout.plan
    numbers = 2 * plan.model.layers * plan.model.kv_heads * plan.model.head_dim
    a_token = numbers * plan.index.hot_bits // 8
    held = layout.bytes_for(tokens)
    assert held == uncompressed_pages(tokens, plan.page_tokens, a_token)


@pytest.mark.parametrize("kind", CASES)
def test_bytes_of_a_token_are_those_of_the_longest_sequence_that_is_served(
    kind: str,
) -> None:
    """A shorter one costs more a token where tokens leave, and as much elsewhere."""
    layout = CacheLayout(CASES[kind])
    short, most = layout.bytes_per_token(512), layout.bytes_per_token()
    assert short == most if not layout.bounded else short > most
    held = layout.bytes_for(512, sealed=True) / 512
    assert not layout.bounded or short == held
