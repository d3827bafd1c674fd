"""The native library libkvlathe.so: where it is, whether it may be used, and why not.
Everything also runs without it.

Looked for: the file KVLATHE_LIBRARY, beside this package, and in a checkout's
build/native. KVLATHE_NATIVE=0: not used. KVLATHE_ISA (portable, avx2, avxvnni, avx512,
avx512vnni, neon, neondot, sve) chooses the CPU kernels' instruction set; by default the
best there is.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, Structure, byref, c_char, c_char_p, c_int32, c_uint32
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kvlathe.base.errors import KvlatheError
from kvlathe.base.library_digest import check_digest
from kvlathe.base.package import FOLDER

ABI_VERSION = 15
LIBRARY = "libkvlathe.so"


class Status(Structure):
    """kvlathe_status of abi.h."""

    _fields_ = [("code", c_int32), ("message", c_char * 508)]


@dataclass(frozen=True)
class Native:
    """A loaded library. ``isa``: the instruction set that its CPU kernels use here;
    ``cuda``: it holds CUDA kernels."""

    path: Path
    lib: ctypes.CDLL
    isa: str
    cuda: bool

    @classmethod
    def load(cls, path: Path) -> Native:
        """Raises KvlatheError for a file that is no such library, is damaged, or has
        another ABI."""
        try:
            check_digest(path)
            lib = ctypes.CDLL(str(path))
            lib.kvlathe_abi_version.restype = c_uint32
            lib.kvlathe_cpu_isa.argtypes, lib.kvlathe_cpu_isa.restype = (
                [POINTER(Status)],
                c_char_p,
            )
            version = lib.kvlathe_abi_version()
        except (OSError, AttributeError) as error:
            raise KvlatheError(
                f"{path} cannot be loaded", str(error), "build it again: kvlathe native"
            ) from error
        if version != ABI_VERSION:
            raise KvlatheError(
                f"{path} has ABI version {version}",
                f"this kvlathe speaks {ABI_VERSION}",
                "build it again: kvlathe native",
            )
        status = Status()
        isa = lib.kvlathe_cpu_isa(byref(status))
        if not isa:
            raise KvlatheError(
                "the native kernels cannot run",
                status.message.decode(),
                "unset KVLATHE_ISA",
            )
        return cls(path, lib, isa.decode(), bool(lib.kvlathe_has_cuda()))


@dataclass(frozen=True)
class Found:
    """``native`` or, in words, why there is none, and what to do about it."""

    native: Native | None
    reason: str = ""


@cache
def find() -> Found:
    """The library of this process. A broken or outdated one counts as none, and the
    reason says so.

    Raises KvlatheError where KVLATHE_ISA asks for what this machine lacks.
    """
    if os.environ.get("KVLATHE_NATIVE") == "0":
        return Found(None, "KVLATHE_NATIVE=0 turns them off. Unset it")
    chosen = os.environ.get("KVLATHE_LIBRARY")
    places = (
        [Path(chosen)]
        if chosen
        else [FOLDER / LIBRARY, FOLDER.parent / "build" / "native" / LIBRARY]
    )
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        return Found(
            None,
            f"no {LIBRARY} in {' or '.join(str(place.parent) for place in places)}. Build them: kvlathe native",
        )
    try:
        return Found(Native.load(path))
    except KvlatheError as error:
        if os.environ.get("KVLATHE_ISA"):
            raise
        return Found(None, str(error))
