"""HotPages: who has which hot page, 16-bit rows of a block that is not full yet.

vLLM never shares a block that is partly filled, so its id stands for one sequence.
Nobody tells when a sequence ends. But vLLM admits none in a step that a running one
sits out, and there are pages for all that run. So where all pages are taken, and those
of the step's sequences were touched, the one that was used longest ago belongs to
nobody.

Pages from ``count`` + 1 on are passing: they hold rows until the step ends, and all
layers use the same memory for them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator
from contextlib import contextmanager

from kvlathe.base.errors import KvlatheError

NULL_BLOCK = 0
"""vLLM's own: rehearsals write to it."""


def passing_pages(tokens: int, count: int, page: int) -> int:
    """Passing pages of a step of so many tokens at most: those that it begins and
    fills, and one for each sequence that goes on in another page."""
    return tokens // page + min(count, tokens // 2)


def lasting_pages(sequences: int, guesses: bool) -> int:
    """Hot pages of so many sequences; with ``guesses``, also those that are full until
    it is known that they stay so."""
    return 2 * sequences if guesses else sequences


class HotPages:
    """Pages 1 .. ``count``, page 0 of the null block, and passing ones."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count, 0, -1))
        self._of: OrderedDict[int, int] = OrderedDict()
        self._passing = 0
        self._ended: list[int] = []

    @contextmanager
    def step(self) -> Generator[None]:
        """A step: passing pages are free before it, and ended ones after it."""
        self._passing = self.count
        self._ended.clear()
        yield
        for block in self._ended:
            self.release(block)

    def passing(self) -> int:
        """Another passing page."""
        self._passing += 1
        return self._passing

    def begin(self, block: int) -> int:
        """The page of a block whose first token comes now."""
        if block == NULL_BLOCK:
            return 0
        if block not in self._of:
            self._of[block] = self._take()
        self._of.move_to_end(block)
        return self._of[block]

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        _, page = self._of.popitem(last=False)
        return page

    def resume(self, block: int) -> int:
        """The page of a block that has tokens. Raises KvlatheError where it was given
        away: the sequence must not go on with rows of another one."""
        if block == NULL_BLOCK:
            return 0
        if block not in self._of:
            raise KvlatheError(
                f"the newest rows of block {block} are gone",
                f"there were more sequences than {self.count} hot pages are for",
                "raise --max-num-seqs, and report this",
            )
        self._of.move_to_end(block)
        return self._of[block]

    def move(self, block: int, other: int) -> None:
        """The page of ``block`` becomes that of ``other``."""
        if NULL_BLOCK in (block, other):
            return
        page = self._of.pop(block)
        self.release(other)
        self._of[other] = page

    def release(self, block: int) -> None:
        """The page of ``block``, if it has one, is free."""
        if block in self._of:
            self._free.append(self._of.pop(block))

    def end(self, block: int) -> None:
        """The block is full: its page is free once the step has ended."""
        self._ended.append(block)
