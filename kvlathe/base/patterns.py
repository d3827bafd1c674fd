"""Regular expressions out of somebody else's files, matched within a time: Python's
engine tries every way through an expression."""

from __future__ import annotations

import re

from kvlathe.base.limited import Limited


def matches(expression: str, text: str) -> bool:
    """Whether all of ``text`` matches. Raises what ``re`` raises."""
    return re.fullmatch(expression, text) is not None


fullmatch = Limited(__name__, "matches", seconds=2.0)
"""The same in a child, which is ended after 2 s: honest expressions take microseconds.
Raises LimitError."""
