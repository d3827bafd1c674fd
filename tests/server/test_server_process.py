"""``kvlathe serve`` as a process: it says where it listens, serves, and SIGTERM under
load loses nothing."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest

from tests.support.runtime_cases import built_folder, text

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 400
"""Tokens of each answer."""

UNHURRIED = """
import sys, time
from pathlib import Path
from kvlathe.cli import main
from kvlathe.runtime.llm import LLM

load, hurry = LLM.load, Path(sys.argv.pop())

def unhurried(*given, **options):
    llm = load(*given, **options)
    run = llm.session.run

    def runs(step):
        time.sleep(0 if hurry.exists() else 0.25)
        return run(step)

    llm.session.run = runs
    return llm

LLM.load = unhurried
sys.argv[1:] = ["serve", *sys.argv[1:]]
main.main()
"""
"""A server whose steps are slow until a file is there: it still answers when the next
request comes, however slow the machine of that request is."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return built_folder(tmp_path)


@pytest.fixture
def hurry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file: while it is there, the server's steps are as fast as they can be."""
    return tmp_path_factory.mktemp("hurry") / "hurry"


@pytest.fixture
def process(
    folder: Path,
    hurry: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text("{{ messages[0].content }}")
    options = ["--port", "0", "--threads", "1", "--chat-template", str(template)]
    options += ["--drain-seconds", "600", "--cache-size", "64M"]
    with running(["-c", UNHURRIED, str(folder), *options, str(hurry)]) as started:
        yield started


@contextlib.contextmanager
def running(command: list[str]) -> Generator[tuple[subprocess.Popen[str], str]]:
    """A server and its address. It is gone afterwards, whatever a test did."""
    server = subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    try:
        assert server.stderr
        lines = iter(server.stderr.readline, "")
        addresses = map(re.compile(r"http://[\d.]+:\d+").search, lines)
        yield server, next(match[0] for match in addresses if match)
    finally:
        server.kill()
        server.wait()


@pytest.mark.slow
def test_sigterm_under_load_refuses_the_new_and_finishes_the_old(
    process: tuple[subprocess.Popen[str], str], hurry: Path
) -> None:
    server, url = process
    # Who has read the address may connect.
    assert httpx.get(f"{url}/health", timeout=300).status_code == 200
    client = openai.OpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600
    )
    messages: Any = [
        {"role": "user", "content": "def main():"}
    ]  # the shipped model has no template of its own
    chat = client.chat.completions.create(
        model="lathe-5m", messages=messages, max_tokens=4, temperature=0
    )
    plain = client.completions.create(
        model="lathe-5m", prompt="def main():", max_tokens=4, temperature=0
    )
    assert chat.choices[0].message.content == plain.choices[0].text
    tokens, begun, ends = [0] * 8, threading.Barrier(9), [""] * 8

    def read(i: int) -> None:
        stream = client.completions.create(
            model="lathe-5m",
            prompt=f"def f{i}():",
            max_tokens=TOKENS,
            stream=True,
            extra_body={"ignore_eos": True},
            logprobs=0,
        )
        for number, chunk in enumerate(stream):
            if number == 0:
                begun.wait(300)
            tokens[i] += sum(
                len(c.logprobs.tokens or ()) for c in chunk.choices if c.logprobs
            )
            ends[i] = next((c.finish_reason for c in chunk.choices), None) or ends[i]

    readers = [threading.Thread(target=read, args=(i,), daemon=True) for i in range(8)]
    for reader in readers:
        reader.start()
    begun.wait(300)
    server.send_signal(signal.SIGTERM)
    # A request before the signal has come would be taken, and wait for a place.
    while httpx.get(f"{url}/health", timeout=300).status_code == 200:
        time.sleep(0.05)
    with pytest.raises(openai.APIStatusError) as refused:
        client.completions.create(model="lathe-5m", prompt="a", max_tokens=1)
    hurry.touch()
    answer = refused.value.response
    assert answer.status_code == 503 and "retry-after" in answer.headers
    for reader in readers:
        reader.join(600)
    assert tokens == [TOKENS] * 8 and ends == ["length"] * 8
    assert server.wait(300) == 0


LOST = """
import sys
from pathlib import Path
from kvlathe.cli import main
from kvlathe.runtime.llm import LLM

load = LLM.load

def losing(*given, **options):
    llm = load(*given, **options)
    run, steps = llm.session.run, iter(range(40))
    llm.session.warm_up = lambda: None

    def runs(step):
        if next(steps, None) is None:
            llm.session.lost = lambda: "it has fallen off the bus"
            raise RuntimeError("an illegal access")
        return run(step)

    llm.session.run = runs
    return llm

LLM.load = losing
sys.argv[1:] = ["serve", sys.argv[1], "--port", "0", "--threads", "1"]
main.main()
"""
"""A server whose GPU is lost after 40 steps."""


def test_a_lost_gpu_ends_the_server_once_everybody_is_told(folder: Path) -> None:
    """A stream that runs and a request that waits get an error; then the process ends
    with the reason and with 1."""
    with running(["-c", LOST, str(folder)]) as (server, url):
        body = {"model": "lathe-5m", "prompt": "def main():", "max_tokens": 400}
        body |= {"ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as r:
            events = list(r.iter_lines())
        assert any('"error"' in line and "the server stops" in line for line in events)
        assert server.wait(60) == 1
        assert server.stderr
        said = server.stderr.read()
    assert "the GPU is lost: it has fallen off the bus" in said
    assert "Traceback" not in said.rpartition("error:")[2]


HALF = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
)
FEW_FILES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from kvlathe.cli import main
sys.argv[1:] = ["serve", *sys.argv[1:]]
main.main()
"""


@pytest.mark.slow
def test_idle_connections_beyond_the_files_stop_nobody(folder: Path) -> None:
    """They are closed, the oldest first, and one line says so. So are those whose body
    does not come."""
    options = ["--port", "0", "--threads", "1", "--cache-size", "16M"]
    with running(["-c", FEW_FILES, str(folder), *options]) as (server, url):
        parsed = httpx.URL(url)
        assert parsed.port
        place = (parsed.host, parsed.port)
        held = [socket.create_connection(place) for _ in range(300)]
        for connection in held[::2]:  # they begin a body
            with contextlib.suppress(OSError):
                connection.sendall(HALF)
        for _ in range(3):
            assert httpx.get(f"{url}/health", timeout=30).status_code == 200
            time.sleep(0.5)
        for connection in held:
            connection.close()
        server.terminate()
        assert server.wait(60) == 0 and server.stderr
        said = server.stderr.read()
    assert said.count("those that wait longest are closed") == 1
    assert "Traceback" not in said and len(said) < 4000


def test_a_port_in_use_is_refused_in_one_line_before_anything_is_loaded(
    tmp_path: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        command = [sys.executable, "-m", "kvlathe", "serve", str(tmp_path)]
        done = subprocess.run(
            [*command, "--port", port], capture_output=True, text=True, timeout=120
        )
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert "cannot be listened on" in done.stderr


@pytest.mark.slow
def test_evicted_prefixes_outlive_a_server_that_is_killed(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    disk = str(tmp_path_factory.mktemp("disk"))
    options = ["--port", "0", "--threads", "1", "--cache-size", "9M"]
    command = ["-m", "kvlathe", "serve", str(folder), *options, "--disk-cache", disk]
    prompts = [list(text(1600)), list(text(1600, 2000))]

    def answers(url: str) -> list[str]:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=600)
        found: list[str] = []
        for prompt in prompts:
            made = client.completions.create(
                model="lathe-5m", prompt=prompt, max_tokens=8, temperature=0
            )
            found.append(made.choices[0].text)
        return found

    def came_back(url: str) -> float:
        said = httpx.get(f"{url}/metrics").text
        [hits] = re.findall(r"disk_cache_hits_total{[^}]*} ([\d.e+]+)", said)
        return float(hits)

    with running(command) as (server, url):
        first = answers(url)
        assert came_back(url) == 0
        server.kill()  # the second prompt has sent pages of the first to the disk
    with running(command) as (_, url):
        assert answers(url) == first and came_back(url) >= 64
