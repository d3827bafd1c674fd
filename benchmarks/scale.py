"""The best shape of a cluster for so many users: a simulation, fed with measured step
times.

  python -m benchmarks.scale
  python -m benchmarks.scale --trace cocktail --gpus 16 --links 10 400 --hits 0 0.9
  python -m benchmarks.scale --gpus 8 64 256 1000 --shares 0 0.375 --links 100 --hits 0.5

A user sends a request every `--interval` seconds on average; all together they are a
Poisson process. Lengths are those of a paper's trace. A shape carries so many users as
still get, nine times of ten, the first token within `--first` seconds and a token every
`--per-token` seconds. The model has the shape of Llama-3.1-8B, each GPU is an H200 with
`--cache` GiB of KV cache. Prints one table and one JSON line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from benchmarks.support.cluster import Engine, Job, Shape, simulate
from benchmarks.support.commands import parser_of
from benchmarks.support.step_times import Build, fitted, measured
from kvlathe.bench.load import TRACES, Trace, draw, gaps

GBIT = 1e9 / 8
FEWEST = 300
"""Requests of a run."""

TOLERANCE = 0.04
TRIES = 12
UNKNOWN, KNOWN = 2.0, 1.12
"""Steps of a search. Known: what a GPU carries where there are fewer of them."""


@dataclass(frozen=True)
class Load:
    """The requests of all users. ``interval``: seconds between two requests of a user.
    ``hit``: the share of a prompt that is cached where it is computed. ``seconds``: of
    a run."""

    trace: Trace
    interval: float
    hit: float
    seconds: float

    def jobs(self, users: float, seed: int = 1) -> list[Job]:
        """Requests of a run, ordered by when they are due."""
        rate = users / self.interval
        count = max(FEWEST, int(rate * self.seconds))
        due = np.cumsum(gaps(count, seed)) / rate
        random = np.random.default_rng(seed)
        prompts = draw(self.trace.prompt, random, count).astype(int)
        answers = draw(self.trace.answer, random, count).astype(int)
        hits = (prompts * self.hit).astype(int)
        columns = (due, prompts, answers, hits)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return [Job(*row) for row in rows]


@dataclass(frozen=True)
class Limits:
    """Seconds that nine of ten requests keep."""

    first: float
    per_token: float


def kept(
    engine: Engine, shape: Shape, load: Load, users: float, limits: Limits
) -> bool:
    """Whether so many users are served within the limits. The first third of a run does
    not count: queues fill."""
    jobs = load.jobs(users)
    simulate(engine, shape, jobs)
    counted = jobs[len(jobs) // 3 :]
    first = np.percentile([job.first - job.due for job in counted], 90)
    per_token = np.percentile([job.per_token for job in counted], 90)
    return bool(first <= limits.first and per_token <= limits.per_token)


def most_users(
    engine: Engine, shape: Shape, load: Load, limits: Limits, guess: float, step: float
) -> float:
    """The most users that ``shape`` carries: times or by ``step`` from ``guess`` until the
    limit lies between, then bisected. 0 where all of `TRIES` were too many."""
    low, high = 0.0, 0.0
    users = guess
    for _ in range(TRIES):
        if kept(engine, shape, load, users, limits):
            low = users
            users *= step
        else:
            high = users
            users /= step
        if low and high:
            break
    while low and high / low > 1 + TOLERANCE:
        middle = (low * high) ** 0.5
        if kept(engine, shape, load, middle, limits):
            low = middle
        else:
            high = middle
    return low


def engine_of(build: Build, cache_bytes: float) -> Engine:
    return Engine(
        times=fitted(build.rows),
        token_bytes=build.token_bytes,
        cache_tokens=int(cache_bytes // build.token_bytes),
    )


def shapes(
    gpus: int, shares: list[float], link: float
) -> Iterator[tuple[float, Shape]]:
    """By the share of GPUs that compute prompts only; those that leave none for answers
    are left out."""
    for share in shares:
        prefill = round(gpus * share)
        if prefill < gpus:
            yield share, Shape(prefill, gpus - prefill, link * GBIT)


def rows(options: argparse.Namespace) -> Iterator[Mapping[str, object]]:
    """One for each build, link, share of hits and number of GPUs: the users that each
    shape carries."""
    builds = measured()
    limits = Limits(options.first, options.per_token)
    cases = itertools.product(options.builds, options.hits, options.links)
    for build, hit, link in cases:
        engine = engine_of(builds[build], options.cache * 2**30)
        load = Load(TRACES[options.trace], options.interval, hit, options.seconds)
        a_gpu: dict[float, float] = {}
        for gpus in options.gpus:
            users: dict[str, int] = {}
            began = time.monotonic()
            for share, shape in shapes(gpus, options.shares, link):
                if options.users:
                    carried = kept(engine, shape, load, options.users, limits)
                    users[str(shape)] = options.users if carried else 0
                    continue
                guess = gpus * a_gpu.get(share, 50.0)
                step = KNOWN if share in a_gpu else UNKNOWN
                found = most_users(engine, shape, load, limits, guess, step)
                a_gpu[share] = found / gpus or 50.0
                users[str(shape)] = round(found)
            row = {"build": build, "hits": hit, "link_gbit": link, "gpus": gpus}
            best = max(users, key=lambda name: users[name])
            spent = round(time.monotonic() - began, 1)
            yield row | {"users": users, "best": best, "seconds": spent}


def show(row: Mapping[str, object]) -> None:
    users = row["users"]
    assert isinstance(users, dict)
    shown = " | ".join(f"{name} {count:,}" for name, count in users.items())
    cells = (row["build"], row["hits"], row["link_gbit"], row["gpus"])
    print(
        f"| {' | '.join(map(str, cells))} | {shown} | **{row['best']}** |", flush=True
    )


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--trace", choices=[name for name in TRACES if name != "pg19"], default="arxiv")
    add("--builds", nargs="+", default=["none", "hack:bits=4"])
    add("--gpus", nargs="+", type=int, default=[16])
    add("--shares", nargs="+", type=float, default=[0, 0.5, 0.625, 0.75, 0.875])
    add("--links", nargs="+", type=float, default=[10, 100, 400], metavar="GBIT")
    add("--hits", nargs="+", type=float, default=[0, 0.5])
    add("--users", type=int, help="say whether so many are carried; search none")
    add("--interval", type=float, default=60)
    add("--first", type=float, default=2)
    add("--per-token", type=float, default=0.025)
    add("--cache", type=float, default=100, metavar="GIB")
    add("--seconds", type=float, default=120)
    options = parser.parse_args()
    print("| build | hits | Gbit/s | GPUs | users by shape | | best |")
    found: list[Mapping[str, object]] = []
    for row in rows(options):
        show(row)
        found.append(row)
    print(json.dumps({"trace": options.trace, "rows": found}))


if __name__ == "__main__":
    main()
