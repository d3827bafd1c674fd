"""Engine: the loop. Schedule, run, seal, commit, sample; what fails before the commit has changed nothing."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

import numpy as np
import numpy.typing as npt

from kvlathe.runtime.pool import PagePool
from kvlathe.runtime.scheduler import Scheduler
from kvlathe.runtime.sequence import Chunk, Sequence, pack
from kvlathe.runtime.session import Session


class Engine:
    """Runs sequences through a session. ``stop_ids`` end a sequence (unless its parameters ignore them)."""

    def __init__(self, session: Session, pool: PagePool, scheduler: Scheduler, stop_ids: Iterable[int]) -> None:
        self.session, self.pool, self.scheduler = session, pool, scheduler
        self.stop_ids = frozenset(stop_ids)

    def step(self) -> list[Sequence]:
        """One packed step. Returns the sequences that got a token; those that ended are no longer scheduled."""
        chunks = self.scheduler.schedule()
        logits = iter(self.run(chunks))
        grown = [chunk.sequence for chunk in chunks if chunk.wanted]
        for sequence in grown:
            sequence.accept(next(logits))
            self._finish(sequence)
        return grown

    def run(self, chunks: Items[Chunk]) -> npt.NDArray[np.float32]:
        """Logits [rows wanted, vocab]. The chunks' tokens are cached afterwards; if anything fails, none of them is."""
        try:
            for chunk in chunks:
                for copy in chunk.reservation.copies:
                    self.session.copy_page(copy.bucket, copy.source, copy.target)
            logits = self.session.run(pack(chunks))
            for chunk in chunks:
                for seal in chunk.reservation.seals:
                    self.session.seal(seal.fresh, seal.page, seal.cold_pages, seal.position)
        except BaseException:
            for chunk in chunks:
                self.pool.rollback(chunk.reservation)
            raise
        for chunk in chunks:
            self.pool.commit(chunk.reservation)
            chunk.sequence.cached += chunk.count
        return logits

    def _finish(self, sequence: Sequence) -> None:
        """If the sequence has ended, say why and give its pages back."""
        ended = sequence.tokens[-1] in self.stop_ids and not sequence.params.ignore_eos
        if ended or (sequence.text and sequence.text.stopped):
            sequence.finish_reason = "stop"
        elif len(sequence.tokens) >= sequence.most_tokens:
            sequence.finish_reason = "length"
        if sequence.finish_reason:
            if sequence.text:
                sequence.text.close()
            self.scheduler.remove(sequence)
