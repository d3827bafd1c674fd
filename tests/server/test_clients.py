"""Fields and paths that clients of OpenAI and vLLM use beside the main ones."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx2 as httpx
import pytest

from kvlathe.runtime.cache.prefix import PrefixCache
from tests.support.runtime_cases import llm, text
from tests.support.serving_cases import KEY, Served, alone, post, serving

pytestmark = pytest.mark.usefixtures("nothing_is_left")
HEADERS = {"Authorization": f"Bearer {KEY}"}
TURNS = [{"role": "user", "content": "a"}]
Json = dict[str, Any]


def test_a_prompt_that_comes_again_says_how_much_of_it_was_cached() -> None:
    """By the prefix cache's own count."""
    engine = llm("torch", "one")
    prefixes = engine.engine.scheduler.prefixes = PrefixCache(engine.pool)
    asked: Json = {"prompt": [*text(600)], "max_tokens": 2}
    with serving(engine, keys=[KEY]) as found:
        for n in (1, 1, 3):
            before = prefixes.hits
            usage = post(found, "completions", n=n, **asked).json()["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert cached == prefixes.hits - before
            assert usage["prompt_tokens"] == 600
        assert cached > 0


def test_top_p_0_takes_the_likeliest(served: Served) -> None:
    found = post(served, "completions", prompt="def", max_tokens=9, top_p=0)
    expected = alone("def", max_new_tokens=9)
    assert found.json()["choices"][0]["text"] == expected.text


@pytest.mark.parametrize("always", [True, False])
def test_usage_in_every_chunk_counts_up_to_the_last(
    served: Served, always: bool
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": always}
    found = post(
        served,
        "completions",
        prompt="def",
        max_tokens=5,
        stream=True,
        stream_options=options,
    )
    lines = [x.removeprefix("data: ") for x in found.text.splitlines() if x]
    chunks = [json.loads(line) for line in lines[:-1]]
    counts = [one["usage"] and one["usage"]["completion_tokens"] for one in chunks]
    assert counts[-1] == 5 and not chunks[-1]["choices"]
    if always:
        assert counts == sorted(counts) and counts[0] == 1
    else:
        assert set(counts[:-1]) == {None}


def test_special_tokens_are_in_the_text_where_they_are_asked_for(
    served: Served,
) -> None:
    tokenizer = served.llm.tokenizer
    token, name = next(iter(tokenizer.special_names.items()), (0, ""))
    if not name:
        pytest.skip("this tokenizer has no special token but the end")
    for skip in (True, False):
        found = post(
            served,
            "completions",
            prompt="a",
            max_tokens=1,
            logit_bias={str(token): 100},
            skip_special_tokens=skip,
        )
        assert found.json()["choices"][0]["text"] == ("" if skip else name)


def chat(served: Served, template: str, **fields: Any) -> httpx.Response:  # noqa: ANN401
    """A chat by another template."""
    kept = served.llm.tokenizer.chat_template
    served.llm.tokenizer.chat_template = template
    try:
        asked: Json = {"messages": TURNS, "max_tokens": 4, "temperature": 0, **fields}
        return post(served, "chat/completions", **asked)
    finally:
        served.llm.tokenizer.chat_template = kept


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}brief{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SAID = {"role": "assistant", "content": "def "}


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, "<user>a</><assistant>"),
        (
            {"chat_template_kwargs": {"enable_thinking": False}},
            "<user>a</>brief<assistant>",
        ),
        ({"add_generation_prompt": False}, "<user>a</>"),
        (
            {
                "messages": [*TURNS, SAID],
                "add_generation_prompt": False,
                "continue_final_message": True,
            },
            "<user>a</><assistant>def ",
        ),
    ],
)
def test_chats_begin_as_the_request_says(
    served: Served, fields: Json, prompt: str
) -> None:
    found = chat(served, TEMPLATE, **fields)
    assert found.status_code == 200, found.text
    expected = alone(prompt, max_new_tokens=4).text
    assert found.json()["choices"][0]["message"]["content"] == expected


@pytest.mark.parametrize("known", [True, False])
def test_developers_are_heard_as_the_system_where_a_template_knows_none(
    served: Served, known: bool
) -> None:
    template = "{{ messages[0].role }}: {{ messages[0].content }}"
    turns = [{"role": "developer", "content": "a"}]
    found = chat(served, template + "{# developer #}" * known, messages=turns)
    prompt = "developer: a" if known else "system: a"
    expected = alone(prompt, max_new_tokens=4).text
    assert found.json()["choices"][0]["message"]["content"] == expected


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"continue_final_message": True}, 400, "add_generation_prompt"),
        ({"chat_template_kwargs": {"messages": []}}, 400, "messages is no value"),
        ({"chat_template_kwargs": {"a b": 1}}, 400, "a b is no value"),
    ],
)
def test_chats_that_would_lose_something_are_refused(
    served: Served, fields: Json, status: int, words: str
) -> None:
    template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    found = chat(served, template, **fields)
    assert found.status_code == status
    assert re.search(words, found.text)


def test_tokens_of_a_text_come_and_go(served: Served) -> None:
    url, tokenizer = served.url, served.llm.tokenizer
    said = "naïve 日本"
    asked: Json = {"prompt": said, "return_token_strs": True}
    found = httpx.post(f"{url}/tokenize", json=asked, headers=HEADERS).json()
    ids = tokenizer.encode(said)
    assert found["tokens"] == ids and found["count"] == len(ids)
    assert found["max_model_len"] == served.llm.most_tokens
    assert [*map(tokenizer.backend.token_to_id, found["token_strs"])] == ids
    back = httpx.post(f"{url}/detokenize", json={"tokens": ids}, headers=HEADERS)
    assert back.json() == {"prompt": said}
    framed = httpx.post(f"{url}/tokenize", json={"messages": TURNS}, headers=HEADERS)
    prompt = tokenizer.encode(tokenizer.chat_prompt(TURNS), add_special_tokens=False)
    assert framed.json()["tokens"] == prompt
    for path, body in (("tokenize", asked), ("detokenize", {"tokens": ids})):
        assert httpx.post(f"{url}/{path}", json=body).status_code == 401
    wrong = httpx.post(f"{url}/detokenize", json={"tokens": [8192]}, headers=HEADERS)
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "tokens"


def test_paths_that_vllm_has_answer_and_a_wrong_one_names_them(served: Served) -> None:
    url = served.url
    assert httpx.get(f"{url}/ping").status_code == 200
    assert httpx.post(f"{url}/ping").status_code == 200
    assert set(httpx.get(f"{url}/version").json()) == {"version"}
    said = httpx.get(f"{url}/nothing").json()["error"]
    assert said["type"] == "not_found_error"
    assert all(x in said["message"] for x in ("/nothing", "/v1/models", "/tokenize"))


def test_lm_eval_finds_the_ends_of_prompts_without_files(served: Served) -> None:
    """Its remote tokenizer finds the ends of prompts with these, without files."""
    assert httpx.get(f"{served.url}/tokenizer_info").status_code == 401
    said = httpx.get(f"{served.url}/tokenizer_info", headers=HEADERS).json()
    tokenizer = served.llm.tokenizer
    assert said["chat_template"] == tokenizer.chat_template
    assert said["model_max_length"] == served.llm.most_tokens
    asked = {"prompt": said["eos_token"], "add_special_tokens": False}
    found = httpx.post(f"{served.url}/tokenize", json=asked, headers=HEADERS)
    assert found.json()["tokens"] == [tokenizer.eos_ids[0]]


def test_the_stop_string_that_ended_a_text_is_named(served: Served) -> None:
    whole = post(served, "completions", prompt="def", max_tokens=20, temperature=0)
    text = whole.json()["choices"][0]["text"]
    stop = text[6:8]
    for asked, expected in (([stop, "\u2603"], stop), (["\u2603"], None)):
        found = post(
            served,
            "completions",
            prompt="def",
            max_tokens=20,
            temperature=0,
            stop=asked,
        ).json()["choices"][0]
        assert found.get("stop_reason") == expected
        assert found["text"] == (text if expected is None else text.split(stop)[0])


def test_refusals_of_earlier_answers_are_text_to_the_template(served: Served) -> None:
    parts = [{"type": "text", "text": "No. "}, {"type": "refusal", "refusal": "Never."}]
    turns = [*TURNS, {"role": "assistant", "content": parts}, *TURNS]
    found = chat(served, TEMPLATE, messages=turns)
    prompt = "<user>a</><assistant>No. Never.</><user>a</><assistant>"
    expected = alone(prompt, max_new_tokens=4).text
    assert found.json()["choices"][0]["message"]["content"] == expected
