"""The energy that GPUs have used, by the counters of NVIDIA's driver library (NVML).

The visible GPUs are those of ``CUDA_VISIBLE_DEVICES``, by number or by UUID, or all.
"""

from __future__ import annotations

import ctypes
import os

LIBRARY = "libnvidia-ml.so.1"


def joules() -> float | None:
    """Joules that the visible GPUs have used since their driver was loaded, together.
    None where NVML or a counter is missing. The difference of two calls is what was
    used between them; a counter moves about ten times a second."""
    try:
        nvml = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    if nvml.nvmlInit_v2():
        return None
    try:
        used = [millijoules(nvml, name) for name in visible(nvml)]
    finally:
        nvml.nvmlShutdown()
    known = [value for value in used if value is not None]
    return sum(known) / 1000 if known and len(known) == len(used) else None


def visible(nvml: ctypes.CDLL) -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    count = ctypes.c_uint()
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    return [str(number) for number in range(count.value)]


def millijoules(nvml: ctypes.CDLL, name: str) -> int | None:
    """The counter of the GPU of that number or UUID."""
    device, used = ctypes.c_void_p(), ctypes.c_ulonglong()
    if name.isdecimal():
        number = ctypes.c_uint(int(name))
        failed = nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(device))
    else:
        uuid = ctypes.c_char_p(name.encode())
        failed = nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(device))
    if failed or nvml.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(used)):
        return None
    return used.value
