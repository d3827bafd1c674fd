"""Tools for a model whose chat template has no place for them: its system message tells of
them, and calls and their results are words of the conversation, all in Hermes' form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Literal

from kvlathe.server.conventions import HERMES
from kvlathe.server.fields import Json
from kvlathe.server.messages import Message

TOLD = f"""You may call these functions, one JSON object a line:
{{tools}}
To call one, write its name and arguments as one JSON object between these tags:
{HERMES.before}{{{{"name": "NAME", "arguments": {{{{"KEY": VALUE}}}}}}}}{HERMES.after}"""
RESULT = "<tool_response>\n{}\n</tool_response>"
SYSTEM = ("system", "developer")


def takes_tools(template: str) -> bool:
    """Whether a template reads tools at all."""
    return "tools" in template


def told(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, object]],
    by: Literal["system", "user"],
) -> list[Message]:
    """The conversation with ``tools`` in its first message of the role ``by``; where
    there is none, in one before the others."""
    functions = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    said = TOLD.format(tools="\n".join(functions))
    roles = SYSTEM if by == "system" else ("user",)
    turns = in_words(messages)
    for i, turn in enumerate(turns):
        if turn.role in roles:
            texts = (turn.spoken, said) if by == "system" else (said, turn.spoken)
            turns[i] = turn.model_copy(update={"content": "\n\n".join(texts)})
            return turns
    return [Message(role=by, content=said), *turns]


def in_words(messages: Sequence[Message]) -> list[Message]:
    """The conversation with earlier calls as words of the assistant, and the results
    between two answers as one message of the user."""
    turns: list[Message] = []
    for is_result, group in groupby(messages, lambda message: message.role == "tool"):
        if is_result:
            results = [RESULT.format(message.spoken) for message in group]
            turns.append(Message(role="user", content="\n".join(results)))
        else:
            turns += [_with_calls(message) for message in group]
    return turns


def _with_calls(message: Message) -> Message:
    if not message.tool_calls:
        return message
    calls = [_call(one.for_template(False)["function"]) for one in message.tool_calls]
    said = "\n".join(filter(None, (message.spoken, *calls)))
    return message.model_copy(update={"content": said, "tool_calls": None})


def _call(function: Json) -> str:
    call = {"name": function["name"], HERMES.key: function["arguments"]}
    return f"{HERMES.before}{json.dumps(call, ensure_ascii=False)}{HERMES.after}"
