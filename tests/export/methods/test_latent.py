"""Laws of plans for models whose heads share a latent: V has K's form, and nothing turns
or cuts either."""

from __future__ import annotations

import pytest

from kvlathe.base.errors import KvlatheError
from kvlathe.export.methods.composition import check_latent, compose
from kvlathe.export.methods.compression import parse
from kvlathe.export.methods.method import Decision
from kvlathe.export.methods.options import RankOptions
from kvlathe.plan.heads import ModelShape
from kvlathe.plan.plan import CompressionPlan
from tests.support.method_cases import FORM

SHAPE = ModelShape(3, 16, 1, 576, 64, 97, 4096, latent=512)


def plan_of(request: str) -> CompressionPlan:
    plan, basis = compose(parse(request), SHAPE, False, None, RankOptions(), FORM)
    assert not basis
    return plan


@pytest.mark.parametrize(
    ("request_name", "axis", "bits"),
    [
        ("hack:bits=8", "token", 8),
        ("hack:bits=4", "token", 4),
        ("hack", "token", 2),
        ("hack:bits=4,keys=token", "rank", 4),
        ("hack:bits=4,levels=normal", "rank", 4),
        ("h2o+hack:bits=8", "rank", 8),
        ("fp8", "rank", 8),
    ],
)
def test_full_pages_write_values_as_keys(
    request_name: str, axis: str, bits: int
) -> None:
    plan = plan_of(request_name)
    assert all(lane.values_in_keys for lane in plan.lanes)
    assert {(lane.rank_k, lane.rank_v) for lane in plan.lanes} == {(576, 512)}
    (cold,) = [tier for tier in plan.index.tiers if tier.is_coded]
    assert cold.k == cold.v
    assert (cold.k.axis, cold.k.bits) == (axis, bits)


@pytest.mark.parametrize("request_name", ["none", "window", "h2o", "keydiff", "kvzip"])
def test_tokens_are_chosen_as_in_any_model(request_name: str) -> None:
    assert plan_of(request_name).index.values_in_keys


@pytest.mark.parametrize(
    ("request_name", "said"),
    [
        ("kivi", "different bits or groups"),
        ("hack:bits=8,bits_v=4", "different bits or groups"),
        ("hack:bits=8,values=token", "different bits or groups"),
        ("hack:bits=8,arithmetic=int", "different bits or groups"),
        ("fdc", "chooses ranks and forms"),
        ("zack+hack:bits=4", "chooses ranks and forms"),
        ("hack:bits=4,hadamard=kv", "rotates heads"),
        ("hack:bits=4,basis=balanced", "statistics"),
        ("turboquant", "rotates heads"),
        ("auto", "chooses ranks and forms"),
        ("duo", "heads of a layer apart"),
    ],
)
def test_methods_that_need_keys_and_values_apart_are_refused(
    request_name: str, said: str
) -> None:
    with pytest.raises(KvlatheError, match=f"share one latent.*{said}"):
        if request_name in ("auto", "duo"):  # these are planned by a build alone
            check_latent(parse(request_name), Decision())
        else:
            plan_of(request_name)
