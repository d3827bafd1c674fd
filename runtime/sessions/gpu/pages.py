"""DevicePages: what a session on a GPU does to whole pages between steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.native.cuda import CudaLibrary, PageKernels
from kvlathe.runtime.native.room import check_room
from kvlathe.runtime.sessions.gpu.device import BYTE, Device, DeviceArray
from kvlathe.runtime.sessions.page_moves import FullPage, PageMoves
from kvlathe.runtime.sessions.protocols import Capability, PageMover, Region


def allocate_pool(
    device: Device, library: CudaLibrary, plan: CompressionPlan, size: int
) -> DeviceArray:
    """Memory for the pages of a plan: ``size`` bytes at most.

    Raises KvlatheError where the GPU lacks this memory, or the shared memory to attend
    such pages.
    """
    check_room(library, plan)
    return device.allocate(size // 128 * 128, "a cache")


class DevicePages(PageMover):
    """The pages of a plan in ``pool``, sealed by the native library."""

    capabilities: frozenset[Capability] = frozenset({"pool_memory"})

    def __init__(
        self,
        device: Device,
        library: CudaLibrary,
        plan: CompressionPlan,
        pool: DeviceArray,
    ) -> None:
        self.device = device
        self.plan = plan
        self.pool = pool
        self.strides = CacheLayout(plan).page_stride
        self._kernels = PageKernels(library, plan, pool.address, pool.nbytes)

    @property
    def region(self) -> Region:
        """As Session.region."""
        return Region(self.pool.address, self.pool.nbytes, self.device.name)

    def mark(self) -> Callable[[], None]:
        """As Session.mark."""
        return self.device.mark()

    def apply(self, moves: Sequence[PageMoves]) -> None:
        """As Session.apply, of moves of whole pages."""
        for one in moves:
            for copy in one.copies:
                self.copy_page(copy.bucket, copy.source, copy.target)
        self.seal([full for one in moves for full in one.seals])

    def seal(self, pages: Sequence[FullPage]) -> None:
        """Quantize each page into one page of each of its cold buckets: one call of the
        library for each pair of buckets. A shard may have no lanes of some."""
        jobs: defaultdict[tuple[int, int], list[tuple[int, int, int]]]
        jobs = defaultdict(list)
        for full in pages:
            cold = self.plan.index.buckets[full.fresh].cold
            for bucket, target in zip(cold, full.cold_pages, strict=True):
                job = (full.page, target, full.position)
                if self.plan.index.buckets[bucket].lanes:
                    jobs[full.fresh, bucket].append(job)
        for (fresh, bucket), of_pair in jobs.items():
            self._kernels.seal(fresh, bucket, of_pair, self.device.stream)

    def copy_page(self, bucket: int, source: int, target: int) -> None:
        self.device.copy(self._page(bucket, target), self._page(bucket, source))

    def read_page(self, bucket: int, page: int) -> bytes:
        return self.device.fetch(self._page(bucket, page)).tobytes()

    def write_page(self, bucket: int, page: int, data: bytes) -> None:
        self.device.send(self._page(bucket, page), np.frombuffer(data, BYTE))

    def _page(self, bucket: int, page: int) -> DeviceArray:
        stride = self.strides[bucket]
        return self.pool.view(page * stride, (stride,), BYTE)
