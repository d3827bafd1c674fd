"""Tools, and short chat templates of each convention that models have for them."""

from __future__ import annotations

from typing import Any

from kvlathe.server import conventions

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
DEEPSEEK = template(
    "Write " + "".join(conventions.DEEPSEEK.shows),
    f"{conventions.DEEPSEEK.begin}{conventions.DEEPSEEK.opens}"
    "{{ call.function.name + '"
    f"{conventions.DEEPSEEK.separator}"
    "' + call.function.arguments }}"
    f"{conventions.DEEPSEEK.after}{conventions.DEEPSEEK.end}",
)
"""As DeepSeek's own, it takes arguments as a text."""
QWEN_CODER = template(
    "Write <tool_call><parameter=.",
    "<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for key, value in call.function.arguments | items %}<parameter={{ key }}>\n"
    "{{ value }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
)
LLAMA = template(
    'Write {"name": name, "parameters": object}.',
    '{"name": "{{ call.function.name }}", "parameters": '
    "{{ call.function.arguments | tojson }}}",
)
