"""AsyncEngine: a thread that runs an LLM's engine for as many callers as come. What HTTP and Triton front ends use.

with AsyncEngine(LLM.load("engine")) as engine:
    request = engine.submit([[5, 17, 9]], SamplingParams(max_new_tokens=32), on_delta=print)   # from any thread
    engine.cancel(request)

    async for delta in engine.stream([[5, 17, 9]], SamplingParams()):                          # or in asyncio
        print(delta.text, end="")

The thread alone touches the engine. Callers hand it commands through a queue, between two steps; what happens comes
back as deltas. Nothing in a request can stop the thread: a step that fails ends the requests that make it fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import chain
from types import TracebackType
from typing import Protocol

from kvlathe.errors import KvlatheError
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.sampler import SamplingParams, TokenLogprob
from kvlathe.runtime.sequence import Beginning, Sequence

MAX_WAITING = 256
log = logging.getLogger("kvlathe")


class Busy(KvlatheError):
    """The queue is full, or the engine is closing. ``retry_after``: seconds until it is worth another try."""

    def __init__(self, fact: str, reason: str, retry_after: int) -> None:
        super().__init__(fact, reason, f"try again in {retry_after} s")
        self.retry_after = retry_after


class Closing(Busy):
    """The engine accepts nothing more."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to one answer of a request.

    ``index``: prompt number x n + choice. ``text`` is whole characters, stop strings excluded (and may be empty: text
    that could begin a stop string is held back); ``logprobs`` is as long as ``token_ids`` where asked for, else empty;
    ``prompt_logprobs``, if asked for, come with an answer's first delta, for the prompt's tokens but the first.
    ``finish_reason``: None while it goes on; stop, length, cancelled, timeout (the deadline passed), error (``error``).
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    error: Exception | None = None


OnDelta = Callable[[Delta], None]


@dataclass(eq=False, slots=True)
class Request:
    """Prompts that were submitted together and the sequences that answer them, ``n`` for each prompt."""

    sequences: list[Sequence]
    on_delta: OnDelta
    prompt_tokens: int  # of all prompts, each counted once
    left: int  # sequences that have not ended
    told: list[tuple[int, int, float]]  # of each sequence: characters and tokens that were passed on, and until when
    done: threading.Event = field(default_factory=threading.Event)

    def news(self, index: int) -> Delta:
        """What was not passed on yet of sequence ``index``."""
        sequence = self.sequences[index]
        characters, tokens, _ = self.told[index]
        text = sequence.text.text if sequence.text else ""
        self.told[index] = (len(text), sequence.answered, sequence.last_token)
        return Delta(
            index,
            text[characters:],
            tuple(sequence.tokens[sequence.prompt_tokens + tokens :]),
            tuple(sequence.logprobs[tokens:]),
            () if tokens else tuple(sequence.prompt_logprobs),
            sequence.finish_reason,
            sequence.error,
        )


class Observer(Protocol):
    """Told of what happens, by the engine's thread: metrics. It must not block or raise."""

    def grew(self, sequence: Sequence, tokens: int, seconds: float) -> None:
        """``tokens`` more tokens, ``seconds`` after the ones before (or after its submission, for the first)."""
        ...

    def ended(self, sequence: Sequence) -> None: ...


class Silence:
    """Observes nothing."""

    def grew(self, sequence: Sequence, tokens: int, seconds: float) -> None: ...
    def ended(self, sequence: Sequence) -> None: ...


class AsyncEngine:
    """Serves requests from any thread. At most ``max_waiting`` sequences wait for their turn; others are Busy."""

    def __init__(self, llm: LLM, max_waiting: int = MAX_WAITING, observer: Observer | None = None) -> None:
        self.llm, self.max_waiting, self.observer = llm, max_waiting, observer or Silence()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._owners: dict[Sequence, tuple[Request, int]] = {}  # sequences that have not ended
        self._mailboxes: dict[asyncio.AbstractEventLoop, Mailbox] = {}
        self._lock = threading.Lock()
        self._open = 0  # sequences submitted and not ended
        self._pace = 1.0  # seconds between two sequences that end, of late
        self._last_end = time.perf_counter()
        self._draining = self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="kvlathe-engine", daemon=True)

    # -- life ------------------------------------------------------------------------------------------------------
    def start(self) -> AsyncEngine:
        self._thread.start()
        return self

    def __enter__(self) -> AsyncEngine:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def drain(self) -> None:
        """Refuse what comes from now on; what is here goes on."""
        with self._lock:
            self._draining = True

    def close(self, seconds: float = 0) -> bool:
        """Drain for at most ``seconds``, cancel what is left, end the thread. True if all had ended by itself."""
        self.drain()
        until = time.perf_counter() + seconds
        while self.open and time.perf_counter() < until:
            time.sleep(0.01)
        whole = not self.open
        self._stopping = True
        self._commands.put(lambda: None)
        self._thread.join()
        return whole

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def draining(self) -> bool:
        return self._draining

    # -- requests --------------------------------------------------------------------------------------------------
    def submit(
        self,
        prompts: Items[Items[int]],
        params: SamplingParams,
        on_delta: OnDelta,
        n: int = 1,
        tenant: str = "",
        seconds: float | None = None,
    ) -> Request:
        """Answer each of ``prompts`` (token ids) ``n`` times. ``on_delta`` is called in the engine's thread: be quick.

        Every sequence's last delta has a finish_reason. ``n`` answers of one prompt compute it once where the plan
        allows; choice i draws from ``seed`` + i. ``tenant``: who shares pages, and takes turns with other tenants.
        ``seconds``: the deadline, from now. Raises KvlatheError for what this engine cannot serve, Busy if the queue is
        full; nothing was queued then.
        """
        self.check_count(len(prompts) * n)
        request = self._request(prompts, params, on_delta, n, tenant.encode(), seconds)
        with self._lock:
            self._check_room(len(request.sequences))
            self._open += len(request.sequences)
            self._commands.put(lambda: self._enqueue(request))
        return request

    def check_count(self, count: int) -> None:
        """Raises KvlatheError for more sequences than ever have room at once."""
        most = self.max_waiting + self.llm.limits.max_batch_size
        if count > most:
            raise KvlatheError(
                f"a request of {count} sequences came", f"this server queues {most} at most", "send fewer at a time"
            )

    def cancel(self, request: Request) -> None:
        """End what is left of a request before the next step. Harmless if it has ended."""
        self._commands.put(lambda: self._cancel(request))

    async def stream(
        self,
        prompts: Items[Items[int]],
        params: SamplingParams,
        n: int = 1,
        tenant: str = "",
        seconds: float | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """The deltas of ``submit`` in asyncio. Leaving the loop early, or cancelling its task, cancels the request."""
        deltas: asyncio.Queue[Delta] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        mailbox = self._mailboxes.setdefault(loop, Mailbox(loop))
        request = self.submit(prompts, params, lambda delta: mailbox.post(deltas, delta), n, tenant, seconds)
        left = len(request.sequences)
        try:
            while left:
                delta = await deltas.get()
                left -= delta.finish_reason is not None
                yield delta
        finally:
            if left:
                self.cancel(request)

    # -- counts ----------------------------------------------------------------------------------------------------
    @property
    def open(self) -> int:
        """Sequences that have not ended."""
        return self._open

    @property
    def running(self) -> int:
        return len(self.llm.engine.scheduler.running)

    @property
    def waiting(self) -> int:
        return max(0, self._open - self.running)

    @property
    def bytes_used(self) -> int:
        """Of the pages of running sequences, shared ones once. Pages that are only kept in case they are wanted again
        do not count: a cache that is full of them has room."""
        strides, tables = self.llm.pool.strides, [s.table.pages for s in list(self.llm.engine.scheduler.running)]
        owned = [set(chain.from_iterable(ids)) for ids in zip(*tables, strict=True)]
        return sum(len(pages) * stride for pages, stride in zip(owned, strides, strict=False))

    # -- the caller's thread ---------------------------------------------------------------------------------------
    def _request(
        self,
        prompts: Items[Items[int]],
        params: SamplingParams,
        on_delta: OnDelta,
        n: int,
        salt: bytes,
        seconds: float | None,
    ) -> Request:
        sequences = []
        shared = n > 1 and self.llm.sharable and params.prompt_logprobs is None
        for prompt in prompts:
            beginning = Beginning() if shared else None
            for choice in range(n):
                own = (
                    params if params.seed is None else dataclasses.replace(params, seed=(params.seed + choice) % 2**64)
                )
                sequence = self.llm.sequence([int(token) for token in prompt], own)
                self.llm.engine.scheduler.check(sequence)
                sequence.salt, sequence.beginning = salt, beginning
                sequence.deadline = math.inf if seconds is None else sequence.started + seconds
                if beginning:
                    beginning.followers.add(sequence)
                sequences.append(sequence)
        total = sum(map(len, prompts))
        return Request(sequences, on_delta, total, len(sequences), [(0, 0, s.started) for s in sequences])

    def _check_room(self, count: int) -> None:
        if self._draining:
            raise Closing("the server is shutting down", "it finishes what it has begun", 5)
        if not self._thread.is_alive():
            raise Closing("the engine does not run", "its thread was not started or has ended", 5)
        scheduler = self.llm.engine.scheduler
        free = 0 if scheduler.waiting else self.llm.limits.max_batch_size - len(scheduler.running)
        if self._open - len(scheduler.running) + count > self.max_waiting + free:
            reason = f"{self.max_waiting} sequences may wait at most"
            raise Busy("the queue is full", reason, max(1, min(60, math.ceil(self._pace * count))))

    # -- the engine's thread ---------------------------------------------------------------------------------------
    def _loop(self) -> None:
        while not self._stopping:
            self._obey()
            if not self._owners:
                continue
            try:
                changed = self.llm.engine.step()
            except Exception as error:  # not a session's step but our own loop: nothing that runs can be trusted
                log.exception("a step could not be scheduled")
                changed = self._abandon(error)
            for sequence in changed:
                self._publish(sequence)
        for request, _ in list(self._owners.values()):
            self._cancel(request)

    def _obey(self) -> None:
        """Do what was asked since the last step; wait for something to do if there is nothing to run."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._commands.get(block=not self._owners and not self._stopping)()

    def _enqueue(self, request: Request) -> None:
        if not self._owners:
            self._last_end = time.perf_counter()  # nobody could end before
        for i, sequence in enumerate(request.sequences):
            self._owners[sequence] = (request, i)
            self.llm.engine.scheduler.waiting.push(sequence)

    def _cancel(self, request: Request) -> None:
        for sequence in request.sequences:
            if sequence in self._owners:
                self.llm.engine.cancel(sequence)
                self._publish(sequence)

    def _abandon(self, error: Exception) -> list[Sequence]:
        """End what runs; if nothing does, who is next in line, so that the loop goes on."""
        scheduler = self.llm.engine.scheduler
        first = scheduler.waiting.peek()
        guilty = list(scheduler.running) or ([first] if first else [])
        return [self.llm.engine.fail(sequence, error) for sequence in guilty]

    def _publish(self, sequence: Sequence) -> None:
        request, index = self._owners[sequence]
        before = request.told[index][2]
        delta = request.news(index)
        if delta.token_ids:
            self.observer.grew(sequence, len(delta.token_ids), sequence.last_token - before)
        if sequence.finish_reason:
            self._forget(sequence, request)
        if sequence.error:
            log.error("a request failed", exc_info=sequence.error)
        try:
            request.on_delta(delta)
        except Exception:  # the receiver is gone
            log.exception("a receiver failed; its request is cancelled")
            request.on_delta = lambda _: None
            self.cancel(request)

    def _forget(self, sequence: Sequence, request: Request) -> None:
        del self._owners[sequence]
        now = time.perf_counter()
        self._pace += 0.1 * (min(60.0, now - self._last_end) - self._pace)
        self._last_end = now
        with self._lock:
            self._open -= 1
        self.observer.ended(sequence)
        request.left -= 1
        if not request.left:
            request.done.set()


class Mailbox:
    """Passes things to queues of an event loop from another thread, waking the loop once for many of them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._letters, self._called = loop, deque[tuple[asyncio.Queue, object]](), False

    def post(self, target: asyncio.Queue, letter: object) -> None:
        self._letters.append((target, letter))
        if not self._called:
            self._called = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._called = False
        while self._letters:
            target, letter = self._letters.popleft()
            target.put_nowait(letter)
