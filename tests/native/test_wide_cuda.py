"""Heads of more ranks than most kernels hold, and heads whose V is a part of their K, on
a GPU: ragged steps through the session's own calls, by float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvlathe.plan.formats import Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane
from kvlathe.plan.lives import KEEP, SEAL, Window
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.native.cuda import CudaLibrary
from kvlathe.runtime.native.library import Native
from tests.native.library import Library
from tests.native.problem import Problem
from tests.native.step16 import step_of
from tests.native.test_attend_decode import check as check_alone
from tests.native.test_bundles_cuda import check, runs
from tests.native_cpu.test_wide import LATENTS, PAGE, RANKS, wide_steps
from tests.support.attend_cases import plan_of
from tests.support.mixed_cases import HOT

SLOW = settings(
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
FORMS = (None, Tier(8, 8), Tier(4, 4), Tier(3, 2, "rank", "rank"))


@pytest.fixture(scope="module")
def cuda(library: Library) -> Iterator[CudaLibrary]:
    if not (torch.cuda.is_available() and library.has_cuda):
        pytest.skip("no GPU, or a library without CUDA kernels")
    yield CudaLibrary(Native.load(library.path))


@pytest.fixture(params=["warps", "teams"])
def teams(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the warps of a block share its tiles where they can."""
    least = "0" if request.param == "teams" else "1000000"
    monkeypatch.setenv("KVLATHE_TEAM_COLUMNS", least)


@pytest.mark.usefixtures("teams")
@pytest.mark.parametrize("ranks", RANKS)
@SLOW
@given(data=st.data())
def test_a_step_over_wide_ranks_is_masked_attention(
    cuda: CudaLibrary, ranks: str, data: st.DataObject
) -> None:
    check(cuda, data.draw(wide_steps(RANKS[ranks], once=False)))


@pytest.mark.usefixtures("teams")
@SLOW
@given(data=st.data())
def test_values_are_read_as_the_beginning_of_their_keys(
    cuda: CudaLibrary, data: st.DataObject
) -> None:
    check(cuda, data.draw(wide_steps(LATENTS, once=True)))


@pytest.mark.parametrize("tier", FORMS, ids=str)
@pytest.mark.parametrize("rank", [256, 512])
@pytest.mark.parametrize("group", [2, 8])
def test_long_contexts_of_wide_ranks_are_near_float64(
    cuda: CudaLibrary, tier: Tier | None, rank: int, group: int
) -> None:
    """Blocks share a sequence and its tiles; single rows and chunks beside them."""
    lanes = [Lane(0, head, 64, rank, rank, projected=True) for head in range(2)]
    cold = () if tier is None else (tier,)
    plan = plan_of(
        lanes, [Group((0, 1), HOT, cold, SEAL if cold else KEEP)], 64, group, PAGE
    )
    sealed, tails = [PAGE * 120, 0, PAGE * 300], [70, 1, 3000 if tier is None else 128]
    lengths = [[t, *[s] * len(cold)] for t, s in zip(tails, sealed, strict=True)]
    case = step_of(plan, [4, 1, 30], lengths, 5)
    if not runs(cuda, case):
        pytest.skip("this GPU has no room for such pages")
    check(cuda, case)


PROMPTS = {
    "whole": ((256, 256), (256, 256)),
    "gemma3": ((240, 240), (240, 240)),
    "mixed": ((256, 16), (144, 208), (32, 256)),
    "narrow": ((64, 64), (160, 128)),
}


@pytest.mark.parametrize("ranks", PROMPTS)
@pytest.mark.parametrize("group", [1, 2, 8])
@pytest.mark.parametrize("window", [None, 100])
def test_prompts_of_wide_ranks_are_masked_attention(
    cuda: CudaLibrary, ranks: str, group: int, window: int | None
) -> None:
    """In tiles, some of whose rows see nothing of a stage; single rows and short chunks
    beside them, with and without a past."""
    own = PROMPTS[ranks]
    lanes = [Lane(0, head, 64, *pair, projected=True) for head, pair in enumerate(own)]
    life = KEEP if window is None else Window.of_tokens(window, PAGE)
    groups = [Group(tuple(range(len(lanes))), HOT, (), life)]
    plan = scored_of(plan_of(lanes, groups, 64, group, PAGE), window)
    counts, lengths = [700, 1, 16, 65, 3], [[0], [500], [1000], [70], [0]]
    check(cuda, step_of(plan, counts, lengths, 5))


CODED = (
    Tier(8, 8),
    Tier(4, 4, group_k=32, group_v=32),
    Tier(3, 3),
    Tier(2, 2, "token", "token", 32, 64),
    Tier(4, 8, coding_k="normal"),
)


@pytest.mark.parametrize("tier", CODED, ids=str)
@pytest.mark.parametrize("ranks", PROMPTS)
@pytest.mark.parametrize("page", [64, 128])
def test_prompts_over_codes_of_wide_ranks_are_masked_attention(
    cuda: CudaLibrary, tier: Tier, ranks: str, page: int
) -> None:
    """A tile takes a slice of V of sealed pages, and all of K."""
    own = PROMPTS[ranks]
    lanes = [Lane(0, head, 64, *pair, projected=True) for head, pair in enumerate(own)]
    life = Window(page, 2 * page) if page == 128 else SEAL
    groups = [Group(tuple(range(len(lanes))), HOT, (tier,), life)]
    plan = plan_of(lanes, groups, 64, 2, page)
    counts = [300, 1, 16, 65, 3]
    lengths = [[0, 0], [5, 4 * page], [70, 3 * page], [1, page], [0, 0]]
    check(cuda, step_of(plan, counts, lengths, 5))


def scored_of(plan: CompressionPlan, window: int | None) -> CompressionPlan:
    """With bounded scores and sink logits, where there is a window."""
    model = dataclasses.replace(plan.model, softcap=20.0, sinks=True)
    return plan if window is None else dataclasses.replace(plan, model=model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("ranks", [(256, 256), (208, 144), (512, 512), (576, 496)])
def test_wide_rows_are_as_near_as_those_of_torch(
    library: Library, dtype: torch.dtype, ranks: tuple[int, int]
) -> None:
    """At most twice the error of plain torch in the same number format."""
    if not (torch.cuda.is_available() and library.has_cuda):
        pytest.skip("no GPU, or a library without CUDA kernels")
    problem = Problem(
        [[ranks, (16, 240)]], [0, 1, 64, 300, 65, 5000], dtype=dtype, device="cuda"
    )
    problem.spoil_unused_rows()
    check_alone(library, problem, times=2)
    assert np.isfinite(problem.o[0].float().cpu().numpy()).all()
