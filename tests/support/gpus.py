"""GPUs by their data sheets and the CUDA programming guide (technical specifications per
compute capability)."""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1 << 10
REGISTERS = 1 << 16
"""32-bit registers of a multiprocessor, on all of them."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """``capability``: as in sm_80. Shared memory in bytes: of a multiprocessor, of a
    block at most, and what the system takes of each block. ``bandwidth``: of its memory,
    bytes a second. ``clock``: boost, Hz."""

    name: str
    capability: int
    sms: int
    shared_per_sm: int
    shared_per_block: int
    shared_reserved: int
    threads_per_sm: int
    bandwidth: float
    clock: float

    @property
    def major(self) -> int:
        return self.capability // 10


H200 = Gpu("H200", 90, 132, 228 * KIB, 227 * KIB, KIB, 2048, 4.8e12, 1.98e9)
GPUS = (
    H200,
    Gpu("A100 80GB", 80, 108, 164 * KIB, 163 * KIB, KIB, 2048, 2.039e12, 1.41e9),
    Gpu("L40S", 89, 142, 100 * KIB, 99 * KIB, KIB, 1536, 0.864e12, 2.52e9),
    Gpu("B200", 100, 148, 228 * KIB, 227 * KIB, KIB, 2048, 8.0e12, 1.965e9),
    Gpu("RTX 5090", 120, 170, 100 * KIB, 99 * KIB, KIB, 1536, 1.792e12, 2.41e9),
    Gpu("Jetson Orin", 87, 16, 164 * KIB, 163 * KIB, KIB, 1536, 0.2048e12, 1.3e9),
    Gpu("T4", 75, 40, 64 * KIB, 64 * KIB, 0, 1024, 0.32e12, 1.59e9),
)
