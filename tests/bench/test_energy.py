"""Joules are the sum of the visible GPUs' counters, or nothing is said."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from benchmarks.support import energy

Passed = Any
"""A value or a reference of ctypes; ``_obj`` of a reference is what it points to."""
USED = {"0": 1500, "1": 700, "GPU-b": 700}
"""Millijoules of two GPUs. The second has a UUID as well."""


class Driver:
    """NVML of two GPUs, the second maybe without a counter; handles are where a name's
    bytes lie."""

    def __init__(self, counts: bool) -> None:
        self.counts = counts
        self.names: dict[int, str] = {}

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlShutdown(self) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, count: Passed) -> int:
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, number: Passed, device: Passed) -> int:
        return self._named(str(number.value), device)

    def nvmlDeviceGetHandleByUUID(self, uuid: Passed, device: Passed) -> int:
        return self._named(uuid.value.decode(), device)

    def _named(self, name: str, device: Passed) -> int:
        device._obj.value = 1 + len(self.names)
        self.names[device._obj.value] = name
        return 0 if name in USED else 6

    def nvmlDeviceGetTotalEnergyConsumption(self, device: Passed, used: Passed) -> int:
        name = self.names[device.value]
        used._obj.value = USED[name]
        return 0 if self.counts or name == "0" else 3


@pytest.mark.parametrize(
    "shown, counts, said",
    [
        (None, True, 2.2),
        ("0", True, 1.5),
        ("1, 0", True, 2.2),
        ("GPU-b", True, 0.7),
        ("", True, None),
        ("0", False, 1.5),
        ("1", False, None),
        ("0,1", False, None),
        ("7", True, None),
    ],
)
def test_joules_are_those_of_the_visible_gpus(
    monkeypatch: pytest.MonkeyPatch, shown: str | None, counts: bool, said: float | None
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver(counts))
    if shown is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert energy.joules() == said


def test_nothing_is_said_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "LIBRARY", "libnone-such.so.1")
    assert energy.joules() is None
