"""Conventions of tool calls: what an answer that must call may say is what is read as
calls, and earlier calls reach templates in the form that they take."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from kvlathe.base.chat_template import sandbox
from kvlathe.base.errors import KvlatheError
from kvlathe.base.limited import LimitError
from kvlathe.runtime.text.guide import Guides
from kvlathe.runtime.text.masks import no_bits
from kvlathe.runtime.text.tokenizer import Tokenizer
from kvlathe.server.call_form import CallForm, form_of
from kvlathe.server.conventions import (
    CONVENTIONS,
    HERMES,
    HUNYUAN,
    LLAMA,
    LLAMA_4,
    NAMED,
    NEMOTRON,
    Calling,
    Convention,
    NamedConvention,
)
from kvlathe.server.manner import calling_of, parser_of
from kvlathe.server.messages import Message
from kvlathe.server.tagged import QWEN_CODER, TAGGED, TaggedConvention
from tests.support.runtime_cases import MODEL

Json = dict[str, Any]
NOW: Json = {"type": "object", "properties": {}, "additionalProperties": False}
WEATHER: Json = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: dict[str, Json | bool] = {"weather": WEATHER, "now": NOW}
CALLS: list[tuple[str, Json]] = [("weather", {"city": "Bern", "days": 3}), ("now", {})]
ALL: tuple[Calling, ...] = (*CONVENTIONS, *NAMED, *TAGGED)
ONE_CALL = (LLAMA, *(one for one in NAMED if one.counted))


def begun(own: Convention) -> str:
    return own.opens if own is LLAMA else own.begin + own.opens


def written(own: Calling, made: list[tuple[str, Json]]) -> str:
    """As a model of the convention writes calls."""
    if isinstance(own, Convention):
        said = [
            f'{own.before}{{"name": "{name}", "{own.key}": {json.dumps(args)}}}{own.after}'
            for name, args in made
        ]
        return begun(own) + own.between.join(said) + own.end
    if isinstance(own, NamedConvention):
        number = ":0" if own.counted else ""
        said = [
            f"{own.opens}{own.prefix}{name}{number}{own.separator}{json.dumps(args)}"
            f"{own.after}"
            for name, args in made
        ]
        return own.begin + own.between.join(said) + own.end
    assert isinstance(own, TaggedConvention)
    said: list[str] = []
    for name, args in made:
        other = own.other or own.keyed
        parts = [
            f"{own.key}{key}{own.keyed if isinstance(value, str) else other}"
            f"{own.value}{value}{own.after}"
            for key, value in args.items()
        ]
        head = f"{own.begin}{own.opens}{name}{own.closes}"
        said.append(f"{head}{''.join(parts)}{own.tail}{own.end}")
    return "\n".join(said)


def read(own: Calling, text: str) -> tuple[str, list[tuple[str, Json]]]:
    parser = parser_of(own, TOOLS)
    assert parser is not None
    pieces = [piece for one in text for piece in parser.push(one)] + parser.close()
    names = [piece.name for piece in pieces if piece.name]
    said = ["" for _ in names]
    for piece in pieces:
        if piece.index >= 0:
            said[piece.index] += piece.arguments
    made = zip(names, map(json.loads, said), strict=True)
    return "".join(piece.text for piece in pieces), [*made]


def allows(guides: Guides, structure: Any, ids: list[int]) -> bool:  # noqa: ANN401
    """Whether an answer of the structure may be these tokens, and end there."""
    guide = guides.guide(structure)
    for token in ids:
        bits = no_bits(1, guide.vocabulary)
        guide.fill(bits)
        if not bits.view("uint32")[0, token // 32] >> token % 32 & 1:
            return False
        guide.accept(token)
    return guide.failure is None and guide.stopped


@pytest.mark.parametrize("own", ALL, ids=lambda one: str(one.shows))
def test_answers_that_must_call_are_read_as_calls(own: Calling) -> None:
    tokenizer = Tokenizer(MODEL)
    structure = own.structure(TOOLS, True, tokenizer)
    guides = Guides(tokenizer, 8192)
    made = CALLS[:1] if own in ONE_CALL else CALLS
    text = written(own, made)
    assert read(own, text) == ("", made)
    ids = tokenizer.encode(text, add_special_tokens=False)
    eos = min(tokenizer.eos_ids)
    assert allows(guides, structure, ids) or allows(guides, structure, [*ids, eos])
    wrong = tokenizer.encode(written(own, [("other", {})]), add_special_tokens=False)
    assert not allows(guides, structure, [*wrong, eos])


@pytest.mark.parametrize(
    "own", [HERMES, NAMED[0], TAGGED[0]], ids=lambda one: str(one.shows)
)
def test_calls_that_must_be_have_the_tokens_that_a_model_has_for_marks(
    tmp_path: Path, own: Calling
) -> None:
    """Qwen's <tool_call> is an added token and not special."""
    text = written(own, CALLS[:1])
    backend = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    marks = sorted({*re.findall(r"</?[^<>\s=]+>", text)})
    backend.add_tokens([tokenizers.AddedToken(one, special=False) for one in marks])
    backend.save(str(tmp_path / "tokenizer.json"))
    shutil.copy(MODEL / "generation_config.json", tmp_path)
    tokenizer = Tokenizer(tmp_path)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert marks and max(ids) >= 8192
    structure = own.structure(TOOLS, True, tokenizer)
    guides = Guides(tokenizer, 8192 + len(marks))
    eos = min(tokenizer.eos_ids)
    assert allows(guides, structure, ids) or allows(guides, structure, [*ids, eos])


@pytest.mark.parametrize("own", [HERMES, QWEN_CODER], ids=lambda one: str(one.shows))
def test_a_new_line_behind_a_call_need_not_begin_another(own: Calling) -> None:
    """Qwen writes one before it ends: it would call and call until it is cut."""
    tokenizer = Tokenizer(MODEL)
    guides, eos = Guides(tokenizer, 8192), min(tokenizer.eos_ids)
    for made in (CALLS[:1], CALLS):
        text = f"{written(own, made)}\n"
        assert read(own, text) == ("", made)
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert allows(guides, own.structure(TOOLS, True, tokenizer), [*ids, eos])


@pytest.mark.parametrize("own", [HUNYUAN, NEMOTRON, LLAMA_4], ids=lambda one: one.shows)
def test_text_may_stand_around_lists_of_calls(own: Convention) -> None:
    text = f"I look.{written(own, CALLS)}\nDone."
    if own is LLAMA_4:
        text = text.replace(f"I look.{own.silent[0]}", f"{own.silent[0]}I look.")
    assert read(own, text) == ("I look.Done.", CALLS)


FORMS = {
    "{{ call.function.arguments | tojson }}": CallForm(),
    "{% for key, value in call.function.arguments | items %}{{ key }}={{ value }}"
    "{% endfor %}": CallForm(),
    "{{ 'x' + call.function.arguments }}": CallForm(as_text=True),
    "{{ call.function.arguments }}": CallForm(as_text=True),
    "{% if m.content is none %}{{ call.function.arguments | tojson }}{% endif %}": CallForm(
        without_content=True
    ),
    "{% if m.content is none %}{{ 'x' + call.function.arguments }}{% endif %}": CallForm(
        as_text=True, without_content=True
    ),
    "": CallForm(),
}
"""Ways in which templates write arguments -> the form that they take."""


@pytest.mark.parametrize("way", FORMS)
def test_earlier_calls_have_the_form_that_a_template_takes(way: str) -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
        "{% for call in m.tool_calls or [] %}"
        f"[{{{{ call.function.name }}}} {way}]"
        "{% endfor %}{% endfor %}"
    )

    def render(turns: list[Json]) -> str:
        try:
            return sandbox().from_string(template).render(messages=turns)
        except LimitError as error:
            raise KvlatheError("refused", str(error), "none") from error

    form = form_of(render)
    assert form is not None and form == FORMS[way]
    calls = [{"function": {"name": "f", "arguments": '{"a":"b"}'}}]
    turn = {"role": "assistant", "content": "Look.", "tool_calls": calls}
    text = render(form.turns([Message.model_validate(turn)]))
    assert "Look." in text and "[f " in text
    if form.as_text:
        assert '{"a":"b"}' in text


def test_a_template_that_refuses_all_trials_shows_no_form() -> None:
    def refuses(turns: list[Json]) -> str:
        raise KvlatheError("refused", "it takes too long", "none")

    assert form_of(refuses) is None


@pytest.mark.parametrize(
    "mark", ["<|START_ACTION|>", '"tool_name"', "<function_call>", "<atem:", "]<]"]
)
def test_conventions_that_are_not_known_are_taken_for_no_other(mark: str) -> None:
    template = '{% if tools %}<tool_call>{"name": "f", "parameters": {}}{% endif %}'
    assert calling_of(template) is not None
    assert calling_of(template + mark) is None
