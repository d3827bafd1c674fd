"""Laws of stages: the graphs of a plan's layer groups are the one graph cut up; dropped rows are not computed."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from runtime_cases import HOT, model_shape, plan_for

from kvlathe.errors import KvlatheError
from kvlathe.export.layout import CacheLayout
from kvlathe.export.plan import Bucket, CompressionPlan, Pass, Probe, Stage

SHAPE = model_shape()
LANES = SHAPE.kv_heads


def staged(*stages: Stage, split: bool = False) -> CompressionPlan:
    """Every lane whole; a bucket for each stage, or two of them (even and odd heads)."""
    ends = [*(s.first_layer for s in stages[1:]), SHAPE.layers]
    buckets = []
    for stage, end in zip(stages, ends, strict=True):
        lanes = tuple(range(stage.first_layer * LANES, end * LANES))
        buckets += [Bucket(0, lanes[::2]), Bucket(0, lanes[1::2])] if split else [Bucket(0, lanes)]
    whole = plan_for(SHAPE, (HOT,), (Bucket(0, tuple(range(SHAPE.layers * LANES))),))
    return dataclasses.replace(whole, buckets=tuple(buckets), stages=stages, probe=Probe(last=8))


THREE = (Stage(0), Stage(1, 96), Stage(3, 64))


def test_stages_survive_the_plan_file_and_change_its_digest() -> None:
    plan = staged(*THREE)
    again = CompressionPlan.from_json(plan.to_json())
    assert again == plan and again.digest == plan.digest
    assert staged(Stage(0), Stage(1, 96), Stage(3, 80)).digest != plan.digest
    assert json.loads(plan.to_json())["stages"][1] == {"first_layer": 1, "tokens": 96}


def test_stages_that_lose_no_token_of_a_prompt_are_one_pass() -> None:
    plan = staged(*THREE)
    assert plan.passes(60) == (Pass(0, 3, 60),)
    assert plan.passes(80) == (Pass(0, 2, 80), Pass(2, 3, 64))
    assert plan.passes(500) == (Pass(0, 1, 500), Pass(1, 2, 96), Pass(2, 3, 64))
    assert staged(Stage(0), Stage(2, 64), Stage(3, 64)).passes(500) == (Pass(0, 1, 500), Pass(1, 3, 64))


def test_the_parts_of_a_plan_are_laid_out_as_the_whole() -> None:
    plan = staged(*THREE, split=True)
    seen = []
    for stage in range(3):
        part, first = plan.part(stage), plan.layers_of(stage)[0]
        seen += [dataclasses.replace(lane, layer=lane.layer + first) for lane in part.lanes]
        for i, bucket in enumerate(plan.buckets_of(stage)):
            assert CacheLayout(part).page_stride[i] == CacheLayout(plan).page_stride[bucket]
            ours, theirs = CacheLayout(part).lane_table(i), CacheLayout(plan).lane_table(bucket)
            np.testing.assert_array_equal(ours[:, 1:], theirs[:, 1:])
            np.testing.assert_array_equal(ours[:, 0] + first, theirs[:, 0])
    assert tuple(seen) == plan.lanes


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ((Stage(1), Stage(2, 64)), "begin at the layers"),
        ((Stage(0, 64), Stage(2, 64)), "begin at the layers"),
        ((Stage(0), Stage(2, 64), Stage(2, 64)), "begin at the layers"),
        ((Stage(0), Stage(9, 64)), "begin at the layers"),
        ((Stage(0), Stage(1, 64), Stage(2, 96)), "no token comes back"),
        ((Stage(0), Stage(1, 8)), "more than the 8 last ones stay"),
    ],
)
def test_stages_that_cannot_be_are_refused(stages: tuple[Stage, ...], said: str) -> None:
    with pytest.raises(KvlatheError, match=said):
        dataclasses.replace(staged(Stage(0)), stages=stages)


def test_a_bucket_of_two_stages_is_refused() -> None:
    with pytest.raises(KvlatheError, match="one stage"):
        dataclasses.replace(staged(Stage(0)), stages=THREE)
