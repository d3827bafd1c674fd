"""Warps that attend alone (attend_alone.cuh), on a CPU (tests/native_cpu/emulated): the
answers of blocks, which the same calls have below KVLATHE_ALONE_PAIRS."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_int64
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from kvlathe.plan.formats import Bits, Tier
from kvlathe.runtime.native.cuda import Prompts
from tests.native.codes_problem import CodesProblem
from tests.native.library import APPENDED, OVERLAP, AttendDecodeArgs, Status
from tests.native_cpu.test_many_buckets import on_128
from tests.support.emulated import emulated_kernels
from tests.support.nightly import rest_nightly

pytestmark = pytest.mark.nightly
"""Their kernels are compiled first, which takes half a minute."""

RANKS = [(16, 32), (96, 16), (64, 80), (112, 128)]
NEVER = str(1 << 30)
"""Pairs a block that no call has."""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return emulated_kernels(tmp_path_factory.mktemp("alone"), "alone")


class Calls:
    """Calls of one problem, by blocks and by warps alone, in dirty answers and one
    workspace, which they must leave as zeros."""

    def __init__(
        self,
        kernels: ctypes.CDLL,
        problem: CodesProblem,
        patch: pytest.MonkeyPatch,
        sms: int = 3,
    ) -> None:
        self.kernels, self.problem, self.patch = kernels, problem, patch
        problem.pool = on_128(problem.pool)
        kernels.become(sms)
        patch.setenv("KVLATHE_ALONE_PAIRS", "0")
        self.space = on_128(torch.zeros(self._bytes("workspace", 1, 1)).byte())
        self.plan = on_128(torch.zeros(self._bytes("plan")).byte())

    def _bytes(self, what: str, *given: int) -> int:
        size = c_int64()
        self._call(f"kvlathe_cuda_{what}_bytes", *given, byref(size))
        return size.value

    def _call(self, name: str, *given: Any) -> None:  # noqa: ANN401  (structures)
        status = Status()
        failed = getattr(self.kernels, name)(*given, byref(status))
        assert not failed, status.message.decode()

    def args(self, flags: int = 0) -> AttendDecodeArgs:
        self.problem.o[0] = self.problem.poisoned(0)
        args = self.problem.args(0, self.space)
        args.flags = flags
        return args

    def chosen(self) -> int:
        return int(self.kernels.alone_chosen())

    def run(self, pairs: str, flags: int = 0, planned: bool = False) -> Tensor:
        """o with that KVLATHE_ALONE_PAIRS."""
        self.patch.setenv("KVLATHE_ALONE_PAIRS", pairs)
        before, args = self.chosen(), self.args(flags)
        if planned:
            self.plan.random_(0, 256)
            args.plan, args.plan_bytes = self.plan.data_ptr(), len(self.plan)
            self._call("kvlathe_cuda_plan", byref(args), 1)
        self._call("kvlathe_cuda_attend_decode", byref(args))
        assert self.chosen() - before == (pairs == "0") * (1 + planned)
        assert not self.space.any()
        return self.problem.o[0]

    def check(self) -> None:
        """Plans change no bit; blocks and float64 have the same answers. Tiles may come
        early, and a block be spare."""
        blocks, rounding = self.run(NEVER), 3 * 2.0**-11
        for flags in (0, OVERLAP, OVERLAP | APPENDED):
            alone = self.run("0", flags)
            torch.testing.assert_close(alone, blocks, rtol=2.0**-9, atol=rounding)
            own, form, between = self.problem.errors(0)
            assert own <= 1.2 * form + rounding and between <= 0.5
            assert self.run("0", flags, planned=True).equal(alone)


def spoil(problem: CodesProblem) -> None:
    """NaN in the rows of 16-bit pages where no token lies."""
    pages = problem._pages(0)
    for row in problem.rows(0, 0):
        for b, tail in enumerate(problem.tails):
            if rest := tail % problem.page_tokens:
                page = pages[problem.tables[0][b, tail // problem.page_tokens]]
                for at, rank in ((row[4], row[2]), (row[6], row[3])):
                    end = at + 2 * problem.page_tokens * rank
                    page[at + 2 * rest * rank : end] = 255


def problem_of(
    bits: Bits,
    sealed: Sequence[int],
    tails: Sequence[int],
    group: int = 4,
    page: int = 64,
    group_v: int = 64,
) -> CodesProblem:
    tier = Tier(bits, bits, group_v=group_v, arithmetic="int")
    cold = [[n] for n in sealed]
    problem = CodesProblem([RANKS], cold, tails, [tier], group, page_tokens=page)
    spoil(problem)
    return problem


CODED: tuple[Literal[8, 4, 2], ...] = (8, 4, 2)
BATCHES = {
    "short": ([256] * 14, [32] * 14),
    "ragged": (
        [0, 640, 0, 64, 0, 0, 128, 1, 70, 0, 0, 63],
        [33, 0, 0, 1, 0, 0, 64, 7, 0, 0, 1, 5],
    ),
    "no tails": ([128] * 9, [0] * 9),
    "tails": ([0] * 8 + [64], [33, 1, 0, 16, 17, 64, 2, 0, 3]),
    "one of many": ([64, 64, 8192, 64, 64, 0], [1, 0, 5, 0, 3, 0]),
    "a sequence": ([4096], [3]),
    "a page": ([64], [1]),
}


SHAPES = [(1, 64, 64), (3, 64, 32), (8, 64, 64), (5, 128, 128), (4, 128, 64)]
"""Query heads of a KV head, tokens of a page and of a group of V."""


@pytest.mark.slow
@pytest.mark.parametrize("bits", CODED)
@pytest.mark.parametrize("name", BATCHES)
def test_warps_alone_answer_as_blocks(
    kernels: ctypes.CDLL, name: str, bits: Bits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Empty sequences and those of one token, pairs of one warp and of all."""
    Calls(kernels, problem_of(bits, *BATCHES[name]), monkeypatch).check()


@pytest.mark.parametrize("bits", CODED)
@pytest.mark.parametrize(("group", "page", "group_v"), SHAPES)
def test_warps_that_attend_alone_take_other_groups_and_pages(
    kernels: ctypes.CDLL,
    bits: Bits,
    group: int,
    page: int,
    group_v: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sealed, tails = [320, 0, 1, 700, 129, 640, 64], [5, 0, 0, 17, 1, 0, 33]
    problem = problem_of(bits, sealed, tails, group, page, group_v)
    Calls(kernels, problem, monkeypatch).check()


@pytest.mark.parametrize("bits", rest_nightly(CODED))
def test_a_pair_crosses_hundreds_of_warps(
    kernels: ctypes.CDLL, bits: Bits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of them add up the results of those before them. A block is spare."""
    problem = problem_of(bits, [64, 25_600, 64, 0, 64], [1, 9, 0, 0, 3])
    Calls(kernels, problem, monkeypatch, sms=20).check()


@pytest.mark.parametrize("bits", CODED)
def test_seven_pairs_for_four_multiprocessors_are_many(
    kernels: ctypes.CDLL, bits: Bits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any width, where KVLATHE_ALONE_PAIRS says nothing else. One multiprocessor
    more, and blocks attend."""
    most = 4 * len(RANKS)  # of 7 sequences, each of so many pairs as there are heads
    calls = Calls(kernels, problem_of(bits, [64] * 7, [1] * 7), monkeypatch, most + 1)
    monkeypatch.delenv("KVLATHE_ALONE_PAIRS")
    for sms, alone in ((most, 1), (most + 1, 0)):
        kernels.become(sms)
        args, before = calls.args(), calls.chosen()
        calls._call("kvlathe_cuda_attend_decode", byref(args))
        assert calls.chosen() - before == alone


def test_only_many_pairs_of_steps_without_prompts(
    kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of prompts have no work in a call, and are counted in its batch. What is no
    number names no number of pairs."""
    calls = Calls(kernels, problem_of(4, [64], [1]), monkeypatch)
    args = calls.args()
    prompts = Prompts(rows=args.batch)
    before = calls.chosen()
    for given, beside in (("0", byref(prompts)), ("off", None), ("", None)):
        monkeypatch.setenv("KVLATHE_ALONE_PAIRS", given)
        args.prompts = ctypes.cast(beside, ctypes.c_void_p) if beside else None
        calls._call("kvlathe_cuda_attend_decode", byref(args))
        assert calls.chosen() == before
    monkeypatch.delenv("KVLATHE_ALONE_PAIRS")
    most = calls._bytes("workspace", 1 << 20, 1)
    assert calls._bytes("workspace", 0, 1) == calls._bytes("workspace", 1, 1) < most
