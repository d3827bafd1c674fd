"""Clocks that are set while a server runs: nobody waits for them."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest

from kvlathe.runtime.cache.block_store import StoreSizes
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.text.sampling_params import SamplingParams
from tests.support.prefix_cases import prefixes
from tests.support.runtime_cases import built_folder, text
from tests.support.serving_cases import KEY, MODEL_NAME, Served

YEAR = 365 * 86_400
TURNS = [{"role": "user", "content": "def main():"}]
BODIES = {
    "/v1/completions": {"prompt": "def main():", "max_tokens": 4},
    "/v1/chat/completions": {"messages": TURNS, "max_tokens": 4},
    "/v1/responses": {"input": "def main():", "max_output_tokens": 16},
    "/v1/messages": {"messages": TURNS, "max_tokens": 4},
}


@pytest.fixture
def jumps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each look at the clock finds another year of this century."""
    dice = random.Random(0)
    now = lambda: dice.randrange(10 * YEAR, 130 * YEAR) + dice.random()  # noqa: E731
    monkeypatch.setattr(time, "time", now)
    monkeypatch.setattr(time, "time_ns", lambda: int(now() * 1e9))
    yield


@pytest.mark.usefixtures("jumps")
@pytest.mark.parametrize("path", BODIES)
def test_answers_come_whatever_the_clock_says(served: Served, path: str) -> None:
    """Whole and as a stream, with a deadline and without."""
    head = {"Authorization": f"Bearer {KEY}"}
    deadline = {} if path == "/v1/messages" else {"deadline_seconds": 30}
    for more in ({}, deadline, {"stream": True}):
        body = {"model": MODEL_NAME, **BODIES[path], **more}
        answer = httpx.post(f"{served.url}{path}", json=body, headers=head, timeout=30)
        assert answer.status_code == 200, answer.text
    for looks in ("/health", "/metrics", "/v1/models"):
        answer = httpx.get(f"{served.url}{looks}", headers=head, timeout=30)
        assert answer.status_code == 200


@pytest.mark.usefixtures("jumps")
def test_a_disk_cache_finds_its_blocks_whatever_the_clock_says(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    engine = built_folder(tmp_path / "engine")
    few = SamplingParams(max_new_tokens=2)
    found: list[int] = []
    for _ in range(3):
        with LLM.load(engine, 64 << 20, threads=1, share_prefixes=True) as one:
            one.keep_evicted(StoreSizes(None, tmp_path / "disk", 64 << 20))
            one.generate([text(1200)], few)
            found.append(prefixes(one).hits)
    assert found[0] == 0 and found[1] == found[2] > 500
