"""Append and seal on the GPU against references: the float64 step, and
kvlathe/plan/codec.py bit for bit."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.formats import Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane
from kvlathe.runtime.native.cuda import CudaLibrary, PageKernels, SealPage
from kvlathe.runtime.native.library import Native
from tests.native.library import Library
from tests.native.step16 import Step16
from tests.support.attend_cases import Case, cases, plan_of
from tests.support.sealed_cases import TIERS, pool_and_sealed, sealing

SLOW = settings(
    max_examples=40,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.filter_too_much,
    ],
)


@pytest.fixture(scope="module")
def cuda(library: Library) -> Iterator[CudaLibrary]:
    if not (torch.cuda.is_available() and library.has_cuda):
        pytest.skip("no GPU, or a library without CUDA kernels")
    yield CudaLibrary(Native.load(library.path))


@SLOW
@given(case=cases())
def test_a_step_is_plain_attention(cuda: CudaLibrary, case: Case) -> None:
    """Ragged steps of random plans: rows, the pages they lie in, and o; nothing else in
    the pool changes."""
    assume(Step16.takes(case.plan, windows=True))
    step = Step16(case)
    out, memory = step.run(cuda, "cuda")
    step.check_memory(memory)
    step.check_out(out)


@pytest.mark.parametrize("queries", [[1] * 40, [200, 1, 37]])
def test_append_writes_steps_of_several_blocks_of_rows(
    cuda: CudaLibrary, queries: list[int]
) -> None:
    """Several blocks of rows, wide projections, one lane with chosen planes, one
    without a projection of its own."""
    lanes = [
        Lane(0, 0, 128, 96, 48, projected=True),
        Lane(0, 1, 128, 128, 128),
        Lane(0, 2, 20, 16, 16, "planes", (0, 3, 4, 9, 17, 20, 21, 40, 63, 60), True),
    ]
    plan = plan_of(lanes, [Group((0, 1, 2), Tier(16, 16))], 128, 4, 64)
    case = Case(plan, 0, queries, [[n] for n in range(60, 60 + len(queries))], seed=1)
    case.scale = (
        0.05  # wide lanes: sharper scores would show the rounding of q', not a fault
    )
    step = Step16(case)
    out, memory = step.run(cuda, "cuda")
    step.check_memory(memory)
    step.check_out(out)


@pytest.mark.parametrize("page", [64, 80])
@pytest.mark.parametrize("tier", TIERS, ids=str)
def test_seal_writes_the_codes_of_the_codec(
    cuda: CudaLibrary, tier: Tier, page: int
) -> None:
    layout = sealing(tier, page)
    memory, jobs, sealed = pool_and_sealed(layout, page)
    pool = torch.from_numpy(memory).cuda()
    PageKernels(cuda, layout.plan, pool.data_ptr(), pool.numel()).seal(
        0, 1, jobs, torch.cuda.current_stream().cuda_stream
    )
    np.testing.assert_array_equal(pool.cpu().numpy(), sealed)


@pytest.mark.parametrize("tier", TIERS, ids=str)
def test_a_seal_in_a_cuda_graph_reads_its_list_again(
    cuda: CudaLibrary, tier: Tier
) -> None:
    """The list was empty when it was captured."""
    layout = sealing(tier, 64)
    memory, jobs, sealed = pool_and_sealed(layout, 64)
    before = torch.from_numpy(memory).cuda()
    pool = before.clone()
    pages = torch.full((5, 3), -1, dtype=torch.int32, device="cuda")
    kernels = PageKernels(cuda, layout.plan, pool.data_ptr(), pool.numel())

    def seal() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        args = kernels.seal_args(0, 1, stream)
        args.pages = ctypes.cast(pages.data_ptr(), ctypes.POINTER(SealPage))
        args.page_count = len(pages)
        cuda.call("cuda_seal_listed", ctypes.byref(args))

    seal()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        seal()
    graph.replay()
    assert torch.equal(pool, before)
    pages[1:4] = torch.tensor(jobs, dtype=torch.int32)
    graph.replay()
    np.testing.assert_array_equal(pool.cpu().numpy(), sealed)


def test_seals_outside_the_pool_or_not_aligned_are_refused(cuda: CudaLibrary) -> None:
    layout = sealing(Tier(8, 8), 64)
    pool = torch.zeros(4 * layout.page_stride[0], dtype=torch.uint8, device="cuda")
    kernels = PageKernels(cuda, layout.plan, pool.data_ptr(), pool.numel())
    with pytest.raises(KvlatheError, match="outside the pool"):
        kernels.seal(0, 1, [(4, 0, 0)], 0)
    small = PageKernels(cuda, layout.plan, pool.data_ptr() + 64, pool.numel())
    with pytest.raises(KvlatheError, match="not aligned"):
        small.seal(0, 1, [(0, 1, 0)], 0)
