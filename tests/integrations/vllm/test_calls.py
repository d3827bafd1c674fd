"""Steps as vLLM makes them, on blocks of a layer: any cut of prompts, shared prefixes,
sequences that end. Against attention in float64 over the pages' own numbers.

vLLM is not needed: what it hands over is a step's rows, lengths and block table.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlathe.plan.codec import matrices
from kvlathe.plan.layer_block import newest
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.lives import Window
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.native.library import find
from tests.support.block_caches import block_cache
from tests.support.block_cases import plan_of

torch = pytest.importorskip("torch")
from kvlathe_vllm.calls import Calls, Step, copies_of, is_decode  # noqa: E402
from kvlathe_vllm.cpu import CpuLayer  # noqa: E402
from kvlathe_vllm.hosted import Hosted  # noqa: E402
from kvlathe_vllm.hot_pages import NULL_BLOCK, HotPages  # noqa: E402
from kvlathe_vllm.layer import Layer, Most  # noqa: E402

Floats = npt.NDArray[np.floating]
Inputs = tuple[Floats, Floats, Floats]
"""q, k, v."""
PAGE, DIMS, HEADS, GROUP, LAYER, SCALE = 16, 32, 4, 2, 1, 0.3
BLOCKS = 160
MOST = 3
"""Sequences that run at once."""
CLOSE = 0.002
"""The largest error was 0.0005 in 800 sequences. Another code of 4 bits gave up to 0.1
where few tokens are seen, and a page of another sequence gives NaN or about 1."""
native = pytest.mark.skipif(find().native is None, reason="no native library")


def heads_of(
    plan: CompressionPlan, seed: int
) -> dict[tuple[int, int], dict[str, Floats]]:
    """Random matrices of every kept lane, of sixteenths (see `drawn_inputs`)."""
    random = np.random.default_rng(seed)

    def drawn(*shape: int) -> Floats:
        return (random.integers(-4, 5, shape) / 16).astype(np.float32)

    return {
        (lane.layer, lane.head): {
            "q": drawn(DIMS, lane.rank_k),
            "k": drawn(DIMS, lane.rank_k),
            "centre": drawn(lane.rank_k),
            "v": drawn(DIMS, lane.rank_v),
            "o": drawn(lane.rank_v, DIMS),
            "shift": drawn(DIMS),
        }
        for lane in plan.lanes
        if not lane.removed
    }


def coded(plan: CompressionPlan, lane: int, x: Floats, side: str) -> Floats:
    """K or V [n, rank] of a lane as sealed pages give it back, float64; the tail in 16
    bit."""
    hot = x.astype(np.float16).astype(np.float64)
    for b, bucket in enumerate(plan.index.buckets):
        if bucket.is_hot or lane not in bucket.lanes:
            continue
        layout = CacheLayout(plan)
        found = matrices(layout, b)[lane]
        matrix = found[0] if side == "k" else found[1]
        for first in range(0, len(x) // PAGE * PAGE, PAGE):
            page = np.zeros(layout.page_stride[b], np.uint8)
            matrix.write(page, hot[first : first + PAGE].astype(np.float32), first)
            hot[first : first + PAGE] = matrix.read(page)
    return hot


def expected(engine: Hosted, q: Floats, k: Floats, v: Floats) -> Floats:
    """o [n, query heads, d] of one sequence. Each row sees sealed pages before its own
    page, and its own page's 16-bit rows up to itself."""
    plan = engine.plan
    out = np.zeros((len(q), HEADS * GROUP, DIMS))
    for head in range(HEADS):
        lane = plan.index.lane(LAYER, head)
        source = head if lane.fill_from is None else lane.fill_from
        own = engine.heads[LAYER, source]
        index = LAYER * HEADS + source
        keys = k[:, source] @ own["k"] - own["centre"]
        values = (v[:, source] - own["shift"]) @ own["v"]
        hot_k, hot_v = (x.astype(np.float16).astype(float) for x in (keys, values))
        cold_k = coded(plan, index, keys, "k")
        cold_v = coded(plan, index, values, "v")
        for row in range(len(q)):
            at = row // PAGE * PAGE
            sight = plan.index.sight(index)
            places = np.arange(row + 1)
            seen = places < sight.sink
            seen |= places >= sight.first_seen(row, PAGE)
            seen_k = np.concatenate([cold_k[:at], hot_k[at : row + 1]])[seen]
            seen_v = np.concatenate([cold_v[:at], hot_v[at : row + 1]])[seen]
            for g in range(GROUP):
                query = q[row, source * GROUP + g] @ own["q"]
                scores = SCALE * seen_k @ query
                shares = np.exp(scores - scores.max())
                mean = shares @ seen_v / shares.sum()
                out[row, head * GROUP + g] = mean @ own["o"] + own["shift"]
    return out


class Sequence:
    def __init__(self, inputs: Inputs) -> None:
        self.q, self.k, self.v = inputs
        self.done = self.scheduled = self.wrong = 0
        self.blocks: list[int] = []
        self.o = np.full((len(self.q), HEADS * GROUP, DIMS), np.nan)


def drawn_inputs(random: np.random.Generator, n: int) -> Inputs:
    """K and V are small whole numbers, and with matrices of sixteenths their rows are
    exact in 16 bits. So no sum's order decides between two codes."""
    q = random.standard_normal((n, HEADS * GROUP, DIMS)).astype(np.float32)
    k, v = random.integers(-2, 3, (2, n, HEADS, DIMS)).astype(np.float32)
    return q, k, v


def join(
    random: np.random.Generator,
    running: list[Sequence],
    free: list[int],
    newest: int | None,
) -> Sequence:
    """A new sequence; perhaps it begins as a running one does, whose full blocks it
    shares, even those that are filled in this very step. ``newest``: tokens before its
    next one that it must share with it, if blocks hold no others."""
    new = Sequence(drawn_inputs(random, int(random.integers(1, 5 * PAGE))))
    if running and random.random() < 0.6:
        other = running[int(random.integers(len(running)))]
        shared = min(len(other.blocks), (len(new.q) - 1) // PAGE)
        shared = min(shared, other.scheduled // PAGE)
        while NULL_BLOCK in other.blocks[first_held(shared * PAGE, newest) : shared]:
            shared -= 1
        for mine, theirs in ((new.q, other.q), (new.k, other.k), (new.v, other.v)):
            mine[: shared * PAGE] = theirs[: shared * PAGE]
        new.blocks = other.blocks[:shared]
        new.done = shared * PAGE
        new.o[: new.done] = 0
    return new


def first_held(tokens: int, newest: int | None) -> int:
    """The first block that vLLM keeps of a sequence of so many ``tokens``."""
    return 0 if newest is None else max(0, tokens - newest + 1) // PAGE


def play(
    engine: Hosted,
    seed: int,
    steps: int,
    newest: int | None = None,
    guesses: bool = False,
) -> list[Sequence]:
    """Random steps of at most MOST sequences; all that were played. ``newest``: tokens
    that blocks hold; vLLM takes those before away, and says the null block.
    ``guesses``: some of a step's last tokens are wrong, and are taken back."""
    random = np.random.default_rng(seed)
    cache = block_cache(engine.blocks[LAYER], BLOCKS, fill=255)
    most = Most(MOST, MOST * 5 * PAGE, 5 * PAGE, guesses)
    layer = CpuLayer(engine, LAYER, cache, most, SCALE)
    calls = Calls(engine.plan, MOST, guesses)
    free = [int(x) for x in random.permutation(np.arange(1, BLOCKS))]
    running: list[Sequence] = []
    played: list[Sequence] = []
    for _ in range(steps):
        running = [x for x in running if x.done < len(x.q) and random.random() < 0.95]
        sizes: list[int] = []
        for one in running:
            one.scheduled = 0
        for one in running:
            sizes.append(chunk(random, one, free))
            if guesses and 1 < sizes[-1] < PAGE and random.random() < 0.7:
                one.wrong = int(random.integers(sizes[-1]))
                one.scheduled = one.done + 1
        while len(running) < MOST and random.random() < 0.7:
            new = join(random, running, free, newest)
            running.append(new)
            played.append(new)
            sizes.append(chunk(random, new, free))
        if running:
            run_step(layer, calls, running, sizes)
        for one in running:
            one.done -= one.wrong
            one.wrong = 0
            gone = first_held(one.done, newest)
            one.blocks[:gone] = [NULL_BLOCK] * gone
    return played


def chunk(random: np.random.Generator, one: Sequence, free: list[int]) -> int:
    left = len(one.q) - one.done
    size = 1 if random.random() < 0.4 else int(random.integers(1, left + 1))
    size = min(size, left)
    one.scheduled = one.done + size
    while len(one.blocks) * PAGE < one.done + size:
        one.blocks.append(free.pop())
    return size


def guessed(rows: Floats, wrong: int) -> Floats:
    """``rows`` of which the last are wrong."""
    right = len(rows) - wrong
    return np.concatenate([rows[:right], 1 - rows[right:]])


def run_step(
    layer: Layer, calls: Calls, running: list[Sequence], sizes: list[int]
) -> None:
    rows = [slice(x.done, x.done + n) for x, n in zip(running, sizes, strict=True)]
    q, k, v = (
        torch.from_numpy(np.concatenate(parts))
        for parts in (
            [guessed(x.q[at], x.wrong) for x, at in zip(running, rows, strict=True)],
            [guessed(x.k[at], x.wrong) for x, at in zip(running, rows, strict=True)],
            [guessed(x.v[at], x.wrong) for x, at in zip(running, rows, strict=True)],
        )
    )
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    lengths = np.array([at.stop for at in rows], np.int32)
    table = np.zeros((len(running), max(len(x.blocks) for x in running)), np.int32)
    for row, one in zip(table, running, strict=True):
        row[: len(one.blocks)] = one.blocks
    step = Step(starts, lengths, table)
    made = calls.of(step)
    again = Step(starts.copy(), lengths.copy(), table.copy())
    assert calls.of(again) is made
    o = layer.run(q, k, v, made).double().numpy()
    for one, at, first in zip(running, rows, starts, strict=False):
        one.o[at] = o[first : first + at.stop - at.start]
        one.done = at.stop


@native
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_tokens_that_are_taken_back_leave_nothing(seed: int) -> None:
    """Guesses fill a page and begin another, and are wrong from somewhere on."""
    plan = plan_of(PAGE)
    engine = Hosted(Path("engine"), plan, heads_of(plan, seed))
    for one in play(engine, seed, steps=16, guesses=True):
        shared = int((one.o == 0).all((1, 2)).sum())
        want = expected(engine, *(x[: one.done] for x in (one.q, one.k, one.v)))
        got = one.o[shared : one.done]
        assert np.abs(got - want[shared:]).max(initial=0) < CLOSE


WINDOWS = (Window(PAGE, PAGE), Window.of_tokens(PAGE + 5, PAGE))
"""The windows of two heads: whole pages beside the first one, and to the token."""


@native
@pytest.mark.parametrize("windows", [(), WINDOWS], ids=["all", "windows"])
@pytest.mark.parametrize("sealed", [False, True])
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_any_steps_give_what_a_sequence_gives_alone(
    sealed: bool, windows: tuple[Window, ...], seed: int
) -> None:
    plan = plan_of(PAGE, sealed, windows=windows)
    engine = Hosted(Path("engine"), plan, heads_of(plan, seed))
    for one in play(engine, seed, steps=10):
        shared = int((one.o == 0).all((1, 2)).sum())
        want = expected(engine, *(x[: one.done] for x in (one.q, one.k, one.v)))
        got = one.o[shared : one.done]
        assert np.abs(got - want[shared:]).max(initial=0) < CLOSE


@native
@pytest.mark.parametrize("sealed", [False, True])
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 1 << 30), tokens=st.integers(1, 3 * PAGE))
def test_blocks_that_no_window_reaches_are_not_read(
    sealed: bool, tokens: int, seed: int
) -> None:
    """vLLM frees blocks before a window that all heads of a layer see: the
    null block has numbers that are none."""
    lives = (Window.of_tokens(tokens, PAGE), Window(0, PAGE))
    plan = plan_of(PAGE, sealed, windows=lives)
    first = dataclasses.replace(plan.groups[0], life=lives[1])
    plan = dataclasses.replace(plan, groups=(first, *plan.groups[1:]))
    kept = newest(plan, LAYER)
    assert kept == max(tokens, 2 * PAGE)
    engine = Hosted(Path("engine"), plan, heads_of(plan, seed))
    for one in play(engine, seed, 10, kept):
        shared = int((one.o == 0).all((1, 2)).sum())
        want = expected(engine, *(x[: one.done] for x in (one.q, one.k, one.v)))
        got = one.o[shared : one.done]
        assert np.abs(got - want[shared:]).max(initial=0) < CLOSE


def test_a_page_in_use_is_never_given_away() -> None:
    pages = HotPages(2)
    first = pages.begin(7)
    pages.begin(8)  # it ends unseen
    assert pages.resume(7) == first
    third = pages.begin(9)
    assert third != first and pages.resume(7) == first
    with pytest.raises(Exception, match="block 8 are gone"):
        pages.resume(8)
    pages.move(7, 11)
    assert pages.resume(11) == first
    with pages.step():
        pages.end(11)
        assert {pages.passing(), pages.passing()} == {3, 4}
    assert pages.begin(12) == first


def test_sequences_that_cross_pages_need_no_more_than_their_own() -> None:
    """All that may run, each from a page that it fills into another one, again and
    again; others that ended have pages, too."""
    plan = plan_of(PAGE)
    calls = Calls(plan, MOST)
    tables = np.arange(1, MOST * 8 + 1, dtype=np.int32).reshape(MOST, 8)
    ends = np.full(MOST, 5, np.int32)
    sizes = ends.copy()
    for _ in range(6):
        starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
        call = calls.of(Step(starts, ends, tables))
        lasting = call.hot[call.hot <= MOST]
        assert len(set(lasting)) == len(lasting)
        if call.kept:
            assert sorted(page for _, page in call.kept) == [1, 2, 3]
        sizes = np.full(MOST, PAGE + 2, np.int32)
        ends = ends + sizes


@given(
    before=st.lists(st.integers(0, 3 * PAGE), min_size=1, max_size=MOST),
    data=st.data(),
)
def test_pages_of_a_prompt_read_copies_of_its_last(
    before: list[int], data: st.DataObject
) -> None:
    """The prompt whose copies a piece reads begins with all sealed pages that it
    sees."""
    each = st.integers(1, 4 * PAGE)
    sizes = [data.draw(each) for _ in before]
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    ends = np.add(before, sizes).astype(np.int32)
    tables = np.arange(1, MOST * 8 + 1, dtype=np.int32).reshape(MOST, 8)[: len(sizes)]
    calls = Calls(plan_of(PAGE), MOST)
    for b, tokens in enumerate(before):  # as if steps before had begun their pages
        if tokens % PAGE:
            calls.pages.begin(int(tables[b, tokens // PAGE]))
    call = calls.of(Step(starts, ends, tables))
    least = 16
    whose = copies_of(call, least)
    coded = next(b.number for b in calls.plan.index.buckets if not b.is_hot)
    rows = np.diff(call.cu)
    for piece, whom in enumerate(whose):
        own = call.of == call.of[piece]
        tiled = rows[own & (rows >= least)].sum()
        assert (whom >= 0) == (tiled >= 128)
        if whom >= 0:
            pages = call.lengths[piece, coded] // PAGE
            assert whose[whom] == whom and call.of[whom] == call.of[piece]
            assert call.lengths[whom, coded] == call.lengths[own, coded].max()
            assert (call.blocks[whom, :pages] == call.blocks[piece, :pages]).all()


def test_two_tokens_on_both_sides_of_a_page_are_no_decode_step() -> None:
    """Each of their pieces has one row, as each sequence that decodes."""
    calls = Calls(plan_of(PAGE), MOST)
    tables = np.arange(1, MOST * 8 + 1, dtype=np.int32).reshape(MOST, 8)
    for b, tokens in enumerate((PAGE - 1, 5, 9)):
        calls.pages.begin(int(tables[b, tokens // PAGE]))
    starts = np.array([0, 2, 3, 4], np.int32)
    crossing = calls.of(Step(starts, np.array([PAGE + 1, 6, 10], np.int32), tables))
    assert (np.diff(crossing.cu) == 1).all() and not is_decode(crossing)
    starts = np.array([0, 1, 2, 3], np.int32)
    single = calls.of(Step(starts, np.array([PAGE + 2, 7, 11], np.int32), tables))
    assert is_decode(single)


def test_rehearsals_with_the_null_block_take_no_page() -> None:
    pages = HotPages(1)
    assert pages.begin(0) == pages.resume(0) == 0
    pages.move(0, 5)
    assert pages.begin(3) == 1
