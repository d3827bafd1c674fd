"""Engines that keep prefixes for others."""

from __future__ import annotations

from kvlathe.runtime.cache.prefix import PrefixCache
from kvlathe.runtime.llm import LLM
from tests.support.runtime_cases import llm


def sharing(kind: str, tokens: int = 8192, backend: str = "torch") -> LLM:
    engine = llm(backend, kind, tokens)
    engine.engine.scheduler.prefixes = PrefixCache(engine.pool)
    return engine


def prefixes(engine: LLM) -> PrefixCache:
    found = engine.engine.scheduler.prefixes
    assert found is not None
    return found


def forget(engine: LLM) -> None:
    while prefixes(engine).reclaim():
        pass
    assert engine.pool.bytes_in_use == 0
