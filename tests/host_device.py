"""What sessions on a GPU take, in host memory: a device, and the native library's CUDA calls by its CPU calls."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, byref, c_int64, c_void_p
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvlathe.errors import KvlatheError
from kvlathe.runtime import native
from kvlathe.runtime.cuda_abi import AttendDecodeArgs, SealArgs
from kvlathe.runtime.native import ABI_VERSION, Native, Status


class HostDevice:
    """runtime.device.Device, where nothing is asynchronous. ``captures`` counts what became a graph."""

    stream = 0

    def __init__(self) -> None:
        self.captures = 0

    def allocate(self, size: int, purpose: str) -> SimpleNamespace:
        kept = np.full(size + 256, 255, np.uint8)  # as dirty as the GPU's
        return SimpleNamespace(address=kept.ctypes.data + -kept.ctypes.data % 256, size=size, kept=kept)

    def pinned(self, size: int) -> npt.NDArray[np.uint8]:
        return np.zeros(size, np.uint8)

    def send(self, target: int, source: npt.NDArray) -> None:
        ctypes.memmove(target, source.ctypes.data, source.nbytes)

    def copy(self, target: int, source: int, size: int) -> None:
        ctypes.memmove(target, source, size)

    def fetch(self, source: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray:
        array = np.empty(shape, dtype)
        ctypes.memmove(array.ctypes.data, source, prod(shape) * array.itemsize)
        return array

    def wait(self) -> None: ...

    def mark(self) -> Callable[[], None]:
        return lambda: None

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """What is queued in a capture does not run: here it is left out."""
        self.captures += 1
        return work


class HostLibrary:
    """runtime.cuda_abi.CudaLibrary for pages in host memory."""

    def __init__(self, library: Native) -> None:
        self.path, self.lib = library.path, library.lib
        self.lib.kvlathe_layer_create.argtypes = [c_void_p, c_int64, POINTER(c_void_p), POINTER(Status)]
        self.lib.kvlathe_layer_destroy.argtypes, self.lib.kvlathe_layer_destroy.restype = [c_void_p], None
        self.lib.kvlathe_cpu_attend_decode.argtypes = [POINTER(AttendDecodeArgs), POINTER(Status)]

    def call(self, name: str, *given: Any) -> None:  # noqa: ANN401  arguments, or one byref of them
        calls = {"layer_create": "kvlathe_layer_create", "cuda_attend_decode": "kvlathe_cpu_attend_decode"}
        if name == "cuda_seal":
            self._seal(given[0]._obj)
        elif getattr(self.lib, calls[name])(*given, byref(status := Status())):
            raise KvlatheError(name, status.message.decode())

    def _seal(self, args: SealArgs) -> None:
        status = Status()
        source, target = args.source.contents, args.target.contents
        for page in (args.pages[i] for i in range(args.page_count)):
            pages = (args.pool + page.source * source.page_stride, args.pool + page.target * target.page_stride)
            places = (np.arange(args.page_tokens) + page.position).astype(np.uint32)
            sealed = native.SealArgs(ABI_VERSION, args.page_tokens, 0, 1, args.source, args.target, *pages)
            sealed.span_k, sealed.span_v, sealed.stochastic, sealed.seed = (
                args.span_k,
                args.span_v,
                args.stochastic,
                args.seed,
            )
            sealed.positions, sealed.positions_stride = places.ctypes.data, 0
            if self.lib.kvlathe_cpu_seal(byref(sealed), byref(status)):
                raise KvlatheError("cuda_seal", status.message.decode())
