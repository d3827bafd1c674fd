"""Tools over HTTP, as the official client uses them. The shipped model was never taught
to call: where it must, its answers are held to a call, and else a structure makes it
write one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from kvlathe.runtime.text.structure import literal
from tests.support import tool_cases
from tests.support.runtime_cases import llm
from tests.support.serving_cases import (
    MODEL_NAME,
    Served,
    post,
    serving,
    with_template,
)
from tests.support.tool_cases import (
    DEEPSEEK,
    HERMES,
    LLAMA,
    MISTRAL,
    QWEN_CODER,
    TOOLS,
    WEATHER,
)

pytest.importorskip("llguidance", reason="llguidance is not installed")
USER: list[Any] = [{"role": "user", "content": "What is the weather in Bern?"}]
PATH = "chat/completions"


@pytest.fixture(scope="module", params=[HERMES, MISTRAL, LLAMA])
def tooled(request: pytest.FixtureRequest) -> Iterator[Served]:
    with serving(with_template(llm("torch", "split"), request.param)) as found:
        yield found
        assert found.idle()


@pytest.fixture(scope="module")
def hermes() -> Iterator[Served]:
    with serving(with_template(llm("torch", "split"), HERMES)) as found:
        yield found
        assert found.idle()


def client_of(served: Served) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{served.url}/v1", api_key="x", max_retries=0, timeout=120
    )


def check(call: Any) -> None:  # noqa: ANN401
    """A call of one of TOOLS, with arguments of its schema."""
    assert call.type == "function" and call.id
    schemas = {t["function"]["name"]: t["function"].get("parameters") for t in TOOLS}
    arguments = json.loads(call.function.arguments)
    schema = schemas[call.function.name]
    jsonschema.validate(arguments, schema or {"type": "object"})


@pytest.mark.parametrize("parallel", [True, False])
def test_required_calls_are_calls_in_every_convention(
    tooled: Served, parallel: bool
) -> None:
    found = client_of(tooled).chat.completions.create(
        model=MODEL_NAME,
        messages=USER,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=parallel,
        n=2,
        seed=2,
        max_tokens=160,
        temperature=0.8,
    )
    for choice in found.choices:
        if choice.finish_reason == "length":
            continue  # calls without end, cut
        calls = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and calls
        assert choice.message.content is None and (parallel or len(calls) == 1)
        for call in calls:
            check(call)


def test_a_named_tool_is_called_once(tooled: Served) -> None:
    """A small model that may call again does, until it is cut. vLLM has one call, too."""
    found = client_of(tooled).chat.completions.create(
        model=MODEL_NAME,
        messages=USER,
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "weather"}},
        parallel_tool_calls=True,
        n=4,
        seed=2,
        max_tokens=300,
        temperature=0.8,
    )
    for choice in found.choices:
        assert choice.finish_reason == "tool_calls"
        [call] = choice.message.tool_calls or []
        check(call)


def test_a_named_call_streams_its_arguments(tooled: Served) -> None:
    chunks = client_of(tooled).chat.completions.create(
        model=MODEL_NAME,
        messages=USER,
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "weather"}},
        parallel_tool_calls=False,
        stream=True,
        seed=1,
        temperature=0.7,
        max_tokens=400,
    )
    name, ids, said, ends = "", list[str](), list[str](), list[str]()
    for chunk in chunks:
        [choice] = chunk.choices
        assert not choice.delta.content
        for call in choice.delta.tool_calls or []:
            assert call.index == 0 and call.function
            ids += [call.id] if call.id else []
            name += call.function.name or ""
            said.append(call.function.arguments or "")
        ends += [choice.finish_reason] if choice.finish_reason else []
    assert name == "weather" and len(ids) == 1 and ends == ["tool_calls"]
    jsonschema.validate(json.loads("".join(said)), WEATHER)
    assert len(said) > 3, "in pieces"


def test_calls_that_the_model_makes_by_itself_are_found(hermes: Served) -> None:
    """Two calls behind a text, and then nothing."""
    call = (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
    )
    body = {"structured_outputs": {"regex": literal(f"I look.\n{call}\n{call}")}}
    asked: Any = {"model": MODEL_NAME, "messages": USER, "tools": TOOLS}
    client = client_of(hermes)
    found = client.chat.completions.create(**asked, extra_body=body)
    [choice] = found.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look.\n"
    made: Any = choice.message.tool_calls
    assert [json.loads(call.function.arguments) for call in made] == [
        {"city": "Bern"}
    ] * 2
    assert made[0].id != made[1].id
    with client.chat.completions.stream(**asked, extra_body=body) as stream:
        final = stream.get_final_completion()
    again = final.choices[0].message
    assert again.content == "I look.\n" and len(again.tool_calls or []) == 2


def hermes_call(arguments: str) -> str:
    body = f'{{"name": "weather", "arguments": {arguments}}}'
    return f"<tool_call>\n{body}\n</tool_call>"


def test_a_call_that_a_stop_string_cuts_is_no_finished_call(hermes: Served) -> None:
    """The first of two is whole. The second is text; a stream, which has begun it,
    does not say that it is finished."""
    whole = hermes_call('{"town": "Bern"}')
    both = whole + "\n" + hermes_call('{"at": {"city": "Bern"}}')
    body = {"structured_outputs": {"regex": literal(both)}}
    asked: Any = {"model": MODEL_NAME, "messages": USER, "tools": TOOLS}
    asked |= {"stop": ["city"], "extra_body": body}
    completions = client_of(hermes).chat.completions
    [choice] = completions.create(**asked).choices
    made: Any = choice.message.tool_calls
    assert [call.function.arguments for call in made] == ['{"town": "Bern"}']
    assert (choice.message.content or "").endswith('{"at": {"')
    said, ends = {0: "", 1: ""}, list[str]()
    for chunk in completions.create(**asked, stream=True):
        [piece] = chunk.choices
        assert piece.delta.model_dump(exclude_none=True) or piece.finish_reason
        for added in piece.delta.tool_calls or []:
            assert added.function
            said[added.index] += added.function.arguments or ""
        ends += [piece.finish_reason] if piece.finish_reason else []
    assert said == {0: '{"town": "Bern"}', 1: '{"at": {"'} and ends == ["stop"]


def test_a_forced_tool_call_ends_where_its_arguments_end(hermes: Served) -> None:
    """Whatever stops a text."""
    found = client_of(hermes).chat.completions.create(
        model=MODEL_NAME,
        messages=USER,
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "weather"}},
        parallel_tool_calls=False,
        stop=["city", "}"],
        seed=1,
        max_tokens=400,
    )
    [choice] = found.choices
    [call] = choice.message.tool_calls or []
    assert choice.finish_reason == "tool_calls"
    check(call)


def test_results_of_tools_go_back_into_the_conversation(tooled: Served) -> None:
    """Their calls' arguments reach the template as data."""
    client = client_of(tooled)
    first = client.chat.completions.create(
        model=MODEL_NAME,
        messages=USER,
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "weather"}},
        parallel_tool_calls=False,
        seed=1,
        max_tokens=400,
    )
    message = first.choices[0].message
    [call] = message.tool_calls or []
    result = {"role": "tool", "tool_call_id": call.id, "content": "12 degrees"}
    messages: Any = [*USER, message, result]
    then = client.chat.completions.create(
        model=MODEL_NAME, messages=messages, tools=TOOLS, max_tokens=4
    )
    assert then.usage and first.usage
    assert then.usage.prompt_tokens > first.usage.prompt_tokens
    assert then.choices[0].message.role == "assistant"


@pytest.mark.parametrize("template", [DEEPSEEK, QWEN_CODER], ids=["name", "tags"])
def test_calls_that_are_no_objects_go_there_and_back(template: str) -> None:
    """A call that must be, streamed, and its result, for which the template writes the
    call as the model did."""
    asked: Any = {"model": MODEL_NAME, "tools": TOOLS[:1], "temperature": 0.7}
    with serving(with_template(llm("torch", "split"), template)) as served:
        completions = client_of(served).chat.completions
        with completions.stream(
            **asked,
            messages=USER,
            tool_choice="required",
            seed=1,
            max_tokens=400,
            parallel_tool_calls=False,
        ) as stream:
            [choice] = stream.get_final_completion().choices
        [call] = choice.message.tool_calls or []
        check(call)
        assert choice.finish_reason == "tool_calls" and not choice.message.content
        made = {"id": call.id, "function": call.function.model_dump()}
        turns: list[Any] = [*USER, {"role": "assistant", "tool_calls": [made]}]
        turns.append({"role": "tool", "tool_call_id": call.id, "content": "warm"})
        then = completions.create(**asked, messages=turns, max_tokens=2)
        assert then.choices[0].message.role == "assistant"


def test_without_a_choice_tools_are_not_told(hermes: Served) -> None:
    """``none``: the prompt is that without tools, and the answer is text."""
    client = client_of(hermes)
    asked: Any = {"model": MODEL_NAME, "messages": USER, "max_tokens": 8}
    plain = client.chat.completions.create(**asked)
    none = client.chat.completions.create(**asked, tools=TOOLS, tool_choice="none")
    auto = client.chat.completions.create(**asked, tools=TOOLS)
    assert none.usage and plain.usage and auto.usage
    assert none.usage.prompt_tokens == plain.usage.prompt_tokens
    assert auto.usage.prompt_tokens > plain.usage.prompt_tokens


def tool(**function: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
    (
        {
            "tools": TOOLS,
            "tool_choice": {"type": "function", "function": {"name": "none"}},
        },
        "tool_choice",
    ),
    ({"tools": [tool(), tool()]}, "tools"),
    ({"tools": [tool(name="a b")]}, "tools"),
    ({"tools": [tool()] * 200}, "tools"),
    ({"tools": [tool(parameters={"type": "frob"})]}, "parameters"),
    ({"tools": [tool(parameters={"type": "string"})]}, "parameters"),
    ({"tools": [tool(parameters={"type": ["array", "null"]})]}, "parameters"),
    (
        {
            "tools": [tool(parameters={"anyOf": [{"type": "string"}]})],
            "tool_choice": "required",
        },
        "tools",
    ),
    (
        {
            "tools": TOOLS,
            "tool_choice": "required",
            "response_format": {"type": "json_object"},
        },
        "tool_choice",
    ),
]


@pytest.mark.parametrize(("asked", "field"), WRONG)
def test_wrong_tools_are_refused_in_words(
    hermes: Served, asked: dict[str, Any], field: str
) -> None:
    reply = post(hermes, PATH, messages=USER, **asked)
    error = reply.json()["error"]
    assert reply.status_code == 400 and field in error["message"]


def test_a_template_whose_calls_are_not_known_says_so() -> None:
    template = tool_cases.template("Write [call].", "[{{ call.function.name }}]")
    with serving(with_template(llm("torch", "split"), template)) as served:
        reply = post(served, PATH, messages=USER, tools=TOOLS)
    assert reply.status_code == 422
    assert "--chat-template" in reply.json()["error"]["message"]


@pytest.mark.parametrize("mode", ["required", "auto"])
def test_only_tools_that_are_allowed_are_called(hermes: Served, mode: str) -> None:
    """The template is told of no other tool where any answer is allowed."""
    named = {"type": "function", "function": {"name": "now"}}
    allowed = {"mode": mode, "tools": [named]}
    asked: Any = {"messages": USER, "max_tokens": 40, "seed": 1}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    found = post(hermes, PATH, **asked, tools=TOOLS, tool_choice=choice).json()
    if mode == "required":
        for call in found["choices"][0]["message"]["tool_calls"]:
            assert call["function"]["name"] == "now"
        return
    alone = post(hermes, PATH, **asked, tools=TOOLS[1:]).json()
    assert found["choices"][0]["message"] == alone["choices"][0]["message"]
    wrong = {**allowed, "tools": [{"type": "function", "function": {"name": "x"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": wrong}
    assert (
        post(hermes, PATH, **asked, tools=TOOLS, tool_choice=choice).status_code == 400
    )
