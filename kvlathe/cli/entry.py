"""The program ``kvlathe``. Its modules take a second to load: Ctrl-C then ends it without
a word, and later as its commands say."""

from __future__ import annotations

import signal
from typing import NoReturn


def main() -> NoReturn:
    """Run ``kvlathe`` with the arguments of the process, and exit."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # else it is ignored, as under nohup
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from kvlathe.cli.main import main as run

    signal.signal(signal.SIGINT, handler)
    run()
