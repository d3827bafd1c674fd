"""Words and fields that clients look for in answers and refusals, beside those that the API
names: words of errors, fields at fault, models as Anthropic lists them."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx2 as httpx
import pytest

from tests.support.serving_cases import KEY, MODEL_NAME, Served, post

USER = [{"role": "user", "content": "a"}]
OBJECT = {"type": "json_object"}
IMAGE = {"type": "image_url", "image_url": {"url": "a"}}
SEEN = [{"role": "user", "content": [IMAGE]}]
TOOL = {"type": "function", "function": {"name": "f"}}
Json = dict[str, Any]


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize("words", [1500, 4000])  # by tokens, and by characters alone
def test_a_prompt_that_is_too_long_is_refused_in_the_words_of_each_api(
    served: Served, words: int
) -> None:
    """LiteLLM and LangChain know such errors by their words."""
    turns: list[Json] = [{"role": "user", "content": "wordy, " * words * 2}]
    openai = post(served, "chat/completions", messages=turns).json()["error"]
    assert "model's maximum input length is 3072 tokens" in openai["message"]
    assert openai["code"] == "context_length_exceeded"
    fields: Json = {"messages": USER, "max_tokens": 4096}
    openai = post(served, "chat/completions", **fields).json()["error"]
    assert "model's maximum context length is 4096 tokens" in openai["message"]
    found = post(served, "messages", messages=turns, max_tokens=4).json()["error"]
    assert found["message"].startswith("prompt is too long: messages: ")


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize(
    ("path", "fields", "param", "said"),
    [
        ("chat/completions", {"tool_choice": "required"}, "tool_choice", "that tools does not have"),
        ("chat/completions", {"tools": [TOOL, TOOL]}, "tools", "two have the same name"),
        ("chat/completions", {"continue_final_message": True}, "continue_final_message", "to be false"),
        ("chat/completions", {"response_format": OBJECT, "guided_regex": "a"}, "response_format", "give one"),
        ("responses", {"tool_choice": "required"}, "tool_choice", "that tools does not have"),
        ("responses", {"top_logprobs": 2}, "top_logprobs", "in include"),
        ("responses", {"include": ["everything"]}, "include.0", '"everything" is not taken here'),
        ("responses", {"tools": [{"type": "web_search"}]}, "tools.0.type", '"web_search" is not taken here'),
        ("responses", {"text": {"verbosity": "low"}}, "text.verbosity", '"low" is not taken here'),
        ("chat/completions", {"verbosity": "low"}, "verbosity", '"low" is not taken here'),
        ("chat/completions", {"messages": SEEN}, "messages.0.content.0.type", '"image_url" is not'),
        ("messages", {"tools": [{"type": "bash_20250124", "name": "bash"}]}, None, '"bash_20250124" is not taken here'),
        ("messages", {"tool_choice": {"type": "any"}}, None, "tool_choice: it asks"),
    ],
)  # fmt: skip
def test_a_refusal_says_which_field_and_what_was_given(
    served: Served, path: str, fields: Json, param: str | None, said: str
) -> None:
    asked: Json = {"input": "a"} if path == "responses" else {"messages": USER}
    asked |= {"max_tokens": 4} if path == "messages" else {}
    error = post(served, path, **(asked | fields)).json()["error"]
    assert error.get("param") == param and said in error["message"], error
    assert not error["message"].startswith("body")


@pytest.mark.usefixtures("nothing_is_left")
def test_fields_that_ask_for_the_apis_own_defaults_are_taken(served: Served) -> None:
    fields: Json = {"messages": USER, "max_tokens": 1}
    defaults: list[Json] = [{"verbosity": "medium"}, {"top_logprobs": 0}]
    for own in defaults:
        assert post(served, "chat/completions", **fields, **own).status_code == 200
    encrypted: Json = {
        "include": ["reasoning.encrypted_content"],
        "text": {"verbosity": "medium"},
    }
    found = post(served, "responses", input="a", max_output_tokens=1, **encrypted)
    assert found.status_code == 200


def test_a_path_that_takes_another_method_says_which(served: Served) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    found = httpx.get(f"{served.url}/v1/chat/completions", headers=headers)
    assert found.status_code == 405 and found.headers["allow"] == "POST"
    said = found.json()["error"]["message"]
    assert said == "/v1/chat/completions takes POST, not GET"


def test_anthropics_client_lists_the_models(served: Served) -> None:
    client = anthropic.Anthropic(base_url=served.url, api_key=KEY, max_retries=0)
    page = client.models.list()
    assert page.has_more is False and page.first_id == page.last_id == MODEL_NAME
    [model] = page
    assert model == client.models.retrieve(MODEL_NAME)
    assert (model.id, model.display_name) == (MODEL_NAME, MODEL_NAME)
    assert model.type == "model"
    created = httpx.get(
        f"{served.url}/v1/models/{MODEL_NAME}", headers={"x-api-key": KEY}
    ).json()["created"]
    assert int(model.created_at.timestamp()) == created
