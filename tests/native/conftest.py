from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.native.library import Library, find_or_build


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    found = find_or_build(Path(tmp_path_factory.mktemp("native")), cuda=torch.cuda.is_available())
    if found is None:
        pytest.skip("no CMake or no C++ compiler: the native library cannot be built here")
    return found


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest, library: Library) -> str:
    if request.param == "cuda" and not (torch.cuda.is_available() and library.has_cuda):
        pytest.skip("no GPU, or a library without CUDA kernels")
    return request.param
