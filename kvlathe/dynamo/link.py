"""Link: NIXL between the pools of two workers. A pool is registered once; a transfer is
a list of addresses in both, which the reader carries out."""

from __future__ import annotations

import asyncio
import base64
import importlib
import time
from collections.abc import Sequence
from types import ModuleType

import numpy as np

from kvlathe.base.errors import KvlatheError
from kvlathe.dynamo.handoff import Handoff
from kvlathe.runtime.cache.parcel import damaged
from kvlathe.runtime.requests.held_pages import Piece
from kvlathe.runtime.sessions.protocols import Region

MODULES = ("nixl._api", "nixl_cu12._api", "nixl_cu13._api")
SOON, POLL_SECONDS, LATE_POLL_SECONDS = 5.0, 0.0005, 0.05
"""Seconds in which a transfer is asked for often; between two questions then, and
later."""
KINDS = {"cpu": "DRAM", "cuda": "VRAM"}
"""NIXL's names of memory."""


class Link:
    """NIXL agent of one worker. ``metadata``: bytes that a peer needs to reach it."""

    def __init__(self, name: str, region: Region) -> None:
        library = _library()
        self.name = name
        self.region = region
        self._agent = library.nixl_agent(
            name, library.nixl_agent_config(backends=["UCX"])
        )
        self._kind, self._device = _place(region.device)
        memory = [(region.address, region.size, self._device, "")]
        self._agent.register_memory(memory, self._kind)
        blob = self._agent.get_agent_metadata()  # only now: it lists the memory
        self.metadata = base64.b64encode(blob).decode()
        self._peers: dict[str, str] = {}
        self.bytes_read = 0

    async def read(self, source: Handoff, pieces: Sequence[Piece]) -> None:
        """Fill this pool's ``pieces`` from the pool of ``source``, and tell its worker.
        Ends when nothing is written to them any more, however long that takes: NIXL
        cannot be made to stop. Raises KvlatheError where the pool cannot be reached."""
        try:
            self._meet(source)
            if pieces:
                await self._read(source, pieces)
            self.release(source)
        except KvlatheError:
            raise
        except Exception as error:  # NIXL's own kinds, one for each status
            raise failure(source, f"{type(error).__name__}: {error}") from error

    def release(self, source: Handoff) -> None:
        """Tell the worker of ``source`` that its pages are not needed any more."""
        self._meet(source)
        self._agent.send_notif(source.agent, source.name.encode())

    def released(self) -> list[str]:
        """Names of departures that were read since the last call."""
        found: list[str] = []
        for messages in self._agent.get_new_notifs().values():
            found += [message.decode() for message in messages]
        return found

    def _meet(self, source: Handoff) -> None:
        if self._peers.get(source.agent) != source.metadata:
            self._agent.add_remote_agent(base64.b64decode(source.metadata))
            self._peers[source.agent] = source.metadata

    async def _read(self, source: Handoff, pieces: Sequence[Piece]) -> None:
        agent = self._agent
        kind, device = _place(source.device)
        here = [(piece.target, piece.size) for piece in pieces]
        there = [(piece.source, piece.size) for piece in pieces]
        own = agent.get_xfer_descs(_rows(here, self._device), self._kind)
        theirs = agent.get_xfer_descs(_rows(there, device), kind)
        handle = agent.initialize_xfer("READ", own, theirs, source.agent)
        until = time.monotonic() + SOON
        try:
            state = agent.transfer(handle)
            while state == "PROC":
                is_late = time.monotonic() > until
                await asyncio.sleep(LATE_POLL_SECONDS if is_late else POLL_SECONDS)
                state = agent.check_xfer_state(handle)
        finally:
            agent.release_xfer_handle(handle)
        if state != "DONE":
            raise failure(source, f"NIXL says {state}")
        self.bytes_read += sum(piece.size for piece in pieces)


def _place(device: str) -> tuple[str, int]:
    """NIXL's kind and number of a Region's device."""
    name, _, number = device.partition(":")
    try:
        return KINDS[name], int(number or 0)
    except (KeyError, ValueError):
        raise damaged(f"its handoff names the device {device!r}") from None


def _rows(pieces: Sequence[tuple[int, int]], device: int) -> np.ndarray:
    """Address, bytes and device of each piece, as NIXL takes them."""
    rows = np.full((len(pieces), 3), device, np.uint64)
    rows[:, :2] = pieces
    return rows


def _library() -> ModuleType:
    reasons: list[ImportError] = []
    for name in MODULES:
        try:
            return importlib.import_module(name)
        except ImportError as error:  # of a package for another CUDA, too
            reasons.append(error)
    said = "; ".join(map(str, reasons))
    raise KvlatheError(
        "pages cannot travel between workers",
        f"nixl cannot be imported: {said}",
        "run scripts/dynamo_env.sh (docs/dynamo.md)",
    ) from reasons[-1]


def failure(source: Handoff, reason: str) -> KvlatheError:
    """The error for pages that could not be had."""
    return KvlatheError(
        f"pages of {source.agent} did not arrive", reason, "compute them here"
    )
