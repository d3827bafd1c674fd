"""Regular expressions out of somebody else's files, matched within a time.

Python's engine tries every way through an expression: one such as ``(a*)*b`` takes
longer than the universe is old, and no thread can be ended. So a child matches, and is
ended when it takes too long.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import weakref

SECONDS = 2.0
"""For one name. Honest expressions take microseconds."""
CHILD = """
import json, re, sys
for line in sys.stdin:
    expression, text = json.loads(line)
    try:
        answer = re.fullmatch(expression, text) is not None
    except (re.error, RecursionError, OverflowError) as error:
        answer = str(error)
    print(json.dumps(answer), flush=True)
"""


class PatternError(ValueError):
    """The text is no regular expression, or takes too long to match; says which."""


class Patterns:
    """Matches expressions in a child of its own, which ends with it.

    >>> Patterns().fullmatch(r"layers.[0-9]+.q", "layers.12.q")
    True
    """

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None

    def fullmatch(self, expression: str, text: str) -> bool:
        """Whether all of ``text`` matches. Raises PatternError."""
        child = self._started()
        assert child.stdin is not None and child.stdout is not None
        print(json.dumps([expression, text]), file=child.stdin, flush=True)
        if not select.select([child.stdout], [], [], SECONDS)[0]:
            self.close()
            raise PatternError(f"it takes more than {SECONDS:g} s to match")
        answer = json.loads(child.stdout.readline() or '"it ends the process"')
        if isinstance(answer, str):
            raise PatternError(answer)
        return bool(answer)

    def close(self) -> None:
        """End the child, whatever it does."""
        if self._child is not None:
            _end(self._child)
            self._child = None

    def _started(self) -> subprocess.Popen[str]:
        if self._child is None or self._child.poll() is not None:
            pipe = subprocess.PIPE
            command = [sys.executable, "-I", "-S", "-c", CHILD]
            self._child = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
            weakref.finalize(self, _end, self._child)
        return self._child


def _end(child: subprocess.Popen[str]) -> None:
    child.kill()
    with child:
        pass
