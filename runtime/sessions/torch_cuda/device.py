"""GPU 0 through torch: its memory, its current stream, its CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvlathe.base.errors import KvlatheError
from kvlathe.base.memory import OutOfMemory
from kvlathe.runtime.sessions.gpu.device import (
    BYTE,
    FLOAT,
    HALF,
    INT32,
    DeviceArray,
)

TYPES = {
    BYTE: torch.uint8,
    INT32: torch.int32,
    HALF: torch.float16,
    FLOAT: torch.float32,
}


def memory_bytes() -> tuple[int, int]:
    """Bytes of GPU memory that are free now, and all. Raises KvlatheError where torch
    sees no GPU."""
    require_gpu()
    return torch.cuda.mem_get_info()


def current_stream() -> int:
    """The cudaStream_t on which torch queues work now."""
    return torch.cuda.current_stream().cuda_stream


def require_gpu() -> None:
    if not torch.cuda.is_available():
        raise KvlatheError(
            "the cuda backend needs a GPU",
            f"torch {torch.__version__} sees none",
            "run it where one is",
        )


class TorchMemory:
    """A tensor of bytes as Memory."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.address = tensor.data_ptr()


def array_of(tensor: Tensor) -> DeviceArray:
    """A tensor of bytes as an array of a device."""
    return DeviceArray(TorchMemory(tensor), 0, (tensor.numel(),), BYTE)


def tensor_of(array: DeviceArray) -> Tensor:
    """An array of a device as a tensor of the same memory."""
    flat = bytes_of(array).view(TYPES[array.dtype])
    return flat.view(array.shape)


def bytes_of(array: DeviceArray) -> Tensor:
    assert isinstance(array.memory, TorchMemory)
    return array.memory.tensor[array.offset : array.offset + array.nbytes]


def int64_on(numbers: Sequence[int] | np.ndarray, device: torch.device) -> Tensor:
    """Numbers of the host as int64 on a device, as ``tensor_on``."""
    return tensor_on(np.ascontiguousarray(numbers, np.int64), device)


def tensor_on(array: np.ndarray, device: torch.device) -> Tensor:
    """A contiguous array of the host on a device. Nothing waits: a GPU reads it from
    pinned memory."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class TorchDevice:
    """A Device on torch's current stream."""

    def __init__(self) -> None:
        """Raises KvlatheError where torch sees no GPU."""
        require_gpu()
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()

    @property
    def name(self) -> str:
        return f"cuda:{torch.cuda.current_device()}"

    @property
    def stream(self) -> int:
        return current_stream()

    # -- memory ------------------------------------------------------------------------
    def allocate(self, size: int, purpose: str) -> DeviceArray:
        try:
            return array_of(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.cuda.OutOfMemoryError as error:
            raise OutOfMemory(
                f"{purpose} of {size:,} bytes does not fit",
                f"{memory_bytes()[0]:,} bytes of GPU memory are free",
                "ask for less cache",
            ) from error

    def pinned(self, size: int) -> npt.NDArray[np.uint8]:
        return torch.zeros(size, dtype=torch.uint8, pin_memory=True).numpy()

    # -- copies ------------------------------------------------------------------------
    def send(self, target: DeviceArray, source: np.ndarray) -> None:
        data = source.reshape(-1).view(np.uint8)
        if not data.flags.writeable:  # torch takes no such memory
            data = data.copy()
        start = target.view(0, data.shape, BYTE)
        bytes_of(start).copy_(torch.from_numpy(data), non_blocking=True)

    def copy(self, target: DeviceArray, source: DeviceArray) -> None:
        bytes_of(target).copy_(bytes_of(source))

    def fetch(self, source: DeviceArray) -> np.ndarray:
        """Waits for nothing where the array is empty."""
        return tensor_of(source).cpu().numpy()

    # -- order -------------------------------------------------------------------------
    def wait(self) -> None:
        torch.cuda.current_stream().synchronize()

    def mark(self) -> Callable[[], None]:
        event = torch.cuda.Event()
        event.record()
        return event.synchronize

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """As Device.capture. Graphs share memory. torch lets go of it with the last of
        them, and refuses to capture there again: the next one takes its own. What other
        threads do meanwhile, as free a graph, ends no capture."""
        other = next(iter(self._graphs), None)  # has the memory until this one does
        graph = torch.cuda.CUDAGraph()
        pool = None if other is None else other.pool()
        with torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
            work()
        self._graphs.add(graph)
        return graph.replay
