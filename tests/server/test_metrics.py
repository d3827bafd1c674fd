"""Metrics of the server."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import httpx2 as httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram

from kvlathe.plan.manifest import Manifest
from kvlathe.runtime.async_engine import AsyncEngine
from kvlathe.runtime.cache.block_store import StoreSizes
from kvlathe.runtime.text.sampling_params import SamplingParams
from kvlathe.server.metrics import FAST, LABELS, Growth, State
from tests.support.prefix_cases import prefixes, sharing
from tests.support.runtime_cases import llm, text
from tests.support.serving_cases import (
    MODEL_NAME,
    Served,
)

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def test_server_metrics_count_requests_tokens_and_errors(
    client: openai.OpenAI, served: Served
) -> None:
    def counts() -> dict[str, float]:
        said = httpx.get(f"{served.url}/metrics").text
        found = re.findall(r"^kvlathe_(\w+){[^}]*} ([\d.e+-]+)$", said, re.MULTILINE)
        return {name: sum(float(v) for k, v in found if k == name) for name, _ in found}

    before = counts()
    client.completions.create(
        model=MODEL_NAME,
        prompt=[[5] * 10, [6] * 20],
        max_tokens=7,
        extra_body={"ignore_eos": True},
    )
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=MODEL_NAME, prompt="a", max_tokens=10**6)
    assert served.idle()
    after = counts()
    assert after["http_errors_total"] - before.get("http_errors_total", 0) == 1
    assert after["prompt_tokens_total"] - before["prompt_tokens_total"] == 30
    assert after["generation_tokens_total"] - before["generation_tokens_total"] == 14
    assert (
        after["time_to_first_token_seconds_count"]
        - before["time_to_first_token_seconds_count"]
        == 2
    )
    assert (
        after["time_per_output_token_seconds_count"]
        - before["time_per_output_token_seconds_count"]
        == 12
    )


def test_saved_bytes_count_shared_pages_once() -> None:
    engine = llm("torch", "split")
    engine.manifest = cast(
        Manifest,
        SimpleNamespace(
            kv_bytes=SimpleNamespace(baseline=engine.layout.bytes_per_token() * 4)
        ),
    )
    state = State(AsyncEngine(engine), MODEL_NAME)

    def gauges() -> dict[str, float]:
        return {family.name: family.samples[0].value for family in state.collect()}

    first, second = (
        engine.sequence([5] * 100, SamplingParams(max_new_tokens=30)) for _ in range(2)
    )
    engine.engine.scheduler.add(first)
    while not first.answered:
        engine.engine.step()
    alone, used = (
        gauges()["kvlathe_kv_cache_bytes_saved"],
        gauges()["kvlathe_kv_cache_bytes"],
    )
    second.table, second.cached = engine.pool.fork(first.table), first.cached
    engine.engine.scheduler.running.append(second)
    assert alone > used and gauges()["kvlathe_kv_cache_bytes_saved"] == pytest.approx(
        alone, rel=1e-3
    )
    for sequence in (first, second):
        engine.engine.cancel(sequence)
    assert not engine.pool.bytes_in_use


def test_server_metrics_count_evicted_prefixes(tmp_path: Path) -> None:
    llm, prompt = sharing("one"), list(text(200))
    params = SamplingParams(max_new_tokens=2, ignore_eos=True)
    llm.keep_evicted(StoreSizes(1 << 30, tmp_path))
    with AsyncEngine(llm) as engine:
        state = State(engine, "m")
        for _ in range(2):
            llm.generate([prompt], params)
            while prefixes(llm).reclaim():
                pass
        said = {metric.name: metric.samples[0].value for metric in state.collect()}
        stored = 3 * llm.layout.page_stride[0]
        assert said["kvlathe_host_cache_bytes"] == stored
        assert said["kvlathe_host_cache_hits"] == 3 * 64
        assert said["kvlathe_disk_cache_hits"] == said["kvlathe_disk_cache_bytes"] == 0
        assert said["kvlathe_disk_cache_failures"] == 0


@given(st.lists(st.one_of(st.floats(0, 20), st.sampled_from(FAST))))
def test_gaps_between_tokens_are_counted_as_prometheus_counts_them(
    gaps: list[float],
) -> None:
    growth, registry = Growth("m"), CollectorRegistry()
    name, said = "kvlathe_time_per_output_token_seconds", ""
    histogram = Histogram(name, said, LABELS, buckets=FAST, registry=registry)
    theirs = histogram.labels("m")
    for gap in gaps:
        growth.observe(gap)
        theirs.observe(gap)
    _, ours = growth.collect()
    found = {(s.name, s.labels.get("le")): s.value for s in ours.samples}
    (expected,) = registry.collect()
    wanted = {(s.name, s.labels.get("le")): s.value for s in expected.samples}
    wanted.pop((f"{name}_created", None))
    assert found == wanted
