"""Random decode steps over rows of bytes (attend_bytes.cuh), for a GPU and for a CPU:
sealed tokens of 8 bits that are one group each, and a 16-bit tail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from kvlathe.plan.formats import WHOLE_RANK, Tier
from tests.native.codes_problem import CodesProblem

Kind = Literal["affine", "float8", "keys by channel"]
KINDS: tuple[Kind, ...] = ("affine", "float8", "keys by channel")
"""Codings of tokens; affine ones beside keys by channel of a page."""
RANKS = [(32, 64), (96, 32), (64, 96), (128, 128)]
SHAPES = [
    (kind, group, page)
    for kind in KINDS
    for group, page in ((1, 64), (3, 64), (8, 64), (5, 128), (4, 256))
    if page == 64 or kind != "keys by channel"
]
"""Each kind, query heads of a KV head, tokens of a page. Where keys are by channel, a
page is a group."""
BATCHES = {
    "ragged": (
        [0, 640, 0, 64, 0, 0, 128, 1, 70, 0, 0, 63],
        [33, 0, 0, 1, 0, 0, 64, 7, 0, 0, 1, 5],
    ),
    "no tails": ([128] * 9, [0] * 9),
    "tails": ([0] * 8 + [64], [33, 1, 0, 16, 17, 64, 2, 0, 3]),
    "one of many": ([64, 64, 8192, 64, 64, 0], [1, 0, 5, 0, 3, 0]),
    "a token": ([1, 0], [0, 1]),
}
"""Tokens in sealed pages and in tails, of each sequence."""


def tier_of(kind: Kind) -> Tier:
    """Rows of bytes of such a kind."""
    if kind == "keys by channel":
        return Tier(8, 8, "token", "rank", 64, WHOLE_RANK)
    return Tier(
        8, 8, "rank", "rank", WHOLE_RANK, WHOLE_RANK, coding_k=kind, coding_v=kind
    )


def problem_of(
    kind: Kind,
    sealed: Sequence[int],
    tails: Sequence[int],
    group: int = 4,
    page: int = 64,
    dtype: torch.dtype = torch.float16,
    device: str = "cpu",
) -> CodesProblem:
    """Rows where no token lies hold NaN, and so do their scales."""
    cold, tiers = [[n] for n in sealed], [tier_of(kind)]
    problem = CodesProblem(
        [RANKS], cold, tails, tiers, group, dtype, page, device, seed=len(sealed)
    )
    for bucket in (0, 1):
        _spoil(problem, bucket)
    return problem


def _spoil(problem: CodesProblem, bucket: int) -> None:
    page_tokens, pages = problem.page_tokens, problem._pages(bucket)
    for row in problem.rows(bucket, 0):
        sides = [(row[4], row[2], row[5]), (row[6], row[3], row[7])]
        if bucket and problem.tiers[0].k.along_tokens:
            del sides[0]  # its metadata are not a token's
        for b, tokens in enumerate(problem.lengths[:, bucket]):
            if not (rest := int(tokens) % page_tokens):
                continue
            page = pages[problem.tables[bucket][b, int(tokens) // page_tokens]]
            for at, rank, meta in sides:
                size = rank * (1 if bucket else 2)
                page[at + rest * size : at + page_tokens * size] = 255
                if bucket:
                    size = problem.tiers[0].v.group_bytes
                    page[meta + rest * size : meta + page_tokens * size] = 255


def louden(problem: CodesProblem, times: float) -> None:
    """Makes the values of every other sealed page so many times as large."""
    pages = problem._pages(1)[1::2]
    for row in problem.rows(1, 0):
        end = row[7] + problem.page_tokens * problem.tiers[0].v.group_bytes
        meta = pages[:, row[7] : end].contiguous().view(torch.float16)
        pages[:, row[7] : end] = (meta * times).view(torch.uint8)


def check(problem: CodesProblem, sequences: Sequence[int] | None = None) -> None:
    """The answers are float64's on what the codes mean, but for the rounding of
    elements and shares."""
    exact = problem.answer(0, False, sequences)
    own = problem.o[0] if sequences is None else problem.o[0][list(sequences)]
    error = float((own.double() - exact).abs().max())
    bits = 10 if problem.dtype == torch.float16 else 7
    assert error <= 2.0**-bits * float(exact.abs().max()), f"{error:.2e}"
