"""Observed rows of random ragged steps: pages with scores, and what float64 says of
them."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st

from kvlathe.plan.codec import matrices
from kvlathe.plan.formats import Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane, ModelShape
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.lives import Budget, Divide
from kvlathe.plan.plan import CompressionPlan
from kvlathe.plan.token_fields import score_fields
from kvlathe.plan.token_score import ObservationWindow
from kvlathe.runtime.native.cuda import F16, AttendDecodeArgs, CudaLibrary, LayerForm
from kvlathe.runtime.native.library import ABI_VERSION
from kvlathe.runtime.native.observing import DeviceStep, LayerScores
from tests.support.runtime_cases import F8

Array = npt.NDArray[Any]
Key = tuple[int, int, int]  # sequence, bucket, lane
COLD = (
    Tier(16, 16),
    Tier(8, 8, "rank", "rank", 48, 48),
    Tier(4, 4, "rank", "rank", 32, 32),
    Tier(2, 4, "rank", "rank", 64, 64),
    Tier(3, 3, "rank", "rank", 64, 64),
    Tier(4, 4, "rank", "rank", 64, 64, coding_k="normal", coding_v="normal"),
    F8,
)

ALONG_TOKENS = (
    Tier(4, 4, "token", "rank", 32, 64),
    Tier(2, 2, "token", "rank", 16, 64),
    Tier(3, 3, "token", "token", 64, 64),
    Tier(8, 8, "token", "rank", 64, 64),
)


@st.composite
def ranked_plans(draw: st.DrawFn) -> CompressionPlan:
    """One layer or two; hot pages with a budget, sealed ones with a budget, or hot ones
    that are divided between two number formats."""
    page = draw(st.sampled_from([16, 48, 64, 128]))
    heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 8))
    layers = draw(st.integers(1, 2))
    rank = st.integers(1, 8).map(lambda n: 16 * n) | st.sampled_from([144, 256])
    lanes = [
        Lane(layer, head, 128, draw(rank), draw(rank), "none", projected=True)
        for layer in range(layers)
        for head in range(heads)
    ]
    group_of = partial(Group, tuple(range(len(lanes))), Tier(16, 16))
    kinds = ["hot", "sealed", "divided"] if page >= 64 else ["hot"]
    kind = draw(st.sampled_from(kinds))
    own = group_of(life=Budget(page))
    if kind == "sealed":
        own = group_of((draw(st.sampled_from(COLD)),), Budget(page))
    if kind == "divided":
        some = st.sampled_from([*COLD, *ALONG_TOKENS])
        own = group_of((draw(some), draw(some)), Divide((0.5, 0.5)))
    shape = ModelShape(layers, heads * group, heads, 128, 64, 97, 256)
    observation = ObservationWindow(recent=0.5, normalized=draw(st.booleans()))
    return CompressionPlan(shape, tuple(lanes), (own,), page, page, score=observation)


class Observation:
    """A step of one layer whose K is in its pages, with random scores of the tokens
    that came before it. Everything else in the pool is NaN, or -1."""

    scale = 0.15

    def __init__(
        self,
        plan: CompressionPlan,
        queries: list[int],
        lengths: list[list[int]],
        share: float,
        seed: int,
        room: int = 1,
    ) -> None:
        """``queries`` [B] new tokens; ``lengths`` [B][buckets], whole pages in cold
        ones; ``share`` of the rows is observed. ``room``: memory for states, in
        multiples of the least; with more, several blocks share the tokens of a row."""
        self.plan, self.layout, self.queries = plan, CacheLayout(plan), queries
        self.rng, self.room = np.random.default_rng(seed), room
        self.layer = plan.model.layers - 1
        self.lengths = np.array(lengths, np.int32)
        self.starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
        total = int(self.starts[-1])
        self.rows = np.flatnonzero(self.rng.random(total) < share).astype(np.int32)
        self.row_starts = np.searchsorted(self.rows, self.starts).astype(np.int32)
        self.positions = self.rng.integers(0, 1 << 20, total).astype(np.int32)
        self.group = plan.model.group_size
        width = self.group * sum(lane.rank_k for lane in plan.index.active(self.layer))
        self.q = self.rng.normal(size=(total, width)).astype(np.float16)
        self.keys: dict[Key, Array] = {}
        self.old: dict[Key, Array] = {}
        self._fill()

    @property
    def lanes(self) -> list[int]:
        """The lanes of the layer."""
        first = self.layer * self.plan.model.kv_heads
        return list(range(first, first + self.plan.model.kv_heads))

    def held(self, b: int, bucket: int) -> int:
        """Tokens of a sequence in a bucket, with those of the step."""
        fresh = self.plan.index.buckets[bucket].is_hot
        return int(self.lengths[b, bucket]) + fresh * self.queries[b]

    # -- the pool ----------------------------------------------------------------------
    def _fill(self) -> None:
        p, strides = self.plan.page_tokens, self.layout.page_stride
        self.tables: list[Array] = []
        size = 0
        for s, stride in enumerate(strides):
            counts = [-(-self.held(b, s) // p) for b in range(len(self.queries))]
            first = -(-size // stride)
            ids = first + self.rng.permutation(sum(counts) + 1).astype(np.int32)
            size = (first + len(ids)) * stride
            table = np.full((len(counts), max(1, *counts)), ids[-1], np.int32)
            ends = np.cumsum(counts)
            for b, count in enumerate(counts):
                table[b, :count] = ids[ends[b] - count : ends[b]]
            self.tables.append(table)
        self.memory = np.full(size, 255, np.uint8)
        for s in range(len(strides)):
            for b in range(len(self.queries)):
                for page in range(-(-self.held(b, s) // p)):
                    self._fill_page(b, s, page)

    def page(self, memory: Array, b: int, bucket: int, page: int) -> Array:
        stride = self.layout.page_stride[bucket]
        start = int(self.tables[bucket][b, page]) * stride
        return memory[start : start + stride]

    def _fill_page(self, b: int, bucket: int, page: int) -> None:
        """Keys of a page and, of the tokens from before the step, scores."""
        p, memory = self.plan.page_tokens, self.page(self.memory, b, bucket, page)
        count = min(p, self.held(b, bucket) - page * p)
        known = min(p, max(0, int(self.lengths[b, bucket]) - page * p))
        for lane, (k, _) in matrices(self.layout, bucket).items():
            x = self.rng.normal(size=(p, k.rank)).astype(np.float32)
            if not k.format.is_coded:
                x[count:] = np.nan
            k.write(memory, x, 0)
            own = k.read(memory)[:count].astype(np.float16).astype(np.float64)
            key = (b, bucket, lane)
            before = self.keys.get(key, np.zeros((0, k.rank)))
            self.keys[key] = np.concatenate([before, own])
            attention = score_fields(self.layout, bucket, lane)[:1]
            for at, _ in attention:
                scores = memory[at : at + 4 * p].view(np.float32)
                scores[:known] = self.rng.random(known)
                old = self.old.get(key, np.zeros(0, np.float32))
                self.old[key] = np.concatenate([old, scores[:known]])

    # -- the reference -----------------------------------------------------------------
    def expected(self) -> dict[Key, Array]:
        """Scores afterwards, of the layer's lanes where they are kept."""
        found: dict[Key, Array] = {}
        column = 0
        for lane in self.lanes:
            rank = self.plan.lanes[lane].rank_k
            for b in range(len(self.queries)):
                mass = self._mass(b, lane, column)
                for bucket, own in mass.items():
                    if score_fields(self.layout, bucket, lane):
                        old = self.old.get((b, bucket, lane), np.zeros(0))
                        own[: len(old)] += old
                        found[b, bucket, lane] = own
            column += self.group * rank
        return found

    def _mass(self, b: int, lane: int, column: int) -> dict[int, Array]:
        """The mass that the observed rows of a sequence give each token of a lane, by
        bucket."""
        keys = {s: k for (own, s, i), k in self.keys.items() if (own, i) == (b, lane)}
        mass = {s: np.zeros(len(k)) for s, k in keys.items()}
        rank = self.plan.lanes[lane].rank_k
        for row in self.rows[self.row_starts[b] : self.row_starts[b + 1]]:
            counts = self._seen(b, int(row) - int(self.starts[b]) + 1, keys)
            for head in range(self.group):
                at = column + head * rank
                q = self.q[row, at : at + rank].astype(np.float64)
                seen = np.concatenate([keys[s][:n] for s, n in counts.items()])
                scores = self.scale * (seen @ q)
                p = np.exp(scores - scores.max())
                p /= p.sum()
                for s, n in counts.items():
                    mass[s][:n] += p[:n]
                    p = p[n:]
        return mass

    def _seen(self, b: int, new: int, keys: dict[int, Array]) -> dict[int, int]:
        counts: dict[int, int] = {}
        for s in keys:
            fresh = self.plan.index.buckets[s].is_hot
            counts[s] = int(self.lengths[b, s]) + fresh * new
        return counts

    # -- a call ------------------------------------------------------------------------
    def run(self, library: CudaLibrary, device: str) -> Array:
        """The pool's bytes afterwards. ``states`` are NaN but where blocks left some;
        ``row_states``: of a row that no blocks share."""
        pool = torch.zeros(len(self.memory) + 128, dtype=torch.uint8, device=device)
        pool = pool[-pool.data_ptr() % 128 :][: len(self.memory)]
        pool.copy_(torch.from_numpy(self.memory))
        form = LayerForm(library, CacheLayout(self.plan), self.layer)
        arrays = [self.starts, self.positions, self.rows, self.row_starts, self.lengths]
        # Not empty: then it had no address.
        sent = [torch.from_numpy(np.append(x.ravel(), 0)).to(device) for x in arrays]
        sent = [x.to(torch.int32) for x in sent]
        tables = [torch.from_numpy(table).to(device) for table in self.tables]
        q = torch.from_numpy(self.q).to(device)
        call = AttendDecodeArgs(ABI_VERSION, F16, len(q), self.group)
        call.page_tokens, call.part_count = self.plan.page_tokens, len(form.parts)
        call.scale, call.parts = self.scale, form.parts
        for part in form.parts:  # they are checked, and not read
            part.page_table, part.lengths = sent[4].data_ptr(), sent[4].data_ptr()
            part.page_table_stride = 1
        call.pool, call.pool_bytes = pool.data_ptr(), pool.numel()
        call.q, call.q_stride = q.data_ptr(), q.shape[1]
        call.o, call.o_stride = q.data_ptr(), form.out
        call.stream = torch.cuda.current_stream().cuda_stream if q.is_cuda else 0
        starts, positions, rows, row_starts, lengths = [x.data_ptr() for x in sent]
        step = DeviceStep(
            len(q),
            len(self.queries),
            max([0, *np.diff(self.row_starts)]),
            starts,
            positions,
            rows,
            row_starts,
            lengths,
            [table.data_ptr() for table in tables],
            [table.shape[1] for table in tables],
        )
        self.row_states = self.group * form.heads
        size = self.room * len(q) * self.row_states
        self.states = torch.full((size, 2), torch.nan, device=device)
        scores = LayerScores(self.layout, self.layer, form)
        scores.observe(call, step, (self.states.data_ptr(), self.states.nbytes))
        return pool.cpu().numpy()

    def check(self, memory: Array) -> None:
        """Scores are those of the reference, positions stand beside those of the step's
        tokens, and nothing else has changed."""
        p, expected = self.plan.page_tokens, self.expected()
        rest = self.memory.copy()
        for (b, bucket, lane), wanted in expected.items():
            if not self.queries[b]:
                continue
            before = int(self.lengths[b, bucket])
            fields = score_fields(self.layout, bucket, lane)
            for place, score in enumerate(wanted):
                page, own = (
                    self.page(x, b, bucket, place // p) for x in (memory, rest)
                )
                at = fields[0][0] + place % p * 4
                found = page[at : at + 4].view(np.float32)[0]
                np.testing.assert_allclose(found, score, rtol=5e-3, atol=2e-5)
                own[at : at + 4] = page[at : at + 4]
                if place >= before and len(fields) > 1:
                    at = fields[1][0] + place % p * 4
                    position = self.positions[self.starts[b] + place - before]
                    assert page[at : at + 4].view(np.int32)[0] == position
                    own[at : at + 4] = page[at : at + 4]
        np.testing.assert_array_equal(memory, rest)


@st.composite
def observations(draw: st.DrawFn, most: int = 70) -> Observation:
    """Prompt chunks of up to ``most`` rows, decodes and idle sequences."""
    plan = draw(ranked_plans())
    batch, p = draw(st.integers(1, 3)), plan.page_tokens
    count = st.one_of(st.integers(0, 2), st.integers(0, most))
    queries = draw(st.lists(count, min_size=batch, max_size=batch).filter(any))
    lengths: list[list[int]] = []
    for _ in range(batch):
        hot = draw(st.integers(0, 2 * p))
        cold = p * draw(st.integers(0, 2))
        lengths.append([cold if not b.is_hot else hot for b in plan.index.buckets])
    share = draw(st.sampled_from([0.0, 0.1, 1.0]))
    seed, room = draw(st.integers(0, 99)), draw(st.sampled_from([1, 3, 20]))
    return Observation(plan, queries, lengths, share, seed, room)
