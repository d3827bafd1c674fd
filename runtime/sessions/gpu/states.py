"""DeviceStates: what layers keep of sequences beside pages, in slots of a GPU's memory.

A step reads the slots of its sequences and writes others: a state that is there is never
written to, so a step that fails leaves all as it was. A slot is free once nobody has its
state: no sequence, no prefix. Where all are taken, those used longest ago wait on the
host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from weakref import ref

import numpy as np

from kvlathe.plan.manifest import Limits
from kvlathe.runtime.sessions.gpu.device import FLOAT, Device, DeviceArray
from kvlathe.runtime.sessions.protocols import (
    Float32,
    State,
    StateAfter,
    StepPlan,
)

ZEROS, NOBODY = 0, 1
"""The slot of sequences without tokens, which nobody writes to, and that which padding
rows write, which nobody reads."""
OWN_SLOTS = 2
"""Those two."""


def slots_of(limits: Limits) -> int:
    """Slots for sequences: of a full batch before a step and after it, and as many for
    prefixes (kvlathe/plan/memory.py)."""
    return 3 * limits.max_batch_size


class DeviceState:
    """The state of a sequence: in a slot, or, where that is None, on the host."""

    def __init__(self, slot: int | None, free: list[int]) -> None:
        self.slot = slot
        self.data: Float32 | None = None
        self._free = free

    def __del__(self) -> None:
        self.let_go()

    def let_go(self) -> None:
        """Give the slot back, if it has one."""
        if self.slot is not None:
            self._free.append(self.slot)
            self.slot = None

    def enter(self, slot: int, free: list[int]) -> None:
        """It is in a slot now, which goes back to ``free``."""
        self.slot, self.data, self._free = slot, None, free


class DeviceStates:
    """Slots for sequences. ``memory`` float32 [slots, numbers]."""

    def __init__(self, device: Device, numbers: int, sequences: int) -> None:
        """So many slots, at least twice as many as a step has sequences. Raises
        OutOfMemory where they do not fit."""
        slots = OWN_SLOTS + sequences
        size = slots * numbers * FLOAT.itemsize
        self._device = device
        self.memory = device.allocate(size, "states of sequences").view(
            0, (slots, numbers), FLOAT
        )
        for slot in (ZEROS, NOBODY):
            device.send(self._row(slot), np.zeros(numbers, FLOAT))
        self._free = list(range(slots - 1, OWN_SLOTS - 1, -1))
        self._held: dict[int, ref[DeviceState]] = {}  # the last used ones last

    def keep(
        self, step: StepPlan, before: Sequence[State | None]
    ) -> tuple[StepPlan, StateAfter]:
        """As Session.keep_states."""
        states = [state for state in before if isinstance(state, DeviceState)]
        busy = {id(state) for state in states}
        for state in states:
            if state.slot is None:
                self._bring(state, busy)
            self._used(state)
        after: list[DeviceState] = []
        for _ in before:
            state = DeviceState(self._take(busy), self._free)
            busy.add(id(state))
            self._used(state)
            after.append(state)
        slots = np.array([*_pairs(before, after)], np.int32).reshape(-1, 2)
        return dataclasses.replace(step, state_slots=slots), after.__getitem__

    def leave(self, state: State) -> None:
        """As PageMover.leave_state. Waits."""
        if isinstance(state, DeviceState) and state.slot is not None:
            state.data = self.read(state)
            state.let_go()

    def read(self, state: State) -> Float32:
        """The numbers of a state, wherever it is. Waits."""
        assert isinstance(state, DeviceState)
        if state.slot is not None:
            return self._device.fetch(self._row(state.slot))
        assert state.data is not None
        return state.data

    def made(self, data: Float32) -> DeviceState:
        """A state of these numbers, on the host."""
        state = DeviceState(None, self._free)
        state.data = data
        return state

    def _bring(self, state: DeviceState, busy: set[int]) -> None:
        slot, data = self._take(busy), state.data
        assert data is not None
        self._device.send(self._row(slot), data)
        state.enter(slot, self._free)

    def _take(self, busy: set[int]) -> int:
        """A free slot; where there is none, the state used longest ago leaves, but for
        those of the step."""
        if not self._free:
            for held in [*self._held.values()]:
                state = held()
                if state is not None and id(state) not in busy:
                    self.leave(state)
                    break
        return self._free.pop()

    def _used(self, state: DeviceState) -> None:
        assert state.slot is not None
        self._held.pop(state.slot, None)
        self._held[state.slot] = ref(state)

    def _row(self, slot: int) -> DeviceArray:
        _, numbers = self.memory.shape
        size = numbers * FLOAT.itemsize
        return self.memory.view(slot * size, (numbers,), FLOAT)


def _pairs(
    before: Sequence[State | None], after: Sequence[DeviceState]
) -> Iterator[tuple[int, int]]:
    for state, then in zip(before, after, strict=True):
        first = state.slot if isinstance(state, DeviceState) else ZEROS
        assert first is not None and then.slot is not None
        yield first, then.slot
