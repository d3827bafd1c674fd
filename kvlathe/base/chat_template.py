"""The chat template of a folder, checkpoint or engine: where it stands, and the sandbox
that it runs in.

A template is somebody else's program. It is written in jinja2 for the settings and
helpers of transformers, and runs in jinja2's immutable sandbox. A build compiles it
before it starts, so that an engine never holds a template that cannot run.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvlathe.base.errors import KvlatheError
from kvlathe.base.json_files import REPLACE, read_object

TEMPLATE_FILE = "chat_template.jinja"
SETTINGS_FILE = "tokenizer_config.json"


GENERATION = {"generation"}


class Generation(Extension):
    """``{% generation %} ... {% endgeneration %}`` marks the assistant's words for
    training. To us it is its content."""

    tags = GENERATION

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def sandbox() -> ImmutableSandboxedEnvironment:
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


def chat_template(folder: Path) -> str | None:
    """The folder's chat template: that of chat_template.jinja, else that of
    tokenizer_config.json (one, or the one named default of several). None where there
    is none. Raises KvlatheError where it is not text."""
    path = folder / TEMPLATE_FILE
    if path.is_file():
        try:
            return path.read_text("utf-8")
        except (OSError, UnicodeError) as error:
            raise KvlatheError(f"{path} cannot be read", str(error), REPLACE) from error
    path = folder / SETTINGS_FILE
    template = read_object(path).get("chat_template")
    if isinstance(template, list):
        template = _default(template)
    if template is not None and not isinstance(template, str):
        raise KvlatheError(
            f"the chat template in {path} cannot be read", "it is not text", REPLACE
        )
    return template


def _default(entries: list[object]) -> object:
    """The template named default in [{"name": ..., "template": ...}, ...]."""
    for entry in entries:
        if isinstance(entry, dict) and entry.get("name") == "default":
            return entry.get("template")
    return None


def check(folder: Path) -> None:
    """Raise KvlatheError where the folder has a chat template that cannot run."""
    template = chat_template(folder)
    if template is None:
        return
    try:
        _compile(template)
    except ValueError as error:
        raise KvlatheError(
            f"the chat template of {folder} cannot run",
            str(error),
            f"correct {TEMPLATE_FILE} or {SETTINGS_FILE}, or take the template out to "
            "build an engine that does not chat",
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


def _compile(template: str) -> None:
    """Raises ValueError, in words, where jinja2 cannot compile the template."""
    try:
        sandbox().from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"line {error.lineno}: {error.message}") from error
    except Exception as error:  # nested too deep, for jinja2 or for Python
        raise ValueError(str(error)) from error
