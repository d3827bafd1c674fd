"""States of sequences in slots of a device (docs/hybrids.md)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlathe.runtime.sessions.gpu.states import OWN_SLOTS, ZEROS, DeviceStates
from kvlathe.runtime.sessions.gpu.step_buffer import StepForm
from kvlathe.runtime.sessions.protocols import State, StepPlan
from kvlathe.runtime.sessions.torch_cuda.device import tensor_of
from tests.support.host_device import HostTorchDevice

NUMBERS, BATCH = 5, 3
Row = npt.NDArray[np.float32]


def step_of(count: int) -> StepPlan:
    """One token for each sequence."""
    ids = np.arange(count, dtype=np.int32)
    ends = np.arange(count + 1, dtype=np.int32)
    lengths, table = np.zeros((2, count, 1), np.int32)
    return StepPlan(ids, ids, ends, ids[:1], lengths, (table,), ids)


class Twins:
    """Sequences whose states are in slots, and on the host."""

    def __init__(self) -> None:
        device = HostTorchDevice()
        self.states = DeviceStates(device, NUMBERS, 3 * BATCH)
        self.memory = tensor_of(self.states.memory).numpy()
        self.held: list[tuple[State | None, Row]] = []

    def step(self, chosen: list[int], fails: bool) -> None:
        """Of some sequences; a number past the last is of a new one."""
        while len(self.held) <= max(chosen):
            self.held.append((None, np.zeros(NUMBERS, np.float32)))
        before = [self.held[i][0] for i in chosen]
        step, after = self.states.keep(step_of(len(chosen)), before)
        assert step.state_slots is not None
        sources, targets = step.state_slots.T
        assert len({*targets}) == len(targets) and not {*targets} & {*sources}
        found = self.memory[sources]
        self.memory[targets] = found * 0.5 + np.arange(1, len(chosen) + 1)[:, None]
        for place, i in enumerate(chosen):
            row = self.held[i][1]
            np.testing.assert_array_equal(found[place], row)
            if not fails:
                self.held[i] = after(place), row * np.float32(0.5) + (place + 1)


ACTIONS = st.tuples(
    st.sampled_from(["step", "step", "fails", "fork", "leave", "travel", "end"]),
    st.sets(st.integers(0, 11), min_size=1, max_size=BATCH),
)


@settings(max_examples=60)
@given(actions=st.lists(ACTIONS, min_size=8, max_size=40))
def test_steps_read_what_earlier_ones_left(
    actions: list[tuple[str, set[int]]],
) -> None:
    """More sequences than there are slots: some wait on the host."""
    twins = Twins()
    for action, places in actions:
        known = [place for place in sorted(places) if place < len(twins.held)]
        if action in ("step", "fails"):
            twins.step(sorted(places), action == "fails")
        for place in reversed(known):
            state, row = twins.held[place]
            if action == "fork":
                twins.held.append((state, row))
            elif action == "leave" and state is not None:
                twins.states.leave(state)
            elif action == "travel" and state is not None:
                twins.held[place] = twins.states.made(twins.states.read(state)), row
            elif action == "end":
                del twins.held[place]
            del state
    assert not twins.memory[ZEROS].any()
    twins.held.clear()
    assert len({*twins.states._free}) == len(twins.states._free) == 3 * BATCH


def test_padding_rows_are_told_from_sequences() -> None:
    twins = Twins()
    step, _ = twins.states.keep(step_of(2), [None, None])
    form = StepForm(4, 4, 4, (1,), keeps=True)
    arrays = form.cut(np.full(form.size, 7, np.int32))
    form.write(step, arrays)
    slots = arrays["state_slots"]
    assert slots[0].tolist() == [ZEROS] * 4 and not slots[1, 2:].any()
    assert (slots[1, :2] >= OWN_SLOTS).all()
