"""Prefill on one worker, decode on another, pages through NIXL: what clients get is what
one engine alone gives."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

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
PLAIN, SMALL = "none", "hack:bits=4"
PROMPT = "def read(path):\n    with open(path) as file:\n        return file.read()\n\n"
PROMPTS = ["# How to install", PROMPT * 6, PROMPT * 3 + "class Server:\n"]
CAME = re.compile(r"(\S+) bytes of (\d+) tokens came from")


def start(folder: Path, prefill: Path, decode: Path) -> tuple[Cluster, Worker, Worker]:
    cluster = Cluster(folder)
    first = cluster.worker("prefill", prefill, "prefill")
    second = cluster.worker("decode", decode, "decode")
    cluster.ready()
    return cluster, first, second


@pytest.fixture(scope="module", params=[PLAIN, SMALL])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def trio(
    kind: str,
    engine_of: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Cluster, Worker, Worker]]:
    engine = engine_of(kind)
    cluster, first, second = start(tmp_path_factory.mktemp("pd"), engine, engine)
    yield cluster, first, second
    cluster.stop()


def arrivals(worker: Worker) -> list[tuple[int, int]]:
    """Bytes of pages and tokens of every sequence that came."""
    found = CAME.findall(worker.said)
    return [(int(size.replace(",", "")), int(tokens)) for size, tokens in found]


def test_the_text_is_that_of_one_engine_alone_and_pages_travel(
    trio: tuple[Cluster, Worker, Worker], kind: str, alone: Callable[[str], LLM]
) -> None:
    cluster, prefill, decode = trio
    llm = alone(kind)
    before = len(arrivals(decode))
    for prompt in PROMPTS:
        expected = llm.generate(prompt, SamplingParams(max_new_tokens=40))[0].text
        assert cluster.text(prompt=prompt, max_tokens=40) == expected
    came = arrivals(decode)[before:]
    assert prefill.requests >= len(PROMPTS)
    for prompt, (size, tokens) in zip(PROMPTS, came, strict=True):
        assert tokens >= len(llm.encode(prompt))
        assert size == llm.layout.bytes_for(tokens)
    assert until(lambda: prefill.used == 0, 5)


def test_seeds_stops_and_logprobs_go_on_where_the_other_worker_began(
    trio: tuple[Cluster, Worker, Worker], kind: str, alone: Callable[[str], LLM]
) -> None:
    cluster, llm = trio[0], alone(kind)
    for seed in range(3):
        params = SamplingParams(
            max_new_tokens=24, temperature=0.9, seed=seed, top_p=0.9
        )
        expected = llm.generate(PROMPTS[1], params)[0].text
        asked = {"max_tokens": 24, "temperature": 0.9, "seed": seed, "top_p": 0.9}
        assert cluster.text(prompt=PROMPTS[1], **asked) == expected
    params = SamplingParams(max_new_tokens=8, logprobs=2)
    alone_said = llm.generate(PROMPTS[1], params)[0]
    assert alone_said.logprobs
    choice = cluster.complete(prompt=PROMPTS[1], max_tokens=8, logprobs=2)
    ours = [one.logprob for one in alone_said.logprobs]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(ours, abs=1e-4)
    first = alone_said.text[:1]
    choice = cluster.complete(prompt=PROMPTS[1], max_tokens=8, stop=[first])
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    one = cluster.complete(prompt=PROMPTS[1], max_tokens=1)
    assert alone_said.text.startswith(one["text"]) and one["finish_reason"] == "length"


def test_a_client_that_leaves_frees_pages_of_the_decode_worker(
    trio: tuple[Cluster, Worker, Worker],
) -> None:
    cluster, _, decode = trio
    stream = cluster.stream(prompt=PROMPTS[1], max_tokens=600, ignore_eos=True)
    next(stream)
    assert until(lambda: decode.used > 0, 5)
    stream.close()
    assert until(lambda: decode.used == 0, 5)


def test_pages_of_another_plan_are_refused_in_a_sentence(
    engine_of: Callable[[str], Path], tmp_path: Path
) -> None:
    cluster, _, decode = start(tmp_path, engine_of(PLAIN), engine_of(SMALL))
    try:
        with cluster.open(prompt=PROMPTS[1], max_tokens=4) as response:
            said = response.read().decode()
        assert response.status == 400, said
        assert "pages of another plan were sent" in said
        assert not arrivals(decode)
    finally:
        cluster.stop()


def test_a_prefill_worker_that_is_told_to_stop_ends_with_0(
    trio: tuple[Cluster, Worker, Worker],
) -> None:
    _, prefill, decode = trio
    for worker in (prefill, decode):
        worker.process.send_signal(signal.SIGTERM)
    assert prefill.process.wait(30) == 0
    assert decode.process.wait(30) == 0
