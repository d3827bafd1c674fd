"""The HTTP server's answers, as the official OpenAI client sees them."""

from __future__ import annotations

import re
from typing import Any

import httpx2 as httpx
import numpy as np
import openai
import pytest

from tests.support.runtime_cases import llm
from tests.support.serving_cases import (
    MODEL_NAME,
    PROMPT,
    Served,
    alone,
)

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def test_a_completion_is_the_engines_answer(client: openai.OpenAI) -> None:
    found = client.completions.create(
        model=MODEL_NAME, prompt=PROMPT, max_tokens=24, temperature=0
    )
    expected = alone(PROMPT, max_new_tokens=24)
    assert (
        found.choices[0].text == expected.text
        and found.choices[0].finish_reason == "length"
    )
    assert found.usage and found.usage.prompt_tokens == expected.prompt_tokens
    assert found.usage.completion_tokens == 24 and found.object == "text_completion"


def test_a_stream_is_the_same_in_pieces_with_usage_at_the_end(
    client: openai.OpenAI,
) -> None:
    chunks = list(
        client.completions.create(
            model=MODEL_NAME,
            prompt=PROMPT,
            max_tokens=24,
            temperature=0.8,
            seed=3,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    expected = alone(PROMPT, max_new_tokens=24, temperature=0.8, seed=3)
    assert (
        "".join(choice.text for chunk in chunks for choice in chunk.choices)
        == expected.text
    )
    assert [
        c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason
    ] == ["length"]
    assert (
        not chunks[-1].choices
        and chunks[-1].usage
        and chunks[-1].usage.completion_tokens == 24
    )
    assert len({chunk.id for chunk in chunks}) == 1 and len(chunks) > 5


def test_several_prompts_and_choices_are_numbered_prompt_by_prompt(
    client: openai.OpenAI,
) -> None:
    prompts = [PROMPT, "# Install\n"]
    found = client.completions.create(
        model=MODEL_NAME,
        prompt=prompts,
        n=3,
        max_tokens=6,
        temperature=1,
        seed=-1,
        extra_body={"ignore_eos": True},
    )
    assert [choice.index for choice in found.choices] == list(range(6))
    for choice in found.choices:
        seed = (2**64 - 1 + choice.index % 3) % 2**64
        expected = alone(
            prompts[choice.index // 3],
            max_new_tokens=6,
            temperature=1,
            seed=seed,
            ignore_eos=True,
        )
        assert choice.text == expected.text


def test_token_ids_are_a_prompt_too(client: openai.OpenAI, served: Served) -> None:
    ids = served.llm.tokenizer.encode(PROMPT)
    each: Any = (ids, [ids])
    for prompt in each:
        found = client.completions.create(
            model=MODEL_NAME, prompt=prompt, max_tokens=5, temperature=0
        )
        assert found.choices[0].text == alone(PROMPT, max_new_tokens=5).text


def test_stop_strings_and_stop_tokens_end_the_text(client: openai.OpenAI) -> None:
    whole = alone(PROMPT, max_new_tokens=40, ignore_eos=True)
    stop = whole.text[20:23]
    found = client.completions.create(
        model=MODEL_NAME,
        prompt=PROMPT,
        max_tokens=40,
        temperature=0,
        stop=[stop, "zzz"],
    )
    assert (
        found.choices[0].text == whole.text[: whole.text.index(stop)]
        and found.choices[0].finish_reason == "stop"
    )
    body = {"stop_token_ids": [whole.token_ids[3]]}
    found = client.completions.create(
        model=MODEL_NAME, prompt=PROMPT, max_tokens=40, temperature=0, extra_body=body
    )
    assert (
        found.usage
        and found.usage.completion_tokens
        == whole.token_ids.index(whole.token_ids[3]) + 1
    )


def test_logprobs_of_an_echoed_prompt_are_those_of_the_engine(
    client: openai.OpenAI, served: Served
) -> None:
    found = client.completions.create(
        model=MODEL_NAME,
        prompt=PROMPT,
        max_tokens=4,
        temperature=0,
        logprobs=2,
        echo=True,
    )
    choice, expected = found.choices[0], alone(PROMPT, max_new_tokens=4, logprobs=2)
    assert choice.text == PROMPT + expected.text and choice.logprobs
    report = choice.logprobs
    assert (
        report.token_logprobs
        and report.tokens
        and report.text_offset
        and report.top_logprobs
    )
    assert "".join(report.tokens) == choice.text and report.token_logprobs[0] is None
    assert all(
        choice.text[at:].startswith(token)
        for at, token in zip(report.text_offset, report.tokens, strict=True)
    )
    assert report.token_logprobs[-4:] == pytest.approx(
        [entry.logprob for entry in expected.logprobs], abs=1e-3
    )
    assert all(len(top) in (2, 3) for top in report.top_logprobs[1:])
    ids = served.llm.tokenizer.encode(PROMPT)
    logits = llm("torch", "split").logits(ids, range(len(ids) - 1)).astype(np.float64)
    scores = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    assert report.token_logprobs[1 : len(ids)] == pytest.approx(
        scores[range(len(ids) - 1), ids[1:]].tolist(), abs=1e-3
    )
    scored = client.completions.create(
        model=MODEL_NAME, prompt=PROMPT, max_tokens=0, logprobs=1, echo=True
    )
    assert scored.choices[0].text == PROMPT and scored.choices[0].logprobs
    assert scored.choices[0].logprobs.token_logprobs == pytest.approx(
        report.token_logprobs[: len(ids)], abs=1e-3
    )


@pytest.mark.parametrize("as_ids", [False, True])
def test_characters_of_several_tokens_are_reported_whole(
    client: openai.OpenAI, served: Served, as_ids: bool
) -> None:
    """A character may be split over tokens: these are shown as bytes, and offsets count
    characters of the text."""
    text, ids = "日本 naïve 🎉!", served.llm.tokenizer.encode("日本 naïve 🎉!")
    found = client.completions.create(
        model=MODEL_NAME,
        prompt=ids if as_ids else text,
        max_tokens=0,
        logprobs=20,
        echo=True,
    )
    report = found.choices[0].logprobs
    assert (
        found.choices[0].text == text
        and report
        and report.tokens
        and report.text_offset
        and report.top_logprobs
    )
    shown = [
        bytes.fromhex(token[6:].replace("\\x", ""))
        if token.startswith("bytes:")
        else token.encode()
        for token in report.tokens
    ]
    assert b"".join(shown) == text.encode() and any(
        token.startswith("bytes:") for token in report.tokens
    )
    begun = [
        len(b"".join(shown[:i]).decode(errors="ignore")) for i in range(len(shown))
    ]
    assert report.text_offset == begun
    assert all(
        len(top) >= 20 for top in report.top_logprobs[1:]
    )  # none of them hides another


def test_a_prompt_is_echoed_as_it_was_sent(client: openai.OpenAI) -> None:
    text = "a<|endoftext|>b"
    found = client.completions.create(
        model=MODEL_NAME, prompt=text, max_tokens=0, logprobs=0, echo=True
    ).choices[0]
    assert (
        found.text == text
        and found.logprobs
        and found.logprobs.text_offset == [0, 1, 14]
    )


def test_bytes_of_a_chats_tokens_make_up_its_text(
    client: openai.OpenAI, served: Served
) -> None:
    ids = served.llm.tokenizer.encode("日本語é🎉")
    found = client.chat.completions.create(
        model=MODEL_NAME,
        messages=[{"role": "user", "content": "a"}],
        max_tokens=24,
        seed=1,
        logprobs=True,
        logit_bias={str(token): 100 for token in ids},
    ).choices[0]
    assert found.logprobs and found.logprobs.content
    whole = b"".join(bytes(entry.bytes or ()) for entry in found.logprobs.content)
    assert (
        whole.decode(errors="replace") == found.message.content and not whole.isascii()
    )


def test_penalties_and_biases_reach_the_sampler(
    client: openai.OpenAI, served: Served
) -> None:
    plain = alone("def main():", max_new_tokens=20, ignore_eos=True)
    again = client.completions.create(
        model=MODEL_NAME,
        prompt="def main():",
        max_tokens=20,
        temperature=0,
        frequency_penalty=2,
        presence_penalty=2,
        extra_body={"ignore_eos": True},
    )
    assert (
        len(set(plain.token_ids))
        < 10
        < len(set(served.llm.tokenizer.encode(again.choices[0].text)))
    )
    biased = client.completions.create(
        model=MODEL_NAME,
        prompt=PROMPT,
        max_tokens=3,
        temperature=0,
        logit_bias={"17": 100},
    )
    assert (
        served.llm.tokenizer.encode(biased.choices[0].text, add_special_tokens=False)
        == [17] * 3
    )


def test_chats_go_through_the_template(client: openai.OpenAI) -> None:
    messages: Any = [
        {"role": "system", "content": "be brief"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "hel"},
                {"type": "text", "text": "lo"},
            ],
        },
    ]
    found = client.chat.completions.create(
        model=MODEL_NAME,
        messages=messages,
        max_completion_tokens=8,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    expected = alone("<system>be brief\n<user>hello\n<assistant>", max_new_tokens=8)
    choice = found.choices[0]
    assert (
        choice.message.content == expected.text and choice.message.role == "assistant"
    )
    assert choice.logprobs and choice.logprobs.content
    assert "".join(entry.token for entry in choice.logprobs.content) == expected.text
    assert all(
        len(entry.top_logprobs) == 2 and entry.bytes
        for entry in choice.logprobs.content
    )
    chunks = list(
        client.chat.completions.create(
            model=MODEL_NAME,
            messages=messages,
            max_tokens=8,
            temperature=0,
            stream=True,
            n=2,
        )
    )
    deltas = [
        choice for chunk in chunks for choice in chunk.choices if choice.index == 1
    ]
    assert deltas[0].delta.role == "assistant" and deltas[-1].finish_reason == "length"
    assert "".join(choice.delta.content or "" for choice in deltas) == expected.text


def test_models_health_metrics_and_documentation(
    client: openai.OpenAI, served: Served
) -> None:
    assert [model.id for model in client.models.list()] == [MODEL_NAME]
    assert client.models.retrieve(MODEL_NAME).owned_by == "kvlathe"
    assert httpx.get(f"{served.url}/health").json() == {"status": "ok"}
    assert (
        "/v1/chat/completions"
        in httpx.get(f"{served.url}/openapi.json").json()["paths"]
    )
    said = httpx.get(f"{served.url}/metrics").text
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prefix_cache_hits_total",
        "prefix_cache_queries_total",
        "num_preemptions_total",
        "prompt_tokens_total",
        "generation_tokens_total",
        "time_to_first_token_seconds_bucket",
        "time_per_output_token_seconds_bucket",
        "e2e_request_latency_seconds_bucket",
        "kv_cache_bytes_saved",
    ):
        assert re.search(
            rf'^kvlathe_{name}{{.*model_name="lathe-5m".*}} [\d.-]', said, re.MULTILINE
        ), name
