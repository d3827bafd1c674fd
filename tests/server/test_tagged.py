"""Tool calls whose arguments stand between tags: each convention, however the text is
cut, and structures that hold to them."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlathe.base.errors import KvlatheError
from kvlathe.runtime.text.guide import Guides
from kvlathe.runtime.text.masks import Guide, no_bits
from kvlathe.runtime.text.tokenizer import Tokenizer
from kvlathe.server.manner import calling_of
from kvlathe.server.tagged import (
    GLM,
    MINIMAX,
    QWEN_CODER,
    TAGGED,
    TaggedConvention,
    value_of,
)
from kvlathe.server.tagged_parser import TaggedParser
from tests.support.runtime_cases import MODEL

Json = dict[str, Any]
SCHEMA: Json = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "maxLength": 6},
        "unit": {"enum": ["C", "F"]},
        "maybe": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["text", "count"],
    "additionalProperties": False,
}
TOOLS: dict[str, Json | bool] = {"f": SCHEMA, "g": {"type": "object"}}
texts = st.text('ab"\\1 é{}', max_size=6).filter(lambda one: one != "null")
given_arguments = st.fixed_dictionaries(
    {},
    optional={
        "text": texts,
        "unit": st.sampled_from(["C", "F"]),
        "maybe": st.none() | texts,
        "count": st.integers(),
        "flags": st.lists(st.booleans(), max_size=2),
    },
)


def written(convention: TaggedConvention, name: str, own: Json) -> str:
    """As a model of the convention writes a call."""
    parts = [f"{convention.begin}{convention.opens}{name}{convention.closes}"]
    for key, value in own.items():
        plain = isinstance(value, str) or not convention.other
        said = value if isinstance(value, str) else json.dumps(value)
        keyed = convention.keyed if plain else convention.other
        head = f"{convention.key}{key}{keyed}{convention.value}"
        parts.append(f"{head}{said}{convention.after}")
    return "".join([*parts, convention.tail, convention.end])


def read(
    convention: TaggedConvention, pieces: list[str]
) -> tuple[str, list[tuple[str, Json]]]:
    parser, text = TaggedParser(convention, TOOLS), ""
    names: list[str] = []
    said: list[Json] = []
    for piece in [p for part in pieces for p in parser.push(part)] + parser.close():
        text += piece.text
        if piece.name:
            assert piece.index == len(names)
            names.append(piece.name)
        if piece.arguments:
            said.append(json.loads(piece.arguments))
    assert parser.calls == len(names)
    return text, [*zip(names, said, strict=True)]


@pytest.mark.parametrize("convention", TAGGED, ids=lambda one: one.begin)
@settings(max_examples=100)
@given(
    made=st.lists(given_arguments, min_size=1, max_size=3),
    before=st.sampled_from(["", "I look.\n", "<", "<tool"]),
    cuts=st.sets(st.integers(0, 300), max_size=6),
)
def test_arguments_between_tags_have_the_types_of_the_schema(
    convention: TaggedConvention, made: list[Json], before: str, cuts: set[int]
) -> None:
    text = before + "\n".join(written(convention, "f", one) for one in made) + "\nDone"
    for pieces in (
        [text],
        [*text],
        [text[a:b] for a, b in pairwise([0, *sorted(cuts), len(text)])],
    ):
        assert read(convention, pieces) == (f"{before}Done", [("f", x) for x in made])


@pytest.mark.parametrize("convention", TAGGED, ids=lambda one: one.begin)
@settings(max_examples=400)
@given(data=st.data())
def test_one_text_with_tags_has_one_reading(
    convention: TaggedConvention, data: st.DataObject
) -> None:
    own = convention
    parts = [
        own.begin,
        own.end,
        own.opens,
        own.closes,
        own.key,
        own.keyed,
        own.value,
        own.after,
    ]
    parts += [own.tail, "f", "text", "count", "1", "{", " ", "\n", "<", own.begin[:5]]
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=14)))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
    whole = read(convention, [text])
    assert read(convention, pieces) == whole == read(convention, [*text])


@pytest.mark.parametrize("convention", TAGGED, ids=lambda one: one.begin)
def test_text_with_tags_that_is_no_call_is_text(convention: TaggedConvention) -> None:
    begin, end = convention.begin, convention.end
    head = f"{begin}{convention.opens}f{convention.closes}"
    for text in (
        begin,
        f"{begin}{end}",
        f"{begin} a b {end}",
        f"{begin} {'words ' * 60}",
        f"{head}words{convention.tail}{end}",
        f"{head}{convention.key}a{convention.tail}{end}",
    ):
        assert read(convention, [*text]) == (text, [])
    call = written(convention, "f", {"count": 1})
    assert read(convention, [f"{begin} is a tag. {call}"]) == (
        f"{begin} is a tag. ",
        [("f", {"count": 1})],
    )


KINDS: list[tuple[str, object, object]] = [
    ("7", {"type": "integer"}, 7),
    ("7", {"type": "string"}, "7"),
    ("7", {"type": ["string", "integer"]}, 7),
    ("7.5", {"type": "number"}, 7.5),
    ("True", {"type": "boolean"}, True),
    ("false", {"type": "boolean"}, False),
    ("true", {"type": "string"}, "true"),
    ("null", {"type": ["string", "null"]}, None),
    ("None", {"type": ["string", "null"]}, "None"),
    ("None", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, None),
    ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
    ('{"a": [1]}', {"type": "string"}, '{"a": [1]}'),
    ("[1]", {"type": ["array", "string"]}, [1]),
    ("b", {"enum": ["a", "b", 1]}, "b"),
    ("1", {"enum": ["a", "b", 1]}, 1),
    ("NaN", {"type": "number"}, "NaN"),
    ("1e999", {"type": "number"}, "1e999"),
    ("[1]", {}, [1]),
    ("words", {}, "words"),
    ("words", True, "words"),
]
"""As vLLM reads them; where a schema says nothing, it takes all for strings."""


@pytest.mark.parametrize(("text", "schema", "expected"), KINDS)
def test_values_between_tags_have_the_types_of_their_schemas(
    text: str, schema: object, expected: object
) -> None:
    found = value_of(text, {"type": "object", "properties": {"a": schema}}, "a")
    assert found == expected and type(found) is type(expected)


def test_calls_may_come_without_the_mark_that_models_forget() -> None:
    call = written(QWEN_CODER, "f", {"count": 1, "text": "a"})
    forgot = call.removeprefix(QWEN_CODER.begin)
    assert read(QWEN_CODER, [*f"I look.{forgot}"]) == (
        "I look.\n",
        [("f", {"count": 1, "text": "a"})],
    )
    forgot = call.replace("\n</parameter>", "", 1)
    assert read(QWEN_CODER, [*forgot])[1] == [("f", {"count": 1, "text": "a"})]


def test_one_section_may_have_several_calls() -> None:
    one = written(MINIMAX, "f", {"text": "a\n"}).removesuffix(MINIMAX.end)
    two = written(MINIMAX, "f", {"count": 2}).removeprefix(MINIMAX.begin)
    assert read(MINIMAX, [*one, *two]) == (
        "",
        [("f", {"text": "a\n"}), ("f", {"count": 2})],
    )


def allowed(guide: Guide) -> list[int]:
    bits = no_bits(1, guide.vocabulary)
    guide.fill(bits)
    words = bits.view("uint32")[0]
    return [t for t in range(guide.vocabulary) if words[t // 32] >> t % 32 & 1]


@pytest.mark.parametrize("convention", TAGGED, ids=lambda one: one.begin)
def test_a_call_that_must_be_has_arguments_of_its_schema(
    convention: TaggedConvention,
) -> None:
    """Whatever is drawn of what is allowed."""
    tokenizer = Tokenizer(MODEL)
    guides = Guides(tokenizer, 8192)
    structure = convention.structure({"f": SCHEMA}, False, tokenizer)
    for seed in range(4):
        guide, draw, ids = guides.guide(structure), random.Random(seed), list[int]()
        while not guide.stopped and len(ids) < 400:
            left = allowed(guide)
            ids.append(draw.choice(left))
            guide.accept(ids[-1])
            assert guide.failure is None
        plain = [one for one in ids if one not in tokenizer.special_ids]
        text, calls = read(convention, [tokenizer.decode(plain)])
        assert not text and len(calls) == 1
        jsonschema.validate(calls[0][1], SCHEMA)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "x"}}},
        {"type": "object", "properties": {}, "minProperties": 1},
        {"type": "object", "properties": {}, "required": ["a"]},
    ],
)
def test_schemas_that_tags_cannot_hold_to_are_refused(schema: Json) -> None:
    tokenizer = Tokenizer(MODEL)
    structure = GLM.structure({"f": schema}, False, tokenizer)
    with pytest.raises(KvlatheError, match=r"between tags|required names"):
        Guides(tokenizer, 8192).guide(structure)


def test_templates_show_conventions_with_tags() -> None:
    for convention in TAGGED:
        template = "{% if tools %}" + "".join(convention.shows)
        assert calling_of(template) == convention
    assert calling_of("{{ messages }}<arg_key>") is None
