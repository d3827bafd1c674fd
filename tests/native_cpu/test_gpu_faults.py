"""A GPU that has no memory, or is lost, behind the real server: the torch session in
host memory, whose device fails as CUDA does."""

from __future__ import annotations

import dataclasses
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import torch

from kvlathe.runtime.llm import LLM
from kvlathe.runtime.native.library import Native
from kvlathe.runtime.scheduling.sequence import Sequence
from kvlathe.runtime.text.sampling_params import SamplingParams
from tests.server.test_server_process import running
from tests.support.device_engines import in_torch
from tests.support.failing_device import failing, lose
from tests.support.runtime_cases import LIMITS, text
from tests.support.serving_cases import Served, post, serving
from tests.support.session_laws import device_session
from tests.support.turned_cases import turned

ENGINE = (Path("weights of the decoder alone"), turned()[0])
SHORT = dataclasses.replace(LIMITS, max_input_len=1024)
PROMPTS = [
    list(text(n, 40 * i)) for i, n in enumerate((SHORT.max_input_len, 30, 200, 5))
]
"""The first is of maximal length."""
WORDS = (
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: device-side assert triggered",
)
FATAL = 8191
"""A token that no other prompt has."""


def engine_threads() -> int:
    return sum(thread.name == "kvlathe-engine" for thread in threading.enumerate())


@pytest.fixture
def served(native: Native) -> Iterator[Served]:
    before = engine_threads()
    with serving(in_torch(native, ENGINE, SHORT)) as found:
        yield found
    assert engine_threads() == before


@pytest.fixture(scope="module")
def alone(native: Native) -> list[list[int]]:
    with in_torch(native, ENGINE, SHORT) as llm:
        params = SamplingParams(max_new_tokens=6, ignore_eos=True)
        return [llm.generate([prompt], params)[0].token_ids for prompt in PROMPTS]


def ask(served: Served, prompt: list[int], **asked: Any) -> httpx.Response:  # noqa: ANN401
    """Six tokens after a prompt, by their ids."""
    fixed: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    return post(served, prompt=prompt, **fixed | asked)


def out_of_memory() -> None:
    said = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79.1 GiB"
    raise torch.OutOfMemoryError(said)


@pytest.mark.slow
def test_steps_without_memory_are_cut_and_everybody_is_answered_as_alone(
    served: Served, alone: list[list[int]]
) -> None:
    """A prompt of maximal length beside others, where steps of 100 tokens fail."""
    tried: list[int] = []

    def check(ids: torch.Tensor) -> None:
        tried.append(len(ids))
        if len(ids) > 100:
            out_of_memory()

    failing(served.llm, check)
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = list(pool.map(lambda prompt: ask(served, prompt), PROMPTS))
    decode = served.llm.tokenizer.decode
    for answer, expected in zip(answers, alone, strict=True):
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["text"] == decode(expected)
    assert sum(count > 100 for count in tried) < 8 < len(tried)
    assert served.idle() and not served.llm.engine.scheduler.running


def test_who_finds_no_memory_alone_is_refused_in_a_sentence(
    served: Served, alone: list[list[int]]
) -> None:
    def check(ids: torch.Tensor) -> None:
        if FATAL in ids.tolist():
            out_of_memory()

    failing(served.llm, check)
    prompts = [[FATAL], PROMPTS[1], [FATAL, 5], PROMPTS[3]]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda prompt: ask(served, prompt), prompts))
    for refused in answers[::2]:
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
        error = refused.json()["error"]
        assert error["code"] == "out_of_memory"
        assert error["message"].startswith("there is no memory for a step of 1 token")
        assert "Tried to allocate 2.00 GiB" in error["message"]
        assert "--cache-size" in error["message"]
    decode = served.llm.tokenizer.decode
    for answer, expected in zip(answers[1::2], (alone[1], alone[3]), strict=True):
        assert answer.json()["choices"][0]["text"] == decode(expected)
    assert served.idle()


PLACES = ("a step", "a choice", "a swap", "a seal", "idle")


LOSSES = [
    pytest.param(
        place,
        words,
        id=f"{place}-{name}",
        marks=[]
        if name == "access" or place in ("a step", "idle")
        else pytest.mark.nightly,
    )
    for place in PLACES
    for words, name in zip(WORDS, ("access", "assert"), strict=True)
]


@pytest.mark.parametrize(("place", "words"), LOSSES)
def test_a_lost_gpu_is_told_to_everybody_wherever_it_shows(
    native: Native, place: str, words: str
) -> None:
    """Those that run and those that wait get 500 or 503 with a reason; so do later
    ones."""
    llm = in_torch(native, ENGINE)
    lost = lose(llm, words)
    session = device_session(llm)
    with serving(llm) as served:
        with ThreadPoolExecutor(2 * LIMITS.max_batch_size) as pool:
            long = {"max_tokens": 800}
            count = 0 if place == "idle" else 2 * LIMITS.max_batch_size
            asked = [
                pool.submit(ask, served, list(text(9, i)), **long) for i in range(count)
            ]
            until = time.monotonic() + 30
            while served.engine.open < count and time.monotonic() < until:
                time.sleep(0.01)
            assert served.engine.open == count
            break_at(place, llm, lost)
            answers = [answer.result() for answer in asked]
        assert {answer.status_code for answer in answers} <= {500, 503}
        assert all(answer.json()["error"]["message"] for answer in answers)
        while served.server.fault is None and time.monotonic() < until:
            time.sleep(0.01)
        fault = served.server.fault
        assert fault is not None and words in str(fault)
        assert "the GPU is lost" in str(fault) and "start again" in str(fault)
        assert not served.engine.alive and not served.engine.open
    assert session.lost().count(words) == 1


def break_at(place: str, llm: LLM, lost: Callable[..., Any]) -> None:
    """Let the GPU be lost in a certain call."""
    session = device_session(llm)
    if place == "a step":
        failing(llm, lost)
    elif place == "a choice":
        engine = llm.engine
        land = engine._land

        def landing() -> list[Sequence]:
            if engine._launched is not None:
                sampling: Any = engine._launched._sampling
                sampling.result = lost
            return land()

        engine._land = landing
    elif place == "a swap":
        session.read_page = lost
        llm.engine.scheduler.costs.token.add(1e9)  # dearer than a swap
        with pytest.raises(Exception, match="CUDA error"):
            llm.thread.call(llm.engine.scheduler.preempt)
    elif place == "a seal":
        session.seal = lost
    else:
        with pytest.raises(Exception, match="CUDA error"):
            llm.thread.call(lost)


LOST = """
import sys
from pathlib import Path
from kvlathe.cli import main
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.native.library import Native
from tests.support.device_engines import in_torch
from tests.support.failing_device import failing, lose
from tests.support.turned_cases import turned

def load(*given, **options):
    llm = in_torch(Native.load(Path(sys.argv[1])), (Path("none"), turned()[0]))
    lost = lose(llm, "CUDA error: an illegal memory access was encountered")
    steps = iter(range(60))
    failing(llm, lambda ids: None if next(steps, None) is not None else lost())
    return llm

LLM.load = load
arguments = ["serve", "lathe-5m", "--port", "0", "--max-waiting", "100"]
main.main(arguments)
"""
"""A server on a stand-in of a GPU, which is lost after 60 steps."""


@pytest.mark.slow
def test_a_lost_gpu_ends_the_process_with_a_reason_once_everybody_is_told(
    native: Native,
) -> None:
    """Those that run, one of them a stream, and those that wait."""
    with running(["-c", LOST, str(native.path)]) as (server, url):
        said, answers = ended(server, url)
    assert server.returncode == 1
    assert all(status in (500, 503) for status, _ in answers[1:])
    assert all('"error"' in body for _, body in answers)
    assert "the GPU is lost" in said and "an illegal memory access" in said
    assert said.rstrip().endswith("Start it again.")
    assert "Traceback" not in said.rpartition("error:")[2]


def ended(server: subprocess.Popen[str], url: str) -> tuple[str, list[tuple[int, str]]]:
    """The log of a server until it ended, and what its clients got: (status, body)."""
    body = {"model": "lathe-5m", "prompt": "def main():", "max_tokens": 700}
    body |= {"ignore_eos": True}

    def asked(i: int) -> tuple[int, str]:
        wanted = body | {"stream": i == 0}
        answer = httpx.post(f"{url}/v1/completions", json=wanted, timeout=120)
        return answer.status_code, answer.text

    count = 2 * LIMITS.max_batch_size
    assert server.stderr
    with ThreadPoolExecutor(count + 1) as pool:
        said = pool.submit(server.stderr.read)
        answers = list(pool.map(asked, range(count)))
        server.wait(60)
    return said.result(), answers
