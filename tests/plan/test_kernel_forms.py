"""Which ranking of tokens builds and sessions refuse for the CUDA kernels."""

from __future__ import annotations

import dataclasses

import pytest

from kvlathe.plan.kernel_forms import ranking_refusal
from kvlathe.plan.plan import CompressionPlan, Stage
from kvlathe.plan.token_rules import ObservationWindow
from tests.support.ranking_laws import KINDS, ranked_plan
from tests.support.runtime_cases import (
    compacting_plans,
    model_shape,
    plans,
    ranked_plans,
)


@pytest.mark.parametrize("kind", KINDS)
def test_ranked_plans_are_taken(kind: str) -> None:
    assert ranking_refusal(ranked_plan(kind)) is None


def test_plans_that_observe_nothing_are_taken() -> None:
    assert ranking_refusal(plans(model_shape())["sealed"]) is None


SPECIAL = ObservationWindow(special=(3,), recent=0.1)
REFUSED: dict[str, tuple[CompressionPlan, str]] = {
    "stochastic": (ranked_plans(model_shape())["divided"], "at random"),
    "compacted": (compacting_plans(model_shape())["compacted"], "compacted"),
    "special": (
        dataclasses.replace(ranked_plan("mixed"), observation=SPECIAL),
        "by their ids",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_no_kernel_does_is_refused(kind: str) -> None:
    plan, words = REFUSED[kind]
    refusal = ranking_refusal(plan)
    assert refusal is not None
    assert words in refusal[0]


def test_stages_are_refused() -> None:
    plan = ranked_plan("budget")
    lanes = range(len(plan.lanes))
    heads = plan.model.kv_heads
    half = plan.model.layers // 2 * heads
    buckets = tuple(
        dataclasses.replace(plan.buckets[0], lanes=tuple(own))
        for own in (lanes[:half], lanes[half:])
    )
    stages = (Stage(0), Stage(plan.model.layers // 2, 256))
    staged = dataclasses.replace(plan, buckets=buckets, stages=stages)
    refusal = ranking_refusal(staged)
    assert refusal is not None
    assert "between its layers" in refusal[0]
