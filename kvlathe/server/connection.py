"""A connection whose client must send its headers in time, and which gives way to others
while it sends nothing.

Uvicorn waits for headers as long as the client likes. How long a body may take is the
gate's matter (gate.py).

A process has so many files. Connections that wait are closed, the oldest first, before
they take the last ones: whoever holds thousands of them stops nobody else. A request
whose body has not come waits, too. And few are taken in one turn of the event loop: each
has a file at once, and one that is closed gives its own back some turns later.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import time
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvlathe.base.console import log
from kvlathe.base.errors import KvlatheError

HEADER_SECONDS = 60.0
"""Most time that a client may take to send a request's headers."""


SILENT_SECONDS = 60.0
"""Between two lines in the log about too many connections, or about what is no HTTP."""
SETTLE_SECONDS = 0.5
"""Connections that are closed give their files back in this time."""
RESERVE = 0.25
"""Share of the files that no connection takes: engine, disk cache, those to come."""
OTHER_FILES = 32
"""Files for those at least, beside the ones that are open when a server begins. Pipes to
the children that templates run in take up to 16 (base/limited.py), and those to the
programs that read templates and try structures 6."""
OPEN_FILES = Path("/dev/fd")
LEAST_CONNECTIONS = 4
MOST_FILES = 1 << 16
BACKLOG = 2048
"""Connections that wait to be taken; uvicorn's own."""


def raise_file_limit() -> int:
    """Let the process have as many files as it may, 65,536 at most. Returns how many
    connections leave enough for all else. Raises KvlatheError where none do."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    taken = sum(1 for _ in OPEN_FILES.iterdir()) + OTHER_FILES
    if soft - taken < LEAST_CONNECTIONS:
        raise KvlatheError(
            f"this process may open {soft} files",
            f"a server needs {taken + LEAST_CONNECTIONS}",
            "let it open more (ulimit -n)",
        )
    return min(int(soft * (1 - RESERVE)), soft - taken)


def taken_at_once(connections: int) -> int:
    """How many may be taken in one turn where there may be so many ``connections``:
    several turns' together leave files for all else."""
    return max(1, min(BACKLOG, int(connections * RESERVE) // 6))


def is_out_of_files(error: object) -> bool:
    """Whether an error says that process or system may open no more files."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


def out_of_files(
    loop: asyncio.AbstractEventLoop, context: Mapping[str, object]
) -> None:
    """The event loop's handler of errors. It is asked thousands of times in a row where
    a connection finds no file: then the ones that wait make room."""
    error = context.get("exception")
    if is_out_of_files(error):
        if time.monotonic() - Connection.gave_way > SETTLE_SECONDS:
            Connection.give_way(max(1, len(Connection.every) // 8))
        return
    loop.default_exception_handler(dict(context))


class Seldom(logging.Filter):
    """Uvicorn's warning of each request that is no HTTP is said once a minute, with
    their count: whoever likes could fill the log with them."""

    def __init__(self) -> None:
        super().__init__()
        self._told, self._count = -SILENT_SECONDS, 0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.msg != "Invalid HTTP request received.":
            return True
        self._count += 1
        if record.created - self._told < SILENT_SECONDS:
            return False
        record.msg = f"requests that were no HTTP, and got 400: {self._count}"
        self._told, self._count = record.created, 0
        return True


logging.getLogger("uvicorn.error").addFilter(Seldom())


class Connection(H11Protocol):
    """Uvicorn's HTTP/1.1. It hangs up on a client whose headers do not end within
    ``header_seconds``, counted from the end of what came before them."""

    header_seconds = HEADER_SECONDS
    most: ClassVar[int] = 1 << 20
    """Connections at a time."""
    every: ClassVar[set[Connection]] = set()
    gave_way: ClassVar[float] = 0.0
    _idle: ClassVar[dict[Connection, None]] = {}
    _told: ClassVar[float] = -SILENT_SECONDS
    _waiting: asyncio.TimerHandle | None = None

    @classmethod
    def give_way(cls, count: int) -> None:
        """Close the ``count`` connections that have waited longest. It is said once a
        minute."""
        cls.gave_way = time.monotonic()
        for connection in list(cls._idle)[:count]:
            connection._stop_waiting()
            connection.transport.abort()
        if time.monotonic() - cls._told > SILENT_SECONDS:
            cls._told = time.monotonic()
            log.warning(
                "%d connections are open, and %d may be: those that wait longest are "
                "closed (ulimit -n)",
                len(cls.every),
                cls.most,
            )

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.every.add(self)
        self._watch()
        if len(self.every) > self.most:
            self.give_way(1)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.every.discard(self)
        self._stop_waiting()

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP. It may be the rest of a request that is being answered,
        or stand behind one: uvicorn answers twice then, which h11 refuses."""
        log.debug("%s", msg)
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:
            self.transport.close()

    def _should_upgrade(self) -> bool:
        """No: a request for another protocol is answered as if it had not asked."""
        return False

    def _watch(self) -> None:
        """Count the time while there is no request, whole or half answered. Of one
        that is not whole, the gate counts it."""
        answers = self.cycle is not None and not self.cycle.response_complete
        if answers:
            self._stop_waiting()
        if not answers or self.cycle.more_body:
            self._idle.setdefault(self)
        if not answers and self._waiting is None:
            self._waiting = self.loop.call_later(
                self.header_seconds, self.transport.close
            )

    def _stop_waiting(self) -> None:
        self._idle.pop(self, None)
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
