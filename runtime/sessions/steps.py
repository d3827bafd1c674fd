"""The steps that an engine takes."""

from __future__ import annotations

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.manifest import Limits
from kvlathe.runtime.sessions.protocols import StepPlan


def check_step(step: StepPlan, limits: Limits) -> None:
    """Raises KvlatheError for a step beyond the limits that an engine was built
    with."""
    for count, limit, what in (
        (len(step.input_ids), limits.max_num_tokens, "max-num-tokens"),
        (len(step.cu_seqlens_q) - 1, limits.max_batch_size, "max-batch-size"),
    ):
        if count > limit:
            raise KvlatheError(
                f"a step of {count} exceeds this engine",
                f"its --{what} is {limit}",
                f"build with a larger --{what}",
            )
