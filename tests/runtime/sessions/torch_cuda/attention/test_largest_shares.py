"""The largest share that observed rows give each token: torch over pages, against
float64 row by row."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvlathe.plan.codec import matrices
from kvlathe.plan.formats import Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.lives import Compact
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.sessions.gpu.step_buffer import StepKind
from kvlathe.runtime.sessions.torch_cuda.attention import observing
from kvlathe.runtime.sessions.torch_cuda.attention.observing import LargestShares
from kvlathe.runtime.sessions.torch_cuda.inputs import Mass, StepInputs
from tests.support.attend_cases import plan_of

Array = npt.NDArray[np.float64]
SCALE, GROUP, PAGE = 0.15, 2, 16
RANKS = (32, 16, 0, 48)
"""Ranks of the lanes of each of two layers; one lane is removed."""


def compacting_plan(apart: bool, softcap: float) -> CompressionPlan:
    lanes = [
        Lane(layer, head, 48 if rank else 0, rank, rank, "none", projected=bool(rank))
        if rank
        else Lane(layer, head, 0, 0, 0, "none", fill_from=0)
        for layer in range(2)
        for head, rank in enumerate(RANKS)
    ]
    kept = [i for i, lane in enumerate(lanes) if not lane.removed]
    together = [(i,) for i in kept] if apart else [tuple(kept)]
    groups = [Group(own, Tier(16, 16), life=Compact(0.5)) for own in together]
    plan = plan_of(lanes, groups, 48, GROUP, PAGE)
    return dataclasses.replace(
        plan, model=dataclasses.replace(plan.model, softcap=softcap)
    )


class Case:
    """Pages of random keys, NaN where no token is; sequences whose buckets hold
    different numbers of tokens."""

    def __init__(
        self, plan: CompressionPlan, queries: list[int], observed: float, seed: int
    ) -> None:
        self.plan, self.layout, self.queries = plan, CacheLayout(plan), queries
        self.rng = rng = np.random.default_rng(seed)
        batch, buckets = len(queries), len(plan.index.buckets)
        self.lengths = rng.integers(0, 3 * PAGE, (batch, buckets))
        self.starts = [0, *np.cumsum(queries).tolist()]
        every = range(self.starts[-1])
        rows = [row for row in every if rng.random() < observed]
        self.rows = [
            [row for row in rows if first <= row < end]
            for first, end in zip(self.starts, self.starts[1:], strict=False)
        ]
        width = 3 + -(-max(queries) // PAGE)
        strides = self.layout.page_stride
        self.memory = np.full(sum(strides) * batch * width * buckets, 255, np.uint8)
        taken, self.tables = 0, []
        self.keys: dict[tuple[int, int], Array] = {}
        for bucket, stride in enumerate(strides):
            first = -(-taken // stride)
            ids = first + rng.permutation(batch * width)
            taken = (first + batch * width) * stride
            self.tables.append(ids.reshape(batch, width).astype(np.int32))
            for b in range(batch):
                self._fill(b, bucket)
        assert taken <= len(self.memory)
        columns = GROUP * sum(RANKS)
        drawn = rng.normal(size=(self.starts[-1], columns))
        self.q = drawn.astype(np.float16)
        self.sinks = rng.normal(size=(len([r for r in RANKS if r]), GROUP))

    def _fill(self, b: int, bucket: int) -> None:
        held = int(self.lengths[b, bucket]) + self.queries[b]
        stride = self.layout.page_stride[bucket]
        for lane, (k, _) in matrices(self.layout, bucket).items():
            keys = self.rng.normal(size=(held, k.rank)).astype(np.float16)
            self.keys[b, lane] = keys.astype(np.float64)
            for page in range(-(-held // PAGE)):
                start = int(self.tables[bucket][b, page]) * stride
                own = np.full((PAGE, k.rank), np.nan, np.float32)
                some = keys[page * PAGE : (page + 1) * PAGE]
                own[: len(some)] = some
                k.write(self.memory[start : start + stride], own)

    @property
    def widths(self) -> list[int]:
        return [table.shape[1] * PAGE for table in self.tables]

    def found(self, sinks: bool) -> Array:
        tensor = torch.from_numpy
        lanes = sum(not lane.removed for lane in self.plan.lanes)
        places = sum(self.widths) + max(self.queries)
        largest = torch.zeros(len(self.queries), lanes, places)
        rows = [torch.tensor(rows, dtype=torch.int64) for rows in self.rows]
        asked = Mass(largest, self.starts, rows, self.lengths.tolist())
        tables = [tensor(table) for table in self.tables]
        nothing = torch.zeros(0, dtype=torch.int32)
        step = StepInputs(nothing, nothing, tables, StepKind(False, 0), mass=asked)
        of_layers = [tensor(self.sinks).float()] * 2 if sinks else []
        shares = LargestShares(self.plan, [SCALE] * 2, tensor(self.memory), of_layers)
        for layer in range(2):
            shares.fill(layer, tensor(self.q), step)
        return largest.double().numpy()

    def expected(self, sinks: bool) -> Array:
        kept = [i for i, lane in enumerate(self.plan.lanes) if not lane.removed]
        places = sum(self.widths) + max(self.queries)
        largest = np.zeros((len(self.queries), len(kept), places))
        for row, index in enumerate(kept):
            lane = self.plan.lanes[index]
            bucket = next(
                b for b, x in enumerate(self.plan.index.buckets) if index in x.lanes
            )
            own = [i for i in kept if self.plan.lanes[i].layer == lane.layer]
            at = own.index(index)
            column = GROUP * sum(self.plan.lanes[i].rank_k for i in own[:at])
            for b, rows in enumerate(self.rows):
                cached, keys = int(self.lengths[b, bucket]), self.keys[b, index]
                best = np.zeros(len(keys))
                for token in rows:
                    seen = cached + token - self.starts[b] + 1
                    for head in range(GROUP):
                        first = column + head * lane.rank_k
                        q = self.q[token, first : first + lane.rank_k]
                        logits = SCALE * (keys[:seen] @ q.astype(np.float64))
                        if bound := self.plan.model.softcap:
                            logits = bound * np.tanh(logits / bound)
                        shares = np.exp(logits)
                        whole = shares.sum()
                        if sinks:
                            whole += np.exp(self.sinks[at, head])
                        best[:seen] = np.maximum(best[:seen], shares / whole)
                start, fresh = sum(self.widths[:bucket]), sum(self.widths)
                largest[b, row, start : start + cached] = best[:cached]
                largest[b, row, fresh : fresh + self.queries[b]] = best[cached:]
        return largest


@settings(
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    apart=st.booleans(),
    softcap=st.sampled_from([0.0, 1.5]),
    sinks=st.booleans(),
    queries=st.lists(st.integers(0, 40), min_size=1, max_size=3).filter(any),
    observed=st.sampled_from([0.0, 0.3, 1.0]),
    tile=st.sampled_from([1, 300, 1 << 24]),
    seed=st.integers(0, 99),
)
def test_torch_finds_what_float64_finds(
    apart: bool,
    softcap: float,
    sinks: bool,
    queries: list[int],
    observed: float,
    tile: int,
    seed: int,
) -> None:
    """However many rows are computed at a time, also of bounded scores and with sink
    logits. Other places stay 0."""
    case = Case(compacting_plan(apart, softcap), queries, observed, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(observing, "TILE", tile)
        found = case.found(sinks)
    np.testing.assert_allclose(found, case.expected(sinks), rtol=1e-4, atol=1e-7)
