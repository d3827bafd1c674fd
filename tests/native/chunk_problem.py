"""A random step of prompt chunks and decode rows on a paged pool, with its float64
answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from ctypes import addressof
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kvlathe.runtime.native.cuda import BUNDLES, LEAST_CHUNK, CudaLibrary
from kvlathe.runtime.sessions.gpu.step_buffer import StepKind
from kvlathe.runtime.sessions.torch_cuda.attention.attend import (
    Attention,
    Spread,
    StepInputs,
)
from tests.native.codes_problem import CodesProblem
from tests.native.library import AttendDecodeArgs
from tests.native.problem import Problem


@dataclass
class Chunks(ABC):
    """The rows of a step: the last ``chunks[b]`` tokens of sequence b are new. On a
    GPU. For problems below, which say what lies in the cache. ``knows_rows``: the call
    is told from which row on all are of chunks."""

    chunks: Sequence[int] = ()
    device: str = "cuda"
    knows_rows: bool = False
    starts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.starts = [int(n) for n in np.cumsum([0, *self.chunks])]
        super().__post_init__()  # pyright: ignore[reportAttributeAccessIssue] (of the problem it is mixed into)

    @abstractmethod
    def tokens_before(self) -> torch.Tensor:
        """[B, buckets], int32: what each sequence had before the step."""

    @abstractmethod
    def tables_of_sequences(self) -> list[torch.Tensor]:
        """The page table [B, pages] of each bucket."""

    @abstractmethod
    def seen(
        self, layer: int, b: int, head: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """K and V of a lane, [n, rank] each, and the position of each of the n tokens;
        of sealed ones -1."""

    def poisoned(self: Any, layer: int) -> torch.Tensor:
        width = self.group * sum(rank_v for _, rank_v in self.ranks[layer])
        return torch.full(
            (self.starts[-1], width), float("nan"), dtype=self.dtype, device=self.device
        )

    def attention(self: Any, library: CudaLibrary) -> Attention:
        pool = self.pool.view(torch.uint8)
        return Attention.of_plan(
            library,
            self.layout.plan,
            [self.scale] * len(self.ranks),
            pool,
            max(1, self.starts[-1]),
        )

    def spread_out(self, attention: Attention, single: bool = False) -> Spread:
        """``single``: no chunk is listed, every row is attended by itself."""
        starts = torch.tensor(self.starts, dtype=torch.int32, device=self.device)
        step = StepInputs(
            starts,
            self.tokens_before(),
            self.tables_of_sequences(),
            StepKind(
                False,
                self._single_rows()
                if self.knows_rows and not single
                else self.starts[-1],
                chunks=True,
            ),
        )
        if single:
            attention._list_sizes = lambda step, tokens: {}
        return attention.prepare(step, self.starts[-1]).spread

    def _single_rows(self) -> int:
        """Those up to the last sequence that is no chunk."""
        ends = zip(self.chunks, self.starts[1:], strict=True)
        return max((end for n, end in ends if 0 < n < LEAST_CHUNK), default=0)

    def step_args(
        self: Any, attention: Attention, spread: Spread, layer: int = 0
    ) -> tuple[AttendDecodeArgs, object]:
        """A layer's call, and what must outlive it."""
        args = self.args(
            layer, attention.workspace, torch.cuda.current_stream().cuda_stream
        )
        args.batch = self.starts[-1]
        if spread.bundled:
            args.flags |= BUNDLES
        for i in range(args.part_count):
            part = args.parts[i]
            part.page_table, part.page_table_stride = (
                spread.tables[i].data_ptr(),
                spread.tables[i].shape[1],
            )
            part.lengths = spread.row_lengths.data_ptr() + 4 * i
            part.lengths_stride = spread.row_lengths.shape[1]
        prompts = None
        if spread.prompts:
            prompts = spread.prompts_of(attention.layers[layer].form, attention.copies)
            args.prompts = addressof(prompts)
        return args, (prompts, spread)

    def answer_of_chunks(
        self: Any,
        layer: int,
        dtype: torch.dtype,
        sequences: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """o' of the sequences' rows, of plain torch attention in ``dtype`` on the
        numbers that the cache means."""
        out = []
        for b in range(len(self.chunks)) if sequences is None else sequences:
            if self.chunks[b]:
                out.append(
                    torch.cat(
                        [
                            self._lane(layer, b, head, dtype)
                            for head in range(len(self.ranks[layer]))
                        ],
                        1,
                    )
                )
        return torch.cat(out)

    def _lane(
        self: Any, layer: int, b: int, head: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """[rows, group * rank_v]"""
        rows, rank_k = self.chunks[b], self.ranks[layer][head][0]
        at = self.group * sum(k for k, _ in self.ranks[layer][:head])
        q = self.q[layer][
            self.starts[b] : self.starts[b + 1], at : at + self.group * rank_k
        ]
        q = q.reshape(rows, self.group, rank_k).transpose(0, 1).to(dtype)
        k, v, places = self.seen(layer, b, head)
        own = int(places.max()) + 1 - rows + torch.arange(rows, device=self.device)
        scores = (q @ k.to(dtype).T * self.scale).masked_fill(
            places[None] > own[:, None], float("-inf")
        )
        return (
            (torch.softmax(scores, -1) @ v.to(dtype)).transpose(0, 1).reshape(rows, -1)
        )


@dataclass
class ChunkProblem(Chunks, Problem):
    """``lengths[b]`` tokens after the step, all in 16 bit."""

    def _random_q(self, layer: int, generator: torch.Generator) -> torch.Tensor:
        width = self.group * sum(rank_k for rank_k, _ in self.ranks[layer])
        q = torch.empty(self.starts[-1], width, dtype=self.dtype, device=self.device)
        return q.normal_(generator=generator).mul_(self.spread)

    def tokens_before(self) -> torch.Tensor:
        before = [[n - c] for n, c in zip(self.lengths, self.chunks, strict=True)]
        return torch.tensor(before, dtype=torch.int32, device=self.device)

    def tables_of_sequences(self) -> list[torch.Tensor]:
        return [self.table]

    def seen(
        self, layer: int, b: int, head: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        k, v = self.cached(b, layer, head)
        return k, v, torch.arange(self.lengths[b], device=self.device)

    def answer(
        self, layer: int, dtype: torch.dtype, sequences: Sequence[int] | None = None
    ) -> torch.Tensor:
        return self.answer_of_chunks(layer, dtype, sequences)


@dataclass
class CodesChunkProblem(Chunks, CodesProblem):
    """The same after sealed tokens: ``tails[b]`` tokens in the 16-bit tail after the
    step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.q = [
            self._normal(self.starts[-1], self.group * sum(k for k, _ in row))
            for row in self.ranks
        ]

    def tokens_before(self) -> torch.Tensor:
        before = self.length_tensor.clone()
        before[:, 0] -= torch.tensor(self.chunks, dtype=torch.int32, device=self.device)
        return before

    def tables_of_sequences(self) -> list[torch.Tensor]:
        return self.tables

    def seen(
        self, layer: int, b: int, head: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        keys, values = ([x] for x in self._tail(b, self.rows(0, layer)[head]))
        for bucket in range(1, 1 + len(self.tiers)):
            for row in self.rows(bucket, layer):
                if row[1] == head:
                    k, k_scale, k_least, v, v_scale, v_least = self._quantized(
                        bucket, b, row
                    )
                    keys.append(k * k_scale + k_least)
                    values.append(v * v_scale + v_least)
        places = torch.arange(sum(map(len, keys)), device=self.device)
        places[len(keys[0]) :] = -1
        return torch.cat(keys), torch.cat(values), places

    def spoil_unused_rows(self) -> None:
        """Write NaN where no token lies: rows of the tail, metadata of K and of groups
        of V past the lengths."""
        for bucket, table in enumerate(self.tables):
            pages = self._pages(bucket)
            for b, n in enumerate(self.lengths[:, bucket]):
                if rest := int(n) % self.page_tokens:
                    for row in self.layout.lane_table(bucket):
                        self._spoil(
                            pages[table[b, n // self.page_tokens]], bucket, row, rest
                        )

    def _spoil(
        self, page: torch.Tensor, bucket: int, row: np.ndarray, rest: int
    ) -> None:
        p, nan = (
            self.page_tokens,
            torch.tensor([float("nan")], dtype=torch.float16)
            .view(torch.uint8)
            .to(page.device),
        )
        if bucket == 0:
            for at, rank in ((row[4], row[2]), (row[6], row[3])):
                page[at + 2 * rank * rest : at + 2 * rank * p] = 255
            return
        tier = self.tiers[bucket - 1]
        k_meta = page[row[5] : row[5] + 4 * row[8]].view(p, -1, 2)
        k_meta[rest:] = nan
        v_meta = page[row[7] : row[7] + 4 * row[9]].view(
            int(row[3]), p // tier.group_v, -1, 2
        )
        v_meta[:, -(-rest // tier.group_v) :] = nan
