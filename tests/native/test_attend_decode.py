"""Native decode attention against float64: at most twice the error of plain torch in
the same number format."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from kvlathe.runtime.native.cuda import BUNDLES
from tests.native.library import (
    BAD_ARGUMENT,
    BAD_VERSION,
    MISALIGNED,
    OVERLAP,
    TOO_SMALL,
    UNSUPPORTED,
    AttendDecodeArgs,
    Library,
    NativeError,
    Part,
)
from tests.native.problem import Problem

MIXED = [
    [(16, 32), (96, 16), (64, 80), (48, 128), (128, 48), (112, 64), (32, 96), (80, 112)]
]


def call(library: Library, problem: Problem, args: AttendDecodeArgs) -> None:
    """Runs a call of its own making on the problem's layer 0."""
    if problem.device == "cuda":
        size = library.workspace_bytes(len(problem.lengths), len(problem.ranks[0]))
        workspace = torch.zeros(size, dtype=torch.uint8, device="cuda")
        args.workspace, args.workspace_bytes = workspace.data_ptr(), size
        torch.cuda.synchronize()
    library.attend_decode(args, problem.device)
    if problem.device == "cuda":
        torch.cuda.synchronize()


def run(
    library: Library, problem: Problem, layer: int = 0, times: int = 1, flags: int = 0
) -> None:
    workspace = None
    if problem.device == "cuda":
        size = library.workspace_bytes(len(problem.lengths), len(problem.ranks[layer]))
        workspace = torch.zeros(size, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
    for _ in range(times):
        problem.o[layer] = problem.poisoned(layer)
        args = problem.args(layer, workspace)
        args.flags = flags
        library.attend_decode(args, problem.device)
    if problem.device == "cuda":
        torch.cuda.synchronize()


def check(library: Library, problem: Problem, times: int = 1, flags: int = 0) -> None:
    for layer in range(len(problem.ranks)):
        run(library, problem, layer, times, flags)
        own, plain = problem.errors(layer)
        assert own <= 2 * plain + 1e-7, (
            f"layer {layer}: error {own:.2e}, plain torch {plain:.2e}"
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "lengths", [[1], [0, 1, 64, 0, 65], [300, 17, 128, 0, 1, 63, 513, 0]]
)
def test_ragged_batches_and_mixed_ranks(
    library: Library, device: str, dtype: torch.dtype, lengths: list[int]
) -> None:
    problem = Problem(MIXED, lengths, dtype=dtype, device=device)
    problem.spoil_unused_rows()
    check(library, problem, times=2)


@pytest.mark.parametrize("group", range(1, 9))
def test_decode_attention_takes_one_to_eight_query_heads(
    library: Library, device: str, group: int
) -> None:
    check(
        library,
        Problem(
            [[(48, 64), (16, 16), (96, 112)]], [200, 3], group=group, device=device
        ),
    )


@pytest.mark.parametrize("rank", range(16, 129, 16))
def test_decode_attention_takes_every_rank(
    library: Library, device: str, rank: int
) -> None:
    check(
        library, Problem([[(rank, 144 - rank), (rank, rank)]], [150, 33], device=device)
    )


@pytest.mark.parametrize("page_tokens", [16, 32, 48, 128])
def test_decode_attention_takes_every_page_size(
    library: Library, device: str, page_tokens: int
) -> None:
    check(
        library,
        Problem(
            [[(48, 32), (64, 16)]],
            [page_tokens * 3 + 5, 7, page_tokens],
            page_tokens=page_tokens,
            device=device,
        ),
    )


def test_decode_attention_reads_each_layer_at_its_offset(
    library: Library, device: str
) -> None:
    check(
        library,
        Problem(
            [[(48, 32), (64, 16)], [(16, 96), (80, 80)], [(128, 16), (32, 112)]],
            [100, 40],
            device=device,
        ),
    )


def test_sharp_softmax_with_a_late_maximum(library: Library, device: str) -> None:
    """Large scores that grow along the sequence: the running maximum must follow."""
    problem = Problem([[(64, 64)] * 2], [2000, 700], device=device, spread=6.0)
    view = problem.pool.view(-1, problem.stride // 2)
    for b, n in enumerate(problem.lengths):
        for page in range(-(-n // 64)):
            view[problem.table[b, page]] *= 0.1 + 2.0 * page / (n // 64 + 1)
    check(library, problem)


def split_parts(
    problem: Problem, pages: list[int], heads: list[list[int]]
) -> tuple[AttendDecodeArgs, list[object]]:
    """The problem's step as several parts: part i holds ``pages[i]`` pages of each
    sequence (the last: the rest) for the lanes of ``heads[i]``. Returns the arguments
    and what must outlive the call."""
    args, keep, at = problem.args(), [], 0
    parts = (Part * len(pages))()
    for i, count in enumerate(pages):
        end = (
            problem.table.shape[1]
            if i == len(pages) - 1
            else min(at + count, problem.table.shape[1])
        )
        table = (
            problem.table[:, at:end].contiguous()
            if end > at
            else problem.table[:, :1].contiguous()
        )
        lengths = (
            (problem.length_tensor - at * problem.page_tokens)
            .clamp(0, (end - at) * problem.page_tokens)
            .int()
        )
        rows = np.ascontiguousarray(problem.lanes[0][heads[i]])
        ctypes.pointer(parts[i])[0] = args.parts[0]
        parts[i].lane_count, parts[i].lanes, parts[i].page_table_stride = (
            len(rows),
            rows.ctypes.data,
            table.shape[1],
        )
        parts[i].page_table, parts[i].lengths = table.data_ptr(), lengths.data_ptr()
        keep += [table, lengths, rows]
        at = end
    args.parts, args.part_count = parts, len(pages)
    return args, [*keep, parts]


@pytest.mark.parametrize("pages", [[1, 0], [2, 1, 0], [40, 3, 0]])
@pytest.mark.parametrize("lengths", [[300, 0, 64, 65, 1, 200], [40_000, 130]])
def test_decode_attention_of_several_parts_is_one_softmax(
    library: Library, device: str, pages: list[int], lengths: list[int]
) -> None:
    """A lane's tokens in two or three buckets: the same answer as in one."""
    if device == "cpu" and lengths[0] > 1000:
        pytest.skip("slow on the reference")
    problem = Problem([MIXED[0][:4]], lengths, device=device)
    args, keep = split_parts(problem, pages, [[0, 1, 2, 3]] * len(pages))
    call(library, problem, args)
    own, plain = problem.errors(0)
    assert own <= 2 * plain + 1e-7
    del keep


def test_parts_may_hold_different_lanes(library: Library, device: str) -> None:
    """Lanes 0 and 2 keep the first page only, lanes 1 and 3 the rest: each head attends
    its own part."""
    problem = Problem([MIXED[0][:4]], [300, 64, 70], device=device)
    args, keep = split_parts(problem, [1, 0], [[0, 2], [1, 3]])
    call(library, problem, args)
    table, lengths = problem.table.clone(), list(problem.lengths)
    exact = []
    for part, (at, heads) in enumerate([(0, (0, 2)), (1, (1, 3))]):
        problem.table = table[:, at:].contiguous()
        problem.lengths = [min(n, 64) if part == 0 else max(0, n - 64) for n in lengths]
        whole = problem.answer(0, torch.float64)
        starts = np.cumsum([0, *(4 * rank_v for _, rank_v in problem.ranks[0])])
        exact += [(starts[h], starts[h + 1], whole) for h in heads]
    for start, end, whole in exact:
        assert (
            problem.o[0][:, start:end].double() - whole[:, start:end]
        ).abs().max() < 2e-3
    del keep


def test_the_reference_of_decode_attention_is_exact_in_float32(
    library: Library,
) -> None:
    problem = Problem(MIXED, [90, 0, 1], dtype=torch.float32)
    run(library, problem)
    assert problem.errors(0)[0] < 1e-6


@pytest.mark.parametrize(
    "lengths", [[140_000], [40_000, 1, 9_000, 0, 70_000, 333], [5_000] * 40, [1] * 700]
)
def test_many_blocks_share_the_work(library: Library, lengths: list[int]) -> None:
    """Sizes at which pairs are split over blocks, on a GPU; repeated, since the
    workspace is reused."""
    if not (torch.cuda.is_available() and library.has_cuda):
        pytest.skip("no GPU")
    check(library, Problem(MIXED, lengths, device="cuda"), times=3)
    check(
        library, Problem(MIXED, lengths, device="cuda", seed=1), times=3, flags=OVERLAP
    )


def refused(
    library: Library, problem: Problem, code: int, device: str = "cpu", **changes: int
) -> None:
    args = problem.args()
    for name, value in changes.items():
        setattr(args.parts[0] if hasattr(args.parts[0], name) else args, name, value)
    with pytest.raises(NativeError) as refusal:
        library.attend_decode(args, device)
    assert refusal.value.code == code and len(str(refusal.value)) > 20
    assert problem.o[0].isnan().all(), "a refusal must write nothing"


def test_decode_attention_refuses_wrong_arguments_with_their_code(
    library: Library,
) -> None:
    problem = Problem([[(48, 32), (64, 16)]], [100, 40])
    refused(library, problem, BAD_VERSION, abi_version=99)
    refused(library, problem, BAD_ARGUMENT, page_tokens=24)
    refused(library, problem, BAD_ARGUMENT, part_count=0)
    refused(library, problem, BAD_ARGUMENT, flags=8)
    refused(library, problem, UNSUPPORTED, flags=BUNDLES)
    refused(library, problem, BAD_ARGUMENT, bits_k=5)
    refused(library, problem, MISALIGNED, page_stride=problem.stride + 8)
    refused(library, problem, MISALIGNED, pool=problem.pool.data_ptr() + 2)
    refused(library, problem, TOO_SMALL, page_table_stride=1)
    refused(library, problem, TOO_SMALL, pool_bytes=problem.stride)
    refused(library, problem, TOO_SMALL, page_stride=128)
    refused(library, problem, TOO_SMALL, q_stride=16)
    refused(library, problem, UNSUPPORTED, prompts=1)
    if not library.has_cuda:
        refused(library, problem, UNSUPPORTED, device="cuda")


def test_a_call_without_rows_is_only_checked(library: Library, device: str) -> None:
    """As sessions ask when they load: no memory is needed, and what cannot be attended
    is refused."""
    problem = Problem([[(48, 32), (64, 16)]], [100, 40], device=device)
    args = problem.args()
    args.batch, args.q, args.o, args.pool, args.pool_bytes = 0, None, None, None, 0
    part = args.parts[0]
    part.page_table, part.lengths, part.page_table_stride = None, None, 0
    library.attend_decode(args, device)
    part.bits_k = 5
    with pytest.raises(NativeError, match="5 bits"):
        library.attend_decode(args, device)


def test_cuda_refuses_a_missing_workspace(library: Library) -> None:
    if not (torch.cuda.is_available() and library.has_cuda):
        pytest.skip("no GPU")
    problem = Problem([[(48, 32)]], [10], device="cuda")
    refused(library, problem, TOO_SMALL, device="cuda")
    refused(
        library,
        problem,
        UNSUPPORTED,
        device="cuda",
        group_size=9,
        q_stride=9 * 48,
        o_stride=9 * 32,
    )
