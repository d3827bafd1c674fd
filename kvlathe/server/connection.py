"""A connection whose client must send its headers in time.

Uvicorn waits for them as long as the client likes. How long a body may take is the
gate's matter (gate.py).
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 60.0
"""Most time that a client may take to send a request's headers."""


class Connection(H11Protocol):
    """Uvicorn's HTTP/1.1. It hangs up on a client whose headers do not end within
    ``header_seconds``, counted from the end of what came before them."""

    header_seconds = HEADER_SECONDS
    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_waiting()

    def _watch(self) -> None:
        """Count the time while there is no request, whole or half answered."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif self._waiting is None:
            self._waiting = self.loop.call_later(
                self.header_seconds, self.transport.close
            )

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
