"""Latency by request rate, and the largest rate whose latency is still good.

Latency is the papers' normalized latency: seconds from a request's arrival to its last
token, for each token of its answer, averaged over requests (vLLM, Kwon et al. 2023;
FDC, figure 11; ZACK, figure 15).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import numpy as np

from kvlathe.base.errors import KvlatheError
from kvlathe.bench.client import Outcome, open_loop
from kvlathe.bench.load import Request, gaps

SETTLE_SECONDS = 1.0
"""Pause between two runs, in seconds, so that a server forgets the requests that were
left."""

MOST_DOUBLINGS = 12


@dataclass(frozen=True, slots=True)
class Target:
    """A server to load."""

    name: str
    url: str
    model: str
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Point:
    """One run: requests/s offered, and what came of it, in seconds. ``within``: the
    latency limit was kept.

    A run is left as soon as it is lost; its latency is then what the mean already
    surely exceeds, and the rest is None.
    """

    rate: float
    within: bool
    latency: float
    first_token_p50: float | None = None
    first_token_p99: float | None = None
    between_tokens_p50: float | None = None
    between_tokens_p99: float | None = None
    tokens_per_second: float | None = None


def least_latency(outcomes: Sequence[Outcome], now: float) -> float:
    """The least value that the mean normalized latency can still have, in seconds a
    token: requests under way have taken their time already."""
    return sum(max(0.0, outcome.normalized_seconds(now)) for outcome in outcomes) / len(
        outcomes
    )


def alone(target: Target, request: Request) -> float:
    """Normalized latency of a request that has the server for itself."""
    outcomes = asyncio.run(
        open_loop(target.url, target.model, [request], [0.0], _never, target.key)
    )
    _check(target, outcomes)
    return outcomes[0].normalized_seconds(0.0)


def run(
    target: Target, requests: Sequence[Request], rate: float, limit: float, seed: int
) -> Point:
    """Offer ``requests`` at ``rate`` a second, as a Poisson process; give up once the
    mean surely passes ``limit``."""
    starts = np.cumsum(gaps(len(requests), seed)) / rate
    begun = time.perf_counter()

    def lost(outcomes: Sequence[Outcome]) -> bool:
        return least_latency(outcomes, time.perf_counter()) > limit or any(
            outcome.error for outcome in outcomes
        )

    outcomes = asyncio.run(
        open_loop(target.url, target.model, requests, starts.tolist(), lost, target.key)
    )
    latency = least_latency(outcomes, time.perf_counter())
    _check(target, [outcome for outcome in outcomes if outcome.error])
    if any(outcome.ended is None for outcome in outcomes):
        time.sleep(SETTLE_SECONDS)
        return Point(rate, False, latency)
    first = [outcome.first_token_seconds for outcome in outcomes]
    between = [gap for outcome in outcomes for gap in outcome.between_tokens_seconds]
    seconds = max(outcome.ended or 0.0 for outcome in outcomes) - begun
    (first_p50, first_p99), (between_p50, between_p99) = (
        np.percentile(values, (50, 99)) for values in (first, between)
    )
    tokens = sum(request.new_tokens for request in requests)
    figures = map(
        float, (first_p50, first_p99, between_p50, between_p99, tokens / seconds)
    )
    return Point(rate, latency <= limit, latency, *figures)


Search = Generator[float, Point, tuple[float, list[Point]]]


def search(start: float, tolerance: float) -> Search:
    """Find the largest rate within the limit: yields rates, is sent their points,
    returns the rate and all points.

    It doubles or halves from ``start``, then bisects until the next probed rate above
    the answer, at most 1 + ``tolerance`` times as large, was not within. The answer is
    0 where nothing was.
    """
    points = [(yield start)]
    step = 2.0 if points[0].within else 0.5
    while points[-1].within == (step > 1) and len(points) <= MOST_DOUBLINGS:
        points.append((yield points[-1].rate * step))
    low = max((point.rate for point in points if point.within), default=0.0)
    high = min((point.rate for point in points if not point.within), default=low)
    while low and high > low * (1 + tolerance):
        points.append((yield (low * high) ** 0.5))
        last = points[-1]
        if last.within:
            low = last.rate
        else:
            high = last.rate
    return low, sorted(points, key=lambda point: point.rate)


def in_turns(
    searches: Sequence[Search], observation: Callable[[int, float], Point]
) -> list[tuple[float, list[Point]]]:
    """Results of all searches. They take turns, so that a machine that slows down slows
    all of them."""
    rates, results = (
        {i: next(search) for i, search in enumerate(searches)},
        dict[int, tuple[float, list[Point]]](),
    )
    while rates:
        for i, rate in list(rates.items()):
            try:
                rates[i] = searches[i].send(observation(i, rate))
            except StopIteration as end:
                results[i] = end.value
                del rates[i]
    return [results[i] for i in range(len(searches))]


def _never(_outcomes: Sequence[Outcome]) -> bool:
    return False


def _check(target: Target, outcomes: Sequence[Outcome]) -> None:
    """A refused request is a fault of the set-up: no rate makes up for it."""
    for outcome in outcomes:
        if outcome.error:
            size = (
                f"{len(outcome.request.prompt)} + {outcome.request.new_tokens} tokens"
            )
            raise KvlatheError(
                f"{target.name} did not answer a request of {size}",
                outcome.error,
                "see the server's log",
            )
