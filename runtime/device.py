"""GPU 0 through cuda-python (cuda.bindings.runtime): memory, one stream, copies, and CUDA graphs. No torch.

Everything is queued on the one stream, in order; only what says so waits. Memory is addresses, as the native library,
ONNX Runtime and TensorRT take it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from importlib import import_module
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from kvlathe.errors import KvlatheError

MODULE = "cuda.bindings.runtime"


def obstacle() -> str:
    """Why there is no GPU for us here; empty if there is one."""
    try:
        cuda = import_module(MODULE)
    except ImportError:
        return "cuda-python is not installed: pip install 'kvlathe[gpu]'"
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


def free_bytes() -> int:
    """Bytes of the GPU's memory that are free now."""
    return int(import_module(MODULE).cudaMemGetInfo()[1])


def architecture() -> str:
    """The GPU's compute capability, as manifests name it: sm_90."""
    cuda = import_module(MODULE)
    kind = cuda.cudaDeviceAttr
    names = (kind.cudaDevAttrComputeCapabilityMajor, kind.cudaDevAttrComputeCapabilityMinor)
    return "sm_" + "".join(str(int(cuda.cudaDeviceGetAttribute(name, 0)[1])) for name in names)


class Device:
    """The GPU and a stream of its own. ``stream``: its cudaStream_t."""

    def __init__(self) -> None:
        """Raises KvlatheError where there is no GPU, or no cuda-python."""
        if found := obstacle():
            raise KvlatheError("this engine needs a GPU", found, "run it where one is")
        self._cuda = import_module(MODULE)
        kinds = self._cuda.cudaMemcpyKind
        self._to, self._from, self._on = (
            kinds.cudaMemcpyHostToDevice,
            kinds.cudaMemcpyDeviceToHost,
            kinds.cudaMemcpyDeviceToDevice,
        )
        self.call("cudaSetDevice", 0)
        self.stream = int(self.call("cudaStreamCreateWithFlags", self._cuda.cudaStreamNonBlocking))

    def call(self, name: str, *arguments: object) -> Any:  # noqa: ANN401  what the call gives beside its status
        """A call of the CUDA runtime. Raises KvlatheError with its words where it fails."""
        status, *given = getattr(self._cuda, name)(*arguments)
        if int(status):
            words = self._cuda.cudaGetErrorString(status)[1].decode()
            raise KvlatheError(f"{name} failed on the GPU", words, "look at nvidia-smi; if it is well, report this")
        return given[0] if given else None

    # -- memory ----------------------------------------------------------------------------------------------------
    def allocate(self, size: int, purpose: str) -> Memory:
        """``size`` bytes of the GPU's memory, aligned to 256. Raises KvlatheError where there are not as many."""
        status, address = self._cuda.cudaMalloc(max(size, 1))
        if int(status):
            free = f"{free_bytes():,} bytes of GPU memory are free"
            raise KvlatheError(f"{purpose} of {size:,} bytes does not fit", free, "ask for less cache")
        return Memory(self, int(address), size)

    def release(self, address: int) -> None:
        self._cuda.cudaFree(address)

    def pinned(self, size: int) -> npt.NDArray[np.uint8]:
        """Zeroed host memory that copies need not stage, for as long as the process lives."""
        address = int(self.call("cudaHostAlloc", size, 0))
        array = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
        array[:] = 0
        return array

    # -- copies ----------------------------------------------------------------------------------------------------
    def send(self, target: int, source: npt.NDArray) -> None:
        """Queue a copy to the GPU. Pinned memory must stay what it is until then; other memory need not."""
        self.call("cudaMemcpyAsync", target, source.ctypes.data, source.nbytes, self._to, self.stream)

    def copy(self, target: int, source: int, size: int) -> None:
        """Queue a copy on the GPU."""
        self.call("cudaMemcpyAsync", target, source, size, self._on, self.stream)

    def fetch(self, source: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray:
        """An array from the GPU, once everything queued so far is done."""
        array = np.empty(shape, dtype)
        if prod(shape):
            self.call("cudaMemcpyAsync", array.ctypes.data, source, array.nbytes, self._from, self.stream)
        self.wait()
        return array

    # -- order -----------------------------------------------------------------------------------------------------
    def wait(self) -> None:
        """Until everything queued so far is done."""
        self.call("cudaStreamSynchronize", self.stream)

    def mark(self) -> Callable[[], None]:
        """A function that waits until everything queued so far is done."""
        event = self.call("cudaEventCreateWithFlags", self._cuda.cudaEventDisableTiming)
        self.call("cudaEventRecord", event, self.stream)

        def passed() -> None:
            self.call("cudaEventSynchronize", event)
            self.call("cudaEventDestroy", event)

        return passed

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """What ``work`` queues, as one CUDA graph: a function that queues it again. It is not run now.

        Raises what ``work`` raises, and KvlatheError where it does what no graph can hold.
        """
        mode = self._cuda.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
        self.call("cudaStreamBeginCapture", self.stream, mode)
        try:
            work()
        except BaseException:
            self._cuda.cudaStreamEndCapture(self.stream)
            raise
        graph = self.call("cudaStreamEndCapture", self.stream)
        ready = self.call("cudaGraphInstantiate", graph, 0)
        self.call("cudaGraphDestroy", graph)
        return lambda: self.call("cudaGraphLaunch", ready, self.stream)


class Memory:
    """Bytes on the GPU, given back with this object."""

    def __init__(self, device: Device, address: int, size: int) -> None:
        self.device, self.address, self.size = device, address, size

    def __del__(self) -> None:
        self.device.release(self.address)
