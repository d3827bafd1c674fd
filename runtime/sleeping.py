"""Sleeper: gives an engine's weights and pages back while nobody needs it, and loads the
weights again.

The engine, its queue and its counts stay; so does what waits on the host.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, get_args

from kvlathe.base.errors import Busy, KvlatheError
from kvlathe.base.memory import LESS_MEMORY, give_back, within_memory
from kvlathe.runtime.requests.engine_thread import AGAIN, EngineThread, asleep
from kvlathe.runtime.scheduling.engine import Engine
from kvlathe.runtime.sessions.page_moves import PageMoves
from kvlathe.runtime.sessions.protocols import Float32, Session, StepPlan

SleepMode = Literal["abort", "keep"]
"""The fate of requests that have not ended: abort ends them with an error, keep lets
them go on after waking."""

Use = Callable[[Session], None]


class NoSession(Session):
    """The session of an engine that sleeps: it has no memory and computes nothing."""

    def run(self, step: StepPlan) -> Float32:
        raise asleep()

    def apply(self, moves: Sequence[PageMoves]) -> None:
        raise asleep()

    def read_page(self, bucket: int, page: int) -> bytes:
        raise asleep()

    def write_page(self, bucket: int, page: int, data: bytes) -> None:
        raise asleep()


class Sleeper:
    """Puts ``engine``, which ``thread`` runs, to sleep. ``load`` loads its session
    again. What is called with ``use`` gives sessions by it to all that have one."""

    def __init__(
        self, engine: Engine, thread: EngineThread, load: Callable[[], Session]
    ) -> None:
        self._engine, self._thread, self._load = engine, thread, load
        self._lock = threading.Lock()

    def sleep(self, mode: SleepMode, use: Use) -> None:
        """As LLM.sleep."""
        if mode not in get_args(SleepMode):
            raise KvlatheError(
                f"the mode {mode!r} is not known",
                "requests are ended, or kept until the engine wakes",
                f"choose {' or '.join(get_args(SleepMode))}",
            )
        with self._lock:
            if not self._thread.asleep:
                self._thread.call(partial(self._lie_down, mode, use))
                give_back()

    def wake_up(self, use: Use) -> None:
        """As LLM.wake_up."""
        with self._lock:
            if self._thread.asleep:
                session = self._load()
                fact = "there is no memory for the CUDA graphs of decode steps"
                within_memory(session.warm_up, fact, LESS_MEMORY)
                self._thread.call(partial(self._get_up, session, use), asleep=True)

    def _lie_down(self, mode: SleepMode, use: Use) -> None:
        scheduler = self._engine.scheduler
        if scheduler.lends:
            raise Busy("the engine cannot sleep now", "a prefix is compacted", AGAIN)
        self._thread.settle()
        if mode == "abort":
            self._thread.give_up(asleep())
        scheduler.vacate()
        if scheduler.pool.bytes_in_use:
            raise Busy("the engine cannot sleep now", "others read its pages", AGAIN)
        use(NoSession())
        self._thread.sleep(True)

    def _get_up(self, session: Session, use: Use) -> None:
        use(session)
        self._thread.sleep(False)
