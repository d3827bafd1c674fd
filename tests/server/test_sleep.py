"""Sleep over HTTP, as clients of vLLM ask for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from kvlathe.runtime.llm import LLM
from tests.support.runtime_cases import built_folder
from tests.support.serving_cases import KEY, MODEL_NAME, Served, post, serving

HEADERS = {"Authorization": f"Bearer {KEY}"}
LONG: dict[str, Any] = {
    "prompt": [5, 6, 7],
    "max_tokens": 300,
    "ignore_eos": True,
    "temperature": 0,
}


@pytest.fixture(scope="module")
def sleepy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path: Path = built_folder(tmp_path_factory.mktemp("sleepy"))
    engine = LLM.load(path, 64 << 20, threads=1, verify=False)
    with serving(engine, keys=[KEY], sleeps=True) as found:
        yield found


def asked(served: Served, path: str, **options: str) -> httpx.Response:
    url = f"{served.url}/{path}"
    return httpx.post(url, params=options, headers=HEADERS, timeout=60)


def sleeping(served: Served) -> bool:
    answer = httpx.get(f"{served.url}/is_sleeping", headers=HEADERS)
    return answer.json()["is_sleeping"]


def test_requests_wait_for_a_sleeping_server(sleepy: Served) -> None:
    before = post(sleepy, **LONG).json()["choices"]
    assert asked(sleepy, "sleep", level="1").status_code == 200
    assert sleeping(sleepy)
    health = httpx.get(f"{sleepy.url}/health")
    assert (health.status_code, health.json()) == (200, {"status": "sleeping"})
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(post, sleepy, **LONG)
        assert post(sleepy, **LONG, deadline_seconds=0.3).status_code == 408
        assert not waits.done()
        assert asked(sleepy, "wake_up").status_code == 200
        assert waits.result().json()["choices"] == before
    assert not sleeping(sleepy)
    assert httpx.get(f"{sleepy.url}/health").json() == {"status": "ok"}


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_streams_end_in_words_or_go_on_afterwards(sleepy: Served, mode: str) -> None:
    whole = post(sleepy, **LONG).json()["choices"][0]["text"]
    url, fields = f"{sleepy.url}/v1/completions", {"model": MODEL_NAME, "stream": True}
    body = {**fields, **LONG}
    with httpx.stream("POST", url, json=body, headers=HEADERS, timeout=60) as stream:
        lines = (line for line in stream.iter_lines() if line.startswith("data: {"))
        events = [json.loads(next(lines)[6:])]
        assert asked(sleepy, "sleep", mode=mode).status_code == 200
        assert asked(sleepy, "wake_up").status_code == 200
        events += [json.loads(line[6:]) for line in lines]
    if mode == "abort":
        assert events[-1]["error"]["code"] == "sleeping"
        assert "the engine sleeps" in events[-1]["error"]["message"]
        return
    assert "".join(event["choices"][0]["text"] for event in events) == whole


def test_prefixes_are_not_compacted_asleep(sleepy: Served) -> None:
    assert asked(sleepy, "sleep").status_code == 200
    refused = post(sleepy, "prefixes", prompt=[5] * 100)
    assert refused.status_code >= 400 and "error" in refused.json()
    assert asked(sleepy, "wake_up").status_code == 200


def test_only_who_has_a_key_puts_a_server_to_sleep(sleepy: Served) -> None:
    for path in ("sleep", "wake_up"):
        assert httpx.post(f"{sleepy.url}/{path}").status_code == 401
    assert httpx.get(f"{sleepy.url}/is_sleeping").status_code == 401
    assert not sleeping(sleepy)


@pytest.mark.parametrize(
    ("path", "options"),
    [("sleep", {"level": "0"}), ("sleep", {"mode": "x"}), ("wake_up", {"tags": "a"})],
)
def test_wrong_fields_of_sleep_are_refused(
    sleepy: Served, path: str, options: dict[str, str]
) -> None:
    refused = asked(sleepy, path, **options)
    assert refused.status_code == 400
    assert next(iter(options)) in refused.json()["error"]["message"]
    assert not sleeping(sleepy)


def test_a_server_sleeps_only_where_it_was_started_so(served: Served) -> None:
    for path in ("sleep", "wake_up"):
        assert asked(served, path).status_code == 404
