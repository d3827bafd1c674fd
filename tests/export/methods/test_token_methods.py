"""Methods that make tokens unequal: what they plan and what they refuse."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from kvlathe.base.errors import KvlatheError
from kvlathe.export.bases.basis import LaneBasis
from kvlathe.export.calibration.stats import Stats
from kvlathe.export.methods.channels import scaled
from kvlathe.export.methods.composition import CacheSettings, compose
from kvlathe.export.methods.compression import parse
from kvlathe.export.methods.options import RankOptions
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.lives import Compact, Divide
from kvlathe.plan.plan import CompressionPlan
from tests.support.runtime_cases import model_shape
from tests.support.stats_cases import stats as made_up


@cache
def stats() -> Stats:
    return made_up(5, model_shape())


def plan(request: str) -> CompressionPlan:
    return compose(
        parse(request), model_shape(), True, stats(), RankOptions(), CacheSettings()
    )[0]


def test_a_split_is_two_formats_of_the_same_tokens() -> None:
    made = plan("zipcache:high=4,low=2,salient=0.6")
    (group,) = made.groups
    assert [tier.bits_k for tier in group.cold] == [4, 2]
    assert group.life == Divide((0.6, 0.4))
    assert made.index.observation and (
        made.index.observation.recent,
        made.index.observation.random,
        made.index.observation.normalized,
    ) == (0.05, 0.05, True)
    assert [tier.span_k for tier in group.cold] == [0.95, 0.65]
    assert all(tier.span_k == 1 for tier in plan("zipcache:ends=kept").index.tiers)
    assert plan("zipcache:salient=1").score is None
    tokens, shape = 1 << 16, made.model
    plain = 2 * shape.layers * shape.kv_heads * shape.head_dim * 2 * tokens
    assert 3.4 < plain / CacheLayout(made).bytes_for(tokens) < 16 / 3.2


@pytest.mark.parametrize(
    "request_",
    ["none", "fdc:removal_rate=0.2", "fdc:rope_fold=planes,removal_rate=0.2"],
)
@pytest.mark.parametrize("rope", [True, False])
def test_scaled_channels_are_even_and_change_no_product(
    request_: str, rope: bool
) -> None:
    """With c = sqrt(rms), what was cached had a root mean square of c^2 a channel and
    now has c: half its logarithm."""
    if "planes" in request_ and not rope:
        return
    known = made_up(5, model_shape(), rope)
    made, basis = compose(
        parse(request_), model_shape(), rope, known, RankOptions(), CacheSettings()
    )
    found, seen = scaled(made.lanes, basis, known, "kv"), known.whole
    for lane in made.lanes:
        at, own = (
            (lane.layer, lane.head),
            basis.get((lane.layer, lane.head), LaneBasis()),
        )
        d = model_shape().head_dim
        dims = [*lane.planes, *(p + d // 2 for p in lane.planes)] or list(range(d))
        turned, whole = found[at].o_v, own.o_v
        assert turned is not None
        pairs = {
            "k": (
                found[at].b,
                own.b,
                found[at].a,
                own.a,
                (seen.kk[at] / seen.tokens)[np.ix_(dims, dims)],
            ),
            "v": (
                found[at].a_v,
                own.a_v,
                turned.T,
                None if whole is None else whole.T,
                seen.vv[at] / seen.tokens,
            ),
        }
        for side, (into, before, back, own_back, second) in pairs.items():
            eye = np.eye(len(second))
            before = eye if before is None else before
            own_back = eye if own_back is None else own_back
            assert into is not None and back is not None
            np.testing.assert_allclose(
                into @ back.T, before @ own_back.T, rtol=1e-9, atol=1e-9
            )
            sizes = [np.sqrt(np.diag(m.T @ second @ m)) for m in (before, into)]
            if side == "k" and lane.rope != "none" and not lane.projected:
                sizes = [np.sqrt(np.prod(x.reshape(2, -1), 0)) for x in sizes]
            np.testing.assert_allclose(sizes[1], np.sqrt(sizes[0]), rtol=1e-6)


def test_token_methods_say_what_they_calibrate_on() -> None:
    asked = (
        "zipcache",
        "zipcache:values=token",
        "zipcache:values=token,keys=folded",
        "fdc+zipcache",
        "zack+zipcache",
    )
    assert [parse(one).calibration for one in asked] == [
        "random",
        None,
        "random",
        "random",
        "text",
    ]
    with pytest.raises(KvlatheError, match="needs statistics"):
        compose(
            parse("zipcache"), model_shape(), True, None, RankOptions(), CacheSettings()
        )


@pytest.mark.parametrize(
    "name", ["h2o", "snapkv", "keyformer", "tova", "keydiff", "knorm"]
)
def test_budgets_are_whole_pages_and_go_with_other_formats(name: str) -> None:
    assert {group.life.most for group in plan(f"{name}:budget=250").groups} == {256}
    (both,) = plan(f"{name}+hack:bits=4").groups
    assert both.life.kind == "budget" and both.cold[0].axis_v == "rank"
    score = plan(name).score
    assert score is not None and score.slice_tokens == 512


def test_prefixes_are_compacted_head_by_head_or_alike_in_any_format() -> None:
    lanes = tuple(range(len(plan("none").lanes)))
    apart, alike = plan("kvzip:keep=0.2"), plan("kvzip:heads=same")
    assert [group.lanes for group in apart.groups] == [(lane,) for lane in lanes]
    assert {group.life for group in apart.groups} == {Compact(0.2)}
    assert apart.index.sharable and apart.index.observes
    assert [group.lanes for group in alike.groups] == [lanes]
    sealed = plan("kvzip+hack:bits=4")
    hot, *cold = sealed.index.buckets
    assert hot.lanes == lanes and [b.lanes for b in cold] == [(i,) for i in lanes]
    assert (sealed.index.tiers[1].axis_k, sealed.index.tiers[1].axis_v) == (
        "token",
        "rank",
    )
    assert CompressionPlan.from_json(sealed.to_json()) == sealed


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ("kvzip:keep=0", "above 0"),
        ("kvzip:keep=some", "above 0"),
        ("kvzip:keep=nan", "above 0"),
        ("kvzip:heads=few", "Choose one of"),
        ("kvzip:budget=64", "unknown"),
        ("kvzip+snapkv", "each of them chooses which tokens"),
        ("kvzip+hack:bits=4,rounding=stochastic", "rounding=stochastic cannot"),
        ("zipcache:salient=2", "share of the tokens"),
        ("zipcache:high=3", "Choose one of"),
        ("zipcache+hack", "each of them chooses the number format"),
        ("zipcache+h2o", "each of them chooses which tokens"),
        ("h2o:budget=10", "a page holds 64"),
        ("h2o:budget=40", "a page holds 64"),
        ("h2o:budget=nan", "a count of tokens"),
        ("h2o:budget=inf", "a count of tokens"),
        ("h2o:budget=512,budget=256", "an option twice"),
        ("h2o:budget=many", "a count of tokens"),
        ("snapkv:window=3", "unknown"),
    ],
)
def test_requests_that_cannot_be_are_refused(request_: str, said: str) -> None:
    with pytest.raises(KvlatheError, match=said):
        plan(request_)
