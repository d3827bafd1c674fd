"""Decode attention over compressed pages against FlashInfer: one layer, 16, 8, 4 or 2
bit, on one GPU.

  python3 -m benchmarks.decode_h200 --library build/native/libkvlathe.so --baseline
  flashinfer.txt

Timing: one call on each of ``--layers`` layers of one page-first pool (rotating
buffers: a page is as wide as all layers, the bytes of a call lie at that stride),
captured in one CUDA graph; median over replays, divided by the calls. The boundary is
FlashInfer's: post-RoPE projected q in, o' out; the schedule is made outside of the
timed calls, once a step for all its layers (FlashInfer's ``plan``, ours
kvlathe_cuda_plan): ``plan us`` is what that takes a step, and beside it a call. Ranks:
``mixed`` 16 to 96 with mean 51.2 for K and for V; ``mixed48`` 16 to 96 and
``uniform48``, equal bytes; ``mixed26`` and ``mixed38``, two fifths of d = 64 and of 96.
GB/s counts K, V, q and o once. Below 16 bit a sequence has its tokens in sealed pages
(``--form``; scales and padding count) and 32 more in a 16-bit page, and the baseline
is fp8. ``op us`` is the whole op: RoPE, projection, rounding and append of the new
tokens, then attention; the plan included. ``--baseline`` is the output of FlashInfer's
benchmark; without it no ratio is printed. Needs torch; prints one table and one JSON
line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.support.commands import parser_of
from benchmarks.support.gpu import STEPS, lengths_of, ranks_of, seconds_a_call
from kvlathe.export.methods.fp8 import TIER as FP8
from kvlathe.plan.formats import WHOLE_RANK, Bits, Tier
from kvlathe.runtime.native.cuda import CudaLibrary
from kvlathe.runtime.native.library import Native
from kvlathe.runtime.sessions.gpu.step_buffer import StepKind
from kvlathe.runtime.sessions.torch_cuda.attention.attend import Attention
from kvlathe.runtime.sessions.torch_cuda.inputs import StepInputs
from tests.native.codes_problem import CodesProblem
from tests.native.library import APPENDED, OVERLAP, AttendDecodeArgs, Library
from tests.native.problem import Problem
from tests.support.format_cases import bits_of

FORMS: dict[str, Callable[[Bits], Tier]] = {
    "int": lambda bits: Tier(bits, bits, arithmetic="int"),
    "channel": lambda bits: Tier(
        bits, bits, "token", "rank", 64, WHOLE_RANK if bits == 8 else 64
    ),
    "token": lambda bits: Tier(bits, bits, "rank", "rank", WHOLE_RANK, WHOLE_RANK),
    "fp8": lambda _: FP8,
}
"""Sealed pages: those of hack's integer arithmetic; keys by channel and values by token,
which it has by default; both by token; floats of 8 bits."""
READ_RATE = 4.58e12
"""Bytes a second that the best public decode kernel read on an H200."""


def baseline_of(path: Path | None, model: str) -> dict[tuple[int, int, str], float]:
    """(batch, context, kv format) -> best microseconds in FlashInfer's table."""
    best: dict[tuple[int, int, str], float] = {}
    for line in path.read_text().splitlines() if path else ():
        if match := re.match(
            rf"{model}\s+(\d+)\s+(\d+)\s+(fp16|fp8)\s+\S+\s+([\d.]+)\s", line
        ):
            key = (int(match[1]), int(match[2]), match[3])
            best[key] = min(best.get(key, math.inf), float(match[4]))
    return best


def bytes_of(problem: Problem) -> float:
    """Bytes that one call must move, mean over the layers: K, V, q and o once."""
    width = sum(
        rank_k + rank_v for row in problem.ranks for rank_k, rank_v in row
    ) / len(problem.ranks)
    return 2 * width * (sum(problem.lengths) + problem.group * len(problem.lengths))


def problem_of(
    a: argparse.Namespace,
    bits: int,
    ranks: list[list[tuple[int, int]]],
    lengths: list[int],
) -> Problem | CodesProblem:
    dtype = getattr(torch, a.dtype)
    if bits == 16:
        return Problem(ranks, lengths, a.group, dtype, a.page_tokens, "cuda")
    sealed = [[-(-n // a.page_tokens) * a.page_tokens] for n in lengths]
    tier = FORMS[a.form](bits_of(bits))
    return CodesProblem(
        ranks,
        sealed,
        [a.page_tokens // 2] * len(lengths),
        [tier],
        a.group,
        dtype,
        a.page_tokens,
        "cuda",
    )


def whole_op(library: Library, problem: Problem | CodesProblem, replays: int) -> float:
    """Seconds of append and attention as the cuda backend calls them; every sequence's
    last 16-bit token is new."""
    tables = problem.tables if isinstance(problem, CodesProblem) else [problem.table]
    plan, layers, batch = problem.layout.plan, len(problem.ranks), len(problem.q[0])
    cuda = CudaLibrary(Native.load(library.path))
    attention = Attention.of_plan(
        cuda, plan, [problem.scale] * layers, problem.pool.view(torch.uint8), batch
    )
    lengths = problem.length_tensor.view(batch, -1).clone()
    lengths[:, 0] -= 1
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    step = StepInputs(starts, lengths, tables, StepKind(True, batch))
    calls = attention.prepare(step, batch)

    def random_(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda").to(problem.q[0].dtype)

    heads, d = len(problem.ranks[0]), plan.model.head_dim
    q, k = random_(batch, heads * problem.group * d), random_(batch, heads * d)
    angles, rows = (random_(batch, d // 2), random_(batch, d // 2)), []
    for row in problem.ranks:
        widest = max(rank_k for rank_k, _ in row)
        weights = {name: random_(heads, d, widest) for name in ("proj_q", "proj_k")}
        rows.append(
            (
                random_(batch, sum(rank_v for _, rank_v in row)),
                weights | {"centre_k": random_(heads, widest)},
            )
        )

    def call(i: int) -> None:
        if i == 0:
            attention.plan_calls(calls)
        attention.run(calls, i, q, k, rows[i][0], angles, rows[i][1])

    return seconds_a_call(call, layers, replays)


def give_plans(library: Library, args: Sequence[AttendDecodeArgs]) -> torch.Tensor:
    """Memory for the plans of a step's calls, to be kept; the calls may overlap with
    the appends before them."""
    memory = torch.zeros(
        len(args), library.plan_bytes(), dtype=torch.uint8, device="cuda"
    )
    for one, plan in zip(args, memory, strict=True):
        one.flags, one.plan, one.plan_bytes = (
            OVERLAP | APPENDED,
            plan.data_ptr(),
            len(plan),
        )
    return memory


def seconds_a_step_planned(
    library: Library, args: list[AttendDecodeArgs], replays: int
) -> float:
    """Seconds of planning the calls of one step; the plans are there afterwards."""

    def plan(_: int) -> None:
        for one in args:
            one.stream = torch.cuda.current_stream().cuda_stream
        library.plan(args)

    return seconds_a_call(plan, 8, replays)


def measure(
    library: Library,
    a: argparse.Namespace,
    batch: int,
    tokens: int,
    bits: int,
    ranks: str,
    dist: str,
) -> dict[str, Any]:
    layers = max(2, a.layers if batch * tokens >= 1 << 18 else 2 * a.layers)
    lengths = lengths_of(batch, tokens, dist)
    problem = problem_of(a, bits, ranks_of(ranks, layers, a.heads, 0), lengths)
    space = torch.zeros(
        library.workspace_bytes(batch, a.heads), dtype=torch.uint8, device="cuda"
    )
    args = [problem.args(layer, space) for layer in range(layers)]
    memory = give_plans(library, args)
    for one in args if a.no_overlap else ():
        one.flags = 0
    plan_seconds = seconds_a_step_planned(library, args, a.replays)

    def call(i: int) -> None:
        args[i].stream = torch.cuda.current_stream().cuda_stream
        library.attend_decode(args[i], "cuda")

    seconds = seconds_a_call(call, layers, a.replays)
    errors = problem.errors(1, [0, batch - 1] if batch > 1 else [0])
    op = whole_op(library, problem, a.replays)
    size = bytes_of(problem) if isinstance(problem, Problem) else problem.bytes()
    del problem, memory
    torch.cuda.empty_cache()
    return {
        "batch": batch, "tokens": tokens, "bits": bits, "ranks": ranks, "dist": dist, "us": seconds * 1e6,
        "op_us": op * 1e6, "plan_us": plan_seconds * 1e6, "layers": layers,
        "mb": size / 1e6, "gb_s": size / seconds / 1e9, "of_read_rate": size / seconds / READ_RATE,
        "error": errors[0], "plain_error": errors[1],
    }  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--library", type=Path, required=True)
    parser.add_argument("--baseline", type=Path)
    parser.add_argument("--baseline-model", default="llama8b")
    parser.add_argument("--cases", default="16x32768,64x16384,16x4096,1x32768")
    parser.add_argument(
        "--ranks", default="mixed", help="comma-separated: " + ", ".join(STEPS)
    )
    parser.add_argument("--dist", default="even", help="comma-separated: even, zipf")
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16"])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--page-tokens", type=int, default=64)
    parser.add_argument("--bits", default="16", help="comma-separated: 16, 8, 4, 2")
    parser.add_argument("--form", default="int", choices=list(FORMS))
    parser.add_argument(
        "--no-overlap",
        action="store_true",
        help="without programmatic dependent launch (FlashInfer uses it by default)",
    )
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--replays", type=int, default=15)
    a = parser.parse_args()
    library, baseline = (
        Library(a.library.resolve()),
        baseline_of(a.baseline, a.baseline_model),
    )
    print(
        f"# {torch.cuda.get_device_name()}, {a.library}, {a.dtype}, {a.heads} heads x {a.group}, page {a.page_tokens}"
    )
    columns = f"{'case':>10} {'bits':>4} {'ranks':>9} {'dist':>5} {'MB':>8} {'us':>8} {'op us':>8} {'plan us':>11}"
    print(
        columns,
        f"{'GB/s':>6} {'%read':>6} {'FlashInfer':>11} {'ratio':>6}  error / plain",
    )
    grid = itertools.product(
        a.cases.split(","),
        map(int, a.bits.split(",")),
        a.ranks.split(","),
        a.dist.split(","),
    )
    results = []
    for case, bits, ranks, dist in grid:
        batch, tokens = (int(x) for x in case.split("x"))
        r = measure(library, a, batch, tokens, bits, ranks, dist)
        best = (
            baseline.get((batch, tokens, "fp16" if bits == 16 else "fp8"))
            if dist == "even"
            else None
        )
        r["flashinfer_us"], r["ratio"] = best, best / r["us"] if best else None
        beside = f"{best:8.1f} us {r['ratio']:5.2f}x" if best else f"{'-':>11} {'-':>6}"
        print(
            f"{case:>10} {bits:>4} {ranks:>9} {dist:>5} {r['mb']:8.1f} {r['us']:8.1f} {r['op_us']:8.1f} "
            f"{r['plan_us']:5.1f}/{r['plan_us'] / r['layers']:5.2f} "
            f"{r['gb_s']:6.0f} {100 * r['of_read_rate']:6.1f} {beside}  {r['error']:.1e} / {r['plain_error']:.1e}",
            flush=True,
        )
        results.append(r)
    print(
        json.dumps(
            {
                "bench": "decode_h200",
                "device": torch.cuda.get_device_name(),
                "results": results,
            }
        )
    )


if __name__ == "__main__":
    main()
