"""Plans with lives: what is refused, and that files and digests carry them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.formats import Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane, ModelShape
from kvlathe.plan.lives import (
    KEEP,
    LIVES,
    SEAL,
    Age,
    Budget,
    Compact,
    Divide,
    Life,
    SealAfter,
    Window,
    split_tokens,
)
from kvlathe.plan.plan import CompressionPlan
from kvlathe.plan.token_score import ObservationWindow

SHAPE = ModelShape(2, 2, 1, 32, 32, 64, 512)
LANES = tuple(Lane(i, 0, 32, 32, 32) for i in range(2))
BOTH = (0, 1)
HOT, FOUR, TWO, CHANNELS = (
    Tier(32, 32),
    Tier(4, 4, "token", "rank"),
    Tier(2, 2, "rank", "rank"),
    Tier(4, 4),
)
OBSERVATION = ObservationWindow(
    recent=0.05, random=0.05, special=(3, 5), normalized=True
)
SPLIT = Group(BOTH, HOT, (FOUR, TWO), Divide((0.6, 0.4)))
WHOLE = Group(BOTH, HOT)
SEALED = Group(BOTH, HOT, (FOUR,), SEAL)


def plan(
    *groups: Group, score: ObservationWindow | None = OBSERVATION
) -> CompressionPlan:
    return CompressionPlan(SHAPE, LANES, groups or (SPLIT,), score=score)


def hot(*lives: Life) -> tuple[Group, ...]:
    """A hot group for each life: of both lanes, or of one each."""
    lanes = [BOTH] if len(lives) == 1 else [(0,), (1,)]
    return tuple(
        Group(own, HOT, life=life) for own, life in zip(lanes, lives, strict=True)
    )


def test_a_plan_with_a_probe_survives_its_file_and_the_probe_is_part_of_the_digest() -> (
    None
):
    made = plan()
    assert CompressionPlan.from_json(made.to_json()) == made
    other = dataclasses.replace(
        made, score=dataclasses.replace(OBSERVATION, random=0.1)
    )
    assert other.digest != made.digest
    plain = plan(WHOLE, score=None)
    assert CompressionPlan.from_json(plain.to_json()) == plain


def test_facts_that_a_scheduler_needs_follow_from_the_lives() -> None:
    kinds = {
        "one group": plan(WHOLE, score=None),
        "sealed": plan(SEALED, score=None),
        "split": plan(),
    }
    found = {
        name: (made.index.sharable, made.index.recomputable)
        for name, made in kinds.items()
    }
    assert found == {
        "one group": (True, True),
        "sealed": (True, False),
        "split": (False, False),
    }
    budget = plan(Group((0,), HOT, (TWO,), SEAL), Group((1,), HOT, life=Budget(64)))
    assert [[b.scored for b in made.index.buckets] for made in (plan(), budget)] == [
        [True, False, False],
        [False, False, True],
    ]


def test_every_kind_of_life_is_in_the_file_form() -> None:
    for (kind, cls), made in zip(LIVES.items(), ONES, strict=True):
        assert type(made) is cls and made.kind == kind


ONES = (
    KEEP,
    SEAL,
    SealAfter(64),
    Age(64, 128),
    Window(0, 64),
    Budget(64),
    Divide((1.0,)),
    Compact(0.5),
)


REFUSED: dict[str, Callable[[], tuple[Group, ...]]] = {
    "no share": lambda: (Group(BOTH, HOT, (FOUR, TWO), Divide((1.0, 0.0))),),
    "no shares": lambda: (Group(BOTH, HOT, life=Divide(())),),
    "shares that do not sum to 1": lambda: (Group(BOTH, HOT, (FOUR,), Divide((0.6,))),),
    "more tiers than shares": lambda: (
        Group(BOTH, HOT, (FOUR, TWO, TWO), Divide((0.6, 0.4))),
    ),
    "a hot group that divides": lambda: hot(Divide((0.6, 0.4))),
    "a hot group that seals": lambda: hot(SEAL),
    "first tokens that are no whole pages": lambda: (
        Group(BOTH, HOT, (FOUR,), SealAfter(100)),
    ),
    "no first tokens": lambda: (Group(BOTH, HOT, (FOUR,), SealAfter(0)),),
    "newest tokens that are no whole pages": lambda: (
        Group(BOTH, HOT, (FOUR, TWO), Age(0, 100)),
    ),
    "no newest tokens": lambda: (Group(BOTH, HOT, (FOUR, TWO), Age(64, 0)),),
    "newest tokens in a tier of all": lambda: (Group(BOTH, HOT, (FOUR,), Age(64, 64)),),
    "a cold tier that is kept": lambda: (Group(BOTH, HOT, (FOUR,), KEEP),),
    "two cold tiers that are sealed": lambda: (Group(BOTH, HOT, (FOUR, TWO), SEAL),),
    "new tokens in codes": lambda: (Group(BOTH, FOUR),),
    "a lane in two groups": lambda: (WHOLE, Group((0,), HOT)),
    "a lane twice in a group": lambda: (Group((0, 0, 1), HOT),),
    "a lane in no group": lambda: (Group((0,), HOT),),
    "no group": lambda: (Group((), HOT),),
    "two hot formats": lambda: (Group((0,), HOT), Group((1,), Tier(16, 16))),
    "a budget that is no whole pages": lambda: hot(Budget(100)),
    "more recent than the budget": lambda: hot(Budget(64, recent=65)),
    "a budget with groups along the tokens": lambda: (
        Group(BOTH, HOT, (CHANNELS,), Budget(64)),
    ),
    "an observation window and no life that chooses": lambda: (WHOLE,),
    "a window beside an observation window": lambda: hot(Window(64, 64), Budget(64)),
}
WINDOWS: dict[str, Callable[[], tuple[Group, ...]]] = {
    "a window that is no whole pages": lambda: hot(Window(0, 100)),
    "a sink that is no whole pages": lambda: hot(Window(9, 64)),
    "a window without end": lambda: hot(Window(0, 1 << 30)),
    "a window below 0": lambda: hot(Window(0, 0, -1)),
    "prefixes that keep nothing": lambda: hot(Compact(0.0)),
    "prefixes compacted beside a window": lambda: hot(Window(64, 64), Compact(0.5)),
    "prefixes compacted in two ways": lambda: hot(Compact(0.3), Compact(0.5)),
    "pages that do not hold what is shown": lambda: hot(Window(0, 64, 66)),
    "more pages than are shown": lambda: hot(Window(0, 128, 65)),
}


@pytest.mark.parametrize("groups", WINDOWS.values(), ids=WINDOWS.keys())
def test_windows_that_cannot_be_are_refused(
    groups: Callable[[], tuple[Group, ...]],
) -> None:
    with pytest.raises(KvlatheError):
        plan(*groups(), score=None)


def test_a_window_survives_its_file_and_pages_of_any_format_may_leave() -> None:
    """Groups along the tokens lie in one page, which leaves whole."""
    window = Window(64, 128)
    sealed = plan(Group(BOTH, HOT, (CHANNELS,), window), score=None)
    exact = plan(*hot(Window.of_tokens(100, 64)), score=None)
    for made in (sealed, exact):
        assert CompressionPlan.from_json(made.to_json()) == made
        assert made.index.sharable and not made.index.recomputable
        assert not made.index.ranked
    assert sealed.index.sight(1) == window.sees
    assert exact.index.sight(0).recent == 128
    other = plan(Group(BOTH, HOT, (CHANNELS,), Window(64, 192)), score=None)
    assert other.digest != sealed.digest


@pytest.mark.parametrize("groups", REFUSED.values(), ids=REFUSED.keys())
def test_contradictory_lives_are_refused(
    groups: Callable[[], tuple[Group, ...]],
) -> None:
    with pytest.raises(KvlatheError):
        plan(*groups())


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
        plan(score=observation)


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
