"""One build of the native library for all processes of a test run."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.made_once import locked

ROOT = Path(__file__).resolve().parents[2]


def build(out: Path, cuda: bool) -> Path:
    """Build libkvlathe.so into ``out`` with CMake. Raises CalledProcessError where the
    compiler fails."""
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    configure = [
        "cmake",
        "-S",
        str(ROOT / "plugins_cpp"),
        "-B",
        str(out),
        f"-DKVLATHE_CUDA={'ON' if cuda else 'OFF'}",
    ]
    if cuda:
        configure.append("-DKVLATHE_CUDA_ARCHITECTURES=native")
    subprocess.run([*configure, *generator], check=True, capture_output=True)
    subprocess.run(
        ["cmake", "--build", str(out), "-j", "2"], check=True, capture_output=True
    )
    return out / "libkvlathe.so"


def built_already() -> Path | None:
    """The checkout's own library, where it is of the sources as they are."""
    own, ninja = ROOT / "build" / "native", shutil.which("ninja")
    library = own / "libkvlathe.so"
    if ninja is None or not library.is_file() or not (own / "build.ninja").is_file():
        return None
    left = subprocess.run([ninja, "-n", "-C", own], capture_output=True, text=True)
    return library if "no work to do" in left.stdout else None


def shared_build(factory: pytest.TempPathFactory, cuda: bool) -> Path | None:
    """The library named by KVLATHE_LIBRARY, else the one in build/native, else one
    build of this checkout that all processes of a test run share; None without CMake or
    a C++ compiler."""
    if path := os.environ.get("KVLATHE_LIBRARY"):
        return Path(path)
    if not cuda and (built := built_already()):
        return built
    if not shutil.which("cmake") or not (shutil.which("c++") or shutil.which("g++")):
        return None
    base = factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        base = base.parent  # a worker's own folder is inside that of the run
    out = base / f"native_{'cuda' if cuda else 'cpu'}"
    library = out / "libkvlathe.so"
    with locked(base / f"{out.name}.lock"):
        return library if library.is_file() else build(out, cuda)
