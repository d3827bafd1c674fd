"""Servers with many requests at once, over HTTP: tokens a second, time to the
first token, time between tokens, sequences that run, joules a new token.

  python3 -m benchmarks.serve_burst out/engine --loads 64x2000+128 16x7600+256 1x7600+256
  python3 -m benchmarks.serve_burst none=out/none 'fp16=vllm serve out/8b --port {port}'

A server is the folder of an engine (``kvlathe serve`` is started), a command that has
``{port}`` in it (any OpenAI-compatible server), or the URL of one that runs already;
``NAME=`` in front names it. They run one after the other and get the same requests:
each load's are sent at the same moment (prompts of random tokens, answers of a fixed
length). Prints one table, row by row, and one JSON line. A load that fails is a row.
Caches are equal only if you say so: ``--serve --cache-size BYTES`` for engines, and for
vLLM ``--kv-cache-memory-bytes BYTES``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.commands import meanwhile, parser_of, show
from benchmarks.support.energy import joules
from kvlathe.bench.client import Outcome, open_loop
from kvlathe.bench.load import Request

START_SECONDS = 300
LOAD_SECONDS = 300
STOP_SECONDS = 60
LOOK_SECONDS = 0.5
"""Between two looks at how many sequences run: a look takes the server's time too."""
WARM_PROMPT = 8192
"""Tokens of the longest prompt that is sent before a load is measured."""

LOAD = re.compile(r"(\d+)x(\d+)\+(\d+)")
NAMED = re.compile(r"([\w.:-]+)=")
RUNNING = re.compile(r"^(?:kvlathe_|vllm:)num_requests_running\S* (\S+)$", re.MULTILINE)
LOWEST_ID, HIGHEST_ID = 10, 8000
"""Prompts are of token ids that every vocabulary has."""

Shape = tuple[int, int, int]
"""Requests, tokens of each prompt, tokens of each answer."""

COLUMNS = {
    "server": 16,
    "load": 14,
    "new_tokens_per_second": 22,
    "prompt_tokens_per_second": 25,
    "first_token_p50": 16,
    "first_token_p99": 16,
    "between_tokens_p50": 19,
    "between_tokens_p99": 19,
    "per_token_p50": 14,
    "per_token_p99": 14,
    "most_running": 13,
    "joules_per_new_token": 21,
    "watts": 8,
}
"""Columns of a row, in so many characters. ``between_tokens``: seconds from one piece
of an answer to the next, however many tokens it has; ``per_token``: from an answer's
first piece to its last, divided by its further tokens."""


class Failed(Exception):
    """A server did not start, or a load was not answered."""


def command_of(target: str, port: int, extra: list[str]) -> list[str]:
    """The command that starts the server of an engine's folder, or the given
    command."""
    if "{port}" in target:
        return shlex.split(target.replace("{port}", str(port)))
    command = [sys.executable, "-m", "kvlathe", "serve", target, "--port", str(port)]
    return [*command, "--no-share-prefixes", "--log-level", "warning", *extra]


@contextmanager
def served(target: str, extra: list[str], log: Path | None = None) -> Generator[str]:
    """The URL of a server of ``target``; a URL is its own. Ends with all processes that
    the server started. Raises Failed."""
    if target.startswith("http"):
        yield target
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = command_of(target, port, extra)
    output = log.open("wb") if log else None
    process = subprocess.Popen(
        command, stdout=output, stderr=output, start_new_session=True
    )
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + START_SECONDS
        while not answers(url):
            if process.poll() is not None or time.monotonic() > until:
                raise Failed("the server did not start")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if output:
            output.close()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=1) as response:
            return response.status == 200
    except OSError:
        return False


def model_of(url: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/models") as response:
        return json.load(response)["data"][0]["id"]


@contextmanager
def most_running(url: str) -> Generator[list[float]]:
    """A list with the most sequences that ran at once, as the server's metrics say; 0
    where it has none."""
    most = [0.0]

    def look() -> None:
        with suppress(OSError):
            with urllib.request.urlopen(f"{url}/metrics", timeout=5) as response:
                said = RUNNING.findall(response.read().decode())
            most[0] = max(most[0], *map(float, said), 0.0)

    with meanwhile(look, LOOK_SECONDS):
        yield most


def burst(url: str, count: int, prompt: int, new: int, seed: int) -> dict[str, Any]:
    """Send ``count`` requests at once and wait for all. Raises Failed."""
    drawn = random.Random(seed)
    requests = [
        Request([drawn.randint(LOWEST_ID, HIGHEST_ID) for _ in range(prompt)], new)
        for _ in range(count)
    ]
    model = model_of(url)
    starts = [0.0] * count
    with most_running(url) as most:
        started = time.perf_counter()
        until, before = started + LOAD_SECONDS, joules()
        sending = open_loop(
            url, model, requests, starts, lambda _: time.perf_counter() > until
        )
        outcomes = asyncio.run(sending)
        seconds, after = time.perf_counter() - started, joules()
    row = {**summary(outcomes, seconds), "most_running": most[0]}
    if before is not None and after is not None:
        used = after - before
        row |= {"joules_per_new_token": used / (count * new), "watts": used / seconds}
    return row


def summary(outcomes: list[Outcome], seconds: float) -> dict[str, Any]:
    errors = [outcome.error for outcome in outcomes if outcome.error]
    if errors:
        raise Failed(f"{len(errors)} requests failed: {errors[0]}")
    if not all(outcome.ended and outcome.arrivals for outcome in outcomes):
        raise Failed(f"it was not through after {seconds:.0f} s")
    first = [outcome.first_token_seconds for outcome in outcomes]
    between = [gap for outcome in outcomes for gap in outcome.between_tokens_seconds]
    per_token = [per_token_seconds(outcome) for outcome in outcomes]
    new = sum(outcome.request.new_tokens for outcome in outcomes)
    prompts = sum(len(outcome.request.prompt) for outcome in outcomes)
    return {
        "seconds": seconds,
        "new_tokens_per_second": new / seconds,
        "prompt_tokens_per_second": prompts / max(first),
        "last_first_token": max(first),
        "first_token_p50": float(np.percentile(first, 50)),
        "first_token_p99": float(np.percentile(first, 99)),
        "between_tokens_p50": float(np.percentile(between, 50)),
        "between_tokens_p99": float(np.percentile(between, 99)),
        "per_token_p50": float(np.percentile(per_token, 50)),
        "per_token_p99": float(np.percentile(per_token, 99)),
    }


def per_token_seconds(outcome: Outcome) -> float:
    whole = outcome.arrivals[-1] - outcome.arrivals[0]
    return whole / max(1, outcome.request.new_tokens - 1)


def measure(url: str, shape: Shape, seed: int) -> dict[str, Any]:
    """One load, after a few requests for which kernels and graphs are set up."""
    count, prompt, new = shape
    try:
        burst(url, min(count, 8), 64, 8, seed=1)
        burst(url, min(count, 2), min(prompt, WARM_PROMPT), 8, seed=1)
        return burst(url, count, prompt, new, seed)
    except (Failed, OSError) as error:
        return {"error": str(error)}


def rows_of(
    server: str, shapes: dict[str, Shape], extra: list[str], logs: Path | None
) -> Generator[dict[str, Any]]:
    """Rows of one server, one a load; one row where it does not start."""
    named = NAMED.match(server)
    target = server[named.end() :] if named else server
    name = named[1] if named else Path(target).name
    row: dict[str, Any] = {"server": name}
    log = logs / f"{name}.log" if logs else None
    began = time.monotonic()
    try:
        with served(target, extra, log) as url:
            row["start_seconds"] = time.monotonic() - began
            for seed, (load, shape) in enumerate(shapes.items(), 2):
                yield row | {"load": load} | measure(url, shape, seed)
    except Failed as error:
        yield row | {"error": str(error)}


def shape_of(load: str) -> Shape:
    if not (match := LOAD.fullmatch(load)):
        raise SystemExit("a load is COUNTxPROMPT+NEW, such as 64x2000+128")
    count, prompt, new = map(int, match.groups())
    return count, prompt, new


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("servers", nargs="+", metavar="[NAME=]SERVER")
    parser.add_argument("--loads", nargs="+", default=["64x2000+128"])
    parser.add_argument("--logs", type=Path, help="a folder for what servers say")
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[])
    options = parser.parse_args()
    shapes = {load: shape_of(load) for load in options.loads}
    rows: list[dict[str, Any]] = []
    show(COLUMNS, {key: key for key in COLUMNS}, ".4g")
    for server in options.servers:
        for row in rows_of(server, shapes, options.serve, options.logs):
            show(COLUMNS, row, ".4g")
            rows.append(row)
    print(json.dumps({"servers": options.servers, "rows": rows}))


if __name__ == "__main__":
    main()
