"""A step's plan made before its calls: the answers of calls that plan for themselves,
bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from kvlathe.plan.formats import Tier
from tests.native.codes_problem import CodesProblem
from tests.native.library import (
    APPENDED,
    BAD_ARGUMENT,
    MISALIGNED,
    OVERLAP,
    TOO_SMALL,
    AttendDecodeArgs,
    Library,
    NativeError,
)
from tests.native.problem import Problem
from tests.support.format_cases import bits_of

RECORD, IDS = (
    96,
    32,
)  # PlanRecord of schedule.cuh: int32 of a block, and where its page ids start

LAYERS = [
    [(16, 32), (96, 16), (64, 80), (48, 96)],
    [(48, 48), (16, 16), (80, 96), (32, 64)],
    [(112, 128), (128, 16), (16, 80), (64, 64)],
]


@pytest.fixture
def gpu(library: Library) -> Library:
    if not (torch.cuda.is_available() and library.has_cuda):
        pytest.skip("no GPU, or a library without CUDA kernels")
    return library


def sixteen(lengths: Sequence[int], page_tokens: int = 64) -> Problem:
    return Problem(LAYERS, lengths, page_tokens=page_tokens, device="cuda")


def codes(bits: int, lengths: Sequence[int]) -> CodesProblem:
    tier = Tier(bits_of(bits), bits_of(bits), arithmetic="int")
    sealed = [[n // 64 * 64] for n in lengths]
    return CodesProblem(
        LAYERS, sealed, [n % 64 for n in lengths], [tier], device="cuda"
    )


class Calls:
    """A step's calls, each with room for a plan."""

    def __init__(self, library: Library, problem: Problem | CodesProblem) -> None:
        self.library, self.problem = library, problem
        self.space = torch.zeros(
            library.workspace_bytes(1, 4), dtype=torch.uint8, device="cuda"
        )
        self.plans = torch.zeros(
            len(problem.ranks), library.plan_bytes(), dtype=torch.uint8, device="cuda"
        )
        self.args = [
            problem.args(layer, self.space) for layer in range(len(problem.ranks))
        ]

    def give(self, plans: torch.Tensor | None) -> None:
        for layer, args in enumerate(self.args):
            args.plan = None if plans is None else plans[layer].data_ptr()
            args.plan_bytes = 0 if plans is None else len(plans[layer])

    def flag(self, flags: int) -> None:
        for args in self.args:
            args.flags = flags

    def answers(self) -> list[torch.Tensor]:
        """Every layer's o; the calls overlap where their flags say so."""
        for layer, args in enumerate(self.args):
            out = self.problem.o[layer] = self.problem.poisoned(layer)
            args.o = out.data_ptr()
        torch.cuda.synchronize()
        for args in self.args:
            self.library.attend_decode(args, "cuda")
        torch.cuda.synchronize()
        assert not self.space.any(), (
            "a call must leave its workspace ready for the next"
        )
        return list(self.problem.o)


PROBLEMS = {
    "ragged": lambda: sixteen([300, 0, 17, 128, 1, 63, 0, 513]),
    "long": lambda: sixteen([9_000, 1, 70_000, 0, 333]),
    "many": lambda: sixteen([100 + i % 7 for i in range(700)]),
    "small pages": lambda: sixteen([4_000, 0, 90], page_tokens=16),
    "8 bit": lambda: codes(8, [300, 0, 64, 20_000, 1, 70]),
    "4 bit": lambda: codes(4, [40_000, 63, 0, 129]),
    "2 bit": lambda: codes(2, [70_000, 5]),
}


@pytest.mark.parametrize("pairs", ["0", str(1 << 30)])
@pytest.mark.parametrize("name", PROBLEMS)
def test_planned_calls_give_the_same_bits(
    gpu: Library, name: str, pairs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers of different ranks in one plan; also where tiles are fetched before the
    kernel before is done, by blocks and by warps that attend alone."""
    monkeypatch.setenv("KVLATHE_ALONE_PAIRS", pairs)
    calls = Calls(gpu, PROBLEMS[name]())
    for flags in (0, OVERLAP, OVERLAP | APPENDED):
        calls.give(None)
        calls.flag(flags)
        own = calls.answers()
        calls.give(calls.plans)
        gpu.plan(calls.args)
        for _ in range(2):
            for mine, planned in zip(own, calls.answers(), strict=True):
                assert mine.equal(planned)


def test_attention_reads_the_plan_that_was_made_before(gpu: Library) -> None:
    """Calls read the page ids that the plan holds: with those of other pages in it, the
    answers are others."""
    calls = Calls(gpu, sixteen([9_000, 1, 7_000]))
    own = calls.answers()
    calls.give(calls.plans)
    gpu.plan(calls.args)
    ids = calls.plans.view(torch.int32).view(len(calls.plans), -1, RECORD)[:, :, IDS:]
    ids.copy_(ids.flip(-1))
    assert not any(
        mine.equal(planned) for mine, planned in zip(own, calls.answers(), strict=True)
    )


@pytest.mark.parametrize("other", [[300, 64], [300, 64, 70, 9_000], [12, 0, 5]])
def test_a_plan_of_another_step_is_not_used(gpu: Library, other: list[int]) -> None:
    """Made for another batch, or for other tables."""
    calls, before = Calls(gpu, sixteen([300, 5_000, 70])), Calls(gpu, sixteen(other))
    own = calls.answers()
    before.give(calls.plans)
    gpu.plan(before.args)
    calls.give(calls.plans)
    for mine, planned in zip(own, calls.answers(), strict=True):
        assert mine.equal(planned)


def test_plans_without_memory_or_of_other_calls_are_refused(gpu: Library) -> None:
    calls = Calls(gpu, sixteen([300, 64]))

    def refused(code: int, args: AttendDecodeArgs, words: str) -> None:
        for call in (lambda: gpu.attend_decode(args, "cuda"), lambda: gpu.plan([args])):
            with pytest.raises(NativeError, match=words) as refusal:
                call()
            assert refusal.value.code == code

    with pytest.raises(NativeError, match="no memory for its plan") as refusal:
        gpu.plan(calls.args)
    assert refusal.value.code == BAD_ARGUMENT
    calls.give(calls.plans)
    calls.args[0].plan_bytes = 100
    refused(TOO_SMALL, calls.args[0], "plan's memory has 100 bytes")
    calls.args[1].plan += 64
    refused(MISALIGNED, calls.args[1], "aligned to 128")
