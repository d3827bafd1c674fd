"""The whole comparison: the same requests against every server, at equal cache memory, for the same latency."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvlathe.bench import measure, plot
from kvlathe.bench.load import Request, documents, requests, scale_for
from kvlathe.bench.measure import Point, Target
from kvlathe.bench.servers import batch_is_small, cache_bytes, is_url, served_model, serving
from kvlathe.bench.traces import TRACES
from kvlathe.console import log
from kvlathe.engines import manifest as manifests
from kvlathe.engines.folder import sigterm_interrupts
from kvlathe.errors import KvlatheError
from kvlathe.runtime.tokenizer import Tokenizer

IDLE_REQUESTS = 6
"""That are sent alone to learn the idle latency, which stands for that of the whole load."""

WARM_REQUESTS = 2

FIRST_RATE = 4
"""Where the search begins, in rates at which requests would just follow one another, if each took its idle time. A
server that batches takes more than 1; a run above the limit is left early, and one far below it is the longest."""


@dataclass(frozen=True, slots=True)
class Options:
    """As on the command line (``kvlathe bench-serve --help``)."""

    trace: str = "humaneval"
    fit: bool = False
    count: int = 100
    cache_requests: int = 8
    latency_factor: float = 2.0
    tolerance: float = 0.08
    text: Path = Path("data/eval_text.jsonl")
    tokenizer: Path | None = None
    max_seq_len: int | None = None
    api_key: str | None = None
    seed: int = 0
    plot: Path = Path("bench-serve.png")
    threads: int | None = None


def compare(targets: Sequence[str], options: Options) -> dict[str, Any]:
    """Serve all targets, load them in turns; the first one's idle latency sets the limit, its rate counts as 1.

    Raises KvlatheError where a target does not answer, or the requests would not fit.
    """
    engines = [Path(target) for target in targets if not is_url(target)]
    limits = [manifests.verify(engine, deep=False).limits for engine in engines]
    longest = options.max_seq_len or min((limit.max_seq_len for limit in limits), default=0)
    if not longest:
        raise KvlatheError("the longest request is not known", "URLs do not tell it", "give --max-seq-len")
    load = make_load(options, longest, options.tokenizer or (engines[0] if engines else None))
    most = max(len(request.prompt) + request.new_tokens for request in load)
    cache = cache_bytes(engines[0], most, options.cache_requests) if engines else None
    if cache is not None:
        _warn_of_batches(engines, cache, load)
    with sigterm_interrupts(), contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(_target(target, name, cache, options))
            for target, name in zip(targets, unique(targets), strict=True)
        ]
        idle = _idle(servers, load)
        limit = options.latency_factor * idle[0]
        found = _search(servers, load, limit, idle, options)
    names = [server.name for server in servers]
    rates = [rate for rate, _ in found]
    scale = scale_for(TRACES[options.trace], longest, options.fit)
    title = f"{options.trace} x {scale:.3g}" + (f", {cache:,} bytes of KV cache each" if cache else "")
    curves = {name: points for name, (_, points) in zip(names, found, strict=True)}
    plot.draw(curves, dict(zip(names, rates, strict=True)), limit, title, options.plot)
    ratios = [rate / rates[0] if rates[0] else None for rate in rates]
    return {
        "trace": options.trace,
        "scale": scale,
        "requests": options.count,
        "longest_request": most,
        "cache_bytes": cache,
        "latency_limit": limit,
        "seed": options.seed,
        "plot": str(options.plot),
        "servers": [
            {
                "name": names[i],
                "idle_latency": idle[i],
                "largest_rate": rates[i],
                "ratio": ratios[i],
                "points": [*map(dataclasses.asdict, found[i][1])],
            }
            for i in range(len(servers))
        ],
        "ratio": ratios[-1],
    }


def _warn_of_batches(engines: Sequence[Path], cache: int, load: Sequence[Request]) -> None:
    """Memory that a batch cannot use makes no difference."""
    mean = int(np.mean([len(request.prompt) + request.new_tokens for request in load]))
    for engine in engines:
        if batch_is_small(engine, cache, mean):
            said = "%s runs fewer sequences at once than its cache holds: build it with a larger --max-batch-size"
            log.warning(said, engine)


def _idle(servers: Sequence[Target], load: Sequence[Request]) -> list[float]:
    """Mean normalized latency of single requests, the servers in turns; a few short ones come first, to warm up."""
    for request in load[:WARM_REQUESTS]:
        for server in servers:
            measure.alone(server, dataclasses.replace(request, new_tokens=8))
    alone = [[measure.alone(server, request) for server in servers] for request in typical(load, IDLE_REQUESTS)]
    means = np.mean(alone, axis=0).tolist()
    for server, latency in zip(servers, means, strict=True):
        log.info("%s: idle latency %.4g s/token", server.name, latency)
    return means


def typical(load: Sequence[Request], count: int) -> list[Request]:
    """``count`` requests that stand for all: of their order by prompt tokens for each new one, which is what normalized
    latency depends on, the middles of as many equal parts. Any few of a trace with short answers and long prompts can
    be half as slow again as the mean of all."""
    order = sorted(load, key=lambda request: len(request.prompt) / request.new_tokens)
    return [order[(2 * i + 1) * len(order) // (2 * count)] for i in range(count)]


def _search(
    servers: Sequence[Target], load: Sequence[Request], limit: float, idle: Sequence[float], options: Options
) -> list[tuple[float, list[Point]]]:
    """The largest rate of each server, and its points."""

    def probe(i: int, rate: float) -> Point:
        point = measure.run(servers[i], load, rate, limit, options.seed)
        end = "" if point.within else ", lost"
        log.info("%s: %.3g requests/s: %.4g s/token%s", servers[i].name, rate, point.latency, end)
        return point

    tokens = float(np.mean([request.new_tokens for request in load]))
    return measure.in_turns(
        [measure.search(FIRST_RATE / (latency * tokens), options.tolerance) for latency in idle], probe
    )


def make_load(options: Options, longest: int, tokenizer: Path | None) -> list[Request]:
    if tokenizer is None:
        raise KvlatheError("prompts cannot be made", "a URL has no tokenizer", "give --tokenizer")
    reader = Tokenizer(tokenizer)
    text = [token for document in documents(options.text) for token in reader.encode(document)]
    return requests(TRACES[options.trace], text, options.count, longest, options.seed, options.fit)


def unique(targets: Sequence[str]) -> list[str]:
    """Short names of the targets: the last part of a path, numbered where two are alike."""
    short = [target if is_url(target) else Path(target).resolve().name for target in targets]
    return [f"{name} ({i})" if short.count(name) > 1 else name for i, name in enumerate(short)]


@contextlib.contextmanager
def _target(target: str, name: str, cache: int | None, options: Options) -> Any:  # noqa: ANN401
    if is_url(target):
        url = target.rstrip("/").removesuffix("/v1")
        yield Target(name, url, served_model(url, options.api_key), options.api_key)
        return
    assert cache is not None
    with serving(Path(target), cache, options.threads) as started:
        yield dataclasses.replace(started, name=name)
