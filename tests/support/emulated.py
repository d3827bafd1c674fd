"""CUDA kernels compiled for a CPU (tests/native_cpu/emulated), for sessions in host
memory: those that rank tokens, and those of decode attention."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from ctypes import byref
from pathlib import Path
from typing import Any

import pytest

from kvlathe.base.errors import KvlatheError
from kvlathe.runtime.native.library import Native, Status
from tests.support.host_device import HostLibrary
from tests.support.made_once import made_once

HERE = Path(__file__).resolve().parents[1] / "native_cpu" / "emulated"
SOURCES = HERE.parents[2] / "plugins_cpp"
COMMON = ("lanes", "decode_call", "refusal")


def emulated_kernels(
    folder: Path, name: str = "kernels", level: str = "-O2"
) -> ctypes.CDLL:
    """``name``.cc, compiled at a ``level`` of optimization, once a test run. The library
    is a copy in ``folder``: what it counts is the caller's own. Skips the test where
    there is no compiler."""
    file = f"lib{name}.so"
    made = made_once(f"{file} {level}", lambda out: _compile(out / file, name, level))
    return ctypes.CDLL(str(shutil.copy(made / file, folder)))


def _compile(library: Path, name: str, level: str) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    includes = [f"-I{path}" for path in (HERE, SOURCES / "src", SOURCES / "include")]
    sources = [SOURCES / "src" / "common" / f"{name}.cc" for name in COMMON]
    flags = [level, "-std=c++17", "-fPIC", "-shared", "-Wl,-Bsymbolic"]
    # Inline variables of one library would be those of all in this process.
    flags.append("-fno-gnu-unique")
    command = [compiler, *flags, *includes, HERE / f"{name}.cc", *sources]
    done = subprocess.run(
        [*command, "-o", library], capture_output=True, text=True, check=False
    )
    if "_Float16" in done.stderr:
        pytest.skip("this g++ has no halves")
    assert done.returncode == 0, done.stderr


class RankingLibrary(HostLibrary):
    """A HostLibrary whose observe and move are the CUDA kernels. ``observed``: calls of
    observe."""

    def __init__(self, library: Native, kernels: ctypes.CDLL) -> None:
        super().__init__(library)
        self.kernels, self.observed = kernels, 0

    def call(self, name: str, *given: Any) -> None:  # noqa: ANN401  (structures)
        if name not in ("cuda_observe", "cuda_move"):
            return super().call(name, *given)
        self.observed += name == "cuda_observe"
        status = Status()
        if getattr(self.kernels, f"kvlathe_{name}")(*given, byref(status)):
            raise KvlatheError(name, status.message.decode())
        return None


class AttentionLibrary(HostLibrary):
    """A HostLibrary whose spread, plan and attention are the CUDA kernels. ``calls``: how
    many parts each call of attention had, ``flags``: its flags."""

    OURS = (
        "cuda_spread",
        "cuda_plan",
        "cuda_plan_bytes",
        "cuda_workspace_bytes",
        "cuda_attend_decode",
    )

    def __init__(self, library: Native, kernels: ctypes.CDLL) -> None:
        super().__init__(library)
        self.kernels = kernels
        self.calls: list[int] = []
        self.flags: list[int] = []

    def call(self, name: str, *given: Any) -> None:  # noqa: ANN401  (structures)
        if name not in self.OURS:
            return super().call(name, *given)
        if name == "cuda_attend_decode":
            self.calls.append(given[0]._obj.part_count)
            self.flags.append(given[0]._obj.flags)
        status = Status()
        if getattr(self.kernels, f"kvlathe_{name}")(*given, byref(status)):
            raise KvlatheError(name, status.message.decode(), "report this")
        return None
