"""Compaction of a prefix that later requests begin with: the model is asked to repeat
it, and the KV pairs that this needs least are dropped (arXiv 2505.23416).

The prefix is cached whole, unquantized. The model then reads, part by part, an
instruction and the part once more. A pair's score is the largest probability that a row
of these gives it, over the query heads of its lane. What stays is copied to new pages,
in the number format of the plan, and is the prefix cache's from then on. Keys keep the
rotation of their own position, and later queries have their true positions.

It differs from the paper in one thing: probabilities are those of the softmax over the
whole prefix. The paper's are over one part and what repeats it, which costs less
memory.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Generator
from functools import partial

from kvlathe.base.errors import KvlatheError
from kvlathe.runtime.cache.kept_pairs import Floats, Places, kept_places
from kvlathe.runtime.cache.page_table import PageTable
from kvlathe.runtime.requests.engine_thread import EngineThread
from kvlathe.runtime.requests.sequences import SequenceFactory
from kvlathe.runtime.scheduling.engine import Engine
from kvlathe.runtime.scheduling.parts.compaction import PairScores
from kvlathe.runtime.scheduling.sequence import PrefillChunk
from kvlathe.runtime.scheduling.sequence import Sequence as Request
from kvlathe.runtime.scheduling.step import DONE, Step, StepPart, StepRoom
from kvlathe.runtime.sessions.page_moves import PageMoves, Relocation
from kvlathe.runtime.sessions.protocols import Float32
from kvlathe.runtime.text.sampler import Sampler
from kvlathe.runtime.text.sampling_params import SamplingParams
from kvlathe.runtime.text.tokenizer import Tokenizer

PART = 2048
"""Tokens that are repeated at once, where the engine's longest sequence has room."""
FIRST = "\n\nRepeat the previous context:\n"
NEXT = "\n\nRepeat the previous context from here on: "
LEAD = 8
"""Tokens before a part that stand behind NEXT."""


@dataclasses.dataclass(frozen=True, slots=True)
class CompactionResult:
    """The result of a compaction. ``tokens``: of the prefix that was compacted, whole
    blocks of the prefix cache. ``kept``: the share of its KV pairs that stayed;
    ``lane_tokens``: of each kept lane, in order, its tokens. ``bytes``: of its pages;
    ``whole_bytes``: as a prompt has them that is not compacted. ``prefill_seconds`` are
    part of ``seconds``.
    """

    tokens: int
    kept: float
    lane_tokens: list[int]
    bytes: int
    whole_bytes: int
    prefill_seconds: float
    seconds: float


class Compaction:
    """The compaction of the prompt ``tokens``, of which the share ``keep`` stays (None:
    the plan's). Everything but the constructor runs in the engine's thread.

    Raises KvlatheError where the engine cannot compact, or the prompt is too short or
    too long.
    """

    def __init__(
        self,
        engine: Engine,
        factory: SequenceFactory,
        tokenizer: Tokenizer,
        tokens: list[int],
        keep: float | None = None,
        salt: bytes = b"",
    ) -> None:
        factory.check(tokens, 0)
        self._engine, self._factory, self._tokenizer = engine, factory, tokenizer
        self._plan, self._salt = engine.pool.plan, salt
        self._keep = _share(engine, keep)
        prefixes = engine.scheduler.prefixes
        if prefixes is None or "moves_tokens" not in engine.session.capabilities:
            raise KvlatheError(
                "this engine keeps no prefixes",
                "it was loaded without sharing",
                "load it with share_prefixes",
            )
        self._prefixes = prefixes
        self._count = len(tokens) // prefixes.block * prefixes.block
        if not self._count:
            remedy = "give a longer one"
            if prefixes.block > self._plan.page_tokens:
                remedy += ", or build with a smaller --prefill-chunk"
            raise KvlatheError(
                f"a prefix of {len(tokens)} tokens cannot be compacted",
                f"prefixes are kept in blocks of {prefixes.block}",
                remedy,
            )
        self._tokens = tokens[: self._count]
        self._part = self._in_cache(min(PART, self._room()))
        self._scores = PairScores(self._plan, self._count)
        self._affordable = engine.scheduler.limits.max_num_tokens

    def _room(self) -> int:
        """Tokens that can be repeated behind the prefix."""
        longest = self._engine.scheduler.limits.max_seq_len
        room = longest - self._count - self._instruction
        if room < self._plan.page_tokens:
            raise KvlatheError(
                f"a prefix of {self._count} tokens cannot be compacted",
                f"the model repeats it in parts, and the longest sequence is {longest}",
                "give a shorter one, or build with a larger --max-seq-len",
            )
        return room

    @property
    def scores(self) -> Float32:
        """[kept lanes, tokens]: of each pair, once ``steps`` has ended."""
        return self._scores.scores

    @property
    def _instruction(self) -> int:
        """Tokens between the prefix and what repeats it, at most."""
        return max(len(self._said(FIRST)), len(self._said(NEXT)) + LEAD)

    def _said(self, text: str) -> list[int]:
        """In the middle of a text: without what a tokenizer puts at its beginning."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _in_cache(self, part: int) -> int:
        """At most ``part`` tokens, as many as the cache has room for behind the prefix:
        nothing is quantized before the end."""
        page, pool = self._plan.page_tokens, self._engine.pool
        while True:
            pages = -(-(self._count + self._instruction + part) // page)
            wanted = [pages if b.is_hot else 0 for b in self._plan.index.buckets]
            if pool.fits([wanted]):
                return part
            if part <= page:
                break
            part //= 2
        sizes = zip(wanted, pool.strides, strict=True)
        needed = sum(count * stride for count, stride in sizes)
        raise KvlatheError(
            f"a prefix of {self._count} tokens cannot be compacted",
            f"unquantized and in part repeated it needs {needed:,} bytes, and the cache has {pool.arena_bytes:,}",
            "give a shorter one, or give the cache more memory",
        )

    def steps(self) -> Generator[None, None, CompactionResult]:
        """One step of the model at a time. Closing it gives the pages back."""
        with self._engine.scheduler.borrowed_pages():
            return (yield from self._steps())

    def _steps(self) -> Generator[None, None, CompactionResult]:
        started = self._now()
        sequence = self._sequence(self._tokens, self._engine.pool.open())
        try:
            while sequence.cached < self._count:
                self._run(sequence, sequence.next_tokens(self._affordable))
                yield
            prefilled = self._now()
            for first in range(0, self._count, self._part):
                yield from self._repeat(sequence.table, first)
            table = self._compact(sequence.table)
        finally:
            self._engine.pool.release(sequence.table)
        return self._made(table, prefilled - started, started)

    def _now(self) -> float:
        """In seconds, once everything that was asked of the session is done: on a GPU
        it may only be queued."""
        self._engine.check_device()
        return time.perf_counter()

    def _sequence(self, tokens: list[int], table: PageTable) -> Request:
        sequence = self._factory.open(
            tokens, len(tokens), self._plan.prefill_chunk, Sampler(SamplingParams())
        )
        sequence.table = table
        return sequence

    def _repeat(self, table: PageTable, first: int) -> Generator[None]:
        """Observe the repetition of the part that begins at token ``first``."""
        instruction = self._said(NEXT if first else FIRST)
        lead = self._tokens[max(0, first - LEAD) : first]
        part = self._tokens[first : first + self._part]
        tokens = [*self._tokens, *instruction, *lead, *part]
        sequence = self._sequence(tokens, self._engine.pool.fork(table))
        sequence.cached = self._count
        try:
            while sequence.cached < len(tokens):
                self._run(sequence, len(tokens) - sequence.cached, observed=True)
                yield
        finally:
            self._engine.pool.release(sequence.table)

    def _run(self, sequence: Request, left: int, observed: bool = False) -> None:
        """One step of ``left`` tokens, or of as many as there is memory for. Nothing is
        sealed, so that tokens may still be chosen among.

        A step takes no more tokens than the scheduler's may. One without memory is
        tried with half of them, down to a page. Nobody else is told: observed steps
        need more memory than others of as many tokens. Raises OutOfMemory.
        """
        parts: list[StepPart] = [self._scores] if observed else []
        context = dataclasses.replace(
            self._engine.context,
            room=StepRoom(),
            parts=parts,
            purpose=f"to compact a prefix of {self._count:,} tokens",
        )
        room, page = self._engine.scheduler.room, self._plan.page_tokens
        while True:
            count = min(left, room.of(self._affordable))
            step = Step(context, [self._chunk(sequence, count)], chooses=False)
            outcome = step.launch()
            if outcome is DONE:
                return
            if outcome.kind == "failed" or count <= page:
                assert outcome.error is not None
                raise outcome.error
            self._affordable = max(page, count // 2)

    def _chunk(self, sequence: Request, count: int) -> PrefillChunk:
        reserve = partial(self._engine.pool.reserve, sequence.table, count)
        return PrefillChunk(sequence, count, self._engine.scheduler.make_room(reserve))

    def _compact(self, table: PageTable) -> PageTable:
        """The pairs that stay, in pages of their own, and remember them."""
        index = self._plan.index
        sources = {b.number: b.hot for b in index.buckets if b.stays}
        page = self._plan.page_tokens
        scores: list[Floats] = []
        for bucket in sources:
            scores.append(self.scores[self._scores.rows(bucket)])
        places = kept_places(scores, self._keep, page)
        kept: dict[int, Places] = dict(zip(sources, places, strict=True))
        lengths = [0] * len(index.buckets)
        counts = list(lengths)
        for bucket, of_lanes in kept.items():
            length = of_lanes.shape[1]
            lengths[bucket] = length
            counts[bucket] = length // page
        pool = self._engine.pool
        pages = self._engine.scheduler.make_room(partial(pool.take, counts))
        relocations: list[Relocation] = []
        try:
            for bucket, source in sources.items():
                ids, target = table.pages[source], pages[bucket]
                if target:
                    moved = Relocation(source, ids, bucket, target, kept[bucket])
                    relocations.append(moved)
            self._engine.session.apply([PageMoves(relocations=relocations)])
        except BaseException:
            pool.drop(pages)
            raise
        made = PageTable(pages, lengths, [])
        self._prefixes.keep(self._tokens, self._salt, self._keep, made)
        return made

    def _made(
        self, table: PageTable, prefill: float, started: float
    ) -> CompactionResult:
        pool = self._engine.pool
        lane_tokens = [0] * len(self.scores)
        for bucket, length in enumerate(table.lengths):
            for row in self._scores.rows(bucket):
                lane_tokens[row] = max(lane_tokens[row], length)
        size = 0
        for ids, stride in zip(table.pages, pool.strides, strict=True):
            size += len(ids) * stride
        pairs = len(lane_tokens) * self._count
        kept = sum(lane_tokens)
        seconds = self._now() - started
        return CompactionResult(
            tokens=self._count,
            kept=kept / pairs,
            lane_tokens=lane_tokens,
            bytes=size,
            whole_bytes=pool.layout.bytes_for(self._count),
            prefill_seconds=prefill,
            seconds=seconds,
        )


def _share(engine: Engine, keep: float | None) -> float:
    """The share that stays: as asked, or the plan's."""
    share = engine.pool.plan.index.compaction
    if share is None:
        raise KvlatheError(
            "this engine cannot compact a prefix",
            "its plan keeps prefixes whole",
            "build it with a compression that compacts prefixes (docs/kvzip.md)",
        )
    share = share if keep is None else keep
    if not 0 < share <= 1:
        raise KvlatheError(
            f"a prefix cannot keep {share} of its KV pairs",
            "it is a share",
            "give a number above 0, 1 at most",
        )
    return share


def compacted(
    thread: EngineThread, work: Compaction, given_up: threading.Event | None
) -> CompactionResult:
    """Do the work in the engine's thread, a step at a time. Raises KvlatheError once it
    was given up."""
    steps = work.steps()
    try:
        while True:
            if given_up and given_up.is_set():
                raise KvlatheError("the compaction was given up")
            made = thread.call(partial(_advanced, steps))
            if made is not None:
                return made
    except BaseException:
        thread.call(steps.close)
        raise


def _advanced(
    steps: Generator[None, None, CompactionResult],
) -> CompactionResult | None:
    """One step more; what they come to, after the last."""
    try:
        next(steps)
    except StopIteration as end:
        return end.value
    return None
