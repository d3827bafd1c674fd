"""Heads of more ranks than most kernels hold, and heads whose V is a part of their K,
through the CUDA kernels on a CPU (tests/native_cpu/emulated): decode attention of every
form, rows alone and bundled, prompts row by row."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane
from kvlathe.plan.lives import KEEP, SEAL, Life, Window
from kvlathe.runtime.native.cuda import BUNDLES, MAX_BUNDLE
from kvlathe.runtime.native.library import Native
from kvlathe.runtime.sessions.torch_cuda.attention import attend, bundles
from tests.native_cpu.test_many_buckets import emulated
from tests.support.attend_cases import Case, one_form, plan_of, scored
from tests.support.emulated import AttentionLibrary
from tests.support.mixed_cases import HOT, TIERS

pytestmark = pytest.mark.nightly
"""Their kernels are compiled first, which takes a minute."""

SOME = settings(
    deadline=None,
    max_examples=12,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
RANKS = {
    "256": ((240, 256), (144, 160), (256, 16), (32, 256), (256, 256)),
    "576": ((576, 512), (272, 48), (512, 512), (16, 320), (256, 496)),
}
LATENTS = ((80, 64), (576, 512), (48, 48), (256, 16), (144, 128))
"""Ranks of K and of V, its beginning."""
PAGE = 64


@pytest.fixture
def library(
    native: Native, kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> AttentionLibrary:
    monkeypatch.setattr(attend, "current_stream", lambda: 0)
    return AttentionLibrary(native, kernels)


@st.composite
def wide_steps(draw: st.DrawFn, ranks: Sequence[tuple[int, int]], once: bool) -> Case:
    """A ragged step of few lanes, uncompressed or sealed in any form. ``once``: V is a
    part of K."""
    group = draw(st.integers(1, 8) | st.just(20))
    count = draw(st.integers(1, 3))
    chosen = draw(st.lists(st.sampled_from(ranks), min_size=count, max_size=count))
    lanes = [
        Lane(0, head, 64, *own, "none" if once else "full", projected=not once)
        for head, own in enumerate(chosen)
    ]
    if once:
        lanes = [
            dataclasses.replace(lane, input_dim=lane.rank_k, values_in_keys=True)
            for lane in lanes
        ]
    tier = draw(st.sampled_from([None, *TIERS]))
    window: Life = Window.of_tokens(draw(st.integers(1, 3 * PAGE)), PAGE)
    life = draw(st.sampled_from([SEAL if tier else KEEP, window]))
    cold = () if tier is None else (one_form(tier) if once else tier,)
    every = tuple(range(count))
    head_dim = max(lane.input_dim for lane in lanes)
    plan = plan_of(lanes, [Group(every, HOT, cold, life)], head_dim, group, PAGE)
    plan = scored(plan, draw)
    batch = draw(st.integers(1, 3))
    rows = st.lists(st.integers(0, 4) | st.just(19), min_size=batch, max_size=batch)
    tails = st.integers(0, 2 * PAGE)
    sealed = st.integers(0, 3).map(lambda pages: pages * PAGE)
    lengths = [[draw(tails), *(draw(sealed) for _ in cold)] for _ in range(batch)]
    case = Case(plan, 0, draw(rows.filter(any)), lengths, draw(st.integers(0, 99)))
    case.scale = 0.05  # sharper scores would show the rounding of q', not a fault
    return case


def check(library: AttentionLibrary, case: Case) -> None:
    """The step with its rows bundled is that with each alone, and both are attention;
    so they are where the warps of a block are a team."""
    expected = case.expected()[0]
    largest = np.abs(expected).max()
    for most, team in ((1, "1000000"), (MAX_BUNDLE, "1000000"), (MAX_BUNDLE, "0")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("KVLATHE_TEAM_COLUMNS", team)
            patch.setattr(bundles, "MOST_BUNDLED", most)
            patch.setattr(bundles.Bundling, "pays", lambda *_: True)
            out = emulated(library, case, patch)
        bundled = bool(library.flags[-1] & BUNDLES)
        # There may be no room in shared memory for the queries of several rows.
        if most == 1 or (max(case.queries) > 1 and not case.plan.index.tiers[1:]):
            assert bundled == (most > 1)
        assert np.abs(out - expected).mean() <= 2e-3 * largest
        assert np.abs(out - expected).max() <= 3e-2 * largest


@pytest.mark.parametrize("ranks", RANKS)
@SOME
@given(data=st.data())
def test_a_step_over_wide_ranks_is_masked_attention(
    library: AttentionLibrary, ranks: str, data: st.DataObject
) -> None:
    check(library, data.draw(wide_steps(RANKS[ranks], once=False)))


@SOME
@given(case=wide_steps(LATENTS, once=True))
def test_values_are_read_as_the_beginning_of_their_keys(
    library: AttentionLibrary, case: Case
) -> None:
    check(library, case)
