"""Rows of one sequence that decode attention takes together (KVLATHE_BUNDLES): each as if
it were alone, through the CUDA kernels on a CPU (tests/native_cpu/emulated)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvlathe.base.kernel_limits import kernel_limits
from kvlathe.plan.formats import Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane
from kvlathe.plan.lives import KEEP, SEAL, Life, Window
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.native.cuda import BUNDLES, MAX_BUNDLE
from kvlathe.runtime.native.library import Native
from kvlathe.runtime.sessions.torch_cuda.attention import attend, bundles
from tests.native.step16 import step_of
from tests.native_cpu.test_many_buckets import emulated
from tests.support.attend_cases import Case, plan_of
from tests.support.emulated import AttentionLibrary
from tests.support.mixed_cases import mixed_steps
from tests.support.runtime_cases import F8

pytestmark = pytest.mark.nightly
"""Their kernels alone take half a minute to compile."""

SOME = settings(
    deadline=None,
    max_examples=8,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
KERNEL_LIMITS = kernel_limits()
RANKS = ((16, 96), (112, 48), (128, 128), (80, 16))
CODES = (Tier(8, 8), Tier(4, 4), Tier(2, 2), Tier(4, 4, group_v=32))


@pytest.fixture
def library(
    native: Native, kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> AttentionLibrary:
    monkeypatch.setattr(attend, "current_stream", lambda: 0)
    monkeypatch.setattr(bundles.Bundling, "pays", lambda *_: True)
    return AttentionLibrary(native, kernels)


def attended(library: AttentionLibrary, case: Case, most: int) -> np.ndarray:
    """o of the case's rows, as many of a sequence at a time as ``most``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundles, "MOST_BUNDLED", most)
        out = emulated(library, case, patch)
    heads = case.plan.model.query_heads
    several = max(case.queries) > 1 and most > 1 and heads <= KERNEL_LIMITS["kMaxLanes"]
    assert bool(library.flags[-1] & BUNDLES) == several
    return out


def check(library: AttentionLibrary, case: Case, close: float) -> None:
    out = attended(library, case, MAX_BUNDLE)
    expected = case.expected()[0]
    largest = np.abs(expected).max()
    assert np.abs(out - expected).mean() <= close * largest
    assert np.abs(out - expected).max() <= 15 * close * largest


@SOME
@given(case=mixed_steps([64], 5, [1, 2, 3, 5, 8, 11]))
def test_bundles_over_every_form_are_masked_attention(
    library: AttentionLibrary, case: Case
) -> None:
    """Windows too: exact ones hide other tokens of each row, and rows that see other
    pages are attended alone."""
    check(library, case, 2e-3)


def codes_plan(
    tiers: Sequence[Tier], lanes: int, group: int, page: int, window: bool = False
) -> CompressionPlan:
    """Lanes in one 16-bit bucket, and behind it in pages of the tiers in turn."""
    every = tuple(range(lanes))
    heads = [Lane(0, h, 64, *RANKS[h % len(RANKS)], projected=True) for h in every]
    life: Life = Window(page, page) if window else (SEAL if tiers else KEEP)
    count, hot = len(tiers), Tier(16, 16)
    groups = [Group(every[i::count], hot, (tiers[i],), life) for i in range(count)]
    return plan_of(heads, groups or [Group(every, hot, life=life)], 64, group, page)


@st.composite
def code_steps(draw: st.DrawFn) -> Case:
    tiers = draw(st.sampled_from([(), *((tier,) for tier in CODES)]))
    page, group = draw(st.sampled_from([64, 128])), draw(st.integers(1, 8))
    lanes, window = draw(st.integers(1, 3)), draw(st.booleans())
    plan = codes_plan(tiers, lanes, group, page, window)
    batch = draw(st.integers(1, 3))
    rows = st.lists(st.integers(1, 11), min_size=batch, max_size=batch)
    queries = draw(rows.filter(lambda rows: max(rows) > 1))
    lengths: list[list[int]] = []
    for _ in range(batch):
        sealed = draw(st.integers(0, 4)) * page
        tail = draw(st.integers(0, 2 * page))
        lengths.append([tail, *[sealed] * len(tiers)])
    return step_of(plan, queries, lengths, draw(st.integers(0, 99)))


FULL = [step_of(codes_plan([x], 2, 4, 64), [4, 1, 8], [[70, 256], [1, 64], [60, 0]], 5) for x in CODES]  # fmt: skip


@SOME
@given(case=code_steps())
@example(case=FULL[0])
@example(case=FULL[1])
@example(case=FULL[2])
@example(case=FULL[3])
def test_bundles_over_codes_are_masked_attention(
    library: AttentionLibrary, case: Case
) -> None:
    """Products of codes round queries and shares to 8 bits."""
    check(library, case, 1e-2 if len(case.plan.index.tiers) > 1 else 2e-3)


@pytest.mark.parametrize("tier", [*CODES, F8], ids=str)
def test_rows_do_not_depend_on_their_bundle(
    library: AttentionLibrary, tier: Tier
) -> None:
    """A row of a bundle has the answer that it has in a smaller one."""
    plan = codes_plan([tier], 2, 3, 64)
    case = step_of(plan, [7, 2], [[40, 192], [64, 64]], 3)
    out, smaller = (attended(library, case, most) for most in (MAX_BUNDLE, 2))
    np.testing.assert_allclose(out, smaller, rtol=2e-3, atol=2e-3 * np.abs(out).max())
