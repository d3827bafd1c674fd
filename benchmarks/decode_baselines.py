"""Our decode attention beside others, in one run on the same pages: one layer,
on one GPU.

  python3 -m benchmarks.decode_baselines --library build/native/libkvlathe.so

  palu         K and V in low rank, K before RoPE: all columns of K are rebuilt and turned inside the attention
  dequantize   codes to a 16-bit buffer in device memory, then our 16-bit kernel (unpacked); and in registers, with
               16-bit products, in one kernel (fused): HACK without integer arithmetic
  schedule     longest-first (one span a (sequence, head), sorted, each to the least loaded worker) against equal
               intervals of bytes in the same Triton kernel, and against ours
  uniform      ranks 16 to 96 against the same rank everywhere, equal bytes, ours
  sums         Triton's products of codes without sums, with stored sums and with sums taken again at each step
  tail         ours with a 16-bit tail against a tail that is sealed again at each step

Baselines are Triton kernels (triton_decode.py), each with the best of a list of tunings
for every case; their work lists are made outside the timing. Every answer is checked
against float64 first: at most twice the error of plain 16-bit torch (products of codes:
4 times that of the form itself), or the row says WRONG and nothing is timed. Timing as
in decode_h200.py. Needs torch, triton and a GPU; prints one table and one JSON line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.decode_h200 import give_plans
from benchmarks.support.commands import parser_of
from benchmarks.support.gpu import lengths_of, ranks_of, seconds_a_call
from kvlathe.plan.formats import Tier
from tests.native.codes_problem import CodesProblem
from tests.native.library import OVERLAP, Library
from tests.native.problem import Problem
from tests.support.format_cases import bits_of

if TYPE_CHECKING:
    from benchmarks.support.triton_calls import TritonCall, Tuning, UnpackThenAttend

    Call = TritonCall | UnpackThenAttend

# warps, stages, programs an SM, tokens a tile, a launch for each class of ranks
SWEEPS = {
    "rows": [(2, 4, 6, 64, True), (4, 4, 3, 64, True), (2, 5, 8, 64, True), (2, 4, 6, 64, False),
             (4, 4, 3, 64, False), (8, 3, 2, 128, False), (8, 5, 1, 128, True)],
    "rebuilt": [(4, 3, 2, 64, True), (4, 2, 3, 64, True), (2, 3, 4, 64, True), (8, 3, 1, 64, True),
                (4, 3, 2, 64, False)],
    "dequantized": [(1, 6, 12, 64, True), (1, 4, 16, 64, True), (2, 4, 8, 64, True), (2, 5, 10, 64, True),
                    (4, 4, 2, 64, False)],
    "integer": [(1, 6, 12, 64, True), (1, 4, 8, 64, True), (2, 4, 8, 64, True)],
}  # fmt: skip
MOST_BYTES = 24 << 30


@dataclass(frozen=True)
class Row:
    what: str
    case: str
    bits: int
    ranks: str
    dist: str
    name: str
    us: float
    ours_us: float
    error: float
    allowed: float
    tuning: str

    @property
    def right(self) -> bool:
        return self.error <= self.allowed

    def __str__(self) -> str:
        times = (
            f"{self.us:9.1f} {self.ours_us:9.1f} {self.us / self.ours_us:6.2f}x"
            if self.right
            else f"{'WRONG':>27}"
        )
        return (
            f"{self.what:>10} {self.case:>9} {self.bits:>4} {self.ranks:>9} {self.dist:>5} {self.name:>14} {times}  "
            f"{self.error:.1e} / {self.allowed:.1e}  {self.tuning}"
        )


@dataclass(frozen=True)
class Case:
    batch: int
    tokens: int
    bits: int = 16
    ranks: str = "mixed"
    dist: str = "even"

    def problem(
        self, a: argparse.Namespace, tail: bool = True, sums: bool = False
    ) -> Problem | CodesProblem:
        lengths = lengths_of(self.batch, self.tokens, self.dist)
        pages = [-(-n // 64) for n in lengths]
        size = (
            self.batch * self.tokens * 2 * 52 * 2 * a.heads
        )  # a layer's bytes in 16 bit, about
        layers = min(a.layers, max(3, MOST_BYTES // size))
        ranks = ranks_of(self.ranks, layers, a.heads, 0)
        if self.bits == 16:
            return Problem(ranks, lengths, a.group, device="cuda")
        tier = Tier(bits_of(self.bits), bits_of(self.bits), arithmetic="int", sums=sums)
        rest = 32
        sealed = [[64 * n + (0 if tail else rest)] for n in pages]
        return CodesProblem(
            ranks, sealed, [rest * tail] * self.batch, [tier], a.group, device="cuda"
        )

    def row(
        self,
        what: str,
        name: str,
        seconds: float,
        ours: float,
        errors: tuple[float, float],
        how: str,
    ) -> Row:
        case = f"{self.batch}x{self.tokens}"
        return Row(
            what,
            case,
            self.bits,
            self.ranks,
            self.dist,
            name,
            seconds * 1e6,
            ours * 1e6,
            *errors,
            how,
        )


class Bench:
    def __init__(self, a: argparse.Namespace) -> None:
        self.a, self.library = a, Library(a.library.resolve())
        self.processors = torch.cuda.get_device_properties(0).multi_processor_count

    def space(self, case: Case) -> torch.Tensor:
        size = self.library.workspace_bytes(case.batch, self.a.heads)
        return torch.zeros(size, dtype=torch.uint8, device="cuda")

    def timed(self, call: Callable[[int], None], layers: int) -> float:
        return seconds_a_call(call, layers, self.a.replays)

    def ours(
        self, case: Case, problem: Problem | CodesProblem
    ) -> tuple[float, tuple[float, float]]:
        """Seconds, and (error, allowed) of our kernel."""
        space = self.space(case)
        args = [problem.args(layer, space) for layer in range(len(problem.ranks))]
        plans = give_plans(self.library, args)
        self.library.plan(args)

        def call(i: int) -> None:
            args[i].stream = torch.cuda.current_stream().cuda_stream
            self.library.attend_decode(args[i], "cuda")

        call(1)
        torch.cuda.synchronize()
        errors = problem.errors(1, sorted({0, case.batch - 1}))
        seconds = self.timed(call, len(problem.ranks))
        del plans
        return seconds, (errors[0], (2 if case.bits == 16 else 1.5) * errors[1] + 2e-3)

    def best(
        self,
        case: Case,
        problem: Problem | CodesProblem,
        form: str,
        rule: str = "balanced",
        sums: str = "none",
    ) -> tuple[float, tuple[float, float], str]:
        """Seconds, (error, allowed) and the tuning of the fastest right one; the first
        wrong one if one is wrong."""
        from benchmarks.support.triton_calls import TritonCall

        calls = (
            TritonCall(problem, form, rule, tuning, self.processors, sums)
            for tuning in tunings(form)
        )
        return self.fastest(case, problem, ((call, str(call.tuning)) for call in calls))

    def fastest(
        self,
        case: Case,
        problem: Problem | CodesProblem,
        calls: Iterable[tuple[Call, str]],
    ) -> tuple[float, tuple[float, float], str]:
        """The fastest of several ways to the same answer, checked before they are
        timed; some may need too much shared memory."""
        from triton.runtime.errors import OutOfResources

        found, reference, sequences = [], None, sorted({0, case.batch - 1})
        for call, how in calls:
            exact, allowed = reference = reference or call.reference(1, sequences)
            problem.o[1].fill_(math.nan)
            try:
                call(1)
            except OutOfResources:
                continue
            error = float((problem.o[1][sequences].double() - exact).abs().max())
            if not error <= allowed:  # NaN too
                return math.inf, (error, allowed), how
            found.append((self.timed(call, len(problem.ranks)), (error, allowed), how))
        return min(found)

    # -- what is compared --------------------------------------------------------------
    def palu(self, case: Case) -> Iterator[Row]:
        problem = case.problem(self.a)
        ours, _ = self.ours(case, problem)
        yield case.row(
            "palu",
            "rebuilt",
            *(x := self.best(case, problem, "rebuilt"))[:1],
            ours,
            *x[1:],
        )
        yield case.row(
            "palu",
            "not rebuilt",
            *(x := self.best(case, problem, "rows"))[:1],
            ours,
            *x[1:],
        )

    def dequantize(self, case: Case) -> Iterator[Row]:
        from benchmarks.support.triton_calls import UnpackThenAttend

        problem = case.problem(self.a)
        assert isinstance(problem, CodesProblem)
        ours, errors = self.ours(case, problem)
        yield case.row("dequantize", "ours", ours, ours, errors, "")
        yield case.row(
            "dequantize",
            "fused",
            *(x := self.best(case, problem, "dequantized"))[:1],
            ours,
            *x[1:],
        )
        space = self.space(case)
        calls = (
            (UnpackThenAttend(self.library, problem, space, OVERLAP, n), f"{n} warps")
            for n in (4, 8)
        )
        yield case.row(
            "dequantize",
            "unpacked",
            *(x := self.fastest(case, problem, calls))[:1],
            ours,
            *x[1:],
        )

    def schedule(self, case: Case) -> Iterator[Row]:
        problem = case.problem(self.a)
        ours, errors = self.ours(case, problem)
        yield case.row("schedule", "ours", ours, ours, errors, "")
        for rule in ("longest-first", "balanced"):
            yield case.row(
                "schedule",
                rule,
                *(x := self.best(case, problem, "rows", rule))[:1],
                ours,
                *x[1:],
            )

    def uniform(self, case: Case) -> Iterator[Row]:
        ours = [
            self.ours(x, x.problem(self.a))
            for x in (case, Case(case.batch, case.tokens, case.bits, "uniform48"))
        ]
        yield case.row(
            "uniform", "mixed", ours[0][0], ours[1][0], ours[0][1], "against uniform48"
        )

    def sums(self, case: Case) -> Iterator[Row]:
        from benchmarks.support.triton_calls import store_sums

        problem = case.problem(self.a, sums=True)
        assert isinstance(problem, CodesProblem)
        store_sums(problem)
        ours, _ = self.ours(case, problem)
        for sums in ("none", "stored", "recomputed"):
            yield case.row(
                "sums",
                sums,
                *(x := self.best(case, problem, "integer", sums=sums))[:1],
                ours,
                *x[1:],
            )

    def tail(self, case: Case) -> Iterator[Row]:
        """A tail that is sealed again at each step: all tokens in codes, and every
        sequence's open page sealed."""
        from kvlathe.runtime.native.cuda import CudaLibrary, PageKernels
        from kvlathe.runtime.native.library import Native

        ours, errors = self.ours(case, case.problem(self.a))
        yield case.row("tail", "16 bit", ours, ours, errors, "")
        problem = case.problem(self.a, tail=False)
        assert isinstance(problem, CodesProblem)
        attended, errors = self.ours(case, problem)
        kernels = PageKernels(
            CudaLibrary(Native.load(self.a.library)),
            problem.layout.plan,
            problem.pool.data_ptr(),
            problem.pool.numel(),
        )
        last = problem.pool.numel() // problem.layout.page_stride[0] - 1
        open_pages = [
            int(problem.tables[1][b, int(problem.lengths[b, 1]) // 64])
            for b in range(case.batch)
        ]
        jobs = [(last - b, page, 0) for b, page in enumerate(open_pages)]

        def seal(_: int) -> None:
            kernels.seal(0, 1, jobs, torch.cuda.current_stream().cuda_stream)

        sealed = self.timed(seal, 4) / len(problem.ranks)
        how = f"attention {attended * 1e6:.1f} us, sealing {sealed * 1e6:.1f} us"
        yield case.row("tail", "sealed again", attended + sealed, ours, errors, how)


Wanted = tuple[str, int, str, bool]
"""A Triton kernel: form, bits, sums, whether ranks go beyond 64."""


def tunings(form: str) -> list[Tuning]:
    from benchmarks.support.triton_calls import Tuning

    return [Tuning(*x) for x in SWEEPS[form]]


def compile_one(job: tuple[str, int, str, int, int, int, int, int, int]) -> None:
    """One kernel of a sweep into Triton's cache."""
    from benchmarks.support.triton_decode import attend

    form, bits, sums, dim_k, dim_v, group, warps, stages, tile = job
    number, half, real, byte = torch.int32, torch.float16, torch.float32, torch.uint8
    extra = (half, half, real) if form == "rebuilt" else (real, real, real)
    attend.warmup(
        byte, number, number, number, number, number, half, half, *extra, real, real, 1024, 3, 3, 48, 48, 0.5,
        FORM=form, BITS=bits, SUMS=sums, DK=dim_k, DV=dim_v, G=group, GP=8, P=64, BN=tile, num_warps=warps,
        num_stages=stages, grid=(1,),
    )  # fmt: skip


def compile_all(forms: Sequence[Wanted], group: int, processes: int) -> None:
    """All that the comparisons will ask for, in parallel: compiling one by one takes
    minutes."""
    jobs = set()
    for form, bits, sums, wide in forms:
        for t in tunings(form):
            both = (
                list(itertools.product((64, 128), repeat=2)) if t.classes else [(0, 0)]
            )
            jobs |= {
                (form, bits, sums, *dims, group, t.warps, t.stages, t.tile)
                for dims in (both if wide else both[:1])
            }
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        list(pool.map(compile_one, sorted(jobs, key=str), chunksize=1))


def comparisons(a: argparse.Namespace) -> list[tuple[str, Case]]:
    """(method of Bench, case), in the order of the table."""
    wanted, bits, ranks = (
        a.what.split(","),
        [int(x) for x in a.bits.split(",")],
        a.ranks.split(","),
    )
    pairs = [case.split("x") for case in a.cases.split(",")]
    sizes = [(int(batch), int(tokens)) for batch, tokens in pairs]
    large = [size for size in sizes if size[0] > 1][:1] or sizes[:1]
    found = {
        "palu": [Case(*size, 16, r) for r in ranks for size in sizes],
        "dequantize": [
            Case(*size, b, r) for r in ranks for b in bits for size in sizes
        ],
        "schedule": [
            Case(batch, 16384, 16, r, dist)
            for r in ranks
            for batch, dist in ((16, "zipf"), (16, "even"), (64, "even"))
        ],
        "uniform": [Case(16, 16384, b, "mixed48") for b in (16, *bits)],
        "sums": [Case(*size, b, r) for r in ranks for b in bits for size in large],
        "tail": [Case(*size, b, ranks[0]) for b in bits for size in sizes],
    }
    if unknown := set(wanted) - set(found):
        raise SystemExit(
            f"--what {','.join(sorted(unknown))}: choose from {', '.join(found)}"
        )
    return [(what, case) for what in found if what in wanted for case in found[what]]


def forms_of(work: Sequence[tuple[str, Case]]) -> list[Wanted]:
    """(form, bits, sums, whether ranks go beyond 64) of the Triton kernels that
    ``work`` runs."""
    needs = {
        "palu": [("rebuilt", "none"), ("rows", "none")],
        "dequantize": [("dequantized", "none")],
        "schedule": [("rows", "none")],
        "sums": [("integer", sums) for sums in ("none", "stored", "recomputed")],
    }
    return [
        (form, case.bits, sums, "uniform" not in case.ranks)
        for what, case in work
        for form, sums in needs.get(what, ())
    ]


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--library", type=Path, required=True)
    parser.add_argument(
        "--what",
        default="palu,dequantize,schedule,uniform,sums,tail",
        help="comma-separated",
    )
    parser.add_argument("--cases", default="16x32768,16x4096,1x32768")
    parser.add_argument(
        "--bits", default="8,4,2", help="comma-separated, of the comparisons on codes"
    )
    parser.add_argument(
        "--ranks",
        default="mixed,uniform64",
        help="comma-separated, as in decode_h200.py",
    )
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--replays", type=int, default=9)
    parser.add_argument(
        "--processes",
        type=int,
        default=os.cpu_count(),
        help="that compile Triton kernels",
    )
    return parser.parse_args(given)


def missing() -> str | None:
    """Why this cannot run here."""
    if find_spec("triton") is None:
        return "no triton (pip install triton): the baselines are Triton kernels"
    return None if torch.cuda.is_available() else "no GPU"


def main() -> None:
    a = arguments()
    work = comparisons(a)
    if reason := missing():
        raise SystemExit(f"skipped: {reason}")
    compile_all(forms_of(work), a.group, a.processes)
    bench, rows = Bench(a), []
    print(
        f"# {torch.cuda.get_device_name()}, {a.library}, float16, {a.heads} heads x {a.group}, page 64"
    )
    columns = f"{'what':>10} {'case':>9} {'bits':>4} {'ranks':>9} {'dist':>5} {'':>14} {'us':>9} {'ours us':>9}"
    print(columns, "  ratio  error / allowed")
    for what, case in work:
        for row in getattr(bench, what)(case):
            print(row, flush=True)
            rows.append(row)
        torch.cuda.empty_cache()
    found: list[dict[str, Any]] = [asdict(row) for row in rows]
    print(
        json.dumps(
            {
                "bench": "decode_baselines",
                "device": torch.cuda.get_device_name(),
                "results": found,
            }
        )
    )
    if wrong := [row for row in rows if not row.right]:
        raise SystemExit(f"{len(wrong)} answers are wrong")


if __name__ == "__main__":
    main()
