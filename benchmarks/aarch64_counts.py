"""Instructions that attention of a decode step takes on aarch64, for each cached token
and row: counted under qemu, not timed.

    apt-get install g++-aarch64-linux-gnu qemu-user
    python -m benchmarks.aarch64_counts [--formats 16 8 4 3 2]

Formats and shape are those of cpu_attend.py, all six layers. Counted is what 1,024
tokens more take. A vector instruction counts as one, whatever its length.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.cpu_attend import LAYERS, Steps, plan_of
from benchmarks.support.commands import parser_of
from kvlathe.plan.layer_table import layer_table
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.plan import CompressionPlan
from tests.native_cpu.library import NEON, NEON_DOT, SVE
from tests.support.aarch64 import Guest

RANKS = [96, 112, 96]
MACHINES = {
    "neon": ("max", NEON),
    "neondot": ("max", NEON_DOT),
    "sve, 256 bits": ("max,sve-default-vector-length=32", SVE),
    "sve, 512 bits": ("a64fx", SVE),
}
"""As qemu names the processor, and the instruction set."""


def instructions(
    plan: CompressionPlan, context: int, processor: str, isa: int, folder: Path
) -> int:
    """Instructions of one process that computes one step."""
    steps, found = Steps(plan, context, 1, 32, 1, 0, []), folder / "count"
    options = ("-plugin", f"{folder / 'count.so'},out={found}")
    guest = Guest(processor, folder, *options)
    tables, lengths = steps.kept
    for layer in range(LAYERS):
        random = np.random.default_rng(layer)
        args = steps.args(plan, layer, lengths, tables, 1, 1, random)
        args.isa = isa
        reached = [*steps.kept[-1].values(), steps.memory, *tables, steps.pointers]
        if said := guest.attend(layer_table(CacheLayout(plan), layer), args, reached):
            sys.exit(said)
    guest.close()
    return int(found.read_text())


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--formats", nargs="+", default=["16", "8", "4", "3", "2"])
    asked = parser.parse_args()
    print(f"{'format':<14}" + "".join(f"{name:>16}" for name in MACHINES))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = Path(__file__).with_suffix(".c")
        made = ["-O1", "-shared", "-fPIC", source, "-o", folder / "count.so"]
        subprocess.run(["gcc", *made], check=True)
        for form in asked.formats:
            plan, line = plan_of(form, RANKS), f"{form:<14}"
            for machine in MACHINES.values():
                few, many = (
                    instructions(plan, context, *machine, folder)
                    for context in (1056, 2080)
                )
                line += f"{(many - few) / 1024:>16,.0f}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
