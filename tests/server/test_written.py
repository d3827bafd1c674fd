"""Answers of the APIs that are written as events: one text, one answer, however the
engine cuts it into deltas."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest

from kvlathe.runtime.requests.request import Delta
from kvlathe.runtime.text.tokenizer import Tokenizer
from kvlathe.server.anthropic import answer as anthropic
from kvlathe.server.conventions import HERMES, KIMI, LLAMA, Convention
from kvlathe.server.harmony import HarmonyReader
from kvlathe.server.named_parser import NamedParser
from kvlathe.server.pieces import Reader
from kvlathe.server.read_answers import ReadChat, Reading, TextReader
from kvlathe.server.reasoning import CONVENTIONS, Thoughts
from kvlathe.server.responses import answer as responses
from kvlathe.server.responses.request import ResponsesRequest
from kvlathe.server.tagged import QWEN_CODER
from kvlathe.server.tagged_parser import TaggedParser
from kvlathe.server.tool_parser import ToolParser
from kvlathe.server.written import Writer
from tests.support.runtime_cases import llm

Json = dict[str, Any]
USAGE: Json = {
    "prompt_tokens": 1,
    "completion_tokens": 1,
    "total_tokens": 2,
    "prompt_tokens_details": {"cached_tokens": 0},
}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
THINK = next(one for one in CONVENTIONS if one.shows == ("</think>",))
HARMONY = (
    "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final"
    "<|message|>Well<|end|><|start|>assistant<|channel|>analysis<|message|>so<|end|>"
)


def spoken(convention: Convention, thinks: bool = False) -> Callable[[], Reader]:
    def reader() -> TextReader:
        thoughts = Thoughts(THINK, None) if thinks else None
        return TextReader(thoughts, ToolParser(convention))

    return reader


CASES = {
    "a call, then text": (spoken(HERMES), f"{CALL}\nDone now."),
    "text, a call, text": (spoken(HERMES), f"Look: {CALL}{CALL} ok"),
    "a bare call, then text": (
        spoken(LLAMA),
        '{"name": "f", "parameters": {"a": [{"b": 2}]}}. ok',
    ),
    "thoughts, a call": (spoken(HERMES, True), f"<think>hm</think>{CALL}"),
    "messages on channels": (HarmonyReader, HARMONY),
    "a call that is cut": (spoken(HERMES), CALL[: CALL.index("1}") + 1]),
    "a call with a list": (
        spoken(HERMES),
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    ),
    "a named call, then text": (
        lambda: TextReader(None, NamedParser(KIMI)),
        f'{KIMI.begin}{KIMI.opens}f:3{KIMI.separator}{{"a": 1}}{KIMI.after}{KIMI.end} ok',
    ),
    "a named call that is cut": (
        lambda: TextReader(None, NamedParser(KIMI)),
        f'{KIMI.begin}{KIMI.opens}f:3{KIMI.separator}{{"a": 1',
    ),
    "a call with tags, then text": (
        lambda: TextReader(None, TaggedParser(QWEN_CODER, {})),
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n"
        "</tool_call>\nok",
    ),
    "a call with tags that is cut": (
        lambda: TextReader(None, TaggedParser(QWEN_CODER, {})),
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</para",
    ),
}


@cache
def tokenizer() -> Tokenizer:
    return llm("torch", "split").tokenizer


def written(
    make: Callable[[], Writer], reader: Callable[[], Reader], deltas: Sequence[str]
) -> Writer:
    kind = ReadChat(
        tokenizer(), False, Reading(reader, lambda name, number: "id", True)
    )
    writer = make()
    writer.begin(USAGE)
    for text in deltas:
        for chunk in kind.chunks(Delta(0, text, ())):
            writer.add(chunk, 0)
    for chunk in kind.chunks(Delta(0, "", (), finish_reason="stop")):
        writer.add(chunk, 0)
    writer.end(USAGE, kind.cut_call(0))
    return writer


def message(reader: Callable[[], Reader], deltas: Sequence[str]) -> Json:
    writer = written(lambda: anthropic.Writer("m"), reader, deltas)
    assert isinstance(writer, anthropic.Writer)
    said = writer.message
    return {"content": said["content"], "stop": said["stop_reason"]}


def response(reader: Callable[[], Reader], deltas: Sequence[str]) -> Json:
    asked = ResponsesRequest.model_validate({"model": "m", "input": "x"})
    writer = written(lambda: responses.Writer(asked), reader, deltas)
    assert isinstance(writer, responses.Writer)
    output = [
        {name: value for name, value in item.items() if name != "id"}
        for item in writer.response["output"]
    ]
    return {"output": output, "status": writer.response["status"]}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("wrote", [message, response])
def test_an_answer_is_the_same_however_it_is_cut(
    name: str, wrote: Callable[[Callable[[], Reader], Sequence[str]], Json]
) -> None:
    reader, text = CASES[name]
    one = wrote(reader, [*text])
    places = range(1, len(text))
    for cut in places:
        assert wrote(reader, [text[:cut], text[cut:]]) == one, text[:cut]
    for first, second in itertools.islice(
        itertools.combinations(places, 2), 0, None, 7
    ):
        assert wrote(reader, [text[:first], text[first:second], text[second:]]) == one
    assert wrote(reader, [text]) == one


def test_a_call_keeps_its_arguments_where_text_follows_in_the_same_piece() -> None:
    reader, _ = CASES["a call, then text"]
    cut = CALL.index("1}")
    said = message(reader, [CALL[:cut], CALL[cut:] + "\nDone", " now."])
    assert said["content"] == [
        {"type": "tool_use", "id": "id", "name": "f", "input": {"a": 1}},
        {"type": "text", "text": "Done now."},
    ]
    assert said["stop"] == "tool_use"


def test_nobody_is_handed_a_call_that_was_cut() -> None:
    reader, text = CASES["a call that is cut"]
    assert message(reader, [text]) == {
        "content": [{"type": "text", "text": text}],
        "stop": "end_turn",
    }
    said = response(reader, [text])
    assert said["status"] == "incomplete"
    [call] = said["output"]
    assert call["type"] == "function_call" and call["status"] == "incomplete"


def test_arguments_that_are_no_object_are_text() -> None:
    reader, text = CASES["a call with a list"]
    assert message(reader, [text])["content"] == [{"type": "text", "text": text}]
