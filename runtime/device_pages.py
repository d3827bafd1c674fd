"""DevicePages: what a Session on a GPU does to whole pages between steps, whatever holds their memory."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvlathe.export.layout import CacheLayout
from kvlathe.export.plan import CompressionPlan
from kvlathe.runtime.cuda_abi import CudaLibrary, PageKernels, check_room
from kvlathe.runtime.session import Int32


class PoolMemory(Protocol):
    """The pool: ``size`` bytes at ``address`` on the GPU. Places are bytes from its start; calls are queued in order on
    ``stream`` (a cudaStream_t), and ``read`` waits."""

    address: int
    size: int

    @property
    def stream(self) -> int: ...

    def copy(self, target: int, source: int, size: int) -> None: ...

    def read(self, place: int, size: int) -> bytes: ...

    def write(self, place: int, data: bytes) -> None: ...

    def lend(self, array: npt.NDArray) -> tuple[int, object]:
        """The address of a copy on the GPU, and what keeps it until all that is queued so far is done."""
        ...


class DevicePages:
    """The pages of a plan in ``memory``, sealed and compacted by the native library."""

    def __init__(self, library: CudaLibrary, plan: CompressionPlan, memory: PoolMemory) -> None:
        """Raises KvlatheError where the GPU has no room for what attending these pages takes."""
        check_room(library, plan)
        self.plan, self.memory = plan, memory
        self.strides = CacheLayout(plan).page_stride
        self.pages = PageKernels(library, plan, memory.address, memory.size)

    def seal(self, fresh: int, page: int, cold_pages: tuple[int, ...], position: int) -> None:
        """Write full page ``page`` into one page of each cold bucket of ``fresh``, in that bucket's number format."""
        for bucket, target in zip(self.plan.cold(fresh), cold_pages, strict=True):
            self.pages.seal(fresh, bucket, [(page, target, position)], self.memory.stream)

    def evict(self, bucket: int, pages: Int32, keep: npt.NDArray[np.int64]) -> None:
        """Compact a sequence's lanes: ``keep`` [lanes of the bucket, n] are the kept token places, ascending."""
        (places, kept), (ids, held) = self.memory.lend(keep), self.memory.lend(pages)
        self.pages.evict(bucket, ids, places, keep.shape[1], self.memory.stream)
        del kept, held  # only now

    def copy_page(self, bucket: int, source: int, target: int) -> None:
        stride = self.strides[bucket]
        self.memory.copy(target * stride, source * stride, stride)

    def read_page(self, bucket: int, page: int) -> bytes:
        return self.memory.read(page * self.strides[bucket], self.strides[bucket])

    def write_page(self, bucket: int, page: int, data: bytes) -> None:
        self.memory.write(page * self.strides[bucket], data)
