"""The chat template of a folder, checkpoint or engine: where it stands, and the sandbox
that it runs in.

A template is somebody else's program. It is written in jinja2 for the settings and
helpers of transformers, and runs in jinja2's immutable sandbox. A build compiles it
before it starts, so that an engine never holds a template that cannot run.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvlathe.base.errors import KvlatheError
from kvlathe.base.json_files import REPLACE, read_object
from kvlathe.base.limited import Limited, LimitError

TEMPLATE_FILE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"
"""The folder of NAME.jinja, where a checkpoint has several templates as files."""
DEFAULT, TOOL_USE = "default", "tool_use"
"""Names of templates: the second one is for conversations with tools."""
SETTINGS_FILE = "tokenizer_config.json"


MOST_CHARACTERS = 1 << 24
"""Characters of a prompt that a template writes."""
GENERATION = {"generation"}


class Generation(Extension):
    """``{% generation %} ... {% endgeneration %}`` marks the assistant's words for
    training. To us it is its content."""

    tags = GENERATION

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def environment() -> ImmutableSandboxedEnvironment:
    """The environment that chat templates are written for: transformers' settings and
    helpers."""
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", Generation],
    )

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def now(form: str) -> str:
        return datetime.datetime.now().strftime(form)

    def to_json(
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        **options: Any,  # noqa: ANN401
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    env.filters["tojson"] = to_json
    names = cast("dict[str, object]", env.globals)
    names.update(raise_exception=refuse, strftime_now=now)
    return env


@lru_cache(8)
def _compiled(template: str) -> jinja2.Template:
    return environment().from_string(template)


def rendered(template: str, values: Mapping[str, object]) -> str:
    """The text that a template makes of ``values``, computed here: ``Template.render``
    does it within limits. Raises whatever the template does."""
    pieces: list[str] = []
    size = 0
    for piece in _compiled(template).generate(**values):
        pieces.append(piece)
        size += len(piece)
        if size > MOST_CHARACTERS:
            raise ValueError(f"it writes more than {MOST_CHARACTERS:,} characters")
    return "".join(pieces)


_rendered_within_limits = Limited(__name__, "rendered", seconds=5.0)


class Template:
    """A chat template: somebody else's program, which runs in a child that is ended where
    it takes more than 5 s, or too much memory."""

    def __init__(self, text: str) -> None:
        self._text = text

    def render(self, **values: object) -> str:
        """The prompt that it makes of ``values``, which JSON can hold. Raises LimitError
        for whatever it raises, and beyond the limits."""
        return str(_rendered_within_limits(self._text, values))


class Sandbox:
    """Makes templates that run within limits, as jinja2's environments make others.

    >>> sandbox().from_string("Hello {{ name }}").render(name="you")
    'Hello you'
    """

    def from_string(self, text: str) -> Template:
        """A template. It is compiled where it runs."""
        return Template(text)


def sandbox() -> Sandbox:
    """The place where chat templates run."""
    return Sandbox()


def chat_templates(folder: Path) -> dict[str, str]:
    """The folder's chat templates by name: those of files, else those of
    tokenizer_config.json, where one alone is the default. Raises KvlatheError where one
    is not text."""
    files = {DEFAULT: folder / TEMPLATE_FILE} | {
        path.stem: path for path in sorted((folder / MORE_TEMPLATES).glob("*.jinja"))
    }
    found = {name: _read(path) for name, path in files.items() if path.is_file()}
    if found:
        return found
    path = folder / SETTINGS_FILE
    given = read_object(path).get("chat_template")
    named = given if isinstance(given, list) else [{"name": DEFAULT, "template": given}]
    templates: dict[str, str] = {}
    for one in named:
        if not isinstance(one, dict) or one.get("template") is None:
            continue
        name, text = one.get("name"), one["template"]
        if not isinstance(name, str) or not isinstance(text, str):
            raise KvlatheError(
                f"the chat template in {path} cannot be read", "it is not text", REPLACE
            )
        templates[name] = text
    return templates


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeError) as error:
        raise KvlatheError(f"{path} cannot be read", str(error), REPLACE) from error


def check(folder: Path) -> None:
    """Raise KvlatheError where the folder has a chat template that cannot run."""
    for name, template in chat_templates(folder).items():
        try:
            _compile(template)
        except ValueError as error:
            which = "" if name == DEFAULT else f" {name}"
            raise KvlatheError(
                f"the chat template{which} of {folder} cannot run",
                str(error),
                f"correct {TEMPLATE_FILE} or {SETTINGS_FILE}, or take the template out "
                "to build an engine that does not chat",
            ) from error


def read_template(path: Path) -> str:
    """A chat template out of a file. Raises KvlatheError where it is none."""
    try:
        text = path.read_text("utf-8")
        _compile(text)
    except (OSError, ValueError) as error:
        raise KvlatheError(
            f"{path} is no chat template",
            str(error),
            "give a file in jinja2's language",
        ) from error
    return text


def syntax_fault(template: str) -> str:
    """A fault that jinja2 finds in a template; empty for none."""
    try:
        _compiled(template)
    except jinja2.TemplateSyntaxError as error:
        return f"line {error.lineno}: {error.message}"
    except Exception as error:  # nested too deep, for jinja2 or for Python
        return str(error) or type(error).__name__
    return ""


check_syntax = Limited(__name__, "syntax_fault", seconds=5.0)
"""The same in a child. Raises LimitError."""


def read_names(template: str) -> list[str]:
    """The values that a template reads."""
    found = meta.find_undeclared_variables(environment().parse(template))
    return sorted(found)


_names_within_limits = Limited(__name__, "read_names", seconds=5.0)


@lru_cache(8)
def variables_of(template: str) -> frozenset[str]:
    """The values that a template reads; none where it cannot be read."""
    try:
        found = cast("list[str]", _names_within_limits(template))
    except LimitError:
        return frozenset()
    return frozenset(found)


def _compile(template: str) -> None:
    """Raises ValueError, in words, where jinja2 cannot compile the template."""
    compiled = check_syntax(template)
    if compiled:
        raise ValueError(compiled)
