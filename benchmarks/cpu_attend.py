"""The price of a decode step's attention on the CPU: the native op alone, every layer
of a model, over a random cache.

    kvlathe native
    python -m benchmarks.cpu_attend [--formats 32 16 8 4 2] [--contexts 512 2048 3840]
        [--rows 1 8] [--ranks 96 112] [--engines ENGINE ...] [--against OTHER/libkvlathe.so]

A format is BITS, groups along the rank for K and along the tokens for V;
BITS:AXIS_K,AXIS_V; or BITS:normal, fixed levels along the rank. Above 8 bits it is one
bucket; below, ``--hot`` tokens are still in 32 bit. 32-bit caches are also shown at full
rank. The shape is that of lathe-27m: 6 layers of 4 KV heads of 128, 2 query heads each.
The lowest tenth of ``--repeats`` calls counts: other load only slows. One thread is
timed by its processor time.

``--engines``: the plans of these folders, in place of formats. ``--against``: calls of
another build alternate with those of the library in use, on the same pages. Printed is
how much longer the one in use takes.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.support.commands import parser_of
from kvlathe.plan.engine_folder import read_plan
from kvlathe.plan.formats import Axis, Coding, Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane, ModelShape
from kvlathe.plan.index import Bucket
from kvlathe.plan.layer_table import layer_table
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.lives import KEEP, SEAL
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.native.library import ABI_VERSION, Native, find
from tests.native_cpu.library import AttendArgs, Op, aligned
from tests.support.format_cases import bits_of

AXES: tuple[Axis, ...] = ("rank", "token")
PAIRS = {",".join(pair): pair for pair in itertools.product(AXES, AXES)}
PAIRS["normal"] = ("rank", "rank")
"""Axes of K and of V as they are asked for."""

LAYERS, HEADS, GROUP, WIDTH = 6, 4, 2, 128
Array = npt.NDArray[Any]


def plan_of(form: str, ranks: list[int]) -> CompressionPlan:
    """``ranks`` in turn; the full width is not projected."""
    number, _, axes = form.partition(":")
    bits, (axis_k, axis_v) = bits_of(int(number)), PAIRS[axes or "rank,token"]
    coding: Coding = "normal" if axes == "normal" else "affine"
    tier = Tier(bits, bits, axis_k, axis_v, coding_k=coding, coding_v=coding)
    places = [(layer, head) for layer in range(LAYERS) for head in range(HEADS)]
    chosen = [
        (ranks[i % len(ranks)], ranks[(i + 1) % len(ranks)]) for i in range(len(places))
    ]
    projected = any(rank < WIDTH for rank in ranks)
    lanes = [
        Lane(*at, WIDTH, *rank, projected=projected)
        for at, rank in zip(places, chosen, strict=True)
    ]
    every = tuple(range(len(lanes)))
    own = (
        Group(every, Tier(32, 32), (tier,), SEAL)
        if tier.is_coded
        else Group(every, tier, life=KEEP)
    )
    shape = ModelShape(LAYERS, HEADS * GROUP, HEADS, WIDTH, 512, 8192, 4096)
    return CompressionPlan(shape, tuple(lanes), (own,))


def held(bucket: Bucket, fresh: int, sealed: int) -> int:
    """Tokens of a sequence that has ``fresh`` tokens and ``sealed`` ones."""
    if bucket.is_hot:
        return fresh
    return bucket.life.kept(sealed)


class Steps:
    """Decode steps of ``rows`` sequences that have ``context`` tokens each."""

    def __init__(
        self,
        plan: CompressionPlan,
        context: int,
        rows: int,
        hot: int,
        threads: int,
        layers: int,
        libraries: Sequence[Native],
    ) -> None:
        self.clock = time.thread_time if threads == 1 else time.perf_counter
        rng, page, self.layout = (
            np.random.default_rng(0),
            plan.page_tokens,
            CacheLayout(plan),
        )
        cold = (
            max(0, context - hot) // page * page if plan.index.tiers[-1].is_coded else 0
        )
        counts = [held(bucket, context - cold, cold) for bucket in plan.index.buckets]
        lengths = np.array([counts] * rows, np.int32)
        self.memory, tables = self.pool(
            plan, [-(-(n + 1) // page) for n in counts], rows, rng
        )
        self.pointers = (ctypes.c_void_p * len(tables))(
            *(t.ctypes.data for t in tables)
        )
        self.kept: list[Any] = [tables, lengths]
        calls = [
            (
                layer_table(self.layout, i),
                self.args(plan, i, lengths, tables, rows, threads, rng),
            )
            for i in range(min(layers, plan.model.layers))
        ]
        self.sides = [
            [(Op(library, table), args_for(library, args)) for table, args in calls]
            for library in libraries
        ]

    def pool(
        self,
        plan: CompressionPlan,
        pages: list[int],
        rows: int,
        rng: np.random.Generator,
    ) -> tuple[Array, list[Array]]:
        strides, at, spans = self.layout.page_stride, 0, []
        for stride, count in zip(strides, pages, strict=True):
            first = -(-at // stride)
            spans.append((first, count * rows))
            at = (first + count * rows) * stride
        memory = aligned(np.zeros(at, np.uint8))
        for (first, count), stride, bucket in zip(
            spans, strides, plan.index.buckets, strict=True
        ):
            part = memory[first * stride : (first + count) * stride]
            bits = bucket.tier.bits_k
            if bits >= 16:
                part.view(np.float16 if bits == 16 else np.float32)[:] = rng.normal(
                    size=len(part) * 8 // bits
                )
            # codes, and as good scales: the halves of random bytes below 64 are small
            # and finite
            else:
                part[:] = rng.integers(0, 64, len(part), np.uint8)
        tables = [
            (first + rng.permutation(count)).astype(np.int32).reshape(rows, -1)
            for first, count in spans
        ]
        return memory, tables

    def args(
        self, plan: CompressionPlan, layer: int, lengths: Array, tables: list[Array], rows: int, threads: int,
        rng: np.random.Generator,
    ) -> AttendArgs:  # fmt: skip
        lanes, group = plan.index.active(layer), plan.model.group_size
        normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
        widest = max(lane.rank_k for lane in lanes)
        ranks_v = sum(lane.rank_v for lane in lanes)
        arrays = {
            "q": normal(rows, len(lanes) * group * WIDTH),
            "k": normal(rows, len(lanes) * WIDTH),
            "v": normal(rows, ranks_v),
            "cos": normal(rows, WIDTH // 2),
            "sin": normal(rows, WIDTH // 2),
            "cu_seqlens_q": np.arange(rows + 1, dtype=np.int32),
            "lengths": lengths,
            "page_table_widths": np.array([t.shape[1] for t in tables], np.int32),
            "proj_q": normal(len(lanes), WIDTH, widest) / 8,
            "proj_k": normal(len(lanes), WIDTH, widest) / 8,
            "centre_k": normal(len(lanes), widest),
            "o": np.zeros((rows, group * ranks_v), np.float32),
        }
        self.kept.append(arrays)
        return AttendArgs(
            ABI_VERSION, rows, rows, 0, threads, WIDTH**-0.5,
            page_tables=ctypes.addressof(self.pointers), pool=self.memory.ctypes.data,
            pool_bytes=self.memory.nbytes, **{name: array.ctypes.data for name, array in arrays.items()},
        )  # fmt: skip

    def seconds(self, repeats: int) -> list[float]:
        """Seconds of a step in each library: the sum over layers of the lowest
        tenth."""
        times = np.empty((len(self.sides), len(self.sides[0]), repeats))
        for turn in range(repeats):
            sides = list(enumerate(self.sides))
            for side, layers in reversed(sides) if turn % 2 else sides:
                for layer, (op, args) in enumerate(layers):
                    start = self.clock()
                    op.run(args)
                    times[side, layer, turn] = self.clock() - start
        return [float(x) for x in np.quantile(times, 0.1, axis=2).sum(axis=1)]


def args_for(library: Native, args: AttendArgs) -> AttendArgs:
    """The same call with the ABI version that this build expects."""
    own = AttendArgs.from_buffer_copy(args)
    own.abi_version = library.lib.kvlathe_abi_version()
    return own


def other(path: Path) -> Native:
    """Another build. Its ABI version may differ, as long as this op's does not."""
    lib = ctypes.CDLL(str(path.resolve()))
    lib.kvlathe_abi_version.restype = ctypes.c_uint32
    return Native(path, lib, native().isa, False)


def native() -> Native:
    found = find()
    if found.native is None:
        sys.exit(found.reason)
    return found.native


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--formats", nargs="+", default=["32", "16", "8", "4", "2"])
    parser.add_argument("--engines", type=Path, nargs="+", default=[])
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 2048, 3840])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--ranks", type=int, nargs="+", default=[96, 112, 96])
    parser.add_argument(
        "--layers",
        type=int,
        default=LAYERS,
        help="1: a short context stays in the caches",
    )
    parser.add_argument("--hot", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--against", type=Path, help="another build of the library")
    args = parser.parse_args()
    libraries = [native(), *([other(args.against)] if args.against else [])]
    forms = [] if args.engines else args.formats
    asked = [(form, args.ranks) for form in forms]
    asked = [("32", [WIDTH]) for form in forms if form == "32"] + asked
    cases = [
        (form, float(np.mean(ranks)), plan_of(form, ranks)) for form, ranks in asked
    ]
    for folder in args.engines:
        plan = read_plan(folder)
        ranks = [(lane.rank_k + lane.rank_v) / 2 for lane in plan.lanes]
        cases.append((folder.name, float(np.mean(ranks)), plan))
    print(f"{native().isa}, {args.threads} thread(s), load {os.getloadavg()[0]:.1f}")
    print(
        f"{'format':<14} {'rank':>5} {'rows':>4} {'context':>7} {'us a row':>9} {'ns a token, row':>16} {'bytes':>14}"
    )
    records = []
    for (form, rank, plan), (rows, context) in itertools.product(
        cases, itertools.product(args.rows, args.contexts)
    ):
        steps = Steps(
            plan, context, rows, args.hot, args.threads, args.layers, libraries
        )
        own, *others = steps.seconds(args.repeats)
        each = own / rows * 1e6
        size = CacheLayout(plan).bytes_per_token()
        records.append(
            {
                "format": form,
                "rank": rank,
                "rows": rows,
                "context": context,
                "us_row": each,
                "bytes": size,
                "longer": [own / theirs - 1 for theirs in others],
            }
        )
        line = f"{each:>9.1f} {each / context * 1e3:>16.1f} {size:>14.0f}"
        line += "".join(f" {own / theirs - 1:>+8.1%}" for theirs in others)
        print(f"{form:<14} {rank:>5.0f} {rows:>4} {context:>7} {line}", flush=True)
    print(
        json.dumps(
            {
                "bench": "cpu_attend",
                "isa": native().isa,
                "threads": args.threads,
                "results": records,
            }
        )
    )


if __name__ == "__main__":
    main()
