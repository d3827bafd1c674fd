"""CompactingSession: a session of a plan whose prefixes can be compacted. It says what the
rows that repeat a prefix attend, and moves the KV pairs that stay
(runtime/requests/compaction.py)."""

from __future__ import annotations

from kvlathe.runtime.sessions.gpu.device import FLOAT
from kvlathe.runtime.sessions.gpu.step_buffer import kind_of
from kvlathe.runtime.sessions.protocols import Float32, StepPlan
from kvlathe.runtime.sessions.steps import check_step
from kvlathe.runtime.sessions.torch_cuda.device import tensor_of
from kvlathe.runtime.sessions.torch_cuda.tokens.evicting import EvictingSession


class CompactingSession(EvictingSession):
    """Moves tokens as an EvictingSession does; its pages hold no scores."""

    def run(self, step: StepPlan) -> Float32:
        """As Session.run. A step that is observed is never a graph."""
        given = step.observed_attention
        if given is None:
            return super().run(step)
        check_step(step, self.limits)
        room = self.device.allocate(given.nbytes, "what a step attends")
        mass = room.view(0, given.shape, FLOAT)
        tensor_of(mass).zero_()
        kind = kind_of(step, self.widths)
        logits = self.launch_alone(step, kind, True, {"mass": mass})
        given[:] = self.device.fetch(mass)
        return self.device.fetch(logits)
