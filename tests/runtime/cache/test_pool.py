"""Laws of the page accounting, on real memory: whatever is opened, grown, forked,
swapped or abandoned, every sequence reads back exactly what it wrote, no byte has two
users, and nothing is left over."""

from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.formats import Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane, ModelShape
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.lives import SEAL, Age, SealAfter, Window
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.cache.arena import OutOfPages, slab_size
from kvlathe.runtime.cache.page_table import PageTable, Reservation
from kvlathe.runtime.cache.pool import PagePool
from kvlathe.runtime.sessions.host.pages import HostPages
from kvlathe.runtime.sessions.page_moves import PageMoves
from kvlathe.runtime.sessions.protocols import StepPlan

PAGE = 16
Floats = npt.NDArray[np.float64]
SHAPE = ModelShape(2, 2, 2, 32, 64, 64, 1024)
LANES = tuple(
    Lane(i, h, 32, (16, 32)[h], (32, 48)[i], projected=True)
    for i in range(2)
    for h in range(2)
)
EVERY = (0, 1, 2, 3)
HOT, EIGHT, PLAIN, MIXED = (
    Tier(32, 32),
    Tier(8, 8, "rank", "token", 32, 16),
    Tier(16, 16),
    Tier(4, 2, "token", "rank", 16, 16),
)
GROUPS = {
    "one": (Group(EVERY, HOT),),
    "even and odd": (Group((0, 2), HOT), Group((1, 3), HOT)),
    "sealed": (
        Group((0, 2), HOT, (EIGHT,), SEAL),
        Group((3,), HOT),
        Group((1,), HOT, (PLAIN,), SEAL),
    ),
    "windowed": (
        Group((0, 2), HOT, life=Window(PAGE, 2 * PAGE)),
        Group((1,), HOT),
        Group((3,), HOT, life=Window.of_tokens(20, PAGE)),
    ),
    "sealed windows": (
        Group((0, 2), HOT, (EIGHT,), Window(0, PAGE)),
        Group((1, 3), HOT, (PLAIN,), SEAL),
    ),
    "first pages as they are": (
        Group((0, 2), HOT, (EIGHT,), SealAfter(PAGE)),
        Group((1,), HOT, (PLAIN,), SealAfter(2 * PAGE)),
        Group((3,), HOT, (PLAIN,), SealAfter(PAGE)),
    ),
    "newest pages apart": (
        Group((0, 2), HOT, (PLAIN, EIGHT), Age(PAGE, 2 * PAGE)),
        Group((1,), HOT, (EIGHT, PLAIN), Age(PAGE, PAGE, PAGE, 3 * PAGE)),
        Group((3,), HOT, (PLAIN,), SealAfter(PAGE)),
    ),
    "packed": (Group(EVERY, PLAIN, (MIXED,), SEAL),),
}


def plan_of(kind: str) -> CompressionPlan:
    return CompressionPlan(
        SHAPE, LANES, GROUPS[kind], page_tokens=PAGE, prefill_chunk=2 * PAGE
    )


class Sequence:
    """A page table and the values (one for each token) that it should hold, oldest
    first."""

    def __init__(self, table: PageTable, values: list[int]) -> None:
        self.table, self.values = table, values


class PoolMachine(RuleBasedStateMachine):
    sequences = Bundle("sequences")

    @initialize(kind=st.sampled_from(sorted(GROUPS)), pages=st.integers(8, 60))
    def build(self, kind: str, pages: int) -> None:
        self.plan = plan_of(kind)
        layout = CacheLayout(self.plan)
        size = pages * max(layout.page_stride) * len(layout.page_stride)
        self.pool, self.host = PagePool(layout, size), HostPages(layout, size)
        self.live: list[Sequence] = []
        self.clock = 0

    def fill(self, sequence: Sequence, reservation: Reservation) -> list[int]:
        """Write the next tokens: each is one number in every element. Codes of equal
        numbers are exact."""
        count = reservation.tokens[0]
        values = [(self.clock + i) % 1000 for i in range(count)]
        self.clock += count
        table = sequence.table
        step = StepPlan(
            input_ids=np.zeros(count, np.int32),
            positions=np.zeros(count, np.int32),
            cu_seqlens_q=np.array([0, count], np.int32),
            query_offsets=np.arange(count, dtype=np.int32),
            lengths=np.array([table.lengths], np.int32),
            page_tables=tuple(np.array([ids or [0]], np.int32) for ids in table.pages),
            logit_rows=np.zeros(0, np.int32),
        )
        for copy in reservation.change.copies if reservation.change else ():
            self.host.copy_page(copy.bucket, copy.source, copy.target)
        rows = np.repeat(
            np.array(values, self.host.hot)[:, None], self.host.row_width, axis=1
        )
        self.host.append(step, rows)
        if reservation.change:
            self.host.apply([reservation.change.moves])
        return values

    @rule(target=sequences)
    def start(self) -> Sequence:
        self.live.append(Sequence(self.pool.open(), []))
        return self.live[-1]

    @rule(
        sequence=sequences,
        count=st.just(1) | st.integers(1, 40),
        seal=st.booleans(),
        fails=st.booleans(),
    )
    def grow(self, sequence: Sequence, count: int, seal: bool, fails: bool) -> None:
        before = (
            [list(ids) for ids in sequence.table.pages],
            list(sequence.table.lengths),
            self.pool.pages_in_use,
        )
        try:
            reservation = self.pool.reserve(sequence.table, count, seal)
        except OutOfPages:
            assert before == (
                sequence.table.pages,
                sequence.table.lengths,
                self.pool.pages_in_use,
            )
            return
        values = self.fill(sequence, reservation)
        if fails:
            self.pool.rollback(reservation)
            assert before == (
                sequence.table.pages,
                sequence.table.lengths,
                self.pool.pages_in_use,
            )
        else:
            self.pool.commit(reservation)
            sequence.values = sequence.values + values

    @rule(sequence=sequences, share=st.floats(0, 1), right=st.floats(0, 1))
    def guess(self, sequence: Sequence, share: float, right: float) -> None:
        """Tokens are written up to the end of a page at most, and some of them turn out
        to be wrong: no page is sealed but by tokens that count."""
        end = self.pool.to_page_end(sequence.table)
        count = 2 + int(share * (end - 2))
        if count > end:
            return
        try:
            reservation = self.pool.reserve(sequence.table, count, seal=True)
        except OutOfPages:
            return
        change = reservation.change
        assert change is not None
        unsealed = dataclasses.replace(change, moves=PageMoves())
        values = self.fill(sequence, dataclasses.replace(reservation, change=unsealed))
        kept = 1 + int(right * (count - 1))
        if kept < count:
            self.pool.shorten(reservation, kept)
            assert not change.moves
        self.host.apply([change.moves])
        self.pool.commit(reservation)
        sequence.values = sequence.values + values[:kept]

    @rule(target=sequences, sequence=sequences)
    def fork(self, sequence: Sequence) -> Sequence:
        self.live.append(
            Sequence(self.pool.fork(sequence.table), list(sequence.values))
        )
        return self.live[-1]

    @rule(sequence=sequences)
    def swap(self, sequence: Sequence) -> None:
        swapped = self.pool.swap_out(sequence.table, self.host)
        assert not any(sequence.table.lengths)
        try:
            sequence.table = self.pool.swap_in(swapped, self.host)
        except OutOfPages:  # its pages were shared before
            sequence.values = []

    @rule(sequence=consumes(sequences))
    def end(self, sequence: Sequence) -> None:
        self.pool.release(sequence.table)
        self.pool.release(sequence.table)
        self.live.remove(sequence)

    @invariant()
    def owners_are_tables(self) -> None:
        for bucket in range(len(self.plan.index.buckets)):
            held = Counter(
                page for sequence in self.live for page in sequence.table.pages[bucket]
            )
            assert self.pool.pages_in_use[bucket] == len(held)
            assert all(
                self.pool.owners(bucket, page) == count for page, count in held.items()
            )

    @invariant()
    def bytes_have_one_user(self) -> None:
        strides = self.pool.strides
        used = {
            (b, p)
            for sequence in self.live
            for b, ids in enumerate(sequence.table.pages)
            for p in ids
        }
        ranges = sorted(
            (page * strides[b], (page + 1) * strides[b]) for b, page in used
        )
        assert all(end <= start for (_, end), (start, _) in pairwise(ranges))
        assert not ranges or ranges[-1][1] <= self.pool.arena_bytes
        assert self.pool.bytes_in_use == sum(end - start for start, end in ranges)

    @invariant()
    def lengths_and_pages_agree(self) -> None:
        for sequence in self.live:
            table = sequence.table
            for bucket in self.plan.index.buckets:
                b, life = bucket.number, bucket.life
                held = [*map(len, self.positions(sequence, b))]
                assert table.lengths[b] == held[0]
                assert len(table.pages[b]) == -(-sum(held) // PAGE)
                gone = len(sequence.values) - held[0] - table.lengths[bucket.hot]
                if bucket.leaves and bucket.is_hot:
                    gone = len(sequence.values) - held[0]
                if bucket.leaves and life.drops and not life.newest_apart:
                    assert gone >= 0 and gone % PAGE == 0
                    assert gone == 0 or held[0] >= life.most

    def positions(self, sequence: Sequence, b: int) -> tuple[list[int], list[int]]:
        """Tokens in bucket ``b``: those that are seen, and those of pages that wait."""
        bucket, length = self.plan.index.buckets[b], sequence.table.lengths[b]
        count = len(sequence.values)
        hot = sequence.table.lengths[bucket.hot]
        first = min(hot, bucket.life.stay_hot)
        sealed = [*range(first, count - hot + first)]
        life = bucket.life
        sink = max(first, life.reaches.sink)
        if bucket.waits:
            left = sealed[sink - first :][-life.reaches.recent :]
            old = max(0, len(left) - life.newest_apart)
            return left[:old], left[old:]
        if life.newest_apart and not bucket.is_hot:
            newest = sealed[sink - first :][-life.newest_apart :]
            return [*sealed[: sink - first], *newest], []
        every = [*range(count)]
        if not bucket.is_hot:
            every = sealed
        elif bucket.cold:
            return [x for x in every if x not in {*sealed}], []
        gone = len(every) - length
        sink = bucket.life.sees.sink
        return every[:sink] + every[sink + gone :], []

    def held_values(self, sequence: Sequence, b: int) -> Floats:
        """The values in the pages of bucket ``b``, in order."""
        seen, waiting = self.positions(sequence, b)
        return np.array(sequence.values, float)[[*seen, *waiting]]

    @invariant()
    def everyone_reads_what_it_wrote(self) -> None:
        for sequence in self.live:
            for b, bucket in enumerate(self.plan.index.buckets):
                expected = self.held_values(sequence, b)
                if bucket.tier.bits_k < 8:
                    continue  # 16 levels over a page of different numbers: lossy
                for pair in self.host.matrices[b].values():
                    for part in pair:
                        pages = [
                            part.read(self.host.rows[b][page])
                            for page in sequence.table.pages[b]
                        ]
                        got = np.concatenate([*pages, np.zeros((0, part.rank))])
                        got = got[: len(expected)]
                        room = 4.0 if part.format.along_tokens else 0.0
                        assert np.abs(got - expected[:, None]).max(initial=0) <= room

    def teardown(self) -> None:
        if not hasattr(self, "live"):
            return
        for sequence in self.live:
            self.pool.release(sequence.table)
        assert self.pool.bytes_in_use == 0
        slabs = self.pool.arena_bytes // self.pool.slab_bytes
        for bucket, stride in enumerate(
            self.pool.strides
        ):  # every slab is back: each bucket can have the whole arena
            counts = [0] * len(self.pool.strides)
            counts[bucket] = slabs * (
                self.pool.slab_bytes // stride - (self.pool.slab_bytes % stride > 0)
            )
            self.pool.drop(self.pool.take(counts))


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25)
TestPool = PoolMachine.TestCase


@given(
    strides=st.lists(st.integers(1, 60).map(lambda n: 128 * n), min_size=1, max_size=4),
    arena=st.integers(1 << 16, 1 << 22),
)
def test_any_slab_holds_a_page_of_every_bucket_and_one_bucket_wastes_nothing(
    strides: list[int], arena: int
) -> None:
    size = slab_size(strides, arena)
    if len(strides) == 1:
        assert size == arena // strides[0] * strides[0]
    else:
        assert size % max(strides) == 0
        assert all(size // stride - (size % stride > 0) for stride in strides)


@pytest.mark.parametrize("kind", sorted(GROUPS))
def test_pages_that_fit_are_granted(kind: str) -> None:
    layout = CacheLayout(plan_of(kind))
    pool = PagePool(layout, 40 * max(layout.page_stride) * len(layout.page_stride))
    demand = pool.worst_pages(5 * PAGE)
    demands = [demand]
    while pool.fits([*demands, demand]):
        demands.append(demand)
    assert len(demands) > 1
    for counts in demands:
        pool.take(counts)


@pytest.mark.parametrize("kind", ["sealed", "packed"])
def test_slabs_waste_less_than_a_third_of_a_small_arena(kind: str) -> None:
    """One long sequence in 24 of the largest pages: what it may hold, by its bytes."""
    layout = CacheLayout(plan_of(kind))
    size = 24 * max(layout.page_stride)
    pool = PagePool(layout, size)
    longest = max(n for n in range(1, 2000) if pool.has_room_for(n, 1))
    assert pool.demand.bytes(pool.worst_pages(longest, 1)) > size * 2 / 3


def test_out_of_pages_takes_nothing() -> None:
    layout = CacheLayout(plan_of("even and odd"))
    pool = PagePool(layout, 16 * layout.page_stride[0])
    with pytest.raises(OutOfPages, match="is full"):
        pool.take([3, 10**6])
    assert pool.bytes_in_use == 0


def test_an_arena_below_a_page_is_refused() -> None:
    with pytest.raises(KvlatheError, match="too small"):
        PagePool(CacheLayout(plan_of("sealed")), 1000)


def test_bytes_of_a_sequence_are_the_layouts_promise() -> None:
    for kind in GROUPS:
        layout = CacheLayout(plan_of(kind))
        pool = PagePool(layout, 200 * max(layout.page_stride) * len(layout.page_stride))
        table = pool.open()
        for tokens in range(1, 5 * PAGE):
            pool.commit(pool.reserve(table, 1, seal=True))
            assert pool.bytes_in_use == layout.bytes_for(tokens)


def test_a_long_decode_of_windows_holds_a_bounded_number_of_pages() -> None:
    plan = dataclasses.replace(plan_of("windowed"), prefill_chunk=4 * PAGE)
    layout = CacheLayout(plan)
    pool = PagePool(layout, 400 * max(layout.page_stride))
    table = pool.open()
    for _ in range(8):
        pool.commit(pool.reserve(table, 4 * PAGE, seal=True))
        assert [len(table.pages[b]) for b in (0, 2)] == [3, 2]
    for n in range(8 * 4 * PAGE + 1, 1000):
        pool.commit(pool.reserve(table, 1, seal=True))
        assert len(table.pages[0]) <= 4 and len(table.pages[2]) <= 3
        assert pool.bytes_in_use == layout.bytes_for(n)
    assert layout.bytes_for(1000) - layout.bytes_for(200) == 50 * layout.page_stride[1]
    pool.release(table)
    assert pool.bytes_in_use == 0
