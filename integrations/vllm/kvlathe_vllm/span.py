"""vLLM's blocks of a layer and the hot pages beside them, as one pool of the library.

A call of the library has one pool, and page id i of a bucket is at start + i * stride.
The blocks are vLLM's memory and the hot pages ours. So the pool spans all, from the
lowest to the highest; nothing that lies between is touched. It begins a whole number of
blocks before vLLM's first one, and hot pages a whole number of hot pages behind that.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from kvlathe.base.errors import KvlatheError

MOST_ID = (1 << 31) - 1
_passing: list[Tensor] = []
"""Memory of passing pages: layers run one after the other, and all use it. Where blocks
of layers lie far apart, there are several."""


class Span:
    """``start`` and ``bytes`` of the pool, and page ids in it."""

    def __init__(
        self, cache: Tensor, hot_bytes: int, hot_pages: int, passing: int
    ) -> None:
        """``cache``: uint8 [blocks, ...]. ``hot_bytes`` of each of ``hot_pages`` and of
        those that are passing; 0: none. Raises KvlatheError where ids would not fit 32
        bits."""
        self.cache = cache
        self.block_stride = cache.stride(0)
        self.hot_bytes = hot_bytes
        self.hot_pages = hot_pages
        self.blocks = blocks = cache.data_ptr()
        rooms: list[Tensor] = []
        if hot_bytes:
            own = _near(cache, (hot_pages + 1) * hot_bytes)
            rooms = [own, _shared(cache, (passing + 1) * hot_bytes, hot_bytes)]
        lowest = min([blocks, *(room.data_ptr() for room in rooms)])
        self.first_block = -((lowest - blocks) // self.block_stride)
        self.start = blocks - self.first_block * self.block_stride
        last = self.first_block + len(cache)
        end = blocks + len(cache) * self.block_stride
        self._hot = [self._aligned(room) for room in rooms]
        self._first: list[int] = []
        """Ids of the first lasting and the first passing page."""
        for pages in self._hot:
            first = (pages.data_ptr() - self.start) // hot_bytes
            self._first.append(first)
            last = max(last, first + len(pages))
            end = max(end, pages.data_ptr() + pages.numel())
        self.bytes = end - self.start
        if last > MOST_ID:
            raise KvlatheError(
                "blocks and hot pages lie too far apart",
                f"pages among {self.bytes:,} bytes have numbers of more than 32 bits",
                "report this",
            )

    def _aligned(self, room: Tensor) -> Tensor:
        """[pages, hot_bytes]: those of a room that are whole steps from the start."""
        first = (self.start - room.data_ptr()) % self.hot_bytes
        count = (len(room) - first) // self.hot_bytes
        return room[first : first + count * self.hot_bytes].view(count, -1)

    def block_page(self, block: int) -> int:
        """Its address."""
        return self.start + (self.first_block + block) * self.block_stride

    @property
    def offsets(self) -> tuple[int, int]:
        """Differences of ids and numbers of lasting, and of passing pages."""
        if not self._first:
            return 0, 0
        lasting, passing = self._first
        return lasting, passing - self.hot_pages

    def hot_id(self, page: int) -> int:
        """The id of a hot page, lasting or passing."""
        return page + self.offsets[page >= self.hot_pages]

    def hot_page(self, page: int) -> int:
        """Its address."""
        return self.start + self.hot_id(page) * self.hot_bytes

    def keep(self, passing: int, page: int) -> None:
        """The bytes of a passing page go to a lasting one."""
        lasting, others = self._hot
        lasting[page].copy_(others[passing - self.hot_pages])


def _shared(cache: Tensor, size: int, hot_bytes: int) -> Tensor:
    """Passing pages of every layer; the first layers may have asked for fewer bytes."""
    reach = MOST_ID // 2 * hot_bytes
    for room in _passing:
        distance = abs(room.data_ptr() - cache.data_ptr())
        if room.device == cache.device and len(room) >= size and distance < reach:
            return room
    room = _near(cache, size)
    _passing.append(room)
    return room


def _near(cache: Tensor, size: int) -> Tensor:
    """Bytes not far from ``cache``. On a CPU allocators have two regions, which lie
    tens of terabytes apart: whichever is closer is taken."""
    room = torch.empty(size, dtype=torch.uint8, device=cache.device)
    if cache.device.type != "cpu":
        return room
    mapped = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    here = cache.data_ptr()
    if abs(room.data_ptr() - here) < abs(mapped.data_ptr() - here):
        return room
    return mapped
