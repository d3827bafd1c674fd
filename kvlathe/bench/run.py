"""The whole comparison: the same requests against every server, at equal cache memory,
for the same latency."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvlathe.base.console import log
from kvlathe.base.errors import KvlatheError
from kvlathe.base.package import DATA
from kvlathe.bench import measure, plot
from kvlathe.bench.load import TRACES, Request, documents, requests, scale_for
from kvlathe.bench.measure import Point, Target
from kvlathe.bench.servers import (
    batch_is_small,
    cache_bytes,
    is_url,
    served_model,
    serving,
)
from kvlathe.engines.folder import sigterm_interrupts
from kvlathe.plan import manifest as manifests
from kvlathe.runtime.text.tokenizer import Tokenizer

IDLE_REQUESTS = 6
"""Requests that are sent alone to learn the idle latency, which stands for that of the
whole load."""

WARM_REQUESTS = 2

FIRST_RATE = 4
"""The first rate of the search, in rates at which requests would just follow one
another, if each took its idle time. A server that batches takes more than 1; a run
above the limit is left early, and one far below it is the longest."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options as on the command line (``kvlathe bench-serve --help``)."""

    trace: str = "humaneval"
    fit: bool = False
    count: int = 100
    cache_requests: int = 8
    latency_factor: float = 2.0
    tolerance: float = 0.08
    text: Path = DATA / "eval_text.jsonl"
    tokenizer: Path | None = None
    max_seq_len: int | None = None
    api_key: str | None = None
    seed: int = 0
    plot: Path = Path("bench-serve.png")
    threads: int | None = None


def compare(targets: Sequence[str], options: Options) -> dict[str, Any]:
    """Serve all targets, load them in turns; the first one's idle latency sets the
    limit, its rate counts as 1.

    Raises KvlatheError where a target does not answer, or the requests would not fit.
    """
    engines = [Path(target) for target in targets if not is_url(target)]
    longest = options.max_seq_len or _longest(engines)
    first = engines[0] if engines else None
    load = make_load(options, longest, options.tokenizer or first)
    most = max(len(request.prompt) + request.new_tokens for request in load)
    cache = None
    if first is not None:
        cache = cache_bytes(first, most, options.cache_requests)
        _warn_of_batches(engines, cache, load)
    with sigterm_interrupts(), contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(_target(target, name, cache, options))
            for target, name in zip(targets, unique(targets), strict=True)
        ]
        idle = _idle(servers, load)
        limit = options.latency_factor * idle[0]
        searched = _search(servers, load, limit, idle, options)
    for server, (rate, points) in zip(servers, searched, strict=True):
        check_crossed(server.name, rate, points, len(load))
    scale = scale_for(TRACES[options.trace], longest, options.fit)
    described = _described([server.name for server in servers], idle, searched)
    title = f"{options.trace} x {scale:.3g}"
    if cache:
        title += f", {cache:,} bytes of KV cache each"
    _draw(servers, searched, limit, title, options.plot)
    return {
        "trace": options.trace,
        "scale": scale,
        "requests": options.count,
        "longest_request": most,
        "cache_bytes": cache,
        "latency_limit": limit,
        "seed": options.seed,
        "plot": str(options.plot),
        "servers": described,
        "ratio": described[-1]["ratio"],
    }


def _longest(engines: Sequence[Path]) -> int:
    """Tokens of the longest sequence that all engines take. Raises KvlatheError where
    there are none: a URL does not tell."""
    limits = [manifests.verify(engine, deep=False).limits for engine in engines]
    if not limits:
        raise KvlatheError(
            "the longest request is not known",
            "URLs do not tell it",
            "give --max-seq-len",
        )
    return min(limit.max_seq_len for limit in limits)


def _described(
    names: Sequence[str],
    idle: Sequence[float],
    searched: Sequence[tuple[float, list[Point]]],
) -> list[dict[str, object]]:
    """One row a server: its points, and its rate against the first one's."""
    base = searched[0][0]
    rows = []
    for name, latency, (rate, points) in zip(names, idle, searched, strict=True):
        rows.append(
            {
                "name": name,
                "idle_latency": latency,
                "largest_rate": rate,
                "ratio": rate / base if base else None,
                "points": [dataclasses.asdict(point) for point in points],
            }
        )
    return rows


def _draw(
    servers: Sequence[Target],
    searched: Sequence[tuple[float, list[Point]]],
    limit: float,
    title: str,
    to: Path,
) -> None:
    curves, largest = {}, {}
    for server, (rate, points) in zip(servers, searched, strict=True):
        curves[server.name] = points
        largest[server.name] = rate
    plot.draw(curves, largest, limit, title, to)


def _warn_of_batches(
    engines: Sequence[Path], cache: int, load: Sequence[Request]
) -> None:
    """Memory that a batch cannot use makes no difference."""
    mean = int(np.mean([len(request.prompt) + request.new_tokens for request in load]))
    for engine in engines:
        if batch_is_small(engine, cache, mean):
            log.warning(
                "%s runs fewer sequences at once than its cache holds: build it with a "
                "larger --max-batch-size",
                engine,
            )


def _idle(servers: Sequence[Target], load: Sequence[Request]) -> list[float]:
    """Mean normalized latency of single requests, the servers in turns; a few short
    ones come first, to warm up."""
    for request in load[:WARM_REQUESTS]:
        for server in servers:
            measure.alone(server, dataclasses.replace(request, new_tokens=8))
    alone = []
    for request in typical(load, IDLE_REQUESTS):
        alone.append([measure.alone(server, request) for server in servers])
    means = np.mean(alone, axis=0).tolist()
    for server, latency in zip(servers, means, strict=True):
        log.info("%s: idle latency %.4g s/token", server.name, latency)
    return means


def typical(load: Sequence[Request], count: int) -> list[Request]:
    """``count`` requests that stand for all: of their order by prompt tokens for each
    new one, which is what normalized latency depends on, the middles of as many equal
    parts. Any few of a trace with short answers and long prompts can be half as slow
    again as the mean of all."""
    order = sorted(load, key=lambda request: len(request.prompt) / request.new_tokens)
    middles = (number * len(order) // (2 * count) for number in range(1, 2 * count, 2))
    return [order[at] for at in middles]


def _search(
    servers: Sequence[Target],
    load: Sequence[Request],
    limit: float,
    idle: Sequence[float],
    options: Options,
) -> list[tuple[float, list[Point]]]:
    """The largest rate of each server, and its points."""

    def observation(i: int, rate: float) -> Point:
        point = measure.run(servers[i], load, rate, limit, options.seed)
        end = "" if point.within else ", lost"
        log.info(
            "%s: %.3g requests/s: %.4g s/token%s",
            servers[i].name,
            rate,
            point.latency,
            end,
        )
        return point

    tokens = float(np.mean([request.new_tokens for request in load]))
    searches = [
        measure.search(FIRST_RATE / (latency * tokens), options.tolerance)
        for latency in idle
    ]
    return measure.in_turns(searches, observation)


def check_crossed(
    name: str, rate: float, points: Sequence[Point], requests: int
) -> None:
    """Raise KvlatheError where a server kept every rate: the largest that was tried says
    how hard it was tried, and nothing of the server."""
    if all(point.within for point in points):
        raise KvlatheError(
            f"no limit of {name} was found",
            f"it kept the latency when all {requests} requests came at once "
            f"({rate:,.0f} a second)",
            "send more --requests, or give a smaller --latency-factor",
        )


def make_load(options: Options, longest: int, tokenizer: Path | None) -> list[Request]:
    if tokenizer is None:
        raise KvlatheError(
            "prompts cannot be made", "a URL has no tokenizer", "give --tokenizer"
        )
    reader = Tokenizer(tokenizer)
    text: list[int] = []
    for document in documents(options.text):
        text += reader.encode(document)
    return requests(
        TRACES[options.trace], text, options.count, longest, options.seed, options.fit
    )


def unique(targets: Sequence[str]) -> list[str]:
    """Short names of the targets: the last part of a path, numbered where two are
    alike."""
    short = [
        target if is_url(target) else Path(target).resolve().name for target in targets
    ]
    names = []
    for i, name in enumerate(short):
        names.append(f"{name} ({i})" if short.count(name) > 1 else name)
    return names


@contextlib.contextmanager
def _target(
    target: str, name: str, cache: int | None, options: Options
) -> Generator[Target]:
    if is_url(target):
        url = target.rstrip("/").removesuffix("/v1")
        yield Target(name, url, served_model(url, options.api_key), options.api_key)
        return
    assert cache is not None
    with serving(Path(target), cache, options.threads) as started:
        yield dataclasses.replace(started, name=name)
