"""Heads of one layer in many buckets on a GPU: formats and windows mixed behind one hot
bucket. Ragged steps of prompt chunks, short ones and decode rows, through the session's own
calls, against float64 attention masked token by token."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from kvlathe.plan.lives import SEAL, Life, Window
from kvlathe.runtime.native.cuda import CudaLibrary
from kvlathe.runtime.native.library import Native
from kvlathe.runtime.sessions.torch_cuda.attention.attend import Attention
from kvlathe.runtime.sessions.torch_cuda.attention.spread import LayerCalls
from tests.native.library import Library
from tests.native.step16 import Step16, same_with_copies, step_of
from tests.native_cpu.library import Call
from tests.support.attend_cases import Case
from tests.support.mixed_cases import (
    TIERS,
    aged_steps,
    lengths_of,
    mixed_plan,
    mixed_steps,
)

SLOW = settings(
    deadline=None,
    max_examples=15,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
STEPS = mixed_steps([64, 128], 16, [0, 1, 1, 3, 15, 16, 40, 130, 300])


@pytest.fixture(scope="module")
def cuda(library: Library) -> Iterator[CudaLibrary]:
    if not (torch.cuda.is_available() and library.has_cuda):
        pytest.skip("no GPU, or a library without CUDA kernels")
    yield CudaLibrary(Native.load(library.path))


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
@given(case=STEPS)
def test_a_step_over_many_buckets(cuda: CudaLibrary, case: Case) -> None:
    check(cuda, case)


@SLOW
@given(case=aged_steps([64, 128], [0, 1, 1, 3, 15, 16, 40, 130, 300]))
def test_pages_that_wait_are_not_read(cuda: CudaLibrary, case: Case) -> None:
    """Newest tokens in one format, older ones in another."""
    check(cuda, case)


@pytest.mark.nightly
@settings(SLOW, max_examples=6)
@given(case=aged_steps([64], [0, 1, 1, 3, 16, 40]))
def test_the_cpu_kernels_do_not_read_pages_that_wait(
    library: Library, case: Case
) -> None:
    same_on_the_cpu(library, case)


@settings(SLOW, max_examples=6)
@given(case=mixed_steps([64], 8, [0, 1, 1, 3, 16, 40]))
def test_the_cpu_kernels_attend_the_same(library: Library, case: Case) -> None:
    same_on_the_cpu(library, case)


@pytest.mark.nightly
@SLOW
@given(case=STEPS)
def test_the_cpu_kernels_attend_large_steps_the_same(
    library: Library, case: Case
) -> None:
    same_on_the_cpu(library, case)


def same_on_the_cpu(library: Library, case: Case) -> None:
    """By float64: what that takes is most of the time."""
    out, _ = Call(case).run(Native.load(library.path))
    np.testing.assert_allclose(out, case.expected()[0], rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("page", [64, 128])
def test_long_contexts_in_as_many_buckets_as_there_can_be(
    cuda: CudaLibrary, page: int
) -> None:
    """Blocks share pairs and take several, prompts skip stages: each head sees its own
    window of one hot bucket."""
    lives: list[Life] = [SEAL, Window(page, 2 * page), Window(0, page)]
    lives.append(Window.of_tokens(100, page))
    kinds = [(tier, life) for tier in TIERS[:7] for life in lives]
    plan = mixed_plan(kinds, range(len(kinds)), page, 256 // page)
    assert len(plan.index.parts) == 32
    kept = {life: (2 + i) * page for i, life in enumerate(lives[1:])}
    lengths = [
        lengths_of(plan, tail, whole * page, kept)
        for tail, whole in ((70, 40), (1, 90), (0, 3), (page, 20))
    ]
    check(cuda, step_of(plan, [400, 1, 1, 17], lengths, 5))
    check(cuda, step_of(plan, [1, 1, 1, 1], lengths, 6))


def test_a_step_of_few_rows_is_planned_as_it_is_attended(cuda: CudaLibrary) -> None:
    """Decodes alone, many sequences: planned calls give the same bits as unplanned
    ones."""
    lives: list[Life] = [SEAL, Window(64, 128)]
    kinds = [(tier, life) for tier in TIERS[:13] for life in lives]
    plan = mixed_plan(kinds, range(len(kinds)), 64, 2)
    lengths = [
        lengths_of(plan, 1 + i, 64 * (i % 9), {lives[1]: 64 * (i % 4)})
        for i in range(40)
    ]
    case = step_of(plan, [1] * 40, lengths, 7)
    planned = Step16(case).run(cuda, "cuda")[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Attention, "plan_calls", without_plans)
        alone = Step16(case).run(cuda, "cuda")[0]
    np.testing.assert_array_equal(planned, alone)


def without_plans(attention: Attention, calls: LayerCalls) -> None:
    for call in calls.calls:
        call.plan = None
