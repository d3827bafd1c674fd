"""Scores in plans: a formula goes through its file, and what cannot be ranked is
refused."""

from __future__ import annotations

import dataclasses
import json

import pytest

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.lives import Window
from kvlathe.plan.plan import CompressionPlan
from kvlathe.plan.token_score import KeyFormula, TokenScore
from tests.support.runtime_cases import UNLIKE, model_shape, ranked_plans
from tests.support.staged_cases import PLANS


def unlike() -> CompressionPlan:
    return ranked_plans(model_shape())["unlike keys"]


def test_a_formula_survives_its_file_and_is_part_of_the_digest() -> None:
    plan = unlike()
    read = CompressionPlan.from_json(plan.to_json())
    assert read == plan and read.score == UNLIKE
    other = dataclasses.replace(plan, score=KeyFormula("-norm(keys)"))
    assert other.digest != plan.digest


@pytest.mark.parametrize("kind", ["", "formulas", 3, None])
def test_a_score_of_an_unknown_kind_is_malformed(kind: object) -> None:
    raw = json.loads(unlike().to_json())
    raw["score"]["kind"] = kind
    with pytest.raises(KvlatheError, match="malformed"):
        CompressionPlan.from_json(json.dumps(raw))


def test_a_forged_formula_is_refused_before_it_is_computed() -> None:
    raw = json.loads(unlike().to_json())
    raw["score"]["formula"] = "__import__('os').getcwd()"
    with pytest.raises(KvlatheError, match="ranks no tokens"):
        CompressionPlan.from_json(json.dumps(raw))


@pytest.mark.parametrize("size", [-512, 100])
def test_formulas_rank_slices_of_whole_chunks(size: int) -> None:
    score = dataclasses.replace(UNLIKE, slice_tokens=size)
    with pytest.raises(KvlatheError, match="slices are whole chunks"):
        dataclasses.replace(unlike(), score=score)


@pytest.mark.parametrize("score", [None, UNLIKE])
def test_stages_lose_rows_by_attention_alone(score: TokenScore | None) -> None:
    plan = PLANS["budget"]
    assert plan.stages
    with pytest.raises(KvlatheError):
        dataclasses.replace(plan, score=score)


def test_a_formula_ranks_no_tokens_that_are_rounded_at_random_when_they_move() -> None:
    plan = ranked_plans(model_shape())["divided"]
    with pytest.raises(KvlatheError, match="rounded at random"):
        dataclasses.replace(plan, score=UNLIKE)


def test_a_formula_beside_windows_is_refused() -> None:
    plan = unlike()
    first, last = plan.groups
    window = dataclasses.replace(last, life=Window(64, 64))
    with pytest.raises(KvlatheError, match="windows beside"):
        dataclasses.replace(plan, groups=(first, window))
