"""The time in which a prompt's pages go from one GPU to another, over HTTP with NVIDIA
Dynamo: one worker computes prompts, another one what follows, beside one that does both.

    python3 -m benchmarks.handoff out/none out/hack4 --prompts 8192 8222 --new 128

Each engine gets a frontend and three workers at the same time: prefill and alone on the
first GPU, decode on the second one (``--gpus 0 0``: all on one). Prompts are random tokens,
sent one after the other, first to the pair, then to the one alone. First token and time
between tokens are the client's; the other times are those that the workers log. Prints one
table of the medians, one of job completion times, and one JSON line.

Completion times at other rates are computed: first token, without the measured read, with
bytes / rate instead; and ``--new`` less one times the time between tokens. Needs Dynamo,
NIXL and kvlathe in this Python (docs/dynamo.md).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
import traceback
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.support.commands import parser_of
from kvlathe.base.console import print_table
from kvlathe.bench.client import Outcome, open_loop
from kvlathe.bench.load import Request
from tests.support.dynamo_cluster import Cluster, Worker

START_SECONDS = 150
REQUEST_SECONDS = 60
LOWEST_ID, HIGHEST_ID = 10, 8000
PAIR, ALONE = "pair", "alone"
CAME = re.compile(
    r"(\S+) bytes of \d+ tokens came from \S+ in (\d+) pieces:"
    r" reserved in (\S+) ms, read in (\S+), checked in (\d+\.\d)"
)
HELD = re.compile(r"\d+ tokens are held after (\S+) ms")
RATES = (10, 50, 100, 200)
"""Gbit/s."""
PAPER = {10: "70.9", 50: "62.1", 40: "59.3 to 61.6", 400: "60.5"}
"""HACK, figure 12: percent less than without compression, mean of all requests, 2 bits,
Llama-3.1 70B, Cocktail, by the network of its V100, T4, A10G and L4, and A100 instances."""
COLUMNS = (
    "engine",
    "prompt",
    "alone: first token, ms",
    "between",
    "pair: first token, ms",
    "between",
    "prefill",
    "reserve",
    "read",
    "check",
    "rest",
    "MB",
    "pieces",
    "GB/s",
)


def prompts(count: int, tokens: int, seed: str) -> list[list[int]]:
    drawn = random.Random(seed)
    every: list[list[int]] = []
    for _ in range(count):
        every.append([drawn.randint(LOWEST_ID, HIGHEST_ID) for _ in range(tokens)])
    return every


def ask(url: str, model: str, prompt: list[int], new: int) -> Outcome:
    """One request, alone. Raises RuntimeError where it fails."""
    tries = 0

    def enough(_: object) -> bool:
        nonlocal tries
        tries += 1
        return tries > REQUEST_SECONDS / 0.25

    sending = open_loop(url, model, [Request(prompt, new)], [0.0], enough)
    [outcome] = asyncio.run(sending)
    if outcome.error or not outcome.ended:
        raise RuntimeError(outcome.error or f"not there after {REQUEST_SECONDS} s")
    return outcome


def timed(
    url: str, model: str, texts: list[list[int]], new: int
) -> tuple[float, float]:
    """Medians: milliseconds until the first token, and between two."""
    first: list[float] = []
    between: list[float] = []
    for text in texts:
        outcome = ask(url, model, text, new)
        first.append(1e3 * outcome.first_token_seconds)
        whole = outcome.arrivals[-1] - outcome.arrivals[0]
        between.append(1e3 * whole / max(1, new - 1))
    return median(first), median(between)


def numbers(found: list[Any]) -> list[list[float]]:
    """Columns of what a pattern found."""
    rows = [[float(x.replace(",", "")) for x in row] for row in found]
    return [list(column) for column in zip(*rows, strict=True)]


class Trio:
    """Three workers of one engine."""

    def __init__(self, engine: Path, folder: Path, options: argparse.Namespace) -> None:
        self.cluster = Cluster(folder, Path(sys.executable), START_SECONDS)
        self.options = options
        first, second = options.gpus
        self.prefill = self._begin("prefill", engine, first, PAIR)
        self.decode = self._begin("decode", engine, second, PAIR)
        self.alone = self._begin("agg", engine, first, ALONE)

    def wait(self) -> None:
        for worker in (self.prefill, self.decode, self.alone):
            self.cluster.wait(worker)
        for model in (PAIR, ALONE):
            self.cluster.ready(model)

    def _begin(self, mode: str, engine: Path, gpu: str, model: str) -> Worker:
        options = ["--mode", mode, "--namespace", model, *self.options.dynamo]
        more = {"CUDA_VISIBLE_DEVICES": gpu}
        return self.cluster.begin(mode, engine, options, model, more)

    def row(self, tokens: int) -> dict[str, Any]:
        """Measured with prompts of ``tokens``, after two that nobody counts."""
        options, url = self.options, f"http://127.0.0.1:{self.cluster.port}"
        warm = prompts(2, tokens, "warm")
        texts = prompts(options.requests, tokens, "measured")
        found: dict[str, Any] = {"prompt": tokens, "new": options.new}
        for model in (PAIR, ALONE):
            timed(url, model, warm, 8)
            before = len(CAME.findall(self.decode.said))
            held = len(HELD.findall(self.prefill.said))
            first, between = timed(url, model, texts, options.new)
            found[model] = {"first_ms": first, "between_ms": between}
            if model == PAIR:
                came = CAME.findall(self.decode.said)[before:]
                kept = HELD.findall(self.prefill.said)[held:]
                if not len(came) == len(kept) == len(texts):
                    raise RuntimeError(f"{len(came)} of {len(texts)} prompts came")
                found |= self._parts(came, kept, first)
        return found

    def _parts(self, came: list[Any], kept: list[str], first: float) -> dict[str, Any]:
        size, pieces, reserve, read, check = numbers(came)
        prefill = median(map(float, kept))
        parts = {
            "prefill_ms": prefill,
            "reserve_ms": median(reserve),
            "read_ms": median(read),
            "check_ms": median(check),
        }
        rates = [b / ms / 1e6 for b, ms in zip(size, read, strict=True)]
        parts["rest_ms"] = first - sum(parts.values())
        parts |= {"bytes": median(size), "pieces": median(pieces)}
        return parts | {"gigabytes_per_second": median(rates)}


def completion_ms(row: dict[str, Any], gigabits: float) -> float:
    """Computed from measured parts."""
    pair = row[PAIR]
    travel = row["bytes"] * 8 / gigabits / 1e6
    first = pair["first_ms"] - row["read_ms"] + travel
    return first + (row["new"] - 1) * pair["between_ms"]


def cells(row: dict[str, Any]) -> list[object]:
    found: list[object] = [row["engine"], row["prompt"]]
    for model in (ALONE, PAIR):
        found += [round(row[model]["first_ms"], 1), round(row[model]["between_ms"], 2)]
    for part in ("prefill", "reserve", "read", "check", "rest"):
        found.append(round(row[f"{part}_ms"], 1))
    found += [round(row["bytes"] / 1e6, 1), int(row["pieces"])]
    return [*found, round(row["gigabytes_per_second"], 1)]


def show_completion(rows: list[dict[str, Any]]) -> None:
    """Beside the first engine with prompts of the same length."""
    shown: list[list[object]] = []
    for row in rows:
        base = next(x for x in rows if x["prompt"] == row["prompt"])
        line: list[object] = [row["engine"], row["prompt"]]
        for rate in RATES:
            mine, theirs = completion_ms(row, rate), completion_ms(base, rate)
            line.append(f"{mine:,.0f} ({100 * (1 - mine / theirs):.0f} % less)")
        shown.append(line)
    names = [f"{rate} Gbit/s" for rate in RATES]
    title = "job completion, ms, computed from the parts above"
    print_table(title, ("engine", "prompt", *names), shown)
    paper = ", ".join(f"{rate} Gbit/s: {less} %" for rate, less in PAPER.items())
    print(f"HACK (2 bits, 70B, Cocktail, figure 12) less than without: {paper}")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("engines", nargs="*", type=Path, metavar="ENGINE")
    parser.add_argument("--show", type=Path, help="rows of other runs, a line each")
    parser.add_argument("--prompts", nargs="+", type=int, default=[8192])
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--requests", type=int, default=5)
    parser.add_argument("--gpus", nargs=2, default=["0", "1"])
    parser.add_argument("--logs", type=Path, help="a folder for what processes say")
    parser.add_argument("--dynamo", nargs=argparse.REMAINDER, default=[])
    options = parser.parse_args()
    logs = options.logs or Path(tempfile.mkdtemp())
    rows: list[dict[str, Any]] = []
    if options.show:
        rows += map(json.loads, options.show.read_text("utf-8").splitlines())
    for engine in options.engines:
        folder = (logs / engine.name).resolve()
        folder.mkdir(parents=True)
        trio = Trio(engine.resolve(), folder, options)
        try:
            trio.wait()
            for tokens in options.prompts:
                rows.append({"engine": engine.name} | trio.row(tokens))
                print(json.dumps(rows[-1]), flush=True)
        except Exception:  # the other engines are measured all the same
            traceback.print_exc()
        finally:
            trio.cluster.stop()
    print_table("a handoff, medians, ms", COLUMNS, [cells(row) for row in rows])
    show_completion(rows)
    print(json.dumps({"gpus": options.gpus, "rows": rows}))


if __name__ == "__main__":
    main()
