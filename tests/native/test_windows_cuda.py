"""Windows on a GPU: ragged steps of prompt chunks, short ones and decode rows, through
the session's own calls, against float64 attention masked token by token and against the
CPU kernels."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvlathe.plan.formats import Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane
from kvlathe.plan.lives import KEEP, Window
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.native.cuda import CudaLibrary
from kvlathe.runtime.native.library import Native
from tests.native.library import Library
from tests.native.step16 import Step16, same_with_copies, step_of
from tests.native_cpu.library import Call
from tests.support.attend_cases import Case, plan_of

SLOW = settings(
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
RANKS = ((48, 64), (128, 16), (16, 128), (96, 80))
CODES = (Tier(8, 8), Tier(4, 4), Tier(2, 2, group_k=32, group_v=32))


@pytest.fixture(scope="module")
def cuda(library: Library) -> Iterator[CudaLibrary]:
    if not (torch.cuda.is_available() and library.has_cuda):
        pytest.skip("no GPU, or a library without CUDA kernels")
    yield CudaLibrary(Native.load(library.path))


@st.composite
def windows(draw: st.DrawFn, page: int) -> Window:
    pages = st.integers(0, 4)
    sink = draw(pages) * page
    if draw(st.booleans()):
        return Window(sink, draw(pages) * page)
    held = Window.of_tokens(draw(st.integers(1, 4 * page)), page)
    return Window(sink, held.recent, held.exact)


@st.composite
def windowed_plans(draw: st.DrawFn) -> CompressionPlan:
    """Lanes with a window in 16 bits or in codes, beside one that sees all."""
    page = draw(st.sampled_from([64, 128]))
    group = draw(st.integers(1, 512 // page))  # shared memory holds as many
    lanes = [Lane(0, h, 64, *ranks, projected=True) for h, ranks in enumerate(RANKS)]
    window = draw(windows(page))
    tier = draw(st.sampled_from([None, *CODES]))
    hot, cold = Tier(16, 16), () if tier is None else (tier,)
    groups = [Group((1,), hot), Group((0, 2, 3), hot, cold, window)]
    return plan_of(lanes, groups, 64, group, page)


@st.composite
def windowed_steps(draw: st.DrawFn) -> Case:
    plan = draw(windowed_plans())
    batch = draw(st.integers(1, 4))
    some = st.sampled_from([0, 1, 1, 3, 15, 16, 40, 130, 300])
    queries = draw(st.lists(some, min_size=batch, max_size=batch).filter(any))
    fresh = st.integers(0, 5 * plan.page_tokens)
    pages = st.integers(0, 6).map(lambda n: n * plan.page_tokens)
    lengths = [
        [draw(fresh if b.is_hot else pages) for b in plan.index.buckets]
        for _ in range(batch)
    ]
    return step_of(plan, queries, lengths, draw(st.integers(0, 99)))


def check(cuda: CudaLibrary, case: Case) -> None:
    step = Step16(case)
    out, memory = step.run(cuda, "cuda")
    assert np.isfinite(out).all()
    step.check_memory(memory)
    same_with_copies(cuda, case, out)
    step.check_out(out)


@SLOW
@given(case=windowed_steps())
def test_a_step_sees_the_tokens_of_its_windows_on_a_gpu(
    cuda: CudaLibrary, case: Case
) -> None:
    check(cuda, case)


@settings(SLOW, max_examples=10)
@given(case=windowed_steps())
def test_the_cpu_kernels_see_the_same(library: Library, case: Case) -> None:
    out, _ = Call(case).run(Native.load(library.path))
    np.testing.assert_allclose(out, case.expected()[0], rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("tier", [None, *CODES], ids=str)
@pytest.mark.parametrize("window", [Window(64, 128), Window.of_tokens(100, 64)])
def test_long_prompts_with_windows_are_near_float64(
    cuda: CudaLibrary, tier: Tier | None, window: Window
) -> None:
    """Many stages are skipped; blocks take several tiles; later rows of a tile see
    nothing of its first stage."""
    lanes = [Lane(0, h, 64, *ranks, projected=True) for h, ranks in enumerate(RANKS)]
    every = tuple(range(len(lanes)))
    cold = () if tier is None else (tier,)
    lengths = [[700], [0], [64], [5]]
    if cold:
        lengths = [[n, 640 * i] for i, (n,) in enumerate(lengths)]
    plan = plan_of(lanes, [Group(every, Tier(16, 16), cold, window)], 64, 4, 64)
    check(cuda, step_of(plan, [900, 1500, 1, 33], lengths, 2))


def test_a_window_that_holds_all_changes_nothing(cuda: CudaLibrary) -> None:
    """The kernels with windows give what those without give."""
    lanes = [Lane(0, h, 64, *ranks, projected=True) for h, ranks in enumerate(RANKS)]
    every = tuple(range(len(lanes)))
    outs: list[np.ndarray] = []
    for life in (KEEP, Window(0, 1 << 20)):
        plan = plan_of(lanes, [Group(every, Tier(16, 16), life=life)], 64, 4, 64)
        case = step_of(plan, [300, 1, 5], [[130], [70], [9]], 3)
        outs.append(Step16(case).run(cuda, "cuda")[0])
    np.testing.assert_allclose(outs[0], outs[1], atol=2e-3)
