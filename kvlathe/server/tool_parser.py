"""Tool calls out of an answer's text, piece by piece, as streams need them."""

from __future__ import annotations

import json
import re

from kvlathe.server.conventions import Convention
from kvlathe.server.pieces import Piece, beginning_of, first_of

STRING = r'"((?:[^"\\]|\\.)*)"'
KEYS = "arguments|parameters"
HEAD = re.compile(rf'\s*\{{\s*"name"\s*:\s*{STRING}\s*,\s*"(?:{KEYS})"\s*:\s*(?=\S)')
MOST_HEAD = 4096
"""Characters in which a call must say its name."""
FILLER = " \t\r\n"


class Value:
    """Search for the end of a JSON value that begins with { or [, or ``depth`` of them
    earlier."""

    def __init__(self, depth: int = 0) -> None:
        self._depth, self._string, self._escaped = depth, False, False
        self.begun = False

    def end(self, text: str) -> int:
        """Number of characters of ``text`` that belong to the value; -1 for all, and
        more to come."""
        self.begun = self.begun or bool(text)
        for place, character in enumerate(text):
            if self._string:
                self._in_string(character)
            elif character == '"':
                self._string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return place + 1
        return -1

    def _in_string(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._string = False


class ToolParser:
    """Parser of one answer. Pieces of text go in, and pieces of text and calls come
    out. Text that looks like a call and is none comes out as text. ``calls``: their
    number so far."""

    def __init__(self, convention: Convention) -> None:
        self._convention = convention
        self._marks = (*convention.marks, *convention.silent)
        self._closing = convention.closing
        self._mark = ""  # of the call that is being read
        self._held = ""
        self._inside = False  # behind a mark, or where a bare call may begin
        self._started = False
        self._value: Value | None = None  # while arguments come
        self._behind = False  # a call has ended, and others may follow
        self._object: Value | None = None  # while a call's object goes on behind them
        self._raw = ""  # of the call that is being read
        self.calls = 0

    @property
    def unfinished(self) -> str:
        """The text of a call whose arguments have begun and not ended."""
        return "" if self._value is None else self._raw

    def push(self, text: str) -> list[Piece]:
        self._held += text
        return self._read(last=False)

    def close(self) -> list[Piece]:
        """End of the text."""
        found = self._read(last=True)
        rest, self._held = self._held, ""
        cut = self._inside and self._value is None and not self._behind
        if cut and (self._raw + rest).strip():
            found.append(Piece(self._raw + rest))
        elif not self._inside and (said := self._spoken(rest)):
            found.append(Piece(said))
        return found

    def _read(self, last: bool) -> list[Piece]:
        found: list[Piece] = []
        going = True
        while going:
            if self._value is not None:
                going = self._arguments(found)
            elif self._object is not None:
                going = self._skip(self._object)
            elif self._inside:
                going = self._head(found, last)
            else:
                going = self._text(found)
        return found

    def _text(self, found: list[Piece]) -> bool:
        """Text up to the next mark."""
        if self._bare():
            self._inside, self._mark = True, ""
            return True
        place, mark = first_of(self._marks, self._held)
        if mark:
            if before := self._spoken(self._held[:place]):
                found.append(Piece(before))
                self._behind = False
            self._held = self._held[place + len(mark) :]
            if mark in self._convention.silent:
                self._started = False  # a bare call may follow
                return True
            self._raw = self._mark = mark
            self._inside, self._started, self._behind = True, True, False
            return True
        said, self._held = self._split(self._possible_mark())
        if said := self._spoken(said):
            self._started, self._behind = True, False
            found.append(Piece(said))
        return False

    def _spoken(self, text: str) -> str:
        """Text without the blanks that follow a call."""
        return text.lstrip() if self._behind else text

    def _bare(self) -> bool:
        """Whether a call begins here without a mark."""
        bare = self._convention.bare and not self._started
        return bare and self._held.lstrip()[:1] == "{"

    def _possible_mark(self) -> int:
        """Characters at the end that may begin a mark; blanks before a bare call."""
        if self._convention.bare and not self._started and not self._held.strip():
            return len(self._held)
        return beginning_of(self._marks, self._held)

    def _split(self, keep: int) -> tuple[str, str]:
        cut = len(self._held) - keep
        return self._held[:cut], self._held[cut:]

    def _head(self, found: list[Piece], last: bool) -> bool:
        """The name of a call, up to its arguments. In a list, calls come one after the
        other."""
        if self._behind:
            return self._next()
        opening = self._held.lstrip(FILLER + "[")
        self._raw += self._held[: len(self._held) - len(opening)]
        self._held = opening
        # What is read of one text must not depend on how much of it is here.
        begun = opening[:MOST_HEAD]
        if head := HEAD.match(begun):
            return self._open(head, found)
        end = Value().end(begun) if begun.startswith("{") else -1
        if end > 0:
            return self._whole(opening[:end], found)
        wrong = bool(opening) and not opening.startswith("{")
        if wrong or len(opening) > MOST_HEAD:
            self._give_up(found)
            return True
        return False

    def _open(self, head: re.Match[str], found: list[Piece]) -> bool:
        try:
            name = json.loads(f'"{head[1]}"')
        except ValueError:
            self._give_up(found)
            return True
        if not name or self._held[head.end()] != "{":
            self._give_up(found)
            return True
        found.append(Piece(index=self.calls, name=name))
        self._raw += head[0]
        self._held = self._held[head.end() :]
        self._value, self._started = Value(), True
        return True

    def _whole(self, text: str, found: list[Piece]) -> bool:
        """A call whose fields are in another order."""
        try:
            call = json.loads(text)
            name, keys = call["name"], KEYS.split("|")
            [arguments] = [call[key] for key in keys if key in call]
            said = json.dumps(arguments, ensure_ascii=False)
        except (ValueError, KeyError, RecursionError):
            self._give_up(found)
            return True
        wrong = not isinstance(arguments, dict)  # no function takes a list
        if not isinstance(name, str) or not name or wrong:
            self._give_up(found)
            return True
        found.append(Piece(index=self.calls, name=name))
        found.append(Piece(index=self.calls, arguments=said))
        self._held = self._held[len(text) :]
        self._ended()
        return True

    def _arguments(self, found: list[Piece]) -> bool:
        assert self._value is not None
        end = self._value.end(self._held)
        said = self._held if end < 0 else self._held[:end]
        if said:
            found.append(Piece(index=self.calls, arguments=said))
        self._raw += said
        self._held = self._held[len(said) :]
        if end < 0:
            return False
        self._value, self._object = None, Value(1)
        self._ended()
        return True

    def _skip(self, rest: Value) -> bool:
        """Skip the rest of the call's object, behind its arguments. True at its end."""
        if not rest.begun:
            self._held = self._held.lstrip(FILLER)
            if self._held and self._held[0] not in ",}":
                self._object = None
                return True
        end = rest.end(self._held)
        self._held = self._held[end:] if end >= 0 else ""
        if end >= 0:
            self._object = None
        return end >= 0

    def _ended(self) -> None:
        self.calls += 1
        self._behind = True
        self._raw = ""

    def _next(self) -> bool:
        """Text after a call: what closes it is dropped, and another may follow."""
        closing = self._closing
        rest = self._held.lstrip(FILLER + "}],;")
        self._held = rest
        if closing and rest.startswith(closing):
            self._held = rest[len(closing) :]
            self._inside = False
            return True
        if closing and closing.startswith(rest):
            return False
        if rest.startswith("{") and (self._convention.opens or not closing):
            self._behind = False
            return True
        if rest:
            self._inside = False
            return True
        return False

    def _give_up(self, found: list[Piece]) -> None:
        """Give the mark out as text: it began no call. What follows it is read again,
        as it may have another."""
        self._inside, self._started = False, True
        behind = self._raw.removeprefix(self._mark)
        if len(behind) < len(self._raw):
            found.append(Piece(self._mark))
        self._held, self._raw = behind + self._held, ""
