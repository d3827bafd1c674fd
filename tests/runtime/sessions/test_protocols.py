"""Abilities that a plan needs of a session are asked for before anything runs."""

from __future__ import annotations

import dataclasses

import pytest

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.lives import Budget
from kvlathe.plan.token_score import ObservationWindow
from kvlathe.runtime.cache.pool import PagePool
from kvlathe.runtime.sessions.protocols import check_session
from tests.support.checkpoints import full_plan
from tests.support.fake_session import SHAPE, FakeSession, RankedSession


def test_a_session_without_scores_refuses_a_plan_that_ranks_tokens() -> None:
    plain = full_plan(SHAPE, True)
    ranking = dataclasses.replace(
        plain,
        groups=(dataclasses.replace(plain.groups[0], life=Budget(128)),),
        score=ObservationWindow(last=8),
    )
    pool = PagePool(CacheLayout(ranking), 1 << 20)
    scoreless, scoring = FakeSession(ranking, pool), RankedSession(ranking, pool)
    check_session(scoreless, plain)
    check_session(scoring, ranking)
    with pytest.raises(KvlatheError, match="FakeSession moves none"):
        check_session(scoreless, ranking)
