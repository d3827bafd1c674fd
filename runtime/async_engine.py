"""AsyncEngine: an LLM for servers. A bounded queue, tenants that take turns, deadlines,
and several answers of one prompt.

The LLM's own thread (requests/engine_thread.py) answers requests; deltas come back.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import threading
import time
from collections.abc import AsyncGenerator
from collections.abc import Sequence as Items
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain

from kvlathe.base.closing import ClosesAtExit
from kvlathe.base.errors import Busy, KvlatheError
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.requests.compaction import CompactionResult
from kvlathe.runtime.requests.deltas import deltas
from kvlathe.runtime.requests.engine_thread import Observer
from kvlathe.runtime.requests.request import Delta, OnDelta, Request
from kvlathe.runtime.requests.sequences import token_ids
from kvlathe.runtime.scheduling.sequence import Sequence, SharedPrompt
from kvlathe.runtime.text.sampling_params import SamplingParams

MAX_WAITING = 256
"""Sequences that wait for their turn, unless asked otherwise."""

MAX_COMPACTIONS = 5
"""Compactions at a time: one runs, and the others wait for it."""
RETRY_SECONDS = 5
"""The wait before another try, where nobody knows a better one."""


class Closing(Busy):
    """The engine accepts nothing more."""


class AsyncEngine(ClosesAtExit):
    """Serves requests from any thread with ``llm``, which it closes in the end. At most
    ``max_waiting`` sequences wait for their turn; more are Busy.

    ``engine`` is a folder that ``kvlathe build`` wrote:

    >>> import asyncio
    >>> from kvlathe import LLM, AsyncEngine, SamplingParams
    >>> served = AsyncEngine(LLM.load(engine), max_waiting=64)
    >>> async def tokens():
    ...     params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    ...     deltas = served.stream([[5, 17, 9]], params, n=2, tenant="alice")
    ...     return [token async for delta in deltas for token in delta.token_ids]
    >>> len(asyncio.run(tokens()))
    8

    Threads call ``submit``, whose request they may cancel:

    >>> request = served.submit([[5, 17, 9]], SamplingParams(), on_delta=lambda delta: None)
    >>> served.cancel(request)
    >>> served.close(seconds=10)
    True
    """

    def __init__(
        self, llm: LLM, max_waiting: int = MAX_WAITING, observer: Observer | None = None
    ) -> None:
        self.llm, self.max_waiting = llm, max_waiting
        if observer:
            llm.thread.observer = observer
        self._lock = threading.Lock()  # between counting the queue and joining it
        self._draining = False
        # A thread of their own: while they wait, others may use asyncio's threads.
        self._compactor = ThreadPoolExecutor(1, "kvlathe-compactor")
        self._compactions = 0

    # -- life --------------------------------------------------------------------------
    def drain(self) -> None:
        """Refuse what comes from now on; what is here goes on."""
        with self._lock:
            self._draining = True

    def close(self, seconds: float = 0) -> bool:
        """Drain for at most ``seconds``, cancel what is left, and close the LLM. True
        if all sequences and compactions had ended by themselves."""
        self.drain()
        until = time.perf_counter() + seconds
        while not self.idle and time.perf_counter() < until:
            time.sleep(0.01)
        finished = self.idle
        self.llm.close()
        self._compactor.shutdown(wait=False)
        return finished

    @property
    def alive(self) -> bool:
        """Whether the engine can answer."""
        return self.llm.thread.alive

    @property
    def draining(self) -> bool:
        return self._draining

    # -- requests ----------------------------------------------------------------------
    def submit(
        self,
        prompts: Items[Items[int]],
        params: SamplingParams,
        on_delta: OnDelta,
        n: int = 1,
        tenant: str = "",
        seconds: float | None = None,
        priority: int = 0,
    ) -> Request:
        """Answer each of ``prompts`` (token ids) ``n`` times.

        Answer i of prompt p has index p x n + i and draws from ``seed`` + i. Where the
        plan allows, the answers of one prompt compute it once.
        ``on_delta``: called in the engine's thread with every delta, so be quick. Every
            sequence's last delta has a finish_reason.
        ``tenant``: shares pages only with itself, and takes turns with other tenants.
        ``seconds``: the deadline, from now.
        ``priority``: of one tenant's requests that wait, lower ones go first.

        Raises KvlatheError for what this engine cannot serve, Busy if the queue is
        full; nothing was queued then.
        """
        self.check_count(len(prompts) * n)
        deadline = math.inf if seconds is None else time.perf_counter() + seconds
        sequences = []
        for prompt in prompts:
            answers = self._answers(token_ids(prompt), params, n)
            for sequence in answers:
                sequence.salt, sequence.deadline = tenant.encode(), deadline
                sequence.priority = priority
            sequences += answers
        with self._lock:
            self._check_room(len(sequences))
            return self.llm.thread.submit(sequences, on_delta)

    def check_count(self, count: int) -> None:
        """Raises KvlatheError for more sequences than ever have room at once."""
        most = self.max_waiting + self.llm.limits.max_batch_size
        if count > most:
            raise KvlatheError(
                f"a request of {count} sequences came",
                f"this server queues {most} at most",
                "send fewer at a time",
            )

    def cancel(self, request: Request) -> None:
        """End what is left of a request before the next step. Harmless if it has
        ended."""
        self.llm.thread.cancel(request)

    def stream(
        self,
        prompts: Items[Items[int]],
        params: SamplingParams,
        n: int = 1,
        tenant: str = "",
        seconds: float | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[Delta, None]:
        """The deltas of ``submit`` in asyncio. Leaving the loop early, or cancelling
        its task, cancels the request."""

        def submit(on_delta: OnDelta) -> Request:
            return self.submit(prompts, params, on_delta, n, tenant, seconds, priority)

        return deltas(submit, self.cancel)

    async def compact(
        self, prompt: Items[int], keep: float | None = None, tenant: str = ""
    ) -> CompactionResult:
        """``LLM.compact`` for a tenant; answers go on meanwhile. Cancelling the task
        ends the compaction before its next step. Raises KvlatheError, Busy for more
        than MAX_COMPACTIONS at a time, Closing while draining."""
        tokens, salt = token_ids(prompt), tenant.encode()
        given_up = threading.Event()
        work = partial(self.llm.compact, tokens, keep, salt, given_up)
        with self._lock:
            self._check_room(0)
            self._check_compactions()
            future = self._compactor.submit(work)
            self._compactions += 1
        future.add_done_callback(self._compacted)
        try:
            return await asyncio.wrap_future(future)
        finally:
            given_up.set()

    def _compacted(self, _: Future[CompactionResult]) -> None:
        """A compaction has ended, or will never begin."""
        with self._lock:
            self._compactions -= 1

    # -- counts ------------------------------------------------------------------------
    @property
    def open(self) -> int:
        """Sequences that have not ended."""
        return self.llm.thread.open

    @property
    def compactions(self) -> int:
        """Compactions that run or wait."""
        return self._compactions

    @property
    def idle(self) -> bool:
        """Whether nothing is left that a drain waits for."""
        return not self.open and not self._compactions

    @property
    def running(self) -> int:
        return len(self.llm.engine.scheduler.running)

    @property
    def waiting(self) -> int:
        return max(0, self.open - self.running)

    @property
    def bytes_used(self) -> int:
        """Bytes of the pages of running sequences, shared ones once. Pages that are
        only kept in case they are wanted again do not count: a cache full of them has
        room."""
        running = list(self.llm.engine.scheduler.running)
        tables = [sequence.table.pages for sequence in running]
        used = 0
        for bucket, stride in enumerate(self.llm.pool.strides):
            pages = set(chain.from_iterable(table[bucket] for table in tables))
            used += len(pages) * stride
        return used

    # -- the caller's thread -----------------------------------------------------------
    def _answers(
        self, prompt: list[int], params: SamplingParams, n: int
    ) -> list[Sequence]:
        """``n`` sequences that continue one prompt."""
        seed, sequences = params.seed, []
        for choice in range(n):
            own = params
            if seed is not None:
                own = dataclasses.replace(params, seed=(seed + choice) % 2**64)
            sequences.append(self.llm.sequence(list(prompt), own))
        if n > 1 and self.llm.sharable and params.prompt_logprobs is None:
            shared = SharedPrompt(followers=set(sequences))
            for sequence in sequences:
                sequence.shared_prompt = shared
        return sequences

    def _check_room(self, count: int) -> None:
        if self._draining:
            raise Closing(
                "the server is shutting down",
                "it finishes what it has begun",
                RETRY_SECONDS,
            )
        if not self.alive:
            raise Closing(
                "the engine does not run", "it was closed or has failed", RETRY_SECONDS
            )
        scheduler = self.llm.engine.scheduler
        places = self.llm.limits.max_batch_size - len(scheduler.running)
        free = 0 if scheduler.blocked else places
        if self.open - len(scheduler.running) + count > self.max_waiting + free:
            pause = math.ceil(self.llm.thread.pace.seconds * count)
            raise Busy(
                "the queue is full",
                f"{self.max_waiting} sequences may wait at most",
                max(1, min(60, pause)),
            )

    def _check_compactions(self) -> None:
        if self._compactions >= MAX_COMPACTIONS:
            raise Busy(
                "too many prefixes wait to be compacted",
                f"{MAX_COMPACTIONS} may run and wait at most",
                RETRY_SECONDS,
            )
