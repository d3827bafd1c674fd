"""The cache as a page shows it: bytes by layer and head, now and uncompressed."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import BaseModel, Field

from kvlathe.plan.memory import uncompressed_pages
from kvlathe.runtime.async_engine import AsyncEngine
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.scheduling.sequence import Sequence


class HeadBytes(BaseModel):
    """One KV head of one layer."""

    layer: int
    head: int
    per_token: float = Field(description="Of the longest sequence, padding counted.")
    now: int = Field(description="In the pages that are occupied, those kept too.")


class CacheView(BaseModel):
    """The contents of the cache's pages at the moment."""

    model: str
    page_tokens: int
    total_bytes: int
    running_bytes: int = Field(
        description="Pages of running sequences, shared ones once."
    )
    running_tokens: int
    running_uncompressed: int = Field(
        description="What these would take in the same number format; 0: not known."
    )
    kept_bytes: int = Field(description="Pages kept for requests that begin alike.")
    uncompressed_per_token: float = Field(description="Of one head; 0: not known.")
    heads: list[HeadBytes]
    running: int
    waiting: int


def cache_view(engine: AsyncEngine, model: str) -> CacheView:
    """Read while the engine runs: a number may be of the step before another one's."""
    llm = engine.llm
    running = list(llm.engine.scheduler.running)
    used = engine.bytes_used
    lanes = len(llm.plan.lanes)
    baseline = llm.manifest.kv_bytes.baseline if llm.manifest else 0
    return CacheView(
        model=model,
        page_tokens=llm.plan.page_tokens,
        total_bytes=llm.pool.arena_bytes,
        running_bytes=used,
        running_tokens=sum(sequence.cached for sequence in running),
        running_uncompressed=uncompressed_bytes(llm, running, used),
        kept_bytes=max(0, llm.pool.bytes_in_use - used),
        uncompressed_per_token=baseline / lanes,
        heads=heads_of(llm),
        running=engine.running,
        waiting=engine.waiting,
    )


def heads_of(llm: LLM) -> list[HeadBytes]:
    """Bytes of every KV head, by layer and head."""
    layout, plan = llm.layout, llm.plan
    now, long = [0] * len(plan.lanes), [0.0] * len(plan.lanes)
    tokens = layout.long(llm.most_tokens)
    held = layout.all_written(tokens)
    for bucket, pages in enumerate(llm.pool.pages_in_use):
        most = (
            0
            if plan.index.buckets[bucket].cold
            else -(-held[bucket] // plan.page_tokens)
        )
        for lane, size in layout.lane_bytes(bucket).items():
            now[lane] += pages * size
            long[lane] += most * size / tokens
    found: list[HeadBytes] = []
    for i, lane in enumerate(plan.lanes):
        one = HeadBytes(layer=lane.layer, head=lane.head, per_token=long[i], now=now[i])
        found.append(one)
    return sorted(found, key=lambda head: (head.layer, head.head))


def uncompressed_bytes(llm: LLM, sequences: Iterable[Sequence], own: int) -> int:
    """Bytes of pages of the same number of tokens, uncompressed in the same number
    format, shared ones once: in proportion to their ``own`` bytes, as sharing is not
    compression. 0 where nobody knows."""
    if llm.manifest is None:
        return 0
    page = llm.plan.page_tokens
    running = list(sequences)
    baseline = llm.manifest.kv_bytes.baseline
    unshared = sum(uncompressed_pages(x.cached, page, baseline) for x in running)
    held = 0
    for sequence in running:
        tables = zip(sequence.table.pages, llm.pool.strides, strict=False)
        held += sum(len(ids) * stride for ids, stride in tables)
    return round(own / max(1, held) * unshared)
