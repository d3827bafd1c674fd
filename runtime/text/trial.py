"""A program that compiles structures on trial, each in a process of its own: what takes
too long or too much memory ends that one and no other. ``trials.py`` starts it.

Standard input has lines of JSON: first what is the same for all, then a grammar a line.
Standard output answers each: why it cannot be compiled, empty where it can; or with
what code its process ended.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from llguidance import LLParserLimits, LLTokenizer

PAGES = Path("/proc/self/statm")


class Bounds(NamedTuple):
    """Seconds of a processor; bytes of memory and of stack."""

    seconds: float
    memory: int
    stack: int


def main() -> None:
    """Answer until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who asks ends this
    setup = json.loads(sys.stdin.readline())
    sys.path[:] = setup["path"]
    from llguidance import LLParserLimits, LLTokenizer

    vocabulary = LLTokenizer(
        setup["tokenizer"], n_vocab=setup["vocabulary"], eos_token=setup["ends"]
    )
    limits = LLParserLimits(**setup["limits"])
    say("")
    for line in sys.stdin:
        child = os.fork()  # it has the vocabulary
        if not child:
            bounds = Bounds(setup["seconds"], setup["bytes"], setup["stack"])
            alone(bounds, partial(try_compile, vocabulary, json.loads(line), limits))
        _, status = os.waitpid(child, 0)
        if code := os.waitstatus_to_exitcode(status):
            say(code)


def alone(bounds: Bounds, work: Callable[[list[str]], None]) -> None:
    """Try one structure within its bounds, and end the process."""
    bound_memory(bounds.memory + bounds.stack)
    signal.setitimer(signal.ITIMER_PROF, bounds.seconds)
    threading.stack_size(bounds.stack)
    found: list[str] = []
    thread = threading.Thread(target=work, args=(found,))
    thread.start()
    thread.join()
    if found:
        say(found[0])
    os._exit(0 if found else 1)


def try_compile(
    vocabulary: LLTokenizer, source: str, limits: LLParserLimits, found: list[str]
) -> None:
    """Find why it cannot be compiled. An answer's first mask belongs to it."""
    from llguidance import LLMatcher

    made = LLMatcher(vocabulary, source, log_level=0, limits=limits)
    if not made.is_error():
        made.compute_bitmask()
    found.append(made.get_error())


def bound_memory(more: int) -> None:
    """Take so many bytes more at most."""
    if not PAGES.exists():  # no Linux
        return
    most = int(PAGES.read_text("ascii").split()[0]) * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def say(found: str | int) -> None:
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
