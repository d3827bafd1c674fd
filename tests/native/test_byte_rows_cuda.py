"""CUDA decode attention over rows of bytes, against float64 on what the codes mean."""

from __future__ import annotations

import pytest
import torch

from kvlathe.plan.kernel_forms import UNPROVEN
from tests.native.byte_rows import (
    BATCHES,
    KINDS,
    SHAPES,
    Kind,
    check,
    louden,
    problem_of,
)
from tests.native.codes_problem import CodesProblem
from tests.native.library import APPENDED, OVERLAP, Library
from tests.native.test_attend_codes import run


@pytest.fixture
def gpu(library: Library, monkeypatch: pytest.MonkeyPatch) -> Library:
    monkeypatch.setenv(UNPROVEN, "1")
    if not (torch.cuda.is_available() and library.has_cuda):
        pytest.skip("no GPU, or a library without CUDA kernels")
    return library


def attend(gpu: Library, problem: CodesProblem, flags: int = 0) -> None:
    run(gpu, problem, 2, flags)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BATCHES)
def test_rows_of_bytes_are_attended(
    gpu: Library, name: str, kind: Kind, dtype: torch.dtype
) -> None:
    """Empty sequences, those of one token, and pairs of many blocks."""
    problem = problem_of(kind, *BATCHES[name], dtype=dtype, device="cuda")
    for flags in (0, OVERLAP, OVERLAP | APPENDED):
        attend(gpu, problem, flags)
        check(problem)


@pytest.mark.parametrize(("kind", "group", "page"), SHAPES)
def test_rows_of_bytes_are_attended_by_other_groups_and_pages(
    gpu: Library, kind: Kind, group: int, page: int
) -> None:
    sealed, tails = [320, 0, 1, 700, 129, 640, 64], [5, 0, 0, 17, 1, 0, 33]
    problem = problem_of(kind, sealed, tails, group, page, device="cuda")
    attend(gpu, problem)
    check(problem)


@pytest.mark.parametrize("kind", KINDS)
def test_values_that_shares_would_take_out_of_halves_are_attended(
    gpu: Library, kind: Kind
) -> None:
    problem = problem_of(kind, [2048, 640], [33, 0], device="cuda")
    louden(problem, 2000)
    attend(gpu, problem)
    check(problem)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_bytes_of_long_contexts_are_attended(gpu: Library, kind: Kind) -> None:
    problem = problem_of(kind, [140_000, 64, 30_000], [7, 0, 1], device="cuda")
    attend(gpu, problem)
    check(problem)


@pytest.mark.parametrize("kind", KINDS)
def test_many_sequences_of_rows_of_bytes_are_attended(gpu: Library, kind: Kind) -> None:
    some = [(37 * i) % 300 for i in range(400)]
    tails = [(11 * i) % 64 for i in range(400)]
    problem = problem_of(kind, some, tails, device="cuda")
    attend(gpu, problem)
    check(problem, [0, 1, 2, 57, 399])
