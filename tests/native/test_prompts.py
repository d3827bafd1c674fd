"""Prompt chunks, attended in tiles on a GPU: at most twice the error of plain torch in
the same format, by float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal

import pytest
import torch

from kvlathe.plan.formats import Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane
from kvlathe.plan.lives import SEAL
from kvlathe.runtime.native.cuda import CudaLibrary
from kvlathe.runtime.native.library import Native
from kvlathe.runtime.sessions.gpu.side_memory import COPY_HEADER, copies_bytes
from kvlathe.runtime.sessions.torch_cuda.attention.attend import Attention
from kvlathe.runtime.sessions.torch_cuda.attention.spread import Spread
from tests.native.chunk_problem import ChunkProblem, CodesChunkProblem
from tests.native.library import Library
from tests.native.step16 import Step16
from tests.support.attend_cases import Case, plan_of

MIXED = [
    (16, 32),
    (96, 16),
    (64, 80),
    (48, 128),
    (128, 48),
    (112, 64),
    (32, 96),
    (80, 112),
]


@pytest.fixture(scope="module")
def cuda(library: Library) -> Iterator[CudaLibrary]:
    if not (torch.cuda.is_available() and library.has_cuda):
        pytest.skip("no GPU, or a library without CUDA kernels")
    yield CudaLibrary(Native.load(library.path))


def attended(
    library: Library,
    cuda: CudaLibrary,
    problem: ChunkProblem | CodesChunkProblem,
    times: int,
) -> Iterator[tuple[int, Spread]]:
    """Attends layer after layer; yields each with the step's list once its answer is
    there. Copies of sealed pages change no bit of it."""
    problem.spoil_unused_rows()
    attention = problem.attention(cuda)
    before: dict[int, torch.Tensor] = {}
    plan = problem.layout.plan
    for size in sorted({0, copies_bytes(plan, 700), copies_bytes(plan, 1 << 16)}):
        attention.copies = torch.full((size,), 0x7F, dtype=torch.uint8, device="cuda")
        spread = problem.spread_out(attention)
        for layer in range(len(problem.ranks)):
            args, keep = problem.step_args(attention, spread, layer)
            for _ in range(times):
                problem.o[layer].fill_(float("nan"))
                library.attend_decode(args, "cuda")
            torch.cuda.synchronize()
            own = problem.o[layer].view(torch.int16)
            known = before.setdefault(layer, own.clone())
            assert torch.equal(own, known)
            if size > copies_bytes(plan, 700) and has_tiles(cuda):
                assert copied_sequences(problem, attention, layer) == longest(problem)
            yield layer, spread
            del keep


def has_tiles(cuda: CudaLibrary) -> bool:
    return bool(cuda.lib.kvlathe_cuda_has_prompt_kernel())


def copied_sequences(
    problem: ChunkProblem | CodesChunkProblem, attention: Attention, layer: int
) -> set[tuple[int, int]]:
    """(bucket, sequence) of the copies that the last call made, as its room says."""
    buckets = attention.layers[layer].form.buckets
    batch = len(problem.chunks)
    tables = attention.copies.view(torch.int32)[32 : 32 + len(buckets) * batch]
    bases = tables.view(len(buckets), batch).tolist()
    return {
        (bucket, b)
        for bucket, row in zip(buckets, bases, strict=True)
        for b, base in enumerate(row)
        if base >= 0
    }


def longest(problem: ChunkProblem | CodesChunkProblem) -> set[tuple[int, int]]:
    """Those with 128 new tokens or more, and sealed ones before them."""
    lengths = problem.tokens_before().tolist()
    return {
        (bucket, b)
        for b, n in enumerate(problem.chunks)
        for bucket, tokens in enumerate(lengths[b])
        if bucket and n >= 128 and tokens
    }


def check(
    library: Library, cuda: CudaLibrary, problem: ChunkProblem, times: int = 1
) -> None:
    for layer, _ in attended(library, cuda, problem, times):
        own, plain = problem.errors(layer)
        assert own <= 2 * plain + 1e-7, (
            f"layer {layer}: error {own:.2e}, plain torch {plain:.2e}"
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("before", "chunks"),
    [
        ([0], [300]),
        ([0, 130, 5000, 77, 0, 0], [16, 47, 100, 1, 0, 129]),
        ([63, 64, 65, 1000], [64, 65, 15, 17]),
        ([0] * 40, [20, 1] * 20),
    ],
)
def test_chunks_and_decode_rows_in_one_step(
    library: Library,
    cuda: CudaLibrary,
    dtype: torch.dtype,
    before: list[int],
    chunks: list[int],
) -> None:
    """Ragged: prompts, later chunks at any offset, single rows, empty sequences; NaN
    wherever no token lies."""
    lengths = [n + c for n, c in zip(before, chunks, strict=True)]
    check(
        library,
        cuda,
        ChunkProblem([MIXED], lengths, dtype=dtype, chunks=chunks),
        times=2,
    )


@pytest.mark.parametrize("group", [1, 2, 4, 5, 7, 8])
def test_prompt_attention_takes_one_to_eight_query_heads(
    library: Library, cuda: CudaLibrary, group: int
) -> None:
    ranks = [[(48, 64), (16, 16), (96, 112)]]
    check(
        library,
        cuda,
        ChunkProblem(ranks, [200, 345, 9], group=group, chunks=[200, 33, 1]),
    )


@pytest.mark.parametrize("rank", range(16, 129, 16))
def test_prompt_attention_takes_every_rank(
    library: Library, cuda: CudaLibrary, rank: int
) -> None:
    check(
        library,
        cuda,
        ChunkProblem(
            [[(rank, 144 - rank), (rank, rank)]],
            [333, 150],
            chunks=[150, 150],
            knows_rows=True,
        ),
    )


@pytest.mark.parametrize("page_tokens", [16, 48, 128])
def test_prompt_attention_takes_every_page_size(
    library: Library, cuda: CudaLibrary, page_tokens: int
) -> None:
    lengths = [page_tokens * 5 + 5, 200]
    problem = ChunkProblem(
        [[(48, 32), (64, 16)]], lengths, page_tokens=page_tokens, chunks=[70, 200]
    )
    check(library, cuda, problem)


def test_layers_of_a_prompt_share_one_list_of_tiles(
    library: Library, cuda: CudaLibrary
) -> None:
    """Each launch leaves the list as it was; more tiles than the GPU takes at once."""
    ranks = [MIXED, [(64, 64)] * 8, MIXED[::-1]]
    check(
        library,
        cuda,
        ChunkProblem(
            ranks, [1500, 2100, 40], group=8, chunks=[1500, 900, 40], knows_rows=True
        ),
        times=3,
    )


def test_prompt_attention_takes_lanes_whose_stages_fill_shared_memory(
    library: Library, cuda: CudaLibrary
) -> None:
    """Lanes whose stages fill shared memory to two, one held while the next is waited
    for, after lanes of any size."""
    ranks = [
        (128, 64),
        (16, 16),
        (112, 48),
        (16, 32),
        (128, 48),
        (32, 16),
        (80, 128),
        (128, 16),
    ]
    check(
        library,
        cuda,
        ChunkProblem(
            [ranks, ranks[::-1]], [900, 2100, 330], group=5, chunks=[900, 1700, 330]
        ),
    )
    check(
        library,
        cuda,
        ChunkProblem(
            [ranks], [900, 1400], group=1, chunks=[700, 1400], knows_rows=True
        ),
    )


def test_sharp_softmax_with_a_late_maximum(library: Library, cuda: CudaLibrary) -> None:
    """Scores that grow along the sequence: the maximum must be followed, in steps."""
    problem = ChunkProblem([[(64, 64)] * 2], [900], spread=6.0, chunks=[900])
    view = problem.pool.view(-1, problem.stride // 2)
    for page in range(-(-900 // 64)):
        view[problem.table[0, page]] *= 0.1 + 2.0 * page / 15
    check(library, cuda, problem)


def test_two_buckets_of_16_bits(cuda: CudaLibrary) -> None:
    """A lane's past in a cold 16-bit bucket and in its hot one; another lane that has a
    hot one alone; RoPE and projection."""
    lanes = [
        Lane(0, 0, 64, 48, 80, projected=True),
        Lane(0, 1, 64, 32, 16, projected=True),
    ]
    hot = Tier(16, 16)
    groups = [Group((0,), hot, (hot,), SEAL), Group((1,), hot)]
    plan = plan_of(lanes, groups, 64, 4, 64)
    step = Step16(
        Case(
            plan,
            0,
            [40, 1, 17, 200],
            [[70, 64, 70], [3, 64, 3], [0, 128, 0], [0, 0, 0]],
            seed=4,
        )
    )
    out, memory = step.run(cuda, "cuda")
    step.check_memory(memory)
    step.check_out(out)


Bits = Literal[8, 4, 2]
PASTS = [[640], [0], [64], [1024], [128], [0], [192]]
TAILS, CHUNKS = [163, 300, 20, 200, 7, 0, 70], [130, 300, 16, 200, 1, 0, 15]


def check_codes(
    library: Library, cuda: CudaLibrary, problem: CodesChunkProblem, times: int = 1
) -> None:
    tiles = sum(-(-n * problem.group // 192) for n in problem.chunks if n >= 16)
    rows = torch.tensor(
        [n >= 16 for n in problem.chunks for _ in range(n)], device="cuda"
    )
    for layer, spread in attended(library, cuda, problem, times):
        if cuda.lib.kvlathe_cuda_has_prompt_kernel():
            assert int(spread.prompts[problem.group][0]) == tiles, (
                "every chunk is attended in tiles"
            )
        exact, plain = (
            problem.answer_of_chunks(layer, dtype).double()
            for dtype in (torch.float64, problem.dtype)
        )
        error, allowed = (
            (x - exact)[rows].abs().max() for x in (problem.o[layer].double(), plain)
        )
        assert float(error) <= 2 * float(allowed) + 1e-7, (
            f"layer {layer}: {error:.2e}, plain torch {allowed:.2e}"
        )
        # Rows of their own are attended on their codes, with q and weights of 8 bits
        # (test_attend_codes.py).
        assert float((problem.o[layer].double() - exact).abs().max()) <= 0.05 * float(
            exact.abs().max()
        )


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_prompt_chunks_after_sealed_pages_are_near_float64(
    library: Library, cuda: CudaLibrary, bits: Bits, dtype: torch.dtype
) -> None:
    """Ragged: chunks and single rows, with and without sealed tokens and a tail
    before."""
    tier = Tier(bits, bits)
    problem = CodesChunkProblem(
        [MIXED], PASTS, TAILS, [tier], dtype=dtype, chunks=CHUNKS
    )
    check_codes(library, cuda, problem, times=2)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize(
    ("group", "page"),
    [(32, 64), (64, 128), (128, 128), (16, 64), (48, 64), (256, 256), (32, 256)],
)
def test_prompt_chunks_read_every_group_and_size_of_sealed_pages(
    library: Library, cuda: CudaLibrary, bits: Bits, group: int, page: int
) -> None:
    tier = Tier(bits, bits, group_k=group, group_v=64 if group in (16, 48) else group)
    ranks = [
        [(96, 64), (128, 64), (128, 128), (112, 96)],
        [(64, 128), (128, 48), (16, 32), (32, 16)],
    ]
    sealed, tails = [[5 * page], [page], [0]], [page + 133, 160, 40]
    problem = CodesChunkProblem(
        ranks,
        sealed,
        tails,
        [tier],
        page_tokens=page,
        chunks=[150, 140, 40],
        knows_rows=True,
    )
    check_codes(library, cuda, problem)


@pytest.mark.parametrize("group", [1, 4, 5, 7, 8])
def test_prompt_chunks_on_sealed_pages_take_one_to_eight_query_heads(
    library: Library, cuda: CudaLibrary, group: int
) -> None:
    problem = CodesChunkProblem(
        [MIXED], [[320], [64]], [237, 190], [Tier(4, 4)], group, chunks=[210, 150]
    )
    check_codes(library, cuda, problem)


def test_two_sealed_tiers_beside_16_bits(library: Library, cuda: CudaLibrary) -> None:
    """Three buckets of a lane under one softmax; partly filled pages."""
    sealed, tails = [[640, 320], [0, 64], [70, 1], [63, 129]], [203, 40, 165, 140]
    low, high = Tier(2, 2, group_k=32, group_v=32), Tier(4, 4, group_k=32, group_v=32)
    for tiers in ([Tier(4, 4), low], [Tier(8, 8), high]):
        problem = CodesChunkProblem(
            [MIXED],
            sealed,
            tails,
            tiers,
            chunks=[134, 40, 150, 140],
            knows_rows=True,
        )
        check_codes(library, cuda, problem, times=2)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("known", [True, False])
def test_decode_rows_stand_before_prompt_chunks_in_a_step(
    library: Library, cuda: CudaLibrary, bits: Bits, known: bool
) -> None:
    """Decodes, a few new tokens, then chunks, as a scheduler packs them; whether or not
    the call is told where chunks begin."""
    chunks = [*[1] * 40, 3, 15, 0, 16, 700, 90]
    problem = CodesChunkProblem(
        [MIXED, MIXED[::-1]],
        [[64 * (b % 7)] for b in range(len(chunks))],
        [n + b % 3 for b, n in enumerate(chunks)],
        [Tier(bits, bits)],
        chunks=chunks,
        knows_rows=known,
    )
    check_codes(library, cuda, problem, times=2)


@pytest.mark.parametrize("bits", [8, 2])
def test_many_tiles_after_sealed_pages(
    library: Library, cuda: CudaLibrary, bits: Bits
) -> None:
    """More tiles than the GPU takes at once, three layers on one list."""
    ranks = [MIXED, [(128, 128)] * 8, MIXED[::-1]]
    problem = CodesChunkProblem(
        ranks,
        [[4992], [320]],
        [950, 600],
        [Tier(bits, bits)],
        8,
        chunks=[900, 600],
        knows_rows=True,
        dtype=torch.bfloat16,
    )
    check_codes(library, cuda, problem, times=2)


def test_copies_of_those_that_find_room(library: Library, cuda: CudaLibrary) -> None:
    """In their order, up to the first that does not fit."""
    if not has_tiles(cuda):
        pytest.skip("this GPU attends chunks as rows")
    problem = CodesChunkProblem(
        [MIXED], [[640], [320], [64]], [140] * 3, [Tier(4, 4)], chunks=[130] * 3
    )
    attention = problem.attention(cuda)
    for tokens, fit in ((640, 1), (1024, 3), (64, 0)):
        size = copies_bytes(problem.layout.plan, tokens) - COPY_HEADER + 1024
        attention.copies = torch.zeros(size, dtype=torch.uint8, device="cuda")
        args, keep = problem.step_args(attention, problem.spread_out(attention))
        library.attend_decode(args, "cuda")
        torch.cuda.synchronize()
        found = copied_sequences(problem, attention, 0)
        assert found == {(1, b) for b in range(fit)}
        del keep


def test_sequences_that_begin_alike_share_copies_of_sealed_pages(
    library: Library, cuda: CudaLibrary
) -> None:
    """The first two begin with the same pages. Whose copies are read changes no bit."""
    if not has_tiles(cuda):
        pytest.skip("this GPU attends chunks as rows")
    sealed = [[640], [320], [64], [0]]
    problem = CodesChunkProblem(
        [MIXED], sealed, [140] * 4, [Tier(4, 4)], chunks=[130] * 4
    )
    tables = problem.tables_of_sequences()
    tables[1][1, :5] = tables[1][0, :5]
    problem.tables_of_sequences = lambda: tables
    attention = problem.attention(cuda)
    spread = problem.spread_out(attention)
    answers: list[torch.Tensor] = []
    for whose in ([-1] * 4, [0, 0, -1, -1], [0, 0, 2, 3], [0, 1, 2, 0]):
        size = copies_bytes(problem.layout.plan, 4096)
        attention.copies = torch.full((size,), 0x7F, dtype=torch.uint8, device="cuda")
        copies_of = torch.tensor(whose, dtype=torch.int32, device="cuda")
        own = dataclasses.replace(spread.step, copies_of=copies_of)
        spread = dataclasses.replace(spread, step=own)
        problem.o[0].fill_(float("nan"))
        args, keep = problem.step_args(attention, spread)
        library.attend_decode(args, "cuda")
        torch.cuda.synchronize()
        reads = {(1, b) for b, of in enumerate(whose) if of >= 0 and sealed[of][0]}
        assert copied_sequences(problem, attention, 0) == reads
        answers.append(problem.o[0].view(torch.int16).clone())
        assert torch.equal(answers[-1], answers[0])
        del keep


def test_prompt_chunks_go_through_the_kernel_of_prompts(
    library: Library, cuda: CudaLibrary
) -> None:
    """A step of nothing but chunks launches no other attention; one with a decode row
    launches both."""
    if not cuda.lib.kvlathe_cuda_has_prompt_kernel():
        pytest.skip("this GPU attends chunks as rows")
    for chunks, kernels in (
        ([50, 100], {"attend_prompt"}),
        ([1, 100], {"attend_prompt", "attend_decode"}),
    ):
        problem = ChunkProblem([MIXED], [50, 100], chunks=chunks, knows_rows=True)
        attention = problem.attention(cuda)
        args, keep = problem.step_args(attention, problem.spread_out(attention))
        library.attend_decode(args, "cuda")
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CUDA]
        ) as profile:
            library.attend_decode(args, "cuda")
            torch.cuda.synchronize()
        names = " ".join(event.key for event in profile.key_averages())
        assert {
            name for name in ("attend_prompt", "attend_decode") if name in names
        } == kernels
        del keep
