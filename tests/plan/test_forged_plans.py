"""A plan file that somebody damaged or forged is refused in one KvlatheError, before
anything is allocated for it."""

from __future__ import annotations

import copy
import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.formats import Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane, ModelShape
from kvlathe.plan.layer_table import layer_table
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.lives import Budget, Divide
from kvlathe.plan.plan import CompressionPlan
from kvlathe.plan.token_score import ObservationWindow

SHAPE = ModelShape(2, 4, 2, 32, 128, 256, 2048)
LANES = tuple(
    Lane(i, h, 32, 32, 16, projected=True) for i in range(2) for h in range(2)
)
EVERY = (0, 1, 2, 3)
HOT, COLD = Tier(16, 16), Tier(4, 4, "rank", "rank", 32, 16)
PLAIN = CompressionPlan(SHAPE, LANES, (Group(EVERY, HOT),))
SEALED = CompressionPlan(
    SHAPE,
    LANES,
    (
        Group(EVERY[:2], HOT, (COLD,), Budget(128, 8)),
        Group(EVERY[2:], HOT, (COLD, COLD), Divide((0.5, 0.5))),
    ),
    score=ObservationWindow(last=8, random=0.1),
)
PLANS = [json.loads(plan.to_json()) for plan in (PLAIN, SEALED)]
GARBAGE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.sampled_from([0, -1, 1, 16, 1 << 31, 1 << 40, 10**30, 0.5, 1e308]),
    st.sampled_from([float("nan"), float("inf"), float("-inf")]),
    st.text(max_size=4),
    st.lists(st.integers(-2, 9), max_size=4),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)
MOST_BYTES = 16 << 20


def places(value: object, path: tuple[str | int, ...] = ()) -> list[tuple]:
    """The path of every value in nested lists and mappings."""
    found: list[tuple] = [path] if path else []
    if isinstance(value, dict):
        items = list(value.items())
    else:
        items = list(enumerate(value)) if isinstance(value, list) else []
    for key, inner in items:
        found += places(inner, (*path, key))
    return found


@st.composite
def forged(draw: st.DrawFn) -> str:
    """A real plan with one to three values replaced or removed."""
    plan = copy.deepcopy(draw(st.sampled_from(PLANS)))
    for _ in range(draw(st.integers(1, 3))):
        *path, last = draw(st.sampled_from(places(plan)))
        holder = plan
        for key in path:
            holder = holder[key]
        if draw(st.integers(0, 4)):
            holder[last] = draw(GARBAGE)
        else:
            del holder[last]
    return json.dumps(plan)


def judge(text: str) -> None:
    """Refused in words; or a plan whose layout can be computed. Little memory."""
    tracemalloc.start()
    try:
        plan = CompressionPlan.from_json(text)
        assert CacheLayout(plan).bytes_for(100) >= 0
        for layer in range(plan.model.layers):
            if plan.index.active(layer):
                layer_table(CacheLayout(plan), layer)
    except KvlatheError as refusal:
        assert refusal.fact and refusal.reason
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MOST_BYTES


@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_that_nobody_touched_is_read(plan: dict) -> None:
    assert json.loads(CompressionPlan.from_json(json.dumps(plan)).to_json()) == plan


CHECKS: list[Any] = list(HealthCheck)


@settings(max_examples=400, suppress_health_check=CHECKS)
@given(forged())
def test_a_forged_plan_is_one_refusal(text: str) -> None:
    judge(text)


@pytest.mark.nightly
@settings(max_examples=20_000, suppress_health_check=CHECKS)
@given(forged())
def test_twenty_thousand_forged_plans(text: str) -> None:
    judge(text)


WRONG: tuple[object, ...] = (
    None, True, -1, 0, 1 << 31, 1 << 70, 10**30, 0.5, 1e308, float("nan"),
    float("-inf"), "", "x", [], [-1], {}, {"a": 1},
)  # fmt: skip


@pytest.mark.parametrize("place", places(PLANS[1]), ids=str)
@pytest.mark.filterwarnings("error")
def test_any_one_value_that_is_wrong_is_one_refusal(
    place: tuple[str | int, ...],
) -> None:
    """Every value of a plan with each kind of part is replaced by each kind of
    garbage."""
    for wrong in WRONG:
        plan = copy.deepcopy(PLANS[1])
        holder: Any = plan
        for key in place[:-1]:
            holder = holder[key]
        holder[place[-1]] = wrong
        judge(json.dumps(plan))


@pytest.mark.parametrize("text", ["", "[]", "7", "null", "[" * 100_000, '{"a": 1'])
def test_text_that_is_no_plan_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(KvlatheError):
        CompressionPlan.from_json(text)
