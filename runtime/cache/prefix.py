"""PrefixCache: pages that requests with the same prefix share.

A block is a page, or a whole prefill chunk where the plan seals (within a chunk a
prompt attends its own hot tokens, so only whole chunks are the same for every
continuation). Its key hashes the plan, a salt (tenants do not see each other's pages),
and every token id up to its end. The cache is one more owner of the block's pages, and
gives the least recently used ones up when the pool runs out.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np

from kvlathe.base.errors import KvlatheError
from kvlathe.runtime.cache.page_table import PageTable
from kvlathe.runtime.cache.pool import PagePool


class PrefixCache:
    """Of one pool. ``hits`` counts tokens that were not computed again.

    Raises KvlatheError where the plan's token rules forbid sharing.
    """

    def __init__(self, pool: PagePool) -> None:
        if not pool.plan.sharable:
            raise KvlatheError(
                "this engine cannot share prefixes",
                "it ranks the tokens of a prompt by what later ones attend, so equal prefixes do not stay equal",
                "load it without sharing, or build without a token rule",
            )
        self.pool, plan = pool, pool.plan
        self.seals = any(bucket.source is not None for bucket in plan.buckets)
        self.block = plan.prefill_chunk if self.seals else plan.page_tokens
        self.hits = 0
        self._seed = plan.digest.encode()
        self._kept = [
            not plan.cold(b) for b in range(len(plan.buckets))
        ]  # buckets whose pages stay
        self._blocks: OrderedDict[bytes, list[list[int]]] = OrderedDict()
        pool.reclaim = self.reclaim

    def find(self, tokens: Sequence[int], salt: bytes = b"") -> tuple[PageTable, int]:
        """A table over the longest known prefix of ``tokens`` but the last, and how
        many tokens that is."""
        table, cached = self.pool.open(), 0
        for key in self._keys(tokens[:-1], salt):
            if key not in self._blocks:
                break
            self._blocks.move_to_end(key)
            for ids, block in zip(table.pages, self._blocks[key], strict=True):
                ids += block
            cached += self.block
        self.pool.share(table.pages)
        table.lengths = [cached if kept else 0 for kept in self._kept]
        table.arrived = [
            cached if bucket.source is None else 0 for bucket in self.pool.plan.buckets
        ]
        self.hits += cached
        return table, cached

    def add(self, table: PageTable, tokens: Sequence[int], salt: bytes = b"") -> None:
        """Remember the whole blocks of ``tokens``, whose pages ``table`` holds."""
        pages = self.block // self.pool.plan.page_tokens
        for i, key in enumerate(self._keys(tokens, salt)):
            if key not in self._blocks:
                at = slice(i * pages, (i + 1) * pages)
                block = [
                    ids[at] if kept else []
                    for ids, kept in zip(table.pages, self._kept, strict=True)
                ]
                self.pool.share(block)
                self._blocks[key] = block
            self._blocks.move_to_end(key)

    def reclaim(self) -> bool:
        """Give up the least recently used block. False if there is none."""
        if not self._blocks:
            return False
        self.pool.drop(self._blocks.popitem(last=False)[1])
        return True

    def _keys(self, tokens: Sequence[int], salt: bytes) -> Iterator[bytes]:
        """One key for each whole block, chained, so that it stands for every token up
        to the block's end."""
        ids = np.asarray(tokens, np.int32)
        salted = hashlib.sha256(salt).digest()
        key = hashlib.sha256(self._seed + salted).digest()
        for end in range(self.block, len(ids) + 1, self.block):
            block = ids[end - self.block : end].tobytes()
            key = hashlib.sha256(key + block).digest()
            yield key
