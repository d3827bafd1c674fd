"""EngineThread: the one thread that touches an engine, for callers in any thread.

Callers hand it commands through a queue. It carries them out between two steps; what
the steps bring goes back to the callers. A step that fails ends the requests that make
it fail, and the others go on. Whatever else fails in the thread reaches every caller.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable
from collections.abc import Sequence as Items
from concurrent.futures import Future
from functools import partial
from typing import Protocol, TypeVar

from kvlathe.base.errors import Asleep, DeviceLost, EngineStopped, KvlatheError
from kvlathe.runtime.requests.request import OnDelta, Request
from kvlathe.runtime.scheduling.engine import Engine
from kvlathe.runtime.scheduling.sequence import Sequence
from kvlathe.runtime.sessions.protocols import Session

T = TypeVar("T")
PAUSE = 0.01
"""Seconds until it is tried again where nobody finds a page before borrowed ones come
back."""
NAP = 0.1
"""Seconds between two looks at deadlines while the engine sleeps."""
AGAIN = 5
"""Seconds until what a sleeping engine refused may be tried again."""
STUCK_SECONDS = 600.0
"""Seconds after which a step counts as one that never ends: a GPU that answers no call, or
a kernel that waits for ever. A step of a large model takes minutes on slow cores."""
log = logging.getLogger("kvlathe")


class Observer(Protocol):
    """Told of what happens, in the engine's thread: metrics. It must not block or
    raise."""

    def grew(self, sequence: Sequence, tokens: int, seconds: float) -> None:
        """The sequence got ``tokens`` more tokens, ``seconds`` after those before (the
        first ones: after its submission)."""
        ...

    def ended(self, sequence: Sequence) -> None: ...


class Silence:
    """Observes nothing."""

    def grew(self, sequence: Sequence, tokens: int, seconds: float) -> None: ...
    def ended(self, sequence: Sequence) -> None: ...


class Pace:
    """``seconds`` between two sequences that end, of late: an exponential average."""

    def __init__(self) -> None:
        self.seconds = 1.0
        self._last = time.perf_counter()

    def busy(self) -> None:
        """The first sequence has come: no sequence could end before."""
        self._last = time.perf_counter()

    def ended(self) -> None:
        now = time.perf_counter()
        self.seconds += 0.1 * (min(60.0, now - self._last) - self.seconds)
        self._last = now


class EngineThread:
    """Runs ``engine`` for its callers. The thread starts with the first command and
    ends with ``close``, ``stop`` or the interpreter."""

    def __init__(self, engine: Engine) -> None:
        self.observer: Observer = Silence()
        self.pace = Pace()
        self._engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # Sequences that have not ended, each with its request and its place in it.
        self._owners: dict[Sequence, tuple[Request, int]] = {}
        # Of the four below. A finalizer may call stop() wherever the thread is.
        self._lock = threading.RLock()
        self._submitted: set[Request] = set()
        self._closed = False
        self._fault: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._watched: Session | None = None
        self._stopping = False  # the thread's own: it has seen that it is to end
        self._pauses = False  # its own, too: the last step did nothing
        self._asleep = False  # set in the thread alone
        self._step_began: float | None = None  # by the monotonic clock, while one runs

    # -- for callers, in any thread ----------------------------------------------------
    @property
    def open(self) -> int:
        """Sequences that were submitted and have not ended."""
        with self._lock:
            return sum(request.left for request in self._submitted)

    @property
    def alive(self) -> bool:
        """Whether it takes requests."""
        return not self._closed

    @property
    def stuck(self) -> bool:
        """Whether the step that runs has taken longer than STUCK_SECONDS."""
        began = self._step_began
        return began is not None and time.monotonic() - began > STUCK_SECONDS

    @property
    def fault(self) -> BaseException | None:
        """The error that ended the thread, where it was not asked to end."""
        return self._fault

    def submit(
        self, sequences: Items[Sequence], on_delta: OnDelta | None = None
    ) -> Request:
        """Queue sequences that the scheduler has checked. Raises EngineStopped if the
        engine is closed."""
        request = Request(sequences, on_delta)
        with self._lock:
            self._submitted.add(request)
            try:
                self._put(partial(self._begin, request))
            except Exception:
                self._submitted.discard(request)
                raise
            except BaseException:  # an interrupt: it may be queued, or not
                self._commands.put(partial(self._withdraw, request))
                raise
        return request

    def cancel(self, request: Request) -> None:
        """End what is left of a request before the next step. Harmless if it has
        ended."""
        self._commands.put(partial(self._cancel, request))

    def end(self, request: Request) -> None:
        """``cancel``, and wait until the pages are back."""
        self.cancel(request)
        if threading.current_thread() is not self._thread:
            request.done.wait()

    def wait(self, request: Request) -> None:
        """Return once every sequence has ended. An interrupt cancels the request.
        Raises what ended a sequence before its answer was whole."""
        self.refuse_own_thread()
        try:
            request.done.wait()
        except BaseException:
            self.end(request)
            raise
        request.raise_failure()

    @property
    def asleep(self) -> bool:
        """Whether no step runs until it is told to wake."""
        return self._asleep

    def call(self, work: Callable[[], T], asleep: bool = False) -> T:
        """Run ``work``: returns or raises what it does when it runs in the engine's
        thread, between two steps. ``asleep``: also while the engine sleeps. Raises
        Asleep else."""
        self.refuse_own_thread()
        future: Future[T] = Future()
        if not asleep:
            work = partial(self._awake, work)
        with self._lock:
            self._put(partial(self._fulfil, future, work))
        return future.result()

    def refuse_own_thread(self) -> None:
        """Raises KvlatheError in the engine's thread, which would wait for itself."""
        if threading.current_thread() is self._thread:
            raise KvlatheError(
                "a callback of the engine waits for the engine",
                "both run in the same thread",
                "ask from another thread",
            )

    def watch(self, session: Session) -> None:
        """Notice a process of the session that dies while nothing runs, and end them
        with this thread; where it has processes."""
        self._watched = session
        thread, check = weakref.ref(self), weakref.WeakMethod(session.check)

        def ask() -> None:
            found, work = thread(), check()
            if found is not None and work is not None:
                with contextlib.suppress(KvlatheError):  # it is the thread's to tell
                    found.call(work)

        session.watch(ask)

    def stop(self) -> None:
        """Take nothing more. The thread ends what is left and then itself."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._commands.put(self._stop)

    def close(self) -> None:
        """``stop``, and wait until the thread has ended."""
        self.stop()
        thread = self._thread
        if thread and thread is not threading.current_thread():
            thread.join()
        if self._watched is not None:
            self._watched.close()

    def _put(self, command: Callable[[], None]) -> None:
        """Queue a command, under the lock."""
        if self._fault:
            raise failure(self._fault)
        if self._closed:
            raise EngineStopped(
                "the engine is closed", "close() was called", "load the engine again"
            )
        self._commands.put(command)
        if self._thread is None:
            thread = threading.Thread(
                target=self._run, name="kvlathe-engine", daemon=True
            )
            # Known before it runs: the interpreter may end as soon as it does.
            self._thread = thread
            _running.add(self)
            try:
                thread.start()
            except RuntimeError:  # the system gives no more threads
                self._thread = None
                raise

    # -- for work that runs in the engine's thread (``call``) --------------------------
    def settle(self) -> None:
        """Wait for the tokens that are being chosen, and tell of them."""
        for sequence in self._engine.rest():
            if sequence in self._owners:
                self._publish(sequence)

    def give_up(self, error: Exception) -> None:
        """End every sequence with ``error``, and tell of it."""
        for sequence in list(self._owners):
            self._engine.fail(sequence, error)
            self._publish(sequence)

    def sleep(self, asleep: bool) -> None:
        """From now on run no step, or steps again. Requests wait meanwhile."""
        self._asleep = asleep

    def move_out(self, sequence: Sequence) -> None:
        """End a sequence that goes on elsewhere, and tell of it."""
        self._engine.move_out(sequence)
        if sequence in self._owners:
            self._publish(sequence)

    # -- in the engine's thread --------------------------------------------------------
    def _run(self) -> None:
        fault: BaseException | None = None
        try:
            while not self._stopping:
                self._obey()
                if self._owners and self._asleep:
                    for sequence in self._engine.overdue():
                        self._publish(sequence)
                elif self._owners:
                    self._step()
        except BaseException as error:  # callers wait: whatever it is, they must hear
            log.exception("the engine's thread failed")
            fault = error
        self._finish(fault)

    def _obey(self) -> None:
        """Carry out what was asked since the last step. Where there is nothing to run,
        wait for a command; where nothing can, for PAUSE seconds. No variable holds one:
        it could keep its LLM alive."""
        with contextlib.suppress(queue.Empty):
            while True:
                idle = not self._owners and not self._stopping
                if idle:
                    self._engine.rest()
                pauses, self._pauses = self._pauses or self._asleep, False
                pause = NAP if self._asleep else PAUSE
                self._commands.get(idle or pauses, None if idle else pause)()

    def _stop(self) -> None:
        self._stopping = True

    def _step(self) -> None:
        self._step_began = time.monotonic()
        try:
            changed = self._engine.step()
        except DeviceLost:
            raise
        # The scheduler failed, not a session's step: no running sequence can be trusted.
        except Exception as error:
            self._engine.check_device(error)
            log.exception("a step could not be scheduled")
            self._abandon(error)
            # What the step had ended before it failed is told of, too.
            changed = [s for s in self._owners if s.finish_reason]
        finally:
            self._step_began = None
        self._pauses = not changed and self._engine.scheduler.stalled
        for sequence in changed:
            self._publish(sequence)

    def _finish(self, fault: BaseException | None) -> None:
        """End every sequence, those of commands that still wait included."""
        with self._lock:
            self._closed, self._fault = True, fault
        while not self._commands.empty():
            self._commands.get()()
        for sequence in list(self._owners):
            if fault is None:
                self._engine.cancel(sequence)
            elif not sequence.finish_reason:
                # The engine is not asked: it may fail again.
                sequence.end("error", failure(fault))
            self._publish(sequence)

    def _begin(self, request: Request) -> None:
        if not self._owners:
            self.pace.busy()
        for index, sequence in enumerate(request.sequences):
            self._owners[sequence] = (request, index)
            self._engine.scheduler.waiting.push(sequence)

    def _cancel(self, request: Request) -> None:
        for sequence in request.sequences:
            if sequence in self._owners:
                self._engine.cancel(sequence)
                self._publish(sequence)

    def _withdraw(self, request: Request) -> None:
        self._cancel(request)
        with self._lock:
            self._submitted.discard(request)
        request.done.set()

    def _awake(self, work: Callable[[], T]) -> T:
        if self._asleep:
            raise asleep()
        return work()

    def _fulfil(self, future: Future[T], work: Callable[[], T]) -> None:
        if self._fault:
            future.set_exception(failure(self._fault))
            return
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
            if isinstance(error, Exception):  # nobody may run a step that would tell
                self._engine.check_device(error)

    def _abandon(self, error: Exception) -> None:
        """End what runs. If nothing does, end the next in line, so that the loop goes
        on."""
        scheduler = self._engine.scheduler
        ended = list(scheduler.running)
        if not ended and (first := scheduler.waiting.peek()):
            ended.append(first)
        for sequence in ended:
            self._engine.fail(sequence, error)

    def _publish(self, sequence: Sequence) -> None:
        """Tell the observer and the request what a step did to a sequence."""
        request, index = self._owners[sequence]
        delta = request.news(index) if request.on_delta else None
        tokens, seconds = request.progress(index)
        if tokens:
            self.observer.grew(sequence, tokens, seconds)
        if sequence.finish_reason:
            self._forget(sequence, request)
        if delta and request.on_delta:
            try:
                request.on_delta(delta)
            except Exception:
                log.exception("a receiver failed; its request is cancelled")
                request.on_delta = None
                self.cancel(request)

    def _forget(self, sequence: Sequence, request: Request) -> None:
        del self._owners[sequence]
        self.pace.ended()
        with self._lock:
            request.left -= 1
            if not request.left:
                self._submitted.discard(request)
        self.observer.ended(sequence)
        if not request.left:
            request.done.set()
        if sequence.error and request.on_delta is None:
            self.cancel(request)  # who follows no deltas wants all answers or none


def asleep() -> Asleep:
    """The refusal of what needs an engine that sleeps."""
    return Asleep(
        "the engine sleeps", "its memory was given back until it is woken", AGAIN
    )


def failure(fault: BaseException) -> EngineStopped:
    """A fault of the engine's thread, as its callers get it."""
    if isinstance(fault, EngineStopped):
        return fault
    reason = f"its thread failed ({type(fault).__name__}: {fault})"
    stopped = EngineStopped("the engine has stopped", reason, "load the engine again")
    stopped.__cause__ = fault
    return stopped


_running: weakref.WeakSet[EngineThread] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A thread that computes while the interpreter is taken down would crash it."""
    for thread in list(_running):
        thread.close()
