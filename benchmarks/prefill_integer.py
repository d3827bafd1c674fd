"""Prefill on products of 8-bit codes, as HACK does it, beside our 16-bit prefill and
torch's: one layer, on one GPU.

  python3 -m benchmarks.prefill_integer --library build/native/libkvlathe.so

q and k get 8 bits in groups of up to 64 along the rank, v in groups of 64 tokens; the
softmax's weights get 8 bits in registers, and both products are products of codes (Eq.
4 of HACK; triton_prefill.py). Columns, in ms a layer:
  q, k, v      quantizing them, a kernel each
  products     both products alone, nothing scaled, no softmax
  uncorrected  with scales and softmax, without the terms of the minima
  symmetric    the whole: q and the weights from zero. corrections = symmetric - uncorrected
  asymmetric   the whole in the paper's form: q and the weights with minima, sums of codes of k and v
  half         the same Triton loop with 16-bit numbers
  ours, SDPA   our kernel for prompts on 16-bit pages, torch's flash and cuDNN at d = 128
Triton's forms get the best of a list of tunings (symmetric's serves all integer ones).
Every form is checked against float64 on the numbers that its codes mean, or its row
says WRONG. ``error``: symmetric's and ours against exact attention on the numbers
before quantization, relative to the largest answer. Timing as in decode_h200.py, mean
over five layers. Needs torch, triton and a GPU; prints one table and one JSON line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel

from benchmarks.decode_baselines import missing
from benchmarks.prefill_h200 import BACKENDS, error_of
from benchmarks.support.commands import parser_of
from benchmarks.support.gpu import ranks_of, seconds_a_call
from kvlathe.runtime.native.cuda import CudaLibrary
from kvlathe.runtime.native.library import Native
from tests.native.chunk_problem import ChunkProblem
from tests.native.library import Library

if TYPE_CHECKING:
    from benchmarks.support.triton_prompt import PromptCall, Shape

TUNINGS = "128/4/3,128/8/3,64/4/3,128/4/2,64/4/2"
FORMS = ("products", "uncorrected", "symmetric", "asymmetric", "half")


def tunings(text: str) -> list[tuple[int, int, int]]:
    rows = [one.split("/") for one in text.split(",")]
    return [(int(tile), int(warps), int(stages)) for tile, warps, stages in rows]


def compile_one(job: tuple[str, Shape, tuple[int, int, int], int]) -> None:
    from benchmarks.support.triton_prompt import compile_kernel

    compile_kernel(*job)


def compile_all(a: argparse.Namespace) -> None:
    """All that will be asked for, in parallel."""
    from benchmarks.support.triton_prompt import shape_of

    kinds = a.ranks.split(",")
    shapes = {
        shape_of(*pair)
        for kind in kinds
        for row in ranks_of(kind, a.layers, a.heads, 0)
        for pair in row
    }
    jobs = [
        (*job, a.group) for job in itertools.product(FORMS, sorted(shapes), a.tunings)
    ]
    with ProcessPoolExecutor(
        a.processes, mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        list(pool.map(compile_one, jobs, chunksize=1))


class Bench:
    def __init__(self, a: argparse.Namespace) -> None:
        self.a, self.library = a, Library(a.library.resolve())
        self.cuda = CudaLibrary(Native.load(a.library.resolve()))

    def timed(self, calls: Sequence[Any]) -> float:
        """Milliseconds of one call, mean over the layers' ``calls``."""
        return 1e3 * seconds_a_call(lambda i: calls[i](), len(calls), self.a.replays)

    def ours(self, problem: ChunkProblem) -> tuple[float, float]:
        """Milliseconds and error."""
        attention = problem.attention(self.cuda)
        spread = problem.spread_out(attention)
        steps = [
            problem.step_args(attention, spread, layer)
            for layer in range(len(problem.ranks))
        ]

        def call(i: int) -> None:
            steps[i][0].stream = torch.cuda.current_stream().cuda_stream
            self.library.attend_decode(steps[i][0], "cuda")

        ms = 1e3 * seconds_a_call(call, len(steps), self.a.replays)
        return ms, error_of(problem, 0, 0, self.rows(problem))

    @staticmethod
    def rows(problem: ChunkProblem) -> list[int]:
        tokens = problem.lengths[0]
        return [0, 1, tokens // 2, tokens - 130, tokens - 1]

    def sdpa(self, tokens: int) -> dict[str, float]:
        shape: dict[str, Any] = {"device": "cuda", "dtype": torch.float16}
        q = torch.randn(1, self.a.heads * self.a.group, tokens, 128, **shape)
        k, v = (torch.randn(1, self.a.heads, tokens, 128, **shape) for _ in range(2))
        times = {}
        for name, backend in BACKENDS.items():
            with sdpa_kernel(backend):
                call = lambda: F.scaled_dot_product_attention(  # noqa: E731
                    q, k, v, is_causal=True, enable_gqa=True
                )
                times[name] = self.timed([call] * 2)
        return times

    def best(
        self,
        calls: Sequence[PromptCall],
        form: str,
        sweep: Sequence[tuple[int, int, int]],
    ) -> tuple[float, Any]:
        """Milliseconds and tuning; inf for a wrong answer."""
        from triton.runtime.errors import OutOfResources

        found = []
        for tuning in sweep:
            try:
                calls[0].attend(form, *tuning)
                torch.cuda.synchronize()
            except OutOfResources:
                continue
            wrong, allowed = calls[0].wrong_by(
                form, self.rows(calls[0].problem), tuning[0]
            )
            if not wrong <= allowed:  # NaN too
                return float(
                    "inf"
                ), f"{form}, {tuning}: error {wrong:.1e}, allowed {allowed:.1e}"
            found.append(
                (
                    self.timed(
                        [lambda c=c, t=tuning: c.attend(form, *t) for c in calls]
                    ),
                    tuning,
                )
            )
        return min(found)

    def measure(self, tokens: int, kind: str) -> dict[str, Any]:
        from benchmarks.support.triton_prompt import PromptCall

        ranks = ranks_of(kind, self.a.layers, self.a.heads, 0)
        problem = ChunkProblem(
            ranks, [tokens], self.a.group, chunks=[tokens], knows_rows=True
        )
        found: dict[str, Any] = {"tokens": tokens, "ranks": kind}
        found["ours"], found["our_error"] = self.ours(problem)
        calls = [PromptCall(problem, layer) for layer in range(self.a.layers)]
        for part in "qkv":
            found[part] = self.timed(
                [lambda c=c, p=part: c.quantize(p, True) for c in calls]
            )
        found["symmetric"], how = self.best(calls, "symmetric", self.a.tunings)
        found["error"] = calls[0].error(self.rows(problem))
        integer = [how] if isinstance(how, tuple) else self.a.tunings[:1]
        for form in ("products", "uncorrected", "half"):
            found[form], _ = self.best(
                calls, form, self.a.tunings if form == "half" else integer
            )
        for call in calls:
            call.quantize("q", False)
        found["asymmetric"], _ = self.best(calls, "asymmetric", integer)
        return found | {"tuning": str(how)} | self.sdpa(tokens)


COLUMNS = (
    "q",
    "k",
    "v",
    "products",
    "uncorrected",
    "symmetric",
    "asymmetric",
    "half",
    "ours",
    "flash",
    "cudnn",
)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--library", type=Path, required=True)
    parser.add_argument(
        "--cases", default="8192,32768", help="comma-separated tokens, multiples of 128"
    )
    parser.add_argument(
        "--ranks",
        default="mixed,uniform64",
        help="comma-separated, as in decode_h200.py",
    )
    parser.add_argument(
        "--tunings",
        default=TUNINGS,
        type=tunings,
        help="comma-separated: rows a tile/warps/stages",
    )
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--replays", type=int, default=7)
    parser.add_argument(
        "--processes",
        type=int,
        default=os.cpu_count(),
        help="that compile Triton kernels",
    )
    a = parser.parse_args()
    if reason := missing():
        raise SystemExit(f"skipped: {reason}")
    compile_all(a)
    bench, results = Bench(a), []
    print(
        f"# {torch.cuda.get_device_name()}, {a.library}, float16, {a.heads} heads x {a.group}; ms"
    )
    print(
        f"{'tokens':>7} {'ranks':>9} "
        + " ".join(f"{name:>11}" for name in COLUMNS)
        + "  error / ours; tuning"
    )
    for case, kind in itertools.product(a.cases.split(","), a.ranks.split(",")):
        tokens = int(case)
        r = bench.measure(tokens, kind)
        times = " ".join(
            f"{r[name]:11.4f}" if r[name] < 1e9 else f"{'WRONG':>11}"
            for name in COLUMNS
        )
        print(
            f"{tokens:>7} {kind:>9} {times}  {r['error']:.1e} / {r['our_error']:.1e}; {r['tuning']}",
            flush=True,
        )
        results.append(r)
        torch.cuda.empty_cache()
    print(
        json.dumps(
            {
                "bench": "prefill_integer",
                "device": torch.cuda.get_device_name(),
                "results": results,
            }
        )
    )
    if any(r[name] > 1e9 for r in results for name in COLUMNS):
        raise SystemExit("some answers are wrong")


if __name__ == "__main__":
    main()
