"""A random decode step over quantized pages and a 16-bit tail, with its float64
answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from kvlathe.plan.formats import Format, Tier, groups_along_rank
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane, ModelShape
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.lives import KEEP, SEAL, Divide
from kvlathe.plan.plan import CompressionPlan
from kvlathe.plan.token_score import ObservationWindow
from tests.native.library import ABI_VERSION, BF16, F16, AttendDecodeArgs, Part

LEVELS_Q, LEVELS_P, PARTITION = 127, 255, 64
NO_NUMBER = 0x7F
"""A float of 8 bits that is never written, but for its sign."""


def plan_of(
    ranks: Sequence[Sequence[tuple[int, int]]],
    group: int,
    tiers: Sequence[Tier],
    page_tokens: int,
) -> CompressionPlan:
    """A 16-bit hot bucket (tail) over every lane, and a cold one for each of ``tiers``:
    tokens are divided among several."""
    heads = len(ranks[0])
    lanes = tuple(
        Lane(layer, head, 128, rank_k, rank_v, projected=True)
        for layer, row in enumerate(ranks)
        for head, (rank_k, rank_v) in enumerate(row)
    )
    shape = ModelShape(
        len(ranks), heads * group, heads, 128, heads * group * 128, 1000, 1 << 20
    )
    count = len(tiers)
    divide = Divide((1 / count,) * count) if count else KEEP
    life = SEAL if count == 1 else divide
    return CompressionPlan(
        shape,
        lanes,
        (Group(tuple(range(len(lanes))), Tier(16, 16), tuple(tiers), life),),
        page_tokens,
        8 * page_tokens,
        score=ObservationWindow(last=1) if life.by_saliency else None,
    )


def unpacked(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """[..., bytes] uint8 to [..., codes] float64, lowest bits first."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(-2).double()


@dataclass
class CodesProblem:
    """``sealed[b][i]``: tokens of sequence b in cold bucket i, ``tails[b]`` in the
    tail."""

    ranks: Sequence[Sequence[tuple[int, int]]]
    sealed: Sequence[Sequence[int]]
    tails: Sequence[int]
    tiers: Sequence[Tier]
    group: int = 4
    dtype: torch.dtype = torch.float16
    page_tokens: int = 64
    device: str = "cpu"
    seed: int = 0
    scale: float = 128**-0.5
    layout: CacheLayout = field(init=False)

    def __post_init__(self) -> None:
        self.layout = CacheLayout(
            plan_of(self.ranks, self.group, self.tiers, self.page_tokens)
        )
        self.generator = torch.Generator(self.device).manual_seed(self.seed)
        self.lengths = np.array(
            [[tail, *cold] for tail, cold in zip(self.tails, self.sealed, strict=True)],
            np.int32,
        )
        self.lengths = self.lengths.reshape(len(self.tails), 1 + len(self.tiers))
        pages = -(-self.lengths // self.page_tokens)
        first, at = (
            [],
            0,
        )  # the first page id of each bucket: ids count pages of the bucket's own stride from 0
        for bucket, stride in enumerate(self.layout.page_stride):
            first.append(-(-at // stride))
            at = (first[-1] + int(pages[:, bucket].sum())) * stride
        self.pool = torch.empty(max(at, 128), dtype=torch.uint8, device=self.device)
        for start in range(0, at, 1 << 30):
            self.pool[start : start + (1 << 30)].random_(
                0, 256, generator=self.generator
            )
        random = np.random.default_rng(self.seed)
        self.tables = []
        for bucket in range(len(self.layout.page_stride)):
            count = int(pages[:, bucket].sum())
            ids = first[bucket] + random.permutation(count).astype(np.int32)
            table = np.full(
                (len(pages), max(1, int(pages[:, bucket].max(initial=0)))),
                -(1 << 30),
                np.int32,
            )
            for b, (start, n) in enumerate(
                zip(np.cumsum([0, *pages[:-1, bucket]]), pages[:, bucket], strict=True)
            ):
                table[b, :n] = ids[start : start + n]
            self.tables.append(torch.tensor(table, device=self.device))
            self._sane(bucket, first[bucket], count)
        self.length_tensor = torch.tensor(self.lengths, device=self.device)
        self.q = [
            self._normal(len(self.tails), self.group * sum(k for k, _ in row))
            for row in self.ranks
        ]
        self.o = [self.poisoned(layer) for layer in range(len(self.ranks))]

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device).normal_(
            generator=self.generator
        )

    def _pages(self, bucket: int) -> torch.Tensor:
        stride = self.layout.page_stride[bucket]
        return self.pool[: len(self.pool) // stride * stride].view(-1, stride)

    def _sane(self, bucket: int, first: int, count: int) -> None:
        """Numbers where random bytes would be NaN or huge: metadata, and the 16-bit
        rows."""
        pages = self._pages(bucket)[first : first + count]
        if bucket == 0:
            pages.copy_(
                self._normal(count, self.layout.page_stride[0] // 2).view(torch.uint8)
            )
            return
        tier = self.tiers[bucket - 1]
        for row in self.layout.lane_table(bucket):
            for at, meta_at, groups, form in (
                (row[4], row[5], row[8], tier.k),
                (row[6], row[7], row[9], tier.v),
            ):
                self._sane_codes(pages, at, meta_at, form)
                meta = torch.empty(count, groups, 2, device=self.device).uniform_(
                    0.5, 1.5, generator=self.generator
                )
                step = max(
                    map(abs, filter(math.isfinite, form.decoding.worth(form.bits)))
                )
                meta *= torch.tensor([3.4 / step, -1.7], device=self.device)
                pages[:, meta_at : meta_at + form.group_bytes * groups] = (
                    meta[..., : form.halves].half().reshape(count, -1).view(torch.uint8)
                )

    @staticmethod
    def _sane_codes(pages: torch.Tensor, at: int, end: int, form: Format) -> None:
        """The largest float in the place of codes that are no number."""
        if form.coding == "float8":
            codes = pages[:, at:end]
            codes -= (codes & NO_NUMBER == NO_NUMBER).byte()

    def poisoned(self, layer: int) -> torch.Tensor:
        width = self.group * sum(rank_v for _, rank_v in self.ranks[layer])
        return torch.full(
            (len(self.tails), width), float("nan"), dtype=self.dtype, device=self.device
        )

    def rows(self, bucket: int, layer: int) -> np.ndarray:
        table = self.layout.lane_table(bucket)
        return np.ascontiguousarray(table[table[:, 0] == layer])

    def args(
        self, layer: int = 0, workspace: torch.Tensor | None = None, stream: int = 0
    ) -> AttendDecodeArgs:
        buckets = len(self.layout.page_stride)
        parts = (Part * buckets)()
        self.kept = getattr(self, "kept", [])
        for i, part in enumerate(parts):
            tier = self.layout.plan.index.buckets[i].tier
            rows = self.rows(i, layer)
            self.kept.append(rows)
            part.bits_k, part.bits_v = tier.bits_k, tier.bits_v
            part.axis_k, part.axis_v = tier.k.axis_number, tier.v.axis_number
            part.group_k, part.group_v = tier.group_k, tier.group_v
            part.lane_count, part.lanes, part.page_stride = (
                len(rows),
                rows.ctypes.data,
                self.layout.page_stride[i],
            )
            part.page_table, part.page_table_stride = (
                self.tables[i].data_ptr(),
                self.tables[i].shape[1],
            )
            part.lengths, part.lengths_stride = (
                self.length_tensor.data_ptr() + 4 * i,
                buckets,
            )
        element = F16 if self.dtype == torch.float16 else BF16
        args = AttendDecodeArgs(
            ABI_VERSION,
            element,
            len(self.tails),
            self.group,
            self.page_tokens,
            buckets,
            self.scale,
            0,
            parts,
        )
        args.pool, args.pool_bytes = self.pool.data_ptr(), self.pool.numel()
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

    def _quantized(
        self, bucket: int, b: int, row: np.ndarray
    ) -> tuple[torch.Tensor, ...]:
        """Codes of K [n, rank_k] and V, and their (scale, minimum) as wide: six float64
        tensors [n, rank]."""
        tier, p, n = (
            self.tiers[bucket - 1],
            self.page_tokens,
            int(self.lengths[b, bucket]),
        )
        pages = self._pages(bucket)[self.tables[bucket][b, : -(-n // p)].long()]

        def side(rank: int, at: int, meta_at: int, form: Format) -> list[torch.Tensor]:
            """Codes, scales and minima of all tokens of the pages, [n, rank]."""
            codes = unpacked(pages[:, at : at + p * rank * form.bits // 8], form.bits)
            sizes = form.group_sizes(rank, p)
            rows = p if form.axis == "rank" else rank
            end = meta_at + form.group_bytes * rows * len(sizes)
            meta = pages[:, meta_at:end].contiguous().view(torch.float16).double()
            wide = torch.tensor(sizes, device=self.device)
            meta = meta.view(-1, rows, len(sizes), form.halves).repeat_interleave(
                wide, 2
            )
            worth = torch.tensor(form.decoding.worth(form.bits), device=self.device)
            scale, minimum = meta[..., 0], meta[..., -1] * (form.halves - 1)
            both = worth.double()[codes.long()].view(scale.shape), scale, minimum
            turned = (x if form.axis == "rank" else x.transpose(1, 2) for x in both)
            return [x.reshape(-1, rank)[:n] for x in turned]

        return (
            *side(int(row[2]), int(row[4]), int(row[5]), tier.k),
            *side(int(row[3]), int(row[6]), int(row[7]), tier.v),
        )

    def _tail(self, b: int, row: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        n, p = int(self.lengths[b, 0]), self.page_tokens
        pages = self._pages(0)[self.tables[0][b, : -(-n // p)].long()]

        def values(at: int, rank: int) -> torch.Tensor:
            return (
                pages[:, at : at + 2 * p * rank]
                .contiguous()
                .view(self.dtype)
                .double()
                .view(-1, rank)[:n]
            )

        return values(int(row[4]), int(row[2])), values(int(row[6]), int(row[3]))

    def _head(
        self, q: torch.Tensor, b: int, layer: int, head: int, integer: bool
    ) -> torch.Tensor:
        """One lane's answer [group, rank_v]. integer: q and weights as codes (Eq.
        4)."""
        k, v = self._tail(b, self.rows(0, layer)[head])
        scores, values = [q @ k.T], [(v, torch.ones_like(v), torch.zeros_like(v))]
        for bucket, tier in enumerate(self.tiers, 1):
            row = self.rows(bucket, layer)[head]
            k, k_scale, k_least, *rest = self._quantized(bucket, b, row)
            own = q
            if integer:
                sizes = groups_along_rank(int(row[2]), tier.group_k)
                steps = [
                    g.abs().amax(1, keepdim=True).clamp(min=1e-28) / LEVELS_Q
                    for g in q.split(sizes, 1)
                ]
                own = torch.cat(
                    [
                        (g / s).round() * s
                        for g, s in zip(q.split(sizes, 1), steps, strict=True)
                    ],
                    1,
                )
            scores.append(own @ (k * k_scale + k_least).T)
            values.append((rest[0], rest[1], rest[2]))
        top = torch.cat(scores, 1).amax(1, keepdim=True) * self.scale
        total, out = (
            torch.zeros_like(top),
            torch.zeros(len(q), values[0][0].shape[1], device=q.device).double(),
        )
        for i, (score, (codes, scale, least)) in enumerate(
            zip(scores, values, strict=True)
        ):
            weights = torch.exp(score * self.scale - top)
            if integer and i and score.shape[1]:
                chunks = weights.split(PARTITION, 1)
                steps = [
                    c.amax(1, keepdim=True).clamp(min=1e-300) / LEVELS_P for c in chunks
                ]
                weights = torch.cat(
                    [(c / s).round() * s for c, s in zip(chunks, steps, strict=True)], 1
                )
            total = total + weights.sum(1, keepdim=True)
            out = out + weights @ (codes * scale + least)
        return out / total

    def answer(
        self, layer: int, integer: bool, sequences: Sequence[int] | None = None
    ) -> torch.Tensor:
        """o' [sequences, width] in float64."""
        out = []
        for b in range(len(self.tails)) if sequences is None else sequences:
            row, at = [], 0
            for head, (rank_k, rank_v) in enumerate(self.ranks[layer]):
                q = (
                    self.q[layer][b, at : at + self.group * rank_k]
                    .view(self.group, rank_k)
                    .double()
                )
                at += self.group * rank_k
                if self.lengths[b].sum() == 0:
                    row.append(
                        torch.zeros(
                            self.group * rank_v, dtype=torch.float64, device=self.device
                        )
                    )
                else:
                    row.append(self._head(q, b, layer, head, integer).flatten())
            out.append(torch.cat(row))
        return torch.stack(out)

    def errors(
        self, layer: int, sequences: Sequence[int] | None = None
    ) -> tuple[float, float, float]:
        """Largest error of o and of the integer form in float64 (what Eq. 4 costs by
        itself), against float64 on the numbers that the codes mean; and the mean
        distance of o from the integer form over that form's mean error."""
        exact, integer = (self.answer(layer, form, sequences) for form in (False, True))
        own = (
            self.o[layer] if sequences is None else self.o[layer][list(sequences)]
        ).double()
        error, form, between = (
            (x - y).abs() for x, y in ((own, exact), (integer, exact), (own, integer))
        )
        return (
            float(error.max()),
            float(form.max()),
            float(between.mean() / form.mean().clamp(min=1e-9)),
        )

    def bytes(self) -> float:
        """Bytes that one call must move, mean over the layers: codes, scales and the
        tail's rows, q and o, once."""
        size = 0.0
        for bucket, stride in enumerate(self.layout.page_stride):
            size += (
                stride
                / self.page_tokens
                * float(self.lengths[:, bucket].sum())
                / len(self.ranks)
            )
        width = sum(
            rank_k + rank_v for row in self.ranks for rank_k, rank_v in row
        ) / len(self.ranks)
        return size + 2 * width * self.group * len(self.tails)
