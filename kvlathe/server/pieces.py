"""Pieces of an answer, and what reads them out of its text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True)
class Piece:
    """One addition of an answer: text, or thoughts, or the name of call number
    ``index``, or more of its arguments."""

    text: str = ""
    index: int = -1
    name: str = ""
    arguments: str = ""
    thought: str = ""


class Reader(Protocol):
    """Reader of one answer. Pieces of text go in, and pieces of the answer come out:
    the same, however the text is cut."""

    @property
    def calls(self) -> int:
        """Calls so far."""
        ...

    @property
    def thinks(self) -> bool:
        """Whether thoughts go on."""
        ...

    @property
    def unfinished(self) -> str:
        """The text of a call whose arguments have begun and not ended."""
        ...

    def push(self, text: str) -> list[Piece]: ...

    def close(self) -> list[Piece]:
        """End of the text."""
        ...


def beginning_of(mark: str, text: str) -> int:
    """Length of the longest end of ``text`` that begins ``mark``."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-size:]):
            return size
    return 0
