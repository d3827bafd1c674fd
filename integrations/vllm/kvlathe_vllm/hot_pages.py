"""Who has which hot page: 16-bit rows of a block that is not full yet.

vLLM never shares a block that is partly filled, so its id stands for one sequence. Nobody
tells when a sequence ends. But vLLM admits none in a step that a running one sits out, and
at most ``count`` run. So where all pages are taken, and those of the step's sequences were
touched, the one that was used longest ago belongs to nobody.
"""

from __future__ import annotations

from collections import OrderedDict

from kvlathe.base.errors import KvlatheError

NULL_BLOCK = 0
"""vLLM's own: rehearsals write to it."""


class HotPages:
    """Pages 1 .. ``count``, and page 0 of the null block."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count, 0, -1))
        self._of: OrderedDict[int, int] = OrderedDict()

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
                f"more than {self.count} sequences were running",
                "raise --max-num-seqs, and report this",
            )
        self._of.move_to_end(block)
        return self._of[block]

    def move(self, block: int, other: int) -> None:
        """The sequence goes on from ``block`` to ``other`` in the same page."""
        if NULL_BLOCK in (block, other):
            return
        page = self._of.pop(block)
        if other in self._of:
            self._free.append(self._of.pop(other))
        self._of[other] = page

    def end(self, block: int) -> None:
        """The block is full, and its page free."""
        if block in self._of:
            self._free.append(self._of.pop(block))
