"""A decode step as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

from kvlathe.runtime.sessions.gpu.device import Device, DeviceArray
from kvlathe.runtime.sessions.gpu.step_buffer import StepBuffer
from kvlathe.runtime.sessions.protocols import StepPlan


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

    def run(self, step: StepPlan, input_ids: DeviceArray | None = None) -> None:
        """Queue a step. ``input_ids``: tokens on the GPU that replace the step's."""
        self.buffer.send(step, self.buffer.form)
        if input_ids is not None:
            target = self._input_ids.view(0, input_ids.shape, input_ids.dtype)
            self.device.copy(target, input_ids)
        self.replay()
