"""Laws of V that is the beginning of K: pages hold it once, and read it there; what it
cannot be is refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kvlathe.base.errors import KvlatheError
from kvlathe.cli.show import rank_table
from kvlathe.export.report.page_rows import page_pictures
from kvlathe.export.report.sizes import of_page
from kvlathe.plan.codec import matrices
from kvlathe.plan.formats import WHOLE_RANK, Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane
from kvlathe.plan.kernel_forms import is_wide, node_refusal, plan_refusal
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.lives import SEAL
from kvlathe.plan.plan import CompressionPlan
from kvlathe.plan.token_fields import token_fields
from tests.support.attend_cases import one_form, plan_of, stored_once

RANK_K, RANK_V, PAGE = 144, 128, 64
HOT = Tier(16, 16)
FORMS = {
    "8 bit by token": Tier(8, 8, "rank", "rank"),
    "4 bit by channel": Tier(4, 4, "token", "token"),
    "3 bit by token": Tier(3, 3, "rank", "rank", 48, 48),
    "levels of the normal": one_form(Tier(4, 4, "rank", coding_k="normal")),
    "floats": one_form(Tier(8, 8, "rank", group_k=WHOLE_RANK, coding_k="float8")),
    "16 bit": HOT,
}


def latent_plan(tier: Tier, lane: Lane | None = None) -> CompressionPlan:
    lane = lane or Lane(0, 0, RANK_K, RANK_K, RANK_V, "none", values_in_keys=True)
    lanes = [lane, dataclasses.replace(lane, layer=1)]
    return plan_of(lanes, [Group((0, 1), HOT, (tier,), SEAL)], RANK_K, 4, PAGE)


@pytest.mark.parametrize("form", FORMS)
def test_pages_are_smaller_by_all_that_values_would_take(form: str) -> None:
    tier = FORMS[form]
    once = CacheLayout(latent_plan(tier))
    twice = CacheLayout(stored_once(once.plan, False))
    for bucket, side in enumerate((HOT.v, tier.v)):
        apart = 2 * side.page_bytes(RANK_V, PAGE)
        assert twice.page_stride[bucket] - once.page_stride[bucket] == apart
        assert once.page_stride[bucket] == 2 * side.page_bytes(RANK_K, PAGE)
    assert once.plan.index.kept_dims == 1.0
    numbers = 2 * RANK_K * PAGE
    assert once.page_stride[0] == 2 * numbers


@pytest.mark.parametrize("form", FORMS)
def test_values_are_read_where_keys_begin_and_never_written(form: str) -> None:
    layout = CacheLayout(latent_plan(FORMS[form]))
    rng = np.random.default_rng(5)
    for k, v in matrices(layout, 1).values():
        page = np.zeros(layout.page_stride[1], np.uint8)
        k.write(page, rng.normal(size=(PAGE, RANK_K)).astype(np.float32))
        np.testing.assert_array_equal(v.read(page), k.read(page)[:, :RANK_V])
        before = page.copy()
        v.write(page, rng.normal(size=(PAGE, RANK_V)).astype(np.float32))
        np.testing.assert_array_equal(page, before)


def test_a_moving_token_takes_its_keys_alone() -> None:
    layout = CacheLayout(latent_plan(FORMS["8 bit by token"]))
    for fields in token_fields(layout, 1).values():
        assert sum(size for _, size in fields) == RANK_K + 4 * -(-RANK_K // 64)


@pytest.mark.parametrize("form", FORMS)
def test_the_report_counts_and_draws_every_byte_once(form: str) -> None:
    layout = CacheLayout(latent_plan(FORMS[form]))
    for bucket in layout.plan.index.buckets:
        found = of_page(layout, bucket)
        assert found["v"] == 0
        assert sum(found.values()) == layout.page_stride[bucket.number]
    for picture in page_pictures(layout):
        drawn = [width for row in picture.rows for _, width in row.parts]
        assert sum(drawn) * (2 // len(picture.rows)) == picture.stride


def test_people_are_told_where_values_are() -> None:
    plan = latent_plan(HOT)
    _, rows = rank_table([dataclasses.asdict(lane) for lane in plan.lanes])
    assert [row[1:] for row in rows] == 2 * [(f"{RANK_K}, V its first {RANK_V}",)]


LANE = Lane(0, 0, RANK_K, RANK_K, RANK_V, "none", values_in_keys=True)
REFUSED = {
    "two forms": (Tier(8, 8, "rank", "token"), LANE, "both then have one form"),
    "two widths": (Tier(8, 4, "rank", "rank"), LANE, "both then have one form"),
    "longer than keys": (HOT, dataclasses.replace(LANE, rank_v=160), "beginning of K"),
    "turned by attention": (
        HOT,
        dataclasses.replace(LANE, rope="full"),
        "nothing turns",
    ),
    "projected": (HOT, dataclasses.replace(LANE, projected=True), "or projects"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_values_that_cannot_lie_in_keys_are_refused(case: str) -> None:
    tier, lane, said = REFUSED[case]
    with pytest.raises(KvlatheError, match=said):
        latent_plan(tier, lane)


def test_values_lie_in_keys_in_all_lanes_of_a_model_that_has_them_so() -> None:
    plan = latent_plan(HOT)
    first, second = plan.lanes
    mixed = (first, dataclasses.replace(second, values_in_keys=False))
    for change in (
        {"lanes": mixed},
        {"model": dataclasses.replace(plan.model, latent=0)},
    ):
        with pytest.raises(KvlatheError, match="all of layers"):
            dataclasses.replace(plan, **change)


def test_gpu_kernels_take_it_and_their_node_refuses_it_in_words() -> None:
    plan = latent_plan(HOT)
    assert plan_refusal(plan) is None and is_wide(plan)
    found = node_refusal(plan)
    assert found is not None and "share one latent" in found[0]
    assert "CPU" in found[1]
