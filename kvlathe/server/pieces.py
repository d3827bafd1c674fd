"""Pieces of an answer, and what reads them out of its text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True)
class Piece:
    """One addition of an answer: text, or thoughts, or the name of call number
    ``index``, or more of its arguments. ``id``: the call's, where the model gave it
    one."""

    text: str = ""
    index: int = -1
    name: str = ""
    arguments: str = ""
    thought: str = ""
    id: str = ""


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


class StepReader(ABC):
    """What readers share that read on step by step, as far as the text allows."""

    def __init__(self) -> None:
        self._held = ""  # text that was not read yet
        self.calls = 0

    def push(self, text: str) -> list[Piece]:
        self._held += text
        found: list[Piece] = []
        while self._step(found):
            pass
        return found

    @abstractmethod
    def _step(self, found: list[Piece]) -> bool:
        """Read on. False where more text must come first."""


def first_of(marks: Iterable[str], text: str) -> tuple[int, str]:
    """The place of the first mark in ``text``, and the mark; -1 and none where there is
    none."""
    places = [(place, mark) for mark in marks if (place := text.find(mark)) >= 0]
    return min(places, default=(-1, ""))


def beginning_of(marks: Iterable[str], text: str) -> int:
    """Length of the longest end of ``text`` that begins one of ``marks``."""
    known = [*marks]
    longest = max(map(len, known), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(len(one) > size and one.startswith(text[-size:]) for one in known):
            return size
    return 0
