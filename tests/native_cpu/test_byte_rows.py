"""Decode attention over rows of bytes (attend_bytes.cuh), on a CPU
(tests/native_cpu/emulated), against float64 on what the codes mean."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int64
from typing import Any

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
from tests.native.library import APPENDED, OVERLAP, Status
from tests.native_cpu.test_many_buckets import on_128
from tests.support.emulated import emulated_kernels

pytestmark = pytest.mark.nightly
"""Their kernels are compiled first, which takes half a minute."""


@pytest.fixture(autouse=True)
def unproven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(UNPROVEN, "1")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return emulated_kernels(tmp_path_factory.mktemp("bytes"), "bytes")


def call(kernels: ctypes.CDLL, name: str, *given: Any) -> None:  # noqa: ANN401
    status = Status()
    failed = getattr(kernels, f"kvlathe_cuda_{name}")(*given, byref(status))
    assert not failed, status.message.decode()


def room(kernels: ctypes.CDLL, what: str, *given: int) -> torch.Tensor:
    size = c_int64()
    call(kernels, f"{what}_bytes", *given, byref(size))
    return on_128(torch.zeros(size.value, dtype=torch.uint8))


def attend_and_check(kernels: ctypes.CDLL, problem: CodesProblem, sms: int) -> None:
    """With early tiles and without, with a plan and without: the same bits, by the
    kernel of rows of bytes, which leaves its workspace as zeros."""
    kernels.become(sms)
    problem.pool = on_128(problem.pool)
    space, plan = room(kernels, "workspace", 1, 1), room(kernels, "plan")
    answers: list[torch.Tensor] = []
    for flags in (0, OVERLAP, OVERLAP | APPENDED):
        for planned in (False, True):
            problem.o[0] = problem.poisoned(0)
            args, before = problem.args(0, space), kernels.bytes_chosen()
            args.flags = flags
            if planned:
                plan.random_(0, 256)
                args.plan, args.plan_bytes = plan.data_ptr(), len(plan)
                call(kernels, "plan", byref(args), 1)
            call(kernels, "attend_decode", byref(args))
            assert kernels.bytes_chosen() - before == 1 + planned
            assert not space.any()
            answers.append(problem.o[0])
    check(problem)
    assert all(answers[2 * i].equal(answers[2 * i + 1]) for i in range(3))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BATCHES)
def test_rows_of_bytes_are_attended(
    kernels: ctypes.CDLL, name: str, kind: Kind
) -> None:
    attend_and_check(kernels, problem_of(kind, *BATCHES[name]), 3)


@pytest.mark.parametrize(("kind", "group", "page"), SHAPES)
def test_rows_of_bytes_are_attended_by_other_groups_and_pages(
    kernels: ctypes.CDLL, kind: Kind, group: int, page: int
) -> None:
    sealed, tails = [320, 0, 1, 700, 129, 640, 64], [5, 0, 0, 17, 1, 0, 33]
    problem = problem_of(kind, sealed, tails, group, page)
    attend_and_check(kernels, problem, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_values_that_shares_would_take_out_of_halves_are_attended(
    kernels: ctypes.CDLL, kind: Kind
) -> None:
    problem = problem_of(kind, [2048, 640], [33, 0])
    louden(problem, 2000)
    attend_and_check(kernels, problem, 2)
