"""Structured answers of whole engines: what they are, in any company, ahead of time or
not."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kvlathe.base.errors import KvlatheError
from kvlathe.runtime.async_engine import AsyncEngine
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.requests.running import resumed, running_of
from kvlathe.runtime.text.guide import Guides, StructureError
from kvlathe.runtime.text.sampling_params import SamplingParams
from kvlathe.runtime.text.structure import Structure
from kvlathe.runtime.text.tokenizer import Tokenizer
from tests.support.fake_session import SamplesThere
from tests.support.nightly import rest_nightly
from tests.support.runtime_cases import llm, text

pytest.importorskip("llguidance", reason="llguidance is not installed")
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        "of": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/place"}]},
    },
    "required": ["name", "age", "tags", "of"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"at": {"type": "boolean"}},
            "required": ["at"],
            "additionalProperties": False,
        }
    },
}
JSON = Structure.json(PERSON)
CODE = Structure.regex(r"[A-Z]{2}-[0-9]{3,5}")


def ahead(engine: LLM) -> LLM:
    """Steps run ahead of their tokens, as on a GPU."""
    engine.engine.session = SamplesThere(engine.session)
    return engine


def mixed() -> tuple[list[list[int]], list[SamplingParams]]:
    """Structured and plain requests."""
    plain = SamplingParams(max_new_tokens=30, temperature=0.9, seed=4, ignore_eos=True)
    asked = [
        SamplingParams(max_new_tokens=120, structure=JSON),
        plain,
        SamplingParams(max_new_tokens=120, structure=JSON, temperature=1.2, seed=2),
        SamplingParams(max_new_tokens=20, structure=CODE, temperature=1.0, seed=3),
        dataclasses.replace(plain, repetition_penalty=1.2),
        SamplingParams(
            max_new_tokens=90,
            structure=JSON,
            temperature=0.8,
            top_p=0.9,
            seed=8,
            logprobs=2,
            frequency_penalty=0.5,
            logit_bias=((5, 3.0),),
        ),
    ]
    return [list(text(20 + 9 * i, 31 * i)) for i in range(len(asked))], asked


@pytest.mark.parametrize("runs_ahead", rest_nightly([False, True], True))
def test_structured_and_plain_requests_answer_together_as_alone(
    runs_ahead: bool,
) -> None:
    prompts, asked = mixed()
    with llm("torch", "split") as engine:
        alone = [
            engine.generate([p], a)[0] for p, a in zip(prompts, asked, strict=True)
        ]
        if runs_ahead:
            ahead(engine)
        together = engine.generate(prompts, asked)
        assert engine.pool.bytes_in_use == 0
    for own, found, params in zip(alone, together, asked, strict=True):
        assert found.token_ids == own.token_ids and found.text == own.text
        if params.structure == JSON and found.finish_reason == "stop":
            jsonschema.validate(json.loads(found.text), PERSON)
        if params.structure == CODE:
            assert re.fullmatch(CODE.text, found.text)
    reported = together[-1].logprobs
    assert reported and len(reported) == len(together[-1].token_ids)


@pytest.mark.parametrize("runs_ahead", rest_nightly([False, True], True))
def test_a_bounded_schema_always_gives_valid_json(runs_ahead: bool) -> None:
    with llm("torch", "one") as engine:
        if runs_ahead:
            ahead(engine)
        asked = [
            SamplingParams(max_new_tokens=300, structure=JSON, temperature=t, seed=i)
            for i, t in enumerate((0.0, 0.7, 1.0, 1.5, 3.0, 9.0))
        ]
        answers = engine.generate(["A person:\n"] * len(asked), asked)
    for answer in answers:
        assert answer.finish_reason == "stop"
        jsonschema.validate(json.loads(answer.text), PERSON)


def test_structured_answers_take_a_step_a_token_also_ahead_of_their_tokens() -> None:
    with llm("torch", "one") as engine:
        params = SamplingParams(max_new_tokens=60, structure=CODE)
        count = len(engine.generate(["Code: "], params)[0].token_ids)
        ahead(engine)
        sequence = engine.sequence(engine.encode("Code: "), params)
        engine.engine.scheduler.add(sequence)
        steps = 0
        while not sequence.finish_reason:
            engine.engine.step()
            steps += 1
    assert sequence.answered == count and steps == count + 1


def test_several_answers_of_one_prompt_have_guides_of_their_own() -> None:
    seen: dict[int, str] = {}
    with AsyncEngine(llm("torch", "one")) as engine:
        params = SamplingParams(structure=CODE, temperature=1.0, seed=1)
        request = engine.submit([list(text(40))], params, lambda delta: None, n=4)
        assert request.done.wait(60)
        for i, sequence in enumerate(request.sequences):
            seen[i] = sequence.text.text if sequence.text else ""
    assert len(set(seen.values())) > 1
    assert all(re.fullmatch(CODE.text, found) for found in seen.values())


def test_a_stop_string_ends_a_structured_answer_early() -> None:
    with llm("torch", "one") as engine:
        params = SamplingParams(structure=CODE, stop="-")
        answer = engine.generate(["Code: "], params)[0]
    assert re.fullmatch("[A-Z]{2}", answer.text) and answer.finish_reason == "stop"


def test_a_structured_sequence_goes_on_elsewhere_as_it_would_have_here() -> None:
    """Its guide is at the same place once its tokens are told."""
    params = SamplingParams(structure=JSON, temperature=1.0, seed=5, max_new_tokens=200)
    prompt = list(text(70))
    with llm("torch", "one") as source, llm("torch", "one") as target:
        expected = source.generate([prompt], params)[0]
        sequence = source.sequence(prompt, params)
        for token in expected.token_ids[:6]:
            sequence.accept(token, None)
        sequence.sampler.drawn = 6
        running = running_of(sequence)

        class Parcel:
            tokens, cached = sequence.tokens, 0

        parcel: Any = Parcel()
        parcel.running = running
        found = resumed(target._sequences, parcel, b"")
        found.cached = 0
        assert found.params == params
        request = target.thread.submit([found])
        target.thread.wait(request)
    assert found.answer == expected.token_ids


def test_an_ambiguous_grammar_ends_its_own_request_alone() -> None:
    rules = 'start: a\na: a a a | a a | "a" | "b" | "c" | " " |'
    asked = [
        SamplingParams(max_new_tokens=300, structure=Structure.grammar(rules)),
        SamplingParams(max_new_tokens=12, ignore_eos=True),
    ]
    prompt = list(text(30))
    with llm("torch", "one") as engine:
        expected = engine.generate([prompt], asked[1])[0].token_ids
        sequences = [engine.sequence(list(prompt), each) for each in asked]
        request = engine.thread.submit(sequences, lambda delta: None)
        assert request.done.wait(120)
        assert sequences[1].answer == expected
        assert sequences[0].finish_reason in ("error", "length", "stop")
        if sequences[0].error:
            assert isinstance(sequences[0].error, StructureError)
        assert engine.pool.bytes_in_use == 0


def test_an_engine_without_a_tokenizer_refuses_structures(tmp_path: Path) -> None:
    with llm("torch", "one") as engine:
        vocabulary = engine.plan.model.vocab_size
        engine._sequences.guides = Guides(Tokenizer(tmp_path), vocabulary)
        params = SamplingParams(structure=JSON)
        with pytest.raises(KvlatheError, match="tokenizer"):
            engine.generate([list(text(5))], params)
