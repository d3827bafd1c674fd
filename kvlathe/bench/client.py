"""An open-loop client of an OpenAI-compatible server: requests leave at their time,
whatever became of earlier ones."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import aiohttp

from kvlathe.bench.load import Request

Enough = Callable[[Sequence["Outcome"]], bool]
"""Told of all outcomes so far each time something may have changed: whether the rest
need not be waited for."""

CHECK_SECONDS = 0.25


@dataclass(slots=True)
class Outcome:
    """The fate of one request. Times are seconds of the same clock; ``arrivals``:
    when each piece came."""

    request: Request
    due: float
    arrivals: list[float] = field(default_factory=list)
    ended: float | None = None
    error: str | None = None
    tokens: int | None = None  # of the answer, as the server counts them

    @property
    def first_token_seconds(self) -> float:
        return self.arrivals[0] - self.due

    @property
    def between_tokens_seconds(self) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self.arrivals)]

    def normalized_seconds(self, now: float) -> float:
        """Seconds from the due time to the end (or to ``now``, where it has not ended),
        for each token of the answer."""
        return ((self.ended or now) - self.due) / self.request.new_tokens


async def open_loop(
    url: str,
    model: str,
    requests: Sequence[Request],
    starts: Sequence[float],
    enough: Enough,
    key: str | None = None,
) -> list[Outcome]:
    """Send each request ``starts`` seconds from now. Outcomes of those that were sent;
    unfinished where ``enough``."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    connector, no_limit = (
        aiohttp.TCPConnector(limit=0),
        aiohttp.ClientTimeout(total=None),
    )
    async with aiohttp.ClientSession(
        connector=connector, timeout=no_limit, headers=headers
    ) as session:
        begun = time.perf_counter()
        outcomes = [
            Outcome(request, begun + start)
            for request, start in zip(requests, starts, strict=True)
        ]
        tasks = [
            asyncio.create_task(_send(session, url, model, outcome))
            for outcome in outcomes
        ]
        try:
            while (await asyncio.wait(tasks, timeout=CHECK_SECONDS))[1]:
                if enough(outcomes):
                    break
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return outcomes


async def _send(
    session: aiohttp.ClientSession, url: str, model: str, outcome: Outcome
) -> None:
    """Wait until the request is due, send it and note when its pieces come."""
    await asyncio.sleep(max(0.0, outcome.due - time.perf_counter()))
    try:
        async with session.post(
            f"{url}/v1/completions", json=body(model, outcome.request)
        ) as response:
            if response.status != 200:
                outcome.error = (
                    f"HTTP {response.status}: {(await response.text())[:200]}"
                )
                return
            async for line in response.content:
                if piece := line.removeprefix(b"data: ").strip():
                    _note(piece, outcome)
    except (aiohttp.ClientError, ValueError) as error:
        outcome.error = repr(error)
    else:
        outcome.error = outcome.error or _missing(outcome)


def _missing(outcome: Outcome) -> str | None:
    """The fault of a stream that is over; None where it is whole. Latency for each
    token means nothing where there are fewer than asked for."""
    if outcome.ended is None:
        return "its stream ended early"
    wanted, got = outcome.request.new_tokens, outcome.tokens
    return (
        None
        if got in (None, wanted)
        else f"it gave {got} tokens: does it know ignore_eos?"
    )


def body(model: str, request: Request) -> dict[str, object]:
    """Greedy, and exactly as many tokens as asked for (``ignore_eos``: an extension
    that vLLM has too)."""
    return {
        "model": model,
        "prompt": request.prompt,
        "max_tokens": request.new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _note(piece: bytes, outcome: Outcome) -> None:
    """One server-sent event: a piece of the answer, an error, or the end."""
    now = time.perf_counter()
    if piece == b"[DONE]":
        outcome.ended = outcome.arrivals[-1] if outcome.arrivals else now
        return
    event = json.loads(piece)
    if "error" in event:
        outcome.error = str(event["error"])
    elif event.get("choices"):
        outcome.arrivals.append(now)
    elif usage := event.get("usage"):
        outcome.tokens = usage["completion_tokens"]
