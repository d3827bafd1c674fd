"""Speculation: tokens are guessed, and one step computes a row for each guess
(speculative decoding, Leviathan et al. 2023, arXiv 2211.17192).

A guess stays only if the model chooses the same token with the same random number. So
answers are what they are without guesses. As the part of a step it says which guesses
stay, once the step has run. How many rows are worth their time follows
from how often such guesses were right, and from what rows have cost so far.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from itertools import accumulate
from operator import mul
from typing import Protocol, runtime_checkable

from kvlathe.runtime.cache.pool import PagePool
from kvlathe.runtime.scheduling.allowance import Allowance, Trust
from kvlathe.runtime.scheduling.row_costs import MAX_SLOWDOWN, RowCosts
from kvlathe.runtime.scheduling.sequence import Choice, Chunk, Sequence
from kvlathe.runtime.scheduling.step import Step, StepPart
from kvlathe.runtime.sessions.protocols import StepPlan
from kvlathe.runtime.text.masks import allowed

log = logging.getLogger("kvlathe")
MOST_DRAFTS = 8
"""Tokens that are guessed at once for a sequence, unless asked otherwise."""
GAIN = 1.02
"""By how much guessing must be expected to be faster."""
PAUSE = 1024
"""Steps that a drafter is left alone after it has failed."""


class Drafter(Protocol):
    """Guesses tokens. Its answers are about the sequences as they are now."""

    def chances(self, sequence: Sequence, most: int) -> Items[float]:
        """The chance of each token, at most ``most``, that may follow its newest: how
        likely the guess is right where those before it are."""
        ...

    def draft(self, counts: Mapping[Sequence, int], seconds: float) -> list[list[int]]:
        """So many tokens, or fewer, that may follow each sequence's newest.
        ``seconds``: what getting to know new texts may take."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """It has ended."""
        ...


@runtime_checkable
class WatchingDrafter(Drafter, Protocol):
    """A Drafter that reads what steps compute."""

    def begins(self, step: Step) -> None:
        """A step will run."""
        ...

    def watch(self, step: Step) -> None:
        """It has run, and which of its guesses stay is known. Another of the same
        tokens may follow, if this one fails."""
        ...


class Speculation(StepPart):
    """Decides which tokens of which sequences are guessed; without a ``drafter`` none.
    ``most``: of one sequence in one step. ``stop_ids``: tokens that end answers, which
    are never guessed.

    ``drafts``: sequences and steps in which it guessed; ``drafted``: tokens;
    ``accepted``: those that were right. ``failures``: of the drafter. ``eager``:
    whether the next step had better wait for the tokens of the last.
    """

    def __init__(
        self,
        drafter: Drafter | None = None,
        most: int = MOST_DRAFTS,
        stop_ids: Iterable[int] = (),
    ) -> None:
        self.drafter = drafter
        self.most = most
        self.costs = RowCosts()
        self.allowance = Allowance()
        self.drafts = self.drafted = self.accepted = self.failures = 0
        self.eager = False
        self._stop_ids = frozenset(stop_ids)
        self.trust = Trust()
        self._watching = drafter if isinstance(drafter, WatchingDrafter) else None
        self._chances: Mapping[Sequence, Items[float]] = {}  # of the last look
        self._looked = 0.0  # seconds of the host for the next step
        self._rest = 0  # steps until the next look
        self._unseen = 0  # steps since the last one
        self._paused = 0  # steps of it that are left

    def guesses(
        self, decoding: Items[Sequence], pool: PagePool, room: int
    ) -> dict[Sequence, list[int]]:
        """Tokens that may follow the newest of some sequences, at most ``room`` of all
        together. A drafter that fails is asked again after a pause."""
        self.eager = False
        self._paused = max(0, self._paused - 1)
        self._rest -= 1
        self._unseen += 1
        if not decoding or self.drafter is None or self._paused or self._rest >= 0:
            return {}
        started = time.perf_counter()
        self.trust.looked()
        try:
            return self._guesses(self.drafter, decoding, pool, room)
        except Exception:
            log.exception("guessing tokens has failed; none for %d steps", PAUSE)
            self.failures += 1
            self._paused = PAUSE
            return {}
        finally:
            self._unseen = 0
            seconds = time.perf_counter() - started
            self._looked += seconds
            if self.allowance.left <= self._looked + seconds:  # and the next look
                self._rest = self.allowance.rest(seconds)

    def _guesses(
        self,
        drafter: Drafter,
        decoding: Items[Sequence],
        pool: PagePool,
        room: int,
    ) -> dict[Sequence, list[int]]:
        """None past the end of a page, so that a page is only sealed full of tokens
        that count."""
        chances: dict[Sequence, list[float]] = {}
        for sequence in decoding:
            most = min(self._most(sequence, pool), room)
            if most > 0:
                each = drafter.chances(sequence, most)
                chances[sequence] = list(accumulate(each, mul))
        counts = self._worth(chances, len(decoding), room)
        self._chances = chances
        self.eager = bool(counts) and any(s.pending for s in decoding)
        if not counts or self.eager:
            return {}
        drafts = drafter.draft(counts, self.allowance.left)
        pairs = zip(counts, drafts, strict=True)
        return {sequence: self._cut(sequence, tokens) for sequence, tokens in pairs}

    def forget(self, sequence: Sequence) -> None:
        """It has ended."""
        self.costs.ended()
        if self.drafter is not None:
            self.drafter.forget(sequence)

    def _most(self, sequence: Sequence, pool: PagePool) -> int:
        """Rows behind its newest token's that the page and the answer have room for."""
        page = pool.to_page_end(sequence.table) - sequence.behind
        return min(self.most, page - 1, sequence.most_tokens - sequence.length - 1)

    def _worth(
        self, chances: Mapping[Sequence, Items[float]], sequences: int, room: int
    ) -> dict[Sequence, int]:
        """The number of guesses of each sequence that make the most tokens a second.

        ``chances``: of each guess, that it and those before it are right.
        """
        likely = [(chance, one) for one, each in chances.items() for chance in each]
        likely.sort(key=lambda pair: pair[0], reverse=True)
        best = GAIN / self.costs.times(0, sequences)
        tokens, taken, promised = 1.0, 0, 0.0
        plain = self.costs.plain(sequences)
        left = self.allowance.left - self._looked
        trust = self.trust.share / sequences
        for rows, (chance, _) in enumerate(likely[:room], 1):
            tokens += chance * trust
            longer = self.costs.times(rows, sequences)
            if tokens / longer <= best:
                continue
            best = tokens / longer
            if plain * self.costs.risk(rows, sequences) <= left:
                taken = rows
            else:
                promised = plain * (tokens - longer)
        if promised:
            self.allowance.lend(promised, self._unseen)
        counts: dict[Sequence, int] = {}
        for _, sequence in likely[:taken]:
            counts[sequence] = counts.get(sequence, 0) + 1
        return counts

    def _cut(self, sequence: Sequence, tokens: list[int]) -> list[int]:
        """The guess up to what would end the answer, or its structure does not
        allow."""
        ends = self._stop_ids.union(sequence.params.stop_ids)
        for place, token in enumerate(tokens):
            if token in ends:
                tokens = tokens[:place]
                break
        if sequence.guide is not None:
            tokens = tokens[: allowed(sequence.guide, tokens)]
        return tokens

    def before(self, step: Step, plan: StepPlan) -> StepPlan:
        """As StepPart.before."""
        if self._watching is not None:
            self._watching.begins(step)
        return plan

    def after(self, step: Step) -> None:
        """Keep of the guesses that were tried those that were right and the token after
        them. The room of the others is given back when the step is committed. A state
        has seen them all: it stays that before the step unless all were right, and the
        tokens that stay are computed once more."""
        keeps_states = any(step.context.pool.plan.model.states)
        for chunk in step.chunks:
            if not chunk.drafts:
                continue
            chunk.choices = kept(chunk.drafts, chunk.choices)
            count = len(chunk.choices)
            if count < chunk.count:
                count = 0 if keeps_states else count
                step.context.pool.shorten(chunk.reservation, count)
                chunk.count = count
        if self._watching is not None:
            self._watching.watch(step)

    def tried(self, chunks: Items[Chunk]) -> None:
        """Count the guesses that were tried, and those that were right."""
        expected, before = 0.0, self.accepted
        for chunk in chunks:
            if chunk.drafts and chunk.choices:
                sequence, stayed = chunk.sequence, chunk.stayed
                expected += sum(self._chances[sequence][: len(chunk.drafts)])
                self.drafts += 1
                self.drafted += len(chunk.drafts)
                self.accepted += stayed
                sequence.drafted += len(chunk.drafts)
                sequence.accepted += stayed
        if expected:
            self.trust.tried(expected, self.accepted - before)

    def ran(self, chunks: Items[Chunk], seconds: float, ahead: bool) -> None:
        """A step of decodes alone has run, and this long after the one before it its
        tokens were known. ``ahead``: it was prepared while that one ran, or steps never
        are."""
        sequences, rows, stayed = len(chunks), 0, 0
        for chunk in chunks:
            if chunk.drafts or chunk.count > 1:  # most steps have none
                rows += chunk.extra
                stayed += chunk.stayed
        plain = self.costs.plain(sequences)
        looked, self._looked = self._looked, 0.0
        if rows:
            self.costs.ran(rows, sequences, seconds)
            lost = seconds - plain * (1 + stayed / sequences)
            lost = min(lost, plain * MAX_SLOWDOWN)
        else:
            seconds = max(seconds - looked, seconds / 2)
            lost = looked
            if ahead:
                self.costs.ran(0, sequences, seconds)
            elif plain:
                lost += min(max(0.0, seconds - plain), plain * MAX_SLOWDOWN)
                self.costs.began_again(sequences, seconds)
        self.allowance.ran(plain or seconds, lost)

    def ran_beside_prompts(self, chunks: Items[Chunk]) -> None:
        """A step of decodes and prompts has run. What its guesses have cost is what
        they cost without the prompts: it is not seen."""
        decodes = [chunk for chunk in chunks if not chunk.is_prefill]
        rows, stayed = 0, 0
        for chunk in decodes:
            rows += chunk.extra
            stayed += chunk.stayed
        looked, self._looked = self._looked, 0.0
        if decodes:
            plain = self.costs.plain(len(decodes))
            longer = self.costs.longer(rows, len(decodes)) - 1
            saved = plain * (stayed / len(decodes) - longer)
            self.allowance.ran(plain, looked - saved)


def kept(guesses: Items[int], choices: Items[Choice]) -> Items[Choice]:
    """The choices up to the first that was guessed wrong, which is the last one whose
    row has seen only tokens that count. Where a row behind a guess has no token the
    guess itself is tried again, alone, and says why."""
    for place, guessed in enumerate(guesses):
        if isinstance(choices[place + 1][0], Exception) or choices[place][0] != guessed:
            return choices[: place + 1]
    return choices
