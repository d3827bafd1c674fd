"""One GPU as a session needs it: memory, copies, and work in order on one stream.

Two implementations: cuda_python.py, for engines that need no torch, and
runtime/sessions/torch_cuda/device.py, for the backend that is torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Protocol

import numpy as np
import numpy.typing as npt

INT32, HALF, FLOAT, BYTE = (
    np.dtype(kind) for kind in (np.int32, np.float16, np.float32, np.uint8)
)


class Memory(Protocol):
    """Bytes of a device, given back when this object goes."""

    @property
    def address(self) -> int: ...


@dataclass(frozen=True)
class DeviceArray:
    """An array in a device's memory, ``offset`` bytes after its start."""

    memory: Memory
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def address(self) -> int:
        return self.memory.address + self.offset

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def view(self, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> DeviceArray:
        """Part of the same memory, ``offset`` bytes after this array's start."""
        return DeviceArray(self.memory, self.offset + offset, shape, dtype)


class Device(Protocol):
    """A GPU. Calls only queue work, in order; those that wait say so."""

    @property
    def name(self) -> str:
        """As Region.device."""
        ...

    @property
    def stream(self) -> int:
        """The cudaStream_t on which work is queued now."""
        ...

    def allocate(self, size: int, purpose: str) -> DeviceArray:
        """``size`` bytes, aligned to 256. Raises OutOfMemory where they do not fit."""
        ...

    def pinned(self, size: int) -> npt.NDArray[np.uint8]:
        """Zeroed host memory that copies need not stage."""
        ...

    def send(self, target: DeviceArray, source: np.ndarray) -> None:
        """Copy to the start of ``target``. Pinned memory must stay what it is until
        then; other memory need not."""
        ...

    def copy(self, target: DeviceArray, source: DeviceArray) -> None:
        """Copy on the device; the arrays are of one size."""
        ...

    def fetch(self, source: DeviceArray) -> np.ndarray:
        """A copy in host memory. Waits for it."""
        ...

    def wait(self) -> None:
        """Wait until everything queued so far is done."""
        ...

    def mark(self) -> Callable[[], None]:
        """A function that waits, in any thread, until everything queued so far is
        done."""
        ...

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture what ``work`` queues as one CUDA graph: a function that queues it
        again.

        ``work`` is not run now. Raises what it raises.
        """
        ...
