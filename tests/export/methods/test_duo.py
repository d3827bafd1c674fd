"""duo: the heads that lose most see everything, as many as were asked for; where all do,
nothing is changed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlathe.base.errors import KvlatheError
from kvlathe.export.calibration.stats import Stats
from kvlathe.export.methods import duo, window
from kvlathe.export.methods.composition import compose
from kvlathe.export.methods.options import Options, parse
from kvlathe.export.methods.registry import with_heads
from kvlathe.plan.lives import SEAL, Window
from tests.support.method_cases import FORM

HEADS = 2


def whole(request: str) -> set[tuple[int, int]]:
    """The heads that a request for windows names."""
    (one,) = parse(request)
    assert one.name == "window"
    return set(window.plan(one.options, 64).whole_heads)


@given(
    losses=st.lists(st.floats(0, 9), min_size=HEADS, max_size=12).filter(
        lambda losses: len(losses) % HEADS == 0
    ),
    share=st.floats(0, 1),
    more=st.floats(0, 1),
)
def test_the_heads_that_lose_most_see_everything(
    losses: list[float], share: float, more: float
) -> None:
    few, many = sorted((share, more))
    kept = whole(duo.named({"share": f"{few:f}"}, losses, HEADS))
    larger = whole(duo.named({"share": f"{many:f}"}, losses, HEADS))
    assert kept <= larger
    least = float(f"{few:f}") * len(losses)
    assert least - 1e-6 <= len(kept) < least + 1
    of = {divmod(lane, HEADS): lost for lane, lost in enumerate(losses)}
    others = [of[head] for head in of.keys() - kept]
    assert min((of[head] for head in kept), default=9) >= max(others, default=0)


def test_where_every_head_sees_everything_nothing_changes(made_up: Stats) -> None:
    """The plan is that of plain attention, and with none that of a window."""
    shape = made_up.shape
    losses = np.arange(shape.layers * shape.kv_heads).tolist()
    plain, _ = compose("none", shape, True, None, Options(), FORM)
    request = with_heads("duo:share=1", losses, shape.kv_heads)
    same, _ = compose(request, shape, True, None, Options(), FORM)
    assert same.groups == plain.groups and same.lanes == plain.lanes
    request = with_heads("duo:share=0,sink=0,recent=100", losses, shape.kv_heads)
    none, _ = compose(request, shape, True, None, Options(), FORM)
    (group,) = none.groups
    assert group.life == Window(0, 128)


def test_it_composes_with_formats_and_keeps_their_options(made_up: Stats) -> None:
    shape = made_up.shape
    losses = [0.0] * (shape.layers * shape.kv_heads)
    losses[1] = 1.0
    request = with_heads("duo:share=0.05+hack:bits=4", losses, shape.kv_heads)
    assert request.endswith("+hack:bits=4")
    plan, _ = compose(request, shape, True, None, Options(), FORM)
    lives = {group.life: group.lanes for group in plan.groups}
    assert lives[SEAL] == (1,)
    assert lives[Window(window.SINK, window.RECENT)] == (0, *range(2, len(losses)))


@pytest.mark.parametrize("text", ["2", "-0.1", "many", "nan"])
def test_a_share_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(KvlatheError, match="share of the heads"):
        duo.plan({"share": text}, 64)


def test_it_is_not_planned_without_the_model(made_up: Stats) -> None:
    with pytest.raises(KvlatheError, match="it measures the model"):
        compose("duo", made_up.shape, True, made_up, Options(), FORM)
