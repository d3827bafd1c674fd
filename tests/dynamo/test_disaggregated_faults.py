"""kill -9 of prefill and decode workers while clients read: with a second one of the kind
nothing is lost, and without one clients are told at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvlathe.runtime.llm import LLM
from kvlathe.runtime.text.sampling_params import SamplingParams
from tests.support.dynamo_cluster import PYTHON, Cluster, Worker

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        not PYTHON.exists(), reason="Dynamo is not set up: run scripts/dynamo_env.sh"
    ),
]
LINES = "def read(path):\n    with open(path) as file:\n        return file.read()\n\n"
PROMPTS = [f"{LINES * 4}# {number}\n" for number in range(4)]
ANSWER = 200
MODES = ("prefill", "prefill", "decode", "decode")

Workers = dict[str, list[Worker]]


@pytest.fixture(scope="module")
def cluster(
    engine_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Cluster, Workers]]:
    """Two workers of each kind; a test may end one."""
    made = Cluster(tmp_path_factory.mktemp("faults"))
    workers: Workers = {"prefill": [], "decode": []}
    try:
        for number, mode in enumerate(MODES):
            name = f"{mode}{number}"
            workers[mode].append(made.worker(name, engine_of("none"), mode))
        made.ready()
        yield made, workers
    finally:
        made.stop()


def answers_while(
    cluster: Cluster, act: Callable[[], None], seconds: float
) -> list[str]:
    """Texts of PROMPTS, streamed at the same time; ``act`` comes after ``seconds``."""
    texts = [""] * len(PROMPTS)

    def read(number: int) -> None:
        for piece in cluster.stream(
            prompt=PROMPTS[number], max_tokens=ANSWER, ignore_eos=True
        ):
            texts[number] += piece

    threads = [threading.Thread(target=read, args=(i,)) for i in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    act()
    for thread in threads:
        thread.join(60)
    return texts


@pytest.mark.parametrize(("mode", "seconds"), [("decode", 0.4), ("prefill", 0.03)])
def test_kill_9_of_one_of_two_loses_nothing(
    cluster: tuple[Cluster, Workers],
    alone: Callable[[str], LLM],
    mode: str,
    seconds: float,
) -> None:
    made, workers = cluster
    params = SamplingParams(max_new_tokens=ANSWER, ignore_eos=True)
    expected = [answer.text for answer in alone("none").generate(PROMPTS, params)]
    assert answers_while(made, lambda: None, 0) == expected
    lost = workers[mode].pop()
    assert answers_while(made, lost.process.kill, seconds) == expected
    assert answers_while(made, lambda: None, 0) == expected


def test_without_a_prefill_worker_clients_are_told_at_once(
    cluster: tuple[Cluster, Workers],
) -> None:
    """Answers that have begun go on; new requests get 500 or 503."""
    made, workers = cluster
    streamed = made.stream(prompt=PROMPTS[0], max_tokens=ANSWER, ignore_eos=True)
    begun = next(streamed)
    for worker in workers["prefill"]:
        worker.process.kill()
        worker.process.wait()
    asked = time.monotonic()
    with made.open(prompt=PROMPTS[1], max_tokens=4) as response:
        said = response.read().decode()
    assert response.status in (500, 503), said
    assert time.monotonic() - asked < 6
    assert len(begun + "".join(streamed)) > ANSWER / 2
