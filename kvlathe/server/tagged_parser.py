"""Tool calls whose arguments stand between tags, out of an answer's text."""

from __future__ import annotations

from kvlathe.server.pieces import Piece, StepReader, beginning_of, first_of
from kvlathe.server.tagged import Schemas, TaggedConvention, call_of, patterns

MOST_HEAD = 256
"""Characters in which a call must say its name."""
TEXT, SECTION, CALL = range(3)


class TaggedParser(StepReader):
    """Parser of one answer (``pieces.Reader``, without thoughts). A call comes when it
    is whole; what looks like one and is none comes out as text at the end."""

    def __init__(self, convention: TaggedConvention, tools: Schemas) -> None:
        super().__init__()
        self._convention, self._tools = convention, tools
        self._state = TEXT
        self._mark = ""  # that has begun what may become a call
        self._raw = ""  # what came from the mark to here
        self._tried = 0  # characters in which no whole call was found
        self._spoke = False  # a call has ended before this text

    @property
    def unfinished(self) -> str:
        return ""

    def close(self) -> list[Piece]:
        """End of the text."""
        found = self.push("")
        while self._state != TEXT:
            if self._state == SECTION and self._spoke:
                self._state, self._held = TEXT, ""  # the beginning of a mark
            else:  # no call, but there may be one behind its mark
                self._give_up(found)
            found += self.push("")
        rest, self._held = self._held, ""
        return [*found, Piece(rest)] if rest else found

    def _step(self, found: list[Piece]) -> bool:
        if self._state == TEXT:
            return self._text(found)
        return self._section(found) if self._state == SECTION else self._call(found)

    def _text(self, found: list[Piece]) -> bool:
        """Text up to the next mark. True where there is one."""
        place, mark = first_of(self._convention.marks, self._held)
        if not mark:
            place = len(self._held) - beginning_of(self._convention.marks, self._held)
        before, self._held = self._held[:place], self._held[place:]
        if self._spoke:  # blanks behind a call
            before = before.lstrip()
        if before:
            found.append(Piece(before))
            self._spoke = False
        if not mark:
            return False
        self._mark, self._raw, self._spoke, self._tried = mark, "", False, 0
        self._state = CALL
        if mark == self._convention.begin:
            self._raw, self._held = mark, self._held[len(mark) :]
            self._state = SECTION
        return True

    def _section(self, found: list[Piece]) -> bool:
        """Find out what follows between calls: one, or their end."""
        own, said = self._convention, self._held.lstrip()
        opens = own.opens.strip()
        if self._spoke and said.startswith(own.end):
            self._state, self._held = TEXT, said[len(own.end) :]
            return True
        if said.startswith(opens):
            self._state = CALL
            return True
        if opens.startswith(said) or (self._spoke and own.end.startswith(said)):
            return False
        if self._spoke:  # the section ends without its mark
            self._state = TEXT
        else:
            self._give_up(found)
        return True

    def _call(self, found: list[Piece]) -> bool:
        own, closer = self._convention, self._convention.closer
        begins, _ = patterns(own)
        # It must not depend on how much of the text is here.
        if len(self._held) >= MOST_HEAD and not begins.match(self._held[:MOST_HEAD]):
            self._give_up(found)
            return True
        place = self._held.find(closer, max(0, self._tried - len(closer)))
        while place >= 0:
            if call := call_of(own, self._held[:place], self._tools):
                found.append(Piece(index=self.calls, name=call[0]))
                found.append(Piece(index=self.calls, arguments=call[1]))
                self.calls += 1
                self._held = self._held[place + len(closer) :]
                self._tried, self._spoke, self._mark, self._raw = 0, True, "", ""
                self._state = TEXT if closer == own.end else SECTION
                return True
            place = self._held.find(closer, place + 1)
        self._tried = len(self._held)
        return False

    def _give_up(self, found: list[Piece]) -> None:
        """Give the mark out as text: it began no call. What follows it is read again.
        A call that follows others, and is none, has no mark: its first character is
        given out."""
        behind = self._raw + self._held
        size = len(self._mark) or 1
        found.append(Piece(behind[:size]))
        self._held, self._raw, self._mark = behind[size:], "", ""
        self._state, self._spoke, self._tried = TEXT, False, 0
