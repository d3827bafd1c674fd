"""Plans with token rules: what is refused, and that files and digests carry them."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlathe.errors import KvlatheError
from kvlathe.export.plan import Bucket, CompressionPlan, Lane, ModelShape, Probe, Tier, TokenRule, split_tokens

SHAPE = ModelShape(2, 2, 1, 32, 32, 64, 512)
LANES = tuple(Lane(i, 0, 32, 32, 32) for i in range(2))
HOT, FOUR, TWO, CHANNELS = Tier(32, 32), Tier(4, 4, "token", "rank"), Tier(2, 2, "rank", "rank"), Tier(4, 4)
PROBE = Probe(recent=0.05, random=0.05, special=(3, 5), normalized=True)
HIGH, LOW = TokenRule("share", share=0.6), TokenRule("share", share=0.4)
SPLIT = (Bucket(0, (0, 1)), Bucket(1, (0, 1), 0, HIGH), Bucket(2, (0, 1), 0, LOW))


def plan(*buckets: Bucket, probe: Probe | None = PROBE) -> CompressionPlan:
    return CompressionPlan(SHAPE, LANES, (HOT, FOUR, TWO, CHANNELS), buckets or SPLIT, probe=probe)


def test_a_plan_with_a_probe_survives_its_file_and_the_probe_is_part_of_the_digest() -> None:
    made = plan()
    assert CompressionPlan.from_json(made.to_json()) == made
    other = dataclasses.replace(made, probe=dataclasses.replace(PROBE, random=0.1))
    assert other.digest != made.digest
    plain = plan(Bucket(0, (0, 1)), probe=None)
    assert CompressionPlan.from_json(plain.to_json()) == plain


def test_what_a_scheduler_must_know_follows_from_the_rules() -> None:
    kinds = {
        "one bucket": plan(Bucket(0, (0, 1)), probe=None),
        "sealed": plan(Bucket(0, (0, 1)), Bucket(1, (0, 1), 0), probe=None),
        "split": plan(),
    }
    assert {name: (p.sharable, p.recomputable) for name, p in kinds.items()} == {
        "one bucket": (True, True),
        "sealed": (True, False),
        "split": (False, False),
    }
    budget = plan(Bucket(0, (0,)), Bucket(0, (1,), tokens=TokenRule("budget", budget=64)), Bucket(2, (0,), 0))
    assert [[p.scored(b) for b in range(3)] for p in (plan(), budget)] == [[True, False, False], [False, True, False]]


REFUSED = {
    "no share": (SPLIT[0], SPLIT[1], dataclasses.replace(SPLIT[2], tokens=TokenRule("share", share=0.0))),
    "shares that do not sum to 1": SPLIT[:2],
    "shares beside whole buckets": (SPLIT[0], SPLIT[1], Bucket(2, (0, 1), 0)),
    "a share of some lanes": (SPLIT[0], SPLIT[1], dataclasses.replace(SPLIT[2], lanes=(0,))),
    "a fresh share": (Bucket(0, (0, 1), tokens=HIGH),),
    "a budget that is no whole pages": (Bucket(0, (0, 1), tokens=TokenRule("budget", budget=100)),),
    "more recent than the budget": (Bucket(0, (0, 1), tokens=TokenRule("budget", budget=64, recent=65)),),
    "recent without a budget": (Bucket(0, (0, 1), tokens=TokenRule(recent=1)),),
    "a budget in front of sealing": (Bucket(0, (0, 1), tokens=TokenRule("budget", budget=64)), Bucket(2, (0, 1), 0)),
    "a budget with groups along the tokens": (Bucket(0, (0, 1)), Bucket(3, (0, 1), 0, TokenRule("budget", budget=64))),
    "a probe without a rule": (Bucket(0, (0, 1)),),
}


@pytest.mark.parametrize("buckets", REFUSED.values(), ids=REFUSED.keys())
def test_contradictory_rules_are_refused(buckets: tuple[Bucket, ...]) -> None:
    with pytest.raises(KvlatheError):
        plan(*buckets)


@pytest.mark.parametrize(
    "probe", [None, Probe(), Probe(recent=2.0), Probe(last=-1), Probe(last=1, pooling=2), Probe(last=1, noise=-1.0)]
)
def test_probes_that_observe_nothing_or_cannot_be_are_refused(probe: Probe | None) -> None:
    with pytest.raises(KvlatheError):
        plan(probe=probe)


@given(st.lists(st.integers(1, 99), min_size=1, max_size=4), st.integers(0, 5000))
def test_shares_divide_every_token_and_never_take_one_back(weights: list[int], tokens: int) -> None:
    shares = [w / sum(weights) for w in weights]
    now, then = split_tokens(shares, tokens), split_tokens(shares, tokens + 1)
    assert sum(now) == tokens and sum(then) == tokens + 1
    assert sorted(b - a for a, b in zip(now, then, strict=True)) == [0] * (len(shares) - 1) + [1]
    assert all(math.isclose(n, s * tokens, abs_tol=len(shares)) for n, s in zip(now, shares, strict=True))
