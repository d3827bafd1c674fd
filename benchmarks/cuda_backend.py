"""The cuda backend end to end on one GPU, Llama-3.1-8B shape with random weights:
decode, capacity, a long request.

  python3 -m benchmarks.cuda_backend --library build/native/libkvlathe.so

Plans: ``none`` (16 bit, full rank, nothing projected), ``ranks`` (16 bit, ranks 16 to
96, mean 51.2 for K and for V) and ``ranks8`` (the same, full pages sealed into 8 bit).
The cache is filled with random pages; every decode step then runs as in serving: pages
reserved, sealed and committed by PagePool, inputs written by the host while the GPU
computes the step before, tokens sampled greedily on the GPU and read back one step
behind. ``step`` is wall time a step, ``GPU`` that of a replayed graph alone; their
difference is the host's overhead. ``--prompts``: one from nothing to its first token,
chunk by chunk, full pages sealed after each. Needs torch; prints tables and one JSON
line.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.support.commands import parser_of
from benchmarks.support.gpu import ranks_of, repeated
from kvlathe.layers.wiring import Wiring
from kvlathe.plan.formats import Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane, ModelShape
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.lives import KEEP, SEAL
from kvlathe.plan.manifest import Limits
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.cache.arena import OutOfPages
from kvlathe.runtime.cache.page_table import PageTable
from kvlathe.runtime.cache.pool import PagePool
from kvlathe.runtime.native.cuda import CudaLibrary
from kvlathe.runtime.native.library import Native
from kvlathe.runtime.sessions.protocols import Sampling, StepPlan
from kvlathe.runtime.sessions.torch_cuda.compute import session_of
from kvlathe.runtime.sessions.torch_cuda.device import TorchDevice, bytes_of, tensor_of
from kvlathe.runtime.sessions.torch_cuda.model.decoder import TorchDecoder
from kvlathe.runtime.sessions.torch_cuda.model.rows import NativeRows
from kvlathe.runtime.text.sampler import Request, Sampler, rows_of
from kvlathe.runtime.text.sampling_params import SamplingParams

SHAPE = ModelShape(32, 32, 8, 128, 4096, 128256, 131072)
INNER = 14336
SPARE = 3 << 30
"""Bytes left to graphs, workspaces and the step itself."""


def plan_of(kind: str, chunk: int = 512) -> CompressionPlan:
    ranks = ranks_of(
        "full" if kind == "none" else "mixed", SHAPE.layers, SHAPE.kv_heads, 0
    )
    lanes = tuple(
        Lane(i, h, 128, *pair, projected=kind != "none")
        for i, row in enumerate(ranks)
        for h, pair in enumerate(row)
    )
    every = tuple(range(len(lanes)))
    cold = (Tier(8, 8, arithmetic="int"),) if kind == "ranks8" else ()
    group = Group(every, Tier(16, 16), cold, SEAL if cold else KEEP)
    return CompressionPlan(SHAPE, lanes, (group,), 64, chunk, compression=kind)


def weights_of(plan: CompressionPlan, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Random weights of a plan's folded model, by the decoder's names."""
    torch.manual_seed(0)

    def random_(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda").normal_(
            0, shape[0] ** -0.5
        )

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=dtype, device="cuda")

    hidden, d, found = SHAPE.hidden_size, SHAPE.head_dim, {}
    for i in range(SHAPE.layers):
        lanes = plan.index.active(i)
        v, rank = sum(lane.rank_v for lane in lanes), max(lane.rank_k for lane in lanes)
        layer = {
            "attn_norm.weight": ones(hidden), "mlp_norm.weight": ones(hidden),
            "q.weight": random_(hidden, SHAPE.query_heads * d), "k.weight": random_(hidden, SHAPE.kv_heads * d),
            "v.weight": random_(hidden, v), "o.weight": random_(SHAPE.group_size * v, hidden),
            "gate.weight": random_(hidden, INNER), "up.weight": random_(hidden, INNER),
            "down.weight": random_(INNER, hidden),
        }  # fmt: skip
        if plan.index.projected:
            layer |= {
                f"attend.proj_{x}": random_(d, len(lanes) * rank).view(
                    len(lanes), d, rank
                )
                for x in "qk"
            }
            layer["attend.centre_k"] = torch.zeros(
                len(lanes), rank, dtype=dtype, device="cuda"
            )
        found |= {f"layers.{i}.{name}": x for name, x in layer.items()}
    angles = 500000.0 ** -(torch.arange(d // 2, device="cuda") / (d // 2))
    found |= {"rope.inv_freq": angles, "rope.amplitude": torch.ones_like(angles)}
    found |= {
        "embed.weight": random_(SHAPE.vocab_size, hidden),
        "head.weight": random_(hidden, SHAPE.vocab_size),
    }
    return found | {"norm.weight": ones(hidden)}


class Bench:
    """One plan's session, its pool full of random pages, and sequences that pretend to
    have them."""

    def __init__(
        self,
        library: CudaLibrary,
        kind: str,
        batch: int,
        tokens: int,
        dtype: torch.dtype,
        chunk: int = 512,
    ) -> None:
        """``batch`` 0: the largest that fits. ``chunk``: tokens of a prompt that pass
        at once."""
        self.plan = plan_of(kind, chunk)
        layout = CacheLayout(self.plan)
        wiring = Wiring(
            "rms",
            1e-5,
            "silu",
            False,
            SHAPE.head_dim,
            (SHAPE.head_dim**-0.5,) * SHAPE.layers,
        )
        decoder = TorchDecoder(
            wiring, weights_of(self.plan, dtype), NativeRows(library)
        )
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0] - SPARE
        self.sequence_bytes = layout.bytes_for(tokens) + 2 * sum(layout.page_stride)
        self.most = free // self.sequence_bytes
        self.batch = batch or int(self.most)
        wanted = self.batch * (
            layout.bytes_for(tokens + 4096) + 16 * sum(layout.page_stride)
        )
        size = min(free, max(wanted, 8 << 30)) if batch else free
        limits = Limits(self.batch, max(chunk, self.batch), 131072, tokens + 8192)
        device = TorchDevice()
        self.session = session_of(device, library, decoder, self.plan, limits, size)
        pages = bytes_of(self.session.pool)
        for start in range(
            0, len(pages), 1 << 30
        ):  # bytes below 0x3c: every half of them is small
            pages[start : start + (1 << 30)].random_(0, 0x3C)
        self.pool = PagePool(layout, size)
        draw = random.Random(0)
        lengths = [
            tokens - draw.randrange(64) for _ in range(self.batch)
        ]  # seals come apart, as in serving
        self.tables = self.grown_until_full(lengths)
        self.batch = len(self.tables)
        self.positions = np.array(lengths[: self.batch], np.int32)
        self.widths = self.session.widths
        self.page_tables = [
            np.zeros((self.batch, width), np.int32) for width in self.widths
        ]
        for b in range(self.batch):
            self.refresh(b)
        self.starts = np.arange(self.batch + 1, dtype=np.int32)
        greedy = Sampler(SamplingParams())
        self.greedy = rows_of([Request(greedy, [], 0)] * self.batch)

    def grown_until_full(self, lengths: list[int]) -> list[PageTable]:
        """Those that fit, each with room to go on decoding."""
        tables: list[PageTable] = []
        try:
            for length in lengths:
                tables.append(self.grown(length))
        except OutOfPages:
            for table in tables[-2:]:  # room for the steps to come
                self.pool.release(table)
            del tables[-2:]
        return tables

    def grown(self, length: int) -> PageTable:
        table = self.pool.open()
        try:
            for start in range(0, length, 512):
                self.pool.commit(
                    self.pool.reserve(table, min(512, length - start), True)
                )
        except OutOfPages:
            self.pool.release(table)
            raise
        return table

    def refresh(self, b: int) -> None:
        for mine, pages in zip(self.page_tables, self.tables[b].pages, strict=True):
            mine[b, : len(pages)] = pages

    def step(self, first: bool) -> Sampling:
        """One decode step of every sequence, queued: what an engine does, without
        waiting for its tokens."""
        lengths = np.array([table.lengths for table in self.tables], np.int32)
        reserved = [self.pool.reserve(table, 1, True) for table in self.tables]
        for b, one in enumerate(reserved):
            if one.change:
                self.refresh(b)
        ids = np.zeros(self.batch, np.int32)
        after = None if first else self.starts[:-1]
        plan = StepPlan(
            ids,
            self.positions,
            self.starts,
            np.zeros(1, np.int32),
            lengths,
            tuple(self.page_tables),
            self.starts[:-1],
            after,
        )
        sampling = self.session.start(plan)(self.greedy)
        moves = [one.change.moves for one in reserved if one.change]
        if any(moves):
            self.session.apply(moves)
        for b, one in enumerate(reserved):
            self.pool.commit(one)
            if one.change:
                self.refresh(b)
        self.positions = self.positions + 1
        return sampling

    def run(self, steps: int) -> dict[str, Any]:
        """Seconds a step by the clock and on the GPU, over ``steps`` steps after a
        warm-up."""
        before = self.step(first=True)
        for _ in range(7):
            before = self.step(first=False)
        torch.cuda.synchronize()
        start, seen = time.perf_counter(), 0
        for _ in range(steps):
            sampling = self.step(first=False)
            seen += len(before.result().tokens)  # that a server would send now
            before = sampling
        torch.cuda.synchronize()
        wall = (time.perf_counter() - start) / steps
        gpu = self.replayed()
        layout = CacheLayout(self.plan)
        return {
            "plan": self.plan.compression, "batch": self.batch, "tokens": int(self.positions.mean()), "ms": wall * 1e3,
            "gpu_ms": gpu * 1e3, "overhead": 1 - gpu / wall, "tokens_s": self.batch / wall,
            "bytes_per_token": layout.bytes_per_token(), "seen": seen,
        }  # fmt: skip

    def prompt(self, tokens: int) -> dict[str, Any]:
        """From nothing to the first token of a prompt, chunk by chunk as in serving;
        the second time of two."""
        seconds, logits = 0.0, torch.empty(0)
        for _ in range(2):
            table = self.pool.open()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for first in range(0, tokens, self.plan.prefill_chunk):
                logits = self.chunk(
                    table, first, min(self.plan.prefill_chunk, tokens - first)
                )
            int(logits.argmax())
            seconds = time.perf_counter() - start
            self.pool.release(table)
        return {
            "plan": self.plan.compression, "prompt": tokens, "chunk": self.plan.prefill_chunk, "ms": seconds * 1e3,
            "tokens_s": tokens / seconds,
        }  # fmt: skip

    def chunk(self, table: PageTable, first: int, count: int) -> torch.Tensor:
        """Logits of a chunk's last token, queued; its full pages are sealed."""
        lengths, one = (
            np.array([table.lengths], np.int32),
            self.pool.reserve(table, count, True),
        )
        pages = tuple(np.array([ids or [0]], np.int32) for ids in table.pages)
        rows = np.arange(count, dtype=np.int32)
        bounds, last = np.array([0, count], np.int32), rows[-1:]
        ids = (rows + first) * 7919 % SHAPE.vocab_size
        step = StepPlan(ids, rows + first, bounds, rows, lengths, pages, last)
        logits = tensor_of(self.session.launch(step))
        if one.change and one.change.moves:
            self.session.apply([one.change.moves])
        self.pool.commit(one)
        return logits

    def replayed(self) -> float:
        """Seconds of one replay on the GPU, among others."""
        replay = self.session._graph_of(self.batch).replay
        torch.cuda.synchronize()
        return repeated(replay, 20) * 1e-3

    def profile(self) -> list[tuple[str, int, float]]:
        """(kernel, calls, microseconds) of one captured step, the longest first."""
        replay = self.session._graph_of(self.batch).replay
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CUDA]
        ) as found:
            replay()
            torch.cuda.synchronize()
        rows = [
            (e.key, e.count, e.self_device_time_total)
            for e in found.key_averages()
            if e.self_device_time_total
        ]
        return sorted(rows, key=lambda row: -row[2])


def show(r: dict[str, Any]) -> None:
    print(
        f"{r['plan']:>8} {r['batch']:>5} x {r['tokens']:>6} {r['ms']:8.3f} {r['gpu_ms']:8.3f} "
        f"{100 * r['overhead']:6.1f}% {r['tokens_s']:9.1f} {r['bytes_per_token']:9.0f}",
        flush=True,
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--library", type=Path, required=True)
    parser.add_argument("--plans", default="none,ranks,ranks8", help="comma-separated")
    parser.add_argument(
        "--cases",
        default="16x32768,0x32768,1x61800",
        help="batch x tokens; batch 0 is the largest that fits",
    )
    parser.add_argument(
        "--prompts",
        default="",
        help="comma-separated: tokens of a prompt/tokens of a chunk",
    )
    parser.add_argument(
        "--steps", type=int, default=128, help="2048 for the case with batch 1"
    )
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16"])
    parser.add_argument(
        "--profile",
        action="store_true",
        help="print the kernels of a captured step of the first case",
    )
    a = parser.parse_args()
    library, results = CudaLibrary(Native.load(a.library)), []
    print(
        f"# {torch.cuda.get_device_name()}, torch {torch.__version__}, {a.dtype}, Llama-3.1-8B shape, random weights"
    )
    print(
        f"{'plan':>8} {'batch x tokens':>14} {'step ms':>8} {'GPU ms':>8} {'host':>7} {'tokens/s':>9} {'B/token':>9}"
    )
    for i, case in enumerate(filter(None, a.cases.split(","))):
        batch, tokens = (int(x) for x in case.split("x"))
        for kind in a.plans.split(","):
            bench = Bench(library, kind, batch, tokens, getattr(torch, a.dtype))
            results.append(bench.run(2048 if batch == 1 else a.steps))
            show(results[-1])
            for name, count, us in bench.profile()[:14] if a.profile and i == 0 else ():
                print(f"    {us:9.1f} us {count:5d} x {name[:110]}")
            del bench
            torch.cuda.empty_cache()
    if a.prompts:
        print(f"{'plan':>8} {'prompt':>7} {'chunk':>6} {'ms':>9} {'tokens/s':>9}")
    for case in filter(None, a.prompts.split(",")):
        tokens, chunk = (int(x) for x in case.split("/"))
        for kind in a.plans.split(","):
            bench = Bench(library, kind, 1, tokens, getattr(torch, a.dtype), chunk)
            results.append(r := bench.prompt(tokens))
            print(
                f"{kind:>8} {tokens:>7} {chunk:>6} {r['ms']:9.1f} {r['tokens_s']:9.0f}",
                flush=True,
            )
            del bench
            torch.cuda.empty_cache()
    print(
        json.dumps(
            {
                "bench": "cuda_backend",
                "device": torch.cuda.get_device_name(),
                "results": results,
            }
        )
    )


if __name__ == "__main__":
    main()
