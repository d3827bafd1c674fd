"""Laws of ranked tokens: every bucket holds as many as the layout promises and those
that rank there, whatever the schedule; where a rule keeps everything alike, the plan is
one without it."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence as Items
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from kvlathe.base.errors import KvlatheError
from kvlathe.export.bases.basis import Basis
from kvlathe.export.folding.fold import decoder_from
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.plan.codec import noise, noise_key
from kvlathe.plan.formats import Tier
from kvlathe.plan.heads import ModelShape
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.plan import Bucket, CompressionPlan
from kvlathe.plan.token_rules import (
    Budget,
    ObservationWindow,
    Share,
    TokenRule,
    split_tokens,
)
from kvlathe.runtime.cache.observed_rows import ObservedRows
from kvlathe.runtime.cache.pool import PagePool
from kvlathe.runtime.cache.prefix import PrefixCache
from kvlathe.runtime.cache.token_ranking import saliency
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.scheduling.sequence import Chunk, Sequence
from kvlathe.runtime.sessions.host.pages import HostPages
from kvlathe.runtime.sessions.protocols import Scores, Session, StepPlan, TokenRanker
from kvlathe.runtime.text.sampler import Sampler
from kvlathe.runtime.text.sampling_params import SamplingParams
from kvlathe.runtime.text.tokenizer import Tokenizer
from tests.support.runtime_cases import (
    BACKENDS,
    HEAVY,
    HOT,
    LIMITS,
    MODEL,
    NORMALIZED,
    RANKED,
    U8,
    TorchSession,
    decoder,
    llm,
    model_shape,
    plan_for,
    ranked_plans,
    text,
)

PAGE = 16
SHAPE = ModelShape(2, 4, 2, 16, 32, 97, 4096)
TIERS = (
    Tier(32, 32),
    Tier(8, 8, "rank", "rank"),
    Tier(16, 16),
    Tier(4, 8, "token", "rank", 16, 16),
)
EVERY = (0, 1, 2, 3)


# -- plans -----------------------------------------------------------------------------
@st.composite
def plans(draw: st.DrawFn) -> CompressionPlan:
    """One fresh bucket or two, each divided, or with budgets, hot or sealed; observations of
    every kind."""
    buckets: list[Bucket] = []
    for lanes in draw(st.sampled_from([[EVERY], [(0, 3), (1, 2)]])):
        kind, fresh = draw(st.sampled_from(["divided", "hot", "sealed"])), len(buckets)
        if kind == "hot":
            buckets.append(Bucket(0, lanes, None, draw(budgets())))
            continue
        buckets.append(Bucket(0, lanes))
        if kind == "divided":
            weights = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
            shares = [w / sum(weights) for w in weights]
            buckets += [
                Bucket(i % 3 + 1, lanes, fresh, Share(s)) for i, s in enumerate(shares)
            ]
        else:
            parts = draw(st.sampled_from([[lanes], [lanes[:1], lanes[1:]]]))
            buckets += [
                Bucket(1 + i, part, fresh, draw(budgets()))
                for i, part in enumerate(parts)
            ]
    shape = dataclasses.replace(
        SHAPE, head_dim=draw(st.sampled_from([16, 48]))
    )  # scores then break the cells of rows
    lanes = plan_for(shape, TIERS, (Bucket(0, EVERY),)).lanes
    return CompressionPlan(
        shape, lanes, TIERS, tuple(buckets), PAGE, 2 * PAGE, 7, draw(observed_rows())
    )


def budgets() -> st.SearchStrategy[TokenRule]:
    return st.builds(
        lambda pages, recent: Budget(pages * PAGE, recent=recent),
        st.integers(1, 4),
        st.integers(0, 9),
    )


def observed_rows() -> st.SearchStrategy[ObservationWindow]:
    return st.sampled_from(
        [
            NORMALIZED,
            HEAVY,
            ObservationWindow(last=8, accumulated=False),
            ObservationWindow(random=0.1),
            ObservationWindow(last=4, pooling=3),
            dataclasses.replace(NORMALIZED, slice_tokens=2 * PAGE),
            ObservationWindow(last=8, accumulated=False, slice_tokens=4 * PAGE),
            ObservationWindow(special=(3, 5), recent=0.1, normalized=True),
        ]
    )


# -- which rows are observed -----------------------------------------------------------
@given(
    observation=observed_rows(),
    prompt=st.integers(1, 400),
    cuts=st.lists(st.integers(1, 90), min_size=1, max_size=9),
)
def test_observed_rows_follow_from_the_sequence_alone(
    observation: ObservationWindow, prompt: int, cuts: list[int]
) -> None:
    plan = dataclasses.replace(
        ranked_plans(SHAPE, PAGE, PAGE)["divided"], observation=observation
    )
    tokens = np.random.default_rng(prompt).integers(0, 97, 1000).tolist()
    whole, end, pieces, found = (
        ObservedRows(plan, prompt).weights(tokens, 0, 1000),
        0,
        ObservedRows(plan, prompt),
        [],
    )
    for count in cuts:
        found.append(pieces.weights(tokens, end, end + count))
        end += count
    np.testing.assert_array_equal(np.concatenate(found), whole[:end])
    plain = whole.copy()
    plain[np.isin(tokens, observation.special)] = 0
    size = observation.slice_tokens or prompt
    slices = range(0, prompt, size)
    borders = [*slices, prompt, *range(prompt // PAGE * PAGE + PAGE, 1000, PAGE)]
    for start, stop in pairwise(borders):
        size = stop - start
        last = min(size, max(observation.last, round(observation.recent * size)))
        assert whole[stop - last : stop].all()
        if not observation.special:
            assert plain[start:stop].sum() == last + min(
                size - last, round(observation.random * size)
            )
    seen = ObservedRows(plan, prompt).seen(tokens, 300)
    assert seen.tolist() == [whole[i:300].sum() for i in range(300)]


# -- which tokens go where -------------------------------------------------------------
class Numbers(HostPages):
    """A session whose token at position i has K and V i / 8 everywhere, and whose rows
    attend at random: the same for a (lane, row, token), whatever the step."""

    def run(self, step: StepPlan) -> npt.NDArray[np.float32]:
        rows = np.repeat(step.positions[:, None] / 8, self.row_width, 1).astype(
            self.hot
        )
        self.append(step, rows)
        widths = [table.shape[1] * PAGE for table in step.page_tables]
        mass = np.zeros(
            (len(step.lengths), len(EVERY), sum(widths) + len(step.query_offsets)),
            np.float32,
        )
        for b, (start, stop) in enumerate(
            zip(step.cu_seqlens_q, step.cu_seqlens_q[1:], strict=False)
        ):
            for lane in EVERY:
                for row in range(start, stop):
                    if (
                        step.observation_weights is not None
                        and step.observation_weights[row]
                    ):
                        self.attend(step, b, lane, row, start, mass[b, lane], widths)
        self.page_scores.observe([(step, mass, 0)])
        return np.zeros((len(step.logit_rows), 97), np.float32)

    def attend(
        self,
        step: StepPlan,
        b: int,
        lane: int,
        row: int,
        start: int,
        mass: npt.NDArray,
        widths: list[int],
    ) -> None:
        at = 0
        for bucket, width in enumerate(widths):
            if lane in self.plan.buckets[bucket].lanes:
                held = self.positions(
                    bucket,
                    lane,
                    step.page_tables[bucket][b],
                    int(step.lengths[b, bucket]),
                )
                mass[at : at + len(held)] += attention(
                    lane, int(step.positions[row]), held
                )
            at += width
        mass[at : at + row - start + 1] += attention(
            lane, int(step.positions[row]), step.positions[start : row + 1]
        )

    def positions(
        self, bucket: int, lane: int, pages: Items[int], length: int
    ) -> npt.NDArray[np.int64]:
        """Of the tokens that a lane holds, read from its keys."""
        part = self.matrices[bucket][lane][0]
        found = [
            part.read(self.rows[bucket][page])[:, 0]
            for page in pages[: -(-length // PAGE)]
        ]
        return np.rint(np.concatenate([*found, np.zeros(0)])[:length] * 8).astype(
            np.int64
        )


def attention(lane: int, row: int, tokens: npt.NDArray) -> npt.NDArray[np.float32]:
    return noise(noise_key(lane, row), np.asarray(tokens), len(tokens), 1)[:, 0]


def exact(plan: CompressionPlan) -> CompressionPlan:
    """In formats that hold multiples of 1/8 exactly, so that tokens can be told apart
    in every bucket."""
    return dataclasses.replace(
        plan, tiers=(Tier(32, 32), Tier(32, 16), Tier(16, 32), Tier(16, 16))
    )


def expected(
    plan: CompressionPlan, prompt: int, total: int, seed: int
) -> list[dict[int, list[int]]]:
    """The positions that each lane of each bucket holds, simulated token by token in
    plain Python."""
    layout, page = CacheLayout(plan), plan.page_tokens
    assert plan.observation
    flags = ObservedRows(plan, prompt).weights(tokens_of(seed), 0, total)
    held: list[dict[int, list[int]]] = [
        {lane: [] for lane in bucket.lanes} for bucket in plan.buckets
    ]
    mass: defaultdict[tuple[int, int], float] = defaultdict(float)
    for n in range(1, total + 1):
        for b, bucket in enumerate(plan.buckets):
            for lane in bucket.lanes if bucket.source is None else ():
                held[b][lane].append(n - 1)
        for lane in EVERY if flags[n - 1] else ():
            known = sorted(i for places in held for i in places.get(lane, []))
            for i, value in zip(
                known, attention(lane, n - 1, np.array(known)), strict=True
            ):
                mass[lane, i] += float(value)
        if n < prompt and not slice_ends(plan, n):
            continue
        for f, fresh in enumerate(plan.buckets):
            if fresh.source is not None:
                continue
            for lane in fresh.lanes:
                _settled(plan, layout, held, mass, flags, f, lane, n)
            if not plan.observation.accumulated and (n == prompt or n % page == 0):
                mass = defaultdict(
                    float,
                    {
                        key: value
                        for key, value in mass.items()
                        if key[0] not in fresh.lanes
                    },
                )
    return held


def slice_ends(plan: CompressionPlan, tokens: int) -> bool:
    """Whether a slice of a prompt ends there."""
    return plan.prompt_step > 0 and tokens % plan.prompt_step == 0


def _settled(
    plan: CompressionPlan,
    layout: CacheLayout,
    held: list[dict[int, list[int]]],
    mass: dict[tuple[int, int], float],
    flags: npt.NDArray,
    f: int,
    lane: int,
    n: int,
) -> None:
    observation, cold = (
        plan.observation,
        [c for c in plan.cold(f) if lane in plan.buckets[c].lanes],
    )
    assert observation

    def order(tokens: list[int], newest: int) -> list[int]:
        scores = Scores(
            np.array([[mass[lane, i] for i in tokens]], np.float32),
            np.array([tokens], np.int32),
        )
        seen = flags[:n][::-1].cumsum()[::-1].astype(np.int64)
        key = noise_key(plan.seed, plan.lanes[lane].layer, plan.lanes[lane].head, 2)
        found = dict(
            zip(
                tokens,
                saliency(observation, scores, seen, [key])[0].tolist(),
                strict=True,
            )
        )
        forced = set(tokens[len(tokens) - newest :])
        return sorted(
            tokens, key=lambda i: (i not in forced, 0 if i in forced else -found[i], i)
        )

    if any(plan.buckets[c].tokens.divides for c in cold):
        _divide(layout, held, f, cold, lane, n, order(held[f][lane], 0))
        return
    for c in cold:
        full = len(held[f][lane]) // plan.page_tokens * plan.page_tokens
        held[c][lane] += held[f][lane][:full]
        del held[f][lane][:full]
    for b in cold or [f]:
        rule, tail = plan.buckets[b].tokens, 0 if cold else n % plan.page_tokens
        if len(held[b][lane]) > (most := rule.most + tail):
            held[b][lane] = sorted(order(held[b][lane], rule.newest + tail)[:most])


def _divide(
    layout: CacheLayout,
    held: list[dict[int, list[int]]],
    f: int,
    cold: list[int],
    lane: int,
    n: int,
    order: list[int],
) -> None:
    rules = [layout.plan.buckets[c].tokens for c in cold]
    shares = split_tokens([r.share for r in rules if isinstance(r, Share)], n)
    left: list[int] = []
    for c, count in zip(cold, shares, strict=True):
        own = order[: count - len(held[c][lane])]
        del order[: len(own)]
        full = count // PAGE * PAGE - len(held[c][lane])
        chosen = own[:full] if c != cold[-1] else own[len(own) - full :]
        left += [i for i in own if i not in chosen]
        held[c][lane] = held[c][lane] + sorted(chosen)
    held[f][lane] = sorted(left)


def tokens_of(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 97, 4096).tolist()


def sequence_of(engine: LLM, tokens: list[int], prompt: int) -> Sequence:
    observed_rows = ObservedRows(engine.plan, prompt)
    return Sequence(
        tokens,
        prompt,
        engine.pool.open(),
        engine.plan.prefill_chunk,
        Sampler(SamplingParams()),
        observed_rows=observed_rows,
    )


def engine_of(plan: CompressionPlan, session: Session, size: int) -> LLM:
    return LLM(session, plan, LIMITS, Tokenizer(MODEL), size)


@settings(max_examples=40)
@given(plan=plans(), seed=st.integers(0, 2**32 - 1))
def test_tokens_are_where_they_rank_under_any_schedule(
    plan: CompressionPlan, seed: int
) -> None:
    """Several sequences in steps of random chunks, swapped and failing in between:
    buckets hold what the rules say, in the order of age, and as many as the layout
    promises; so do pages and bytes."""
    plan, random = exact(plan), np.random.default_rng(seed)
    layout = CacheLayout(plan)
    size = 400 * max(layout.page_stride) * len(layout.page_stride)
    session = Numbers(layout, size)
    engine = engine_of(plan, session, size)
    lengths = [
        (int(random.integers(1, 150)), int(random.integers(0, 80)))
        for _ in range(random.integers(1, 4))
    ]
    live = [
        sequence_of(engine, tokens_of(i)[: sum(n)], n[0]) for i, n in enumerate(lengths)
    ]
    while any(s.cached < len(s.tokens) for s in live):
        going = [s for s in live if s.cached < len(s.tokens) and random.random() < 0.7]
        chunks = []
        for s in going:
            most = (
                s.prompt_tokens - s.cached
                if s.cached < s.prompt_tokens
                else engine.pool.steady(s.table)
            )
            count = min(int(random.integers(1, 60)), most, s.next_tokens(1000))
            chunks.append(
                Chunk(
                    s, count, engine.pool.reserve(s.table, count, s.seals_after(count))
                )
            )
        if not chunks:
            continue
        if random.random() < 0.2:
            fail(engine, session, chunks)
            continue
        engine.engine.run(chunks)
        if random.random() < 0.2:
            s = going[0]
            s.table = engine.pool.swap_in(
                engine.pool.swap_out(s.table, session), session
            )
    promised = 0
    for i, (s, n) in enumerate(zip(live, lengths, strict=True)):
        held = expected(plan, n[0], sum(n), i)
        for b, bucket in enumerate(plan.buckets):
            assert s.table.lengths[b] == layout.held(b, sum(n))
            for lane in bucket.lanes:
                found = session.positions(b, lane, s.table.pages[b], s.table.lengths[b])
                assert found.tolist() == held[b][lane]
        promised += layout.bytes_for(sum(n))
    assert engine.pool.bytes_in_use == promised
    for s in live:
        engine.pool.release(s.table)
    assert engine.pool.bytes_in_use == 0


def fail(engine: LLM, session: Numbers, chunks: list[Chunk]) -> None:
    """The step runs, then something breaks: everything is as before."""
    before = engine.pool.pages_in_use
    moves = [chunk.reservation.moves for chunk in chunks if chunk.reservation.moves]
    taken = sum(len(ids) for move in moves for ids in move.taken)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "seal", broken)
        patch.setattr(session, "move", broken)
        if any(move.seals or move.rankings for move in moves):
            with pytest.raises(RuntimeError, match="broken"):
                engine.engine.run(chunks)
        else:
            for chunk in chunks:
                engine.pool.rollback(chunk.reservation)
    assert sum(engine.pool.pages_in_use) == sum(before) - taken


def broken(*_: object) -> None:
    raise RuntimeError("broken")


@settings(max_examples=60)
@given(
    plan=plans(),
    prompt=st.integers(1, 200),
    more=st.integers(0, 150),
    chunk=st.sampled_from([16, 32, 200]),
)
def test_a_sequence_never_needs_more_pages_than_its_worst(
    plan: CompressionPlan, prompt: int, more: int, chunk: int
) -> None:
    layout = CacheLayout(plan)
    pool = PagePool(layout, 400 * max(layout.page_stride) * len(layout.page_stride))
    table, worst, done = pool.open(), pool.worst_pages(prompt + more, prompt), 0
    unknown = pool.worst_pages(prompt + more)
    assert all(known <= most for known, most in zip(worst, unknown, strict=True))
    while done < prompt + more:
        count = min(chunk, prompt - done) if done < prompt else 1
        if plan.prompt_step and done < prompt:
            count = min(count, plan.prompt_step - done % plan.prompt_step)
        settles = done + count >= prompt or slice_ends(plan, done + count)
        reservation = pool.reserve(table, count, settles)
        assert all(
            now <= most for now, most in zip(pool.pages_in_use, worst, strict=True)
        )
        pool.commit(reservation)
        done += count
        if done >= prompt:
            assert pool.bytes_in_use == layout.bytes_for(done)
            assert table.lengths == [
                layout.held(b, done) for b in range(len(plan.buckets))
            ]


# -- the shipped model -----------------------------------------------------------------
def own_llm(plan: CompressionPlan, size: int = 1 << 26) -> LLM:
    made = decoder_from(Checkpoint(MODEL), plan, Basis())
    return engine_of(plan, TorchSession(made, size), size)


@pytest.mark.parametrize("kind", RANKED)
def test_the_exported_engine_is_the_decoder(kind: str) -> None:
    ids, rows = list(text(420)), range(299, 420)
    found = [llm(backend, kind).logits(ids, rows, prompt=300) for backend in BACKENDS]
    assert (
        np.median(np.abs(found[0] - found[1])) < 1e-4
        and np.abs(found[0] - found[1]).max() < 0.3
    )


@pytest.mark.parametrize("kind", RANKED)
def test_answers_do_not_depend_on_company_or_arrival(kind: str) -> None:
    engine = llm("torch", kind)
    prompts = [
        list(text(n, 90 * n)) for n in (50, 250, 185)
    ]  # each fills a page with its answer
    params = SamplingParams(max_new_tokens=18, ignore_eos=True)
    alone = [engine.generate([prompt], params)[0].token_ids for prompt in prompts]
    together = [answer.token_ids for answer in engine.generate(prompts, params)]
    streams = [engine.stream(prompts[0], params), engine.stream(prompts[1], params)]
    for _ in range(9):
        next(streams[0])
    late = engine.generate([prompts[2]], params)[0].token_ids
    for stream in streams:
        for _ in stream:
            pass
    assert together == alone and late == alone[2]
    assert engine.pool.bytes_in_use == 0


def test_teacher_forcing_is_decoding() -> None:
    """Logits of a given text are those of the steps that would generate it."""
    engine = llm("torch", "divided")
    prompt = list(text(200))
    answer = engine.generate(
        [prompt], SamplingParams(max_new_tokens=80, ignore_eos=True)
    )[0].token_ids
    logits = engine.logits([*prompt, *answer], range(199, 279))
    assert logits.argmax(-1).tolist() == answer


def test_a_budget_for_everything_is_no_rule() -> None:
    shape = model_shape()
    every = tuple(range(shape.layers * shape.kv_heads))
    roomy = Bucket(0, every, None, Budget(1024))
    plan = plan_for(shape, (HOT,), (roomy,), observation=HEAVY)
    ids, rows = list(text(400)), range(199, 399)
    plain = llm("torch", "one").logits(ids, rows)
    assert np.abs(own_llm(plan).logits(ids, rows, prompt=200) - plain).max() < 1e-3


def test_one_share_of_everything_is_a_plain_tier() -> None:
    """Which tokens wait for a page differs, not what their format is: with a prompt of
    whole pages nothing waits."""
    shape = model_shape()
    every = tuple(range(shape.layers * shape.kv_heads))
    tier = dataclasses.replace(
        U8, axis_v="rank"
    )  # by token: where a token lies does not matter
    rule = Share(1.0)
    ranked = plan_for(
        shape,
        (HOT, tier),
        (Bucket(0, every), Bucket(1, every, 0, rule)),
        observation=NORMALIZED,
    )
    plain = plan_for(
        shape, (HOT, tier), (Bucket(0, every), Bucket(1, every, 0)), chunk=512
    )
    ids = list(text(330))
    engine = own_llm(plain)
    sequence = Sequence(ids, 320, engine.pool.open(), 512, Sampler(SamplingParams()))
    found = []
    for count in (
        320,
        10,
    ):  # a prompt that seals once, then a decode before the next page is full
        reservation = engine.pool.reserve(sequence.table, count, True)
        found.append(
            engine.engine.run([Chunk(sequence, count, reservation, range(count))])
        )
    logits = own_llm(ranked).logits(ids, range(319, 330), prompt=320)
    assert np.abs(logits[1:] - found[1]).max() < 1e-3


@pytest.mark.parametrize(
    "observation",
    [NORMALIZED, ObservationWindow(recent=1.0)],
    ids=["normalized", "accumulated"],
)
def test_the_ranking_agrees_with_the_attention_of_transformers(
    observation: ObservationWindow,
) -> None:
    """Salient tokens of every lane, from the attention probabilities of another
    implementation."""
    count, shape = 256, model_shape()
    plan = dataclasses.replace(ranked_plans(shape)["divided"], observation=observation)
    engine = own_llm(plan)
    ids = list(text(count))
    flags = ObservedRows(plan, count).weights(ids, 0, count)
    model = AutoModelForCausalLM.from_pretrained(
        MODEL, attn_implementation="eager", dtype=torch.float32
    )
    with torch.inference_mode():
        attended = model(torch.tensor([ids]), output_attentions=True).attentions
    sequence = sequence_of(engine, [*ids, 0], count)
    engine.engine.run(
        [Chunk(sequence, count, engine.pool.reserve(sequence.table, count, False))]
    )
    assert isinstance(engine.session, TokenRanker)
    scores = engine.session.scores(0, sequence.table.pages[0], count)
    found = saliency(observation, scores, ObservedRows(plan, count).seen(ids, count))
    for i, of_layer in enumerate(attended):
        by_lane = (
            of_layer[0].unflatten(0, (shape.kv_heads, -1)).sum(1).double().numpy()
        )  # [H, row, token]
        for h in range(shape.kv_heads):
            a = by_lane[h][flags > 0]
            nonzero = (np.flatnonzero(flags)[:, None] >= np.arange(count)).sum(0)
            score = a.sum(0) / (nonzero if observation.normalized else 1)
            np.testing.assert_allclose(
                found[i * shape.kv_heads + h], score, rtol=2e-3, atol=1e-6
            )
            ours, theirs = (
                set(np.argsort(-x)[:150])
                for x in (found[i * shape.kv_heads + h], score)
            )
            assert len(ours & theirs) >= 149


# -- what is refused -------------------------------------------------------------------
def test_sharing_and_forking_ranked_tokens_is_refused() -> None:
    pool = llm("torch", "divided").pool
    with pytest.raises(KvlatheError, match="cannot share prefixes: it ranks"):
        PrefixCache(pool)
    with pytest.raises(KvlatheError, match="cannot be forked"):
        pool.fork(pool.open())


def test_servers_share_where_the_plan_allows_it() -> None:
    for kind, shares in (("divided", False), ("one", True)):
        made = llm("torch", kind)
        served = LLM(
            made.session,
            made.plan,
            LIMITS,
            made.tokenizer,
            made.pool.arena_bytes,
            share_prefixes=None,
        )
        assert (served.engine.scheduler.prefixes is not None) == shares


def test_a_prompt_outside_the_text_is_refused() -> None:
    engine = llm("torch", "divided")
    for prompt in (0, 11):
        with pytest.raises(KvlatheError, match="a prompt of"):
            engine.logits(list(text(10)), [9], prompt=prompt)
    assert decoder("divided").plan.ranked
