"""Comparing engines: equal oracles agree everywhere, differences are found where they
are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvlathe.base.errors import KvlatheError
from kvlathe.engines.compare import compare, compare_runtimes, telling_tokens
from tests.support.fake_session import SHAPE
from tests.support.runtime_cases import plans

VOCABULARY = 11


class Oracle:
    """Random logits, the same for every instance, changed at one place."""

    def __init__(self, place: int | None = None, vocabulary: int = VOCABULARY) -> None:
        self.place, self.vocabulary = place, vocabulary

    def logits(
        self, token_ids: Sequence[int], rows: Sequence[int]
    ) -> npt.NDArray[np.float32]:
        found = (
            np.random.default_rng(7)
            .standard_normal((len(token_ids), self.vocabulary))
            .astype(np.float32)
        )
        if self.place is not None:
            found[self.place, found[self.place].argmin()] += 20
        return found[list(rows)]


def test_an_engine_agrees_with_itself() -> None:
    seen = compare(Oracle(), Oracle(), range(6))
    assert (
        seen["max_logit_difference"] == 0
        and seen["agreement"] == 1
        and seen["first_divergence"] is None
    )
    assert seen["kl"] == pytest.approx(0, abs=1e-12)


def test_a_difference_is_found_where_it_is() -> None:
    seen = compare(Oracle(), Oracle(place=3), range(6))
    assert seen["first_divergence"] == 3 and seen["agreement"] == pytest.approx(5 / 6)
    assert seen["max_logit_difference"] == pytest.approx(20)
    assert isinstance(seen["kl"], float) and seen["kl"] > 1


def test_engines_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    with pytest.raises(KvlatheError, match="no tokens"):
        compare(Oracle(), Oracle(), [])
    with pytest.raises(KvlatheError, match="two engines of one model"):
        compare(Oracle(), Oracle(vocabulary=12), range(3))
    with pytest.raises(KvlatheError, match="is not an engine folder"):
        compare_runtimes(tmp_path, tmp_path)


@pytest.mark.parametrize("kind", plans(SHAPE, page=32, chunk=64))
def test_a_text_that_tells_moves_what_a_plan_ever_moves(kind: str) -> None:
    """After it every group holds as much hot, and as much in all, as much later."""
    plan = plans(SHAPE, page=32, chunk=64)[kind]
    tokens = telling_tokens(plan)
    for route in plan.index.routes:
        now, later = route.held(tokens), route.held(tokens + 64 * plan.page_tokens)
        assert now[0] <= max(later[0], plan.page_tokens) or len(now) == 1
        for held, after in zip(now[1:], later[1:], strict=True):
            assert held > 0 or not after
