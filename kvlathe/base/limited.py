"""Programs out of somebody else's files, run within time and memory.

Chat templates and expressions of adapters are programs: ``9**(9**9)`` and ``(a*)*b`` do
not end in our time, and Python can end no thread. So a child computes, and is ended when
it takes too long or too much. One that its parent has lost ends itself.
"""

from __future__ import annotations

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


class LimitError(ValueError):
    """The words of what the function raised, or of the limit that it passed."""


class Limited:
    """``function`` of ``module``, called in a child of its own: it takes and returns
    what JSON can hold, in at most ``seconds``. Threads take turns.

    >>> Limited("math", "sqrt", seconds=10)(9.0)
    3.0
    """

    def __init__(self, module: str, function: str, seconds: float) -> None:
        self.seconds = seconds
        self._target = module, function
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def __call__(self, *arguments: object) -> object:
        """Raises LimitError for whatever the function raises, and beyond the limits."""
        asked = json.dumps(arguments).encode() + b"\n"
        with self._lock:
            child = self._started()
            assert child.stdin is not None and child.stdout is not None
            try:
                child.stdin.write(asked)
                child.stdin.flush()
                line = self._line(child.stdout.fileno())
            except BrokenPipeError:
                line = b""
            if not line.endswith(b"\n"):
                self._end()
        if not line:
            raise LimitError("it ended its process: it takes too much memory or time")
        if not line.endswith(b"\n"):
            raise LimitError(f"it takes more than {self.seconds:g} s")
        answer = json.loads(line)
        if "error" in answer:
            raise LimitError(answer["error"])
        return answer["answer"]

    def close(self) -> None:
        """End the child."""
        with self._lock:
            self._end()

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

    def _started(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._child.poll() is not None:
            self._end()
            path = os.pathsep.join(
                filter(None, [str(FOLDER.parent), os.environ.get("PYTHONPATH")])
            )
            self._child = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    __name__,
                    *self._target,
                    f"{self.seconds}",
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": path},
            )
            weakref.finalize(self, _killed, self._child)
        return self._child

    def _end(self) -> None:
        if self._child is not None:
            _killed(self._child)
            self._child = None


def _killed(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()
    child.wait()


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
            said = {"answer": called(*json.loads(line))}
        except Exception as error:  # it is a program, and may raise anything
            said = {"error": str(error) or type(error).__name__}
        signal.alarm(0)
        print(json.dumps(said), file=answers, flush=True)


if __name__ == "__main__":
    answer_lines(sys.argv[1], sys.argv[2], float(sys.argv[3]))
