"""The library under test: KVLATHE_LIBRARY, or a fresh build of this checkout."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from kvlathe.runtime.native import Native
from tests.native.library import build


@pytest.fixture(scope="session")
def native(tmp_path_factory: pytest.TempPathFactory) -> Native:
    if path := os.environ.get("KVLATHE_LIBRARY"):
        return Native.load(Path(path))
    if not shutil.which("cmake") or not (shutil.which("c++") or shutil.which("g++")):
        pytest.skip("no CMake or no C++ compiler")
    return Native.load(build(tmp_path_factory.mktemp("native"), cuda=False))
