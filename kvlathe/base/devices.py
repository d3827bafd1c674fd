"""Words of --device and KVLATHE_DEVICE, and the share of a GPU that is used.

The device that a word means depends on what runs there: runtime/sessions/registry.py
decides for engines, export/model/device.py for the original model.
"""

from __future__ import annotations

import os

from kvlathe.base.errors import KvlatheError

DEVICES = ("auto", "cpu", "cuda")
VARIABLE = "KVLATHE_DEVICE"
GPU_MEMORY_UTILIZATION = 0.9
"""Share of a GPU's memory that an engine or a build takes, whatever others hold, unless
asked otherwise."""


def requested(device: str | None) -> str:
    """``device``, one of DEVICES; None: what KVLATHE_DEVICE says, or else auto. Raises
    KvlatheError for another word."""
    wanted = device or os.environ.get(VARIABLE) or "auto"
    if wanted not in DEVICES:
        raise KvlatheError(
            f"there is no device {wanted!r}", "", f"choose one of {', '.join(DEVICES)}"
        )
    return wanted
