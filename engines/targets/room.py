"""Plans that the GPU of the building machine is too small for."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from kvlathe.base import devices
from kvlathe.base.errors import KvlatheError
from kvlathe.engines.backends import Built
from kvlathe.engines.targets.child import ChildFailed, run_module

MODULE = "kvlathe.runtime.native.room"
"""It asks the kernels' own host code, in a process of its own."""

log = logging.getLogger("kvlathe")


def check_gpu(plan_file: Path, built: Built, device: str | None) -> None:
    """Raise KvlatheError where an engine would run on GPUs alone, and the one of this
    machine lacks the shared memory. ``device``: of the build; on a CPU nobody knows which
    GPU it is for."""
    if devices.requested(device) == "cpu" or "cpu" in built.architectures:
        return
    try:
        said = run_module(MODULE, str(plan_file))
    except ChildFailed as error:
        log.warning("whether this GPU has room for the engine is not known: %s", error)
        return
    if said:
        fact, reason, remedy = json.loads(said)
        other = "for another GPU build with --device cpu"
        raise KvlatheError(fact, reason, f"{remedy}; {other}")
