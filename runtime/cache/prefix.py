"""PrefixCache: pages that requests with the same prefix share.

A block is a page, or a whole prefill chunk where the plan seals (within a chunk a
prompt attends its own hot tokens, so only whole chunks are the same for every
continuation). Its key hashes the plan, a salt (tenants do not see each other's pages),
and every token id up to its end. The cache is one more owner of the block's pages, and
gives the least recently used ones up when the pool runs out.

Where layers keep a state, only a sequence that is there has the state at a block's end:
blocks are whole prefill chunks, too, and those that have it end a match. So many states
are kept as the cache is given room for; the least recently used go first.

Of a bucket whose pages leave, a block has those that a sequence holds which ends there
(Life.shared): its first ones and the newest before its end. Only a sequence that was
just there can give them, so blocks are whole prefill chunks and the scheduler remembers
a prompt before each of its chunks. A block without those pages does not end a match.

A block that is given up goes to a store, where there is one, and comes back from there
when a prompt begins with it (block_store.py).

A compacted prefix stands in place of the blocks that it covers. Blocks after it were
computed with it, so their keys begin with its own.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from operator import add
from typing import Protocol

import numpy as np

from kvlathe.base.errors import KvlatheError
from kvlathe.runtime.cache.arena import OutOfPages
from kvlathe.runtime.cache.block_store import BlockStores
from kvlathe.runtime.cache.page_table import Block, CompactedPrefix, Pages, PageTable
from kvlathe.runtime.cache.pool import PagePool


class BlockObserver(Protocol):
    """Told which blocks are kept, in the engine's thread. It must not block or
    raise."""

    def stored(
        self, key: bytes, before: bytes | None, tokens: Sequence[int], salt: bytes
    ) -> None:
        """A block of ``tokens``, after the block ``before``, of the tenant ``salt``."""
        ...

    def removed(self, key: bytes) -> None: ...


class PrefixCache:
    """The cache of prefixes in one pool. ``hits`` counts tokens that were not computed
    again. ``most_states``: blocks whose state is kept, where layers keep one.

    Raises KvlatheError where the plan's lives forbid sharing.
    """

    def __init__(self, pool: PagePool, most_states: int = 16) -> None:
        if not pool.plan.index.sharable:
            raise KvlatheError(
                "this engine cannot share prefixes",
                "it ranks the tokens of a prompt by what later ones attend, so equal prefixes do not stay equal",
                "load it without sharing, or build with a compression that ranks no tokens",
            )
        self.pool, plan = pool, pool.plan
        self.seals = plan.index.seals
        self._with_states = any(plan.model.states)
        self._most_states = most_states
        self.drops = plan.index.drops or self._with_states
        coarse = self.seals or self.drops
        self.block = plan.prefill_chunk if coarse else plan.page_tokens
        self.hits = 0
        self.stores: BlockStores | None = None
        self.observer: BlockObserver | None = None
        self._seed = plan.digest.encode()
        self._leaving = [one.number for one in plan.index.buckets if one.leaves]
        self._kept = [b not in self._leaving for b in range(len(pool.strides))]
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()
        self._compacted: list[CompactedPrefix] = []  # the last used one last
        pool.reclaim = self.reclaim

    def find(self, tokens: Sequence[int], salt: bytes = b"") -> tuple[PageTable, int]:
        """A table over the longest known prefix of ``tokens`` but the last, and how
        many tokens that is. A compacted prefix goes before whole blocks."""
        table, cached = self.longest(tokens[:-1], salt)
        self.hits += cached
        return table, cached

    def longest(
        self, tokens: Sequence[int], salt: bytes = b""
    ) -> tuple[PageTable, int]:
        """A table over the longest known prefix of ``tokens``, and how many tokens
        that is."""
        base = self.compacted(tokens, salt)
        chain = self._match(tokens, salt, base)
        held: list[Pages] = []  # until the table has them: room is made meanwhile
        try:
            if base is not None:
                self._hold(base.pages, held)
            start = base.cached if base is not None else 0
            return self.table(base, self._present(chain, held, start))
        finally:
            for pages in held:
                self.pool.drop(pages)

    def _hold(self, pages: Pages, held: list[Pages]) -> None:
        own = [list(ids) for ids in pages]
        self.pool.share(own)
        held.append(own)

    def table(
        self, base: CompactedPrefix | None, blocks: Sequence[Block] = ()
    ) -> tuple[PageTable, int]:
        """A table over ``base`` and the ``blocks`` after it, one more owner of their
        pages; and how many tokens that is."""
        table = self.pool.open()
        after = self.block * len(blocks)
        cached = after
        held = self.pool.layout.all_held(after)
        if base is not None:
            cached += base.cached
            table.base = base
            table.pages = [list(ids) for ids in base.pages]
            held = list(map(add, held, base.lengths))
        table.lengths = held
        for block in blocks:
            for ids, own in zip(table.pages, block.pages, strict=True):
                ids += own
        if blocks:
            table.state = blocks[-1].state
            for b in self._leaving:
                table.pages[b] = list(blocks[-1].pages[b])
        self.pool.share(table.pages)
        table.arrived = [
            cached if bucket.is_hot else 0 for bucket in self.pool.plan.index.buckets
        ]
        return table, cached

    def compacted(
        self, tokens: Sequence[int], salt: bytes = b""
    ) -> CompactedPrefix | None:
        """The longest compacted prefix of ``tokens``; it is the last used one then."""
        ids = np.asarray(tokens, np.int32).tobytes()
        longest: CompactedPrefix | None = None
        for one in self._compacted:
            if one.salt != salt or not ids.startswith(one.ids):
                continue
            if longest is None or one.cached > longest.cached:
                longest = one
        if longest is None:
            return None
        self._compacted.remove(longest)
        self._compacted.append(longest)
        return longest

    def keep(
        self, tokens: Sequence[int], salt: bytes, share: float, table: PageTable
    ) -> None:
        """Remember ``tokens`` as a compacted prefix: of their KV pairs the ``share``
        that ``table`` holds, whose pages are the cache's from now on. It replaces an
        older one of the same tokens."""
        self.replace(self.compacted_of(tokens, salt, share, table.pages, table.lengths))

    def replace(self, made: CompactedPrefix) -> None:
        """Remember a compacted prefix, whose pages are the cache's from now on, in
        place of an older one of the same tokens."""
        for one in list(self._compacted):
            if one.salt == made.salt and one.ids == made.ids:
                self._give_up(one)
        self._compacted.append(made)

    def compacted_of(
        self,
        tokens: Sequence[int],
        salt: bytes,
        share: float,
        pages: Pages,
        lengths: Sequence[int],
    ) -> CompactedPrefix:
        """The description of a compacted prefix. It is not remembered."""
        ids = np.asarray(tokens, np.int32).tobytes()
        digest = hashlib.sha256(
            self._first_key(salt) + f"compacted {share!r}".encode() + ids
        )
        return CompactedPrefix(
            ids=ids,
            salt=salt,
            cached=len(tokens),
            pages=pages,
            lengths=list(lengths),
            share=share,
            key=digest.digest(),
        )

    def _give_up(self, prefix: CompactedPrefix) -> None:
        self._compacted.remove(prefix)
        self.pool.drop(prefix.pages)

    def _match(
        self, tokens: Sequence[int], salt: bytes, base: CompactedPrefix | None
    ) -> list[bytes]:
        """Keys of the known blocks that ``tokens`` go on with after ``base``, here or
        in a store, up to the last that may end."""
        chain: list[bytes] = []
        last = 0
        for key in self._keys(tokens, salt, base):
            block = self._blocks.get(key)
            is_stored = self.stores is not None and key in self.stores
            if block is None and not is_stored:
                break
            chain.append(key)
            if is_stored or (block is not None and block.ends):
                last = len(chain)
        return chain[:last]

    def _present(
        self, chain: Sequence[bytes], held: list[Pages], start: int
    ) -> list[Block]:
        """The blocks of ``chain``, which begins at token ``start``, evicted ones
        brought back, up to the last that may end before one that cannot be."""
        blocks: list[Block] = []
        end = start
        for key in chain:
            end += self.block
            block = self._blocks.get(key)
            is_last = key == chain[-1]
            if block is None or (is_last and not block.ends):
                block = self._bring_back(key, block, is_last, end)
            if block is None:
                break
            self._blocks.move_to_end(key)
            self._hold(block.pages, held)
            blocks.append(block)
        while blocks and not blocks[-1].ends:
            blocks.pop()
        return blocks

    def _counts(self, end: int) -> list[int]:
        """Pages of each bucket of a block that ends after ``end`` tokens."""
        page = self.pool.plan.page_tokens
        held = self.pool.layout.all_written(end)
        before = self.pool.layout.all_written(end - self.block)
        counts = [(now - then) // page for now, then in zip(held, before, strict=True)]
        for b in self._leaving:
            counts[b] = held[b] // page
        return counts

    def _bring_back(
        self, key: bytes, known: Block | None, ends: bool, end: int
    ) -> Block | None:
        """Give an evicted block its pages, and where it ``ends`` those that leave;
        None where its store or the pool cannot. It ends after ``end`` tokens."""
        if self.stores is None:
            return None
        stored = self.stores.get(key, self._counts(end))
        if stored is None:
            return None
        counts = [0] * len(stored)
        for b, pages in enumerate(stored):
            if ends if b in self._leaving else known is None:
                counts[b] = len(pages)
        if known is not None:
            self._blocks.move_to_end(key)
        try:
            taken = self.pool.take(counts)
        except OutOfPages:
            return None
        is_there = self.stores.write(key, stored, taken)
        if not is_there or self._blocks.get(key) is not known:
            self.pool.drop(taken)
            return None
        if known is None:
            known = Block(taken, ends or not self._leaving)
            self._blocks[key] = known
        else:
            for b in self._leaving:
                known.pages[b] = taken[b]
            known.ends = True
        return known

    def add(self, table: PageTable, tokens: Sequence[int], salt: bytes = b"") -> None:
        """Remember the whole blocks of ``tokens``, whose pages ``table`` holds."""
        page = self.pool.plan.page_tokens
        base = table.base
        firsts = [0] * len(self._kept)
        start = 0
        if base is not None:
            firsts = [len(ids) for ids in base.pages]
            start = base.cached
        before: bytes | None = None
        for i, key in enumerate(self._keys(tokens, salt, base)):
            if key not in self._blocks:
                if self.observer and base is None:
                    block_tokens = tokens[i * self.block : (i + 1) * self.block]
                    self.observer.stored(key, before, block_tokens, salt)
                own: Pages = []
                held = zip(
                    *map(self.pool.layout.all_written, self._ends(i)), strict=True
                )
                for b, (before_it, with_it) in enumerate(held):
                    at = firsts[b] + before_it // page
                    end = firsts[b] + with_it // page
                    own.append(table.pages[b][at:end] if self._kept[b] else [])
                self.pool.share(own)
                ends = not (self._leaving or self._with_states)
                self._blocks[key] = Block(own, ends)
            block = self._blocks[key]
            if not block.ends:
                self._end(block, table, start + (i + 1) * self.block)
            self._blocks.move_to_end(key)
            before = key

    def _ends(self, i: int) -> tuple[int, int]:
        """Tokens before block ``i``, and those with it."""
        return i * self.block, (i + 1) * self.block

    def _end(self, block: Block, table: PageTable, end: int) -> None:
        """Give a block that ends after ``end`` tokens the pages that leave, if
        ``table`` still holds all of them."""
        if self._with_states and max(table.arrived) != end:
            return
        found: Pages = [[] for _ in table.pages]
        for b in self._leaving:
            ids = self._held(table, b, end)
            if ids is None:
                return
            found[b] = ids
        self.pool.share(found)
        for b in self._leaving:
            block.pages[b] = found[b]
        block.ends = True
        if self._with_states:
            block.state = table.state
            self._forget_states()

    def _forget_states(self) -> None:
        """Let go of the least recently used states beyond those that are kept."""
        held = [block for block in self._blocks.values() if block.state is not None]
        for block in held[: -self._most_states]:
            block.state, block.ends = None, False

    def _held(self, table: PageTable, b: int, end: int) -> list[int] | None:
        """The pages of bucket ``b`` of a sequence that ends after ``end`` tokens; None
        where one is gone from ``table``."""
        bucket, page = self.pool.plan.index.buckets[b], self.pool.plan.page_tokens
        counts = bucket.life.shared(end, bucket.place)
        first, newest = (tokens // page for tokens in counts)
        reached = table.arrived[bucket.hot]
        held = table.lengths[b]
        if not bucket.is_hot:
            reached -= table.lengths[bucket.hot]
            held = len(table.pages[b]) * page
            end -= min(end, bucket.life.stay_hot)
        gone = (reached - held) // page
        start = end // page - newest  # the newest ones, among all pages
        lost = gone > 0 and start < first + gone
        if reached < end or (lost and newest > 0):
            return None
        start -= gone
        return table.pages[b][:first] + table.pages[b][start : start + newest]

    def reclaim(self) -> bool:
        """Give up the least recently used block or, once there is none, compacted
        prefix that nobody uses. False if there is neither."""
        if self._blocks:
            key, block = self._blocks.popitem(last=False)
            if self.stores is not None and block.ends:
                self.stores.put(key, block.pages)
            if self.observer:
                self.observer.removed(key)
            self.pool.drop(block.pages)
            return True
        for prefix in self._compacted:
            if not self._is_used(prefix):
                self._give_up(prefix)
                return True
        return False

    def save(self, seconds: float) -> None:
        """Write blocks to the disk store for another process, the last used ones first,
        for about so long."""
        disk = self.stores.disk if self.stores is not None else None
        if disk is None or self.stores is None:
            return
        until = time.monotonic() + seconds
        for key, block in reversed(self._blocks.items()):
            if time.monotonic() > until:
                break
            if block.ends:
                self.stores.save(key, block.pages, until)
        if self.stores.host is not None:
            self.stores.host.save(until)
        disk.flush(until - time.monotonic())

    def _is_used(self, prefix: CompactedPrefix) -> bool:
        """Whether a sequence has its pages, too: giving it up would free nothing."""
        for bucket, ids in enumerate(prefix.pages):
            if ids:
                return self.pool.owners(bucket, ids[0]) > 1
        return False

    def _first_key(self, salt: bytes) -> bytes:
        return hashlib.sha256(self._seed + hashlib.sha256(salt).digest()).digest()

    def _keys(
        self, tokens: Sequence[int], salt: bytes, base: CompactedPrefix | None
    ) -> Iterator[bytes]:
        """One key for each whole block after ``base``, chained, so that it stands for
        every token up to the block's end."""
        ids = np.asarray(tokens, np.int32)
        key = self._first_key(salt)
        first = self.block
        if base is not None:
            key = base.key
            first += base.cached
        for end in range(first, len(ids) + 1, self.block):
            key = hashlib.sha256(key + ids[end - self.block : end].tobytes()).digest()
            yield key
