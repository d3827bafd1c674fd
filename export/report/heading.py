"""The heading of a report: facts about its build and not about its engine. Another
build of the same engine renews it.

The template marks each such element with ``data-field``; its text is escaped, so it
ends at the next ``<``.
"""

from __future__ import annotations

import re

from markupsafe import escape

FIELD = re.compile(r'(data-field="(\w+)">)[^<]*')


def heading(model: str, compression: str, command: str, created: str) -> dict[str, str]:
    """The text of every field. ``created`` is UTC, ISO 8601."""
    return {
        "title": f"{model}, {compression}: kvlathe report",
        "model": model,
        "created": f"{created[:16].replace('T', ' ')} UTC",
        "command": command,
    }


def renew(page: str, fields: dict[str, str]) -> str:
    """The page with its fields' text replaced."""

    def field(match: re.Match[str]) -> str:
        opening, name = match.groups()
        return opening + str(escape(fields[name]))

    return FIELD.sub(field, page)
