"""Timing on a GPU: ranks and lengths of one layer's attention, CUDA
graphs and events."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable

import torch

STEPS: dict[str, tuple[list[int], ...]] = {
    "mixed": (
        [1, 2, 2, 3, 3, 4, 5, 6],
        [1, 2, 2, 3, 3, 4, 4, 6],
        [1, 2, 2, 3, 3, 4, 5, 6],
        [1, 2, 2, 3, 3, 4, 4, 6],
    ),
    "mixed48": ([1, 1, 2, 3, 3, 4, 4, 6],),
    "uniform48": ([3] * 8,),
    "uniform64": ([4] * 8,),
    "mixed26": ([1, 1, 1, 1, 2, 2, 2, 3],),
    "mixed38": ([1, 1, 2, 2, 2, 3, 3, 5],),
    "uniform96": ([6] * 8,),
    "full": ([8] * 8,),
    "d256": ([16] * 8,),
    "d512": ([32] * 8,),
}
"""Ranks / 16 of eight heads. A layer takes one row, permuted, for K and one for V."""
MIXED_EXTRA = [1, 2, 2, 3, 3, 4, 5, 6]
"""The row of every fifth layer, so that the mean over five layers is 51.2."""


def ranks_of(
    kind: str, layers: int, heads: int, seed: int
) -> list[list[tuple[int, int]]]:
    """[layers][heads] of (rank_k, rank_v)."""
    draw, rows = random.Random(seed), STEPS[kind]

    def row(layer: int) -> list[int]:
        steps = (
            MIXED_EXTRA
            if kind == "mixed" and layer % 5 == 4
            else rows[layer % 5 % len(rows)]
        )
        steps = [steps[i % len(steps)] for i in range(heads)]
        draw.shuffle(steps)
        return [16 * x for x in steps]

    return [list(zip(row(layer), row(layer), strict=True)) for layer in range(layers)]


def lengths_of(batch: int, tokens: int, kind: str) -> list[int]:
    """Tokens of each sequence; ``zipf`` is a heavy tail with the same total as
    ``even``."""
    if kind == "even":
        return [tokens] * batch
    draw = random.Random(0)
    raw = [
        min(max(tokens * 0.25 / draw.random() ** 0.75, 256), 8 * tokens)
        for _ in range(batch)
    ]
    lengths = [max(1, round(x * batch * tokens / sum(raw))) for x in raw]
    lengths[0] += batch * tokens - sum(lengths)
    return lengths


def elapsed(work: Callable[[], object]) -> float:
    """Milliseconds of the GPU between the begin and the end of what ``work`` queues."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    """The median of ``repeats`` calls, after three that are not counted."""
    for _ in range(3):
        call()
    return statistics.median(elapsed(call) for _ in range(repeats))


def repeated(call: Callable[[], object], times: int) -> float:
    """Milliseconds of one call, as the mean of so many that are queued together."""

    def calls() -> None:
        for _ in range(times):
            call()

    return elapsed(calls) / times


def graph_of(call: Callable[[int], object], calls: int) -> torch.cuda.CUDAGraph:
    """A CUDA graph of ``call(0)`` to ``call(calls - 1)``."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(min(calls, 3)):
            call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i)
    return graph


def seconds_a_call(call: Callable[[int], object], calls: int, replays: int) -> float:
    """Seconds of one call: the median of a graph's replays, divided by its calls."""
    return milliseconds(graph_of(call, calls).replay, replays) * 1e-3 / calls
