"""The TensorRT plugin, driven through the plugin ABI by a host of our own
(trt_host.cc); on a GPU down to the answers.

Needs TensorRT's headers: TENSORRT_INCLUDE_DIR=.../include. KVLATHE_TRT_PLUGIN names a
plugin that is already built.
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
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings

from kvlathe.export.attention.node import node_inputs
from kvlathe.export.attention.tables import LayerTables
from kvlathe.plan.formats import Tier
from kvlathe.plan.heads import Lane
from kvlathe.plan.layer_table import layer_table
from kvlathe.plan.plan import Bucket
from kvlathe.runtime.native.cuda import CudaLibrary
from kvlathe.runtime.native.library import Native
from tests.native.library import ROOT, Library
from tests.native.step16 import Step16
from tests.support.attend_cases import Case, cases, plan_of

FLOAT, HALF, INT8, INT32 = 0, 1, 2, 3
TYPES = {torch.float16: HALF, torch.int8: INT8, torch.int32: INT32}
Array = np.ndarray
RARE = [HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much]
"""Most plans that are drawn are not in 16 bit."""


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
    def __init__(self, folder: Path, headers: Path, plugin: Path) -> None:
        library = folder / "libtrt_host.so"
        source = Path(__file__).with_name("trt_host.cc")
        command = [
            "c++",
            "-std=c++17",
            "-shared",
            "-fPIC",
            f"-I{headers}",
            f"-I{cuda_headers()}",
            str(source),
            "-o",
            str(library),
            "-ldl",
        ]
        subprocess.run(command, check=True, capture_output=True)
        self.drive, self.plugin = ctypes.CDLL(str(library)).drive_plugin, plugin


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


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Host:
    headers = Path(os.environ.get("TENSORRT_INCLUDE_DIR", "/nowhere"))
    if not (headers / "NvInfer.h").is_file():
        pytest.skip(
            "no TensorRT headers: set TENSORRT_INCLUDE_DIR to include/ of https://github.com/NVIDIA/TensorRT"
        )
    if cuda_headers() is None or not shutil.which("cmake"):
        pytest.skip("no CUDA toolkit or no CMake")
    folder = tmp_path_factory.mktemp("plugin")
    built = os.environ.get("KVLATHE_TRT_PLUGIN")
    return Host(
        folder, headers, Path(built) if built else build(folder / "build", headers)
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
        self.step, self.host, plan = Step16(case), host, case.plan
        bytes_ = torch.from_numpy(self.step.memory.copy()).to(device)
        unit = plan.unit
        values = {
            name: getattr(self.step, name)
            for name in (
                "q",
                "k",
                "v",
                "cos",
                "sin",
                "cu_seqlens_q",
                "query_offsets",
                "lengths",
            )
        }
        values |= {
            f"page_table_{s}": torch.from_numpy(table)
            for s, table in enumerate(self.step.tables)
        }
        values |= self.step.state
        values |= {
            name: torch.from_numpy(np.ascontiguousarray(x))
            for name, x in LayerTables(plan, case.layer).items()
        }
        whole = bytes_[: len(bytes_) // (2 * unit) * (2 * unit)]
        pools = {
            "pool_f16": whole.view(torch.float16).view(-1, unit),
            "pool_u8": whole.view(torch.int8).view(-1, unit),
        }
        self.bytes = bytes_
        self.names = node_inputs(plan, case.layer)
        self.inputs = [
            pools[name] if name in pools else values[name].contiguous().to(device)
            for name in self.names
        ]
        self.table = layer_table(plan, case.layer)

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
        space = torch.full(
            (first.workspace_bytes,), 255, dtype=torch.uint8, device=self.bytes.device
        )
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
        total = self.step.case.total
        return (
            out[:total].cpu().double().numpy(),
            rows[:total].cpu().double().numpy(),
            self.bytes.cpu().numpy(),
        )


def two_lanes(
    tier: Tier | None = None,
    queries: tuple[int, ...] = (1, 5),
    sealed: tuple[int, ...] = (64, 64),
) -> Case:
    """``sealed``: tokens of each sequence in the bucket of ``tier``."""
    lanes = [
        Lane(0, 0, 64, 48, 80, projected=True),
        Lane(0, 1, 64, 32, 16, projected=True),
    ]
    tiers, buckets = [Tier(16, 16)], [Bucket(0, (0, 1))]
    if tier:
        tiers, buckets = [*tiers, tier], [*buckets, Bucket(1, (0, 1), source=0)]
    lengths = [[70] + [cold] * (tier is not None) for cold in sealed]
    return Case(
        plan_of(lanes, tiers, buckets, 64, 4, 64), 0, list(queries), lengths, seed=4
    )


@pytest.mark.parametrize("tier", [None, Tier(8, 8), Tier(4, 2)], ids=str)
def test_everything_up_to_enqueue(host: Host, tier: Tier | None) -> None:
    case = two_lanes(tier)
    call = Call(case, host)
    job = call.prepared()
    assert job.out[0].shape == (6, 4 * 96) and job.out[1].shape == (6, 176)
    place = call.names.index("pool_f16")
    assert (
        list(job.aliased) == [-1, -1, place]
        and job.out[2].shape == call.inputs[place].shape
    )
    assert [out.type for out in job.out] == [HALF] * 3
    assert job.workspace_bytes > 6 * 4 * 80 * 2


@settings(max_examples=60, suppress_health_check=RARE)
@given(case=cases(has_scoring=False))
def test_any_plan_in_16_bit_is_taken(host: Host, case: Case) -> None:
    """Every set of inputs that a plan can have: RoPE or none, projections or none, up
    to three buckets."""
    assume(Step16.takes(case.plan))
    job = Call(case, host).prepared()
    ranks = np.array([(lane.rank_k, lane.rank_v) for lane in case.lanes])
    assert (
        job.out[0].shape[1] == case.plan.model.group_size * ranks[:, 1].sum()
        and job.out[1].shape[1] == ranks.sum()
    )


def refused(call: Call, words: str, change: Callable[[Job], None]) -> None:
    job = call.job(change)
    assert call.host.drive(byref(job)) == 1
    assert words in job.said.decode()


def test_what_contradicts_the_layout_is_refused_in_words(host: Host) -> None:
    call = Call(two_lanes(), host)
    old = call.table.copy()
    old[0] = 99

    def version(job: Job) -> None:
        job.layout = old.ctypes.data

    def cut(job: Job) -> None:
        job.layout_count = 20

    def narrow(job: Job) -> None:
        job.tensors[0].dims[1] = job.tensors[0].most[1] = 100

    def fewer(job: Job) -> None:
        job.inputs = 6

    refused(call, "the layer table has version 99", version)
    refused(call, "the layer table is too short", cut)
    refused(
        call,
        "q has the shape [6, 100], which contradicts the layout of layer 0",
        narrow,
    )
    refused(call, "fewer than its layout names", fewer)


def test_32_bit_pages_are_refused(host: Host) -> None:
    plan = plan_of(
        [Lane(0, 0, 32, 16, 16, projected=True)],
        [Tier(32, 32)],
        [Bucket(0, (0,))],
        32,
        2,
        16,
    )
    table = layer_table(plan, 0)

    def wide(job: Job) -> None:
        job.layout, job.layout_count = table.ctypes.data, len(table)

    refused(Call(two_lanes(), host), "this plan has 32-bit pages", wide)


def test_enqueue_says_what_is_missing_and_does_not_throw(host: Host) -> None:
    """Without a GPU the launch is refused with the driver's or the library's words."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    call = Call(two_lanes(), host)

    def memory(job: Job) -> None:
        job.workspace = call.bytes.data_ptr()

    refused(call, "enqueue failed", memory)


@settings(max_examples=25, suppress_health_check=RARE)
@given(case=cases(has_scoring=False))
def test_answers_and_pages_on_the_gpu(host: Host, case: Case) -> None:
    """o, rows and the pool, after build, serialization, deserialization and a dirty
    workspace."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    assume(
        Step16.takes(case.plan) and not any(tier.is_coded for tier in case.plan.tiers)
    )
    call = Call(case, host, "cuda")
    out, rows, memory = call.run()
    call.step.check_out(out)
    call.step.check_rows(rows)
    call.step.check_memory(memory)


@pytest.mark.parametrize(
    ("queries", "sealed"), [((1, 5), (64, 64)), ((40, 1, 17, 200), (0, 64, 64, 0))]
)
@pytest.mark.parametrize("bits", [16, 8, 4, 2])
def test_the_plugin_and_the_cuda_backend_give_the_same(
    host: Host,
    library: Library,
    bits: Literal[16, 8, 4, 2],
    queries: tuple[int, ...],
    sealed: tuple[int, ...],
) -> None:
    """A sealed page and a 16-bit tail under one softmax, decode rows and prompt chunks
    in one step: bit for bit."""
    if not (torch.cuda.is_available() and library.has_cuda):
        pytest.skip("no GPU, or a library without CUDA kernels")
    call = Call(
        two_lanes(Tier(bits, bits, "rank", "token", 64, 64), queries, sealed),
        host,
        "cuda",
    )
    out, rows, memory = call.run()
    call.step.check_rows(rows)
    call.step.check_out(out)
    backend = call.step.run(CudaLibrary(Native.load(library.path)), "cuda")
    np.testing.assert_array_equal(memory, backend[1])
    np.testing.assert_array_equal(out, backend[0])
