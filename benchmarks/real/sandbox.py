"""A program of a model runs in a process of its own: a namespace without a network,
limits on time, memory, files and processes, an empty environment, and a folder that is
deleted afterwards. It may read what its user may read.

Where the machine gives no namespace to an ordinary user, sockets are closed to Python
instead. ``network`` of the outcome says which it was.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass

MEMORY = 1 << 30
SECONDS = 10.0
GUARD = """
import ctypes, json, os, resource, sys
asked = json.load(sys.stdin)
out = os.dup(1)
null = os.open(os.devnull, os.O_RDWR)
for number in (0, 1, 2):
    os.dup2(null, number)
libc = ctypes.CDLL(None, use_errno=True)
network = "none"
if libc.unshare(0x10000000 | 0x40000000):  # CLONE_NEWUSER | CLONE_NEWNET
    network = "closed to Python"
    sys.modules["socket"] = sys.modules["_socket"] = None
libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
seconds = int(asked["seconds"]) + 1
for what, most in (
    ("RLIMIT_CPU", seconds), ("RLIMIT_AS", asked["memory"]),
    ("RLIMIT_FSIZE", 1 << 20), ("RLIMIT_NOFILE", 32),
    ("RLIMIT_NPROC", 1), ("RLIMIT_CORE", 0),
):
    resource.setrlimit(getattr(resource, what), (most, most))
os.write(out, json.dumps({"network": network}).encode() + b"\\n")
error = ""
try:
    exec(compile(asked["program"], "answer", "exec"), {"__name__": "answer"})
except BaseException as raised:
    error = f"{type(raised).__name__}: {raised}"[:300]
os.write(out, json.dumps({"said": asked["word"], "error": error}).encode() + b"\\n")
os._exit(0)
"""
"""The first thing in the process. A secret word says that the program came to its end:
one that ends the process early has not passed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """``passed``: the program ran to its end without an exception. ``error`` says why
    it did not. ``network``: none, closed to Python, or unknown."""

    passed: bool
    error: str
    network: str


def run(program: str, seconds: float = SECONDS, memory: int = MEMORY) -> Outcome:
    """Run a Python program that nobody has read."""
    word = secrets.token_hex(16)
    asked = {"program": program, "word": word, "seconds": seconds, "memory": memory}
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        late = False
        try:
            said, _ = process.communicate(json.dumps(asked).encode(), seconds)
        except subprocess.TimeoutExpired:
            late = True
            said = b""
        finally:
            _end(process)
    lines = [json.loads(line) for line in said.splitlines()]
    network = lines[0]["network"] if lines else "unknown"
    if late:
        return Outcome(False, f"ran for {seconds:g} s", network)
    if len(lines) < 2 or lines[-1].get("said") != word:
        return Outcome(False, f"ended the process ({process.returncode})", network)
    return Outcome(not lines[-1]["error"], lines[-1]["error"], network)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and whatever it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
