"""vLLM's blocks of a layer and the hot pages beside them, as one pool of the library.

A call of the library has one pool, and page id i of a bucket is at start + i * stride. The
blocks are vLLM's memory and the hot pages ours. So the pool spans both, from the lower to
the higher; nothing that lies between is touched. Hot pages begin where the strides fit.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from kvlathe.base.errors import KvlatheError

MOST_ID = (1 << 31) - 1


class Span:
    """``start`` and ``bytes`` of the pool; ids of block 0 and of hot page 0."""

    def __init__(self, cache: Tensor, hot_bytes: int, hot_pages: int) -> None:
        """``cache``: uint8 [blocks, ...]. ``hot_bytes`` of each of ``hot_pages``; 0: none.
        Raises KvlatheError where ids would not fit 32 bits."""
        self.cache = cache
        self.block_stride = cache.stride(0)
        self.hot_bytes = hot_bytes
        self.blocks = cache.data_ptr()
        self.hot = self.blocks
        if hot_bytes:
            self._place(hot_pages)
        self.start = min(self.blocks, self.hot)
        blocks_end = self.block_page(len(cache))
        hot_end = self.hot_page(hot_pages)
        end = max(blocks_end, hot_end)
        self.bytes = end - self.start
        self.first_block = (self.blocks - self.start) // self.block_stride
        self.first_hot = (self.hot - self.start) // hot_bytes if hot_bytes else 0
        last_block = self.first_block + len(cache)
        last_hot = self.first_hot + hot_pages
        if max(last_block, last_hot) > MOST_ID:
            raise KvlatheError(
                "blocks and hot pages lie too far apart",
                f"pages among {self.bytes:,} bytes have numbers of more than 32 bits",
                "report this",
            )

    def _place(self, hot_pages: int) -> None:
        """Hot pages at a whole number of steps from the blocks."""
        size = hot_pages * self.hot_bytes
        spare = max(self.block_stride, self.hot_bytes)
        self._room = _near(self.cache, size + spare)
        first = self._room.data_ptr()
        step = self.block_stride
        if first > self.blocks:
            step = self.hot_bytes
        self.hot = first + (self.blocks - first) % step

    def block_page(self, block: int) -> int:
        return self.blocks + block * self.block_stride

    def hot_page(self, page: int) -> int:
        return self.hot + page * self.hot_bytes


def _near(cache: Tensor, size: int) -> Tensor:
    """Bytes not far from ``cache``. On a CPU allocators have two regions, which lie tens of
    terabytes apart: whichever is closer is taken."""
    room = torch.empty(size, dtype=torch.uint8, device=cache.device)
    if cache.device.type != "cpu":
        return room
    memory = mmap.mmap(-1, size)
    mapped = torch.frombuffer(memory, dtype=torch.uint8)
    here = cache.data_ptr()
    from_room = abs(room.data_ptr() - here)
    from_mapped = abs(mapped.data_ptr() - here)
    if from_room < from_mapped:
        return room
    return mapped
