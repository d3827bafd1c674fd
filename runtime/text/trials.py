"""Structures are compiled on trial first, in processes that may be ended.

What compiles them cannot be bounded from inside: a few hundred characters can keep it
busy for hours, and a thread cannot be ended. What has compiled there within its limits
is compiled again where it is used: its automata cannot cross processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from kvlathe.runtime.text.compile_queue import stopped

PROGRAM = Path(__file__).with_name("trial.py")
QUICK, SLOW = 0.25, 2.0
"""Seconds of a processor that compiling one structure may take. Most take milliseconds.
What takes longer than the first is tried again where only such ones wait for it."""
BYTES = 256 << 20
"""Most memory that compiling one may take, beside the stack. Few take 30 MB."""
STACK = 256 << 20
"""Bytes of stack to compile on: rules that name each other are followed recursively."""
TOO_SLOW = f"compiling it takes more than {SLOW:g} s of a processor"
TOO_LARGE = f"compiling it takes more than {BYTES >> 20} MiB of memory"


class Trials:
    """One program for one vocabulary. ``setup``: tokenizer (as JSON text), vocabulary,
    ends and limits, as llguidance takes them. ``seconds``: of a processor, for each
    structure. One caller at a time, but for ``close``."""

    def __init__(self, setup: Mapping[str, object], seconds: float) -> None:
        own: dict[str, object] = {"seconds": seconds, "stack": STACK}
        own["bytes"] = BYTES
        own["path"] = sys.path
        self._setup = json.dumps({**setup, **own})
        self._closed = False
        self._start()

    def reason(self, source: str) -> str:
        """Why a grammar of llguidance cannot be compiled; empty where it can. Where the
        program was ended from outside, another tries it once more. Raises EngineStopped
        after ``close``, and RuntimeError where that one ends as well."""
        try:
            return self._reason(source)
        except RuntimeError:
            return self._reason(source)

    def _reason(self, source: str) -> str:
        self._check_open()
        if not self._ready:
            self._ready = self._answer() == ""
        self._write(json.dumps(source))
        found = self._answer()
        if isinstance(found, str):
            return found
        return TOO_SLOW if found == -signal.SIGPROF else TOO_LARGE

    def close(self) -> None:
        """End the program, and with it what it is at."""
        self._closed = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _start(self) -> None:
        """Start the process. It makes itself ready while this one goes on."""
        self._ready = False
        self._process = subprocess.Popen(
            [sys.executable or "python3", "-P", str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            process_group=0,
        )
        self._write(self._setup)

    def _write(self, line: str) -> None:
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # nothing will be read, then
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()

    def _answer(self) -> str | int:
        """The program's next line. Where it has ended, the next structure starts it
        anew."""
        assert self._process.stdout
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        code = self._process.wait()
        self._check_open()
        self._start()
        raise RuntimeError(f"{PROGRAM} ended with {code}")

    def _check_open(self) -> None:
        if self._closed:
            raise stopped()
