"""The line with which a server begins: what its cache really holds."""

from __future__ import annotations

import re
from pathlib import Path

from kvlathe.base.console import human_bytes
from kvlathe.plan import manifest as manifests
from kvlathe.runtime.cache.block_store import StoreSizes
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.memory_account import host_bytes, memory_account
from kvlathe.server.run import capacity, memory_said
from tests.support.runtime_cases import built_folder, llm

CACHE, HOST = 9 << 20, 3 << 20


def test_a_server_says_how_many_sequences_its_cache_holds() -> None:
    with llm("onnx", "split", 3000) as served:
        said = capacity(served)
        arena, layout = served.pool.arena_bytes, served.layout
        counts = re.findall(r"([\d,]+)(?: sequences)? of ([\d,]+) tokens", said)
        lengths = {int(tokens.replace(",", "")): int(count) for count, tokens in counts}
        assert max(lengths) == served.most_tokens
        for tokens, count in lengths.items():
            size = layout.bytes_for(tokens)
            assert count * size <= arena < (count + 1) * size
        assert f"at most {served.limits.max_batch_size} sequences run at once" in said


def test_a_server_says_what_memory_each_part_may_take(tmp_path: Path) -> None:
    """A draft engine counts, and so do prefixes that wait in the host's memory."""
    folder = built_folder(tmp_path)
    stores = StoreSizes(host_bytes=HOST)
    with LLM.load(folder, CACHE, 1, share_prefixes=True, stores=stores) as served:
        weights = manifests.read(folder).size
        alone = {"weights": weights, "kv_cache": CACHE, "host_cache": HOST}
        assert memory_account(served) == alone
        served.speculate(folder)
        account = memory_account(served)
        assert account["draft_weights"] == weights
        assert {*account} == {*alone, "draft_weights", "draft_kv_cache"}
        assert host_bytes(served) == sum(account.values())
        said = memory_said(served)
        assert all(human_bytes(size) in said for size in account.values())
        assert f"together {human_bytes(host_bytes(served))}" in said
