"""Engine: the loop. Schedule, run, seal, commit, sample; what fails before the commit has changed nothing."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items

import numpy as np
import numpy.typing as npt

from kvlathe.runtime.pool import PageMoves, PagePool
from kvlathe.runtime.ranking import carry_out
from kvlathe.runtime.scheduler import Scheduler
from kvlathe.runtime.sequence import Chunk, Sequence, pack
from kvlathe.runtime.session import Session

Rows = npt.NDArray[np.float32]


class Engine:
    """Runs sequences through a session. ``stop_ids`` end a sequence (unless its parameters ignore them)."""

    def __init__(self, session: Session, pool: PagePool, scheduler: Scheduler, stop_ids: Iterable[int]) -> None:
        self.session, self.pool, self.scheduler = session, pool, scheduler
        self.stop_ids = frozenset(stop_ids)

    def step(self) -> list[Sequence]:
        """One packed step. Returns the sequences that got a token or ended; those that ended are no longer scheduled.

        Where a step fails, it is taken apart until those that fail alone are found: they end with ``error``, the others
        go on.
        """
        changed = self._overdue()
        chunks = self.scheduler.schedule()
        for sequence in self.scheduler.forked():
            assert sequence.beginning and sequence.beginning.logits is not None
            changed.append(self._grow(sequence, sequence.beginning.logits))
        started = time.perf_counter()
        for chunk, rows in self._run_apart(chunks):
            if isinstance(rows, Exception):
                changed.append(self.fail(chunk.sequence, rows))
                continue
            if chunk.sequence.reports_prompt:
                chunk.sequence.report_prompt(chunk.sequence.cached - chunk.count, rows)
            if chunk.sequence.cached == len(chunk.sequence.tokens):
                if not chunk.sequence.answered:
                    self.scheduler.prompt_done(chunk.sequence, rows[-1])
                changed.append(self._grow(chunk.sequence, rows[-1]))
        tokens = sum(chunk.count for chunk in chunks)
        self.scheduler.costs.ran(tokens, len(chunks), time.perf_counter() - started)
        return changed

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence between two steps, whatever it is doing."""
        if not sequence.finish_reason:
            self._end(sequence, "cancelled")

    def fail(self, sequence: Sequence, error: Exception) -> Sequence:
        """End a sequence that cannot go on."""
        return self._end(sequence, "error", error)

    def _run_apart(self, chunks: Items[Chunk]) -> Iterator[tuple[Chunk, Rows | Exception]]:
        """Each chunk and its logits [rows wanted, vocab], or why it failed when it ran alone."""
        if not chunks:
            return
        try:
            rows = self.run(chunks)
        except Exception as error:  # a session may raise anything
            if len(chunks) == 1:
                yield chunks[0], error
                return
            half = len(chunks) // 2
            for part in (chunks[:half], chunks[half:]):
                yield from self._run_apart([self.scheduler.again(chunk) for chunk in part])
            return
        ends = np.cumsum([len(chunk.wanted) for chunk in chunks]).tolist()
        for chunk, end in zip(chunks, ends, strict=True):
            yield chunk, rows[end - len(chunk.wanted) : end]

    def run(self, chunks: Items[Chunk]) -> npt.NDArray[np.float32]:
        """Logits [rows wanted, vocab]. The chunks' tokens are cached afterwards; if anything fails, none of them is."""
        moving = [(chunk, moves) for chunk in chunks if (moves := chunk.reservation.moves)]
        try:
            for _, moves in moving:
                for copy in moves.copies:
                    self.session.copy_page(copy.bucket, copy.source, copy.target)
            step = pack(chunks)
            logits = self.session.run(step)
            self._settle(moving)
        except BaseException:
            for chunk in chunks:
                self.pool.rollback(chunk.reservation)
            raise
        for place, chunk in enumerate(chunks):
            self.pool.commit(chunk.reservation)
            if self.pool.plan.ranked:
                self._forget(chunk)
            chunk.sequence.advance(chunk.count, step, place)
        return logits

    def _forget(self, chunk: Chunk) -> None:
        """Begin the scores of a sequence anew where its probe says so, after a committed step."""
        for bucket in self.pool.forgotten(chunk.reservation, chunk.sequence.ends_prompt(chunk.count)):
            self.session.forget(bucket, chunk.sequence.table.pages[bucket])

    def _settle(self, moving: Items[tuple[Chunk, PageMoves]]) -> None:
        """Seal what has become full, and move tokens to where they rank."""
        try:
            for chunk, moves in moving:
                for seal in moves.seals:
                    self.session.seal(seal.fresh, seal.page, seal.cold_pages, seal.position)
                for ranking in moves.rankings:
                    assert chunk.sequence.probes
                    end = chunk.sequence.places(chunk.count)[-1] + 1
                    carry_out(self.session, self.pool.plan, ranking, chunk.sequence.probes, chunk.sequence.tokens, end)
        except BaseException:
            if self.pool.plan.ranked:
                self.session.unobserve()
            raise

    def _grow(self, sequence: Sequence, logits: Rows) -> Sequence:
        """One more token from ``logits`` [vocab], and the end if it was the last."""
        if len(sequence.tokens) >= sequence.most_tokens:  # only the prompt was asked about
            return self._end(sequence, "length")
        try:
            token = sequence.accept(logits)
        except Exception as error:  # its own parameters, or logits that are not numbers
            return self.fail(sequence, error)
        params = sequence.params
        ended = (token in self.stop_ids and not params.ignore_eos) or token in params.stop_ids
        if ended or (sequence.text and sequence.text.stopped):
            return self._end(sequence, "stop")
        return self._end(sequence, "length") if len(sequence.tokens) >= sequence.most_tokens else sequence

    def _end(self, sequence: Sequence, reason: str, error: Exception | None = None) -> Sequence:
        """Say why, and give the pages back."""
        sequence.end(reason, error)
        self.scheduler.remove(sequence)
        return sequence

    def _overdue(self) -> list[Sequence]:
        """End those whose deadline has passed."""
        now, scheduler = time.perf_counter(), self.scheduler
        late = [s for s in (*scheduler.running, *scheduler.waiting) if s.deadline < now]
        return [self._end(sequence, "timeout") for sequence in late]
