"""/v1/responses, as the official client uses it. What it says is held to the client's
own types."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import jsonschema
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from kvlathe.server.responses import paths
from kvlathe.server.responses.items import ITEMS, turns_of
from kvlathe.server.responses.store import ITEM_BYTES, Kept, Store
from tests.support.runtime_cases import llm
from tests.support.serving_cases import (
    KEY,
    MODEL_NAME,
    Served,
    post,
    serving,
    with_template,
)
from tests.support.tool_cases import HERMES, TOOLS, WEATHER

pytest.importorskip("llguidance", reason="llguidance is not installed")
Json = dict[str, Any]
FUNCTIONS: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ASKED: Any = {"model": MODEL_NAME, "temperature": 0, "max_output_tokens": 12}


@pytest.fixture(scope="module")
def hermes() -> Iterator[Served]:
    with serving(with_template(llm("torch", "split"), HERMES)) as found:
        yield found
        assert found.idle()


def client_of(served: Served, key: str = KEY) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{served.url}/v1", api_key=key, max_retries=0, timeout=120
    )


def events_of(reply: httpx.Response) -> list[Json]:
    """The events of a stream; the names of its lines are their types."""
    found: list[Json] = []
    for block in reply.text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def bare(response: Json) -> Json:
    """A response without what every one has of its own."""
    said = {k: v for k, v in response.items() if not k.endswith("_at") and k != "id"}
    own = ("id", "call_id")
    said["output"] = [
        {k: v for k, v in item.items() if k not in own} for item in response["output"]
    ]
    return said


def test_a_response_is_the_answer_of_the_same_chat(
    served: Served, client: openai.OpenAI
) -> None:
    found = client.responses.create(**ASKED, input="a", instructions="Be brief.")
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"},
    ]
    chat = post(
        served, "chat/completions", messages=turns, temperature=0, max_tokens=12
    ).json()
    choice, usage = chat["choices"][0], chat["usage"]
    assert found.output_text == choice["message"]["content"]
    assert choice["finish_reason"] == "length" and found.status == "incomplete"
    assert found.incomplete_details
    assert found.incomplete_details.reason == "max_output_tokens"
    assert found.usage and found.usage.input_tokens == usage["prompt_tokens"]
    assert found.usage.output_tokens == usage["completion_tokens"]
    Response.model_validate(found.model_dump(), strict=False)


STREAMED: dict[str, Json] = {
    "text": {"input": "a"},
    "logprobs": {
        "input": "a",
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    },
    "call": {"input": "a", "tools": FUNCTIONS, "tool_choice": "required"},
    "one call": {
        "input": "a",
        "tools": FUNCTIONS,
        "tool_choice": {"type": "function", "name": "now"},
        "parallel_tool_calls": False,
    },
    "allowed": {
        "input": "a",
        "tools": FUNCTIONS,
        "tool_choice": {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "now"}],
        },
        "parallel_tool_calls": False,
    },
}


@pytest.mark.parametrize("name", STREAMED)
def test_a_stream_adds_up_to_the_whole_response(hermes: Served, name: str) -> None:
    """Whose events are the client's, with numbers in order, and whose deltas make up the
    texts at the end."""
    asked: Any = {
        **STREAMED[name],
        "temperature": 0.8,
        "seed": 3,
        "max_output_tokens": 60,
    }
    whole = post(hermes, "responses", **asked).json()
    events = events_of(post(hermes, "responses", stream=True, **asked))
    for event in events:
        EVENTS.validate_python(event)
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    assert events[0]["type"] == "response.created"
    assert events[1]["response"]["output"] == []
    assert bare(events[-1]["response"]) == bare(whole)
    said: dict[int, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            place = event["output_index"]
            said[place] = said.get(place, "") + event["delta"]
    for place, item in enumerate(whole["output"]):
        own = item.get("arguments")
        text = item["content"][0]["text"] if own is None else own
        assert said.get(place, "") == text
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    if name == "logprobs":
        [part] = whole["output"][0]["content"]
        assert "".join(one["token"] for one in part["logprobs"]) == part["text"]
    if "tools" in asked and whole["status"] == "completed":
        assert all(item["type"] == "function_call" for item in whole["output"])


def test_the_official_client_streams_a_call_and_says_its_output(
    hermes: Served,
) -> None:
    client = client_of(hermes)
    asked: Any = {"model": MODEL_NAME, "tools": FUNCTIONS, "extra_body": {"seed": 1}}
    with client.responses.stream(
        **asked,
        input="What is the weather in Bern?",
        tool_choice={"type": "function", "name": "weather"},
        parallel_tool_calls=False,
    ) as stream:
        kinds = [event.type for event in stream]
        first = stream.get_final_response()
    assert kinds.count("response.function_call_arguments.done") == 1
    [call] = first.output
    assert call.type == "function_call" and first.status == "completed"
    jsonschema.validate(json.loads(call.arguments), WEATHER)
    output: Any = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": "sun",
    }
    then = client.responses.create(
        **asked,
        input=[output],
        previous_response_id=first.id,
        max_output_tokens=5,
    )
    items = client.responses.input_items.list(then.id).data
    assert [item.type for item in items] == [
        "function_call_output",
        "function_call",
        "message",
    ]
    ids = [item.id for item in items]
    listed = client.responses.input_items.list(then.id, order="asc", limit=1)
    assert [item.id for item in listed] == ids[::-1]  # page after page
    behind = client.responses.input_items.list(then.id, after=str(ids[0])).data
    assert [item.id for item in behind] == ids[1:]
    with pytest.raises(openai.BadRequestError, match="stream"):
        client.responses.retrieve(then.id, stream=True)
    with pytest.raises(openai.BadRequestError, match="include"):
        client.responses.create(model=MODEL_NAME, input="x", top_logprobs=3)


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=99)


def test_the_official_client_parses_a_structured_text(client: openai.OpenAI) -> None:
    found = client.responses.parse(
        model=MODEL_NAME, input="Who?", text_format=Person, max_output_tokens=200
    )
    assert isinstance(found.output_parsed, Person)


def test_a_conversation_goes_on_as_if_all_of_it_were_sent(
    client: openai.OpenAI,
) -> None:
    first = client.responses.create(**ASKED, input="a")
    then = client.responses.create(**ASKED, input="b", previous_response_id=first.id)
    sent: Any = [
        {"role": "user", "content": "a"},
        *[item.model_dump() for item in first.output],
        {"role": "user", "content": "b"},
    ]
    again = client.responses.create(**ASKED, input=sent)
    assert then.output_text == again.output_text
    assert then.usage and again.usage
    assert then.usage.input_tokens == again.usage.input_tokens
    counted = client.responses.input_tokens.count(model=MODEL_NAME, input=sent)
    assert counted.input_tokens == again.usage.input_tokens


def test_responses_are_kept_for_their_own_key_until_they_are_deleted(
    served: Served, client: openai.OpenAI
) -> None:
    found = client.responses.create(**ASKED, input="a")
    assert client.responses.retrieve(found.id).output == found.output
    with pytest.raises(openai.NotFoundError, match="not found"):
        client_of(served, "sk-other").responses.retrieve(found.id)
    client.responses.delete(found.id)
    unkept = client.responses.create(**ASKED, input="a", store=False)
    for name in (found.id, unkept.id):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(name)
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(**ASKED, input="b", previous_response_id=name)
        assert refused.value.param == "previous_response_id"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "image_generation_call", "id": "x"}]}, "input.0"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input.0.content.0.type",
        ),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"input": "a", "background": True}, "background"),
        ({"input": "a", "truncation": "auto"}, "truncation"),
        ({"input": "a", "tool_choice": "required"}, "tool_choice"),
        ({"input": "a", "max_output_tokens": 10**6}, "max_output_tokens"),
        ({"input": "a", "frobnicate": 1}, "frobnicate"),
        ({"input": "a " * 9000}, "input"),
        (
            {"input": "a", "text": {"format": {"type": "json_schema", "name": "x"}}},
            "text.format",
        ),
        (
            {
                "input": "a",
                "text": {
                    "format": {
                        "type": "json_schema",
                        "name": "x",
                        "schema": {"not": {}},
                    }
                },
            },
            "text.format",
        ),
    ],
)
def test_requests_that_cannot_be_answered_name_their_field(
    served: Served, fields: Json, param: str | None
) -> None:
    reply = post(served, "responses", **fields)
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"] == param, error


def test_items_become_the_turns_that_a_template_knows() -> None:
    items = [
        {"role": "developer", "content": "b"},
        {"role": "user", "content": [{"type": "input_text", "text": "c"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "d"}],
        },
        {"type": "message", "role": "assistant", "content": "e", "id": "msg_1"},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "h"},
        {"type": "function_call", "call_id": "3", "name": "i", "arguments": "{}"},
    ]

    def call(name: str, function: str) -> Json:
        own = {"name": function, "arguments": "{}"}
        return {"id": name, "type": "function", "function": own}

    assert turns_of(ITEMS.validate_python(items), "a") == [
        {"role": "system", "content": "a\n\nb"},
        {"role": "user", "content": "c"},
        {
            "role": "assistant",
            "content": "e",
            "reasoning_content": "d",
            "tool_calls": [call("1", "f"), call("2", "g")],
        },
        {"role": "tool", "tool_call_id": "1", "content": "h"},
        {"role": "assistant", "content": "", "tool_calls": [call("3", "i")]},
    ]


def test_a_conversation_is_read_in_its_clients_turn(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in the thread that all streams are written in."""
    readers, whole = list[str](), Kept.conversation

    def read(kept: Kept) -> list[Json]:
        readers.append(threading.current_thread().name)
        return whole.__get__(kept)

    monkeypatch.setattr(Kept, "conversation", property(read))
    first = client.responses.create(**ASKED, input="a")
    behind: Any = {"input": "b", "previous_response_id": first.id}
    client.responses.create(**ASKED, **behind)
    client.responses.input_tokens.count(model=MODEL_NAME, **behind)
    assert len(readers) == 2 and all("turns" in name for name in readers)


def test_a_conversation_that_is_too_long_is_gone_on_with_no_further(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused before it is read, and can be looked at."""
    first = client.responses.create(**ASKED, input="a" * 400)
    monkeypatch.setattr(paths, "MOST_CONVERSATION", 1000)
    with pytest.raises(openai.BadRequestError, match="1,000 may be gone on") as refused:
        client.responses.create(**ASKED, input="b", previous_response_id=first.id)
    assert refused.value.param == "previous_response_id"
    assert client.responses.retrieve(first.id).output == first.output


def test_a_page_of_items_reads_none_of_them() -> None:
    """They may have megabytes."""
    items = [(str(i), b"?" * (i + 1)) for i in range(4)]
    page = paths.page_of(items, 2, "0")
    assert page.startswith(b'{"data": [??, ???], ')
    rest = json.loads(page.replace(b"??, ???", b""))
    assert (rest["first_id"], rest["last_id"], rest["has_more"]) == ("1", "2", True)
    assert json.loads(paths.page_of([], 2, None))["data"] == []


def test_items_count_as_what_they_take() -> None:
    kept = Kept.of({"id": "r", "output": [3]}, [{"id": "a"}, {"id": "b"}])
    assert kept.conversation == [{"id": "a"}, {"id": "b"}, 3]
    assert kept.size == len(kept.response) + 2 * (ITEM_BYTES + len(b'{"id": "a"}'))


def test_nobody_pushes_responses_of_another_out() -> None:
    store = Store(most_bytes=1000, most_responses=5)

    def kept(name: str, size: int) -> Kept:
        return Kept(name, bytes(size))

    store.put("calm", kept("mine", 500))  # an equal share
    for i in range(20):
        store.put("loud", kept(f"one {i}", 160))
    assert store.get("calm", "mine")
    assert [i for i in range(20) if store.get("loud", f"one {i}")] == [17, 18, 19]
    store.put("loud", kept("huge", 1001))
    assert not store.get("loud", "huge") and store.get("loud", "one 19")
    for i in range(20):
        store.put("loud", kept(f"small {i}", 1))
    assert store.get("calm", "mine")
    assert sum(store.drop("loud", f"small {i}") for i in range(20)) == 4
