"""Decode attention with several rows a sequence: in bundles (KVLATHE_BUNDLES of abi.h),
and each row alone, as before.

    python -m benchmarks.bundles_h200 --library build/native/libkvlathe.so

Rows are the newest tokens of their sequence, each of which sees those before it. Time is
that of one call, as in decode_h200.py: one on each layer of a pool, in a CUDA graph,
median of replays, planned before. ``of one`` is the time beside that of one row;
``apart`` the largest distance of both answers, of the largest number. Prints one table
and one JSON line.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.decode_h200 import problem_of
from benchmarks.support.commands import parser_of
from benchmarks.support.gpu import ranks_of, seconds_a_call
from kvlathe.runtime.native.cuda import BUNDLES, MAX_BUNDLE
from tests.native.codes_problem import CodesProblem
from tests.native.library import OVERLAP, AttendDecodeArgs, Library
from tests.native.problem import Problem

SHIFT, STEPPED = 28, 1 << 27
"""KVLATHE_BUNDLE_SHIFT and KVLATHE_STEPPED of abi.h."""


def lengths_of(lengths: torch.Tensor, rows: int, bundled: bool) -> torch.Tensor:
    """[B * rows, parts] from those of sequences [B, parts], whose last ``rows`` tokens of
    part 0 are new."""
    out = lengths.repeat_interleave(rows, 0)
    row = torch.arange(rows, device=lengths.device, dtype=torch.int32)
    if not bundled:
        out[:, 0] -= (rows - 1 - row).repeat(len(lengths))
        return out
    for first in range(0, rows, MAX_BUNDLE):
        count = min(MAX_BUNDLE, rows - first)
        words = lengths + ((count - 1) << SHIFT)
        words[:, 0] -= rows - first - count
        if count > 1:
            words[:, 0] += STEPPED
        out[first::rows] = words
        for other in range(first + 1, first + count):
            out[other::rows] = -1
    return out


@dataclass
class Step:
    """Calls of all layers with ``rows`` rows a sequence; keeps what they point to."""

    library: Library
    problem: Problem | CodesProblem
    rows: int
    bundled: bool

    def __post_init__(self) -> None:
        problem, rows = self.problem, self.rows
        tables = [problem.table] if isinstance(problem, Problem) else problem.tables
        self.tables = [table.repeat_interleave(rows, 0) for table in tables]
        own = problem.length_tensor.view(len(problem.q[0]), -1)
        self.lengths = lengths_of(own, rows, self.bundled)
        layers = range(len(problem.ranks))
        self.q = [self._queries(layer) for layer in layers]
        self.o = [
            x.new_zeros(len(x), problem.o[i].shape[1]) for i, x in enumerate(self.q)
        ]
        size = self.library.workspace_bytes(len(self.q[0]), len(problem.ranks[0]))
        self.space = torch.zeros(size, dtype=torch.uint8, device="cuda")
        size = self.library.plan_bytes()
        self.plans = torch.zeros(len(layers), size, dtype=torch.uint8, device="cuda")
        self.args = [self._args(layer) for layer in layers]

    def _queries(self, layer: int) -> torch.Tensor:
        generator = torch.Generator("cuda").manual_seed(layer)
        like = self.problem.q[layer]
        shape = (len(like) * self.rows, like.shape[1])
        x = torch.empty(shape, dtype=like.dtype, device="cuda")
        return x.normal_(generator=generator)

    def _args(self, layer: int) -> AttendDecodeArgs:
        args = self.problem.args(layer, self.space)
        args.batch = len(self.q[layer])
        args.flags = OVERLAP | (BUNDLES if self.bundled else 0)
        for i, table in enumerate(self.tables):
            part = args.parts[i]
            part.page_table, part.page_table_stride = table.data_ptr(), table.shape[1]
            part.lengths = self.lengths.data_ptr() + 4 * i
            part.lengths_stride = self.lengths.shape[1]
        args.q, args.o = self.q[layer].data_ptr(), self.o[layer].data_ptr()
        args.plan, args.plan_bytes = self.plans[layer].data_ptr(), self.plans.shape[1]
        return args

    def seconds(self, replays: int) -> float:
        """Seconds of one call; the answers are there afterwards."""
        for one in self.args:
            one.stream = torch.cuda.current_stream().cuda_stream
        self.library.plan(self.args)
        torch.cuda.synchronize()

        def call(i: int) -> None:
            self.args[i].stream = torch.cuda.current_stream().cuda_stream
            self.library.attend_decode(self.args[i], "cuda")

        seconds = seconds_a_call(call, len(self.args), replays)
        assert not self.space.any()
        return seconds


def measured(
    library: Library, problem: Problem | CodesProblem, rows: int, replays: int
) -> dict[str, Any]:
    """Microseconds of a call, by how its rows are attended."""
    alone = Step(library, problem, rows, False)
    found: dict[str, Any] = {"rows": rows, "alone_us": 1e6 * alone.seconds(replays)}
    step = Step(library, problem, rows, True)
    found["bundle_us"] = 1e6 * step.seconds(replays)
    pairs = [(a.double(), b.double()) for a, b in zip(step.o, alone.o, strict=True)]
    found["apart"] = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--library", type=Path, required=True)
    parser.add_argument("--case", default="16x32768")
    parser.add_argument("--bits", default="4", help="comma-separated: 16, 8, 4, 2")
    parser.add_argument("--rows", default="1,2,4,8")
    parser.add_argument("--ranks", default="mixed")
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--replays", type=int, default=11)
    parser.set_defaults(dtype="float16", page_tokens=64)
    a = parser.parse_args()
    library = Library(a.library.resolve())
    batch, tokens = (int(x) for x in a.case.split("x"))
    print(f"# {torch.cuda.get_device_name()}, {a.case}, 8 heads x {a.group}, {a.ranks}")
    print(f"{'bits':>4} {'rows':>4} {'alone us':>9} {'bundle':>8} {'of one':>7}  apart")
    results: list[dict[str, Any]] = []
    for bits in map(int, a.bits.split(",")):
        ranks = ranks_of(a.ranks, a.layers, 8, 0)
        problem = problem_of(a, bits, ranks, [tokens] * batch)
        one = 0.0
        for rows in map(int, a.rows.split(",")):
            r = measured(library, problem, rows, a.replays)
            one = one or r["alone_us"]
            of_one = r["bundle_us"] / one
            said = f"{bits:>4} {rows:>4} {r['alone_us']:>9.1f} {r['bundle_us']:>8.1f}"
            print(f"{said} {of_one:>7.2f}  {r['apart']:.1e}", flush=True)
            case = {"sequences": batch, "tokens": tokens, "bits": bits}
            results.append(case | {"group": a.group, "ranks": a.ranks} | r)
        del problem
        torch.cuda.empty_cache()
    device = torch.cuda.get_device_name()
    print(json.dumps({"bench": "bundles_h200", "device": device, "results": results}))


if __name__ == "__main__":
    main()
