"""Plans with token rules: what is refused, and that files and digests carry them."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.formats import Tier
from kvlathe.plan.heads import Lane, ModelShape
from kvlathe.plan.plan import Bucket, CompressionPlan
from kvlathe.plan.token_rules import (
    Budget,
    Compacted,
    ObservationWindow,
    Share,
    Window,
    split_tokens,
)

SHAPE = ModelShape(2, 2, 1, 32, 32, 64, 512)
LANES = tuple(Lane(i, 0, 32, 32, 32) for i in range(2))
HOT, FOUR, TWO, CHANNELS = (
    Tier(32, 32),
    Tier(4, 4, "token", "rank"),
    Tier(2, 2, "rank", "rank"),
    Tier(4, 4),
)
OBSERVATION = ObservationWindow(
    recent=0.05, random=0.05, special=(3, 5), normalized=True
)
HIGH, LOW = Share(0.6), Share(0.4)
SPLIT = (Bucket(0, (0, 1)), Bucket(1, (0, 1), 0, HIGH), Bucket(2, (0, 1), 0, LOW))


def plan(
    *buckets: Bucket, observation: ObservationWindow | None = OBSERVATION
) -> CompressionPlan:
    return CompressionPlan(
        SHAPE,
        LANES,
        (HOT, FOUR, TWO, CHANNELS),
        buckets or SPLIT,
        observation=observation,
    )


def test_a_plan_with_a_probe_survives_its_file_and_the_probe_is_part_of_the_digest() -> (
    None
):
    made = plan()
    assert CompressionPlan.from_json(made.to_json()) == made
    other = dataclasses.replace(
        made, observation=dataclasses.replace(OBSERVATION, random=0.1)
    )
    assert other.digest != made.digest
    plain = plan(Bucket(0, (0, 1)), observation=None)
    assert CompressionPlan.from_json(plain.to_json()) == plain


def test_what_a_scheduler_must_know_follows_from_the_rules() -> None:
    kinds = {
        "one bucket": plan(Bucket(0, (0, 1)), observation=None),
        "sealed": plan(Bucket(0, (0, 1)), Bucket(1, (0, 1), 0), observation=None),
        "split": plan(),
    }
    assert {name: (p.sharable, p.recomputable) for name, p in kinds.items()} == {
        "one bucket": (True, True),
        "sealed": (True, False),
        "split": (False, False),
    }
    budget = plan(
        Bucket(0, (0,)),
        Bucket(0, (1,), tokens=Budget(64)),
        Bucket(2, (0,), 0),
    )
    assert [[p.scored(b) for b in range(3)] for p in (plan(), budget)] == [
        [True, False, False],
        [False, True, False],
    ]


REFUSED = {
    "no share": (
        SPLIT[0],
        SPLIT[1],
        dataclasses.replace(SPLIT[2], tokens=Share(0.0)),
    ),
    "shares that do not sum to 1": SPLIT[:2],
    "shares beside whole buckets": (SPLIT[0], SPLIT[1], Bucket(2, (0, 1), 0)),
    "a share of some lanes": (
        SPLIT[0],
        SPLIT[1],
        dataclasses.replace(SPLIT[2], lanes=(0,)),
    ),
    "a fresh share": (Bucket(0, (0, 1), tokens=HIGH),),
    "a budget that is no whole pages": (Bucket(0, (0, 1), tokens=Budget(100)),),
    "more recent than the budget": (Bucket(0, (0, 1), tokens=Budget(64, recent=65)),),
    "a budget in front of sealing": (
        Bucket(0, (0, 1), tokens=Budget(64)),
        Bucket(2, (0, 1), 0),
    ),
    "a budget with groups along the tokens": (
        Bucket(0, (0, 1)),
        Bucket(3, (0, 1), 0, Budget(64)),
    ),
    "an observation window without a rule": (Bucket(0, (0, 1)),),
    "a window beside an observation window": (
        Bucket(0, (0,), tokens=Window(64, 64)),
        Bucket(0, (1,), tokens=Budget(64)),
    ),
}
WINDOWS = {
    "a window that is no whole pages": (Bucket(0, (0, 1), tokens=Window(0, 100)),),
    "a sink that is no whole pages": (Bucket(0, (0, 1), tokens=Window(9, 64)),),
    "a window without end": (Bucket(0, (0, 1), tokens=Window(0, 1 << 30)),),
    "a window below 0": (Bucket(0, (0, 1), tokens=Window(0, 0, -1)),),
    "prefixes that keep nothing": (Bucket(0, (0, 1), tokens=Compacted(0.0)),),
    "prefixes compacted beside a window": (
        Bucket(0, (0,), tokens=Window(64, 64)),
        Bucket(0, (1,), tokens=Compacted(0.5)),
    ),
    "prefixes compacted in two ways": (
        Bucket(0, (0,), tokens=Compacted(0.3)),
        Bucket(0, (1,), tokens=Compacted(0.5)),
    ),
    "pages that do not hold what is shown": (
        Bucket(0, (0, 1), tokens=Window(0, 64, 66)),
    ),
    "more pages than are shown": (Bucket(0, (0, 1), tokens=Window(0, 128, 65)),),
    "a window in front of sealing": (
        Bucket(0, (0, 1), tokens=Window(0, 64)),
        Bucket(2, (0, 1), 0),
    ),
}


@pytest.mark.parametrize("buckets", WINDOWS.values(), ids=WINDOWS.keys())
def test_windows_that_cannot_be_are_refused(buckets: tuple[Bucket, ...]) -> None:
    with pytest.raises(KvlatheError):
        plan(*buckets, observation=None)


def test_a_window_survives_its_file_and_pages_of_any_format_may_leave() -> None:
    """Groups along the tokens lie in one page, which leaves whole."""
    window = Window(64, 128)
    sealed = plan(Bucket(0, (0, 1)), Bucket(3, (0, 1), 0, window), observation=None)
    exact = plan(Bucket(0, (0, 1), tokens=Window.of_tokens(100, 64)), observation=None)
    for made in (sealed, exact):
        assert CompressionPlan.from_json(made.to_json()) == made
        assert made.sharable and not made.recomputable and not made.ranked
    assert sealed.window(1) == window and exact.window(0).recent == 128
    wider = dataclasses.replace(sealed.buckets[1], tokens=Window(64, 192))
    other = dataclasses.replace(sealed, buckets=(sealed.buckets[0], wider))
    assert other.digest != sealed.digest


@pytest.mark.parametrize("buckets", REFUSED.values(), ids=REFUSED.keys())
def test_contradictory_rules_are_refused(buckets: tuple[Bucket, ...]) -> None:
    with pytest.raises(KvlatheError):
        plan(*buckets)


@pytest.mark.parametrize(
    "observation",
    [
        None,
        ObservationWindow(),
        ObservationWindow(recent=2.0),
        ObservationWindow(last=-1),
        ObservationWindow(last=1, pooling=2),
        ObservationWindow(last=1, noise=-1.0),
    ],
)
def test_probes_that_observe_nothing_or_cannot_be_are_refused(
    observation: ObservationWindow | None,
) -> None:
    with pytest.raises(KvlatheError):
        plan(observation=observation)


@given(st.lists(st.integers(1, 99), min_size=1, max_size=4), st.integers(0, 5000))
def test_shares_divide_every_token_and_never_take_one_back(
    weights: list[int], tokens: int
) -> None:
    shares = [w / sum(weights) for w in weights]
    now, then = split_tokens(shares, tokens), split_tokens(shares, tokens + 1)
    assert sum(now) == tokens and sum(then) == tokens + 1
    assert sorted(b - a for a, b in zip(now, then, strict=True)) == [0] * (
        len(shares) - 1
    ) + [1]
    assert all(
        math.isclose(n, s * tokens, abs_tol=len(shares))
        for n, s in zip(now, shares, strict=True)
    )
