"""Append and seal on the GPU against references: the float64 step, and
kvlathe/plan/codec.py bit for bit."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.codec import matrices
from kvlathe.plan.formats import Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.lives import SEAL
from kvlathe.runtime.native.cuda import CudaLibrary, PageKernels, SealPage
from kvlathe.runtime.native.library import Native
from tests.native.library import Library
from tests.native.step16 import Step16
from tests.support.attend_cases import Case, cases, plan_of
from tests.support.format_cases import CODED_TIERS

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
def test_a_larger_step(cuda: CudaLibrary, queries: list[int]) -> None:
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


TIERS = [
    *CODED_TIERS,
    Tier(3, 3, "rank", "token", 32, 64, rounding="stochastic"),
    Tier(3, 8, "token", "rank", 48, 48, span_k=0.7),
    Tier(4, 3, "rank", "rank", coding_k="normal", coding_v="normal"),
    Tier(8, 8),
    Tier(4, 4, "rank", "token", 32, 16),
    Tier(2, 2, "rank", "rank", 48, 32),
    Tier(8, 2, "token", "rank", 48, 64),
    Tier(4, 8, "token", "token", 64, 32),
    Tier(16, 4, "rank", "token", 64, 64),
    Tier(4, 2, "rank", "token", 64, 64, rounding="stochastic"),
    Tier(2, 2, "rank", "token", 128, 64, span_k=0.65, span_v=0.8),
    Tier(8, 4, "token", "rank", 32, 32, rounding="stochastic"),
]


def sealing(tier: Tier, page: int, cold: tuple[int, ...] = (0, 1, 3, 5)) -> CacheLayout:
    """Two layers of three lanes; those of ``cold`` are sealed."""
    lanes = [
        Lane(layer, h, 128, *ranks, projected=True)
        for layer in range(2)
        for h, ranks in enumerate(RANKS)
    ]
    hot = Tier(16, 16)
    kept = tuple(lane for lane in range(6) if lane not in cold)
    groups = [Group(cold, hot, (tier,), SEAL)]
    if kept:
        groups.append(Group(kept, hot))
    return CacheLayout(plan_of(lanes, groups, 128, 2, page))


RANKS = [(128, 48), (80, 16), (16, 112)]


Jobs = list[tuple[int, int, int]]
"""(Hot page, cold page, position of its first token) each."""


def pool_and_sealed(
    layout: CacheLayout, page: int
) -> tuple[torch.Tensor, Jobs, npt.NDArray[np.uint8]]:
    """A random pool on the GPU, pages to seal, and what the pool is with them sealed by
    kvlathe/plan/codec.py."""
    rng = np.random.default_rng(3)
    size = 40 * max(layout.page_stride)
    host = rng.standard_normal(size // 2).astype(np.float16)
    half = layout.page_stride[0] // 4  # half a page of constant groups
    host[:half] = np.float16(0.3)
    memory = host.view(np.uint8).copy()
    pool = torch.from_numpy(memory.copy()).cuda()
    last = size // layout.page_stride[1]
    jobs = [(i, last - 1 - i, 7 + i * page) for i in range(3)]
    hot, cold = matrices(layout, 0), matrices(layout, 1)
    for source, target, position in jobs:
        pages = [
            memory[page * stride :][:stride]
            for page, stride in zip((source, target), layout.page_stride, strict=True)
        ]
        for lane, pair in cold.items():
            for part, fresh in zip(pair, hot[lane], strict=True):
                part.write(pages[1], fresh.read(pages[0]), position)
    return pool, jobs, memory


@pytest.mark.parametrize("page", [64, 80])
@pytest.mark.parametrize("tier", TIERS, ids=str)
def test_seal_writes_the_codes_of_the_codec(
    cuda: CudaLibrary, tier: Tier, page: int
) -> None:
    layout = sealing(tier, page)
    pool, jobs, sealed = pool_and_sealed(layout, page)
    PageKernels(cuda, layout.plan, pool.data_ptr(), pool.numel()).seal(
        0, 1, jobs, torch.cuda.current_stream().cuda_stream
    )
    np.testing.assert_array_equal(pool.cpu().numpy(), sealed)


@pytest.mark.parametrize("tier", TIERS, ids=str)
def test_a_captured_seal_reads_its_list_again(cuda: CudaLibrary, tier: Tier) -> None:
    """Which was empty when it was captured."""
    layout = sealing(tier, 64)
    pool, jobs, sealed = pool_and_sealed(layout, 64)
    before = pool.clone()
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


def test_what_cannot_be_is_refused_in_words(cuda: CudaLibrary) -> None:
    layout = sealing(Tier(8, 8), 64)
    pool = torch.zeros(4 * layout.page_stride[0], dtype=torch.uint8, device="cuda")
    kernels = PageKernels(cuda, layout.plan, pool.data_ptr(), pool.numel())
    with pytest.raises(KvlatheError, match="outside the pool"):
        kernels.seal(0, 1, [(4, 0, 0)], 0)
    small = PageKernels(cuda, layout.plan, pool.data_ptr() + 64, pool.numel())
    with pytest.raises(KvlatheError, match="not aligned"):
        small.seal(0, 1, [(0, 1, 0)], 0)
