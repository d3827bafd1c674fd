"""Engines that rank tokens, on the shipped model; what they refuse."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from kvlathe.base.errors import KvlatheError
from kvlathe.export.bases.basis import Basis
from kvlathe.export.folding.fold import decoder_from
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.plan.groups import Group
from kvlathe.plan.lives import SEAL, Budget, Divide
from kvlathe.plan.plan import CompressionPlan
from kvlathe.plan.token_score import ObservationWindow
from kvlathe.runtime.cache.observed_rows import ObservedRows
from kvlathe.runtime.cache.prefix import PrefixCache
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.scheduling.prompt import Whole
from kvlathe.runtime.scheduling.sequence import PrefillChunk, Sequence
from kvlathe.runtime.sessions.host.pages import HostPages
from kvlathe.runtime.sessions.host.saliency import saliency
from kvlathe.runtime.text.sampler import Sampler
from kvlathe.runtime.text.sampling_params import SamplingParams
from tests.support.nightly import rest_nightly
from tests.support.ranking_cases import (
    engine_of,
    sequence_of,
)
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


def own_llm(plan: CompressionPlan, size: int = 1 << 26) -> LLM:
    made = decoder_from(Checkpoint(MODEL), plan, Basis())
    return engine_of(plan, TorchSession(made, size), size)


@pytest.mark.parametrize("kind", rest_nightly(RANKED, "sealed budget"))
def test_the_exported_engine_is_the_decoder(kind: str) -> None:
    ids, rows = list(text(420)), range(299, 420)
    found = [llm(backend, kind).logits(ids, rows, prompt=300) for backend in BACKENDS]
    assert (
        np.median(np.abs(found[0] - found[1])) < 1e-4
        and np.abs(found[0] - found[1]).max() < 0.3
    )


@pytest.mark.parametrize("kind", rest_nightly(RANKED, "sealed budget"))
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
    roomy = Group(every, HOT, life=Budget(1024))
    plan = plan_for(shape, (roomy,), score=HEAVY)
    ids, rows = list(text(400)), range(199, 399)
    plain = llm("torch", "one").logits(ids, rows)
    assert np.abs(own_llm(plan).logits(ids, rows, prompt=200) - plain).max() < 1e-3


def test_one_share_of_everything_is_a_plain_tier() -> None:
    """The tokens that wait for a page differ, their format does not: with a prompt of
    whole pages nothing waits."""
    shape = model_shape()
    every = tuple(range(shape.layers * shape.kv_heads))
    tier = dataclasses.replace(
        U8, axis_v="rank"
    )  # by token: where a token lies does not matter
    divided = Group(every, HOT, (tier,), Divide((1.0,)))
    ranked = plan_for(shape, (divided,), score=NORMALIZED)
    plain = plan_for(shape, (Group(every, HOT, (tier,), SEAL),), chunk=512)
    ids = list(text(330))
    engine = own_llm(plain)
    sequence = Sequence(
        ids, 320, engine.pool.open(), Whole.cut(320, 512), Sampler(SamplingParams())
    )
    found = []
    for count in (
        320,
        10,
    ):  # a prompt that seals once, then a decode before the next page is full
        reservation = engine.pool.reserve(sequence.table, count, True)
        found.append(
            engine.engine.run(
                [PrefillChunk(sequence, count, reservation, range(count))]
            )
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
    plan = dataclasses.replace(ranked_plans(shape)["divided"], score=observation)
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
        [
            PrefillChunk(
                sequence, count, engine.pool.reserve(sequence.table, count, False)
            )
        ]
    )
    assert isinstance(engine.session, HostPages)
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
    assert decoder("divided").plan.index.ranked
