"""Building libkvlathe.so from plugins_cpp/ with CMake. Standard library only: setup.py
uses it too.

The TensorRT plugin is built beside it where TENSORRT_INCLUDE_DIR names the folder of
NvInfer.h. KVLATHE_CUDA_ARCHITECTURES (compute capabilities, such as "87") builds CUDA
kernels for fewer GPUs, in less time; with KVLATHE_CUDA=1 wheels hold the CUDA kernels
too.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from kvlathe.base import library_digest
from kvlathe.base.errors import KvlatheError

log = logging.getLogger("kvlathe")

PACKAGE = Path(__file__).resolve().parents[1]
ROOT = PACKAGE.parent
LIBRARY, PLUGIN = "libkvlathe.so", "libkvlathe_trt.so"


def _sources() -> Path:
    """The C++ sources: of the checkout, or those that an installed package carries."""
    checkout = ROOT / "plugins_cpp"
    return checkout if checkout.is_dir() else PACKAGE / "plugins_cpp"


SOURCES = _sources()
HOME = ROOT / "build" / "native"
"""The folder of a checkout in which the library is built and looked for
(runtime/native/library.py). An installed package keeps it beside its modules."""


def obstacle() -> str:
    """Why nothing can be built here; empty if it can."""
    if not (SOURCES / "CMakeLists.txt").is_file():
        return f"their sources are not in {SOURCES}"
    if not shutil.which("cmake"):
        return "CMake is not installed"
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        return "no C++ compiler is installed"
    return ""


def build_here(cuda: bool = False, architectures: str = "") -> None:
    """Build where the library is looked for: in a checkout's build/native, else beside
    the installed package. Options and errors as ``build``'s; KvlatheError also where
    the package's folder cannot be written to."""
    if SOURCES.parent == ROOT:
        build(HOME, cuda, architectures)
        return
    if not os.access(PACKAGE, os.W_OK):
        raise KvlatheError(
            "the native kernels cannot be built",
            f"this user may not write to {PACKAGE}, where they belong",
            "run it as the user who installed kvlathe",
        )
    _build_beside(PACKAGE, cuda, architectures)


def _build_beside(package: Path, cuda: bool, architectures: str = "") -> None:
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder), cuda, architectures)
        for built in library.parent.glob("libkvlathe*.so"):
            library_digest.put(built, package)


def build(folder: Path = HOME, cuda: bool = False, architectures: str = "") -> Path:
    """Build into ``folder`` and return the library's path. ``cuda``: with the CUDA
    kernels too, for ``architectures`` (as CMake names them: "90a", "80;89", "native");
    by default for all that the kernels are written for.

    Raises KvlatheError where something is missing (nvcc too, with ``cuda``) or the
    compiler fails, with its last words.
    """
    if reason := obstacle():
        raise KvlatheError(
            "the native kernels cannot be built",
            reason,
            "install it; without them ONNX functions run",
        )
    folder.mkdir(parents=True, exist_ok=True)
    library_digest.remove_damaged(folder)
    _run(_configuring(folder, cuda, architectures))
    if cuda and _lacks_nvcc(folder):
        raise KvlatheError(
            "the CUDA kernels cannot be built",
            "CMake finds no nvcc",
            "install the CUDA toolkit and put its bin/ on PATH, or build without CUDA",
        )
    _run(["cmake", "--build", str(folder), "--parallel"])
    if not (folder / PLUGIN).is_file():
        log.warning(
            "no %s: it needs TensorRT's headers, TENSORRT_INCLUDE_DIR=.../include "
            "(docs/native.md)",
            PLUGIN,
        )
    return folder / LIBRARY


def _configuring(folder: Path, cuda: bool, architectures: str) -> list[str]:
    command = ["cmake", "-S", str(SOURCES), "-B", str(folder)]
    command.append(f"-DKVLATHE_CUDA={'ON' if cuda else 'OFF'}")
    chosen = architectures or os.environ.get("KVLATHE_CUDA_ARCHITECTURES")
    name = "KVLATHE_CUDA_ARCHITECTURES"
    command.append(f"-D{name}={chosen}" if chosen else f"-U{name}")
    is_new = not (folder / "CMakeCache.txt").exists()  # CMake keeps its generator
    if is_new and shutil.which("ninja"):
        command += ["-G", "Ninja"]
    return command


def _run(command: list[str]) -> None:
    """Raises KvlatheError with the last words of a command that fails."""
    log.info("%s", " ".join(command))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        words = "\n".join((done.stdout + done.stderr).strip().splitlines()[-20:])
        raise KvlatheError(
            "the native kernels were not built",
            f"{command[0]} failed:\n{words}",
            "mend what it names",
        )


def _lacks_nvcc(folder: Path) -> bool:
    """Whether CMake, in ``folder``, has looked for a CUDA compiler in vain."""
    cache = folder / "CMakeCache.txt"
    return (
        cache.is_file()
        and "CMAKE_CUDA_COMPILER:FILEPATH=NOTFOUND" in cache.read_text("utf-8")
    )


def build_into(package: Path) -> bool:
    """Put a library beside the package's modules if one can be built here; say so if
    not. For setup.py."""
    if reason := obstacle():
        log.warning(
            "kvlathe: no native kernels: %s. ONNX functions run instead", reason
        )
        return False
    _build_beside(package, cuda=os.environ.get("KVLATHE_CUDA") == "1")
    return True
