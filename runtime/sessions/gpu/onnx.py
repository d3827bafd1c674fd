"""model.onnx on ONNX Runtime's CUDA provider, kvlathe::Attend by the native library's
CUDA kernels.

ONNX Runtime runs on our stream and is bound to our memory (I/O binding): it copies
nothing and waits for nothing. The operator reads and extends the pool in place.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import onnxruntime as ort

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.manifest import ONNX_FILE, Limits
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.native.cuda import cuda_library
from kvlathe.runtime.sessions.gpu.cuda_python import CudaPythonDevice
from kvlathe.runtime.sessions.gpu.pages import allocate_pool
from kvlathe.runtime.sessions.gpu.session import DeviceSession
from kvlathe.runtime.sessions.gpu.step_buffer import Bindings, StepArrays

PROVIDER = "CUDAExecutionProvider"
INSTALL = "pip uninstall onnxruntime, then pip install 'onnxruntime-gpu[cuda,cudnn]'"
ON_GPU: Mapping[str, str] = {"kvlathe.provider": "cuda"}
"""The choice of the operator that the library registers."""


def obstacle() -> str:
    """Why the installed ONNX Runtime cannot use a GPU; empty if it can."""
    if PROVIDER in ort.get_available_providers():
        return ""
    try:
        return f"onnxruntime {version('onnxruntime')} has no CUDA provider: {INSTALL}"
    except PackageNotFoundError:
        return f"this ONNX Runtime ({ort.__version__}) has no CUDA provider: {INSTALL}"


def open_session(
    folder: Path,
    plan: CompressionPlan,
    limits: Limits,
    arena_bytes: int,
    threads: int | None = None,
) -> DeviceSession:
    """Load ``folder``'s graph with a cache of ``arena_bytes`` on GPU 0.

    ``threads`` is for sessions on a CPU. Raises KvlatheError where something is
    missing, or ONNX Runtime would not run on the GPU.
    """
    if reason := obstacle():
        raise KvlatheError(
            f"{folder} cannot run on the GPU", reason, "run it on the CPU"
        )
    device, library = CudaPythonDevice(), cuda_library("ONNX Runtime's CUDA provider")
    graph = open_graph(
        folder / ONNX_FILE, session_options(library.path, ON_GPU), device.stream
    )
    pool = allocate_pool(device, library, plan, arena_bytes)
    return DeviceSession(
        device, library, plan, limits, pool, OnnxCompute(graph, "cuda")
    )


def session_options(library: Path, entries: Mapping[str, str]) -> ort.SessionOptions:
    """Options with which ONNX Runtime opens a graph: with the operator of ``library``
    that ``entries`` name."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    # Buffers are those of the step before, in CUDA graphs too.
    options.enable_mem_pattern = False
    for name, value in entries.items():
        options.add_session_config_entry(name, value)
    options.register_custom_ops_library(str(library))
    return options


def open_graph(
    path: Path, options: ort.SessionOptions, stream: int
) -> ort.InferenceSession:
    """On the GPU or not at all: ONNX Runtime itself would go on with the CPU."""
    if hasattr(ort, "preload_dlls"):
        with contextlib.redirect_stdout(sys.stderr):
            # CUDA's and cuDNN's libraries, where pip has installed them
            ort.preload_dlls()
    provider = (PROVIDER, {"device_id": "0", "user_compute_stream": str(stream)})
    try:
        graph = ort.InferenceSession(str(path), options, providers=[provider])
    except Exception as error:  # ONNX Runtime's own exceptions have no common base
        raise KvlatheError(
            f"ONNX Runtime {ort.__version__} cannot load {path} on the GPU",
            str(error),
            "run it on the CPU, or build the engine again",
        ) from error
    if PROVIDER not in graph.get_providers():
        offered = ", ".join(graph.get_providers())
        raise KvlatheError(
            f"{path} cannot run on the GPU",
            f"its CUDA provider did not start; it offers {offered}",
            f"see what it says above; {INSTALL}",
        )
    return graph


class OnnxCompute:
    """A Compute: a graph that ONNX Runtime has opened.

    ``place``: where ONNX Runtime finds what is bound, cuda or cpu.
    """

    outputs = frozenset({"logits", "rows"})
    least_rows = 1

    def __init__(self, graph: ort.InferenceSession, place: str) -> None:
        self.graph, self.place = graph, place
        self._wanted = {entry.name for entry in graph.get_inputs()}
        self._asynchronous = ort.RunOptions()
        self._asynchronous.add_run_config_entry(
            "disable_synchronize_execution_providers", "1"
        )

    def queue(self, step: StepArrays, outputs: Bindings) -> None:
        binding = self.graph.io_binding()
        for name, x in step.arrays.items():
            if name in self._wanted:
                binding.bind_input(name, self.place, 0, x.dtype, x.shape, x.address)
        for name, x in outputs.items():
            binding.bind_output(name, self.place, 0, x.dtype, x.shape, x.address)
        self.graph.run_with_iobinding(binding, self._asynchronous)
