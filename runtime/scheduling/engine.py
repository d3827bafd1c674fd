"""Engine: the loop. Schedule decodes and prefills, run them as one step, give their
tokens to the sequences.

A session that samples where its logits are is given a step before the tokens of the one
before it are known here: the host prepares step n + 1 while the GPU computes step n. A
sequence that step n ends has then run a token too far; nobody is told of it, and its
pages go back as they are.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items

from kvlathe.base.errors import DeviceLost, KvlatheError
from kvlathe.runtime.cache.pool import PagePool
from kvlathe.runtime.scheduling.choosing import first_choices
from kvlathe.runtime.scheduling.parts.ranking import TokenRanking
from kvlathe.runtime.scheduling.parts.speculation import Speculation
from kvlathe.runtime.scheduling.scheduler import Scheduler
from kvlathe.runtime.scheduling.sequence import (
    NO_TOKEN,
    Chunk,
    Rows,
    Sequence,
)
from kvlathe.runtime.scheduling.step import DONE, Step, StepContext
from kvlathe.runtime.sessions.protocols import Session, check_session
from kvlathe.runtime.text.sampler import Request, TokenLogprob


class Engine:
    """Runs sequences through a session. ``stop_ids`` end a sequence (unless its
    parameters ignore them). ``context``: what its steps share. ``memory``: bytes of its
    parts (runtime/memory_account.py)."""

    def __init__(
        self,
        session: Session,
        pool: PagePool,
        scheduler: Scheduler,
        stop_ids: Iterable[int],
    ) -> None:
        """Raises KvlatheError where the plan needs what the session cannot do."""
        check_session(session, pool.plan)
        parts = TokenRanking.parts(pool.layout)
        self.context = StepContext(session, pool, scheduler.room, parts)
        self.pool, self.scheduler = pool, scheduler
        self.stop_ids = frozenset(stop_ids)
        self.memory: Mapping[str, int] = {"kv_cache": pool.arena_bytes}
        self._launched: Step | None = None  # whose tokens have not landed
        self._known = 0.0  # when tokens were known last
        self._made = 0.0  # what the session had made then

    @property
    def session(self) -> Session:
        return self.context.session

    @session.setter
    def session(self, session: Session) -> None:
        self.context.session = session

    def speculate(self, speculation: Speculation) -> Speculation:
        """From now on, guess tokens and verify them in steps, as ``speculation`` says."""
        old, parts = self.scheduler.speculation, self.context.parts
        self.context.parts = [part for part in parts if part is not old]
        self.context.parts.append(speculation)
        self.scheduler.speculation = speculation
        return speculation

    # -- the loop ----------------------------------------------------------------------
    def step(self) -> list[Sequence]:
        """One packed step. Returns the sequences that got a token or ended; those that
        ended are no longer scheduled.

        A step that fails is halved until each chunk that fails runs by itself. Those
        sequences end with ``error``, the others go on.
        """
        if not self.context.samples or not self.scheduler.running:
            self._known = time.perf_counter()
        changed = self.overdue()
        if self.scheduler.speculation.eager:
            changed += self._land()
        scheduled = self.scheduler.schedule()  # decodes, and prefills beside them
        changed += self._fork()
        step = Step(self.context, scheduled.chunks, self._launched)
        if step.flies and self._launch(step):
            changed += self._land()  # of the step before
            self._launched = step
            changed += self._choose(step)
        else:
            if self._launched and step.unknown:
                step.give_back()  # tokens that land may end its sequences
            changed += self._land()
            changed += self._run(step)
        return list(dict.fromkeys(changed))  # some have got two tokens

    def _launch(self, step: Step) -> bool:
        """Queue a step. Whether it can run; if not, it is tried again in parts, which
        say why."""
        outcome = step.launch()
        if outcome.error is not None:
            self.check_device(outcome.error)
            return False
        self._prompts_ended(step)
        return True

    def _choose(self, step: Step) -> list[Sequence]:
        """Queue the choice of a launched step's tokens where that depends on those
        before, which are known now. The sequences that end because that fails."""
        try:
            step.choose()
        except Exception as error:
            self._launched = None
            return self._crashed(step, error)
        return []

    def _land(self) -> list[Sequence]:
        """Wait for the tokens of the step that was launched, and give them to their
        sequences."""
        step, self._launched = self._launched, None
        if step is None:
            return []
        try:
            step.land()
        except Exception as error:  # the GPU's own
            return self._crashed(step, error)
        changed = self._take(step)
        seconds = self._since_known()
        self.scheduler.ran(step.chunks, step.tokens, seconds, step.ahead)
        return changed

    def _run(self, step: Step) -> list[Sequence]:
        """Run a step whose tokens are waited for; where it fails, its parts in its
        place."""
        step.reserve(self.scheduler.again)
        if not step.chunks:
            return []
        changed: list[Sequence] = []
        chunks = step.chunks
        tokens = step.tokens - sum([chunk.extra for chunk in chunks])
        steps = [step]
        while steps:
            step = steps.pop()
            step.reserve(self.scheduler.again)
            outcome = step.launch()
            if outcome is DONE:
                self._prompts_ended(step)
                changed += self._take(step)
                continue
            assert outcome.error is not None
            self.check_device(outcome.error)
            if smaller := step.retry(outcome.kind):
                steps += reversed(smaller)
            else:
                changed.append(self.fail(step.chunks[0].sequence, outcome.error))
            del outcome  # its traceback would hold what has failed in memory
        self.scheduler.ran(chunks, tokens, self._since_known())
        return changed

    def _since_known(self) -> float:
        """Seconds since tokens were known last; now they are again. What the host does
        between two steps is a part of them, where nothing else runs meanwhile; what a
        session makes once, such as CUDA graphs, is none."""
        now, made = time.perf_counter(), self.session.making
        seconds = now - self._known - max(0.0, made - self._made)
        self._known, self._made = now, made
        return seconds

    # -- what a step brings ------------------------------------------------------------
    def _prompts_ended(self, step: Step) -> None:
        """Let others continue the prompts that a launched step has cached."""
        for chunk in step.ended_prompts:
            logits = None if chunk.logits is None else chunk.logits[-1]
            self.scheduler.prompt_done(chunk.sequence, logits)

    def _take(self, step: Step) -> list[Sequence]:
        """Give sequences what a step has brought. Those that got a token or ended."""
        changed: list[Sequence] = []
        for chunk in step.chunks:
            sequence = chunk.sequence
            if sequence.finish_reason:
                continue  # it ended while its token was on its way
            if chunk.logits is not None and sequence.reports_prompt:
                sequence.report_prompt(sequence.cached - chunk.count, chunk.logits)
            if not chunk.completes:
                continue
            for choice in chunk.choices or (NO_TOKEN,):
                if not sequence.finish_reason:
                    self._grow(sequence, *choice)
            changed.append(sequence)
        return changed

    def _crashed(self, step: Step, error: Exception) -> list[Sequence]:
        """End the sequences whose tokens could not be chosen."""
        self.check_device(error)
        sequences = [chunk.sequence for chunk in step.growing]
        return [self.fail(one, error) for one in sequences if not one.finish_reason]

    def _fork(self) -> list[Sequence]:
        """Start the sequences whose prompt another one has just computed, each with a
        token of its own."""
        forked = self.scheduler.forked()
        if forked:
            choices = first_choices(forked)
            for sequence in forked:
                self._grow(sequence, *choices.get(sequence, NO_TOKEN))
        return forked

    def _grow(
        self,
        sequence: Sequence,
        token: int | KvlatheError | None,
        logprob: TokenLogprob | None,
    ) -> None:
        """Add the token that was chosen, and end the sequence if it was the last. None:
        only the prompt was asked about."""
        guide = sequence.guide
        failure = guide.failure if guide else None
        if failure is not None:
            token = failure
        if isinstance(token, KvlatheError):
            self.fail(sequence, token)
            return
        params = sequence.sampler.params
        if token is not None:
            try:
                sequence.accept(token, logprob)
            except Exception as error:  # its text cannot be decoded; others' can
                self.fail(sequence, error)
                return
            is_end = token in self.stop_ids and not params.ignore_eos
            stopped = sequence.text is not None and sequence.text.stopped
            whole = guide is not None and guide.stopped
            if is_end or token in params.stop_ids or stopped or whole:
                self._end(sequence, "stop")
                return
        if len(sequence.tokens) == sequence.prompt_tokens + params.max_new_tokens:
            self._end(sequence, "length")

    # -- ends --------------------------------------------------------------------------
    def cancel(self, sequence: Sequence) -> None:
        """End a sequence between two steps, whatever it is doing."""
        if not sequence.finish_reason:
            self._end(sequence, "cancelled")

    def fail(self, sequence: Sequence, error: Exception) -> Sequence:
        """End a sequence that cannot go on."""
        return self._end(sequence, "error", error)

    def move_out(self, sequence: Sequence) -> None:
        """End a sequence here that goes on elsewhere."""
        self._end(sequence, "moved")

    def overdue(self) -> list[Sequence]:
        """End those whose deadline has passed. They are returned."""
        now, scheduler = time.perf_counter(), self.scheduler
        everybody = (*scheduler.running, *scheduler.waiting.entered)
        late = [sequence for sequence in everybody if sequence.deadline < now]
        return [self._end(sequence, "timeout") for sequence in late]

    def _end(
        self, sequence: Sequence, reason: str, error: Exception | None = None
    ) -> Sequence:
        """Say why, and give the pages back."""
        sequence.end(reason, error)
        self.scheduler.remove(sequence)
        return sequence

    # -- for work beside the loop ------------------------------------------------------
    def rest(self) -> list[Sequence]:
        """Wait for the step that was launched last. Returns the sequences that it
        changed."""
        return self._land()

    def run(self, chunks: Items[Chunk]) -> Rows:
        """Logits [rows wanted, vocab]. The chunks' tokens are cached afterwards; if
        anything fails, none of them is. Raises OutOfMemory where memory was missing;
        later steps are smaller then."""
        return self._beside(Step(self.context, chunks, chooses=False)).logits

    def sample(self, chunks: Items[Chunk], asked: Items[Request]) -> list[int]:
        """A token for each row of logits, as ``asked``; NO_TOKEN where logits are no
        numbers. Else as ``run``: no sequence grows."""
        sampled = self._beside(Step(self.context, chunks, asked=asked)).sampled
        assert sampled is not None
        return sampled.tokens.tolist()

    def _beside(self, step: Step) -> Step:
        """Run a step that is none of the loop's."""
        outcome = step.launch()
        if outcome.error is not None:
            raise outcome.error
        return step

    def check_device(self, error: Exception | None = None) -> None:
        """Wait for the device, and raise DeviceLost where nothing can run any more.
        ``error``: what failed because of that, perhaps."""
        if isinstance(error, DeviceLost):
            raise error
        reason = self.session.lost()
        if reason:
            fact, remedy = (
                "the GPU is lost",
                "look at its driver's log, and start again",
            )
            raise DeviceLost(fact, reason, remedy) from error
