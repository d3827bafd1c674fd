"""Calls of the Triton kernels on the problems of tests/native: tensors, work lists,
references. Needs triton.

A call is one layer's attention. Every reference is in float64; ``plain`` is the same in
16-bit torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.support import triton_decode as kernels
from benchmarks.support.triton_codes import unpack
from benchmarks.support.work_lists import WorkList, work_list
from kvlathe.plan.formats import groups_along_rank, sum_bytes
from tests.native.codes_problem import CodesProblem, unpacked
from tests.native.library import AttendDecodeArgs, Library
from tests.native.problem import Problem

LOG2E = 1.4426950408889634
WIDEST = 128


@dataclass(frozen=True)
class Tuning:
    """``programs`` a multiprocessor; ``tile`` tokens (codes: always a page);
    ``classes``: a launch for each class of ranks, up to 64 and up to 128 for K and for
    V, or one launch that has code for all of them."""

    warps: int
    stages: int
    programs: int
    tile: int = 64
    classes: bool = True

    def __str__(self) -> str:
        launches = "" if self.classes else ", one launch"
        return f"{self.warps} warps, {self.stages} stages, {self.programs} an SM, tile {self.tile}{launches}"


@dataclass(frozen=True)
class Launches:
    """A layer's work: the dims of each launch (0: chosen for each span), its list, and
    the lists on the GPU."""

    dims: Sequence[tuple[int, ...]]
    lists: Sequence[WorkList]
    spans: Sequence[torch.Tensor]
    starts: Sequence[torch.Tensor]
    slots: torch.Tensor


class TritonCall:
    """``form``: rows, rebuilt (on a Problem), dequantized or integer (on a
    CodesProblem); see triton_decode.py."""

    def __init__(
        self,
        problem: Problem | CodesProblem,
        form: str,
        rule: str,
        tuning: Tuning,
        processors: int,
        sums: str = "none",
    ) -> None:
        self.problem, self.form, self.tuning, self.sums = problem, form, tuning, sums
        self.coded = isinstance(problem, CodesProblem)
        bucket = 1 if self.coded else 0
        lengths = (
            problem.lengths[:, 1].tolist()
            if isinstance(problem, CodesProblem)
            else list(problem.lengths)
        )
        self.lengths = problem.length_tensor.flatten()[bucket:]
        self.length_stride = problem.length_tensor.stride(0)
        self.tables = (
            problem.tables if isinstance(problem, CodesProblem) else [problem.table]
        )
        self.table, self.stride = (
            self.tables[bucket],
            problem.layout.page_stride[bucket],
        )
        self.pool = problem.pool.view(torch.uint8)
        self.bits = problem.tiers[0].bits_k if isinstance(problem, CodesProblem) else 16
        lists: dict[
            tuple[tuple[int, int], ...], Launches
        ] = {}  # layers of the same ranks share one
        for row in (tuple(row) for row in problem.ranks):
            if row not in lists:
                lists[row] = self._launches(
                    rule, lengths, row, processors * tuning.programs
                )
        self.work = [lists[tuple(row)] for row in problem.ranks]
        self.split = any(work.split for one in lists.values() for work in one.lists)
        most = max(1, *(int(one.slots.max()) for one in lists.values()))
        self.partial = torch.empty(
            most * problem.group * WIDEST, dtype=torch.float32, device=problem.device
        )
        self.states = torch.empty(
            most * problem.group * 2, dtype=torch.float32, device=problem.device
        )
        self.lanes = [
            self._there(self._lane_table(layer)) for layer in range(len(problem.ranks))
        ]
        self.q, self.extra = problem.q, (self.partial, self.partial, self.partial)
        if form == "rebuilt":
            self._prepare_rebuilt(len(problem.ranks[0]))

    def _there(self, x: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(x)).to(self.problem.device)

    def _launches(
        self,
        rule: str,
        lengths: Sequence[int],
        ranks: Sequence[tuple[int, int]],
        workers: int,
    ) -> Launches:
        """One launch for each class of ranks that there is, or one for all."""
        wide = [tuple(64 if rank <= 64 else WIDEST for rank in pair) for pair in ranks]
        dims = sorted(set(wide)) if self.tuning.classes else [(0, 0)]
        lists, slot, slots = [], 0, np.zeros((len(lengths) * len(ranks), 2), np.int32)
        for one in dims:
            mine = [
                pair if own == one or one == (0, 0) else (0, 0)
                for pair, own in zip(ranks, wide, strict=True)
            ]
            work = work_list(
                rule, lengths, mine, self.problem.page_tokens, workers, self.coded, slot
            )
            slots[work.slots[:, 1] > work.slots[:, 0]] = work.slots[
                work.slots[:, 1] > work.slots[:, 0]
            ]
            slot = int(work.slots[-1, 1])
            lists.append(work)
        return Launches(dims, lists, [self._there(x.spans) for x in lists], [self._there(x.starts) for x in lists],
                        self._there(slots))  # fmt: skip

    def _lane_table(self, layer: int) -> np.ndarray:
        p, rows, q_at, o_at = self.problem, [], 0, 0
        last = p.layout.lane_table(1 if self.coded else 0)
        hot = p.layout.lane_table(0)
        offsets_of = [
            p.layout.lane_offsets(1 if self.coded else 0, i) for i in range(len(last))
        ]
        group = p.tiers[0].group_k if isinstance(p, CodesProblem) else WIDEST
        for i in np.flatnonzero(last[:, 0] == layer):
            _, _, rank_k, rank_v, k, k_meta, v, v_meta, _, _ = (int(x) for x in last[i])
            sizes = groups_along_rank(rank_k, group)
            rows.append((rank_k, rank_v, k, k_meta, v, v_meta, len(sizes), sizes[0], q_at, o_at, offsets_of[i].k_sums,
                         offsets_of[i].v_sums, int(hot[i][4]), int(hot[i][6])))  # fmt: skip
            q_at, o_at = q_at + p.group * rank_k, o_at + p.group * rank_v
        return np.array(rows, np.int32)

    def _prepare_rebuilt(self, heads: int) -> None:
        """Bases [heads, 128, 128], queries of full width, cos and sin of the places in
        a tile and of pages' starts."""
        p, tile = self.problem, self.tuning.tile
        draw = torch.Generator(p.device).manual_seed(1)
        self.basis = torch.randn(
            heads, WIDEST, WIDEST, generator=draw, device=p.device
        ).half()
        scale = torch.tensor(
            [rank_k**-0.5 for rank_k, _ in p.ranks[0]], device=p.device
        )
        self.basis = (self.basis * scale.view(-1, 1, 1)).half()
        width = heads * p.group * WIDEST
        self.q = [
            torch.randn(len(p.lengths), width, generator=draw, device=p.device).half()
            for _ in p.ranks
        ]
        starts = torch.arange(0, int(max(p.lengths)), p.page_tokens, device=p.device)
        self.extra = (
            self.basis,
            _angles(torch.arange(tile, device=p.device)).half(),
            _angles(starts).float(),
        )

    def __call__(self, layer: int) -> None:
        p, tuning, work = self.problem, self.tuning, self.work[layer]
        q, o, scale = self.q[layer], p.o[layer], p.scale * LOG2E
        group = {"G": p.group, "GP": 8 if p.group <= 8 else 16, "P": p.page_tokens}
        for (dim_k, dim_v), spans, starts in zip(
            work.dims, work.spans, work.starts, strict=True
        ):
            kernels.attend[(len(starts) - 1,)](
                self.pool, self.table, self.lengths, self.lanes[layer], spans, starts, q, o, *self.extra, self.partial,
                self.states, self.stride, self.table.shape[1], self.length_stride, q.stride(0), o.stride(0), scale,
                FORM=self.form, BITS=self.bits, SUMS=self.sums, DK=dim_k, DV=dim_v, **group, BN=tuning.tile,
                num_warps=tuning.warps, num_stages=tuning.stages,
            )  # fmt: skip
        if self.split:
            kernels.join[(len(p.lengths), len(p.ranks[layer]))](
                self.pool, self.tables[0], p.length_tensor, self.lanes[layer], work.slots, q, o, self.partial,
                self.states, p.layout.page_stride[0], self.tables[0].shape[1], self.length_stride, q.stride(0),
                o.stride(0), scale, TAIL=self.coded, **group, num_warps=4,
            )  # fmt: skip

    def reference(
        self, layer: int, sequences: Sequence[int]
    ) -> tuple[torch.Tensor, float]:
        """o' in float64 and the largest error that is allowed: twice that of plain
        16-bit torch; products of codes: 4 times that of the form itself (Triton
        multiplies signed bytes: weights have 7 bits, not 8)."""
        if self.form == "integer":
            assert isinstance(self.problem, CodesProblem)
            exact, form = (
                self.problem.answer(layer, integer, sequences)
                for integer in (False, True)
            )
            return exact, 4 * float((form - exact).abs().max())
        exact, plain = (
            self.answer(layer, dtype, sequences)
            for dtype in (torch.float64, torch.float16)
        )
        return exact, 2 * float((plain.double() - exact).abs().max()) + 1e-6

    def answer(
        self, layer: int, dtype: torch.dtype, sequences: Sequence[int]
    ) -> torch.Tensor:
        """o' [sequences, width] of plain torch on the numbers that the pages stand
        for."""
        p, out = self.problem, []
        for b in sequences:
            row, at = [], 0
            for head, (rank_k, _) in enumerate(p.ranks[layer]):
                width = WIDEST if self.form == "rebuilt" else rank_k
                q = (
                    self.q[layer][b, at : at + p.group * width]
                    .view(p.group, width)
                    .to(dtype)
                )
                at += p.group * width
                k, v = self._numbers(b, layer, head, dtype)
                row.append((torch.softmax(q @ k.T * p.scale, -1) @ v).flatten())
            out.append(torch.cat(row))
        return torch.stack(out)

    def _numbers(
        self, b: int, layer: int, head: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        p = self.problem
        if isinstance(p, Problem):
            k, v = (x.to(dtype) for x in p.cached(b, layer, head))
            return self._turned(
                k @ self.basis[head, : k.shape[1]].to(dtype)
            ) if self.form == "rebuilt" else k, v
        k, k_scale, k_least, v, v_scale, v_least = p._quantized(
            1, b, p.rows(1, layer)[head]
        )
        tail_k, tail_v = p._tail(b, p.rows(0, layer)[head])
        keys, values = (
            torch.cat([k * k_scale + k_least, tail_k]),
            torch.cat([v * v_scale + v_least, tail_v]),
        )
        return keys.to(dtype), values.to(dtype)

    @staticmethod
    def _turned(k: torch.Tensor) -> torch.Tensor:
        cos, sin = (
            _angles(torch.arange(len(k), device=k.device)).to(k.dtype).chunk(2, -1)
        )
        x, y = k.chunk(2, -1)
        return torch.cat([x * cos - y * sin, y * cos + x * sin], -1)


def _angles(positions: torch.Tensor) -> torch.Tensor:
    """[n, 128]: cos of every plane's angle, then sin; float64."""
    planes = torch.arange(WIDEST // 2, device=positions.device).double()
    turns = positions.double()[:, None] * 500000.0 ** (-planes / (WIDEST // 2))
    return torch.cat([turns.cos(), turns.sin()], -1)


class Unpacked:
    """Dequantize-then-attend's first half: sealed pages become 16-bit pages in device
    memory. Call it with a layer."""

    def __init__(self, problem: CodesProblem, warps: int) -> None:
        self.problem, self.warps = problem, warps
        self.like = TritonCall(problem, "dequantized", "balanced", Tuning(4, 3, 1), 1)
        batch, width = len(problem.tails), problem.tables[1].shape[1]
        self.stride = problem.layout.page_stride[0]
        count = batch * width + batch
        self.memory = torch.empty(
            count * self.stride, dtype=torch.uint8, device=problem.device
        )
        ids = torch.arange(count, dtype=torch.int32, device=problem.device)
        self.table = torch.cat(
            [ids[: batch * width].view(batch, width), ids[batch * width :, None]], 1
        )
        for b in range(batch):  # the tail's page follows the last sealed one
            full, last = (
                int(problem.lengths[b, 1]) // problem.page_tokens,
                int(self.table[b, width]),
            )
            self.table[b, full] = last
            self.pages()[last] = problem._pages(0)[int(problem.tables[0][b, 0])]
        self.lengths = problem.length_tensor.sum(1, dtype=torch.int32)

    def pages(self) -> torch.Tensor:
        return self.memory.view(-1, self.stride)

    def __call__(self, layer: int) -> None:
        p, like = self.problem, self.like
        grid = (like.table.shape[1], len(p.tails), len(p.ranks[layer]))
        unpack[grid](
            like.pool, like.table, like.lengths, like.lanes[layer], self.memory, like.stride, self.stride,
            like.table.shape[1], like.length_stride, BITS=like.bits, P=p.page_tokens, num_warps=self.warps,
        )  # fmt: skip


class UnpackThenAttend:
    """And our 16-bit kernel on those pages."""

    def __init__(
        self,
        library: Library,
        problem: CodesProblem,
        space: torch.Tensor,
        flags: int,
        warps: int,
    ) -> None:
        self.library, self.unpack = library, Unpacked(problem, warps)
        self.args = [
            self._args(problem.args(layer, space), flags)
            for layer in range(len(problem.ranks))
        ]

    def _args(self, args: AttendDecodeArgs, flags: int) -> AttendDecodeArgs:
        args.part_count, args.flags = 1, flags
        part, pages = args.parts[0], self.unpack
        part.page_table, part.page_table_stride = (
            pages.table.data_ptr(),
            pages.table.shape[1],
        )
        part.lengths, part.lengths_stride = pages.lengths.data_ptr(), 1
        args.pool, args.pool_bytes = pages.memory.data_ptr(), pages.memory.numel()
        return args

    def __call__(self, layer: int) -> None:
        self.unpack(layer)
        self.args[layer].stream = torch.cuda.current_stream().cuda_stream
        self.library.attend_decode(self.args[layer], "cuda")

    def reference(
        self, layer: int, sequences: Sequence[int]
    ) -> tuple[torch.Tensor, float]:
        return self.unpack.like.reference(layer, sequences)


def store_sums(problem: CodesProblem) -> None:
    """Writes the sum of every group's codes where the tier keeps it."""
    tier, p = problem.tiers[0], problem.page_tokens
    pages, bits, width = problem._pages(1), tier.bits_k, sum_bytes(tier.bits_k, 64)
    mine = problem.tables[1][problem.tables[1] >= 0].long()
    for i, row in enumerate(problem.layout.lane_table(1)):
        offsets, rank_k, rank_v = (
            problem.layout.lane_offsets(1, i),
            int(row[2]),
            int(row[3]),
        )
        for ids in mine.split(1024):
            some = pages[ids]
            k = unpacked(
                some[:, offsets.k : offsets.k + p * rank_k * bits // 8], bits
            ).view(-1, p, rank_k)
            v = unpacked(
                some[:, offsets.v : offsets.v + p * rank_v * bits // 8], bits
            ).view(-1, rank_v, p)
            sums_k = torch.stack(
                [
                    x.sum(-1)
                    for x in k.split(list(groups_along_rank(rank_k, tier.group_k)), -1)
                ],
                -1,
            )
            for at, sums in (
                (offsets.k_sums, sums_k.flatten(1)),
                (offsets.v_sums, v.sum(-1)),
            ):
                narrow = (
                    sums.to(torch.uint8)
                    if width == 1
                    else sums.to(torch.int16).view(torch.uint8)
                )
                pages[ids, at : at + narrow.shape[1]] = narrow
