"""Makers of steps: one for each of vLLM's tables of blocks. No vLLM and no
torch here.

vLLM makes a builder for each kind of layer, and a table for each group of layers, which
lies where it lay from step to step. It tells a builder of no group, so a table is known
by its address. What an engine's builders have ends with them: another engine of the
process may get the same memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar
from weakref import WeakValueDictionary

from kvlathe.base.errors import KvlatheError

MOST_TABLES = 4
"""Tables of one builder: its group's, and some that are made anew for rehearsals."""
Made = TypeVar("Made")


class Table(NamedTuple):
    """``sequences``: that run at most. ``guesses``: as in Calls. ``address``: of its
    first block."""

    folder: str
    sequences: int
    guesses: bool
    device: str
    address: int


class Tables(Generic[Made]):
    """What one builder's tables have. ``shared``: those of all builders of a process.

    >>> shared, table = WeakValueDictionary(), Table("out", 8, False, "cpu", 64)
    >>> one, other = Tables(shared), Tables(shared)
    >>> one.of(table, set) is other.of(table, set)
    True
    """

    def __init__(self, shared: WeakValueDictionary[Table, Made]) -> None:
        self._shared = shared
        self._kept: dict[Table, Made] = {}

    def of(self, table: Table, make: Callable[[], Made]) -> Made:
        """Raises KvlatheError where vLLM makes table after table: newest rows are found
        by what the steps before have left."""
        if table not in self._kept:
            if len(self._kept) == MOST_TABLES:
                raise KvlatheError(
                    f"vLLM has made more than {MOST_TABLES} tables for the same layers",
                    "sequences are told apart by the blocks of a table that stays",
                    "report this, with the version of vLLM",
                )
            found = self._shared.get(table)
            if found is None:
                found = self._shared[table] = make()
            self._kept[table] = found
        return self._kept[table]
