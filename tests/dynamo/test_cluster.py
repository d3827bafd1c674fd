"""A real frontend of NVIDIA Dynamo before two workers: what clients get is what one
engine alone gives, whatever happens to a worker."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvlathe.runtime.llm import LLM
from kvlathe.runtime.text.sampling_params import SamplingParams
from tests.support.dynamo_cluster import PYTHON, Cluster, Worker
from tests.support.triton_server import until

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        not PYTHON.exists(), reason="Dynamo is not set up: run scripts/dynamo_env.sh"
    ),
]
PROMPTS = [
    "# How to install\n\nTo build the project, run",
    "def main():\n    import os\n    return",
    "The configuration file of the server has these settings: " * 8,
    "class Server:\n    def __init__(self, port):\n        self.port = port\n" * 4,
]
PLAIN = "none"


@pytest.fixture(scope="module")
def pair(
    engine_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Cluster, Worker, Worker]]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        first = cluster.worker("first", engine_of(PLAIN))
        second = cluster.worker("second", engine_of(PLAIN))
        cluster.ready()
        assert "Rejected" not in cluster.frontend.said
        yield cluster, first, second
    finally:
        cluster.stop()


def answer(llm: LLM, prompt: str, **params: Any) -> str:  # noqa: ANN401
    return llm.generate(prompt, SamplingParams(**params))[0].text


def test_answers_are_those_of_one_engine_alone(
    pair: tuple[Cluster, Worker, Worker], alone: Callable[[str], LLM]
) -> None:
    cluster, llm = pair[0], alone(PLAIN)
    for prompt in PROMPTS:
        expected = answer(llm, prompt, max_new_tokens=32)
        for _ in range(3):
            assert cluster.text(prompt=prompt, max_tokens=32) == expected


def test_a_prompt_goes_to_the_worker_that_holds_its_blocks(
    pair: tuple[Cluster, Worker, Worker],
) -> None:
    cluster, *workers = pair
    prompt = "A prefix that only one of the workers has computed. " * 12
    cluster.text(prompt=prompt, max_tokens=4)
    time.sleep(0.5)  # the event is on its way
    before = [worker.requests for worker in workers]
    for i in range(6):
        cluster.text(prompt=f"{prompt} {i}", max_tokens=4)
    after = [worker.requests for worker in workers]
    came = [b - a for a, b in zip(before, after, strict=True)]
    assert sorted(came) == [0, 6]


def test_sampling_stops_and_logprobs_are_ours(
    pair: tuple[Cluster, Worker, Worker], alone: Callable[[str], LLM]
) -> None:
    cluster, llm = pair[0], alone(PLAIN)
    asked = {"top_k": 40, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.1}
    asked |= {"presence_penalty": 0.3, "frequency_penalty": 0.2, "temperature": 0.8}
    for seed in range(3):
        expected = answer(llm, PROMPTS[0], max_new_tokens=24, seed=seed, **asked)
        said = cluster.text(prompt=PROMPTS[0], max_tokens=24, seed=seed, **asked)
        assert said == expected
    whole = answer(llm, PROMPTS[1], max_new_tokens=32)
    stop = whole[10:13]
    choice = cluster.complete(prompt=PROMPTS[1], max_tokens=32, stop=[stop])
    assert choice["text"] == whole[: whole.index(stop)]
    assert choice["finish_reason"] == "stop"
    params = SamplingParams(max_new_tokens=8, logprobs=3)
    expected = llm.generate(PROMPTS[0], params)[0].logprobs
    assert expected
    logprobs = cluster.complete(prompt=PROMPTS[0], max_tokens=8, logprobs=3)["logprobs"]
    ours = [one.logprob for one in expected]
    assert logprobs["token_logprobs"] == pytest.approx(ours, abs=1e-4)
    assert [len(top) for top in logprobs["top_logprobs"]] == [3] * 8


def test_dynamo_clients_get_400_for_what_the_engine_cannot_do(
    pair: tuple[Cluster, Worker, Worker],
) -> None:
    with pair[0].open(prompt="a", max_tokens=4, min_tokens=3) as response:
        said = response.read().decode()
    assert response.status == 400, said
    assert "min_tokens is 3" in said


def test_a_dynamo_client_that_leaves_frees_its_pages(
    pair: tuple[Cluster, Worker, Worker],
) -> None:
    cluster, *workers = pair
    stream = cluster.stream(prompt=PROMPTS[2], max_tokens=900, ignore_eos=True)
    next(stream)
    assert until(lambda: any(worker.used > 0 for worker in workers), 5)
    stream.close()
    assert until(lambda: all(worker.used == 0 for worker in workers), 5)


class Streams:
    """Long answers that are being read, each in a thread."""

    def __init__(self, cluster: Cluster, prompts: list[str], tokens: int) -> None:
        self.texts = [""] * len(prompts)
        self._cluster, self._tokens = cluster, tokens
        self._threads = [
            threading.Thread(target=self._read, args=pair, daemon=True)
            for pair in enumerate(prompts)
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, i: int, prompt: str) -> None:
        asked = {"max_tokens": self._tokens, "ignore_eos": True}
        for text in self._cluster.stream(prompt=prompt, **asked):
            self.texts[i] += text

    def begun(self) -> bool:
        return all(self.texts)

    def wait(self) -> None:
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive()


def test_a_worker_that_is_told_to_stop_finishes_what_it_has_begun(
    pair: tuple[Cluster, Worker, Worker],
    engine_of: Callable[[str], Path],
    alone: Callable[[str], LLM],
) -> None:
    cluster = pair[0]
    third = cluster.worker("third", engine_of(PLAIN))
    time.sleep(1)
    prompts = [f"{i} {PROMPTS[i % 4]}" for i in range(6)]
    streams = Streams(cluster, prompts, 200)
    assert until(streams.begun, 30)
    third.process.send_signal(signal.SIGTERM)
    streams.wait()
    assert third.process.wait(30) == 0
    assert third.requests > 0
    check(alone(PLAIN), prompts, streams, 200)


def test_kill_9_of_a_worker_in_mid_stream_loses_nothing(
    pair: tuple[Cluster, Worker, Worker], alone: Callable[[str], LLM]
) -> None:
    cluster, first, second = pair
    prompts = [f"{i} {PROMPTS[i % 4]}" for i in range(6)]
    had = [first.requests, second.requests]
    streams = Streams(cluster, prompts, 200)
    assert until(streams.begun, 30)
    assert first.requests > had[0]
    first.process.kill()
    streams.wait()
    assert second.requests - had[1] >= len(prompts)  # each ends there
    check(alone(PLAIN), prompts, streams, 200)
    assert cluster.text(prompt=PROMPTS[0], max_tokens=4)


def check(llm: LLM, prompts: list[str], streams: Streams, tokens: int) -> None:
    for prompt, text in zip(prompts, streams.texts, strict=True):
        assert text == answer(llm, prompt, max_new_tokens=tokens, ignore_eos=True)
