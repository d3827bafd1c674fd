"""A worker that dies: everybody is told, the server ends in words, and no process stays."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import pytest

from kvlathe.base.errors import DeviceLost
from kvlathe.runtime.native.library import Native
from kvlathe.runtime.text.sampling_params import SamplingParams
from tests.native_cpu.test_gpu_faults import ended
from tests.server.test_server_process import ROOT
from tests.support.host_shards import Engine, HostShards
from tests.support.runtime_cases import MODEL, text

ENGINE = Engine(str(MODEL), "one")
LONG = SamplingParams(max_new_tokens=800, ignore_eos=True)


@pytest.fixture
def workers(native: Native) -> Iterator[HostShards]:
    made = HostShards(native, 2)
    yield made
    made.workers.close()


def gone(process: int) -> bool:
    """Whether a process has ended, within seconds."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2]
        except OSError:
            return True
        if state.split()[0] == "Z":
            return True
        time.sleep(0.02)
    return False


@pytest.mark.slow
def test_a_worker_that_dies_idle_ends_the_engine(workers: HostShards) -> None:
    llm = workers.llm(ENGINE)
    llm.generate([list(text(9))], SamplingParams(max_new_tokens=2))
    workers.workers.followers[0].process.kill()
    until = time.monotonic() + 20
    while llm.thread.fault is None and time.monotonic() < until:
        time.sleep(0.01)
    said = str(llm.thread.fault)
    assert isinstance(llm.thread.fault, DeviceLost)
    assert said.startswith("worker 1 of 2 has ended: its process was ended by SIGKILL")
    with pytest.raises(DeviceLost, match="worker 1 of 2"):
        llm.generate([list(text(9))])
    llm.close()


@pytest.mark.nightly
def test_a_worker_out_of_memory_is_named(workers: HostShards) -> None:
    """It says so before it ends; requests that run end with its words."""
    llm = workers.llm(ENGINE)
    request = llm.thread.submit([llm.sequence(list(text(9)), LONG)])
    time.sleep(0.5)
    workers.workers.tell("fail", "CUDA out of memory. Tried to allocate 2.00 GiB")
    with pytest.raises(DeviceLost, match=r"worker 1 of 2 has ended.*allocate 2.00 GiB"):
        llm.thread.wait(request)
    llm.close()


@pytest.mark.nightly
def test_a_leader_that_fails_in_a_step_ends_the_engine(
    workers: HostShards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait for it in the middle of a step: it cannot try again."""
    llm = workers.llm(ENGINE)
    own = workers.own.session
    assert own

    def out_of_memory(*_: object) -> None:
        raise MemoryError("CUDA out of memory. Tried to allocate 3.00 GiB")

    monkeypatch.setattr(own, "start", out_of_memory)
    with pytest.raises(DeviceLost, match=r"worker 0 of 2 has failed.*3.00 GiB.*start"):
        llm.generate([list(text(9))], LONG)
    llm.close()


@pytest.mark.nightly
def test_follower_processes_end_when_their_engine_is_closed(native: Native) -> None:
    made = HostShards(native, 2)
    process = made.workers.followers[0].process
    llm = made.llm(ENGINE)
    llm.close()
    assert process.returncode == 0


SERVER = """
import sys
from pathlib import Path
from kvlathe.cli import main
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.native.library import Native
from tests.support.host_shards import Engine, HostShards
from tests.support.runtime_cases import MODEL

def load(*given, **options):
    shards = HostShards(Native.load(Path(sys.argv[1])), 2)
    print("follower", shards.workers.followers[0].process.pid, file=sys.stderr, flush=True)
    return shards.llm(Engine(str(MODEL), "one"))

LLM.load = load
main.main(["serve", "lathe-5m", "--port", "0", "--max-waiting", "100"])
"""
"""A server with two shards."""


def serving(native: Native) -> tuple[subprocess.Popen[str], int, str]:
    """A server, its follower, and its address."""
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(native.path)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stderr
    follower, address = 0, ""
    for line in server.stderr:
        if found := re.search(r"follower (\d+)", line):
            follower = int(found[1])
        if found := re.search(r"http://[\d.]+:\d+", line):
            address = found[0]
            break
    return server, follower, address


@pytest.mark.slow
def test_a_killed_worker_ends_the_server_once_everybody_is_told(native: Native) -> None:
    """In the middle of streams and of answers; those that wait are told, too."""
    server, follower, url = serving(native)
    try:
        with ThreadPoolExecutor(1) as pool:
            told = pool.submit(ended, server, url)
            time.sleep(1.5)
            os.kill(follower, signal.SIGKILL)
            said, answers = told.result(60)
    finally:
        server.kill()
    assert server.returncode == 1
    assert all(status in (500, 503) for status, _ in answers[1:])
    assert all('"error"' in body for _, body in answers)
    assert "worker 1 of 2 has ended: its process was ended by SIGKILL" in said
    assert said.rstrip().endswith("Start it again.")


@pytest.mark.nightly
def test_a_killed_leader_takes_its_followers_along(native: Native) -> None:
    server, follower, url = serving(native)
    body = {"prompt": "a", "max_tokens": 800, "ignore_eos": True, "stream": True}
    try:
        with (
            contextlib.suppress(httpx.HTTPError),
            httpx.stream("POST", f"{url}/v1/completions", json=body) as answer,
        ):
            next(answer.iter_bytes())
            server.kill()
        assert gone(follower)
    finally:
        server.kill()


@pytest.mark.nightly
def test_a_server_that_stops_leaves_no_process(native: Native) -> None:
    server, follower, url = serving(native)
    try:
        assert httpx.get(f"{url}/health", timeout=60).status_code == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
        assert gone(follower)
    finally:
        server.kill()
