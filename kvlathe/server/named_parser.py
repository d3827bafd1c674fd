"""Tool calls whose name stands before their arguments, out of an answer's text."""

from __future__ import annotations

import re

from kvlathe.server.conventions import NamedConvention
from kvlathe.server.pieces import Piece, StepReader, beginning_of
from kvlathe.server.tool_parser import FILLER, Value

NAME = re.compile(r"[\w.-]{1,64}")
MOST_NAME = 256
"""Characters in which a call must say its name."""
TEXT, BETWEEN, NAMED, ARGUMENTS, AFTER = range(5)


class NamedParser(StepReader):
    """Parser of one answer (``pieces.Reader``, without thoughts). What looks like a call
    and is none comes out as text."""

    def __init__(self, convention: NamedConvention) -> None:
        super().__init__()
        self._convention = convention
        self._mark = convention.begin or convention.opens
        self._state = TEXT
        self._raw = ""  # of what may become a call
        self._value = Value()
        self._spoke = False  # a call has ended before this text

    @property
    def unfinished(self) -> str:
        """The text of a call whose arguments have begun and not ended."""
        return self._raw if self._state == ARGUMENTS else ""

    def close(self) -> list[Piece]:
        """End of the text."""
        found = self.push("")
        rest, self._held = self._held, ""
        begun = self._state == NAMED or (self._state == BETWEEN and not self._spoke)
        if begun and (said := self._raw + rest):
            found.append(Piece(said))
        elif self._state == TEXT and rest:
            found.append(Piece(rest))
        return found

    def _step(self, found: list[Piece]) -> bool:
        if self._state == TEXT:
            return self._text(found)
        if self._state == BETWEEN:
            return self._between(found)
        if self._state == NAMED:
            return self._name(found)
        if self._state == ARGUMENTS:
            return self._arguments(found)
        return self._after()

    def _text(self, found: list[Piece]) -> bool:
        mark = self._mark
        before, begun, rest = self._held.partition(mark)
        keep = 0 if begun else beginning_of([mark], self._held)
        before = before[: len(before) - keep]
        if self._spoke:
            before = before.lstrip()
        if before:
            found.append(Piece(before))
            self._spoke = False
        if not begun:
            # Blanks behind a call are dropped, though it may be that more of them come.
            self._held = self._held[len(self._held) - keep :]
            return False
        self._state = BETWEEN if self._convention.begin else NAMED
        self._held, self._raw, self._spoke = rest, mark, False
        return True

    def _between(self, found: list[Piece]) -> bool:
        """Find out what follows in a section: a call, or its end."""
        said = self._held.lstrip(FILLER)
        own = self._convention
        for mark, state in ((own.opens, NAMED), (own.end, TEXT)):
            if not mark or not said.startswith(mark):
                continue
            if state == TEXT and not self._spoke:
                break  # a section without a call
            self._raw += self._held[: len(self._held) - len(said)] + mark
            self._held, self._state = said[len(mark) :], state
            return True
        else:
            if own.opens.startswith(said) or own.end.startswith(said):
                return False
        if self._spoke:  # the section ends without its mark
            self._state, self._raw = TEXT, ""
            return True
        self._give_up(found)
        return True

    def _name(self, found: list[Piece]) -> bool:
        # It must not depend on how much of the text is here.
        separator = self._convention.separator
        name, separated, _ = self._held[:MOST_NAME].partition(separator)
        if not separated and len(self._held) < MOST_NAME:
            return False
        plain, own = self._convention.name_of(name)
        ready = self._held[len(name) + len(separated) :].lstrip(FILLER)
        if separated and not ready and NAME.fullmatch(plain):
            return False
        if not separated or not NAME.fullmatch(plain) or not ready.startswith("{"):
            self._give_up(found)
            return True
        found.append(Piece(index=self.calls, name=plain, id=own))
        self._raw += self._held[: len(self._held) - len(ready)]
        self._held, self._value, self._state = ready, Value(), ARGUMENTS
        return True

    def _arguments(self, found: list[Piece]) -> bool:
        end = self._value.end(self._held)
        said = self._held if end < 0 else self._held[:end]
        if said:
            found.append(Piece(index=self.calls, arguments=said))
        self._raw += said
        self._held = self._held[len(said) :]
        if end < 0:
            return False
        self.calls += 1
        self._state = AFTER
        return True

    def _after(self) -> bool:
        """Pass over the mark that closes a call, if the convention has one."""
        said, after = self._held.lstrip(FILLER), self._convention.after.lstrip(FILLER)
        if after.startswith(said) and said != after:
            return False
        if after:
            self._held = said.removeprefix(after)
        self._state, self._raw, self._spoke = BETWEEN, "", True
        return True

    def _give_up(self, found: list[Piece]) -> None:
        """Give the mark out as text: it began no call. What follows it is read again."""
        mark = self._mark if self._raw.startswith(self._mark) else ""
        if mark:
            found.append(Piece(mark))
        self._held = self._raw.removeprefix(mark) + self._held
        self._raw, self._state, self._spoke = "", TEXT, False
