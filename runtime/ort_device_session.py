"""OrtDeviceSession: model.onnx on ONNX Runtime's CUDA provider, kvlathe::Attend by the native library's CUDA kernels.

ONNX Runtime runs on our stream and is bound to our memory (I/O binding): it copies nothing and waits for nothing. The
operator reads and extends the pool in place, so a step moves its integers to the GPU and its logits back.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import onnxruntime as ort

from kvlathe.engines.manifest import ONNX_FILE, Limits
from kvlathe.errors import KvlatheError
from kvlathe.export.plan import CompressionPlan
from kvlathe.runtime.cuda_abi import CudaLibrary
from kvlathe.runtime.device import Device
from kvlathe.runtime.device_session import Bindings, DeviceSession, library_here

PROVIDER = "CUDAExecutionProvider"
INSTALL = "pip uninstall onnxruntime, then pip install 'onnxruntime-gpu[cuda,cudnn]'"


def obstacle() -> str:
    """Why the installed ONNX Runtime cannot use a GPU; empty if it can."""
    if PROVIDER in ort.get_available_providers():
        return ""
    try:
        return f"onnxruntime {version('onnxruntime')} has no CUDA provider: {INSTALL}"
    except PackageNotFoundError:
        return f"this ONNX Runtime ({ort.__version__}) has no CUDA provider: {INSTALL}"


class OrtDeviceSession(DeviceSession):
    """Loads ``folder``'s graph with a cache of ``arena_bytes`` on GPU 0. ``threads`` is for sessions on a CPU: ignored.

    Raises KvlatheError where something is missing, or ONNX Runtime would not run on the GPU.
    """

    place = "cuda"
    """Where ONNX Runtime finds what is bound."""
    entries: Mapping[str, str] = {"kvlathe.provider": "cuda"}
    """Which operator the library registers."""

    def __init__(
        self, folder: Path, plan: CompressionPlan, limits: Limits, arena_bytes: int, threads: int | None = None
    ) -> None:
        if found := obstacle():
            raise KvlatheError(f"{folder} cannot run on the GPU", found, "run it on the CPU")
        self._start(Device(), library_here("ONNX Runtime's CUDA provider"), folder, plan, limits, arena_bytes)

    def _start(
        self,
        device: Device,
        library: CudaLibrary,
        folder: Path,
        plan: CompressionPlan,
        limits: Limits,
        arena_bytes: int,
    ) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.enable_mem_pattern = False  # buffers are those of the step before, in graphs too
        for name, value in self.entries.items():
            options.add_session_config_entry(name, value)
        options.register_custom_ops_library(str(library.path))
        self._graph = self.open_graph(folder / ONNX_FILE, options, device.stream)
        self._wanted = {entry.name for entry in self._graph.get_inputs()}
        self._asynchronous = ort.RunOptions()
        self._asynchronous.add_run_config_entry("disable_synchronize_execution_providers", "1")
        super().__init__(device, library, plan, limits, arena_bytes)

    def open_graph(self, path: Path, options: ort.SessionOptions, stream: int) -> ort.InferenceSession:
        """On the GPU or not at all: ONNX Runtime itself would go on with the CPU."""
        if hasattr(ort, "preload_dlls"):
            with contextlib.redirect_stdout(sys.stderr):
                ort.preload_dlls()  # CUDA's and cuDNN's libraries, where pip has installed them
        chosen = [(PROVIDER, {"device_id": "0", "user_compute_stream": str(stream)})]
        try:
            graph = ort.InferenceSession(str(path), options, providers=chosen)
        except Exception as error:  # ONNX Runtime's own exceptions have no common base
            fact = f"ONNX Runtime {ort.__version__} cannot load {path} on the GPU"
            raise KvlatheError(fact, str(error), "run it on the CPU, or build the engine again") from error
        if PROVIDER not in graph.get_providers():
            reason = f"its CUDA provider did not start; it offers {', '.join(graph.get_providers())}"
            raise KvlatheError(f"{path} cannot run on the GPU", reason, f"see what it says above; {INSTALL}")
        return graph

    def compute(self, inputs: Bindings, outputs: Bindings, decode: bool) -> None:
        binding = self._graph.io_binding()
        for name, x in inputs.items():
            if name in self._wanted:
                binding.bind_input(name, self.place, 0, x.dtype, x.shape, x.address)
        for name, x in outputs.items():
            binding.bind_output(name, self.place, 0, x.dtype, x.shape, x.address)
        self._graph.run_with_iobinding(binding, self._asynchronous)
