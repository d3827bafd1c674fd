"""The servers under load: ``kvlathe serve`` started on engine folders, or somebody's
URL."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from kvlathe.base.errors import KvlatheError
from kvlathe.bench.measure import Target
from kvlathe.plan import manifest as manifests
from kvlathe.plan.engine_folder import open_engine
from kvlathe.plan.layout import CacheLayout
from kvlathe.runtime.cache.pool import PagePool

START_SECONDS = 300
STOP_SECONDS = 60


def is_url(target: str) -> bool:
    return target.startswith(("http://", "https://"))


def cache_bytes(engine: Path, tokens: int, requests: int) -> int:
    """Bytes of a cache in which exactly ``requests`` sequences growing to ``tokens``
    tokens run at once."""
    layout = _layout(engine)
    low, high = 0, max(layout.page_stride)
    while not _fits(layout, high, tokens, requests):
        low, high = high, 2 * high
    page = min(layout.page_stride)
    while high - low > page:
        middle = (low + high) // 2
        low, high = (
            (low, middle) if _fits(layout, middle, tokens, requests) else (middle, high)
        )
    return high


def batch_is_small(engine: Path, cache: int, tokens: int) -> bool:
    """Whether more sequences of ``tokens`` tokens fit a cache of ``cache`` bytes than
    the engine runs at once."""
    most = manifests.verify(engine, deep=False).limits.max_batch_size
    return _fits(_layout(engine), cache, tokens, most + 1)


def _layout(engine: Path) -> CacheLayout:
    return CacheLayout(open_engine(engine, deep=False).plan)


def _fits(layout: CacheLayout, size: int, tokens: int, requests: int) -> bool:
    try:
        pool = PagePool(layout, size)
    except KvlatheError:
        return False  # not even a page
    return pool.fits([pool.worst_pages(tokens)] * requests)


@contextmanager
def serving(engine: Path, cache: int, threads: int | None) -> Generator[Target]:
    """A server of ours for ``engine`` with ``cache`` bytes of KV cache, stopped at the
    end."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "kvlathe",
        "serve",
        str(engine),
        "--port",
        str(port),
    ]
    command += [
        "--cache-size",
        str(cache),
        "--max-waiting",
        "1000000",
        "--log-level",
        "warning",
    ]
    command.append("--no-share-prefixes")  # every run sends the same prompts
    command += ["--threads", str(threads)] if threads else []
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        url = f"http://127.0.0.1:{port}"
        try:
            until = time.monotonic() + START_SECONDS
            while not _ready(url):
                if process.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    said = log.read().decode(errors="replace").strip().splitlines() or [
                        "it said nothing"
                    ]
                    raise KvlatheError(
                        f"the server of {engine} did not start",
                        said[-1],
                        "try kvlathe serve",
                    )
                time.sleep(0.1)
            yield Target(engine.name, url, served_model(url, None))
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return response.status == 200
    except OSError:
        return False


def served_model(url: str, key: str | None) -> str:
    """The first model that a server offers. Raises KvlatheError where nothing
    OpenAI-like answers."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(f"{url}/v1/models", headers=headers), timeout=30
        ) as answer:
            return json.load(answer)["data"][0]["id"]
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise KvlatheError(
            f"{url} names no model",
            str(error),
            "give the URL of an OpenAI-compatible server",
        ) from error
