"""A random decode step on a paged pool laid out by CacheLayout, with its float64
answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from kvlathe.plan.formats import Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane, ModelShape
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.plan import CompressionPlan
from tests.native.library import ABI_VERSION, BF16, F16, F32, AttendDecodeArgs, Part

ELEMENTS = {torch.float32: F32, torch.float16: F16, torch.bfloat16: BF16}


def plan_of(
    ranks: Sequence[Sequence[tuple[int, int]]], group: int, tier: Tier, page_tokens: int
) -> CompressionPlan:
    """``ranks[layer][head]`` = (rank_k, rank_v); one group that holds every lane."""
    heads = len(ranks[0])
    lanes = tuple(
        Lane(layer, head, 128, rank_k, rank_v, projected=True)
        for layer, row in enumerate(ranks)
        for head, (rank_k, rank_v) in enumerate(row)
    )
    shape = ModelShape(
        len(ranks), heads * group, heads, 128, heads * group * 128, 1000, 1 << 20
    )
    return CompressionPlan(
        shape,
        lanes,
        (Group(tuple(range(len(lanes))), tier),),
        page_tokens,
        8 * page_tokens,
    )


@dataclass
class Problem:
    """One step over every layer of ``ranks``; tensors live on ``device``."""

    ranks: Sequence[Sequence[tuple[int, int]]]
    lengths: Sequence[int]
    group: int = 4
    dtype: torch.dtype = torch.float16
    page_tokens: int = 64
    device: str = "cpu"
    seed: int = 0
    spread: float = 1.0  # of q: larger makes the softmax sharper
    scale: float = 128**-0.5
    layout: CacheLayout = field(init=False)

    def __post_init__(self) -> None:
        bits = 32 if self.dtype == torch.float32 else 16
        self.layout = CacheLayout(
            plan_of(self.ranks, self.group, Tier(bits, bits), self.page_tokens)
        )
        generator = torch.Generator(self.device).manual_seed(self.seed)
        pages = [-(-n // self.page_tokens) for n in self.lengths]
        self.stride = self.layout.page_stride[0]
        count = max(1, sum(pages))
        self.pool = torch.empty(
            count * self.stride // (bits // 8), dtype=self.dtype, device=self.device
        )
        for start in range(0, len(self.pool), 1 << 28):
            self.pool[start : start + (1 << 28)].normal_(generator=generator)
        ids = np.random.default_rng(self.seed).permutation(count).astype(np.int32)
        table = np.full(
            (max(1, len(pages)), max([1, *pages])), -(1 << 30), np.int32
        )  # past the length: never to be read
        for b, (start, n) in enumerate(
            zip(np.cumsum([0, *pages]), pages, strict=False)
        ):
            table[b, :n] = ids[start : start + n]
        self.table = torch.tensor(table, device=self.device)
        self.length_tensor = torch.tensor(
            list(self.lengths), dtype=torch.int32, device=self.device
        )
        self.lanes = [self._rows(layer) for layer in range(len(self.ranks))]
        self.q = [self._random_q(layer, generator) for layer in range(len(self.ranks))]
        self.o = [self.poisoned(layer) for layer in range(len(self.ranks))]

    def _rows(self, layer: int) -> np.ndarray:
        table = self.layout.lane_table(0)
        return np.ascontiguousarray(table[table[:, 0] == layer])

    def _random_q(self, layer: int, generator: torch.Generator) -> torch.Tensor:
        width = self.group * sum(rank_k for rank_k, _ in self.ranks[layer])
        q = torch.empty(len(self.lengths), width, dtype=self.dtype, device=self.device)
        return q.normal_(generator=generator).mul_(self.spread)

    def poisoned(self, layer: int) -> torch.Tensor:
        width = self.group * sum(rank_v for _, rank_v in self.ranks[layer])
        return torch.full(
            (len(self.lengths), width),
            float("nan"),
            dtype=self.dtype,
            device=self.device,
        )

    def spoil_unused_rows(self) -> None:
        """Write NaN where no token lies: rows past the length in each last page."""
        view = self.pool.view(-1, self.stride // self.pool.element_size())
        for layer in range(len(self.ranks)):
            for row in self.lanes[layer]:
                for b, n in enumerate(self.lengths):
                    if rest := n % self.page_tokens:
                        page = view[self.table[b, n // self.page_tokens]]
                        for at, rank in ((row[4], row[2]), (row[6], row[3])):
                            first = at // self.pool.element_size()
                            page[
                                first + rest * rank : first + self.page_tokens * rank
                            ] = float("nan")

    def args(
        self, layer: int = 0, workspace: torch.Tensor | None = None, stream: int = 0
    ) -> AttendDecodeArgs:
        part = Part(
            page_table_stride=self.table.shape[1],
            page_stride=self.stride,
            lengths_stride=1,
        )
        part.bits_k = part.bits_v = self.pool.element_size() * 8
        part.lane_count, part.lanes = (
            len(self.lanes[layer]),
            self.lanes[layer].ctypes.data,
        )
        part.page_table, part.lengths = (
            self.table.data_ptr(),
            self.length_tensor.data_ptr(),
        )
        args = AttendDecodeArgs(
            ABI_VERSION,
            ELEMENTS[self.dtype],
            len(self.lengths),
            self.group,
            self.page_tokens,
            1,
            self.scale,
        )
        args.parts = (Part * 1)(part)
        args.pool, args.pool_bytes = (
            self.pool.data_ptr(),
            self.pool.numel() * self.pool.element_size(),
        )
        q, o = self.q[layer], self.o[layer]
        args.q, args.q_stride, args.o, args.o_stride = (
            q.data_ptr(),
            q.shape[1],
            o.data_ptr(),
            o.shape[1],
        )
        if workspace is not None:
            args.workspace, args.workspace_bytes, args.stream = (
                workspace.data_ptr(),
                workspace.numel(),
                stream,
            )
        return args

    def cached(
        self, sequence: int, layer: int, head: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K [n, rank_k] and V [n, rank_v] of one lane, gathered from the pages."""
        n = self.lengths[sequence]
        pages = self.table[sequence, : -(-n // self.page_tokens)].long()
        page = self.pool.view(-1, self.stride // self.pool.element_size())[pages]
        _, _, rank_k, rank_v, k, _, v, _, _, _ = (
            int(x) for x in self.lanes[layer][head]
        )

        def rows(at: int, rank: int) -> torch.Tensor:
            at //= self.pool.element_size()
            return page[:, at : at + self.page_tokens * rank].reshape(-1, rank)[:n]

        return rows(k, rank_k), rows(v, rank_v)

    def answer(
        self, layer: int, dtype: torch.dtype, sequences: Sequence[int] | None = None
    ) -> torch.Tensor:
        """o' [sequences, width] of plain torch attention computed in ``dtype``."""
        out = []
        for b in range(len(self.lengths)) if sequences is None else sequences:
            row, at = [], 0
            for head, (rank_k, rank_v) in enumerate(self.ranks[layer]):
                q = (
                    self.q[layer][b, at : at + self.group * rank_k]
                    .view(self.group, rank_k)
                    .to(dtype)
                )
                at += self.group * rank_k
                if self.lengths[b] == 0:
                    row.append(
                        torch.zeros(
                            self.group * rank_v, dtype=dtype, device=self.device
                        )
                    )
                    continue
                k, v = (x.to(dtype) for x in self.cached(b, layer, head))
                row.append((torch.softmax(q @ k.T * self.scale, -1) @ v).flatten())
            out.append(torch.cat(row))
        return torch.stack(out)

    def errors(
        self, layer: int, sequences: Sequence[int] | None = None
    ) -> tuple[float, float]:
        """Largest error of o and of plain torch in the problem's dtype, against
        float64."""
        exact = self.answer(layer, torch.float64, sequences)
        own = self.o[layer] if sequences is None else self.o[layer][list(sequences)]
        plain = self.answer(layer, self.dtype, sequences)
        return float((own.double() - exact).abs().max()), float(
            (plain.double() - exact).abs().max()
        )
