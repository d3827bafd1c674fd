"""A test case of Attend in 16 bit on a device: what CUDA kernels and the TensorRT
plugin are given and must leave."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.heads import Lane
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.native.cuda import LEAST_CHUNK, CudaLibrary
from kvlathe.runtime.sessions.gpu.side_memory import copies_bytes
from kvlathe.runtime.sessions.gpu.step_buffer import StepKind
from kvlathe.runtime.sessions.torch_cuda.attention.attend import Attention
from kvlathe.runtime.sessions.torch_cuda.inputs import StepInputs
from tests.native_cpu.library import Array, reserve
from tests.support.attend_cases import Case

CLOSE: dict[str, Any] = {"rtol": 1e-2, "atol": 1.5e-2}
"""16-bit elements, cos and sin among them, against float64 of the same inputs."""

NOT_ATTENDED = ("do not divide a page", "the CUDA kernels need")
"""Refusals of quantized parts that the attention kernels may make."""


def halves(x: Array) -> Array:
    return x.astype(np.float16).astype(np.float64)


def step_of(
    plan: CompressionPlan, queries: list[int], lengths: list[list[int]], seed: int
) -> Case:
    """A case whose scores are small."""
    case = Case(plan, 0, queries, lengths, seed)
    case.scale = 0.05  # sharper scores would show the rounding of q', not a fault
    return case


attention_of = Attention.of_plan


class Step16:
    """The inputs of one case in halves, and its laws. Inputs are rounded first, so that
    both sides see the same."""

    @staticmethod
    def takes(plan: CompressionPlan, windows: bool = False) -> bool:
        """``windows``: whether what runs it shows them."""
        if plan.index.sees_less and not windows:
            return False
        hot = all(b.tier.bits_k == 16 for b in plan.index.buckets if b.is_hot)
        return hot and len(plan.index.buckets) <= 3 and not plan.index.observes

    def __init__(self, case: Case) -> None:
        self.case, self.plan = case, case.plan
        case.q = [[halves(x) for x in heads] for heads in case.q]
        case.k, case.v = [halves(x) for x in case.k], [halves(x) for x in case.v]
        case.projections = [
            (halves(a), halves(b), halves(c)) for a, b, c in case.projections
        ]
        self.memory, self.tables = reserve(case)
        self.q, self.k, self.v = case.packed(torch.float16)
        step = case.step(torch.float32)
        assert step.cos is not None and step.sin is not None
        self.cos, self.sin = step.cos.half(), step.sin.half()
        case._turned = self._turned
        self.cu_seqlens_q, self.query_offsets = step.cu_seqlens_q, step.query_offsets
        self.lengths = torch.from_numpy(np.ascontiguousarray(case.lengths))
        self.state = case.state(torch.float16)

    def _turned(self, x: Array, lane: Lane) -> Array:
        """RoPE by the angles that the halves of cos and sin stand for."""
        if lane.rope == "none":
            return x
        half = lane.input_dim // 2
        planes = list(lane.planes) if lane.rope == "planes" else list(range(half))
        cos, sin = (
            t[: len(x)].double().numpy()[:, planes] for t in (self.cos, self.sin)
        )
        a, b = x[:, :half], x[:, half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], 1)

    def run(
        self, library: CudaLibrary, device: str, copied: int = 0
    ) -> tuple[Array, Array]:
        """o of the real tokens and the pool's bytes, by the session's own path, with room
        for copies of ``copied`` sealed tokens."""
        pool = torch.from_numpy(self.memory.copy()).to(device)
        layers = self.plan.model.layers
        scales = [self.case.scale] * layers
        sinks: list[torch.Tensor] = []
        if "sinks" in self.state:
            sinks = [self.state["sinks"].to(device)] * layers
        attention = attention_of(
            library, self.plan, scales, pool, len(self.q), None, sinks
        )
        size = copies_bytes(self.plan, copied) if copied else 0
        attention.copies = torch.full((size,), 0x7F, dtype=torch.uint8, device=device)
        tables = [torch.from_numpy(table).to(device) for table in self.tables]
        single = bool((self.cu_seqlens_q == torch.arange(len(self.cu_seqlens_q))).all())
        counts = self.cu_seqlens_q.diff()
        short = self.cu_seqlens_q[1:][(counts > 0) & (counts < LEAST_CHUNK)]
        rows = len(self.q) if single else int(short.max()) if len(short) else 0
        inputs = StepInputs(
            self.cu_seqlens_q.to(device),
            self.lengths.to(device),
            tables,
            # Without a chunk a step may look for some all the same.
            StepKind(
                single,
                rows,
                chunks=bool((counts >= LEAST_CHUNK).any()) or self.case.total % 2 == 0,
            ),
        )
        try:
            calls = attention.prepare(inputs, len(self.q))
        except KvlatheError as refusal:  # a decode step's plan
            self._must_be_of_parts_not_attended(refusal)
            attention.plan_calls = lambda calls: None
            calls = attention.prepare(inputs, len(self.q))
        q, k, v, cos, sin = (
            x.to(device) for x in (self.q, self.k, self.v, self.cos, self.sin)
        )
        weights = {name: x.to(device) for name, x in self.state.items()}
        try:
            out = attention.run(calls, self.case.layer, q, k, v, (cos, sin), weights)
        except KvlatheError as refusal:
            self._must_be_of_parts_not_attended(refusal)
            return np.zeros(
                (0, 0)
            ), pool.cpu().numpy()  # the rows are written all the same
        return out[: self.case.total].cpu().double().numpy(), pool.cpu().numpy()

    @staticmethod
    def _must_be_of_parts_not_attended(refusal: KvlatheError) -> None:
        if not any(words in str(refusal) for words in NOT_ATTENDED):
            raise refusal

    def check_out(self, out: Array) -> None:
        """Products of codes round queries and shares to 8 bits: they are near on the
        whole (test_attend_codes.py bounds each element)."""
        if not out.size:
            return
        expected = self.case.expected()[0]
        if any(tier.is_coded for tier in self.plan.index.tiers):
            assert np.abs(out - expected).mean() <= 2e-2 * np.abs(expected).max(
                initial=1e-9
            )
        else:
            np.testing.assert_allclose(out, expected, **CLOSE)

    def check_rows(self, rows: Array) -> None:
        np.testing.assert_allclose(rows, self.case.expected()[1], **CLOSE)

    def check_memory(self, memory: Array) -> None:
        """The step's k' and v', and nothing else, were written: after each length in
        the fresh buckets."""
        written = np.zeros(len(self.memory), bool)
        expected, rows = self.case.expected()[1], self.rows_at(memory, written)
        np.testing.assert_allclose(rows, expected, **CLOSE)
        np.testing.assert_array_equal(memory[~written], self.memory[~written])

    def rows_at(self, memory: Array, written: Array) -> Array:
        """[tokens, sum of the lanes' numbers] as read from the pool; marks the bytes."""
        lanes, layout = self.case.lanes, CacheLayout(self.plan)
        found: list[list[Array]] = []
        for b, count in enumerate(self.case.queries):
            for i in range(count):
                keys, values = zip(
                    *(self._row(memory, written, layout, lane, b, i) for lane in lanes),
                    strict=True,
                )
                once = self.plan.index.values_in_keys
                found.append([*keys] if once else [*keys, *values])
        return np.array([np.concatenate(row) for row in found]).astype(np.float64)

    def _row(
        self,
        memory: Array,
        written: Array,
        layout: CacheLayout,
        lane: Lane,
        b: int,
        i: int,
    ) -> tuple[Array, Array]:
        index = lane.layer * self.plan.model.kv_heads + lane.head
        bucket = self.plan.index.hot_bucket[index]
        offsets = layout.lane_offsets(bucket, index)
        page, place = divmod(
            int(self.case.lengths[b, bucket]) + i, self.plan.page_tokens
        )
        start = int(self.tables[bucket][b, page]) * layout.page_stride[bucket]
        row = []
        sides = [(offsets.k, lane.rank_k), (offsets.v, lane.rank_v)]
        for at, rank in sides[: 1 if lane.values_in_keys else 2]:
            span = slice(
                start + at + place * rank * 2, start + at + (place + 1) * rank * 2
            )
            written[span] = True
            row.append(memory[span].view(np.float16))
        return row[0], row[0][: lane.rank_v] if lane.values_in_keys else row[1]


def same_with_copies(cuda: CudaLibrary, case: Case, out: Array) -> None:
    """Copies of sealed pages, which prompt chunks read, change no bit of ``out``."""
    for copied in (300, 1 << 14):
        again = Step16(case).run(cuda, "cuda", copied)[0]
        assert np.array_equal(again, out)
