"""Prefill attention over compressed pages against torch's scaled_dot_product_attention
at full rank, on one GPU.

  python3 -m benchmarks.prefill_h200 --library build/native/libkvlathe.so

Both sides run in this process: SDPA (flash and cuDNN) on ``--heads`` KV heads x
``--group`` query heads x ``--dim``, ours on the same heads with the ranks ``mixed`` (16
to 96, mean 51.2 over five layers, for K and for V) from 16-bit pages. The boundary is
post-RoPE projected q in, o' out. A case is new tokens, or new tokens @ tokens before
them (a later chunk, where these backends have no mask to offer), or all tokens / those
of a chunk (one call each, added up). With ``--bits`` below 16 the tokens before a chunk
lie in sealed pages, groups of 64. Time: CUDA events around one call, median of
``--repeats``, mean over five layers. ``exp``: the share of the special-function units'
rate (16 a cycle and SM at ``--mhz``) that the visible scores' exponentials take.
``rows``: the same rows attended as decodes, the path without this kernel. Needs torch;
prints one table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.support.commands import parser_of
from benchmarks.support.gpu import milliseconds, ranks_of
from kvlathe.plan.formats import Tier
from kvlathe.runtime.native.cuda import CudaLibrary
from kvlathe.runtime.native.library import Native
from kvlathe.runtime.sessions.gpu.side_memory import copies_bytes
from kvlathe.runtime.sessions.torch_cuda.attention.attend import Attention
from tests.native.chunk_problem import ChunkProblem, CodesChunkProblem
from tests.native.library import Library
from tests.support.format_cases import bits_of

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def baselines(a: argparse.Namespace, tokens: int) -> dict[str, float]:
    """Milliseconds of each SDPA backend."""
    shape: dict[str, Any] = {"device": "cuda", "dtype": getattr(torch, a.dtype)}
    q = torch.randn(1, a.heads * a.group, tokens, a.dim, **shape)
    k, v = (torch.randn(1, a.heads, tokens, a.dim, **shape) for _ in range(2))
    times = {}
    for name, backend in BACKENDS.items():
        with sdpa_kernel(backend):
            call = lambda: F.scaled_dot_product_attention(  # noqa: E731
                q, k, v, is_causal=True, enable_gqa=True
            )
            times[name] = milliseconds(call, a.repeats)
    return times


Chunks = ChunkProblem | CodesChunkProblem


def problem_of(
    a: argparse.Namespace,
    ranks: list[list[tuple[int, int]]],
    tokens: int,
    before: int,
    bits: int,
) -> Chunks:
    """One sequence: a chunk of ``tokens``; with ``bits`` below 16 the pages before it
    are sealed."""
    dtype = getattr(torch, a.dtype)
    if bits == 16:
        return ChunkProblem(
            ranks,
            [before + tokens],
            a.group,
            dtype,
            a.page_tokens,
            chunks=[tokens],
            knows_rows=True,
        )
    sealed = before // a.page_tokens * a.page_tokens
    tier = Tier(bits_of(bits), bits_of(bits))
    tail = before - sealed + tokens
    return CodesChunkProblem(
        ranks,
        [[sealed]],
        [tail],
        [tier],
        a.group,
        dtype,
        a.page_tokens,
        chunks=[tokens],
        knows_rows=True,
    )


def move_to(problem: Chunks, before: int) -> None:
    """Make the chunk one after no more tokens than the problem has."""
    if isinstance(problem, ChunkProblem):
        problem.lengths = [before + problem.chunks[0]]
    else:
        problem.length_tensor[0, 1] = before - (problem.tails[0] - problem.chunks[0])


def lane_of(
    problem: Chunks, layer: int, head: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of sequence 0 in float64, in the order of its tokens."""
    if isinstance(problem, ChunkProblem):
        k, v = problem.cached(0, layer, head)
        return k.double(), v.double()
    k, k_scale, k_least, v, v_scale, v_least = problem._quantized(
        1, 0, problem.rows(1, layer)[head]
    )
    tail = problem._tail(0, problem.rows(0, layer)[head])
    return torch.cat([k * k_scale + k_least, tail[0]]), torch.cat(
        [v * v_scale + v_least, tail[1]]
    )


def error_of(problem: Chunks, layer: int, before: int, rows: list[int]) -> float:
    """Largest error of some rows of sequence 0 against float64, relative to the largest
    answer."""
    worst, largest, at_q, at_o = 0.0, 0.0, 0, 0
    for head, (rank_k, rank_v) in enumerate(problem.ranks[layer]):
        k, v = lane_of(problem, layer, head)
        for row in rows:
            q = (
                problem.q[layer][row, at_q : at_q + problem.group * rank_k]
                .view(-1, rank_k)
                .double()
            )
            seen = before + row + 1
            exact = torch.softmax(q @ k[:seen].T * problem.scale, -1) @ v[:seen]
            own = (
                problem.o[layer][row, at_o : at_o + problem.group * rank_v]
                .view(-1, rank_v)
                .double()
            )
            worst, largest = (
                max(worst, float((own - exact).abs().max())),
                max(largest, float(exact.abs().max())),
            )
        at_q, at_o = at_q + problem.group * rank_k, at_o + problem.group * rank_v
    return worst / largest


def layers_milliseconds(
    library: Library, problem: Chunks, attention: Attention, a: argparse.Namespace
) -> list[float]:
    spread, times = problem.spread_out(attention), []
    for layer in range(len(problem.ranks)):
        args, keep = problem.step_args(attention, spread, layer)
        times.append(
            milliseconds(
                lambda args=args: library.attend_decode(args, "cuda"), a.repeats
            )
        )
        del keep
    return times


def rows_milliseconds(library: Library, problem: Chunks, attention: Attention) -> float:
    """The first layer, every row attended by itself."""
    problem.knows_rows = False
    args, keep = problem.step_args(
        attention, problem.spread_out(attention, single=True), 0
    )
    ms = milliseconds(lambda: library.attend_decode(args, "cuda"), 2)
    del keep
    return ms


def chunks_of(case: str) -> tuple[int, list[int]]:
    """Tokens of a chunk, and how many there are before each of them."""
    total, _, chunk = case.partition("/")
    if chunk:
        return int(chunk), list(range(0, int(total), int(chunk)))
    tokens, before = (int(x) for x in (total + "@0").split("@")[:2])
    return tokens, [before]


def measure(
    library: Library,
    cuda: CudaLibrary,
    a: argparse.Namespace,
    case: str,
    kind: str,
    bits: int,
) -> dict[str, Any]:
    layers = 5
    ranks, (tokens, starts) = ranks_of(kind, layers, a.heads, 0), chunks_of(case)
    problem = problem_of(a, ranks, tokens, starts[-1], bits)
    attention = problem.attention(cuda)
    if a.copies:
        size = copies_bytes(problem.layout.plan, max(starts) + tokens)
        attention.copies = torch.empty(size, dtype=torch.uint8, device="cuda")
    layers_ms = [0.0] * layers
    for start in starts:
        move_to(problem, start)
        times = layers_milliseconds(library, problem, attention, a)
        layers_ms = [x + y for x, y in zip(layers_ms, times, strict=True)]
    listing = milliseconds(lambda: problem.spread_out(attention), a.repeats)
    error = error_of(
        problem, 0, starts[-1], [0, 1, tokens // 2, tokens - 130, tokens - 1]
    )
    rows_ms = (
        rows_milliseconds(library, problem, attention)
        if a.rows and tokens <= 8192 and "/" not in case
        else None
    )
    scores = sum(
        a.heads * a.group * tokens * (start + (tokens + 1) / 2) for start in starts
    )
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    width = sum(k + v for row in ranks for k, v in row) / (layers * a.heads)
    mean = statistics.mean(layers_ms)
    return {
        "case": case, "ranks": kind, "bits": bits, "ms": mean, "layers_ms": layers_ms, "listing_ms": listing,
        "rows_ms": rows_ms, "tflops": 2 * scores * width / mean / 1e9,
        "exp_share": scores / (16 * sms * a.mhz * 1e3) / mean, "error": error,
    }  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--library", type=Path, required=True)
    parser.add_argument(
        "--cases",
        default="8192,32768",
        help="comma-separated: tokens, new@before, or tokens/chunk",
    )
    parser.add_argument(
        "--bits", default="16", help="comma-separated: of the pages before a chunk"
    )
    parser.add_argument(
        "--ranks",
        default="mixed",
        help="comma-separated: mixed, mixed48, uniform48, full",
    )
    parser.add_argument("--dtype", default="bfloat16", choices=["float16", "bfloat16"])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--dim", type=int, default=128, help="of SDPA's heads")
    parser.add_argument("--page-tokens", type=int, default=64)
    parser.add_argument("--copies", action="store_true", help="of sealed pages, 16 bit")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument(
        "--mhz", type=float, default=1755.0, help="clock that the exp share assumes"
    )
    parser.add_argument(
        "--rows",
        action="store_true",
        help="also attend the rows as decodes, up to 8192 tokens",
    )
    parser.add_argument("--no-baseline", action="store_true")
    a = parser.parse_args()
    library, cuda = (
        Library(a.library.resolve()),
        CudaLibrary(Native.load(a.library.resolve())),
    )
    print(
        f"# {torch.cuda.get_device_name()}, {a.library}, {a.dtype}, {a.heads} heads x {a.group}, SDPA d={a.dim}"
    )
    columns = f"{'case':>12} {'ranks':>9} {'bits':>4} {'ms':>8} {'TFLOP/s':>8} {'exp':>5} {'list ms':>8} {'rows ms':>8}"
    print(columns, " SDPA ms and ratio; error")
    results = []
    for case in a.cases.split(","):
        times = {} if a.no_baseline or not case.isdigit() else baselines(a, int(case))
        for kind, bits in (
            (kind, int(bits))
            for kind in a.ranks.split(",")
            for bits in a.bits.split(",")
        ):
            if bits < 16 and case.isdigit():
                continue  # nothing lies before the chunk
            r = measure(library, cuda, a, case, kind, bits)
            r["sdpa_ms"], r["ratio"] = (
                times,
                {name: ms / r["ms"] for name, ms in times.items()},
            )
            beside = ", ".join(
                f"{name} {ms:.3f} {ms / r['ms']:.2f}x" for name, ms in times.items()
            )
            rows = f"{r['rows_ms']:8.1f}" if r["rows_ms"] else f"{'-':>8}"
            print(
                f"{case:>12} {kind:>9} {bits:>4} {r['ms']:8.3f} {r['tflops']:8.0f} {100 * r['exp_share']:4.0f}% "
                f"{r['listing_ms']:8.3f} {rows}  {beside}; {r['error']:.1e}",
                flush=True,
            )
            results.append(r)
            torch.cuda.empty_cache()
    name = torch.cuda.get_device_name()
    print(
        json.dumps(
            {
                "bench": "prefill_h200",
                "device": name,
                "dtype": a.dtype,
                "results": results,
            }
        )
    )


if __name__ == "__main__":
    main()
