"""``kvlathe doctor``: what this machine has that kvlathe uses, and what to do about what
is missing."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import click
from rich.markup import escape

from kvlathe.base import console, machine
from kvlathe.base.errors import KvlatheError
from kvlathe.base.extras import pip_install
from kvlathe.base.package import __version__
from kvlathe.cli.common import Result, reports

HUB = "https://huggingface.co"
HUB_SECONDS = 5
LITTLE_MEMORY = 4 << 30
LITTLE_DISK = 10 << 30
"""Below these even small models are refused somewhere on the way."""
OF_DEVELOPERS = ("dev", "docs")
"""Extras that no command of kvlathe needs."""
ESSENTIAL = ("export", "serve")


@dataclass(frozen=True)
class Finding:
    """``found`` is one line; ``remedy`` what to do, empty where nothing is to be done.
    ``matters``: most users want it done."""

    name: str
    found: str
    remedy: str = ""
    matters: bool = True


def findings() -> Iterator[Finding]:
    """Everything that is looked at, in the order in which it is needed."""
    for check in CHECKS:
        try:
            yield from check()
        except (KvlatheError, OSError, subprocess.SubprocessError) as error:
            name = check.__name__.removeprefix("_").replace("_", " ")
            yield Finding(name, str(error), "mend that first")


def _versions() -> Iterator[Finding]:
    yield Finding("kvlathe", __version__)
    python, system = platform.python_version(), platform.platform()
    yield Finding("Python", f"{python} on {system}")


def _processor() -> Iterator[Finding]:
    flags = ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        named = re.search(r"model name\s*: (.*)", cpuinfo.read_text("utf-8", "replace"))
        flags = f"{named[1]}, " if named else ""
    said = f"{platform.machine()}, {machine.cores()} cores for this process"
    yield Finding("CPU", f"{flags}{said}")
    free, total = machine.free_bytes(), machine.memory_bytes()
    said = f"{console.human_bytes(free)} free of {console.human_bytes(total)}"
    remedy = "end other programs, or raise the container's limit"
    yield Finding("memory", said, remedy if free < LITTLE_MEMORY else "")


def _native_library() -> Iterator[Finding]:
    from kvlathe.runtime.native import library

    loaded = library.find()
    if loaded.native is None:
        reason, _, remedy = loaded.reason.rpartition(". ")
        slow = "engines run, much slower"
        yield Finding("native kernels", f"not in use: {reason}; {slow}", remedy)
        return
    found = f"{loaded.native.path}, {loaded.native.isa}"
    cuda = "with CUDA" if loaded.native.cuda else "without CUDA"
    yield Finding("native kernels", f"{found}, {cuda}")
    if _has_gpu() and not loaded.native.cuda:
        yield Finding("CUDA kernels", "not built", "run kvlathe native --cuda")


def _gpu() -> Iterator[Finding]:
    smi = shutil.which("nvidia-smi")
    if smi is None:
        yield Finding("GPU", "no NVIDIA driver is installed; engines run on the CPU")
        return
    fields = "name,memory.total,memory.used,driver_version,compute_cap"
    done = subprocess.run(
        [smi, f"--query-gpu={fields}", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        said = (done.stderr or done.stdout).strip().splitlines() or ["it says nothing"]
        yield Finding("GPU", f"nvidia-smi fails: {said[0]}", "mend the NVIDIA driver")
        return
    for number, line in enumerate(lines):
        name, total, used, driver, capability = line.split(", ")
        said = f"{name}, sm {capability}, {used} of {total} in use, {driver}"
        yield Finding(f"GPU {number}", said)
    yield from _torch_of_gpu()


def _torch_of_gpu() -> Iterator[Finding]:
    """The cuda backend computes with torch, which must be a CUDA build. It is asked in a
    child: a broken one ends there."""
    if not (version := _version("torch")):
        return
    asked = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=120)
    count = done.stdout.strip() or "0"
    remedy = "install torch's CUDA build for this driver (pip install torch)"
    said = f"{version} sees {count} GPUs"
    yield Finding("torch", said, remedy if count == "0" else "")


def _has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None


def _packages() -> Iterator[Finding]:
    """Packages that each extra installs, and whether they are there."""
    for extra, names in extras().items():
        missing = [name for name in names if not _version(name)]
        if not missing:
            held = ", ".join(f"{name} {_version(name)}" for name in names)
            yield Finding(f"extra {extra}", held)
        else:
            lacks = f"lacks {', '.join(missing)}"
            remedy = f"to have it: {pip_install(extra)}"
            yield Finding(f"extra {extra}", lacks, remedy, extra in ESSENTIAL)


def extras() -> dict[str, list[str]]:
    """The extras of users, with the names of their packages. Empty where kvlathe runs
    from a folder that pip did not install."""
    try:
        needed = metadata.requires("kvlathe") or []
    except metadata.PackageNotFoundError:
        return {}
    found: dict[str, list[str]] = {}
    for line in needed:
        named = re.match(r"([\w.-]+).*extra == ['\"]([\w-]+)['\"]", line)
        if named and named[2] not in OF_DEVELOPERS:
            found.setdefault(named[2], []).append(named[1])
    return found


def _version(package: str) -> str:
    """Version of an installed package; empty where it is not."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _disk() -> Iterator[Finding]:
    from kvlathe.engines import cache
    from kvlathe.engines.folder import nearest_parent

    root = cache.root()
    free = shutil.disk_usage(nearest_parent(root)).free
    held = sum(x.stat().st_size for x in root.rglob("*") if x.is_file())
    said = f"{console.human_bytes(free)} free at {root}"
    kept = f"finished builds there take {console.human_bytes(held)}"
    remedy = "kvlathe engines prune removes builds that are kept"
    yield Finding("disk", f"{said}; {kept}", remedy if free < LITTLE_DISK else "")


def _hub() -> Iterator[Finding]:
    """Models by name come from there; folders and GGUF files do not."""
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        yield Finding("hub", "HF_HUB_OFFLINE is set: only models that are cached", "")
        return
    url = os.environ.get("HF_ENDPOINT", HUB)
    try:
        with urllib.request.urlopen(url, timeout=HUB_SECONDS):
            yield Finding("hub", f"{url} answers")
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        remedy = "give --model a folder or a GGUF file, or set HF_ENDPOINT"
        yield Finding("hub", f"{url} does not answer: {reason}", remedy)


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    _versions,
    _processor,
    _native_library,
    _gpu,
    _packages,
    _disk,
    _hub,
)


def show_findings(result: Result) -> None:
    rows = []
    for one in result["findings"]:
        mark = "!" if one["remedy"] and one["matters"] else ""
        said = one["found"] + (f"\n-> {one['remedy']}" if one["remedy"] else "")
        rows.append((mark, one["name"], escape(said)))
    console.print_table("kvlathe doctor", ("", "what", "found"), rows)


@click.command("doctor")
@reports(show_findings)
def doctor_command() -> Result:
    """Look at this machine: processor, memory, native kernels, GPU, packages, disk and
    hub, with what to do about what is missing. It changes nothing.

    Put what it prints into a bug report.
    """
    return {"findings": [vars(finding) for finding in findings()]}


COMMANDS = (doctor_command,)
