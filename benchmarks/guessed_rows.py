"""Steps of a batch in which tokens are guessed: rows of a sequence in bundles, where the
session chooses them, and each row alone.

  python3 -m benchmarks.random_checkpoint out/8b
  python3 -m benchmarks.guessed_rows out/8b --compression hack:bits=8 --guesses 0 1 3

The engine is built once. ``--batch`` prompts of ``--context`` tokens are computed. Then
each sequence guesses so many tokens in each step, hardly one of them right: a step
brings so many rows more, and one token a sequence. Both ways take turns, a few steps
each, on the same pages; the median of ``--steps`` steps each, by the clock, as the engine
runs them in serving. 0 guesses: a decode step, which is a CUDA graph and runs ahead.
Needs torch, a GPU and libkvlathe with CUDA kernels; prints one table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

from benchmarks.support.commands import parser_of
from benchmarks.tensor_parallel import MOST_NEW, build
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.scheduling.parts.speculation import Speculation
from kvlathe.runtime.scheduling.sequence import Sequence
from kvlathe.runtime.sessions.torch_cuda.attention.attend import Attention
from kvlathe.runtime.text.sampling_params import SamplingParams

TURN, WARM = 4, 8
"""Steps of one way before the other has its turn; steps before the first."""


class Wrong:
    """A Drafter that is sure of tokens that never come."""

    def chances(self, sequence: Sequence, most: int) -> Items[float]:
        return [1.0] * most

    def draft(self, counts: Mapping[Sequence, int], seconds: float) -> list[list[int]]:
        return [[2] * count for count in counts.values()]

    def forget(self, sequence: Sequence) -> None: ...


class Guessing(Speculation):
    """Guesses as many as it may, whatever steps cost."""

    def _worth(
        self, chances: Mapping[Sequence, Items[float]], sequences: int, room: int
    ) -> dict[Sequence, int]:
        return {sequence: len(each) for sequence, each in chances.items() if each}


def steps_ms(
    llm: LLM,
    sequences: list[Sequence],
    attention: Attention,
    guesses: int,
    count: int,
) -> dict[str, Any]:
    """Median ms of ``count`` steps ``bundles`` and as many ``alone``."""
    most = {"bundles": attention.most_bundled, "alone": 1}
    speculation = Guessing(Wrong() if guesses else None, guesses)
    llm.engine.speculate(speculation)
    seconds: dict[str, list[float]] = {way: [] for way in most}
    while len(seconds["alone"]) < count:
        for way, at_once in most.items():
            attention.most_bundled = at_once
            for turn in range(TURN):
                started = time.perf_counter()
                before = sum(len(sequence.tokens) for sequence in sequences)
                llm.engine.step()
                took = time.perf_counter() - started
                made = sum(len(sequence.tokens) for sequence in sequences) - before
                if turn:  # the first may have been queued the other way
                    assert made >= len(sequences), "give a larger --cache-size"
                    seconds[way].append(took)
    attention.most_bundled = most["bundles"]
    found: dict[str, Any] = {
        way: 1e3 * statistics.median(each) for way, each in seconds.items()
    }
    drafted, right = speculation.drafted, speculation.accepted
    return {"guesses": guesses, "drafted": drafted, "right": right, **found}


def measured(llm: LLM, options: argparse.Namespace) -> list[dict[str, Any]]:
    session: Any = llm.session
    params = SamplingParams(max_new_tokens=MOST_NEW, ignore_eos=True)
    sequences = [
        llm.sequence([3 + (7 * i + j) % 1000 for j in range(options.context)], params)
        for i in range(options.batch)
    ]

    def steps() -> list[dict[str, Any]]:
        for sequence in sequences:
            llm.engine.scheduler.waiting.push(sequence)
        while not all(len(s.tokens) > options.context + WARM for s in sequences):
            llm.engine.step()
        attention = session.compute.attention
        return [
            steps_ms(llm, sequences, attention, guesses, options.steps)
            for guesses in options.guesses
        ]

    rows = llm.thread.call(steps)
    llm.thread.call(lambda: [llm.engine.cancel(s) for s in sequences])
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--work", type=Path, default=Path("out"))
    parser.add_argument("--compression", default="none")
    parser.add_argument("--more", nargs="*", default=[], help="options of the build")
    parser.add_argument("--cache-size", type=int)
    parser.add_argument("--guesses", type=int, nargs="+", default=[0, 1, 3])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--prompt", type=int, default=0)
    parser.add_argument("--steps", type=int, default=36)
    options = parser.parse_args()
    engine = build(options)
    with LLM.load(engine, options.cache_size, verify=False) as llm:
        rows = measured(llm, options)
    print("guesses  rows alone ms  bundles ms  times  guessed  right")
    for row in rows:
        times = row["alone"] / row["bundles"]
        print(
            f"{row['guesses']:7d} {row['alone']:14.2f} {row['bundles']:11.2f} {times:6.2f}"
            f" {row['drafted']:8d} {row['right']:6d}"
        )
    print(json.dumps({"bench": "guessed_rows", "results": rows}))


if __name__ == "__main__":
    main()
