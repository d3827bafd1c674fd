"""CUDA decode attention on quantized pages and a 16-bit tail, against float64 on the
same codes.

Two references: the numbers that the codes mean, and the integer form (Eq. 4 of HACK: q
and weights as codes) in float64. The kernel is the integer form: it may differ from it
by rounding only, and hardly be worse than it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import pytest
import torch

from kvlathe.plan.formats import Tier
from tests.native.codes_problem import CodesProblem
from tests.native.library import OVERLAP, UNSUPPORTED, Library, NativeError

MIXED = [
    [(16, 32), (96, 16), (64, 80), (48, 128), (128, 48), (112, 64), (32, 96), (80, 112)]
]
NARROW = [
    [(16, 32), (96, 16), (64, 80), (48, 96)],
    [(32, 64), (80, 48), (64, 16), (16, 96)],
]


def run(
    library: Library, problem: CodesProblem, times: int = 1, flags: int = 0
) -> None:
    size = library.workspace_bytes(len(problem.tails), len(problem.ranks[0]))
    workspace = torch.zeros(size, dtype=torch.uint8, device="cuda")
    for layer in range(len(problem.ranks)):
        for _ in range(times):
            problem.o[layer] = problem.poisoned(layer)
            args = problem.args(layer, workspace)
            args.flags = flags
            torch.cuda.synchronize()
            library.attend_decode(args, "cuda")
            torch.cuda.synchronize()


def check(
    library: Library, problem: CodesProblem, times: int = 1, flags: int = 0
) -> None:
    if not (torch.cuda.is_available() and library.has_cuda):
        pytest.skip("no GPU, or a library without CUDA kernels")
    run(library, problem, times, flags)
    rounding = 2.0 ** (-11 if problem.dtype == torch.float16 else -8) * 3
    for layer in range(len(problem.ranks)):
        own, form, between = problem.errors(layer)
        assert own <= 1.2 * form + rounding, (
            f"error {own:.2e}, of the form itself {form:.2e}"
        )
        if problem.dtype == torch.float16:  # BF16 rounds o by about as much
            assert between <= 0.5, f"{between:.2f} of the form's own error"


def problem_of(
    bits: Literal[8, 4, 2],
    sealed: Sequence[Sequence[int]] = ((640,), (0,), (64,), (1024,), (0,)),
    tails: Sequence[int] = (33, 0, 0, 64, 7),
    ranks: Sequence[Sequence[tuple[int, int]]] = MIXED,
    dtype: torch.dtype = torch.float16,
    seed: int = 0,
) -> CodesProblem:
    tier = Tier(bits, bits, arithmetic="int")
    return CodesProblem(
        ranks, sealed, tails, [tier], dtype=dtype, device="cuda", seed=seed
    )


@pytest.fixture
def gpu() -> str:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    return "cuda"


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("ranks", [MIXED, NARROW])
def test_attention_on_codes_of_ragged_batches_is_near_float64(
    library: Library,
    gpu: str,
    bits: Literal[8, 4, 2],
    dtype: torch.dtype,
    ranks: Sequence[Sequence[tuple[int, int]]],
) -> None:
    check(library, problem_of(bits, ranks=ranks, dtype=dtype), times=2)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize(
    ("group", "page"), [(32, 64), (64, 128), (128, 128), (16, 64), (48, 64)]
)
def test_attention_on_codes_takes_every_group_and_page_size(
    library: Library, gpu: str, bits: Literal[8, 4, 2], group: int, page: int
) -> None:
    tier = Tier(
        bits,
        bits,
        group_k=group,
        group_v=64 if group in (16, 48) else group,
        arithmetic="int",
    )
    sealed, tails = [[5 * page], [0], [page], [0]], [page - 1, 0, 1, 17]
    check(
        library,
        CodesProblem(NARROW, sealed, tails, [tier], page_tokens=page, device=gpu),
    )


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("group", range(1, 9))
def test_attention_on_codes_takes_one_to_eight_query_heads(
    library: Library, gpu: str, group: int, bits: Literal[8, 4, 2]
) -> None:
    check(
        library,
        CodesProblem(
            MIXED,
            [[320], [64]],
            [5, 0],
            [Tier(bits, bits, arithmetic="int")],
            group,
            device=gpu,
        ),
    )


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("group", [4, 8])
@pytest.mark.parametrize(
    "sealed", [[640, 0, 64, 1024, 0], [40_000, 64, 0, 70_016], [4992] * 40, [64] * 700]
)
def test_warps_that_attend_alone_on_codes_are_near_float64(
    library: Library,
    gpu: str,
    bits: Literal[8, 4, 2],
    group: int,
    sealed: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where pairs are few, and cross hundreds of warps."""
    monkeypatch.setenv("KVLATHE_ALONE_PAIRS", "0")
    tier = Tier(bits, bits, arithmetic="int")
    cold, tails = [[n] for n in sealed], [n % 37 for n in range(len(sealed))]
    check(
        library,
        CodesProblem(MIXED, cold, tails, [tier], group, device=gpu),
        times=2,
        flags=OVERLAP,
    )


def test_attention_on_codes_reads_partly_filled_pages(
    library: Library, gpu: str
) -> None:
    check(library, problem_of(2, sealed=[[70], [1], [63], [129]], tails=[0, 0, 3, 64]))


def test_two_widths_in_one_call(library: Library, gpu: str) -> None:
    tiers = [Tier(4, 4, arithmetic="int"), Tier(2, 2, arithmetic="int")]
    sealed, tails = [[640, 320], [0, 64], [64, 0], [0, 0]], [33, 0, 1, 0]
    check(library, CodesProblem(MIXED, sealed, tails, tiers, device=gpu), times=2)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize(
    "sealed", [[140_032], [40_000 // 64 * 64, 64, 0, 70_016], [4992] * 40, [64] * 300]
)
def test_many_blocks_share_the_work(
    library: Library, gpu: str, bits: Literal[8, 4, 2], sealed: list[int]
) -> None:
    tails = [(17 * b) % 65 for b in range(len(sealed))]
    check(library, problem_of(bits, sealed=[[n] for n in sealed], tails=tails), times=3)
    check(
        library,
        problem_of(bits, sealed=[[n] for n in sealed], tails=tails, seed=1),
        times=3,
        flags=OVERLAP,
    )


def test_attention_on_codes_refuses_unknown_pages_and_groups(
    library: Library, gpu: str
) -> None:
    if not library.has_cuda:
        pytest.skip("a library without CUDA kernels")
    for page in (48, 512):
        tier = Tier(4, 4, group_v=16)
        problem = CodesProblem(
            NARROW, [[page]], [3], [tier], page_tokens=page, device=gpu
        )
        with pytest.raises(NativeError) as refusal:
            run(library, problem)
        assert refusal.value.code == UNSUPPORTED
