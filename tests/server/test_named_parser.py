"""Tool calls whose name stands before their arguments: each convention, however the text
is cut."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlathe.server.conventions import (
    DEEPSEEK,
    DEEPSEEK_R1,
    KIMI,
    MISTRAL_NAMED,
    NAMED,
    NamedConvention,
    convention_of,
)
from kvlathe.server.named_parser import NamedParser

Call = tuple[str, dict[str, Any]]
values = st.none() | st.integers() | st.text(max_size=8) | st.lists(st.text(max_size=3))
arguments = st.dictionaries(st.text('ab"\\}{<', max_size=4), values, max_size=3)
calls = st.lists(
    st.tuples(st.from_regex("[a-z_.]{1,8}", fullmatch=True), arguments),
    min_size=1,
    max_size=3,
)


def ids(convention: NamedConvention) -> str:
    return convention.shows[-1]


def written(convention: NamedConvention, made: list[Call]) -> str:
    """As a model of the convention writes them."""
    said: list[str] = []
    for number, (name, own) in enumerate(made):
        count = f":{number}" if convention.counted else ""
        said_name = f"{convention.prefix}{name}{count}"
        head = f"{convention.opens}{said_name}{convention.separator}"
        said.append(f"{head}{json.dumps(own)}{convention.after}")
    return f"{convention.begin}{convention.between.join(said)}{convention.end}"


def read(
    convention: NamedConvention, pieces: list[str]
) -> tuple[str, dict[int, str], dict[int, str]]:
    """The text, and each call's name and arguments as they were written."""
    parser, text = NamedParser(convention), ""
    names: dict[int, str] = {}
    said: dict[int, str] = {}
    for piece in [p for part in pieces for p in parser.push(part)] + parser.close():
        text += piece.text
        if piece.name:
            assert piece.index not in names
            names[piece.index] = piece.name
        if piece.index >= 0:
            said[piece.index] = said.get(piece.index, "") + piece.arguments
    assert len(names) - bool(parser.unfinished) == parser.calls
    return text, names, said


@pytest.mark.parametrize("convention", NAMED, ids=ids)
@settings(max_examples=100)
@given(
    made=calls,
    before=st.sampled_from(["", "I look.\n", "<", "a < b "]),
    after=st.sampled_from(["", "\nDone.", "<|"]),
    cuts=st.sets(st.integers(0, 400), max_size=7),
)
def test_calls_come_out_as_they_were_written(
    convention: NamedConvention,
    made: list[Call],
    before: str,
    after: str,
    cuts: set[int],
) -> None:
    text = before + written(convention, made) + after
    places = [0, *sorted(cuts), len(text)]
    for pieces in ([text], [*text], [text[a:b] for a, b in pairwise(places)]):
        said, names, own = read(convention, pieces)
        assert said == before + after.lstrip()
        found = [(names[i], json.loads(own[i])) for i in range(len(made))]
        assert found == made


@pytest.mark.parametrize("convention", NAMED, ids=ids)
@settings(max_examples=400)
@given(data=st.data())
def test_one_text_has_one_reading_however_it_is_cut(
    convention: NamedConvention, data: st.DataObject
) -> None:
    own = (convention.begin, convention.opens, convention.separator, convention.after)
    parts = [
        *own,
        convention.end,
        "f",
        ":0",
        "{}",
        '{"a": 1}',
        "{",
        "}",
        '"',
        " ",
        "\n",
    ]
    parts += [convention.begin[:4], convention.after[:5], "[1]", "n" * 300]
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=12)))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    whole = read(convention, [text])
    pieces = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
    assert read(convention, pieces) == whole == read(convention, [*text])


@pytest.mark.parametrize("convention", NAMED, ids=ids)
def test_blanks_between_a_call_and_a_mark_have_one_reading(
    convention: NamedConvention,
) -> None:
    """The mark begins no call: it has no name."""
    call = written(convention, [("f", {})])
    text = f"{call}\n{convention.opens}{convention.separator}{{}}"
    assert read(convention, [text]) == read(convention, [*text])


@pytest.mark.parametrize("convention", NAMED, ids=ids)
def test_text_that_only_looks_like_a_call_is_text(convention: NamedConvention) -> None:
    for text in (
        convention.begin,
        f"{convention.begin} none",
        f"{convention.begin}{convention.end}",
        f"{convention.begin}{convention.opens}f",
        f"{convention.begin}{convention.opens}a b{convention.separator}{{}}",
        f"{convention.begin}{convention.opens}f{convention.separator}[1]",
        f"{convention.opens}f" if convention.begin else "",
    ):
        assert read(convention, [*text]) == (text, {}, {})


def test_templates_show_conventions_of_names_before_arguments() -> None:
    for convention in (DEEPSEEK, DEEPSEEK_R1, KIMI):
        template = "{% if tools %}" + "".join(convention.shows)
        assert convention_of(template) == convention
    assert KIMI.new_id("f", 2) == "functions.f:2"


@pytest.mark.parametrize(
    ("convention", "said", "expected"),
    [
        (KIMI, "functions.f:7", ("f", "functions.f:7")),
        (KIMI, " f:12\n", ("f", "f:12")),
        (MISTRAL_NAMED, "f[CALL_ID]abcdefghi", ("f", "abcdefghi")),
        (DEEPSEEK, "f", ("f", "")),
    ],
)
def test_calls_keep_the_ids_that_a_model_gave_them(
    convention: NamedConvention, said: str, expected: tuple[str, str]
) -> None:
    parser = NamedParser(convention)
    text = f"{convention.begin}{convention.opens}{said}{convention.separator}{{}}"
    [named] = [piece for one in text for piece in parser.push(one) if piece.name]
    assert (named.name, named.id) == expected
