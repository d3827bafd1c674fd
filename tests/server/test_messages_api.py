"""Anthropic's /v1/messages over HTTP, by the schema that Anthropic publishes, and with
its client where that is installed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2 as httpx
import jsonschema
import pytest

from kvlathe.server.anthropic.request import MessagesRequest
from tests.support.runtime_cases import llm
from tests.support.serving_cases import (
    KEY,
    MODEL_NAME,
    Served,
    post,
    serving,
    with_template,
)
from tests.support.tool_cases import HERMES, WEATHER

pytest.importorskip("llguidance", reason="llguidance is not installed")
Json = dict[str, Any]
TOOLS: Any = [
    {"name": "weather", "description": "The weather.", "input_schema": WEATHER},
    {
        "name": "now",
        "input_schema": {"type": "object", "additionalProperties": False},
        "cache_control": {"type": "ephemeral"},
    },
]
USER: Any = [{"role": "user", "content": "What is the weather in Bern?"}]


@pytest.fixture(scope="module")
def hermes() -> Iterator[Served]:
    with serving(with_template(llm("torch", "split"), HERMES), keys=[KEY]) as found:
        yield found
        assert found.idle()


def send(served: Served, path: str = "messages", **body: Any) -> httpx.Response:  # noqa: ANN401
    return httpx.post(
        f"{served.url}/v1/{path}",
        json={"model": MODEL_NAME, "messages": USER, **body},
        headers={"x-api-key": KEY, "anthropic-version": "2023-06-01"},
        timeout=60,
    )


def events_of(reply: httpx.Response) -> list[Json]:
    found: list[Json] = []
    for block in reply.text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def accumulated(events: list[Json]) -> Json:
    """The message of a stream, as Anthropic's clients add it up."""
    first, *rest, delta, last = events
    assert (first["type"], last["type"]) == ("message_start", "message_stop")
    message = first["message"]
    partial: dict[int, str] = {}
    open_block: int | None = None
    for event in rest:
        index = event["index"]
        if event["type"] == "content_block_start":
            assert open_block is None and index == len(message["content"])
            message["content"].append(event["content_block"])
            open_block = index
            continue
        assert open_block == index
        block = message["content"][index]
        if event["type"] == "content_block_stop":
            if block["type"] == "tool_use":
                block["input"] = json.loads(partial.get(index) or "{}")
            open_block = None
            continue
        added = event["delta"]
        if added["type"] == "input_json_delta":
            partial[index] = partial.get(index, "") + added["partial_json"]
        else:
            key = added["type"].removesuffix("_delta")
            block[key] += added[key]
    assert open_block is None
    return {**message, **delta["delta"], "usage": delta["usage"]}


CASES: dict[str, Json] = {
    "text": {"system": "Be brief."},
    "stop": {"stop_sequences": ["e", "zz"]},
    "any": {"tools": TOOLS, "tool_choice": {"type": "any"}},
    "tool": {
        "tools": TOOLS,
        "tool_choice": {
            "type": "tool",
            "name": "weather",
            "disable_parallel_tool_use": True,
        },
    },
    "none": {"tools": TOOLS, "tool_choice": {"type": "none"}},
}


@pytest.mark.parametrize("name", CASES)
def test_a_streamed_message_adds_up_to_the_whole_one(hermes: Served, name: str) -> None:
    asked: Any = {**CASES[name], "max_tokens": 150, "temperature": 0.3}
    whole = send(hermes, **asked, top_k=1).json()
    streamed = accumulated(events_of(send(hermes, **asked, top_k=1, stream=True)))
    for message in (whole, streamed):
        for block in message["content"]:
            block.pop("id", None)
    assert {**streamed, "id": ""} == {**whole, "id": ""}
    assert whole["type"] == "message" and whole["role"] == "assistant"
    kinds = [block["type"] for block in whole["content"]]
    if name == "tool":
        assert kinds == ["tool_use"] and whole["stop_reason"] == "tool_use"
        jsonschema.validate(whole["content"][0]["input"], WEATHER)
    elif name == "any":
        assert set(kinds) == {"tool_use"} or whole["stop_reason"] == "max_tokens"
        assert kinds[0] == "tool_use"
    else:
        assert kinds == ["text"]
    if name == "stop":
        assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "e")
        assert "e" not in whole["content"][0]["text"]


def test_a_message_is_the_answer_of_the_same_chat(hermes: Served) -> None:
    """And its tokens are those that count_tokens foretells."""
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Weather in Bern?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "text", "text": "I look."},
                {
                    "type": "tool_use",
                    "id": "t1",
                    "name": "weather",
                    "input": {"city": "Bern", "unit": "C"},
                },
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": [{"type": "text", "text": "no net"}],
                    "is_error": True,
                },
                {"type": "text", "text": "And now?"},
            ],
        },
    ]
    call = {
        "id": "t1",
        "type": "function",
        "function": {
            "name": "weather",
            "arguments": json.dumps({"city": "Bern", "unit": "C"}),
        },
    }
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather in Bern?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "Error: no net"},
        {"role": "user", "content": "And now?"},
    ]
    own: list[Json] = [
        {
            "type": "function",
            "function": {"name": t["name"], "parameters": t["input_schema"]},
        }
        for t in TOOLS
    ]
    own[0]["function"]["description"] = "The weather."
    asked: Any = {"system": [{"type": "text", "text": "Be brief."}], "tools": TOOLS}
    found = send(hermes, messages=turns, **asked, max_tokens=9, temperature=0).json()
    expected = post(
        hermes,
        "chat/completions",
        messages=chat,
        tools=own,
        max_tokens=9,
        temperature=0,
    ).json()
    said = "".join(block["text"] for block in found["content"])
    assert said == expected["choices"][0]["message"]["content"]
    usage = found["usage"]
    read = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert read == expected["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == expected["usage"]["completion_tokens"]
    counted = send(hermes, "messages/count_tokens", messages=turns, **asked).json()
    assert counted == {"input_tokens": read}


def test_an_assistants_turn_at_the_end_is_gone_on_with(hermes: Served) -> None:
    begun = [*USER, {"role": "assistant", "content": "It is"}]
    found = send(hermes, messages=begun, max_tokens=6, temperature=0).json()
    expected = post(
        hermes,
        "chat/completions",
        messages=begun,
        add_generation_prompt=False,
        continue_final_message=True,
        max_tokens=6,
        temperature=0,
    ).json()
    assert found["content"][0]["text"] == expected["choices"][0]["message"]["content"]


def test_turns_of_one_role_in_a_row_are_one() -> None:
    request = MessagesRequest.model_validate(
        {
            "model": "m",
            "max_tokens": 1,
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "user", "content": [{"type": "text", "text": "b"}]},
                {"role": "assistant", "content": "c"},
                {"role": "user", "content": "d"},
            ],
        }
    )
    turns = [(turn.role, turn.content) for turn in request.chat().messages]
    assert turns == [("user", "a\n\nb"), ("assistant", "c"), ("user", "d")]


@pytest.mark.parametrize(
    ("fields", "status", "kind", "words"),
    [
        ({}, 400, "invalid_request_error", "max_tokens"),
        ({"max_tokens": 10**6}, 400, "invalid_request_error", "max_tokens"),
        ({"max_tokens": 5, "model": "x"}, 404, "not_found_error", "x"),
        ({"max_tokens": 5, "messages": []}, 400, "invalid_request_error", "messages"),
        (
            {
                "max_tokens": 5,
                "messages": [{"role": "user", "content": [{"type": "image"}]}],
            },
            400,
            "invalid_request_error",
            "messages.0.content.0",
        ),
        (
            {"max_tokens": 5, "tools": [{"type": "bash_20250124", "name": "bash"}]},
            400,
            "invalid_request_error",
            "tools.0",
        ),
        (
            {"max_tokens": 5, "tool_choice": {"type": "any"}},
            400,
            "invalid_request_error",
            "tool_choice",
        ),
        ({"max_tokens": 5, "frob": 1}, 400, "invalid_request_error", "frob"),
    ],
)
def test_refusals_have_the_form_of_anthropics_api(
    hermes: Served, fields: Json, status: int, kind: str, words: str
) -> None:
    reply = send(hermes, **fields)
    said = reply.json()
    assert reply.status_code == status and said["type"] == "error", said
    assert said["error"]["type"] == kind and words in said["error"]["message"]
    assert reply.headers["request-id"] == reply.headers["x-request-id"]


def test_keys_come_in_either_header(hermes: Served) -> None:
    body = {"model": MODEL_NAME, "messages": USER, "max_tokens": 1}
    url = f"{hermes.url}/v1/messages"
    for headers, status in (
        ({"x-api-key": KEY}, 200),
        ({"authorization": f"Bearer {KEY}"}, 200),
        ({"x-api-key": "wrong"}, 401),
        ({}, 401),
    ):
        reply = httpx.post(url, json=body, headers=headers, timeout=60)
        assert reply.status_code == status
        if status == 401:
            assert reply.json()["error"]["type"] == "authentication_error"


def test_the_official_client_runs_a_loop_of_tools(hermes: Served) -> None:
    client = anthropic.Anthropic(base_url=hermes.url, api_key=KEY, max_retries=0)
    turns: Any = [*USER]
    asked: Any = {"model": MODEL_NAME, "max_tokens": 200, "tools": TOOLS}
    forced: Any = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    with client.messages.stream(**asked, messages=turns, tool_choice=forced) as stream:
        first = stream.get_final_message()
    [call] = first.content
    assert call.type == "tool_use" and first.stop_reason == "tool_use"
    jsonschema.validate(call.input, WEATHER)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sun"}
    turns += [
        {"role": "assistant", "content": [call.model_dump()]},
        {"role": "user", "content": [result]},
    ]
    counted = client.messages.count_tokens(
        model=MODEL_NAME, messages=turns, tools=TOOLS
    )
    then = client.messages.create(**asked, messages=turns)
    read = then.usage.input_tokens + (then.usage.cache_read_input_tokens or 0)
    assert counted.input_tokens == read and then.content
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="other", max_tokens=1, messages=turns)
