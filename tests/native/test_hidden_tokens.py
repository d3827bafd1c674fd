"""Attention of rows that do not see some of their tokens (kvlathe_part.hidden): the
reference and the kernel of general calls, by float64."""

from __future__ import annotations

import dataclasses
from typing import Literal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvlathe.plan.formats import Tier
from tests.native.codes_problem import CodesProblem
from tests.native.library import OVERLAP, AttendDecodeArgs, Library
from tests.native.problem import Problem

RANKS = [[(16, 32), (96, 16), (64, 128), (128, 48)]]
CLOSE = 4e-3
"""Halves: the numbers of K and V, shares of tokens, and the answer."""
SLOW = settings(
    deadline=None,
    max_examples=20,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
Gaps = list[tuple[int, int]]


@dataclasses.dataclass
class HiddenProblem(Problem):
    """``gaps[b]``: the tokens of sequence b that its row does not see."""

    gaps: Gaps = dataclasses.field(default_factory=list)

    def cached(
        self, sequence: int, layer: int, head: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        begin, end = self.gaps[sequence]
        k, v = super().cached(sequence, layer, head)
        return (
            torch.cat([k[:begin], k[end:]]),
            torch.cat([v[:begin], v[end:]]),
        )


def hide(args: AttendDecodeArgs, part: int, gaps: torch.Tensor) -> None:
    args.parts[part].hidden, args.parts[part].hidden_stride = gaps.data_ptr(), 2


def attend(library: Library, args: AttendDecodeArgs, device: str) -> None:
    library.attend_decode(args, device)
    if device == "cuda":
        torch.cuda.synchronize()


def workspace(library: Library, device: str, rows: int) -> torch.Tensor | None:
    if device == "cpu":
        return None
    size = library.workspace_bytes(rows, len(RANKS[0]))
    return torch.zeros(size, dtype=torch.uint8, device=device)


@st.composite
def hidden_rows(draw: st.DrawFn) -> tuple[list[int], Gaps]:
    """Lengths, and of each sequence what is hidden: some token is seen."""
    lengths: list[int] = []
    gaps: Gaps = []
    for _ in range(draw(st.integers(1, 4))):
        length = draw(st.integers(1, 400))
        begin = draw(st.integers(0, length))
        end = draw(st.integers(begin, length))
        if end - begin == length:
            end -= 1
        lengths.append(length)
        gaps.append((begin, end))
    return lengths, gaps


@SLOW
@given(rows=hidden_rows(), group=st.integers(1, 8), page=st.sampled_from([16, 64]))
def test_hidden_tokens_have_no_share(
    library: Library, device: str, rows: tuple[list[int], Gaps], group: int, page: int
) -> None:
    lengths, gaps = rows
    problem = HiddenProblem(
        RANKS, lengths, group, page_tokens=page, device=device, gaps=gaps
    )
    problem.spoil_unused_rows()
    memory = workspace(library, device, len(lengths))
    args = problem.args(0, memory)
    hidden = torch.tensor(gaps, dtype=torch.int32, device=device)
    hide(args, 0, hidden)
    attend(library, args, device)
    error = (problem.o[0].double() - problem.answer(0, torch.float64)).abs().max()
    assert float(error) <= CLOSE


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("flags", [0, OVERLAP])
def test_tokens_hidden_in_codes_and_tail_are_not_attended(
    library: Library, device: str, bits: Literal[8, 4, 2], flags: int
) -> None:
    """The hidden part begins in sealed pages and ends in the tail; blocks share a
    sequence."""
    sealed, tails = [[640], [128], [0], [20_032]], [33, 70, 65, 1]
    tier = Tier(bits, bits)
    problem = CodesProblem(RANKS, sealed, tails, [tier], device=device)
    gaps = [[(0, 0), (64, 603)], [(0, 17), (0, 128)], [(0, 64), (0, 0)]]
    gaps.append([(0, 0), (128, 20_000)])
    hidden = torch.tensor(gaps, dtype=torch.int32, device=device)
    memory = workspace(library, device, len(tails))
    args = problem.args(0, memory)
    args.flags = flags if device == "cuda" else 0
    for part in range(2):
        args.parts[part].hidden = hidden.data_ptr() + 8 * part
        args.parts[part].hidden_stride = 4
    attend(library, args, device)
    expected = seen_answer(problem, gaps)
    error = (problem.o[0].double() - expected).abs().max()
    assert float(error) <= CLOSE * float(expected.abs().max())


def seen_answer(problem: CodesProblem, gaps: list[Gaps]) -> torch.Tensor:
    out: list[torch.Tensor] = []
    for b, own in enumerate(gaps):
        at = 0
        row: list[torch.Tensor] = []
        for head, (rank_k, _) in enumerate(problem.ranks[0]):
            width = problem.group * rank_k
            q = problem.q[0][b, at : at + width].view(problem.group, rank_k)
            at += width
            row.append(_seen_head(problem, q.double(), b, head, own))
        out.append(torch.cat(row))
    return torch.stack(out)


def _seen_head(
    problem: CodesProblem, q: torch.Tensor, b: int, head: int, gaps: Gaps
) -> torch.Tensor:
    tail = problem._tail(b, problem.rows(0, 0)[head])
    k, k_scale, k_least, v, v_scale, v_least = problem._quantized(
        1, b, problem.rows(1, 0)[head]
    )
    pairs = [tail, (k * k_scale + k_least, v * v_scale + v_least)]
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    for (own_k, own_v), (begin, end) in zip(pairs, gaps, strict=True):
        keys += [own_k[:begin], own_k[end:]]
        values += [own_v[:begin], own_v[end:]]
    shares = torch.softmax(q @ torch.cat(keys).T * problem.scale, -1)
    return (shares @ torch.cat(values)).flatten()
