"""A decode step as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

from kvlathe.runtime.sessions.gpu.device import Device, DeviceArray
from kvlathe.runtime.sessions.gpu.step_buffer import StepBuffer
from kvlathe.runtime.sessions.protocols import StepPlan

Complete = Callable[[StepPlan, DeviceArray], None]
"""Writes the input ids of a step, on the GPU, that the host does not know."""


class DecodeGraph:
    """A decode step of fixed sizes, captured. Its padding rows write nothing."""

    def __init__(
        self, device: Device, buffer: StepBuffer, work: Callable[[], None]
    ) -> None:
        """``work`` queues the step whose integers are in ``buffer``."""
        self.device, self.buffer = device, buffer
        self._input_ids = buffer.bindings(buffer.form)["input_ids"]
        buffer.clear()
        for _ in range(2):  # what runs the model takes its memory outside the capture
            work()
        device.wait()
        self.replay = device.capture(work)
        """Queues the step that was sent last."""

    def run(self, step: StepPlan, complete: Complete) -> None:
        """Queue a step."""
        self.buffer.send(step, self.buffer.form)
        complete(step, self._input_ids)
        self.replay()
