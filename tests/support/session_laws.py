"""Laws that every session on a GPU holds, whatever runs its graph."""

from __future__ import annotations

import numpy as np

from kvlathe.runtime.cache.pool import PageTable
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.sessions.gpu.pages import DevicePages
from kvlathe.runtime.sessions.gpu.session import DeviceSession
from kvlathe.runtime.sessions.protocols import StepPlan


def device_session(llm: LLM) -> DeviceSession:
    """The session of an engine that runs on a GPU, or as if it did."""
    assert isinstance(llm.session, DeviceSession)
    return llm.session


def pages_move_and_come_back(session: DevicePages) -> None:
    data = bytes(
        np.random.default_rng(1).integers(0, 255, session.strides[0], np.uint8)
    )
    session.write_page(0, 3, data)
    session.copy_page(0, 3, 5)
    assert session.read_page(0, 5) == data == session.read_page(0, 3)


def next_step(llm: LLM, table: PageTable, token: int) -> StepPlan:
    """The next token of a sequence alone, committed."""
    held = list(table.lengths)
    reserved = llm.pool.reserve(table, 1)
    pages = tuple(np.array([ids or [0]], np.int32) for ids in table.pages)
    step = StepPlan(
        np.array([token], np.int32),
        np.array([sum(held)], np.int32),
        np.array([0, 1], np.int32),
        np.zeros(1, np.int32),
        np.array([held], np.int32),
        pages,
        np.zeros(1, np.int32),
    )
    llm.pool.commit(reserved)
    return step
