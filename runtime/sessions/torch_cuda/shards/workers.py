"""Workers: the processes that follow the leader of tensor parallelism, as it sees them.

The leader's process schedules, and tells every follower what it does itself. What it
tells goes through a pair of sockets, and no port is opened. A follower ends when its
socket does, so none outlives the leader, however that ends.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection

from kvlathe.base.errors import DeviceLost
from kvlathe.base.memory import LESS_MEMORY, out_of_memory
from kvlathe.base.package import FOLDER

SAID, FAILED = "said", "failed"
END_SECONDS = 10.0
"""For which a follower may take to end before it is killed."""
NEWS_SECONDS = 2.0
"""Until the end of a process is known whose peers have noticed it."""
LOOK_SECONDS = 0.1


class Follower:
    """The worker of ``shard``, a process that obeys. ``tell`` it, then ``answer`` where
    it was to say something."""

    def __init__(
        self, shard: int, command: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        """``command``: a process that follows the socket that its last argument
        numbers."""
        self.shard = shard
        self.ended = threading.Event()
        self.closing = False
        self._failure = ""
        self._answers: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._socket, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            self.process = subprocess.Popen(
                [*command, str(number)],
                env=environment,
                pass_fds=[number],
                start_new_session=True,  # an interrupt is for the leader
            )
        self._connection = Connection(os.dup(self._socket.fileno()))

    def listen(self, ended: Callable[[], None]) -> None:
        """From now on, in a thread: take what it says. ``ended``: called where it ends
        and nobody asked it to."""
        thread = threading.Thread(
            target=self._listen, args=(ended,), name="kvlathe-worker", daemon=True
        )
        thread.start()

    def _listen(self, ended: Callable[[], None]) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                kind, value = self._connection.recv()
                if kind == FAILED:
                    self._failure = str(value)
                else:
                    self._answers.put(value)
        self.process.wait()
        self.ended.set()
        if not self.closing:
            ended()

    def tell(self, name: str, arguments: Sequence[object], answers: bool) -> None:
        """Have it call ``name``; it says what that gives where it ``answers``."""
        with contextlib.suppress(OSError):  # whoever has ended is known soon
            self._connection.send((name, tuple(arguments), answers))

    def answer(self) -> object:
        """What it says next; None once it has ended."""
        while True:
            with contextlib.suppress(queue.Empty):
                return self._answers.get(timeout=LOOK_SECONDS)
            if self.ended.is_set():
                return None

    @property
    def words(self) -> str:
        """Why it has ended."""
        if self._failure:
            return self._failure
        status = self.process.returncode
        if status is not None and status < 0:
            return f"its process was ended by {signal.Signals(-status).name}"
        return f"its process ended with status {status}"

    def close(self) -> None:
        """End it."""
        self.closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Workers:
    """The followers of a leader, which is worker 0 of ``size``."""

    def __init__(
        self, command: Sequence[str], environments: Sequence[Mapping[str, str]]
    ) -> None:
        """One follower for each environment."""
        self.size = len(environments) + 1
        self._watchers: list[Callable[[], None]] = []
        self.followers: list[Follower] = []
        # No thread holds this object: it ends its processes when it goes.
        self._finalizer = weakref.finalize(self, _close, self.followers)
        for shard, own in enumerate(environments, 1):
            numbered = [*command, str(shard), str(self.size)]
            self.followers.append(Follower(shard, numbered, own))
        for follower in self.followers:
            follower.listen(partial(_call_all, self._watchers))

    def watch(self, tell: Callable[[], None]) -> None:
        """``tell`` is called, in a thread of its own, once a worker has died."""
        self._watchers.append(tell)
        if any(follower.ended.is_set() for follower in self.followers):
            tell()

    def tell(self, name: str, *arguments: object, answers: bool = False) -> None:
        """Have every follower call ``name``. Raises DeviceLost where one is missing."""
        self.check()
        for follower in self.followers:
            follower.tell(name, arguments, answers)

    def answers(self) -> list[object]:
        """What each follower says next. Raises DeviceLost where one is missing."""
        found = [follower.answer() for follower in self.followers]
        self.check()
        return found

    def check(self) -> None:
        """Raises DeviceLost where a follower has ended."""
        for follower in self.followers:
            if follower.ended.is_set():
                raise DeviceLost(
                    f"worker {follower.shard} of {self.size} has ended",
                    follower.words,
                    "mend that, and start again",
                )

    def failure(self, error: Exception) -> DeviceLost:
        """What a call of all workers has come to that failed here: who has died, or that
        this worker no longer keeps step with the others."""
        until = time.monotonic() + NEWS_SECONDS
        while time.monotonic() < until:
            try:
                self.check()
            except DeviceLost as lost:
                return lost
            time.sleep(LOOK_SECONDS / 10)
        remedy = LESS_MEMORY if out_of_memory(error) else "mend that"
        reason = str(error).partition("\n")[0] or type(error).__name__
        fact = f"worker 0 of {self.size} has failed, and the others wait for it"
        return DeviceLost(fact, reason, f"{remedy}, and start again")

    def close(self) -> None:
        """End all followers."""
        self._finalizer()


def _close(followers: Sequence[Follower]) -> None:
    for follower in followers:
        follower.closing = True
    for follower in followers:
        follower.close()


def _call_all(watchers: Sequence[Callable[[], None]]) -> None:
    for tell in list(watchers):
        tell()


def module_command(module: str) -> list[str]:
    """A process of ``module``."""
    return [sys.executable, "-m", module]


def environment(**more: str) -> dict[str, str]:
    """This process's, where kvlathe is found, too; ``more`` goes before it."""
    home = str(FOLDER.parent)
    path = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **more}
