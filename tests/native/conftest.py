from __future__ import annotations

import pytest
import torch

from tests.native.library import Library
from tests.native.trt_plugin import Host, found_host
from tests.support.native_library import shared_build


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    path = shared_build(tmp_path_factory, cuda=torch.cuda.is_available())
    if path is None:
        pytest.skip(
            "no CMake or no C++ compiler: the native library cannot be built here"
        )
    return Library(path)


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> Host:
    return found_host(tmp_path_factory.mktemp("plugin"))


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest, library: Library) -> str:
    if request.param == "cuda" and not (torch.cuda.is_available() and library.has_cuda):
        pytest.skip("no GPU, or a library without CUDA kernels")
    return request.param
