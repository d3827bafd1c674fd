"""Programs out of somebody else's files, run within time and memory.

Chat templates and expressions of adapters are programs: ``9**(9**9)`` and ``(a*)*b`` do
not end in our time, and Python can end no thread. So a child computes, and is ended when
it takes too long or too much. One that its parent has lost ends itself.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import weakref

from kvlathe.base.package import FOLDER

MEMORY_BYTES = 1 << 30
"""Address space of the child."""
READ_AT_ONCE = 1 << 16
MOST_WORDS = 1000
"""Characters of an error that are said: it may hold all that a template wrote."""


class LimitError(ValueError):
    """The words of what the function raised, or of the limit that it passed."""


PATIENCE_SECONDS = 0.05
"""A call waits so long for a child that another call has, and then gets its own."""
MOST_IDLE = 2
"""Children that are kept for later calls."""
MOST_CHILDREN = 8
"""Children of one function at a time. Further calls wait."""
Child = subprocess.Popen[bytes]


class Limited:
    """``function`` of ``module``, called in a child of its own: it takes and returns
    what JSON can hold, in at most ``seconds``. Calls of several threads share children
    where they are short; one that takes long holds up no other.

    >>> Limited("math", "sqrt", seconds=10)(9.0)
    3.0
    """

    def __init__(self, module: str, function: str, seconds: float) -> None:
        self.seconds = seconds
        self._target = module, function
        self._free = threading.Condition()
        self._idle: list[Child] = []
        self._children = 0  # with those that compute
        self._closed = False
        weakref.finalize(self, _end_all, self._idle)

    def __call__(self, *arguments: object) -> object:
        """Raises LimitError for whatever the function raises, and beyond the limits."""
        asked = json.dumps(arguments).encode() + b"\n"
        child = self._taken()
        line = b""
        try:
            line = self._asked(child, asked)
        finally:
            self._give_back(child, line.endswith(b"\n"))
        if not line:
            raise LimitError("it ended its process: it takes too much memory or time")
        if not line.endswith(b"\n"):
            raise LimitError(f"it takes more than {self.seconds:g} s")
        answer = json.loads(line)
        if "error" in answer:
            raise LimitError(answer["error"])
        return answer["answer"]

    def close(self) -> None:
        """End the children that wait for calls, and others once their calls end."""
        with self._free:
            self._closed = True
            self._children -= len(self._idle)
            _end_all(self._idle)

    def _taken(self) -> Child:
        """A child that waits, or a new one."""
        with self._free:
            self._free.wait_for(
                lambda: self._idle or not self._children, PATIENCE_SECONDS
            )
            self._free.wait_for(lambda: self._idle or self._children < MOST_CHILDREN)
            while self._idle:
                child = self._idle.pop()
                if child.poll() is None:
                    return child
                self._children -= 1
                _end(child)
            self._children += 1
        try:
            return self._started()
        except BaseException:
            with self._free:
                self._children -= 1
                self._free.notify_all()
            raise

    def _give_back(self, child: Child, sound: bool) -> None:
        with self._free:
            kept = sound and not self._closed and len(self._idle) < MOST_IDLE
            if kept:
                self._idle.append(child)
            else:
                self._children -= 1
            self._free.notify_all()
        if not kept:
            _end(child)

    def _asked(self, child: Child, asked: bytes) -> bytes:
        """A child's answer, as ``_line`` has it."""
        assert child.stdin is not None and child.stdout is not None
        try:
            child.stdin.write(asked)
            child.stdin.flush()
            return self._line(child.stdout.fileno())
        except BrokenPipeError:
            return b""

    def _line(self, file: int) -> bytes:
        """The child's answer; without its end where it takes too long, empty where the
        child has ended."""
        pieces: list[bytes] = []
        end = time.monotonic() + self.seconds
        while not (pieces and pieces[-1].endswith(b"\n")):
            left = end - time.monotonic()
            # Not select.select: a server has more files than that takes.
            ready = select.poll()
            ready.register(file, select.POLLIN | select.POLLHUP)
            if left <= 0 or not ready.poll(1000 * left):
                return b"".join(pieces) + b"..."
            piece = os.read(file, READ_AT_ONCE)
            if not piece:
                return b""
            pieces.append(piece)
        return b"".join(pieces)

    def _started(self) -> Child:
        path = os.pathsep.join(
            filter(None, [str(FOLDER.parent), os.environ.get("PYTHONPATH")])
        )
        return subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, *self._target, f"{self.seconds}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )


def _end(child: Child) -> None:
    child.kill()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # what it did not read
                pipe.close()
    child.wait()


def _end_all(children: list[Child]) -> None:
    while children:
        _end(children.pop())


def answer_lines(module: str, function: str, seconds: float) -> None:
    """The child: answer one line of arguments after the other. The alarm ends it where
    nobody else does."""
    called = getattr(importlib.import_module(module), function)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the parent's
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        signal.alarm(int(2 * seconds) + 1)
        try:
            said = json.dumps({"answer": called(*json.loads(line))})
        except Exception as error:  # it is a program, and may raise anything
            words = str(error)[:MOST_WORDS] or type(error).__name__
            said = json.dumps({"error": words})
        signal.alarm(0)
        print(said, file=answers, flush=True)


if __name__ == "__main__":
    answer_lines(sys.argv[1], sys.argv[2], float(sys.argv[3]))
