"""Compares the machine code (SASS) of the CUDA kernels in two libraries, kernel by kernel.

    python scripts/kernel_code.py build/old/libkvlathe.so build/new/libkvlathe.so

It proves that a change of the sources left the GPU's code alone: then nothing has to be
timed again. Kernels are paired by their names without what the compiler adds to a file's
own names; ``--renamed OLD=NEW`` pairs those that the change has renamed. Build both for
the same architecture with the same nvcc. Needs cuobjdump (CUDA toolkit, or the package
nvidia-cuda-cuobjdump with nvidia-cuda-nvdisasm) and c++filt. Exits with 1 where a kernel
changed, came or went.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

FUNCTION = re.compile(r"\s*Function : (\S+)")
TARGET = re.compile(r"\s*\.target\s+(\S+)")
INSTRUCTION = re.compile(r"\s*(/\*[0-9a-f]{4,}\*/.*|/\* 0x[0-9a-f]+ \*/)")


@dataclass(frozen=True)
class Kernel:
    """``instructions``: how many. ``digest``: of all of them, encoding included."""

    instructions: int
    digest: str


def kernels_of(dump: Iterable[str]) -> dict[str, Kernel]:
    """The kernels in the lines of ``cuobjdump -sass``, by "target: name"."""
    lines: dict[str, list[str]] = {}
    target = ""
    name = ""
    for line in dump:
        if entry := TARGET.match(line):
            target = entry[1]
        elif entry := FUNCTION.match(line):
            name = f"{target}: {entry[1]}"
            lines[name] = []
        elif name and INSTRUCTION.match(line):
            lines[name].append(" ".join(line.split()))
    return {name: _kernel(code) for name, code in lines.items()}


def _kernel(code: list[str]) -> Kernel:
    digest = hashlib.sha256("\n".join(code).encode()).hexdigest()
    return Kernel(sum(";" in line for line in code), digest)


def readable(names: Iterable[str]) -> list[str]:
    """Names as c++filt prints them, without namespaces of a file's own."""
    done = subprocess.run(
        ["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True
    )
    return [
        re.sub(r"\(anonymous namespace\)::|kvlathe::|cuda::", "", line)
        for line in done.stdout.splitlines()
    ]


def read(path: Path) -> dict[str, Kernel]:
    """The kernels of a library, or of a file that holds what cuobjdump printed."""
    if path.suffix == ".txt":
        kernels = kernels_of(path.read_text("utf-8").splitlines())
    else:
        command = ["cuobjdump", "-sass", str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            kernels = kernels_of(process.stdout)
        if process.returncode:
            raise SystemExit(f"cuobjdump cannot read {path}")
    return dict(zip(readable(kernels), kernels.values(), strict=True))


def compared(
    old: Mapping[str, Kernel], new: Mapping[str, Kernel], renamed: Mapping[str, str]
) -> list[str]:
    """A line for each kernel that differs; empty where the code is the same."""
    out = []
    wanted = {_after(name, renamed): kernel for name, kernel in old.items()}
    for name in sorted(wanted.keys() | new.keys()):
        before = wanted.get(name)
        after = new.get(name)
        if before is None:
            out.append(f"new      {name}")
        elif after is None:
            out.append(f"gone     {name}")
        elif before.digest != after.digest:
            count = f"{before.instructions} -> {after.instructions} instructions"
            out.append(f"changed  {name}: {count}")
    return out


def _after(name: str, renamed: Mapping[str, str]) -> str:
    for old, new in renamed.items():
        name = re.sub(rf"\b{re.escape(old)}\b", new, name)
    return name


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--renamed", action="append", default=[], metavar="OLD=NEW")
    given = parser.parse_args()
    new = read(given.new)
    if not new:
        print(f"{given.new} holds no CUDA kernels")
        return 1
    renamed = dict(pair.split("=", 1) for pair in given.renamed)
    lines = compared(read(given.old), new, renamed)
    print("\n".join(lines) if lines else f"{len(new)} kernels, all as they were")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
