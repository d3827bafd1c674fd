"""The ranking of tokens that builds and sessions refuse for the CUDA kernels."""

from __future__ import annotations

import dataclasses

import pytest

from kvlathe.plan.kernel_forms import (
    UNPROVEN,
    node_refusal,
    plan_refusal,
    ranking_refusal,
)
from kvlathe.plan.lives import KEEP
from kvlathe.plan.plan import CompressionPlan
from kvlathe.plan.token_score import ObservationWindow
from tests.support.ranking_laws import KINDS, ranked_plan
from tests.support.runtime_cases import (
    compacting_plans,
    model_shape,
    plans,
    ranked_plans,
)
from tests.support.staged_cases import PLANS


@pytest.mark.parametrize("kind", KINDS)
def test_ranked_plans_are_taken(kind: str) -> None:
    assert ranking_refusal(ranked_plan(kind)) is None


def test_plans_that_observe_nothing_are_taken() -> None:
    assert ranking_refusal(plans(model_shape())["sealed"]) is None


@pytest.mark.parametrize("kind", ["compacted", "sealed compacted"])
def test_plans_that_compact_prefixes_are_taken(kind: str) -> None:
    """Torch says what attends their tokens, also where scores are bounded."""
    plan = compacting_plans(model_shape())[kind]
    assert ranking_refusal(plan) is None
    capped = dataclasses.replace(plan.model, softcap=30.0)
    assert ranking_refusal(dataclasses.replace(plan, model=capped)) is None


def test_tiers_by_age_are_refused_until_a_gpu_is_compared_with_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The node of ONNX Runtime and TensorRT has not run them either."""
    monkeypatch.delenv(UNPROVEN, raising=False)
    plan, sealed = (plans(model_shape())[kind] for kind in ("aged", "sealed"))
    refusal = plan_refusal(plan)
    assert refusal is not None and "recent=0" in refusal[1]
    monkeypatch.setenv(UNPROVEN, "1")
    assert plan_refusal(plan) is None and node_refusal(plan) == refusal
    assert plan_refusal(sealed) is None and node_refusal(sealed) is None


SPECIAL = ObservationWindow(special=(3,), recent=0.1)
REFUSED: dict[str, tuple[CompressionPlan, str]] = {
    "stochastic": (ranked_plans(model_shape())["divided"], "at random"),
    "special": (
        dataclasses.replace(ranked_plan("mixed"), score=SPECIAL),
        "by their ids",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_plans_without_a_kernel_are_refused(kind: str) -> None:
    plan, words = REFUSED[kind]
    refusal = ranking_refusal(plan)
    assert refusal is not None
    assert words in refusal[0]


def test_stages_are_taken_where_pages_have_what_their_rows_are_ranked_by() -> None:
    plan = PLANS["budget"]
    assert ranking_refusal(plan) is None
    whole = dataclasses.replace(plan.groups[0], life=KEEP)
    unscored = dataclasses.replace(plan, groups=(whole, *plan.groups[1:]))
    drawn = dataclasses.replace(plan, score=ObservationWindow(random=0.1, last=8))
    for refused in (unscored, drawn):
        refusal = ranking_refusal(refused)
        assert refusal is not None
        assert "between layers" in refusal[0]
