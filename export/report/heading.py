"""The heading of a report: facts about its build and not about its engine. Another
build of the same engine renews it.

The template marks each such element with ``data-field``; its text is escaped, so it
ends at the next ``<``.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from markupsafe import escape

FIELD = re.compile(r'(data-field="(\w+)">)[^<]*')


@dataclass(frozen=True, slots=True)
class Heading:
    """``created`` is UTC, ISO 8601. ``engine``, ``checkpoint``: folders that the page's
    commands name."""

    model: str
    compression: str
    command: str
    created: str
    engine: Path
    checkpoint: Path


def heading(said: Heading) -> dict[str, str]:
    """The text of every field."""
    engine, plain = said.engine, uncompressed_beside(said.engine)
    return {
        "title": f"{said.model}, {said.compression}: kvlathe report",
        "model": said.model,
        "created": f"{said.created[:16].replace('T', ' ')} UTC",
        "command": said.command,
        "baseline": _typed("build", "--model", said.checkpoint, "--output-dir", plain),
        "examine": _typed("eval", engine, "--baseline", plain, "--suite"),
        "load": _typed("bench-serve", plain, engine),
    }


def uncompressed_beside(engine: Path) -> Path:
    """The folder of the uncompressed engine that the page's commands compare with."""
    return engine.parent / f"{engine.name or 'engine'}-uncompressed"


def _typed(*words: str | Path) -> str:
    """A command as one would type it."""
    typed = shlex.join(["kvlathe", *map(str, words)])
    return typed.encode("utf-8", "backslashreplace").decode()  # names may be bytes


def renew(page: str, fields: dict[str, str]) -> str:
    """The page with its fields' text replaced."""

    def field(match: re.Match[str]) -> str:
        opening, name = match.groups()
        return opening + str(escape(fields[name]))

    return FIELD.sub(field, page)
