"""Run one of our modules in a child process: its memory goes when it ends, and a crash
inside a library stays there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping

from kvlathe.base.package import FOLDER


class ChildFailed(Exception):
    """The child's last words: its last line on stderr, or the signal that ended it."""


def run_module(
    module: str, argument: str, environment: Mapping[str, str] | None = None
) -> str:
    """stdout of ``python -m module argument``. Raises ChildFailed if it exits with
    anything but 0."""
    home = FOLDER.parent
    path = os.pathsep.join(filter(None, [str(home), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-P", "-m", module, argument],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **(environment or {})},
    )
    if done.returncode < 0:
        raise ChildFailed(
            f"its process was ended by {signal.Signals(-done.returncode).name}"
        )
    if done.returncode > 0:
        raise ChildFailed(
            (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        )
    return done.stdout
