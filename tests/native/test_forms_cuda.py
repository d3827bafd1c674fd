"""Codes of every form on a GPU: ragged steps of prompt chunks and decode rows over
sealed pages, through the session's own calls, by float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvlathe.plan.formats import Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane
from kvlathe.plan.lives import SEAL, Window
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.native.cuda import CudaLibrary
from kvlathe.runtime.native.library import Native
from tests.native.library import Library
from tests.native.step16 import Step16, same_with_copies, step_of
from tests.native_cpu.library import Call
from tests.support.attend_cases import Case, plan_of
from tests.support.mixed_cases import FLOATS

SLOW = settings(
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
RANKS = ((48, 64), (128, 16), (16, 128), (112, 80))
NORMAL: dict[str, Any] = {"coding_k": "normal", "coding_v": "normal"}
TIERS = (
    Tier(3, 3),
    Tier(3, 3, group_k=32, group_v=32),
    Tier(4, 4, "rank", "rank", **NORMAL),
    Tier(3, 3, "rank", "rank", 48, 32, **NORMAL),
    Tier(2, 2, "rank", "rank", **NORMAL),
    Tier(4, 4, "rank", "rank", coding_v="normal"),
    Tier(8, 8, "token", "rank"),
    Tier(4, 4, "token", "rank", 32, 48),
    Tier(2, 2, "token", "rank", 16, 32),
    Tier(3, 3, "token", "token", 64, 16),
    Tier(4, 4, "token", "token", 32, 64),
    Tier(4, 4, "rank", "rank", 48, 32),
    Tier(8, 2, "rank", "token"),
    Tier(4, 8, "token", "rank"),
    Tier(16, 4, "rank", "rank"),
    Tier(2, 16, "token", "rank"),
    Tier(3, 2, "token", "rank", coding_v="normal"),
    *FLOATS,
)


@pytest.fixture(scope="module")
def cuda(library: Library) -> Iterator[CudaLibrary]:
    if not (torch.cuda.is_available() and library.has_cuda):
        pytest.skip("no GPU, or a library without CUDA kernels")
    yield CudaLibrary(Native.load(library.path))


def sealed_plan(
    tiers: tuple[Tier, ...], page: int, group: int, window: Window | None = None
) -> CompressionPlan:
    """Two lanes in pages of each tier, behind one 16-bit bucket for each."""
    count = len(tiers)
    lanes = [
        Lane(0, h, 64, *RANKS[h % len(RANKS)], projected=True) for h in range(2 * count)
    ]
    groups = [
        Group((2 * i, 2 * i + 1), Tier(16, 16), (tier,), window or SEAL)
        for i, tier in enumerate(tiers)
    ]
    return plan_of(lanes, groups, 64, group, page)


@st.composite
def sealed_steps(draw: st.DrawFn) -> Case:
    page = draw(st.sampled_from([64, 128]))
    tiers = draw(st.lists(st.sampled_from(TIERS), min_size=1, max_size=2))
    window = draw(
        st.sampled_from([None, Window(page, 2 * page), Window.of_tokens(90, page)])
    )
    plan = sealed_plan(tuple(tiers), page, draw(st.integers(1, 512 // page)), window)
    batch = draw(st.integers(1, 4))
    some = st.sampled_from([0, 1, 1, 5, 16, 47, 200])
    queries = draw(st.lists(some, min_size=batch, max_size=batch).filter(any))
    lengths: list[list[int]] = []
    for _ in range(batch):
        sealed = draw(st.integers(0, 6)) * page
        tail = draw(st.integers(0, 2 * page))
        lengths.append([tail, *[sealed] * len(tiers)])
    return step_of(plan, queries, lengths, draw(st.integers(0, 99)))


def check(cuda: CudaLibrary, case: Case) -> None:
    step = Step16(case)
    out, memory = step.run(cuda, "cuda")
    step.check_memory(memory)
    same_with_copies(cuda, case, out)
    expected = case.expected()[0]
    largest = np.abs(expected).max()
    assert out.size and np.isfinite(out).all()
    assert np.abs(out - expected).mean() <= 2e-3 * largest
    assert np.abs(out - expected).max() <= 3e-2 * largest


@SLOW
@given(case=sealed_steps())
def test_a_step_attends_every_form(cuda: CudaLibrary, case: Case) -> None:
    check(cuda, case)


@pytest.mark.slow
@settings(SLOW, max_examples=12)
@given(case=sealed_steps())
def test_the_cpu_kernels_attend_the_same(library: Library, case: Case) -> None:
    same_on_the_cpu(library, case)


@pytest.mark.nightly
@SLOW
@given(case=sealed_steps())
def test_the_cpu_kernels_attend_many_steps_the_same(
    library: Library, case: Case
) -> None:
    same_on_the_cpu(library, case)


def same_on_the_cpu(library: Library, case: Case) -> None:
    out, _ = Call(case).run(Native.load(library.path))
    np.testing.assert_allclose(out, case.expected()[0], rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("tier", TIERS, ids=str)
@pytest.mark.parametrize("page", [64, 256])
def test_attention_over_every_form_of_codes_takes_long_contexts(
    cuda: CudaLibrary, tier: Tier, page: int
) -> None:
    """Blocks share a sequence, tiles have one page or two, chunks take many stages."""
    plan = sealed_plan((tier,), page, 512 // page)  # what shared memory holds
    lengths = [[70, 20 * page], [1, 0], [page, 80 * page], [0, page]]
    check(cuda, step_of(plan, [500, 1, 1, 17], lengths, 5))
