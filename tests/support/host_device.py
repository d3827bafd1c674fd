"""Stand-ins for what sessions on a GPU take, in host memory: a device, and the native
library's CUDA calls by its CPU calls."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from ctypes import POINTER, byref, c_int64, c_void_p
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvlathe.base.errors import KvlatheError
from kvlathe.runtime.native import cpu
from kvlathe.runtime.native.cuda import (
    AttendDecodeArgs,
    CudaLibrary,
    SealArgs,
    SealPage,
)
from kvlathe.runtime.native.library import ABI_VERSION, Native, Status
from kvlathe.runtime.sessions.gpu.device import BYTE, DeviceArray
from kvlathe.runtime.sessions.torch_cuda.device import array_of


class HostMemory:
    """Bytes in host memory, aligned as a GPU's are, and as dirty."""

    def __init__(self, size: int) -> None:
        self._bytes = np.full(size + 256, 255, np.uint8)
        self.address = self._bytes.ctypes.data + -self._bytes.ctypes.data % 256


class HostDevice:
    """A Device where nothing is asynchronous. ``captures`` counts what became a
    graph."""

    stream = 0
    name = "cpu"

    def __init__(self) -> None:
        self.captures = 0

    def allocate(self, size: int, purpose: str) -> DeviceArray:
        return DeviceArray(HostMemory(size), 0, (size,), BYTE)

    def pinned(self, size: int) -> npt.NDArray[np.uint8]:
        return np.zeros(size, np.uint8)

    def send(self, target: DeviceArray, source: npt.NDArray) -> None:
        ctypes.memmove(target.address, source.ctypes.data, source.nbytes)

    def copy(self, target: DeviceArray, source: DeviceArray) -> None:
        ctypes.memmove(target.address, source.address, source.nbytes)

    def fetch(self, source: DeviceArray) -> npt.NDArray:
        array = np.empty(source.shape, source.dtype)
        ctypes.memmove(array.ctypes.data, source.address, array.nbytes)
        return array

    def wait(self) -> None: ...

    def mark(self) -> Callable[[], None]:
        return lambda: None

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Leave ``work`` out: what is queued in a capture does not run. Nothing may be
        freed meanwhile: a graph of another engine would end it."""
        assert not gc.isenabled()
        self.captures += 1
        return work


class HostTorchDevice(HostDevice):
    """The same with memory of torch, as TorchCompute reads it."""

    def allocate(self, size: int, purpose: str) -> DeviceArray:
        memory = torch.full((size + 256,), 255, dtype=torch.uint8)
        start = -memory.data_ptr() % 256
        return array_of(memory[start : start + size])


class HostLibrary(CudaLibrary):
    """For pages in host memory. ``sealed``: pages of each call of seal."""

    def __init__(self, library: Native) -> None:
        self.sealed: list[int] = []
        self.path, self.lib = library.path, library.lib
        self.lib.kvlathe_cpu_seal.argtypes = [POINTER(cpu.SealArgs), POINTER(Status)]
        self.lib.kvlathe_layer_create.argtypes = [
            c_void_p,
            c_int64,
            POINTER(c_void_p),
            POINTER(Status),
        ]
        (
            self.lib.kvlathe_layer_destroy.argtypes,
            self.lib.kvlathe_layer_destroy.restype,
        ) = [c_void_p], None
        self.lib.kvlathe_cpu_attend_decode.argtypes = [
            POINTER(AttendDecodeArgs),
            POINTER(Status),
        ]

    def call(self, name: str, *given: Any) -> None:  # noqa: ANN401  arguments, or one byref of them
        calls = {
            "layer_create": "kvlathe_layer_create",
            "cuda_attend_decode": "kvlathe_cpu_attend_decode",
        }
        if name == "cuda_seal":
            self._seal(given[0]._obj)
        elif name == "cuda_seal_listed":
            self._seal_listed(given[0]._obj)
        elif getattr(self.lib, calls[name])(*given, byref(status := Status())):
            raise KvlatheError(name, status.message.decode())

    def _seal_listed(self, args: SealArgs) -> None:
        """Seal the pages of a list where some are none."""
        listed = [args.pages[i] for i in range(args.page_count)]
        taken = [page for page in listed if page.source >= 0]
        own = SealArgs.from_buffer_copy(args)
        own.pages = (SealPage * len(taken))(*taken)
        own.page_count = len(taken)
        if taken:
            self._seal(own)

    def _seal(self, args: SealArgs) -> None:
        status = Status()
        self.sealed.append(args.page_count)
        source, target = args.source.contents, args.target.contents
        count = args.page_count
        tokens = np.arange(args.page_tokens)
        places = [
            (tokens + args.pages[i].position).astype(np.uint32) for i in range(count)
        ]
        pages = (cpu.SealPage * count)()
        for i, place in enumerate(places):
            pages[i].source = args.pool + args.pages[i].source * source.page_stride
            pages[i].target = args.pool + args.pages[i].target * target.page_stride
            pages[i].positions = place.ctypes.data
        sealed = cpu.SealArgs(
            ABI_VERSION, args.page_tokens, 0, 1, args.source, args.target, pages, count
        )
        sealed.span_k = args.span_k
        sealed.span_v = args.span_v
        sealed.stochastic = args.stochastic
        sealed.seed = args.seed
        if self.lib.kvlathe_cpu_seal(byref(sealed), byref(status)):
            raise KvlatheError("cuda_seal", status.message.decode())
