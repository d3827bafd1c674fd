"""Python's garbage collector, which rests while something is made that it would end."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager
from threading import Lock


class Rest:
    """A rest of the collector. Any number of threads may ask for it at once: it ends with
    the last of them, and only where the collector was on before the first."""

    def __init__(self) -> None:
        self._lock, self._askers, self._collects = Lock(), 0, False

    @contextmanager
    def asked(self) -> Generator[None]:
        """Context in which the collector rests.

        >>> with Rest().asked():
        ...     gc.isenabled()
        False
        """
        with self._lock:
            if not self._askers:
                self._collects = gc.isenabled()
                gc.disable()
            self._askers += 1
        try:
            yield
        finally:
            with self._lock:
                self._askers -= 1
                if self._collects and not self._askers:
                    gc.enable()


nothing_collected = Rest().asked
"""Context in which the collector of this process rests, whoever else asks for that."""
