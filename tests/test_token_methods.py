"""Methods that make tokens unequal: what they plan, what they refuse, and the formulas of the paper."""

from __future__ import annotations

import pytest
from runtime_cases import model_shape

from kvlathe.errors import KvlatheError
from kvlathe.export.layout import CacheLayout
from kvlathe.export.methods import CacheForm, Options, compose
from kvlathe.export.methods.zipcache import ratio
from kvlathe.export.plan import CompressionPlan


def plan(request: str) -> CompressionPlan:
    return compose(request, model_shape(), True, None, Options(), CacheForm())[0]


def test_the_papers_ratios() -> None:
    sizes = (8, 4096, 4096)
    found = [round(ratio(scheme, *sizes), 3) for scheme in ("groupwise", "tokenwise", "separable")]
    assert found == [3.2, 3.992, 3.995]


def test_a_split_is_two_formats_of_the_same_tokens() -> None:
    made = plan("zipcache:high=4,low=2,salient=0.6")
    hot, high, low = made.buckets
    assert [made.tiers[b.tier].bits_k for b in (high, low)] == [4, 2] and high.lanes == low.lanes == hot.lanes
    assert [b.tokens.share for b in (high, low)] == [0.6, 0.4]
    assert made.probe and (made.probe.recent, made.probe.random, made.probe.normalized) == (0.05, 0.05, True)
    assert plan("zipcache:salient=1").probe is None
    tokens, shape = 1 << 16, made.model
    plain = 2 * shape.layers * shape.kv_heads * shape.head_dim * 2 * tokens
    assert 3.4 < plain / CacheLayout(made).bytes_for(tokens) < 16 / 3.2


@pytest.mark.parametrize("name", ["h2o", "snapkv", "keyformer"])
def test_budgets_are_whole_pages_and_go_with_other_formats(name: str) -> None:
    assert {b.tokens.budget for b in plan(f"{name}:budget=250").buckets} == {256}
    both = plan(f"{name}+hack:bits=4")
    assert [b.tokens.kind for b in both.buckets] == ["all", "budget"] and both.tiers[1].axis_v == "rank"


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ("zipcache:salient=2", "share of the tokens"),
        ("zipcache:high=3", "choose one of"),
        ("zipcache+hack", "each of them chooses the number format"),
        ("zipcache+h2o", "each of them chooses which tokens"),
        ("h2o:budget=10", "a page holds 64"),
        ("h2o:budget=40", "a page holds 64"),
        ("h2o:budget=nan", "a page holds 64"),
        ("h2o:budget=inf", "a page holds 64"),
        ("h2o:budget=512,budget=256", "an option twice"),
        ("h2o:budget=many", "no number"),
        ("snapkv:window=3", "unknown"),
    ],
)
def test_requests_that_cannot_be_are_refused(request_: str, said: str) -> None:
    with pytest.raises(KvlatheError, match=said):
        plan(request_)
