"""How long prompts take in built engines, through ``LLM.generate``: alone and several at
once.

    python3 -m tests.bench.prompt_times none=out/none window=out/window \\
        [--loads 1x4096 8x4096] [--repeats 5] [--cache-bytes N]

A load is so many prompts of so many random tokens, other ones each time, and one new
token each; no prefix is shared. All engines are loaded in one process and take turns,
the first round not counted. Prints the median seconds of each, tokens a second, and the
first engine's seconds over each other's; then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

from kvlathe import LLM, SamplingParams
from kvlathe.base.console import print_table

LOADS = ("1x4096", "8x4096", "1x16384", "8x16384")
LOWEST_ID, HIGHEST_ID = 10, 1000
"""Prompts are of token ids that every vocabulary has."""
ONE = SamplingParams(max_new_tokens=1)


@dataclass(frozen=True)
class Load:
    """So many prompts of so many tokens."""

    count: int
    tokens: int

    @classmethod
    def of(cls, said: str) -> Load:
        count, _, tokens = said.partition("x")
        return cls(int(count), int(tokens))

    def prompts(self, seed: int) -> list[list[int]]:
        drawn = random.Random(seed)
        return [
            [drawn.randint(LOWEST_ID, HIGHEST_ID) for _ in range(self.tokens)]
            for _ in range(self.count)
        ]


def seconds(llm: LLM, prompts: list[list[int]]) -> float:
    """From the call to the last prompt's first token."""
    began = time.perf_counter()
    llm.generate(prompts, ONE)
    return time.perf_counter() - began


def measured(
    engines: dict[str, LLM], load: Load, repeats: int
) -> dict[str, list[float]]:
    """Seconds of each engine, in turns: the same prompts for all, others each round."""
    times: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(repeats + 1):
        prompts = load.prompts(number)
        for name, llm in engines.items():
            took = seconds(llm, prompts)
            if number:
                times[name].append(took)
    return times


def rows_of(
    said: str, load: Load, times: dict[str, list[float]]
) -> list[dict[str, Any]]:
    first = statistics.median(next(iter(times.values())))
    rows = []
    for name, own in times.items():
        median = statistics.median(own)
        rows.append(
            {
                "load": said,
                "engine": name,
                "seconds": round(median, 4),
                "least": round(min(own), 4),
                "most": round(max(own), 4),
                "tokens/s": round(load.count * load.tokens / median),
                "faster": round(first / median, 2),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engines", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--loads", nargs="+", default=LOADS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cache-bytes", type=int, help="Of each engine.")
    options = parser.parse_args()
    engines: dict[str, LLM] = {}
    for named in options.engines:
        name, _, folder = named.partition("=")
        engines[name] = LLM.load(folder, options.cache_bytes, verify=False)
    rows: list[dict[str, Any]] = []
    try:
        for said in options.loads:
            load = Load.of(said)
            rows += rows_of(said, load, measured(engines, load, options.repeats))
            print(*rows[-len(engines) :], sep="\n", flush=True)
    finally:
        for llm in engines.values():
            llm.close()
    cells = [[str(value) for value in row.values()] for row in rows]
    print_table("prompts", list(rows[0]), cells)
    print(json.dumps({"bench": "prompt_times", "rows": rows}))


if __name__ == "__main__":
    main()
