"""PageSums: the sums of pages (kvlathe/plan/page_digest.py), made where they lie. Of
1 GiB of pages 2 MiB go to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from kvlathe.plan.page_digest import ROW_WORDS, WEIGHTS
from kvlathe.runtime.sessions.protocols import Int64
from kvlathe.runtime.sessions.torch_cuda.device import int64_on
from kvlathe.runtime.sessions.torch_cuda.sampling.sampling import to_host

BATCH = 1 << 22
"""Bytes of pages that are summed at once, a page at least. They are gathered, and their
products take twice as much memory: nobody counts it, so it is little."""


class PageSums:
    """Sums of pages in ``pool``, bytes of a GPU."""

    def __init__(self, pool: Tensor, batch: int = BATCH) -> None:
        self._pool, self._batch = pool, batch

    @cached_property
    def _weights(self) -> Tensor:
        return int64_on(WEIGHTS, self._pool.device)

    @torch.inference_mode()
    def of(self, stride: int, pages: Sequence[int]) -> Callable[[], Int64]:
        """Queue the sums of pages of ``stride`` bytes, in order on the current stream: a
        function that waits for them, [pages, rows]."""
        if not pages:
            return _nothing
        count = self._pool.numel() // stride
        table = self._pool[: count * stride].view(torch.int32)
        table = table.view(count, -1)
        ids = int64_on(pages, table.device)
        at_once = max(1, self._batch // stride)
        parts: list[Tensor] = []
        for some in ids.split(at_once):
            words = table[some]
            parts.append(self._sums(words))
        arrived = to_host(torch.cat(parts))
        return lambda: arrived().view(np.int64)

    def _sums(self, pages: Tensor) -> Tensor:
        """[pages, rows] of words [pages, n]."""
        width = pages.shape[1]
        left = width % ROW_WORDS
        whole, rest = pages.split([width - left, left], 1)
        products = whole.unflatten(1, (-1, ROW_WORDS)) * self._weights
        sums = products.sum(2)
        if not left:
            return sums
        products = rest * self._weights[:left]
        last = products.sum(1, keepdim=True)
        return torch.cat([sums, last], 1)


def _nothing() -> Int64:
    return np.zeros((0, 0), np.int64)
