"""Structures that wait to be compiled: clients take turns, and each waits with a few at
most.

Compiling one may take seconds of a processor, and whoever sends many of them must not
hold up another client's. So the client goes next that has spent the least time, as in
start-time fair queueing: one that was idle starts where the others are. Within a client
it is first come, first served.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvlathe.base.errors import Busy, EngineStopped
from kvlathe.runtime.text.structure import Structure

Made = TypeVar("Made")
Work = Callable[[Structure, str], Made | None]
"""Compiles a structure for a client. None: the next one should; not of the last."""
WAITING = 64
"""Structures of one client that wait at once."""
RETRY_SECONDS = 5
"""A client that has that many may ask again then."""


@dataclass(slots=True, eq=False)
class Turn(Generic[Made]):
    """A structure that a client waits for, and whoever is told of it. ``number``: of
    its place among all."""

    structure: Structure
    client: str
    number: int
    futures: list[Future[Made]] = field(default_factory=list)

    @property
    def left(self) -> bool:
        """Whether nobody waits for it any more."""
        return all(future.cancelled() for future in self.futures)


class TurnQueue(Generic[Made]):
    """The turns that wait for one ``work``, by client. Not thread-safe."""

    def __init__(self, work: Work[Made]) -> None:
        self.work = work
        self.lines: dict[str, deque[Turn[Made]]] = {}
        self._spent: dict[str, float] = {}  # seconds of each client, in virtual time
        self._clock = 0.0  # the virtual time at which the last turn began
        self._running: str | None = None  # whose turn it is

    def put(self, turn: Turn[Made]) -> None:
        """Wait, behind the turns of the same client."""
        client, line = turn.client, self.lines.setdefault(turn.client, deque())
        if not line and client != self._running:
            self._spent[client] = max(self._spent.get(client, 0.0), self._clock)
        line.append(turn)

    def drop_left(self, client: str) -> list[Turn[Made]]:
        """Take away the turns of a client that nobody waits for."""
        line = self.lines.pop(client, deque())
        if kept := deque(turn for turn in line if not turn.left):
            self.lines[client] = kept
        return [turn for turn in line if turn.left]

    def begin(self) -> Turn[Made]:
        """The turn that is next."""
        heads = {name: line[0].number for name, line in self.lines.items()}
        client = min(heads, key=lambda name: (self._spent[name], heads[name]))
        line = self.lines[client]
        turn = line.popleft()
        if not line:
            del self.lines[client]
        self._clock, self._running = self._spent[client], client
        return turn

    def end(self, turn: Turn[Made], seconds: float) -> None:
        """The turn that began took ``seconds``."""
        self._running = None
        self._spent[turn.client] += seconds
        if not self.lines:  # everybody is idle: nobody is owed anything
            self._spent.clear()
            self._clock = 0.0
        owed = self._spent.items()
        self._spent = {
            name: spent
            for name, spent in owed
            if spent > self._clock or name in self.lines
        }


class CompileQueue(Generic[Made]):
    """Calls ``works`` of a structure, one after the other, until one makes it. Each
    work has a queue and a thread of its own with ``stack`` bytes of stack, from its first
    turn until ``close``."""

    def __init__(self, works: Sequence[Work[Made]], stack: int) -> None:
        self._queues = [TurnQueue(work) for work in works]
        self._stack = stack
        self._lock = threading.Lock()  # of everything below, and of the queues
        self._threads: dict[int, ThreadPoolExecutor] = {}
        self._closed = False
        self._turns: dict[tuple[str, Structure], Turn[Made]] = {}
        self._numbers = itertools.count()

    def put(self, structure: Structure, client: str) -> Future[Made]:
        """The future of what the works make or raise; cancelling it gives the turn up.
        Raises Busy where the client waits for WAITING others, and EngineStopped after
        ``close``."""
        future: Future[Made] = Future()
        with self._lock:
            if self._closed:
                raise stopped()
            turn = self._turns.get((client, structure))
            if turn is None:
                self._make_room(client)
                turn = Turn[Made](structure, client, next(self._numbers))
                self._turns[client, structure] = turn
                self._wait(turn, 0)
            turn.futures.append(future)
        return future

    def close(self) -> None:
        """Refuse whoever waits. What runs ends by itself."""
        with self._lock:
            self._closed = True
            turns = list(self._turns.values())
            self._turns.clear()
            for thread in self._threads.values():
                thread.shutdown(wait=False, cancel_futures=True)
        for turn in turns:
            tell(turn, stopped())

    def _make_room(self, client: str) -> None:
        """Forget the client's turns that nobody waits for, where it has many. Raises
        Busy where that is not enough."""
        if sum(own == client for own, _ in self._turns) < WAITING:
            return
        dropped = [turn for queue in self._queues for turn in queue.drop_left(client)]
        for turn in dropped:
            del self._turns[client, turn.structure]
        if not dropped:
            raise Busy(
                f"{WAITING} structures of this client wait to be compiled",
                "clients take turns",
                RETRY_SECONDS,
            )

    def _wait(self, turn: Turn[Made], number: int) -> None:
        self._queues[number].put(turn)
        if number not in self._threads:
            self._threads[number] = thread_with(self._stack)
        self._threads[number].submit(self._take_turn, number)

    def _take_turn(self, number: int) -> None:
        """Whose turn it is, whoever it was that this was asked for."""
        queue = self._queues[number]
        with self._lock:
            turn = None if self._closed else self._begun(queue)
        if turn is None:
            return
        began = time.perf_counter()
        found: Made | BaseException | None
        try:
            found = queue.work(turn.structure, turn.client)
        except BaseException as error:  # whoever waits is told
            found = error
        with self._lock:
            queue.end(turn, time.perf_counter() - began)
            if self._closed:  # they were told
                return
            if found is None:
                self._wait(turn, number + 1)
                return
            del self._turns[turn.client, turn.structure]
        tell(turn, found)

    def _begun(self, queue: TurnQueue[Made]) -> Turn[Made] | None:
        """The next turn that somebody waits for, if there is one."""
        while queue.lines:
            turn = queue.begin()
            if not turn.left:
                return turn
            queue.end(turn, 0.0)
            del self._turns[turn.client, turn.structure]
        return None


def thread_with(stack: int) -> ThreadPoolExecutor:
    """A thread with so many bytes of stack."""
    pool = ThreadPoolExecutor(1, "kvlathe-structures")
    before = threading.stack_size(stack)
    try:
        pool.submit(threading.get_ident)  # starts it
    finally:
        threading.stack_size(before)
    return pool


def tell(turn: Turn[Made], found: Made | BaseException) -> None:
    """Tell whoever still waits."""
    for future in turn.futures:
        if future.set_running_or_notify_cancel():
            if isinstance(found, BaseException):
                future.set_exception(found)
            else:
                future.set_result(found)


def stopped() -> EngineStopped:
    return EngineStopped("the engine is closed", "no structure is compiled now")
