"""A step that cannot run is run in parts: half of its sequences, then each alone, then
the first half of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from typing import TypeVar

from kvlathe.base.memory import OutOfMemory
from kvlathe.runtime.scheduling.sequence import Chunk

C = TypeVar("C")
Attempt = Callable[[Items[Chunk]], list[C] | Exception]
"""What each chunk computes as one step; or, with everything as before, why they cannot."""


def run_apart(
    chunks: Items[Chunk], attempt: Attempt[C], again: Callable[[Chunk, int], Chunk]
) -> Iterator[tuple[Chunk, C | Exception]]:
    """Each chunk and what it computed, or why it failed when it ran by itself.

    ``again``: reserves a number of a chunk's tokens anew, none that are guessed. Of a
    chunk that finds no memory by itself only the first tokens are computed; the rest is
    left to later steps. One that fails with guesses is tried without.
    """
    if not chunks:
        return
    computed = attempt(chunks)
    if isinstance(computed, list):
        yield from zip(chunks, computed, strict=True)
        return
    first, half = chunks[0], len(chunks) // 2
    starved = isinstance(computed, OutOfMemory) and first.count > 1
    if not half and not starved and not first.drafts:
        yield first, computed
        return
    # An error's traceback would hold what the failed step has in memory.
    del computed
    if not half:
        less = again(first, first.count // 2)
        yield from run_apart([less], attempt, again)
        return
    for part in (chunks[:half], chunks[half:]):
        anew = [again(chunk, chunk.count) for chunk in part]
        yield from run_apart(anew, attempt, again)
