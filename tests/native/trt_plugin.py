"""The TensorRT plugin, driven through the plugin ABI by a host of our own
(trt_host.cc).

KVLATHE_TRT_PLUGIN names a plugin that is already built, and KVLATHE_TRT_HOST a host
that is: with both, no headers of TensorRT are needed.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable
from ctypes import (
    Structure,
    byref,
    c_char,
    c_char_p,
    c_float,
    c_int32,
    c_int64,
    c_void_p,
)
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvlathe.plan.layer_table import layer_table
from kvlathe.plan.layout import CacheLayout
from tests.native.library import ROOT
from tests.native.node_inputs import inputs_of
from tests.native.step16 import Step16
from tests.support.attend_cases import Case

FLOAT, HALF, INT8, INT32 = 0, 1, 2, 3
TYPES = {torch.float16: HALF, torch.int8: INT8, torch.int32: INT32}
Array = np.ndarray


PAST = 4096
"""Bytes after a workspace that nothing may touch."""


class Tensor(Structure):
    _fields_ = [
        ("type", c_int32),
        ("rank", c_int32),
        ("dims", c_int64 * 8),
        ("most", c_int64 * 8),
        ("data", c_void_p),
    ]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.dims[: self.rank])


class Job(Structure):
    _fields_ = [
        *((name, c_char_p) for name in ("library", "layer")),
        ("layout", c_void_p),
        ("layout_count", c_int32),
        ("scale", c_float),
        ("inputs", c_int32),
        ("tensors", ctypes.POINTER(Tensor)),
        ("out", Tensor * 3),
        ("aliased", c_int32 * 3),
        ("workspace_bytes", c_int64),
        *((name, c_void_p) for name in ("workspace", "stream")),
        ("said", c_char * 1024),
    ]


class Host:
    """``drive``: runs one job with the plugin library ``plugin``."""

    def __init__(self, library: Path, plugin: Path) -> None:
        self.drive, self.plugin = ctypes.CDLL(str(library)).drive_plugin, plugin


def found_host(folder: Path) -> Host:
    """The host that is built already, or is built into ``folder`` now. Skips the test
    where something for that is missing."""
    library, plugin = (
        os.environ.get(f"KVLATHE_TRT_{name}") for name in ("HOST", "PLUGIN")
    )
    if library and plugin:
        return Host(Path(library), Path(plugin))
    headers = Path(os.environ.get("TENSORRT_INCLUDE_DIR", "/nowhere"))
    if not (headers / "NvInfer.h").is_file():
        pytest.skip(
            "no TensorRT headers: set TENSORRT_INCLUDE_DIR to include/ of https://github.com/NVIDIA/TensorRT"
        )
    if cuda_headers() is None or not shutil.which("cmake"):
        pytest.skip("no CUDA toolkit or no CMake")
    own = compiled_host(folder / "libtrt_host.so", headers)
    return Host(own, Path(plugin) if plugin else build(folder / "build", headers))


def compiled_host(library: Path, headers: Path) -> Path:
    """``library``, compiled from trt_host.cc. Nothing of TensorRT is linked."""
    flags = ["-std=c++17", "-shared", "-fPIC", f"-I{headers}", f"-I{cuda_headers()}"]
    source = Path(__file__).with_name("trt_host.cc")
    command = ["c++", *flags, str(source), "-o", str(library), "-ldl"]
    subprocess.run(command, check=True, capture_output=True)
    return library


def cuda_headers() -> Path | None:
    """The folder of cuda_runtime_api.h, which NvInfer.h includes."""
    homes = [
        os.environ.get("CUDA_HOME", ""),
        "/usr/local/cuda",
        *map(str, Path(shutil.which("nvcc") or "/").resolve().parents),
    ]
    found = (Path(home) / "include" for home in homes if home)
    return next(
        (folder for folder in found if (folder / "cuda_runtime_api.h").is_file()), None
    )


def build(folder: Path, headers: Path) -> Path:
    cuda = (
        ["-DKVLATHE_CUDA_ARCHITECTURES=native"]
        if torch.cuda.is_available()
        else ["-DKVLATHE_CUDA=OFF"]
    )
    configure = [
        "cmake",
        "-S",
        str(ROOT / "plugins_cpp"),
        "-B",
        str(folder),
        f"-DTENSORRT_INCLUDE_DIR={headers}",
        *cuda,
    ]
    subprocess.run(configure, check=True, capture_output=True)
    subprocess.run(
        ["cmake", "--build", str(folder), "-j2", "--target", "kvlathe_trt"],
        check=True,
        capture_output=True,
    )
    return folder / "libkvlathe_trt.so"


class Call:
    """One node of a case, its inputs in the op's order, on ``device``."""

    def __init__(self, case: Case, host: Host, device: str = "cpu") -> None:
        self.step, self.host = Step16(case), host
        self.bytes = torch.from_numpy(self.step.memory.copy()).to(device)
        inputs = inputs_of(self.step, self.bytes)
        self.names, self.inputs = list(inputs), list(inputs.values())
        self.table = layer_table(CacheLayout(case.plan), case.layer)

    def job(self, change: Callable[[Job], None] = lambda job: None) -> Job:
        self.tensors = (Tensor * len(self.inputs))()
        for tensor, value in zip(self.tensors, self.inputs, strict=True):
            tensor.type, tensor.rank, tensor.data = (
                TYPES[value.dtype],
                value.ndim,
                value.data_ptr(),
            )
            tensor.dims[: value.ndim] = tensor.most[: value.ndim] = list(value.shape)
        job = Job(
            os.fsencode(self.host.plugin),
            b"layers.0.attend",
            self.table.ctypes.data,
            len(self.table),
            self.step.case.scale,
        )
        job.inputs, job.tensors = len(self.inputs), self.tensors
        change(job)
        return job

    def prepared(self, change: Callable[[Job], None] = lambda job: None) -> Job:
        """Everything that a build does, and a context. Raises AssertionError with the
        words of plugin and host."""
        job = self.job(change)
        assert self.host.drive(byref(job)) == 0, job.said.decode()
        return job

    def run(self) -> tuple[Array, Array, Array]:
        """o and rows of the real tokens, and the pool's bytes."""
        first = self.prepared()
        half: dict[str, Any] = {"dtype": torch.float16, "device": self.bytes.device}
        out, rows = (
            torch.full(first.out[i].shape, torch.nan, **half) for i in range(2)
        )
        room = first.workspace_bytes + PAST
        space = torch.full((room,), 255, dtype=torch.uint8, device=self.bytes.device)
        pool = self.inputs[self.names.index("pool_f16")]
        torch.cuda.synchronize()

        def with_memory(job: Job) -> None:
            job.workspace, job.stream = (
                space.data_ptr(),
                torch.cuda.current_stream().cuda_stream,
            )
            for place, tensor in enumerate((out, rows, pool)):
                job.out[place].data = tensor.data_ptr()

        self.prepared(with_memory)
        torch.cuda.synchronize()
        assert (space[-PAST:] == 255).all(), "written past the workspace"
        total = self.step.case.total
        return (
            out[:total].cpu().double().numpy(),
            rows[:total].cpu().double().numpy(),
            self.bytes.cpu().numpy(),
        )
