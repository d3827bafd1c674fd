"""``kvlathe frontier``: several plans of one model, what each keeps and costs, and
which to take."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click
from click.core import ParameterSource

from kvlathe.base import console
from kvlathe.base.errors import KvlatheError
from kvlathe.base.extras import require
from kvlathe.base.hub import checkpoint_folder
from kvlathe.cli.common import MODEL, PATH, REVISION, THREADS, Finite, Result, reports

SINGLE = (
    "none",
    "fdc:removal_rate=0.15",
    "hack:bits=8",
    "hack:bits=4",
    "hack:bits=3",
    "turboquant:bits=4",
    "snapkv:budget=512",
    "duo:share=0.5",
    "duo:share=0.25",
    "duo:share=0.25+hack:bits=4",
)
"""Measured beside ``auto``, unless asked otherwise."""
BY_RATIO = "auto"
RATIOS = "0.8 0.9 0.95"
COLUMNS = (
    "plan",
    "bytes",
    "left",
    "perplexity ratio",
    "retrieval",
    "agreement",
    "within",
)


def show_frontier(result: Result) -> None:
    """One table, the plan to take with its command, and the JSON line."""
    rows = []
    for row in result["points"]:
        within = "yes" if row["within"] else row["note"] or "no"
        cells = (
            row["name"],
            row["kv_bytes"],
            row["left"],
            row["perplexity_ratio"],
            row["retrieval"],
            row["agreement"],
            within,
        )
        rows.append(cells)
    title = f"{result['model']}: bytes of {result['tokens']:,} tokens"
    console.print_table(title, COLUMNS, rows)
    said = [(name, result[name]) for name in ("chosen", "page", "plot", "data")]
    console.print_pairs("", said)
    click.echo(result["command"])
    click.echo(json.dumps(result))


@click.command("frontier")
@MODEL
@REVISION
@click.option(
    "--output",
    type=PATH,
    default=Path("frontier"),
    show_default=True,
    help="Folder for the page, the picture and what was measured.",
)
@click.option(
    "--compressions",
    multiple=True,
    metavar="REQUEST...",
    help="What to measure beside none; several in one option are divided by spaces. "
    "REQUEST@0.9 is asked for that share. [default: single methods, duo and auto]",
)
@click.option(
    "--ratios",
    default=RATIOS,
    show_default=True,
    help="Shares of the bytes that auto removes.",
)
@click.option(
    "--bound",
    type=Finite(1),
    default=1.01,
    show_default=True,
    help="Times the uncompressed perplexity, at most, of the plan to take.",
)
@click.option("--text", type=PATH, help="Documents (.jsonl): perplexity.")
@click.option("--retrieval", type=PATH, help="Prompts with answers (.jsonl).")
@click.option(
    "--windows",
    type=click.IntRange(1),
    default=8,
    show_default=True,
    help="Windows of text.",
)
@click.option(
    "--window-tokens",
    type=click.IntRange(2),
    default=2048,
    show_default=True,
    help="Tokens of each.",
)
@click.option(
    "--questions",
    type=click.IntRange(1),
    default=50,
    show_default=True,
    help="Of --retrieval, at most.",
)
@click.option(
    "--target-len",
    type=click.IntRange(1),
    help="Tokens of the sequence whose bytes count. [default: max_seq_len]",
)
@click.option(
    "--max-seq-len", type=click.IntRange(1), help="As for build. [default: the model's]"
)
@click.option("--calibration", metavar="random|FILE", help="As for build.")
@click.option(
    "--backend", default="onnxruntime", show_default=True, help="As for build."
)
@click.option(
    "--jobs",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Plans that are measured at the same time; each gets its share of the cores.",
)
@THREADS
@reports(show_frontier)
def frontier_command(
    model: Path,
    revision: str | None,
    output: Path,
    compressions: tuple[str, ...],
    ratios: str,
    bound: float,
    text: Path | None,
    retrieval: Path | None,
    windows: int,
    window_tokens: int,
    questions: int,
    jobs: int,
    **built: object,
) -> Result:
    """Measure several plans of a model and name the one to take.

    Each plan is built, run and examined as a user's engine would be. The one to take
    has the fewest bytes of those that keep perplexity within --bound and retrieval
    within 0.01 of the uncompressed model. What was measured is kept in --output: the
    same command goes on where it was stopped.
    """
    require("no frontier can be drawn", "export", "matplotlib")
    from kvlathe.frontier.measure import Options
    from kvlathe.frontier.points import candidate
    from kvlathe.frontier.run import Asked, frontier

    texts = " ".join(compressions).split()
    if texts and BY_RATIO not in texts and _is_given("ratios"):
        raise click.UsageError(
            f"--ratios says what {BY_RATIO} removes, and none is asked for. Add "
            f"--compression {BY_RATIO}, or leave --ratios out."
        )
    asked = []
    shares = _ratios(ratios)
    for plan in texts or (*SINGLE, BY_RATIO):
        if plan != BY_RATIO:
            asked.append(plan)
            continue
        for share in shares:
            asked.append(f"{plan}@{share:g}")
    candidates = [candidate(plan) for plan in asked]
    exam = Asked(text, retrieval, windows, window_tokens, questions, bound, jobs)
    folder = checkpoint_folder(model, revision)
    options = Options(folder, output, **built)  # type: ignore[arg-type]
    return frontier(candidates, options, exam, strict=bool(texts))


def _ratios(text: str) -> list[float]:
    """Numbers divided by commas or spaces. Raises KvlatheError."""
    shares = []
    for word in re.split(r"[,\s]+", text.strip()):
        try:
            share = float(word)
        except ValueError:
            share = -1.0
        if not 0 <= share < 1:
            raise KvlatheError(
                f"--ratios {text} cannot be used",
                f"{word!r} is no share",
                "write 0.8,0.9",
            )
        shares.append(share)
    return shares


def _is_given(name: str) -> bool:
    """Whether an option was typed."""
    source = click.get_current_context().get_parameter_source(name)
    return source is not ParameterSource.DEFAULT


COMMANDS = (frontier_command,)
