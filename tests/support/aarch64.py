"""The native library on an emulated aarch64 processor: cross-compiled, run by qemu's
user mode, called as tests call a library of this machine.

A call's memory is copied into a file that both processes map. Words of its structures
that are addresses of other memory of the call become the guest's addresses.
"""

from __future__ import annotations

import ctypes
import mmap
import shutil
import subprocess
from collections.abc import Iterable
from ctypes import Structure
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvlathe.plan.layout import TABLE_COLUMNS
from kvlathe.runtime.native.attend import AttendArgs
from kvlathe.runtime.native.cpu import SealArgs, SealPage
from kvlathe.runtime.native.library import Status
from tests.support.made_once import made_once

ROOT = Path(__file__).resolve().parents[2]
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
TARGET = Path("/usr/aarch64-linux-gnu")
SIZE, BASE = 1 << 26, 1 << 36
"""Bytes of a call's memory, and where the guest has them: below its own mappings."""

Array = npt.NDArray[Any]
Block = Array | ctypes.Array[Any] | Structure
"""Memory of a call. Only what ctypes made holds addresses."""


def built() -> Path:
    """The folder of the library and of what calls it, made once a test run. Skips the
    test where a tool is missing."""
    for tool in ("cmake", "ninja", COMPILER, EMULATOR):
        if not shutil.which(tool):
            pytest.skip(f"{tool} is not installed (g++-aarch64-linux-gnu, qemu-user)")
    return made_once("aarch64", _build)


def _build(folder: Path) -> None:
    sources = ROOT / "plugins_cpp"
    system = ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64"]
    options = ["-G", "Ninja", "-DKVLATHE_CUDA=OFF", f"-DCMAKE_CXX_COMPILER={COMPILER}"]
    _run("cmake", "-S", sources, "-B", folder, *system, *options)
    _run("ninja", "-C", folder, "-j", "1")
    guest = ROOT / "tests" / "native_cpu" / "aarch64_guest.cc"
    paths = ["-O1", f"-I{sources / 'include'}", f"-L{folder}", "-lkvlathe"]
    _run(COMPILER, guest, *paths, "-Wl,-rpath,$ORIGIN", "-o", folder / "guest")


def _run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _bytes(block: Block) -> Array:
    """The block's own memory."""
    if isinstance(block, np.ndarray):
        return block.reshape(-1).view(np.uint8)
    size = ctypes.sizeof(block)
    return _at(ctypes.addressof(block), size)


def _at(address: int, size: int) -> Array:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def _seals(args: SealArgs) -> list[Block]:
    """The memory that the arguments of a seal point to."""
    parts = [args.source.contents, args.target.contents]
    first = ctypes.addressof(args.pages.contents)
    pages = (SealPage * args.page_count).from_address(first)
    lanes = [
        _at(part.lanes, 4 * len(TABLE_COLUMNS) * part.lane_count) for part in parts
    ]
    drawn = args.page_tokens * parts[1].lane_count if args.stochastic else 1
    sizes = (parts[0].page_stride, parts[1].page_stride, 4 * drawn)
    found: list[Block] = [*parts, pages, *lanes]
    for page in pages:
        addresses = (page.source, page.target, page.positions)
        found += [_at(*each) for each in zip(addresses, sizes, strict=True)]
    return found


class Guest:
    """A library's calls in a process of their own. ``isa``: the instruction set that
    AUTO means there; ``lib``: what seals pages."""

    def __init__(self, processor: str, folder: Path, *options: str | Path) -> None:
        """``processor``: as qemu names it. ``folder``: for the memory of calls.
        ``options``: more of qemu's."""
        memory = folder / "memory"
        memory.touch()
        with memory.open("r+b") as file:
            file.truncate(SIZE)
            self.memory = np.frombuffer(mmap.mmap(file.fileno(), SIZE), np.uint8)
        command = [EMULATOR, "-cpu", processor, "-L", TARGET, *options]
        self.process = subprocess.Popen(
            [*command, built() / "guest", memory, str(SIZE), str(BASE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.isa = self._reply()
        self.lib = SimpleNamespace(
            kvlathe_cpu_seal=lambda args, status: self._call(
                "seal", status._obj, [args._obj, *_seals(args._obj)]
            ),
            kvlathe_cpu_move=lambda *_: 0,
        )

    def attend(self, table: Array, args: AttendArgs, reached: Iterable[Block]) -> str:
        """kvlathe_cpu_attend of a layer. ``reached``: what the arguments point to.
        Returns what the library says where it refuses, else nothing."""
        status = Status()
        table = np.ascontiguousarray(table, np.int32)
        refused = self._call("attend", status, [args, table, *reached], table.size)
        return status.message.decode() if refused else ""

    def close(self) -> None:
        self.process.communicate()
        assert self.process.returncode == 0

    def _call(
        self, name: str, status: Status, blocks: list[Block], count: int = 0
    ) -> int:
        """``blocks``: the arguments and all that they point to."""
        blocks = [status, *blocks]
        sizes = [-(-_bytes(block).size // 128) * 128 + 128 for block in blocks]
        places = [BASE + sum(sizes[:i]) for i in range(len(blocks))]
        assert sum(sizes) <= SIZE, "this call needs more memory"
        own = (_bytes(block).ctypes.data for block in blocks)
        guests = dict(zip(own, places, strict=True))
        for block, place in zip(blocks, places, strict=True):
            image = _bytes(block)
            if not isinstance(block, np.ndarray):
                words = image[: image.size // 8 * 8].view(np.uint64).tolist()
                moved = np.array([guests.get(word, word) for word in words], np.uint64)
                image = np.concatenate([moved.view(np.uint8), image[8 * len(words) :]])
            self.memory[place - BASE :][: image.size] = image
        assert self.process.stdin is not None
        given = " ".join(str(x) for x in (*places[:3], count))
        self.process.stdin.write(f"{name} {given}\n")
        self.process.stdin.flush()
        found = int(self._reply())
        for block, place in zip(blocks, places, strict=True):
            if isinstance(block, np.ndarray | Status):
                image = _bytes(block)
                image[:] = self.memory[place - BASE :][: image.size]
        return found

    def _reply(self) -> str:
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        assert said, f"the emulator ended with {self.process.wait()}"
        return said.strip()
