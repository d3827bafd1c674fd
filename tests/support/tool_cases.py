"""Tools, and short chat templates of each convention that models have for them."""

from __future__ import annotations

from typing import Any

from kvlathe.server import conventions, tagged
from kvlathe.server.conventions import NamedConvention

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city.",
            "parameters": WEATHER,
        },
    },
    {
        "type": "function",
        "function": {"name": "now", "parameters": {"additionalProperties": False}},
    },
]
TURNS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}CALL{% endfor %}\n{% endfor %}<assistant>"
)
TOLD = "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}MARK{% endif %}"


def template(mark: str, call: str) -> str:
    return TOLD.replace("MARK", mark) + TURNS.replace("CALL", call)


HERMES = template(
    "Write <tool_call>.",
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}</tool_call>",
)
MISTRAL = template(
    "Write [TOOL_CALLS].",
    "{% if call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}"
    "{% endif %}[TOOL_CALLS] [{{ call.function | tojson }}]",
)
GRANITE = template(
    "Write <|tool_call|>.", "<|tool_call|>[{{ call.function | tojson }}]"
)
PHI = template("Write functools[].", "functools[{{ call.function | tojson }}]")
LLAMA_4 = template(
    "Write <|python_start|>.",
    '<|python_start|>{"name": "{{ call.function.name }}", "parameters": '
    "{{ call.function.arguments | tojson }}}<|python_end|>",
)
NAMED_CALL = (
    "BEGINOPENS{{ call.function.name }}SEPARATOR"
    "{{ call.function.arguments | tojson }}AFTEREND"
)


def named(convention: NamedConvention) -> str:
    """A template of a convention whose names stand before arguments."""
    call = NAMED_CALL
    for mark in ("begin", "opens", "separator", "after", "end"):
        call = call.replace(mark.upper(), getattr(convention, mark))
    return template("".join(convention.shows), call)


TAGGED = tuple(template(f"Write {one.shows}.", one.shows) for one in tagged.TAGGED)
NAMED = tuple(map(named, conventions.NAMED))
LLAMA = template(
    'Write {"name": name, "parameters": object}.',
    '{"name": "{{ call.function.name }}", "parameters": '
    "{{ call.function.arguments | tojson }}}",
)
