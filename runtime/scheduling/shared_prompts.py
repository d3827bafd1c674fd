"""SharedPrompts: prompts that several answers continue. One sequence computes the prompt;
the others get its pages, and the logits after it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvlathe.runtime.cache.pool import PagePool
from kvlathe.runtime.scheduling.sequence import Sequence, SharedPrompt


class SharedPrompts:
    """``computed``: those whose pages are held for sequences that have not begun."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self.computed: list[SharedPrompt] = []

    def lead(self, sequence: Sequence) -> None:
        """Compute the prompt that it shares, if nobody does."""
        shared = sequence.shared_prompt
        if shared is None or not sequence.follows:
            return
        if shared.leader is None and shared.table is None:
            shared.leader = sequence
            shared.followers.discard(sequence)

    def done(self, sequence: Sequence, logits: np.ndarray | None) -> None:
        """Its prompt is cached, and ``logits`` [vocab] follow it: others may continue
        it."""
        shared = sequence.shared_prompt
        if sequence.leads and shared and shared.followers:
            assert logits is not None
            shared.table = self._pool.fork(sequence.table)
            shared.logits = logits.copy()
            self.computed.append(shared)

    def forked(self, running: Iterable[Sequence]) -> list[Sequence]:
        """Running sequences whose prompt has been computed by another. They have its
        pages now, and the logits in ``shared_prompt`` to go on from."""
        forked: list[Sequence] = []
        for sequence in running:
            shared = sequence.shared_prompt
            if shared and shared.table and sequence.follows:
                sequence.table = self._pool.fork(shared.table)
                sequence.cached = sequence.prompt_tokens
                forked.append(sequence)
        for sequence in forked:
            self.leave(sequence)
        return forked

    def leave(self, sequence: Sequence) -> None:
        """It follows nobody any more, and nobody follows it unless its prompt was
        computed."""
        shared = sequence.shared_prompt
        if shared is None:
            return
        shared.followers.discard(sequence)
        if shared.leader is sequence and not shared.table:
            shared.leader = None
        if shared.table and not shared.followers:
            self._forget(shared)

    def reclaim(self) -> bool:
        """Give up the pages of the oldest computed prompt; a follower computes it
        again. False if there is none."""
        if self.computed:
            self._forget(self.computed[0])
            return True
        return False

    def _forget(self, shared: SharedPrompt) -> None:
        self.computed.remove(shared)
        assert shared.table
        self._pool.release(shared.table)
        shared.table = None
        shared.leader = None
