"""Calls of triton_prefill.py on a ChunkProblem's numbers: codes, descriptors, float64
references. Needs triton."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from benchmarks.support import triton_prefill as kernels
from kvlathe.plan.formats import groups_along_rank
from tests.native.chunk_problem import ChunkProblem

LOG2E = 1.4426950408889634
WIDEST, TILE = 128, 64
Shape = tuple[int, int, int, int]


def shape_of(rank_k: int, rank_v: int) -> Shape:
    """KG, KD, DV, DW of a head: groups of K, channels of one, and of V's two blocks,
    with padding."""
    groups = groups_along_rank(rank_k, TILE)
    rest = max(0, rank_v - TILE)
    return (
        len(groups),
        32 if groups[0] <= 32 else 64,
        32 if rank_v <= 32 else 64,
        0 if not rest else 32 if rest <= 32 else 64,
    )


class Buffers:
    """Codes (or 16-bit numbers in their layout) and their metadata, zero where nothing
    is written."""

    def __init__(
        self, heads: int, group: int, tokens: int, dtype: torch.dtype, device: str
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.codes = {
            "q": zeros(heads * group, WIDEST * tokens),
            "k": zeros(heads, WIDEST * tokens),
        }
        self.codes["v"] = zeros(heads * WIDEST, tokens)
        sizes = {
            "q": (heads * group * 2, tokens),
            "k": (heads * 2, tokens),
            "v": (heads * tokens // TILE, WIDEST),
        }
        self.meta = {
            name: zeros(*size, dtype=torch.int32) for name, size in sizes.items()
        }
        self.sums = {
            name: zeros(*size, dtype=torch.float32) for name, size in sizes.items()
        }

    def arguments(self, shape: Shape) -> tuple[object, ...]:
        """The first twelve of ``attend`` for heads of one shape."""
        _, kd, dv, dw = shape
        wide = max(dw, 16)
        k, v = self.codes["k"].view(-1, kd), self.codes["v"]
        blocks = {"k": [1, TILE], "v": [1, dv], "w": [1, wide]}

        def three(kept: dict[str, torch.Tensor]) -> list[TensorDescriptor]:
            return [
                TensorDescriptor.from_tensor(kept[x.replace("w", "v")], blocks[x])
                for x in "kvw"
            ]

        codes = ((k, [TILE, kd]), (v, [dv, TILE]), (v, [wide, TILE]))
        described = [TensorDescriptor.from_tensor(x, block) for x, block in codes]
        return (
            self.codes["q"],
            *described,
            self.meta["q"],
            *three(self.meta),
            self.sums["q"],
            *three(self.sums),
        )


def compile_kernel(
    form: str, shape: Shape, tuning: tuple[int, int, int], group: int
) -> None:
    """Into Triton's cache."""
    dtype = torch.float16 if form == "half" else torch.int8
    some = Buffers(1, group, 1024, dtype, "cuda")
    heads = torch.zeros(16, dtype=torch.int32, device="cuda")
    rows, warps, stages = tuning
    kernels.attend.warmup(
        *some.arguments(shape), torch.empty(16, dtype=torch.float16, device="cuda"), 1024, heads, heads, 1024, 0.5,
        FORM=form, KG=shape[0], KD=shape[1], DV=shape[2], DW=shape[3], BM=rows, G=group, STAGES=stages, num_warps=warps,
        grid=(1,),
    )  # fmt: skip


class PromptCall:
    """One layer of ``problem``, whose one sequence is a prompt. Its answer goes to
    ``out``."""

    def __init__(self, problem: ChunkProblem, layer: int) -> None:
        self.problem, self.layer, self.tokens, self.group = (
            problem,
            layer,
            problem.lengths[0],
            problem.group,
        )
        self.ranks, self.device = problem.ranks[layer], problem.device
        self.scale = problem.scale * LOG2E
        kept = [problem.cached(0, layer, head) for head in range(len(self.ranks))]
        self.x = {
            "q": problem.q[layer],
            "k": torch.cat([k for k, _ in kept], 1),
            "v": torch.cat([v for _, v in kept], 1),
        }
        self.heads = self._there(self._table())
        self.buffers = Buffers(
            len(self.ranks), self.group, self.tokens, torch.int8, self.device
        )
        self.halves = Buffers(
            len(self.ranks), self.group, self.tokens, torch.float16, self.device
        )
        shapes = [shape_of(*pair) for pair in self.ranks]
        self.classes = {
            s: self._there([i for i, x in enumerate(shapes) if x == s])
            for s in sorted(set(shapes), key=lambda s: -s[0] * s[1] - s[2] - s[3])
        }
        parallel = len(self.classes) > 1 and self.device == "cuda"
        self.streams = (
            {s: torch.cuda.Stream() for s in self.classes} if parallel else {}
        )
        self.out = torch.full_like(problem.o[layer], math.nan)
        for part in "qkv":
            self.quantize(part, True)
        self._fill_halves()

    def _there(self, rows: Sequence[object]) -> torch.Tensor:
        return torch.tensor(rows, dtype=torch.int32, device=self.device)

    def _table(self) -> list[list[int]]:
        """kernels.HEAD for each head."""
        rows, k_at, v_at = [], 0, 0
        for rank_k, rank_v in self.ranks:
            first, dims = (
                groups_along_rank(rank_k, TILE)[0],
                shape_of(rank_k, rank_v)[1],
            )
            rows.append(
                [
                    rank_k,
                    rank_v,
                    k_at * self.group,
                    k_at,
                    v_at,
                    v_at * self.group,
                    first,
                    dims,
                ]
            )
            k_at, v_at = k_at + rank_k, v_at + rank_v
        return rows

    def quantize(self, part: str, symmetric: bool) -> None:
        """``part``: q, k or v. ``symmetric`` is about q."""
        x, b, heads = self.x[part], self.buffers, len(self.ranks)
        args = (
            x,
            x.stride(0),
            self.heads,
            b.codes[part],
            b.meta[part],
            b.sums[part],
            self.tokens,
        )
        if part == "v":
            kernels.quantize_columns[(self.tokens // TILE, heads)](*args)
            return
        g = self.group if part == "q" else 1
        flags = {"QUERY": part == "q", "SYMMETRIC": part == "q" and symmetric}
        kernels.quantize_rows[(self.tokens // TILE, heads * g)](*args, G=g, **flags)

    def _fill_halves(self) -> None:
        for head, (rank_k, rank_v, q_at, k_at, v_at, _, first, dims) in enumerate(
            self._table()
        ):
            for g in range(self.group + 1):  # the last is k
                x = (
                    self.x["q"][:, q_at + g * rank_k :]
                    if g < self.group
                    else self.x["k"][:, k_at:]
                )
                to = (
                    self.halves.codes["q"][head * self.group + g]
                    if g < self.group
                    else self.halves.codes["k"][head]
                )
                for i, size in enumerate(groups_along_rank(rank_k, TILE)):
                    to.view(-1, self.tokens, dims)[i, :, :size] = x[
                        :, i * first : i * first + size
                    ]
            self.halves.codes["v"].view(-1, WIDEST, self.tokens)[head, :rank_v] = (
                self.x["v"][:, v_at : v_at + rank_v].T
            )

    def attend(self, form: str, rows: int, warps: int, stages: int) -> None:
        """A launch for each shape of heads, side by side."""
        if not self.streams:
            for shape, which in self.classes.items():
                self._launch(form, shape, which, rows, warps, stages)
            return
        here = torch.cuda.current_stream()
        for shape, which in self.classes.items():
            stream = self.streams[shape]
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                self._launch(form, shape, which, rows, warps, stages)
        for stream in self.streams.values():
            here.wait_stream(stream)

    def _launch(
        self,
        form: str,
        shape: Shape,
        which: torch.Tensor,
        rows: int,
        warps: int,
        stages: int,
    ) -> None:
        some = self.halves if form == "half" else self.buffers
        kernels.attend[(self.tokens // rows, len(which) * self.group)](
            *some.arguments(shape), self.out, self.out.stride(0), self.heads, which, self.tokens, self.scale,
            FORM=form, KG=shape[0], KD=shape[1], DV=shape[2], DW=shape[3], BM=rows, G=self.group, STAGES=stages,
            num_warps=warps,
        )  # fmt: skip

    # -- references --------------------------------------------------------------------
    def _rows_of(self, part: str, head: int, g: int, corrected: bool) -> torch.Tensor:
        """[tokens, rank] that q's or k's codes mean, float64."""
        rank, dims = (int(self._table()[head][i]) for i in (0, 7))
        row = head * self.group + g if part == "q" else head
        codes = self.buffers.codes[part][row].view(-1, self.tokens, dims).double()
        scale, offset = halves_of(self.buffers.meta[part].view(-1, 2, self.tokens)[row])
        groups = groups_along_rank(rank, TILE)
        return torch.cat(
            [
                codes[i, :, :n] * scale[i, :, None] + offset[i, :, None] * corrected
                for i, n in enumerate(groups)
            ],
            1,
        )

    def _values(self, head: int, corrected: bool) -> torch.Tensor:
        """[tokens, rank_v]"""
        rank = self.ranks[head][1]
        codes = (
            self.buffers.codes["v"]
            .view(-1, WIDEST, self.tokens)[head, :rank]
            .double()
            .T
        )
        scale, offset = halves_of(
            self.buffers.meta["v"].view(-1, self.tokens // TILE, WIDEST)[head, :, :rank]
        )
        return codes * scale.repeat_interleave(
            TILE, 0
        ) + corrected * offset.repeat_interleave(TILE, 0)

    def reference(self, form: str, rows: Sequence[int], tile: int) -> torch.Tensor:
        """[rows, width] of ``form`` in float64 on the numbers that the codes mean;
        ``exact``: on those before."""
        out = []
        for head, (rank_k, rank_v, q_at, k_at, v_at, *_) in enumerate(self._table()):
            for g in range(self.group):
                if form in ("exact", "half"):
                    q = self.x["q"][
                        :, q_at + g * rank_k : q_at + (g + 1) * rank_k
                    ].double()
                    k = self.x["k"][:, k_at : k_at + rank_k].double()
                    v = self.x["v"][:, v_at : v_at + rank_v].double()
                elif form == "products":
                    q, k, v = self._plain_codes(head, g)
                else:
                    q, k = (
                        self._rows_of(x, head, g, x == "q" or form != "uncorrected")
                        for x in "qk"
                    )
                    v = self._values(head, form != "uncorrected")
                out.append(
                    torch.stack(
                        [self._row(form, q[row] @ k.T, v, row, tile) for row in rows]
                    )
                )
        return torch.cat(out, 1)

    def _plain_codes(
        self, head: int, g: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        groups, dims, b = (
            len(groups_along_rank(self.ranks[head][0], TILE)),
            self._table()[head][7],
            self.buffers.codes,
        )
        rows = (b["q"][head * self.group + g], b["k"][head])
        q, k = (
            x.view(-1, self.tokens, dims)[:groups].transpose(0, 1).flatten(1).double()
            for x in rows
        )
        return (
            q,
            k,
            b["v"]
            .view(-1, WIDEST, self.tokens)[head, : self.ranks[head][1]]
            .double()
            .T,
        )

    def _row(
        self, form: str, scores: torch.Tensor, v: torch.Tensor, row: int, tile: int
    ) -> torch.Tensor:
        if form == "products":
            end = (row // tile + 1) * tile
            p = (scores[:end].long() >> 13).to(torch.int8).double()
            return p @ v[:end] / (TILE * end)
        end = -(-(row + 1) // TILE) * TILE
        seen = scores[:end] * self.scale
        seen[row + 1 :] = -math.inf
        if form in ("exact", "half"):
            p = torch.exp2(seen - seen.max())
            return p @ v[:end] / p.sum()
        tiles = seen.view(-1, TILE)
        mine = tiles.amax(1, keepdim=True)
        p, most = torch.exp2(tiles - mine), torch.exp2(mine - mine.max())
        if form == "asymmetric":
            least = p.amin(1, keepdim=True)
            step = ((1 - least) / 127).clamp_min(1e-28)
            p = least + step * torch.round((p - least) / step)
        else:
            p = torch.round(127 * p)
        p = (p * most).flatten()
        return p @ v[:end] / p.sum()

    def wrong_by(
        self, form: str, rows: Sequence[int], tile: int
    ) -> tuple[float, float]:
        """Largest difference from the reference, relative to its largest number, and
        what is allowed."""
        reference = self.reference(form, rows, tile)
        wrong = (
            self.out[list(rows)].double() - reference
        ).abs().max() / reference.abs().max()
        return float(wrong), 4e-3

    def error(self, rows: Sequence[int]) -> float:
        """The error of what lies in ``out``, against exact attention."""
        exact = self.reference("exact", rows, TILE)
        return float(
            (self.out[list(rows)].double() - exact).abs().max() / exact.abs().max()
        )


def halves_of(meta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and offsets of packed metadata, float64."""
    both = meta.contiguous().view(torch.float16).view(*meta.shape, 2).double()
    return both[..., 0], both[..., 1]
