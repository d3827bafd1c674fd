"""The rivals of decode_baselines.py: work lists, and its Triton kernels against
float64 on ours' pages.

The kernels need triton and a GPU, or TRITON_INTERPRET=1, which runs them slowly on the
CPU.
"""

from __future__ import annotations

import os
import random
from importlib.util import find_spec

import pytest
import torch

from benchmarks.decode_baselines import Case, arguments, comparisons, forms_of
from benchmarks.support.work_lists import WHOLE, WorkList, longest_first, work_list
from kvlathe.plan.formats import Bits, Tier
from tests.native.chunk_problem import ChunkProblem
from tests.native.codes_problem import CodesProblem
from tests.native.problem import Problem

MIXED = [[(16, 32), (96, 16), (64, 80)], [(32, 48), (80, 112), (64, 16)]]
NARROW = [[(48, 64), (16, 32)]] * 2


def problems() -> list[tuple[list[int], list[tuple[int, int]], int]]:
    draw = random.Random(0)
    return [
        (
            [
                draw.choice([0, 1, 64, 65, 1000, 5000])
                for _ in range(draw.randint(1, 6))
            ],
            [
                (16 * draw.randint(1, 8), 16 * draw.randint(1, 8))
                for _ in range(draw.randint(1, 5))
            ],
            draw.randint(1, 40),
        )
        for _ in range(60)
    ]


def costs(work: WorkList, ranks: list[tuple[int, int]]) -> list[int]:
    """The cost of each worker, in channels of pages."""
    bounds = zip(work.starts, work.starts[1:], strict=False)
    return [
        sum(int(s[3]) * sum(ranks[s[1]]) for s in work.spans[start:end])
        for start, end in bounds
    ]


@pytest.mark.parametrize("rule", ["longest-first", "balanced"])
def test_every_page_is_someones_once_and_slots_are_of_their_pair(rule: str) -> None:
    for lengths, ranks, workers in problems():
        work = work_list(rule, lengths, ranks, 64, workers)
        pages = [
            (b, h, page)
            for b, h, first, count, _ in work.spans
            for page in range(first, first + count)
        ]
        wanted = [
            (b, h, p)
            for b, n in enumerate(lengths)
            for h in range(len(ranks))
            for p in range(-(-n // 64))
        ]
        assert sorted(pages) == wanted and len(work.starts) == workers + 1
        parts = [
            (b * len(ranks) + h, slot)
            for b, h, _, _, slot in work.spans
            if slot != WHOLE
        ]
        assert sorted(slot for _, slot in parts) == list(range(int(work.slots[-1, 1])))
        assert all(
            work.slots[pair, 0] <= slot < work.slots[pair, 1] for pair, slot in parts
        )


def test_equal_intervals_differ_by_a_page_and_longest_first_splits_nothing() -> None:
    for lengths, ranks, workers in problems():
        page = max(sum(pair) for pair in ranks)
        cut = costs(work_list("balanced", lengths, ranks, 64, workers), ranks)
        assert max(cut) <= sum(cut) / workers + page
        work = work_list("longest-first", lengths, ranks, 64, workers)
        assert (
            not work.split
            and (work.spans[:, 4] == WHOLE).all()
            and (work.spans[:, 2] == 0).all()
        )
        most = max((-(-n // 64) * page for n in lengths), default=0)
        assert max(costs(work, ranks)) <= sum(cut) / workers + most


def test_longest_first_is_the_papers_rule() -> None:
    """ZACK's figure 12: sorted, each to the least loaded of three."""
    assert longest_first([9, 8, 7, 6, 5, 4, 3], 3) == [[0, 5, 6], [1, 4], [2, 3]]


def test_decode_baselines_compares_what_its_arguments_name() -> None:
    a = arguments(
        [
            "--library",
            "x",
            "--what",
            "sums,schedule",
            "--bits",
            "4,2",
            "--ranks",
            "mixed,uniform64",
        ]
    )
    work = comparisons(a)
    assert [(what, case.dist) for what, case in work[:2]] == [
        ("schedule", "zipf"),
        ("schedule", "even"),
    ]
    assert [case for what, case in work if what == "sums"] == [
        Case(16, 32768, bits, ranks)
        for ranks in ("mixed", "uniform64")
        for bits in (4, 2)
    ]
    assert ("integer", 4, "stored", True) in forms_of(work) and (
        "rows",
        16,
        "none",
        False,
    ) in forms_of(work)
    with pytest.raises(SystemExit, match="nothing: choose from palu"):
        comparisons(arguments(["--library", "x", "--what", "nothing"]))


# -- kernels ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def device() -> str:
    if find_spec("triton") is None:
        pytest.skip("no triton")
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("no GPU, and TRITON_INTERPRET is not 1")
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("ranks", [MIXED, NARROW])
@pytest.mark.parametrize("rule", ["longest-first", "balanced"])
@pytest.mark.parametrize("form", ["rows", "rebuilt"])
def test_triton_kernels_on_16_bit_pages_are_near_float64(
    device: str, form: str, rule: str, ranks: list[list[tuple[int, int]]]
) -> None:
    from benchmarks.support.triton_calls import TritonCall, Tuning

    problem = Problem(ranks, [300, 17, 128, 64, 1], device=device)
    tuning = (
        Tuning(4, 3, 1, 64, False) if rule == "longest-first" else Tuning(4, 3, 1, 128)
    )
    call = TritonCall(problem, form, rule, tuning, 7)
    for layer in range(len(ranks)):
        call(layer)
        exact, allowed = call.reference(layer, range(5))
        assert (problem.o[layer].double() - exact).abs().max() <= allowed


@pytest.mark.parametrize("ranks", [MIXED, NARROW])
@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize(
    ("form", "sums"),
    [
        ("dequantized", "none"),
        ("integer", "none"),
        ("integer", "stored"),
        ("integer", "recomputed"),
    ],
)
def test_triton_kernels_on_codes_are_near_float64(
    device: str, form: str, sums: str, bits: Bits, ranks: list[list[tuple[int, int]]]
) -> None:
    from benchmarks.support.triton_calls import TritonCall, Tuning, store_sums

    tier = Tier(bits, bits, arithmetic="int", sums=sums == "stored")
    problem = CodesProblem(
        ranks, [[640], [64], [128]], [33, 0, 5], [tier], device=device
    )
    if sums == "stored":
        store_sums(problem)
    call = TritonCall(problem, form, "balanced", Tuning(4, 3, 1), 7, sums)
    for layer in range(len(ranks)):
        call(layer)
        exact, allowed = call.reference(layer, range(3))
        assert (problem.o[layer].double() - exact).abs().max() <= allowed


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_unpacked_pages_are_what_the_codes_mean(device: str, bits: Bits) -> None:
    from benchmarks.support.triton_calls import Unpacked

    tier = Tier(bits, bits, arithmetic="int")
    problem = CodesProblem(MIXED, [[128], [64]], [33, 5], [tier], device=device)
    unpacked = Unpacked(problem, 4)
    unpacked(1)
    for b, tail in enumerate(problem.tails):
        n = int(problem.lengths[b, 1])
        for head, row in enumerate(problem.rows(0, 1)):
            k, scale, least, v, v_scale, v_least = problem._quantized(
                1, b, problem.rows(1, 1)[head]
            )
            for at, rank, exact in (
                (row[4], row[2], k * scale + least),
                (row[6], row[3], v * v_scale + v_least),
            ):
                pages = unpacked.pages()[unpacked.table[b, : n // 64 + 1].long()]
                found = (
                    pages[:, at : at + 128 * rank]
                    .contiguous()
                    .view(torch.float16)
                    .view(-1, rank)[: n + tail]
                )
                own = problem._tail(b, row)[0 if at == row[4] else 1]
                torch.testing.assert_close(found[:n].double(), exact, atol=4e-3, rtol=0)
                assert torch.equal(found[n:].double(), own)


@pytest.mark.parametrize(
    "form", ["half", "products", "uncorrected", "symmetric", "asymmetric"]
)
def test_triton_prefill_on_codes_is_near_float64(device: str, form: str) -> None:
    """Every shape of a head; both kinds of tile."""
    from benchmarks.support.triton_prompt import PromptCall

    problem = ChunkProblem(
        [[(16, 32), (96, 80), (64, 64)]],
        [256],
        2,
        chunks=[256],
        knows_rows=True,
        device=device,
    )
    call = PromptCall(problem, 0)
    call.quantize("q", form != "asymmetric")
    for tile in (64, 128):
        call.out.fill_(float("nan"))
        call.attend(form, tile, tile // 16, 2)
        wrong, allowed = call.wrong_by(form, [0, 1, 100, 126, 255], tile)
        assert wrong <= allowed
    if form != "products" and form != "uncorrected":
        assert call.error([0, 1, 100, 126, 255]) <= (2e-2 if form != "half" else 2e-3)
