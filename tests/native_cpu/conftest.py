"""The library under test: KVLATHE_LIBRARY, or a fresh build of this checkout."""

from __future__ import annotations

import ctypes

import pytest

from kvlathe.runtime.native.library import Native
from tests.support.emulated import emulated_kernels
from tests.support.native_library import shared_build


@pytest.fixture(scope="session")
def native(tmp_path_factory: pytest.TempPathFactory) -> Native:
    path = shared_build(tmp_path_factory, cuda=False)
    if path is None:
        pytest.skip("no CMake or no C++ compiler")
    return Native.load(path)


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels of decode attention, compiled for a CPU."""
    return emulated_kernels(tmp_path_factory.mktemp("emulated"), "attention")
