"""Step: one packed step of an engine, from its reservation to its tokens.

    reserve   pages for its chunks: all that the step can need
    launch    copies -> the session runs it -> seals, moves of tokens -> commit
    land      the tokens that follow are known
    retry     what is run in its place where it failed: parts of it

A launch is a transaction: if anything in it fails, nothing has changed and the pages
have gone back. Where the session samples, a launched step may fly: its tokens are
chosen where its logits are, and the next step is launched before they land. Then a GPU
may fail after the commit; `land` finds that, and the step's sequences fail with it.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import numpy as np

from kvlathe.base.memory import LESS_MEMORY, OutOfMemory, missing_memory, out_of_memory
from kvlathe.runtime.cache.page_table import PageChange
from kvlathe.runtime.cache.pool import PagePool
from kvlathe.runtime.scheduling.choosing import (
    Masking,
    choosing_rows,
    give_choices,
    give_logits,
)
from kvlathe.runtime.scheduling.packing import pack
from kvlathe.runtime.scheduling.sequence import Chunk, Rows, Sequence
from kvlathe.runtime.sessions.page_moves import PageMoves
from kvlathe.runtime.sessions.protocols import (
    Choose,
    Sampling,
    Session,
    StateAfter,
    StepPlan,
)
from kvlathe.runtime.text.guide import masks_of
from kvlathe.runtime.text.sampler import Request, Sampled, StepRows, rows_of, sample

Kind = Literal["done", "out_of_memory", "failed"]
State = Literal["reserved", "given back", "launched", "landed"]
NO_LOGITS: Rows = np.zeros((0, 0), np.float32)
PATIENCE = 1000
"""Steps after which twice as many tokens are tried again: what took the memory, another
process perhaps, may have gone."""
NO_ROOM = "an earlier step of as many tokens found no memory"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a launch. Unless it is done, ``error`` says why not."""

    kind: Kind
    error: Exception | None = None


DONE = Outcome("done")


class StepRoom:
    """The tokens that a step may take, as far as its memory is known. A step that runs
    out of memory halves the steps that follow; they grow again.

    ``most``: tokens that a step may have; None where none has found too little.
    """

    def __init__(self) -> None:
        self.most: int | None = None
        self._ran = 0

    def of(self, limit: int) -> int:
        """Tokens that a step may take where an engine takes ``limit``; 1 or more."""
        return limit if self.most is None else min(limit, self.most)

    def failed(self, tokens: int) -> None:
        """A step of ``tokens`` tokens found no memory."""
        self.most = max(1, tokens // 2)
        self._ran = 0

    def ran(self) -> None:
        """A step has found its memory."""
        if self.most is None:
            return
        self._ran += 1
        if self._ran == PATIENCE:
            self.most *= 2
            self._ran = 0


class StepPart(Protocol):
    """An addition to every step where its plan, or its user, asks for it."""

    def before(self, step: Step, plan: StepPlan) -> StepPlan:
        """``plan``, with what the session is to do for this part."""
        return plan

    def after(self, step: Step) -> None:
        """The session has run the step. Nothing counts yet: what its chunks move, and
        how many of their tokens stay, may still be changed."""

    def undo(self, step: Step) -> None:
        """The session has run the step, and it is rolled back."""


@dataclass(eq=False, slots=True)
class StepContext:
    """The objects that steps of an engine share. ``parts``: in the order in which they
    see a step. ``asked``: what the rows of the last step asked for. ``purpose``: what
    memory is missing for, where that is not said by a step's size."""

    session: Session
    pool: PagePool
    room: StepRoom
    parts: list[StepPart] = field(default_factory=list[StepPart])
    asked: StepRows = field(default_factory=StepRows)
    purpose: str = ""

    @property
    def samples(self) -> bool:
        """Whether tokens are chosen where logits are."""
        return "samples" in self.session.capabilities

    @property
    def counts(self) -> bool:
        """Whether tokens are counted where they are chosen."""
        return "counts_tokens" in self.session.capabilities


class Step:
    """A step of ``chunks``, the shortest first, whose pages are reserved.

    ``prefills``: those of its chunks that are no decodes. ``growing``: those whose
    sequences get a token. ``flies``: whether the next step may be launched before its
    tokens land. ``ended_prompts``: once it was launched, the chunks with which a prompt
    has ended. ``logits`` [wanted rows, vocab]: then, too, where the host has them.
    """

    def __init__(
        self,
        context: StepContext,
        chunks: Items[Chunk],
        before: Step | None = None,
        chooses: bool = True,
        asked: Items[Request] = (),
    ) -> None:
        """``before``: a step whose tokens have not landed. ``chooses``: whether tokens
        are chosen, or only logits computed. ``asked``, one for each row of logits: a
        token is ``sampled`` for it, and no sequence grows by that."""
        self.context = context
        self.state: State = "reserved"
        self.ahead = before is not None
        self.logits: Rows = NO_LOGITS
        self.ended_prompts: list[Chunk] = []
        self._chooses, self._asked = chooses and not asked, asked
        self.sampled: Sampled | None = None
        self._rows = before.rows if before else None
        self._choose: Choose | None = None
        self._sampling: Sampling | None = None
        self._state_after: StateAfter | None = None
        self._ran = False
        self._set(chunks)
        guessed = any(chunk.drafts for chunk in chunks)
        self.flies = self._on_device and len(chunks) > 0 and not guessed

    def _set(self, chunks: Items[Chunk]) -> None:
        self.chunks = chunks
        self.prefills = [chunk for chunk in chunks if chunk.is_prefill]
        self.growing: list[Chunk] = []
        if self._chooses:
            self.growing = [c for c in chunks if c.completes and c.sequence.grows]
        self.tokens = sum([chunk.count for chunk in chunks])
        seen = any(chunk.needs_logits for chunk in self.prefills)
        self._on_device = self._chooses and not seen and self.context.samples

    # -- reserve -----------------------------------------------------------------------
    @property
    def unknown(self) -> bool:
        """Whether the host does not know all its tokens."""
        return any(chunk.sequence.pending for chunk in self.chunks)

    def give_back(self) -> None:
        """Give back the pages, in which nothing counts. Harmless where they are."""
        if self.state != "reserved":
            return
        self.state = "given back"
        for chunk in self.chunks:
            self.context.pool.rollback(chunk.reservation)

    def reserve(self, again: Callable[[Chunk], Chunk]) -> None:
        """Reserve again once the pages have gone back: ``again`` reserves each chunk,
        of the sequences that go on. Its tokens are waited for."""
        if self.state == "reserved":
            return
        chunks: list[Chunk] = []
        try:
            for chunk in self.chunks:
                if not chunk.sequence.finish_reason:
                    chunks.append(again(chunk))
        except BaseException:
            for chunk in chunks:
                self.context.pool.rollback(chunk.reservation)
            raise
        self._set(chunks)
        self.state, self.flies, self._rows = "reserved", False, None

    # -- launch ------------------------------------------------------------------------
    def launch(self) -> Outcome:
        """Have the session run it, and commit it. Unless that is done nothing has
        changed, and its pages have gone back."""
        context = self.context
        most = context.room.most
        if most is not None and self._chooses and self.tokens > most:
            self.give_back()
            return Outcome("out_of_memory", OutOfMemory(NO_ROOM))
        changes = [c.reservation.change for c in self.chunks if c.reservation.change]
        try:
            plan = self._plan(changes)
            self._compute(plan)
            for part in context.parts:
                part.after(self)
            if moves := [change.moves for change in changes if change.moves]:
                context.session.apply(moves)
        except BaseException as error:
            return self._failed(error)
        self._commit(plan)
        if most is not None:
            context.room.ran()
        return DONE

    def _plan(self, changes: Items[PageChange]) -> StepPlan:
        """The step that the session runs, once the shared pages that it writes to are
        copied."""
        copies = [copy for change in changes for copy in change.copies]
        if copies:
            self.context.session.apply([PageMoves(copies=copies)])
        plan = pack(self.chunks, self._rows)
        if numbers := sum(self.context.pool.plan.model.states):
            before = [chunk.sequence.table.state for chunk in self.chunks]
            kept = self.context.session.keep_states(plan, before, numbers)
            plan, self._state_after = kept
        for part in self.context.parts:
            plan = part.before(self, plan)
        return plan

    def _compute(self, plan: StepPlan) -> None:
        """Run it, and choose the tokens that follow; where it flies, have them
        chosen."""
        context, session = self.context, self.context.session
        if self._asked:
            self.sampled = self._sample(plan)
            return
        if self.flies:
            self._choose = session.start(plan)
            self._ran = True
            if not any(chunk.sequence.late(context.counts) for chunk in self.growing):
                self._queue(known=False)
            return
        requests = [request for chunk in self.growing for request in chunk.requests]
        with Masking(requests) as masking:
            if self._on_device:
                choose = session.start(plan)
                self._ran = True
                rows = context.asked.of(requests, masking.result())
                give_choices(self.growing, choose(rows).result())
                return
            self.logits = session.run(plan)
            self._ran = True
            if self.prefills:
                give_logits(self.chunks, self.logits)
            if requests:
                rows = context.asked.of(requests, masking.result())
                own = choosing_rows(self.chunks, self.growing, self.logits)
                give_choices(self.growing, sample(own, rows))

    def _sample(self, plan: StepPlan) -> Sampled:
        """Run it, and sample where its logits are. Nothing is reported beside
        tokens."""
        rows = rows_of(self._asked, masks_of([one.guide for one in self._asked]))
        rows = replace(rows, logprobs=np.full_like(rows.logprobs, -1))
        if not self.context.samples:
            logits = self.context.session.run(plan)
            self._ran = True
            return sample(logits, rows)
        choose = self.context.session.start(plan)
        self._ran = True
        return choose(rows).result()

    def _queue(self, known: bool) -> None:
        """Queue the choice of its tokens. ``known``: the host knows all before them."""
        context = self.context
        sequences = [chunk.sequence for chunk in self.growing]
        requests = [sequence.request for sequence in sequences]
        if not known:
            for request, sequence in zip(requests, sequences, strict=True):
                request.pending = sequence.pending
        masks = masks_of([sequence.guide for sequence in sequences])
        assert self._choose is not None
        self._sampling = self._choose(context.asked.of(requests, masks, context.counts))

    def _failed(self, error: BaseException) -> Outcome:
        """Everything is as before. Raises what is no Exception."""
        try:
            if self._ran:
                for part in reversed(self.context.parts):
                    part.undo(self)
        except Exception as worse:  # the device is gone, perhaps
            error = worse
        finally:
            self._forget()
            self.give_back()
        if not isinstance(error, Exception):
            raise error
        if not out_of_memory(error):
            return Outcome("failed", error)
        self.context.room.failed(self.tokens)
        purpose = self.context.purpose or f"for a step of {self.tokens:,} tokens"
        fact = f"there is no memory {purpose}"
        # A library's own error does not go on: its traceback would hold the memory of
        # what has failed while less of it is tried.
        return Outcome("out_of_memory", missing_memory(error, fact, LESS_MEMORY))

    def _forget(self) -> None:
        """Drop what it has computed: less of it is tried, in the memory that this
        takes."""
        self._choose = self._sampling = self._state_after = None
        self.logits = NO_LOGITS
        for chunk in self.chunks:
            chunk.logits, chunk.choices = None, ()

    def _commit(self, plan: StepPlan) -> None:
        """From now on its tokens are cached, and those that follow may be awaited."""
        passes, pool = plan.passes, self.context.pool
        for place, chunk in enumerate(self.chunks):
            pool.commit(chunk.reservation)
            if self._state_after is not None and chunk.count:
                chunk.sequence.table.state = self._state_after(place)
            chunk.advance(passes[place] if passes else None)
        for chunk in self.prefills:
            sequence = chunk.sequence
            if chunk.completes and sequence.length == sequence.prompt_tokens:
                self.ended_prompts.append(chunk)
        self._state_after = None
        for chunk in self.growing:
            drawn = len(chunk.choices)
            if self.flies:
                chunk.sequence.pending += 1
                drawn = int(self._sampling is not None)
            chunk.sequence.sampler.drawn += drawn
        self.state = "launched"

    # -- land --------------------------------------------------------------------------
    @property
    def rows(self) -> dict[Sequence, int]:
        """The row of logits from which each sequence's token is chosen, of a step that
        flies."""
        return {chunk.sequence: row for row, chunk in enumerate(self.growing)}

    def choose(self) -> None:
        """Queue the choice of its tokens where that had to wait for those of the step
        before, which are known now."""
        if self._sampling is not None:
            return
        try:
            self._queue(known=True)
        except BaseException:
            self._land()
            raise
        for chunk in self.growing:
            chunk.sequence.sampler.drawn += 1

    def land(self) -> None:
        """Wait for its tokens: the growing chunks have their choices then."""
        if self.state == "launched" and self.flies:
            self._land()
            assert self._sampling is not None
            give_choices(self.growing, self._sampling.result())
        self.state = "landed"

    def _land(self) -> None:
        """Nobody waits for its tokens any more."""
        self.state = "landed"
        for chunk in self.growing:
            chunk.sequence.pending -= 1

    # -- retry -------------------------------------------------------------------------
    def retry(self, kind: Kind) -> list[Step]:
        """The smaller steps that are to be reserved and run in its place: two halves of
        its chunks; of a single one the first half of its tokens where there was no
        memory, or its newest token without guesses. An empty list: it has failed by
        itself."""
        first, half = self.chunks[0], len(self.chunks) // 2
        if half:
            parts = [self.chunks[:half], self.chunks[half:]]
        elif first.drafts or (kind == "out_of_memory" and first.count > 1):
            parts = [[first.first(first.count // 2)]]
        else:
            return []
        smaller = [Step(self.context, part) for part in parts]
        for step in smaller:
            step.state = "given back"
        return smaller
