"""Requests that use most fields of every API, and what strangers make of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from tests.support.serving_cases import MODEL_NAME

Json = dict[str, Any]
Path = tuple[str | int, ...]


class Raw(str):
    """Text of a body that Python's json would not write so."""

    __slots__ = ()


SCHEMA: Json = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Bern", "Rome"]},
        "count": {"type": "integer", "minimum": 1},
        "list": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION: Json = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
TOOL: Json = {"type": "function", "function": FUNCTION}
NAMED: Json = {"type": "function", "function": {"name": "f"}}
SAMPLED: Json = {
    "model": MODEL_NAME,
    "temperature": 0.5,
    "top_p": 0.9,
    "n": 1,
    "stop": ["zz"],
    "seed": 3,
    "presence_penalty": 0.1,
    "logit_bias": {"5": 1.0},
    "top_k": 5,
    "min_p": 0.01,
    "repetition_penalty": 1.1,
    "stop_token_ids": [9],
    "min_tokens": 1,
    "deadline_seconds": 20,
    "priority": 1,
    "use_beam_search": False,
    "prompt_logprobs": None,
    "request_id": "r",
    "user": "u",
}
CALL: Json = {"id": "c", "type": "function"} | {
    "function": {"name": "f", "arguments": '{"city": "Bern"}'}
}
TURNS: list[Json] = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "ok"},
    {"role": "user", "content": "go", "name": "x"},
]
ITEMS: list[Json] = [
    {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "1"},
    {"type": "message", "role": "user", "content": "x"},
]
BLOCKS: list[Json] = [
    {"role": "user", "content": "a"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "t", "signature": "s"},
            {"type": "text", "text": "b"},
            {"type": "tool_use", "id": "c", "name": "f", "input": {"city": "Bern"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "c", "content": "r"},
            {"type": "text", "text": "q"},
        ],
    },
]
CHOSEN: Json = {"model": MODEL_NAME, "tools": [{"type": "function", **FUNCTION}]}
SPOKEN: Json = {"model": MODEL_NAME, "max_tokens": 2, "messages": BLOCKS}
OWN_TOOL: Json = {"name": "f", "input_schema": SCHEMA}
FORMAT: Json = {"type": "json_schema", "name": "x", "schema": SCHEMA}
BODIES: dict[str, list[Json]] = {
    "/v1/completions": [
        SAMPLED | {"prompt": "def", "max_tokens": 2, "logprobs": 2, "echo": True},
        SAMPLED
        | {"prompt": [[5], [7]], "stream": True}
        | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"model": MODEL_NAME, "prompt": "x"}
        | {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": SCHEMA},
            }
        },
        {"model": MODEL_NAME, "prompt": "x", "structured_outputs": {"regex": "[ab]+"}},
    ],
    "/v1/chat/completions": [
        SAMPLED
        | {"messages": TURNS, "logprobs": True, "top_logprobs": 2, "tools": [TOOL]}
        | {"tool_choice": "auto", "chat_template_kwargs": {"a": 1}},
        {"model": MODEL_NAME, "messages": TURNS, "tools": [TOOL], "tool_choice": NAMED},
        {"model": MODEL_NAME, "messages": TURNS, "tools": [TOOL], "stream": True}
        | {
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [NAMED]},
            }
        },
    ],
    "/v1/responses": [
        CHOSEN
        | {"input": ITEMS, "instructions": "i", "max_output_tokens": 2, "seed": 3}
        | {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
        | {"metadata": {"a": "b"}, "text": {"format": {"type": "text"}}},
        {"model": MODEL_NAME, "input": "x", "stream": True, "text": {"format": FORMAT}},
        CHOSEN
        | {"input": "x", "store": False}
        | {
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "f"}],
            }
        },
    ],
    "/v1/responses/input_tokens": [CHOSEN | {"input": ITEMS}],
    "/v1/messages": [
        SPOKEN
        | {"system": [{"type": "text", "text": "s"}], "tools": [OWN_TOOL]}
        | {"tool_choice": {"type": "auto"}, "stop_sequences": ["zz"]},
        SPOKEN
        | {"tools": [OWN_TOOL], "tool_choice": {"type": "tool", "name": "f"}}
        | {"stream": True},
        SPOKEN
        | {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    ],
    "/v1/messages/count_tokens": [{"model": MODEL_NAME, "messages": BLOCKS}],
    "/tokenize": [{"prompt": "abc", "return_token_strs": True}, {"messages": TURNS}],
    "/detokenize": [{"tokens": [5, 6, 7]}],
    "/v1/prefixes": [{"model": MODEL_NAME, "prompt": "abc", "keep": 0.5}],
}
"""Path -> requests that are answered."""


def nested(levels: int, begin: str, end: str) -> Raw:
    return Raw(begin * levels + "1" + end * levels)


WEIRD: list[Any] = [
    *(None, True, -1, 0.5, "", [], {}, "\ud800", "a\x00b", 2**31, 2**64, 10**30),
    *(Raw("1" + "0" * 5000), Raw("-1e400"), Raw("NaN"), 1e300, "a" * 3000),
    *(nested(50, "[", "]"), nested(900, "[", "]"), nested(50_000, '{"a":', "}")),
    *(nested(120, '{"items":', "}"), Raw('{"a": 1, "a": 2}')),
    *([None], [[]], [{}], [1.5], {"": ""}, {"\ud800": 1}, {"type": None}, {"type": []}),
    *({"$ref": "#"}, {"enum": []}, {"const": "\ud800"}, {"pattern": "(a*)*b"}),
    *({"type": "string", "minLength": 10**9}, {"type": "text", "text": "x"}),
]


def paths(value: object, before: Path = ()) -> Iterator[Path]:
    """Paths to all that lies in ``value``."""
    found: Any = ()
    if isinstance(value, dict):
        found = value.items()
    elif isinstance(value, list):
        found = enumerate(value)
    for key, each in found:
        yield (*before, key)
        yield from paths(each, (*before, key))


def replaced(body: Any, path: Path, value: object) -> Any:  # noqa: ANN401
    """``body`` with ``value`` at ``path``."""
    if not path:
        return value
    first, *rest = path
    made = body.copy()
    made[first] = replaced(body[first], tuple(rest), value)
    return made


def at(body: Any, path: Path) -> Any:  # noqa: ANN401
    for key in path:
        body = body[key]
    return body


def written(value: object) -> str:
    """As JSON, but for what is raw."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return (
            f"{{{','.join(f'{json.dumps(k)}:{written(v)}' for k, v in value.items())}}}"
        )
    if isinstance(value, list):
        return f"[{','.join(map(written, value))}]"
    return json.dumps(value)


@st.composite
def forged(draw: st.DrawFn, path: str) -> str:
    """A request to ``path`` of which one to three parts are something else: a weird
    value, another part of it, or in a list or out of it."""
    body = draw(st.sampled_from(BODIES[path]))
    for _ in range(draw(st.integers(1, 3))):
        places = list(paths(body))
        place, other = (draw(st.sampled_from(places)) for _ in range(2))
        was = at(body, place)
        ways = [draw(st.sampled_from(WEIRD)), at(body, other), [was], {"x": was}]
        body = replaced(body, place, draw(st.sampled_from([ways[0], *ways])))
    return written(body)
