"""The line with which a server begins: what its cache really holds."""

from __future__ import annotations

import re

from kvlathe.server.run import capacity
from tests.support.runtime_cases import llm


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
