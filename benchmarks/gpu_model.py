"""A model of decode attention's time on GPUs that were not there, beside what an H200
measured.

    python -m benchmarks.gpu_model

    time = fixed + max(bytes / read rate, instructions / issue rate)

Bytes, and the H200's times, are those of one run (MEASURED). The rest was fitted to the
run before it, but for the instructions of a page of 2 bit and the issue
rate, which a profile counted. So its errors are those of a fit. How many warps fit a GPU
is what the host's own code says; the issue rate falls with them. It is a model: nothing
of it was run but the H200's rows.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.native_cpu.test_launches import launch, problems
from tests.support.emulated import emulated_kernels
from tests.support.gpus import GPUS, H200, Gpu

MEASURED_RATE = 4.58e12
"""Bytes a second that plain reads get on the H200: 95 % of its data sheet's."""
REACHED = {16: 0.96, 8: 0.88, 4: 0.88, 2: 0.88}
"""Share of that rate which large calls reach where bytes bound them."""
FIXED = {16: 12e-6, 8: 17e-6, 4: 17e-6, 2: 17e-6}
"""Seconds of a call before and after its bytes, on the H200. They are latencies."""
INSTRUCTIONS = {4: 705, 2: 600}
"""Instructions of a warp for a page of 64 tokens of one head. Calls of 16 and 8 bit
wait for bytes."""
ISSUED = 2.32
"""Instructions a cycle and multiprocessor, with the warps that an H200 holds."""
KV_HEADS, PAGE_TOKENS = 8, 64
NAMES = ("H200", "A100 80GB", "L40S", "B200", "RTX 5090", "Jetson Orin")


@dataclass(frozen=True)
class Row:
    """One call as it was measured. ``size``: bytes; ``seconds``: on the H200."""

    sequences: int
    tokens: int
    bits: int
    size: float
    seconds: float

    @property
    def pages(self) -> int:
        return self.sequences * self.tokens // PAGE_TOKENS * KV_HEADS


MEASURED = (
    Row(16, 32768, 16, 859_000_000, 0.0002045),
    Row(16, 32768, 8, 466_000_000, 0.0001311),
    Row(16, 32768, 4, 251_000_000, 9.18e-05),
    Row(16, 32768, 2, 144_000_000, 7.89e-05),
    Row(64, 16384, 16, 1_718_000_000, 0.0003937),
    Row(64, 16384, 8, 934_000_000, 0.0002452),
    Row(64, 16384, 4, 504_000_000, 0.0001559),
    Row(64, 16384, 2, 289_000_000, 0.0001432),
    Row(16, 4096, 16, 107_000_000, 3.31e-05),
    Row(16, 4096, 8, 59_000_000, 2.74e-05),
    Row(16, 4096, 4, 32_000_000, 2.78e-05),
    Row(16, 4096, 2, 19_000_000, 2.69e-05),
    Row(1, 32768, 16, 54_000_000, 2.29e-05),
    Row(1, 32768, 8, 29_000_000, 2.11e-05),
    Row(1, 32768, 4, 16_000_000, 2.12e-05),
    Row(1, 32768, 2, 9_000_000, 1.99e-05),
)
"""Mixed ranks on an H200, with kernels that spilled numbers (docs/history)."""


def expected(row: Row, gpu: Gpu, warps: float = 1.0) -> float:
    """Seconds. ``warps``: of a multiprocessor, of those that an H200 holds there."""
    rate = gpu.bandwidth * MEASURED_RATE / H200.bandwidth
    reading = row.size / (rate * REACHED[row.bits])
    issue_rate = gpu.sms * gpu.clock * ISSUED * min(1.0, warps)
    computing = row.pages * INSTRUCTIONS.get(row.bits, 0) / issue_rate
    fixed = FIXED[row.bits] * H200.clock / gpu.clock
    return fixed + max(reading, computing)


def shares_of(host: ctypes.CDLL, gpu: Gpu) -> dict[int, float]:
    """By bits: warps of a multiprocessor, of those that an H200 holds there, at ranks of
    16 to 96 and 4 query heads a KV head; 0: a tile is too large for the GPU."""
    shares: dict[int, float] = {}
    for (bits, ranks, group, page), problem in problems().items():
        if (ranks, group, page) == ("mixed", 4, PAGE_TOKENS):
            here, there = (launch(host, x, problem.args()) for x in (gpu, H200))
            assert there is not None
            most = there[0] // H200.sms * there[1]
            shares[bits] = here[0] // gpu.sms * here[1] / most if here else 0.0
    return shares


def table(shares: Mapping[str, Mapping[int, float]]) -> list[str]:
    """Lines of the table. ``shares``: of each GPU, as `shares_of` gives them."""
    gpus = [gpu for gpu in GPUS if gpu.name in shares]
    names = " | ".join(f"{gpu.name}, model" for gpu in gpus)
    lines = [f"| case | bits | H200, measured us | {names} | error on the H200 |"]
    lines.append("|---" * (len(gpus) + 4) + "|")
    for row in MEASURED:
        cells = [f"{row.sequences} x {row.tokens // 1024} K", str(row.bits)]
        cells.append(f"{1e6 * row.seconds:.1f}")
        for gpu in gpus:
            share = shares[gpu.name][row.bits]
            seconds = expected(row, gpu, share) if share else 0.0
            cells.append(f"{1e6 * seconds:.0f}" if share else "too small")
        error = expected(row, H200) / row.seconds - 1
        lines.append(f"| {' | '.join(cells)} | {100 * error:+.0f} % |")
    return lines


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        host = emulated_kernels(Path(folder), "launches", "-O0")
        chosen = [gpu for gpu in GPUS if gpu.name in NAMES]
        shares = {gpu.name: shares_of(host, gpu) for gpu in chosen}
    print("\n".join(table(shares)))
    for name, found in shares.items():
        of_width = ", ".join(f"{bits} bit {share:.2f}" for bits, share in found.items())
        print(f"warps of a multiprocessor, of the H200's: {name}: {of_width}")


if __name__ == "__main__":
    main()
