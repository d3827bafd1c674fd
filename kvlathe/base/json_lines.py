"""Files of JSON lines: one object a line, with fields that are text."""

from __future__ import annotations

import json
import re
from pathlib import Path

from kvlathe.base.errors import KvlatheError

HALF = re.compile("[\ud800-\udfff]")
"""Half of a pair of surrogates: JSON may name one alone, and no text has it."""


def read_rows(path: Path, keys: tuple[str, ...]) -> list[dict[str, str]]:
    """The objects of a .jsonl file; empty lines and a byte order mark are passed over.
    Raises KvlatheError, naming the line, where one of ``keys`` is no text."""
    try:
        # Not splitlines: texts may hold U+2028 and its like, which end no line.
        lines = path.read_text("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise KvlatheError(
            f"{path} cannot be read", str(error), "give a .jsonl file in UTF-8"
        ) from error
    rows = [
        _row(line, keys, f"line {number} of {path} cannot be used")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not rows:
        raise KvlatheError(
            f"{path} is empty",
            "it has no lines",
            "give a file with texts in it",
        )
    return rows


def _row(line: str, keys: tuple[str, ...], fact: str) -> dict[str, str]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # no JSON, or nested too deep
        row = None
    if not isinstance(row, dict) or not all(
        isinstance(row.get(key), str) for key in keys
    ):
        wanted = ", ".join(f'"{key}": "..."' for key in keys)
        raise KvlatheError(fact, f"it is not {{{wanted}}}", "correct the file")
    for key in keys:
        if half := HALF.search(row[key]):
            raise KvlatheError(
                fact,
                f"its {key} has half of a character, \\u{ord(half[0]):x}",
                "take it out of the file",
            )
    return row
