"""Rows of one sequence that decode attention takes together (KVLATHE_BUNDLES) on a GPU:
ragged steps through the session's own calls, by float64, and each row as if alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.formats import Tier
from kvlathe.runtime.native.cuda import MAX_BUNDLE, CudaLibrary
from kvlathe.runtime.native.library import Native
from kvlathe.runtime.native.room import check_layers
from kvlathe.runtime.sessions.torch_cuda.attention import bundles
from tests.native.library import Library
from tests.native.step16 import Step16, step_of
from tests.native_cpu.test_bundles import CODES, code_steps, codes_plan
from tests.support.attend_cases import Case
from tests.support.mixed_cases import mixed_steps

SLOW = settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
FORMS = ((), *((tier,) for tier in CODES), (Tier(3, 3),), (Tier(8, 8), Tier(4, 4)))


@pytest.fixture(scope="module")
def cuda(library: Library) -> Iterator[CudaLibrary]:
    if not (torch.cuda.is_available() and library.has_cuda):
        pytest.skip("no GPU, or a library without CUDA kernels")
    yield CudaLibrary(Native.load(library.path))


def attended(cuda: CudaLibrary, case: Case, most: int) -> np.ndarray:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundles, "MOST_BUNDLED", most)
        patch.setattr(bundles.Bundling, "pays", lambda *_: True)
        step = Step16(case)
        out, memory = step.run(cuda, "cuda")
        step.check_memory(memory)
    assert out.size and np.isfinite(out).all()
    return out


def runs(cuda: CudaLibrary, case: Case) -> bool:
    """Whether a build for this GPU takes the plan: it refuses some of large pages."""
    try:
        check_layers(cuda, Step16(case).plan)
    except KvlatheError:
        return False
    return True


def check(cuda: CudaLibrary, case: Case) -> None:
    assume(runs(cuda, case))
    out, alone = (attended(cuda, case, most) for most in (MAX_BUNDLE, 1))
    expected = case.expected()[0]
    largest = np.abs(expected).max()
    assert np.abs(out - expected).mean() <= 2e-3 * largest
    assert np.abs(out - expected).max() <= 3e-2 * largest
    np.testing.assert_allclose(out, alone, atol=4e-3 * largest)


@SLOW
@given(case=mixed_steps([64, 128], 5, [1, 2, 3, 5, 8, 11, 20]))
def test_bundled_rows_over_every_form_of_codes_are_near_float64(
    cuda: CudaLibrary, case: Case
) -> None:
    check(cuda, case)


@SLOW
@given(case=code_steps())
def test_bundled_rows_over_plain_codes_are_near_float64(
    cuda: CudaLibrary, case: Case
) -> None:
    check(cuda, case)


@pytest.mark.parametrize("tiers", FORMS, ids=str)
@pytest.mark.parametrize("group", [1, 4, 7, 8])
def test_bundled_rows_after_long_contexts_are_near_float64(
    cuda: CudaLibrary, tiers: tuple[Tier, ...], group: int
) -> None:
    """Blocks share a bundle and its tiles; single rows and chunks beside them."""
    plan = codes_plan(tiers, 3, group, 64)
    sealed = [64 * 300, 0, 64 * 700, 64, 64 * 40]
    tails = [70, 1, 64, 3, 128]
    lengths = [[t, *[s] * len(tiers)] for t, s in zip(tails, sealed, strict=True)]
    check(cuda, step_of(plan, [4, 1, 8, 30, 11], lengths, 5))
