"""GPU 0 through cuda-python (cuda.bindings.runtime), with one stream. No torch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from kvlathe.base.errors import KvlatheError
from kvlathe.base.extras import pip_install
from kvlathe.base.memory import OutOfMemory
from kvlathe.runtime.sessions.gpu.device import BYTE, DeviceArray

MODULE = "cuda.bindings.runtime"


def obstacle() -> str:
    """Why there is no GPU for us here; empty if there is one."""
    try:
        cuda = import_module(MODULE)
    except ImportError:
        return f"cuda-python is not installed: {pip_install('gpu')}"
    status, count = cuda.cudaGetDeviceCount()
    if int(status) and not _has_driver():
        return "no NVIDIA driver is installed (libcuda.so.1)"
    if int(status):
        return f"the CUDA driver says: {cuda.cudaGetErrorString(status)[1].decode()}"
    return "" if count else "the driver sees no GPU"


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def memory_bytes() -> tuple[int, int]:
    """Bytes of the GPU's memory that are free now, and all."""
    _, free, total = import_module(MODULE).cudaMemGetInfo()
    return int(free), int(total)


def architecture() -> str:
    """The GPU's compute capability, as manifests name it: sm_90."""
    cuda = import_module(MODULE)
    kind = cuda.cudaDeviceAttr
    major = cuda.cudaDeviceGetAttribute(kind.cudaDevAttrComputeCapabilityMajor, 0)[1]
    minor = cuda.cudaDeviceGetAttribute(kind.cudaDevAttrComputeCapabilityMinor, 0)[1]
    return f"sm_{int(major)}{int(minor)}"


class CudaPythonDevice:
    """A Device with a stream of its own."""

    def __init__(self) -> None:
        """Raises KvlatheError where there is no GPU, or no cuda-python."""
        if reason := obstacle():
            raise KvlatheError("this engine needs a GPU", reason, "run it where one is")
        self._cuda = import_module(MODULE)
        kinds = self._cuda.cudaMemcpyKind
        self._to_gpu = kinds.cudaMemcpyHostToDevice
        self._from_gpu = kinds.cudaMemcpyDeviceToHost
        self._on_gpu = kinds.cudaMemcpyDeviceToDevice
        self.call("cudaSetDevice", 0)
        self._stream = int(
            self.call("cudaStreamCreateWithFlags", self._cuda.cudaStreamNonBlocking)
        )

    @property
    def name(self) -> str:
        return "cuda:0"

    @property
    def stream(self) -> int:
        return self._stream

    def call(self, name: str, *arguments: object) -> Any:  # noqa: ANN401  what the call gives beside its status
        """A call of the CUDA runtime. Raises KvlatheError with its words where it
        fails."""
        status, *results = getattr(self._cuda, name)(*arguments)
        if int(status):
            raise KvlatheError(
                f"{name} failed on the GPU",
                self._cuda.cudaGetErrorString(status)[1].decode(),
                "look at nvidia-smi; if it is well, report this",
            )
        return results[0] if results else None

    # -- memory ------------------------------------------------------------------------
    def allocate(self, size: int, purpose: str) -> DeviceArray:
        status, address = self._cuda.cudaMalloc(max(size, 1))
        if int(status):
            raise OutOfMemory(
                f"{purpose} of {size:,} bytes does not fit",
                f"{memory_bytes()[0]:,} bytes of GPU memory are free",
                "ask for less cache",
            )
        return DeviceArray(CudaMemory(self, int(address)), 0, (size,), BYTE)

    def release(self, address: int) -> None:
        self._cuda.cudaFree(address)

    def pinned(self, size: int) -> npt.NDArray[np.uint8]:
        """It stays for as long as the process lives."""
        address = int(self.call("cudaHostAlloc", size, 0))
        array = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
        array[:] = 0
        return array

    # -- copies ------------------------------------------------------------------------
    def send(self, target: DeviceArray, source: np.ndarray) -> None:
        self._copy(target.address, source.ctypes.data, source.nbytes, self._to_gpu)

    def copy(self, target: DeviceArray, source: DeviceArray) -> None:
        self._copy(target.address, source.address, source.nbytes, self._on_gpu)

    def fetch(self, source: DeviceArray) -> np.ndarray:
        array = np.empty(source.shape, source.dtype)
        if array.nbytes:
            there, size = source.address, array.nbytes
            self._copy(array.ctypes.data, there, size, self._from_gpu)
        self.wait()
        return array

    def _copy(self, target: int, source: int, size: int, kind: object) -> None:
        self.call("cudaMemcpyAsync", target, source, size, kind, self._stream)

    # -- order -------------------------------------------------------------------------
    def wait(self) -> None:
        self.call("cudaStreamSynchronize", self._stream)

    def mark(self) -> Callable[[], None]:
        event = self.call("cudaEventCreateWithFlags", self._cuda.cudaEventDisableTiming)
        self.call("cudaEventRecord", event, self._stream)

        def passed() -> None:
            self.call("cudaEventSynchronize", event)
            self.call("cudaEventDestroy", event)

        return passed

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Raises KvlatheError, too, where ``work`` does what no graph can hold."""
        mode = self._cuda.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
        self.call("cudaStreamBeginCapture", self._stream, mode)
        try:
            work()
        except BaseException:
            self._cuda.cudaStreamEndCapture(self._stream)
            raise
        graph = self.call("cudaStreamEndCapture", self._stream)
        ready = self.call("cudaGraphInstantiate", graph, 0)
        self.call("cudaGraphDestroy", graph)
        return lambda: self.call("cudaGraphLaunch", ready, self._stream)


class CudaMemory:
    """Bytes on the GPU at ``address``, freed with this object."""

    def __init__(self, device: CudaPythonDevice, address: int) -> None:
        self.device, self.address = device, address

    def __del__(self) -> None:
        self.device.release(self.address)
