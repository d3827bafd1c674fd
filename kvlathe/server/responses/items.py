"""Items of a conversation, as /v1/responses has them, and the messages that they are to
a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, cast

from pydantic import BaseModel, ConfigDict, Discriminator, Tag, TypeAdapter

from kvlathe.server.fields import Items, Json

ASSISTANT = "assistant"
LEADING = ("system", "developer")


class Loose(BaseModel):
    """A part of an answer that a client sends back has fields that say nothing here."""

    model_config = ConfigDict(extra="allow", strict=True)


class TextPart(Loose):
    type: Literal["input_text", "output_text", "text"]
    text: str


class RefusalPart(Loose):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class MessageItem(Loose):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Items[TextPart | RefusalPart]

    def add_to(self, turns: list[Json]) -> None:
        text = text_of(self.content)
        if self.role == ASSISTANT:
            answer_of(turns, ("content", "tool_calls"))["content"] = text
        else:
            turns.append({"role": self.role, "content": text})


class CallItem(Loose):
    """A call that an earlier answer made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str

    def add_to(self, turns: list[Json]) -> None:
        turn = answer_of(turns, ())
        function = {"name": self.name, "arguments": self.arguments}
        turn.setdefault("tool_calls", []).append(
            {"id": self.call_id, "type": "function", "function": function}
        )


class OutputItem(Loose):
    """The output of a called function."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Items[TextPart]

    def add_to(self, turns: list[Json]) -> None:
        text = text_of(self.output)
        turns.append({"role": "tool", "tool_call_id": self.call_id, "content": text})


class ThoughtPart(Loose):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Loose):
    """Thoughts before an answer. Templates have a place for them, or leave them out."""

    type: Literal["reasoning"]
    summary: Items[ThoughtPart] | None = None
    content: Items[ThoughtPart] | None = None

    def add_to(self, turns: list[Json]) -> None:
        text = text_of(self.content or self.summary or [])
        if text:
            turn = answer_of(turns, ("content", "tool_calls", "reasoning_content"))
            turn["reasoning_content"] = text


def kind_of(item: object) -> object:
    """The type that an item says; a message need not."""
    if isinstance(item, dict):
        return cast("Json", item).get("type", "message")
    return getattr(item, "type", None)


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[OutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        kind_of,
        custom_error_type="item",
        custom_error_message="its type must be message, function_call, "
        "function_call_output or reasoning",
    ),
]
ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


def text_of(
    content: str | Sequence[TextPart | RefusalPart] | Sequence[ThoughtPart],
) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.text for part in content)


def answer_of(turns: list[Json], before: Sequence[str]) -> Json:
    """The assistant's turn at the end, which a part of an answer belongs to; a new one
    where there is none, or it has one of the fields that come ``before`` no such part.
    """
    last = turns[-1] if turns else {}
    if last.get("role") != ASSISTANT or any(last.get(name) for name in before):
        last = {"role": ASSISTANT, "content": ""}
        turns.append(last)
    return last


def turns_of(items: Sequence[Item], instructions: str | None) -> list[Json]:
    """The messages of a chat. What the system says at the beginning is one message:
    many templates take no second one."""
    turns: list[Json] = []
    if instructions:
        turns.append({"role": "system", "content": instructions})
    for item in items:
        item.add_to(turns)
    leading = 0
    while leading < len(turns) and turns[leading]["role"] in LEADING:
        leading += 1
    if leading < 2:
        return turns
    said = "\n\n".join(turn["content"] for turn in turns[:leading] if turn["content"])
    return [{"role": "system", "content": said}, *turns[leading:]]
