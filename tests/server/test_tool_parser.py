"""Tool calls out of texts: each convention, however the text is cut into pieces."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlathe.server.conventions import (
    CONVENTIONS,
    GRANITE,
    HERMES,
    LLAMA,
    LLAMA_4,
    MISTRAL,
    MISTRAL_NAMED,
    Convention,
    NamedConvention,
    convention_of,
)
from kvlathe.server.tool_parser import ToolParser

Call = tuple[str, dict[str, Any]]
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=5,
)
arguments = st.dictionaries(st.text('ab"\\}{<', max_size=4), values, max_size=3)
calls = st.lists(st.tuples(st.from_regex("[a-z_]{1,8}", fullmatch=True), arguments))


def written(convention: Convention, made: list[Call], indent: int | None) -> str:
    """As a model of the convention writes them."""
    said = [
        json.dumps({"name": name, convention.key: own}, indent=indent)
        for name, own in made
    ]
    if convention is HERMES:
        return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in said)
    if convention.opens:
        blank = " " if convention is MISTRAL else ""
        return f"{convention.begin}{blank}[{', '.join(said)}{convention.end}"
    if convention is LLAMA_4:
        return convention.begin + "".join(said)
    return "; ".join(said)


def read(convention: Convention, pieces: list[str]) -> tuple[str, list[Call]]:
    """The text and the calls that come out."""
    parser, text = ToolParser(convention), ""
    names: dict[int, str] = {}
    said: dict[int, str] = {}
    for piece in [p for part in pieces for p in parser.push(part)] + parser.close():
        text += piece.text
        if piece.name:
            names[piece.index] = piece.name
        if piece.index >= 0:
            said[piece.index] = said.get(piece.index, "") + piece.arguments
    assert [*names] == list(range(parser.calls))
    return text, [(names[i], json.loads(said[i])) for i in sorted(names)]


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places} | {len(text)})
    return [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]


@settings(max_examples=200, deadline=None)
@given(
    convention=st.sampled_from(CONVENTIONS),
    made=calls.filter(bool),
    indent=st.sampled_from([None, 1]),
    places=st.lists(st.integers(0, 5000), max_size=40),
)
def test_calls_come_out_however_the_text_is_cut(
    convention: Convention, made: list[Call], indent: int | None, places: list[int]
) -> None:
    text = written(convention, made, indent)
    assert read(convention, cut(text, places)) == ("", made)
    assert read(convention, [*text]) == ("", made)


parts = st.sampled_from(
    ["<tool_call>", "[TOOL_CALLS]", '{"name": "a"', "{}", "</tool_call>", "["]
)
texts = st.lists(parts | st.text("<tool_cal>[]TOOL_CALLS{}\n ab", max_size=9)).map(
    "".join
)


@settings(max_examples=400, deadline=None)
@given(
    convention=st.sampled_from(CONVENTIONS),
    text=texts,
    places=st.lists(st.integers(0, 99), max_size=20),
)
def test_a_text_without_calls_stays_what_it_is(
    convention: Convention, text: str, places: list[int]
) -> None:
    found, made = read(convention, cut(text, places))
    assert not made and found.split() == text.split()


def test_text_may_stand_before_calls() -> None:
    text = (
        'I look.\n<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'
    )
    assert read(HERMES, [*text]) == ("I look.\n", [("look", {"at": 1})])
    text = '<|python_tag|>{"name": "look", "parameters": {}}'
    assert read(LLAMA, [text]) == ("", [("look", {})])
    said = '{"name": "look", "parameters": {}}'
    begin, end = LLAMA_4.silent
    for text in (f"{begin}I look.{end}{said}", f"I look.{begin}{said}{end}\n"):
        assert read(LLAMA_4, [*text]) == ("I look.", [("look", {})])
    text = '<tool_call>[{"name": "look", "arguments": {}}]'
    assert read(GRANITE, [*text]) == ("", [("look", {})])


@settings(deadline=None)
@given(
    after=st.text("a \n<", max_size=8).map(lambda text: f"x{text}"),
    places=st.lists(st.integers(0, 80), max_size=6),
)
def test_text_may_stand_behind_calls(after: str, places: list[int]) -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n'
    text, made = read(HERMES, cut(call + after, places))
    assert (text, made) == (after, [("f", {})])


@given(places=st.lists(st.integers(0, 120), max_size=8))
def test_tool_calls_may_say_more_than_their_arguments(places: list[int]) -> None:
    more = '"id": "x}", "n": {"a": [1]}'
    calls = f'{{"name": "f", "arguments": {{}}, {more}}}, {{"name": "g", "arguments": {{}}, {more}}}'
    text, made = read(MISTRAL, cut(f"[TOOL_CALLS] [{calls}]", places))
    assert (text, made) == ("", [("f", {}), ("g", {})])


def test_fields_may_come_in_another_order() -> None:
    text = '<tool_call>{"arguments": {"a": "}"}, "name": "f"}</tool_call>'
    assert read(HERMES, [*text]) == ("", [("f", {"a": "}"})])


def test_text_that_only_looks_like_a_tool_call_is_text() -> None:
    for convention, text in (
        (LLAMA, '{"answer": 42}'),
        (LLAMA, '{"name": "x"'),
        (HERMES, "<tool_call>no json</tool_call>"),
        (MISTRAL, "[TOOL_CALLS] none"),
        (MISTRAL, "[TOOL_CALLS]"),
    ):
        assert read(convention, [*text]) == (text, [])


def test_arguments_of_tool_calls_stream_as_they_are_written() -> None:
    parser = ToolParser(HERMES)
    parser.push('<tool_call>\n{"name": "f", "arguments": ')
    assert [p.arguments for p in parser.push('{"city": "Zu')] == ["", '{"city": "Zu']
    assert [p.arguments for p in parser.push('rich"}')] == ['rich"}']


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% if tools %}<tool_call>{% endif %}", HERMES),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", MISTRAL),
        ('{% if tools %}{{ \'{"name": "f", "parameters": {}}\' }}{% endif %}', LLAMA),
        ("{% if tools %}[TOOL_CALLS]f[ARGS]{% endif %}", MISTRAL_NAMED),
        ("{% if tools %}<function_call>{% endif %}", None),
        ("{% if tools %}<tool_call><function=x>{% endif %}", None),
        ("{{ messages[0].content }}<tool_call>", None),
        ("{% if tools %}{{ tools }}{% endif %}", None),
    ],
)
def test_chat_templates_show_their_convention_of_tool_calls(
    template: str, expected: Convention | NamedConvention | None
) -> None:
    assert convention_of(template) == expected


FRAGMENTS = (
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]"),
    *("<|tool_call|>", "functools", "<|python_start|>", "<|python_end|>"),
    *("<tool_calls>", "</tool_calls>"),
    *('{"name": "f", "arguments": ', '{"name": "g", "parameters": ', '{"a": "}"}'),
    *('{"arguments": {}, "name": ', '"h"}', "null}", '"x"}', "{}}", "[1]}", '{"'),
    *("[", "]", "{", "}", ",", ";", " ", "\n", '"', "\\", "<", "o", "ops "),
)
"""Parts of calls, whole and broken, that are strewn over a text."""


def in_words(convention: Convention, pieces: list[str]) -> tuple[str, dict[int, str]]:
    """The text, and each call's name and arguments as they were written."""
    parser, text = ToolParser(convention), ""
    said: dict[int, str] = {}
    for piece in [p for part in pieces for p in parser.push(part)] + parser.close():
        text += piece.text
        if piece.index >= 0:
            own = said.get(piece.index, "")
            said[piece.index] = own + piece.name + piece.arguments
    return text, said


@pytest.mark.parametrize("convention", CONVENTIONS, ids=lambda one: one.shows)
@settings(max_examples=400)
@given(
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=12),
    cuts=st.sets(st.integers(0, 150), max_size=6),
)
def test_one_text_has_one_reading_however_it_comes(
    convention: Convention, fragments: list[str], cuts: set[int]
) -> None:
    text = "".join(fragments)
    places = [0, *sorted(cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(places)]
    whole = in_words(convention, [text])
    assert in_words(convention, pieces) == whole == in_words(convention, [*text])


@pytest.mark.parametrize("size", [4060, 4096, 5000])
@pytest.mark.parametrize(
    "head", ['{"name": "NAME", "arguments": {}}', '{"arguments": {}, "name": "NAME"}']
)
def test_a_long_name_has_one_reading_however_it_comes(size: int, head: str) -> None:
    text = f"<tool_call>{head.replace('NAME', 'n' * size)}</tool_call>"
    pieces = [text[at : at + 19] for at in range(0, len(text), 19)]
    assert in_words(HERMES, [text]) == in_words(HERMES, pieces)


@pytest.mark.parametrize(
    "call",
    [
        '{"name": null, "arguments": {}}',
        '{"arguments": {}, "name": null}',
        '{"arguments": {}, "name": 5}',
        '{"name": "", "arguments": {}}',
        '{"arguments": null, "name": "f"}',
        '{"name": "f", "arguments": "x"}',
        '{"arguments": "x", "name": "f"}',
    ],
)
def test_calls_without_a_function_or_arguments_are_text(call: str) -> None:
    text = f"<tool_call>\n{call}\n</tool_call>"
    assert in_words(HERMES, [text]) == in_words(HERMES, [*text]) == (text, {})


def test_a_call_after_a_mark_that_begins_none_is_a_call() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    found = in_words(HERMES, [f"I use <tool_call> tags. {call}"])
    assert found == ("I use <tool_call> tags. ", {0: 'f{"a": 1}'})
