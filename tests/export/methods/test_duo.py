"""duo: the heads that lose most see everything, as many as were asked for; where all do,
nothing is changed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlathe.base.errors import KvlatheError
from kvlathe.export.calibration.stats import Stats
from kvlathe.export.methods.composition import compose
from kvlathe.export.methods.compression import UNCOMPRESSED, parse
from kvlathe.export.methods.options import RankOptions
from kvlathe.export.methods.window import WindowOptions
from kvlathe.plan.lives import SEAL, Window
from tests.support.method_cases import FORM

HEADS = 2


def whole(share: float, losses: list[float]) -> set[tuple[int, int]]:
    """The heads that are named."""
    asked = parse(f"duo:share={share:f}").with_heads(losses, HEADS)
    (one,) = parse(asked.text).methods
    assert one == asked.methods[0] and isinstance(one.options, WindowOptions)
    return set(one.options.whole)


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
    kept = whole(few, losses)
    larger = whole(many, losses)
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
    plain, _ = compose(UNCOMPRESSED, shape, True, None, RankOptions(), FORM)
    named = parse("duo:share=1").with_heads(losses, shape.kv_heads)
    same, _ = compose(named, shape, True, None, RankOptions(), FORM)
    assert same.groups == plain.groups and same.lanes == plain.lanes
    named = parse("duo:share=0,sink=0,recent=100").with_heads(losses, shape.kv_heads)
    none, _ = compose(named, shape, True, None, RankOptions(), FORM)
    (group,) = none.groups
    assert group.life == Window(0, 128)


def test_duo_composes_with_formats_and_keeps_their_options(made_up: Stats) -> None:
    shape = made_up.shape
    losses = [0.0] * (shape.layers * shape.kv_heads)
    losses[1] = 1.0
    named = parse("duo:share=0.05+hack:bits=4").with_heads(losses, shape.kv_heads)
    assert named.text == "window:whole=0.1+hack:bits=4"
    plan, _ = compose(named, shape, True, None, RankOptions(), FORM)
    lives = {group.life: group.lanes for group in plan.groups}
    assert lives[SEAL] == (1,)
    assert lives[Window(64, 256)] == (0, *range(2, len(losses)))


@pytest.mark.parametrize("text", ["2", "-0.1", "many", "nan"])
def test_a_share_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(KvlatheError, match="share of the heads"):
        parse(f"duo:share={text}")


def test_duo_is_not_planned_without_the_model(made_up: Stats) -> None:
    with pytest.raises(KvlatheError, match="it measures the model"):
        compose(parse("duo"), made_up.shape, True, made_up, RankOptions(), FORM)
