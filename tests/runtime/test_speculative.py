"""Laws of speculation on the shipped small model: an answer is what it is without guesses,
to the token, whatever it asks for and whoever is beside it."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest

from kvlathe.base.errors import KvlatheError
from kvlathe.runtime.async_engine import AsyncEngine
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.requests.answer import Answer
from kvlathe.runtime.scheduling.parts.speculation import Speculation
from kvlathe.runtime.text.sampling_params import SamplingParams
from kvlathe.runtime.text.structure import Structure
from kvlathe.server.answers import Answerer
from kvlathe.server.metrics import State
from kvlathe.server.schema import CompletionRequest
from tests.support.drafts import whatever_is_guessed
from tests.support.fake_session import SamplesThere
from tests.support.runtime_cases import RANKED, llm, model_shape, plans, text

AGAIN = [*text(40), *text(60, 300), *text(40)]
"""Its end was there before."""
ASKED = [
    SamplingParams(max_new_tokens=40, logprobs=2),
    SamplingParams(max_new_tokens=24, temperature=0.7, top_p=0.9, seed=5, logprobs=1),
    SamplingParams(max_new_tokens=24, temperature=0.3, top_k=20, seed=6, min_p=0.02),
    SamplingParams(max_new_tokens=24, repetition_penalty=1.1, frequency_penalty=0.1),
    SamplingParams(
        max_new_tokens=24, logit_bias=((7, 2.0), (9, -3.0)), ignore_eos=True
    ),
    SamplingParams(max_new_tokens=12, ignore_eos=True),
]


def guessing(engine: LLM) -> Speculation:
    """The engine speculates now, and tries whatever is guessed."""
    engine.speculate("ngram", 5)
    return whatever_is_guessed(engine.engine.scheduler.speculation)


def alike(plain: list[Answer], guessed: list[Answer]) -> None:
    for one, other in zip(plain, guessed, strict=True):
        assert other.token_ids == one.token_ids
        assert (other.text, other.finish_reason) == (one.text, one.finish_reason)
        if one.logprobs is None or other.logprobs is None:
            assert one.logprobs == other.logprobs
            continue
        for a, b in zip(one.logprobs, other.logprobs, strict=True):
            assert a.token_id == b.token_id
            assert a.logprob == pytest.approx(b.logprob, abs=2e-2)


SEALED = pytest.param("sealed", marks=pytest.mark.nightly)
SPLIT = pytest.param("sealed split", marks=pytest.mark.nightly)


@pytest.mark.parametrize("kind", ["coded", "sealed windows", SEALED, SPLIT])
def test_answers_are_what_they_are_without_guesses(kind: str) -> None:
    """A batch of all that can be asked for, beside a prompt that is computed in chunks."""
    engine = llm("torch", kind)
    long = SamplingParams(max_new_tokens=8)
    prompts = [AGAIN[i:] for i in range(len(ASKED))] + [list(text(250, 900))]
    plain = engine.generate(prompts, [*ASKED, long])
    made = guessing(engine)
    guessed = engine.generate(prompts, [*ASKED, long])
    alike(plain, guessed)
    assert made.accepted > 20
    assert sum(one.accepted for one in guessed) == made.accepted
    assert engine.pool.bytes_in_use == 0


@pytest.mark.nightly
@pytest.mark.parametrize("kind", sorted({*plans(model_shape())} - {*RANKED, "mixed"}))
def test_a_hundred_random_prompts_are_answered_as_without_guesses(kind: str) -> None:
    """Of every plan that may speculate. An answer may part where the two likeliest tokens
    are as close as the rounding of steps of other shapes."""
    random = np.random.default_rng(7)
    prompts: list[list[int]] = []
    for _ in range(100):
        start, length = random.integers(0, 3000), random.integers(2, 260)
        once = list(text(int(length), int(start)))
        prompts.append([*once, *text(30, int(start)), *once][: int(length) + 40])
    params = [
        SamplingParams(
            max_new_tokens=int(random.integers(4, 40)),
            temperature=0.8 * (i % 3 == 0),
            seed=i,
            logprobs=2,
        )
        for i in range(100)
    ]
    engine = llm("torch", kind)
    plain = engine.generate(prompts, params)
    made = guessing(engine)
    guessed = engine.generate(prompts, params)
    parted = [
        (one, other, own)
        for one, other, own in zip(plain, guessed, params, strict=True)
        if one.token_ids != other.token_ids
    ]
    assert len(parted) <= 2
    for one, other, own in parted:
        if own.temperature:
            continue  # its draw lay at a border, which no logprob shows
        both = zip(one.token_ids, other.token_ids, strict=False)
        at = next(i for i, (a, b) in enumerate(both) if a != b)
        assert one.logprobs is not None
        (_, likeliest), (_, second) = one.logprobs[at].top[:2]
        assert likeliest - second < 1e-3
    assert made.accepted > 100
    assert engine.pool.bytes_in_use == 0


def test_stops_streams_and_shared_prefixes() -> None:
    engine = llm("torch", "one")
    plain = engine.generate([AGAIN], ASKED[0])[0]
    made = guessing(engine)
    middle = plain.text[len(plain.text) // 2 :][:6]
    stopping = dataclasses.replace(ASKED[0], stop=middle)
    stopped = engine.generate([AGAIN], stopping)[0]
    assert stopped.finish_reason == "stop"
    assert stopped.text == plain.text[: plain.text.index(middle)]
    assert "".join(engine.stream(AGAIN, ASKED[0])) == plain.text
    ended = dataclasses.replace(ASKED[0], stop_ids=[plain.token_ids[20]])
    cut = engine.generate([AGAIN], ended)[0]
    assert (
        cut.token_ids
        == plain.token_ids[: plain.token_ids.index(plain.token_ids[20]) + 1]
    )
    assert made.accepted > 20
    assert engine.pool.bytes_in_use == 0


def test_the_server_says_what_was_guessed() -> None:
    engine = llm("torch", "one")
    made = guessing(engine)
    with AsyncEngine(engine) as served:
        answerer = Answerer(served, "m")
        asked = {"model": "m", "prompt": [AGAIN, AGAIN], "max_tokens": 30}
        request = CompletionRequest.model_validate(asked | {"temperature": 0})
        job = asyncio.run(answerer.job(request))
        reply = asyncio.run(answerer.whole(job, ""))
        counts = {f.name: f.samples[0].value for f in State(served, "m").collect()}
    details = reply["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == made.accepted > 10
    assert sum(details.values()) == made.drafted
    prefix = "kvlathe_spec_decode_num"
    assert counts[f"{prefix}_drafts"] == made.drafts
    assert counts[f"{prefix}_draft_tokens"] == made.drafted
    assert counts[f"{prefix}_accepted_tokens"] == made.accepted


@pytest.mark.parametrize("on_device", [False, True])
def test_structured_answers_are_what_they_are_without_guesses(on_device: bool) -> None:
    """Guesses that a structure forbids are not tried, and rows behind guesses have masks
    of their own."""
    pytest.importorskip("llguidance")
    engine = llm("torch", "sealed")
    ends = {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 20}
    held = [
        SamplingParams(max_new_tokens=40, structure=Structure.regex("(ab|cd){4,}")),
        SamplingParams(max_new_tokens=40, structure=Structure.json(ends), logprobs=1),
        SamplingParams(
            max_new_tokens=40,
            temperature=0.8,
            seed=4,
            presence_penalty=0.1,
            structure=Structure.regex("([0-9]{1,2}, )+"),
        ),
        SamplingParams(max_new_tokens=40, min_tokens=35),
        ASKED[0],
    ]
    prompts = [AGAIN] * len(held)
    plain = engine.generate(prompts, held)
    if on_device:
        engine.engine.session = SamplesThere(engine.session)
    guessing(engine)
    guessed = engine.generate(prompts, held)
    alike(plain, guessed)
    assert min(answer.accepted for answer in guessed) > 5


@pytest.mark.parametrize("kind", RANKED)
def test_plans_that_rank_tokens_are_refused(kind: str) -> None:
    with pytest.raises(KvlatheError, match="cannot speculate: its plan ranks tokens"):
        llm("torch", kind).speculate()


def test_speculation_without_guesses_is_refused() -> None:
    engine = llm("torch", "one")
    with pytest.raises(KvlatheError, match="num_speculative_tokens is 0"):
        engine.speculate(num_speculative_tokens=0)
