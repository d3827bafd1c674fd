"""``kvlathe bench-serve``: how many requests a second a server takes before its latency
suffers."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from kvlathe.base import console
from kvlathe.base.errors import KvlatheError
from kvlathe.base.extras import pip_install
from kvlathe.base.package import DATA
from kvlathe.bench.load import TRACES
from kvlathe.cli.common import PATH, THREADS, Finite, Result, reports

COLUMNS = (
    "server",
    "requests/s",
    "latency",
    "ttft p50",
    "ttft p99",
    "tbt p50",
    "tbt p99",
    "tokens/s",
    "within",
)
OF_SERVER = ("name", "idle_latency", "largest_rate", "ratio")


def show_curves(result: Result) -> None:
    """Every run, then the largest rates."""
    rows, largest = [], []
    for server in result["servers"]:
        largest.append([server[key] for key in OF_SERVER])
        for point in server["points"]:
            numbers = [value for key, value in point.items() if key != "within"]
            rows.append((server["name"], *numbers, "yes" if point["within"] else "no"))
    trace = f"{result['trace']} x {result['scale']:.3g}"
    title = f"{trace}, {result['requests']} requests a run; seconds"
    console.print_table(title, COLUMNS, rows)
    limit = f"largest rate at a normalized latency of at most {result['latency_limit']:.4g} s/token"
    console.print_table(
        limit, ("server", "idle latency", "requests/s", "ratio"), largest
    )


@click.command("bench-serve")
@click.argument("targets", nargs=-1, required=True, metavar="ENGINE|URL...")
@click.option(
    "--trace",
    type=click.Choice(sorted(TRACES)),
    default="humaneval",
    show_default=True,
    help="Lengths.",
)
@click.option(
    "--fit",
    is_flag=True,
    help="Stretch the trace so that its longest request just fits. [default: shrink only]",
)
@click.option(
    "--requests",
    "count",
    type=click.IntRange(4),
    default=100,
    show_default=True,
    help="Of each run.",
)
@click.option(
    "--cache-requests",
    type=click.IntRange(1),
    default=8,
    show_default=True,
    help="Each engine gets the memory in which this many of the longest requests run on the first engine.",
)
@click.option(
    "--latency-factor",
    type=Finite(1, min_open=True),
    default=2.0,
    show_default=True,
    help="Latency limit, in idle latencies of the first server.",
)
@click.option(
    "--tolerance",
    type=Finite(0.01),
    default=0.08,
    show_default=True,
    help="How finely rates are told apart.",
)
@click.option(
    "--text",
    type=PATH,
    default=DATA / "eval_text.jsonl",
    help="What prompts are cut from (.jsonl). [default: texts that come with kvlathe]",
)
@click.option(
    "--tokenizer",
    type=PATH,
    help="Folder with tokenizer.json. [default: the first engine]",
)
@click.option(
    "--max-seq-len",
    type=click.IntRange(16),
    help="Longest request. [default: the engines' limit]",
)
@click.option("--api-key", envvar="KVLATHE_API_KEY", help="For URLs.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--plot",
    type=PATH,
    default=Path("bench-serve.png"),
    show_default=True,
    help="Where the picture goes.",
)
@THREADS
@reports(show_curves)
def bench_serve_command(targets: tuple[str, ...], **options: Any) -> Result:  # noqa: ANN401
    """Find the largest request rate that each server takes at the same latency; the
    first one is the baseline.

    Load is open-loop: Poisson arrivals, lengths as in the papers' traces, prompts cut
    from text, all from one seed. Engine folders are served by kvlathe serve with equal
    cache memory; URLs are OpenAI-compatible servers.
    """
    if find_spec("aiohttp") is None:
        raise KvlatheError(
            "no load can be sent",
            "aiohttp is not installed",
            f"run {pip_install('bench')}",
        )
    from kvlathe.bench import run

    return run.compare(list(targets), run.Options(**options))


COMMANDS = (bench_serve_command,)
