"""What a server does with many requests at once, over HTTP: tokens a second, time to
the first token, time between tokens.

  python3 tests/bench/serve_burst.py out/engine --loads 64x2000+128 16x7600+256 1x7600+256

Starts ``kvlathe serve`` for the engine, sends each load's requests at the same moment
(prompts of random tokens, answers of a fixed length) and prints one table and one JSON
line. A URL instead of a folder measures a server that runs already.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvlathe.bench.client import Outcome, open_loop
from kvlathe.bench.load import Request

START_SECONDS = 300
LOAD = re.compile(r"(\d+)x(\d+)\+(\d+)")
LOWEST_ID, HIGHEST_ID = 10, 8000
"""Prompts are of token ids that every vocabulary has."""


@contextmanager
def served(engine: str, extra: list[str]) -> Generator[str]:
    """The URL of a server of ``engine``; a URL is its own."""
    if engine.startswith("http"):
        yield engine
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "kvlathe", "serve", engine, "--port", str(port)]
    command += ["--no-share-prefixes", "--log-level", "warning", *extra]
    process = subprocess.Popen(command)
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + START_SECONDS
        while not answers(url):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit("the server did not start")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=1) as response:
            return response.status == 200
    except OSError:
        return False


def model_of(url: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/models") as response:
        return json.load(response)["data"][0]["id"]


def burst(url: str, count: int, prompt: int, new: int, seed: int) -> dict[str, Any]:
    """Send ``count`` requests at once and wait for all."""
    drawn = random.Random(seed)
    requests = [
        Request([drawn.randint(LOWEST_ID, HIGHEST_ID) for _ in range(prompt)], new)
        for _ in range(count)
    ]
    started = time.perf_counter()
    outcomes = asyncio.run(
        open_loop(url, model_of(url), requests, [0.0] * count, lambda _: False)
    )
    seconds = time.perf_counter() - started
    return {"load": f"{count}x{prompt}+{new}", **summary(outcomes, seconds)}


def summary(outcomes: list[Outcome], seconds: float) -> dict[str, Any]:
    errors = [outcome.error for outcome in outcomes if outcome.error]
    if errors:
        raise SystemExit(f"{len(errors)} requests failed: {errors[0]}")
    first = [outcome.first_token_seconds for outcome in outcomes]
    between = [gap for outcome in outcomes for gap in outcome.between_tokens_seconds]
    new = sum(outcome.request.new_tokens for outcome in outcomes)
    prompts = sum(len(outcome.request.prompt) for outcome in outcomes)
    return {
        "seconds": seconds,
        "new_tokens_per_second": new / seconds,
        "prompt_tokens_per_second": prompts / max(first),
        "first_token_p50": float(np.percentile(first, 50)),
        "first_token_p99": float(np.percentile(first, 99)),
        "between_tokens_p50": float(np.percentile(between, 50)),
        "between_tokens_p99": float(np.percentile(between, 99)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine")
    parser.add_argument("--loads", nargs="+", default=["64x2000+128"])
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[])
    options = parser.parse_args()
    shapes = [LOAD.fullmatch(load) for load in options.loads]
    results = []
    with served(options.engine, options.serve) as url:
        burst(url, 2, 64, 8, seed=1)  # kernels and graphs are set up
        for seed, shape in enumerate(shapes, 2):
            if shape is None:
                raise SystemExit("a load is COUNTxPROMPT+NEW, such as 64x2000+128")
            count, prompt, new = map(int, shape.groups())
            burst(url, min(count, 8), 64, 8, seed=1)
            results.append(burst(url, count, prompt, new, seed))
    keys = list(results[0])
    print("  ".join(f"{key:>24}" for key in keys))
    for result in results:
        cells = [v if isinstance(v, str) else f"{v:.4g}" for v in result.values()]
        print("  ".join(f"{cell:>24}" for cell in cells))
    print(json.dumps({"engine": options.engine, "loads": results}))


if __name__ == "__main__":
    main()
