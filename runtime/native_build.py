"""Building libkvlathe.so from plugins_cpp/ with CMake. Standard library only: setup.py uses it too.

The TensorRT plugin is built beside it where TENSORRT_INCLUDE_DIR names the folder of NvInfer.h.
KVLATHE_CUDA_ARCHITECTURES (compute capabilities, such as "87") builds CUDA kernels for fewer GPUs, in less time; with
KVLATHE_CUDA=1 wheels hold the CUDA kernels too.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from kvlathe.errors import KvlatheError

log = logging.getLogger("kvlathe")

ROOT = Path(__file__).resolve().parents[1]
SOURCES, HOME = ROOT / "plugins_cpp", ROOT / "build" / "native"
"""In a checkout: what is built, and where the library is looked for afterwards (runtime/native.py)."""
LIBRARY, PLUGIN = "libkvlathe.so", "libkvlathe_trt.so"


def obstacle() -> str:
    """Why nothing can be built here; empty if it can."""
    if not (SOURCES / "CMakeLists.txt").is_file():
        return f"{SOURCES} is not there: native kernels are built in a checkout"
    if not shutil.which("cmake"):
        return "CMake is not installed"
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        return "no C++ compiler is installed"
    return ""


def build(folder: Path = HOME, cuda: bool = False, architectures: str = "") -> Path:
    """Build into ``folder`` and return the library's path. ``cuda``: with the CUDA kernels too, for ``architectures``
    (as CMake names them: "90a", "80;89", "native"); by default for all that the kernels are written for.

    Raises KvlatheError where something is missing (nvcc too, with ``cuda``) or the compiler fails, with its last words.
    """
    if found := obstacle():
        raise KvlatheError("the native kernels cannot be built", found, "install it; without them ONNX functions run")
    folder.mkdir(parents=True, exist_ok=True)
    chosen = architectures or os.environ.get("KVLATHE_CUDA_ARCHITECTURES")
    options = [f"-DKVLATHE_CUDA={'ON' if cuda else 'OFF'}"]
    options += [f"-DKVLATHE_CUDA_ARCHITECTURES={chosen}" if chosen else "-UKVLATHE_CUDA_ARCHITECTURES"]
    ninja = ["-G", "Ninja"] if shutil.which("ninja") and not (folder / "CMakeCache.txt").exists() else []
    for command in (
        ["cmake", "-S", str(SOURCES), "-B", str(folder), *options, *ninja],
        ["cmake", "--build", str(folder), "--parallel"],
    ):
        log.info("%s", " ".join(command))
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            words = "\n".join((done.stdout + done.stderr).strip().splitlines()[-20:])
            raise KvlatheError(
                "the native kernels were not built", f"{command[0]} failed:\n{words}", "mend what it names"
            )
        if cuda and _lacks_nvcc(folder):
            remedy = "install the CUDA toolkit and put its bin/ on PATH, or build without CUDA"
            raise KvlatheError("the CUDA kernels cannot be built", "CMake finds no nvcc", remedy)
    if not (folder / PLUGIN).is_file():
        log.warning("no %s: it needs TensorRT's headers, TENSORRT_INCLUDE_DIR=.../include (docs/native.md)", PLUGIN)
    return folder / LIBRARY


def _lacks_nvcc(folder: Path) -> bool:
    """Whether CMake, in ``folder``, has looked for a CUDA compiler in vain."""
    cache = folder / "CMakeCache.txt"
    return cache.is_file() and "CMAKE_CUDA_COMPILER:FILEPATH=NOTFOUND" in cache.read_text("utf-8")


def build_into(package: Path) -> bool:
    """Put a library beside the package's modules if one can be built here; say so if not. For setup.py."""
    if found := obstacle():
        log.warning("kvlathe: no native kernels, because %s; the ONNX functions run instead", found)
        return False
    with tempfile.TemporaryDirectory() as folder:
        for built in build(Path(folder), cuda=os.environ.get("KVLATHE_CUDA") == "1").parent.glob("libkvlathe*.so"):
            shutil.copy2(built, package / built.name)
    return True
