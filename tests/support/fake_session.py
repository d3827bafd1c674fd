"""Sessions without a model: pages hold token ids, and the next token is a hash of all
tokens that the pages give back.

So an answer is right only if the scheduler, the pool and the step's arrays led to
exactly the sequence's own tokens. Where a plan ranks tokens or passes them in stages,
lanes hold different ones, and the hash is of every lane's.
"""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import partial

import numpy as np
import numpy.typing as npt

from kvlathe.plan.formats import Tier
from kvlathe.plan.heads import ModelShape
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.lives import Divide
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.cache.pool import PagePool
from kvlathe.runtime.sessions.host import passes
from kvlathe.runtime.sessions.host.pages import HostPages
from kvlathe.runtime.sessions.page_moves import PageMoves
from kvlathe.runtime.sessions.protocols import Capability, Int32, Session, StepPlan
from kvlathe.runtime.sessions.substeps import whole
from kvlathe.runtime.text import sampler
from kvlathe.runtime.text.sampler import Sampled, SamplingRows
from tests.support.tiers import with_tiers

VOCABULARY = 251
SHAPE = ModelShape(
    layers=1,
    query_heads=2,
    kv_heads=2,
    head_dim=16,
    hidden_size=32,
    vocab_size=VOCABULARY,
    max_positions=4096,
)


def following(tokens: Items[int]) -> int:
    """The token after ``tokens``; never the last of the vocabulary."""
    return zlib.crc32(np.asarray(tokens, np.int32).tobytes()) % (VOCABULARY - 1)


def solo(prompt: Items[int], count: int) -> list[int]:
    """The answer of ``count`` tokens."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(following(tokens))
    return tokens[len(prompt) :]


STATE_NUMBERS = 3


def state_of(tokens: Int32) -> tuple[int, int, int]:
    """A layer's state after ``tokens``: zeros after none."""
    return len(tokens), *divmod(zlib.crc32(tokens.tobytes()), 1 << 16)


class SamplesThere(Session):
    """Samples where the logits of ``session`` are, as sessions on a GPU do: the tokens
    of a step are known there before they are known to the host."""

    def __init__(self, session: Session) -> None:
        self.session = session
        more: frozenset[Capability] = frozenset({"samples"})
        self.capabilities = session.capabilities | more
        self.tokens = np.zeros(0, np.int64)

    def run(self, step: StepPlan) -> npt.NDArray[np.float32]:
        return self.session.run(step)

    def apply(self, moves: Items[PageMoves]) -> None:
        self.session.apply(moves)

    def roll_back(self) -> None:
        self.session.roll_back()

    def read_page(self, bucket: int, page: int) -> bytes:
        return self.session.read_page(bucket, page)

    def write_page(self, bucket: int, page: int, data: bytes) -> None:
        self.session.write_page(bucket, page, data)

    def start(self, step: StepPlan) -> Callable[[SamplingRows], Known]:
        if step.after is not None:
            unknown = step.after >= 0
            assert not step.input_ids[unknown].any(), "the host cannot know them"
            ids = step.input_ids.copy()
            ids[unknown] = self.tokens[step.after[unknown]]
            step = dataclasses.replace(step, input_ids=ids)
        return partial(self.choose, self.session.run(step))

    def choose(self, logits: npt.NDArray[np.float32], rows: SamplingRows) -> Known:
        sampled = sampler.sample(logits, rows)
        self.tokens = sampled.tokens
        return Known(sampled)


@dataclasses.dataclass(frozen=True)
class Known:
    """A Sampling that is there at once."""

    sampled: Sampled

    def result(self) -> Sampled:
        return self.sampled


class FakeSession(Session):
    """``broken``: steps that have this token in them raise. ``largest``: tokens and
    sequences of the largest step. ``affordable``: steps of more tokens run out of
    memory, once they have written to their pages."""

    affordable = 1 << 30

    def __init__(self, plan: CompressionPlan, pool: PagePool, broken: int = -1) -> None:
        self.plan, self.broken, self.largest = plan, broken, (0, 0)
        p = plan.page_tokens
        self.pages = [
            np.full((pool.arena_bytes // stride, p), -1, np.int32)
            for stride in pool.strides
        ]

    def run(self, step: StepPlan) -> npt.NDArray[np.float32]:
        starts = step.cu_seqlens_q
        counts = np.diff(starts)
        assert (counts[1:] >= counts[:-1]).all(), (
            "kernels pass over rows of long chunks"
        )
        self.largest = (
            max(self.largest[0], int(starts[-1])),
            max(self.largest[1], len(starts) - 1),
        )
        logits = np.zeros((len(step.logit_rows), VOCABULARY), np.float32)
        row = 0
        for b, (start, end) in enumerate(itertools.pairwise(starts.tolist())):
            known = self._append(step, b, step.input_ids[start:end])
            assert step.positions[start:end].tolist() == list(
                range(len(known) - (end - start), len(known))
            )
            if step.states is not None and step.states_after is not None:
                before = known[: len(known) - (end - start)]
                assert tuple(step.states[b]) == state_of(before)
                step.states_after[b] = state_of(known)
            while row < len(logits) and step.logit_rows[row] < end:
                logits[
                    row,
                    following(
                        known[: len(known) - (end - 1 - step.logit_rows[row])].tolist()
                    ),
                ] = 1
                row += 1
        if self.broken in step.input_ids:
            raise RuntimeError("broken")
        if starts[-1] > self.affordable:
            raise RuntimeError("CUDA error: out of memory")
        return logits

    def _append(self, step: StepPlan, b: int, fresh: Int32) -> Int32:
        """Write a sequence's tokens into its fresh buckets; every lane must give back
        the same tokens, or those of its window. All of them."""
        p, found = self.plan.page_tokens, {}
        for s, bucket in enumerate(self.plan.index.buckets):
            length, table = int(step.lengths[b, s]), step.page_tables[s][b]
            if bucket.is_hot:
                places = np.arange(length, length + len(fresh))
                self.pages[s][table[places // p], places % p] = fresh
                length += len(fresh)
            places = np.arange(length)
            found[s] = self.pages[s][table[places // p], places % p]
        held = []
        for group in self.plan.groups:
            own = [x for x in self.plan.index.buckets if x.lanes[0] in group.lanes]
            hot = found[self.plan.index.hot_bucket[group.lanes[0]]]
            life = group.life
            first, newest = np.split(hot, [life.stay_hot])
            sealed = [found[x.number] for x in own if not x.is_hot]
            if life.newest_apart:
                young, old = sealed
                sink, young = np.split(young, [life.first_apart - life.stay_hot])
                sealed = [sink, old, young]
            held.append((life, np.concatenate([first, *sealed, newest])))
        whole = next(tokens for life, tokens in held if not life.drops)
        for life, tokens in held:
            gone = len(whole) - len(tokens)
            sink = life.reaches.sink
            expected = np.concatenate([whole[:sink], whole[sink + gone :]])
            assert np.array_equal(tokens, expected)
            if gone:
                seen = life.reaches.first_seen(len(whole) - len(fresh), p)
                assert sink + gone <= seen, "a page left that a query sees"
        return whole

    def apply(self, moves: Items[PageMoves]) -> None:
        for one in moves:
            assert not (one.selections or one.relocations or one.resets)
            for copy in one.copies:
                pages = self.pages[copy.bucket]
                pages[copy.target] = pages[copy.source]
            for full in one.seals:
                cold = self.plan.index.buckets[full.fresh].cold
                for bucket, target in zip(cold, full.cold_pages, strict=True):
                    self.pages[bucket][target] = self.pages[full.fresh][full.page]

    def read_page(self, bucket: int, page: int) -> bytes:
        return self.pages[bucket][page].tobytes()

    def write_page(self, bucket: int, page: int, data: bytes) -> None:
        self.pages[bucket][page] = np.frombuffer(data, np.int32)


EXACT = (Tier(32, 32), Tier(32, 16), Tier(16, 32), Tier(16, 16))


def exact(plan: CompressionPlan) -> CompressionPlan:
    """In formats that hold small integers exactly, so that tokens can be told apart in
    every bucket."""
    return with_tiers(plan, EXACT)


def attention(
    lane: int, rows: npt.NDArray, tokens: npt.NDArray
) -> npt.NDArray[np.float32]:
    """The attention that rows at some positions give to tokens at others in a lane,
    together, in any company.

    Multiples of 1/1024, whose sums are exact in any order.
    """
    mixed = (
        (tokens[None, :] * 7919 + rows[:, None] * 104729 + lane * 1299709)
        * 2654435761
        % 2**32
    )
    return ((mixed >> 22) * (tokens[None, :] <= rows[:, None])).sum(0) / np.float32(
        1024
    )


class RankedSession(HostPages, Session):
    """Real pages, in formats as of ``exact``: the K of a token is its id everywhere,
    its V its position. Hidden states carry both from stage to stage. ``broken``,
    ``largest`` and ``affordable`` as in FakeSession; every ``faulty``-th move of tokens
    in steps of several sequences raises (0: none)."""

    affordable = 1 << 30

    def __init__(
        self, plan: CompressionPlan, pool: PagePool, broken: int = -1, faulty: int = 0
    ) -> None:
        super().__init__(CacheLayout(plan), pool.arena_bytes)
        self.broken, self.faulty, self.moved, self.largest = broken, faulty, 0, (0, 0)
        self.lanes = [i for i, lane in enumerate(plan.lanes) if not lane.removed]

    def run(self, step: StepPlan) -> npt.NDArray[np.float32]:
        self.size = len(step.cu_seqlens_q) - 1
        self.largest = (
            max(self.largest[0], int(step.cu_seqlens_q[-1])),
            max(self.largest[1], self.size),
        )
        hidden = passes.entering(step, 3)
        logits, observed = np.zeros((len(step.logit_rows), VOCABULARY), np.float32), []
        for stage in range(self.plan.index.graphs):
            for share in whole(step, stage):
                tokens = np.stack([share.step.input_ids, share.step.positions], 1)
                assert stage == 0 or np.array_equal(
                    hidden[share.tokens, :3], np.insert(tokens, 0, stage, 1)
                )
                hidden[share.tokens, :3] = np.insert(tokens, 0, stage + 1, 1)
                mass = self.attend(share.step, stage)
                self.append(share.step, self.of_lanes(stage, tokens), stage)
                given = self.of_stage(share.step, mass, stage)
                passes.observe(self.plan, step, share, given, stage)
                observed.append((share.step, given, stage))
                if stage == self.plan.index.graphs - 1:
                    logits[share.logits] = self.answers(share.step)
        if self.broken in step.input_ids:
            raise RuntimeError("broken")
        if step.cu_seqlens_q[-1] > self.affordable:
            raise MemoryError
        passes.leave(step, hidden)
        self.page_scores.observe(observed)
        return logits

    def of_lanes(self, stage: int, tokens: npt.NDArray) -> npt.NDArray[np.floating]:
        """Rows as HostPages.append takes them: of each layer the ids for every K, then
        the positions for every V."""
        found = []
        for layer in self.plan.index.layers_of(stage):
            lanes = self.plan.index.active(layer)
            found += [np.repeat(tokens[:, :1], sum(lane.rank_k for lane in lanes), 1)]
            found += [np.repeat(tokens[:, 1:], sum(lane.rank_v for lane in lanes), 1)]
        return np.concatenate(found, 1).astype(self.hot)

    def held(
        self, step: StepPlan, b: int, bucket: int, lane: int
    ) -> npt.NDArray[np.int64]:
        """Ids and positions [2, cached tokens] of what a lane of sequence ``b`` holds
        in a bucket."""
        length = int(step.lengths[b, bucket])
        pages = self.rows[bucket][
            step.page_tables[bucket][b, : -(-length // self.plan.page_tokens)]
        ]
        found = []
        for part in self.matrices[bucket][lane]:
            kind = np.dtype(f"f{part.format.bits // 8}")
            size = self.plan.page_tokens * part.rank * kind.itemsize
            found.append(
                pages[:, part.data : part.data + size]
                .view(kind)
                .reshape(-1, part.rank)[:length, 0]
            )
        return np.array(found).astype(np.int64)

    def attend(self, step: StepPlan, stage: int) -> npt.NDArray[np.float32]:
        """Mass [B, all kept lanes, N of all buckets] of the observed rows in the layers
        of a stage."""
        ends = np.cumsum(
            [0, *(table.shape[1] * self.plan.page_tokens for table in step.page_tables)]
        )
        found = np.zeros(
            (len(step.lengths), len(self.lanes), ends[-1] + len(step.query_offsets)),
            np.float32,
        )
        for b, (start, stop) in enumerate(
            itertools.pairwise(step.cu_seqlens_q.tolist())
        ):
            assert step.observation_weights is not None
            rows = np.flatnonzero(step.observation_weights[start:stop]) + start
            at, own = (
                step.positions[rows].astype(np.int64),
                step.positions[start:stop].astype(np.int64),
            )
            for bucket in self.plan.index.buckets_of(stage) if len(rows) else ():
                for lane in self.plan.index.buckets[bucket].lanes:
                    mass, known = (
                        found[b, self.lanes.index(lane)],
                        self.held(step, b, bucket, lane)[1],
                    )
                    mass[ends[bucket] : ends[bucket] + len(known)] += attention(
                        lane, at, known
                    )
                    if self.plan.index.buckets[bucket].is_hot:
                        mass[ends[-1] : ends[-1] + len(own)] += attention(lane, at, own)
        return found

    def of_stage(
        self, step: StepPlan, mass: npt.NDArray[np.float32], stage: int
    ) -> npt.NDArray[np.float32]:
        """The lanes and buckets of a stage alone."""
        ends = np.cumsum(
            [0, *(table.shape[1] * self.plan.page_tokens for table in step.page_tables)]
        )
        places = [
            np.arange(ends[b], ends[b + 1]) for b in self.plan.index.buckets_of(stage)
        ]
        places = np.concatenate([*places, np.arange(ends[-1], mass.shape[2])])
        layers = self.plan.index.layers_of(stage)
        lanes = [
            i
            for i, lane in enumerate(self.lanes)
            if self.plan.lanes[lane].layer in layers
        ]
        return mass[:, lanes][:, :, places]

    def answers(self, step: StepPlan) -> npt.NDArray[np.float32]:
        """Logits after the wanted rows: of a hash of all that every lane holds, the
        step's own tokens last."""
        logits = np.zeros((len(step.logit_rows), VOCABULARY), np.float32)
        for i, row in enumerate(step.logit_rows.tolist()):
            b = int(np.searchsorted(step.cu_seqlens_q, row, "right")) - 1
            own = np.arange(step.cu_seqlens_q[b], row + 1)
            known = [self.known(step, b, lane, own) for lane in self.lanes]
            logits[
                i, following(np.concatenate([x.ravel() for x in known]).tolist())
            ] = 1
        return logits

    def known(
        self, step: StepPlan, b: int, lane: int, own: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Ids and positions [2, n] of what a lane holds, bucket by bucket, then of the
        rows ``own``, unless it has them since an earlier pass. No token is there twice;
        where tokens are divided, all are there."""
        buckets = (
            i
            for i, bucket in enumerate(self.plan.index.buckets)
            if lane in bucket.lanes
        )
        held = np.concatenate(
            [self.held(step, b, bucket, lane) for bucket in buckets], 1
        )
        new = np.stack([step.input_ids[own], step.positions[own]])
        found = np.concatenate([held, new[:, new[1] > held[1].max(initial=-1)]], 1)
        assert (
            len(set(found[1].tolist())) == found.shape[1]
            and found[1].max() == step.positions[own[-1]]
        )
        divided = isinstance(self.plan.index.groups[lane].life, Divide)
        assert not divided or found.shape[1] == step.positions[own[-1]] + 1
        return found.astype(np.int64)

    def move(
        self,
        source: int,
        pages: Items[int],
        target: int,
        target_pages: Items[int],
        places: npt.NDArray[np.int64],
    ) -> None:
        self.moved += 1
        if self.faulty and self.moved % self.faulty == 0 and self.size > 1:
            raise RuntimeError("a move failed")
        super().move(source, pages, target, target_pages, places)
