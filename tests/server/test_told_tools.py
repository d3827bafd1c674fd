"""Tools where the chat template has no place for them: the conversation tells of them, and
nothing of it vanishes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from kvlathe.runtime.text.structure import literal
from kvlathe.server.messages import Message
from kvlathe.server.told_tools import in_words, told
from tests.support.runtime_cases import llm
from tests.support.serving_cases import MODEL_NAME, Served, serving, with_template
from tests.support.tool_cases import TOOLS, WEATHER

pytest.importorskip("llguidance", reason="llguidance is not installed")
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    + PLAIN
)
CALL = {"name": "weather", "arguments": '{"city": "Bern", "unit": "C"}'}
TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "And in Bern?"},
    {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [
            {"id": str(i), "type": "function", "function": CALL} for i in (1, 2)
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "12 degrees"},
    {"role": "tool", "tool_call_id": "2", "content": "rain"},
    {"role": "user", "content": "Thanks."},
]


@pytest.fixture(scope="module", params=[PLAIN, NO_SYSTEM], ids=["plain", "no system"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    with serving(with_template(llm("torch", "split"), request.param)) as found:
        yield found
        assert found.idle()


def client_of(served: Served) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{served.url}/v1", api_key="x", max_retries=0, timeout=120
    )


def test_a_call_that_must_be_made_is_one_of_the_tools(served: Served) -> None:
    asked: Any = {"model": MODEL_NAME, "messages": TURNS, "max_tokens": 90}
    completions = client_of(served).chat.completions
    found = completions.create(
        **asked, tools=TOOLS, tool_choice="required", parallel_tool_calls=False
    )
    [choice] = found.choices
    assert choice.finish_reason == "tool_calls"
    call: Any = (choice.message.tool_calls or [])[0]
    assert call.function.name in ("weather", "now")
    if call.function.name == "weather":
        jsonschema.validate(json.loads(call.function.arguments), WEATHER)
    plain = completions.create(**asked)
    assert found.usage and plain.usage
    told_of = found.usage.prompt_tokens - plain.usage.prompt_tokens
    assert told_of > len(llm("torch", "split").tokenizer.encode(json.dumps(WEATHER)))


def test_calls_by_free_choice_are_read(served: Served) -> None:
    body = f'<tool_call>\n{{"name": "weather", "arguments": {CALL["arguments"]}}}\n</tool_call>'
    asked: Any = {"model": MODEL_NAME, "messages": TURNS[:1], "tools": TOOLS}
    found = client_of(served).chat.completions.create(
        **asked,
        extra_body={"structured_outputs": {"regex": literal(f"Well.\n{body}")}},
    )
    [choice] = found.choices
    call: Any = (choice.message.tool_calls or [])[0]
    assert (choice.message.content, choice.finish_reason) == ("Well.\n", "tool_calls")
    assert json.loads(call.function.arguments) == {"city": "Bern", "unit": "C"}


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_every_word_of_a_conversation_is_told_once(system: str | None) -> None:
    first = [] if system is None else [{"role": "system", "content": system}]
    messages = [Message.model_validate(turn) for turn in [*first, *TURNS]]
    for by in ("system", "user"):
        turns = told(messages, TOOLS, by)
        whole = "\n".join(turn.spoken for turn in turns)
        words = ("And in Bern?", "I look.", "12 degrees", "rain", "Thanks.", system)
        assert all(whole.count(word) == 1 for word in words if word)
        assert whole.count('"city": "Bern"') == 2
        assert all(json.dumps(tool["function"]) in whole for tool in TOOLS)
        holder = next(turn for turn in turns if "You may call" in turn.spoken)
        assert holder.role == by
        roles = [turn.role for turn in turns if turn.role != "system"]
        assert roles == ["user", "assistant", "user", "user"]
        assert not any(turn.tool_calls for turn in turns)


def test_a_conversation_without_calls_stays_as_it_is() -> None:
    messages = [
        Message(role="user", content="a"),
        Message(role="assistant", content="b"),
    ]
    assert in_words(messages) == messages
