"""Seconds of prompts in built engines, through ``LLM.generate``: alone and several at
once.

    python3 -m benchmarks.prompt_times none=out/none window=out/window \\
        [--loads 1x4096 8x4096] [--repeats 5] [--cache-bytes N] [--profile]

A load is so many prompts of so many random tokens, other ones each time, and one new
token each, or as many as it says (1x4096+128); no prefix is shared. All engines are
loaded in one process and take turns, the first round not counted. Prints the median
seconds of each, tokens a second, and the first engine's seconds over each other's; then
one JSON line. ``--profile``: then each engine once more, with the milliseconds of the
GPU's kernels in groups (kernel_times.py).
"""

from __future__ import annotations

import json
import random
import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.support.commands import parser_of
from kvlathe import LLM, SamplingParams
from kvlathe.base.console import print_table

LOADS = ("1x4096", "8x4096", "1x16384", "8x16384")
LOWEST_ID, HIGHEST_ID = 10, 1000
"""Prompts are of token ids that every vocabulary has."""


@dataclass(frozen=True)
class Load:
    """So many prompts of so many tokens, and as many new ones of each."""

    count: int
    tokens: int
    new: int = 1

    @classmethod
    def of(cls, said: str) -> Load:
        count, _, tokens = said.partition("x")
        tokens, _, new = tokens.partition("+")
        return cls(int(count), int(tokens), int(new or 1))

    def prompts(self, seed: int) -> list[list[int]]:
        drawn = random.Random(seed)
        return [
            [drawn.randint(LOWEST_ID, HIGHEST_ID) for _ in range(self.tokens)]
            for _ in range(self.count)
        ]


def run(llm: LLM, load: Load, seed: int) -> float:
    """Seconds from the call to the last token."""
    prompts = load.prompts(seed)
    began = time.perf_counter()
    llm.generate(prompts, SamplingParams(max_new_tokens=load.new, ignore_eos=True))
    return time.perf_counter() - began


def measured(
    engines: dict[str, LLM], load: Load, repeats: int
) -> dict[str, list[float]]:
    """Seconds of each engine, in turns: the same prompts for all, others each round."""
    times: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(repeats + 1):
        for name, llm in engines.items():
            took = run(llm, load, number)
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


def profiled(engines: dict[str, LLM], load: Load, seed: int) -> dict[str, Any]:
    """Milliseconds by engine and group of kernels, as a table and a record."""
    from benchmarks.support.kernel_times import kernel_times

    found = {
        name: kernel_times(partial(run, llm, load, seed))
        for name, llm in engines.items()
    }
    record: dict[str, Any] = {}
    for name, times in found.items():
        shown = times.groups | {"busy": times.busy, "idle": times.span - times.busy}
        record[name] = {group: round(ms, 2) for group, ms in shown.items()}
        for kernel in sorted(times.unknown, key=times.unknown.__getitem__)[-5:]:
            print(f"{name}: in no group: {times.unknown[kernel]:.2f} ms {kernel[:100]}")
    groups = list(next(iter(record.values())))
    cells = [
        [group, *(f"{own[group]:.1f}" for own in record.values())] for group in groups
    ]
    print_table("ms of the GPU", ["", *record], cells)
    return record


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("engines", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--loads", nargs="+", default=LOADS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cache-bytes", type=int, help="Of each engine.")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    engines: dict[str, LLM] = {}
    for named in options.engines:
        name, _, folder = named.partition("=")
        engines[name] = LLM.load(folder, options.cache_bytes, verify=False)
    rows: list[dict[str, Any]] = []
    profiles: dict[str, Any] = {}
    try:
        for said in options.loads:
            load = Load.of(said)
            rows += rows_of(said, load, measured(engines, load, options.repeats))
            print(*rows[-len(engines) :], sep="\n", flush=True)
            if options.profile:
                profiles[said] = profiled(engines, load, options.repeats + 1)
    finally:
        for llm in engines.values():
            llm.close()
    cells = [[str(value) for value in row.values()] for row in rows]
    print_table("prompts", list(rows[0]), cells)
    print(json.dumps({"bench": "prompt_times", "rows": rows, "profiles": profiles}))


if __name__ == "__main__":
    main()
