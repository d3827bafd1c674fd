"""The simulation beside the real thing: servers on this machine behind a client that asks
them in turn, or one prefill and one decode worker of Dynamo.

  kvlathe build --model models/lathe-5m --output-dir out/none
  python -m benchmarks.scale_measured out/none --workers 2 --rates 2 4
  scripts/dynamo_env.sh && python -m benchmarks.scale_measured out/none --dynamo --rates 0.5 1

Step times are measured first, over HTTP, on all servers at the same time, since they
share the machine: prompts of several lengths, answers beside one another. Then a rate is
run, steps are measured again, and the rate is simulated with both times and the same
requests. All is repeated in turns: the machine's speed varies. The link's rate is that of
all transfers of a turn, digests included, as the decode worker's log has them.
Prints one table and one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import statistics
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.serve_burst import burst, model_of, served
from benchmarks.support.cluster import Engine, Job, Shape, simulate
from benchmarks.support.commands import meanwhile, parser_of
from benchmarks.support.step_times import Row, decode_row, fitted, prompt_row
from kvlathe.bench.client import Outcome, open_loop
from kvlathe.bench.load import Lengths, Request, draw, gaps
from kvlathe.plan.engine_folder import read_plan
from kvlathe.plan.layout import CacheLayout
from tests.support.dynamo_cluster import Cluster

PROMPTS = Lengths(400, 64, 900)
ANSWERS = Lengths(64, 16, 128)
PROMPT_SIZES = (64, 256, 512, 900)
BATCHES = ((1, 64), (1, 800), (4, 64), (4, 800), (8, 400))
"""Answers beside one another, and tokens before each."""

ANSWER = 64
"""Tokens of each, when steps are timed."""

HANDED = re.compile(r"(\S+) bytes of \d+ tokens came .*, (\S+) ms with the digests")
"""Transfers in the decode worker's log."""

STEP_TOKENS = 512
BESIDE = 512
MEASURES = ("first p50", "first p90", "per token p50", "per token p90", "tokens/s")


def prompt_sizes(random: np.random.Generator, sizes: Sequence[int]) -> list[list[int]]:
    """Prompts of random tokens."""
    return [random.integers(10, 8000, size).tolist() for size in sizes]


@dataclass(frozen=True)
class Case:
    """``handed``: bytes and seconds of all transfers so far; None: there are none.
    ``seeds``: no two prompts begin alike, so none is found in a cache."""

    urls: list[str]
    handed: Callable[[], tuple[float, float]] | None = None
    seeds: Iterator[int] = field(default_factory=itertools.count)

    def step_rows(self) -> list[Row]:
        """Steps as clients see them, while all servers are asked the same."""
        if self.handed is not None:
            return split_steps(self.urls[0], self.seeds)
        with ThreadPoolExecutor(len(self.urls)) as threads:
            found = threads.map(steps_of, self.urls, itertools.repeat(self.seeds))
            return [row for rows in found for row in rows]

    def shape(self, before: tuple[float, float]) -> Shape:
        """With the link's rate since ``before``."""
        if self.handed is None:
            return Shape(0, len(self.urls))
        size, seconds = self.handed()
        return Shape(1, 1, (size - before[0]) / (seconds - before[1]))


@contextmanager
def whole_workers(options: argparse.Namespace) -> Generator[Case]:
    with ExitStack() as servers:
        one = partial(served, str(options.engine), ["--threads", "1"])
        yield Case([servers.enter_context(one()) for _ in range(options.workers)])


@contextmanager
def split_workers(options: argparse.Namespace) -> Generator[Case]:
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(Path(folder))
        try:
            cluster.worker("prefill", options.engine.resolve(), "prefill")
            decode = cluster.worker("decode", options.engine.resolve(), "decode")
            cluster.ready()

            def handed() -> tuple[float, float]:
                found = HANDED.findall(decode.said)
                size = sum(int(one.replace(",", "")) for one, _ in found)
                return size, sum(float(one) for _, one in found) / 1e3

            yield Case([f"http://127.0.0.1:{cluster.port}"], handed)
        finally:
            cluster.stop()


def first_token(url: str, size: int, seed: int) -> float:
    """Seconds until the only token of an answer: nothing is handed over."""
    random = np.random.default_rng(seed)
    [prompt] = prompt_sizes(random, [size])
    request = [Request(prompt, 1)]
    [outcome] = asyncio.run(open_loop(url, model_of(url), request, [0.0], never))
    return outcome.first_token_seconds


def steps_of(url: str, seeds: Iterator[int]) -> list[Row]:
    return prompt_rows(url, seeds) + decode_rows(url, seeds)


def split_steps(url: str, seeds: Iterator[int]) -> list[Row]:
    """Steps of two workers, each while the other has work of its own kind."""
    answering = partial(burst, url, 1, 64, 16)
    prompting = partial(first_token, url, PROMPT_SIZES[-1])
    with meanwhile(lambda: answering(next(seeds))):
        rows = prompt_rows(url, seeds)
    with meanwhile(lambda: prompting(next(seeds))):
        return rows + decode_rows(url, seeds)


def prompt_rows(url: str, seeds: Iterator[int]) -> list[Row]:
    rows: list[Row] = []
    for size in PROMPT_SIZES:
        seconds = first_token(url, size, next(seeds))
        rows.append(prompt_row(1, size, STEP_TOKENS, seconds))
    return rows


def decode_rows(url: str, seeds: Iterator[int]) -> list[Row]:
    rows: list[Row] = []
    for count, context in BATCHES:
        found = burst(url, count, context, ANSWER, next(seeds))
        seconds = found["between_tokens_p50"]
        rows.append(decode_row(count, context + ANSWER // 2, seconds))
    return rows


def requests_of(count: int, seed: int) -> list[Request]:
    random = np.random.default_rng(seed)
    sizes = draw(PROMPTS, random, count).astype(int).tolist()
    answers = draw(ANSWERS, random, count).astype(int).tolist()
    prompts = prompt_sizes(random, sizes)
    return [Request(p, a) for p, a in zip(prompts, answers, strict=True)]


async def ask(
    urls: list[str], model: str, requests: list[Request], due: list[float]
) -> list[Outcome]:
    """Each request goes to the next server in turn."""
    asked = [
        open_loop(url, model, requests[i :: len(urls)], due[i :: len(urls)], never)
        for i, url in enumerate(urls)
    ]
    found = await asyncio.gather(*asked)
    return [outcome for outcomes in found for outcome in outcomes]


def never(_: Sequence[Outcome]) -> bool:
    return False


def summary(
    first: Sequence[float], per_token: Sequence[float], rate: float
) -> list[float]:
    """As MEASURES: seconds, and tokens a second."""
    quantiles = [np.percentile(x, q) for x in (first, per_token) for q in (50, 90)]
    return [*map(float, quantiles), rate]


def real(
    urls: list[str], requests: list[Request], due: list[float]
) -> tuple[list[float], int]:
    """Times that clients saw, and how many requests failed."""
    outcomes = asyncio.run(ask(urls, model_of(urls[0]), requests, due))
    good = [each for each in outcomes if each.ended and not each.error]
    first = [each.first_token_seconds for each in good]
    spans = [each.arrivals[-1] - each.arrivals[0] for each in good]
    per_token = [
        span / max(1, each.request.new_tokens - 1)
        for span, each in zip(spans, good, strict=True)
    ]
    begun = outcomes[0].due - due[0]
    whole = max(each.ended or 0.0 for each in good) - begun
    tokens = sum(each.request.new_tokens for each in good)
    return summary(first, per_token, tokens / whole), len(outcomes) - len(good)


def predicted(
    rows: list[Row],
    shape: Shape,
    token_bytes: int,
    requests: list[Request],
    due: list[float],
) -> list[float]:
    """The same, simulated. Memory never fills here."""
    engine = Engine(
        times=fitted(rows),
        token_bytes=token_bytes,
        cache_tokens=1 << 40,
        most_running=8,
        step_tokens=STEP_TOKENS,
        beside=BESIDE,
    )
    jobs = [
        Job(when, len(request.prompt), request.new_tokens)
        for when, request in zip(due, requests, strict=True)
    ]
    simulate(engine, shape, jobs, in_turn=True)
    first = [job.first - job.due for job in jobs]
    tokens = sum(job.answer for job in jobs)
    whole = max(job.last for job in jobs)
    return summary(first, [job.per_token for job in jobs], tokens / whole)


def compare(options: argparse.Namespace, case: Case) -> list[Mapping[str, object]]:
    """Rounds in turns; the median of each number, and the simulation's error."""
    token_bytes = round(read_layout(options.engine).bytes_per_token())
    for url in case.urls:
        burst(url, 4, 256, 16, next(case.seeds))
    seen: dict[float, list[list[float]]] = {rate: [] for rate in options.rates}
    told: dict[float, list[list[float]]] = {rate: [] for rate in options.rates}
    for turn in range(options.rounds):
        for rate in options.rates:
            before = case.handed() if case.handed else (0.0, 0.0)
            rows = case.step_rows()
            due = (np.cumsum(gaps(options.requests, turn)) / rate).tolist()
            requests = requests_of(options.requests, next(case.seeds))
            found, failed = real(case.urls, requests, due)
            if failed:
                raise SystemExit(f"{failed} requests failed")
            rows += case.step_rows()
            shape = case.shape(before)
            seen[rate].append(found)
            told[rate].append(predicted(rows, shape, token_bytes, requests, due))
    found = [compared(rate, seen[rate], told[rate]) for rate in options.rates]
    return [row for rows in found for row in rows]


def read_layout(engine: Path) -> CacheLayout:
    return CacheLayout(read_plan(engine))


def compared(
    rate: float, seen: list[list[float]], told: list[list[float]]
) -> list[Mapping[str, object]]:
    rows: list[Mapping[str, object]] = []
    for column, name in enumerate(MEASURES):
        measured = [turn[column] for turn in seen]
        simulated = [turn[column] for turn in told]
        middle, simulation = statistics.median(measured), statistics.median(simulated)
        row = {"rate": rate, "measure": name, "measured": middle, "turns": measured}
        error = simulation / middle - 1
        rows.append(row | {"simulated": simulation, "error": error})
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--dynamo", action="store_true")
    parser.add_argument("--rates", nargs="+", type=float, default=[2, 4])
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    started = split_workers if options.dynamo else whole_workers
    with started(options) as case:
        rows = compare(options, case)
    print("| requests/s | | measured | simulated | error | measured, by turn |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        turns = row["turns"]
        assert isinstance(turns, list)
        spread = ", ".join(f"{value:.4g}" for value in turns)
        cells = f"{row['measured']:.4g} | {row['simulated']:.4g} | {row['error']:+.0%}"
        print(f"| {row['rate']} | {row['measure']} | {cells} | {spread} |")
    print(json.dumps({"dynamo": options.dynamo, "rows": rows}))


if __name__ == "__main__":
    main()
