"""``kvlathe eval``: how well an engine does beside the uncompressed one, and what it
saves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvlathe.base import console
from kvlathe.base.package import DATA
from kvlathe.cli.common import (
    DEVICE,
    ENGINE,
    GPU_MEMORY,
    PATH,
    TENSOR_PARALLEL,
    THREADS,
    Result,
    reports,
)
from kvlathe.evaluation import record
from kvlathe.plan.manifest import REPORT_FILE
from kvlathe.tasks import tasks

if TYPE_CHECKING:
    from kvlathe.runtime.llm import LLM

NAMES = {
    "kv_bytes_per_token": "KV bytes a token",
    "kv_bytes_removed": "KV bytes removed",
    "kl": "KL, nats a token",
}


def show_scores(result: Result) -> None:
    """Print the scores, one row each, and the texts that they were measured on. Scores
    that were not measured are left out."""
    if "heat_map" in result:
        show_suite(result)
        return
    if "kv_bytes_removed" in result:
        result = result | {"kv_bytes_removed": f"{result['kv_bytes_removed']:.1%}"}
    rows = [
        (NAMES.get(key, key.replace("_", " ")), value)
        for key, value in result.items()
        if value is not None
    ]
    scores = [row for row in rows if not isinstance(row[1], dict | list)]
    on = record.measured_on(result["measured_on"])
    console.print_pairs("", [*scores, ("measured on", on)])


def show_suite(result: Result) -> None:
    """One table of scores, one of line retrieval, the bytes below."""
    columns = ("task", "metric", "engine", "baseline", "ratio")
    scores = []
    for row in result["scores"]:
        scores.append([row[name] for name in columns])
    console.print_table("", columns, scores)
    heat = result["heat_map"]
    rows = [
        [f"{depth:.0%}", *row]
        for depth, row in zip(heat["depths"], heat["engine"], strict=True)
    ]
    console.print_table(
        "line retrieval: depth, tokens of the prompt",
        ("", *map(str, heat["lengths"])),
        rows,
    )
    held = result["bytes"]
    said = [
        (f"KV bytes of {held['tokens']:,} tokens", held["kv_bytes"]),
        ("removed, against uncompressed in 16 bit", held["kv_bytes_removed_16bit"]),
    ]
    if held["hot_bits"] != 16:
        said.append(
            (
                f"removed, against uncompressed in {held['hot_bits']} bit",
                held["kv_bytes_removed_hot_format"],
            )
        )
    console.print_pairs("", [*said, ("report", result["report"])])


@click.command("eval")
@ENGINE
@click.option(
    "--baseline",
    type=PATH,
    metavar="ENGINE0",
    help="Uncompressed engine of the same model, to compare with.",
)
@click.option(
    "--text", type=PATH, help="Documents (.jsonl): perplexity, agreement, KL."
)
@click.option(
    "--retrieval", type=PATH, help="Prompts with answers (.jsonl): exact match."
)
@click.option(
    "--windows",
    type=click.IntRange(1),
    default=tasks.WINDOWS,
    show_default=True,
    help="Windows of text.",
)
@click.option(
    "--window-tokens",
    type=click.IntRange(2),
    default=tasks.WINDOW_TOKENS,
    show_default=True,
    help="Tokens of each.",
)
@click.option(
    "--every",
    type=click.IntRange(1),
    default=tasks.EVERY,
    show_default=True,
    help="Use each N-th prompt.",
)
@click.option(
    "--suite",
    "whole",
    is_flag=True,
    help="Everything: text, line retrieval by depth, code, continuations.",
)
@click.option(
    "--report",
    type=PATH,
    metavar="FILE.html",
    help="With --suite: write a page with the heat map.",
)
@click.option(
    "--repeats",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    help="--suite: questions a cell.",
)
@click.option(
    "--samples",
    type=click.IntRange(0),
    default=24,
    show_default=True,
    help="--suite: texts to continue.",
)
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="--suite: of all that is drawn.",
)
@THREADS
@DEVICE
@GPU_MEMORY
@TENSOR_PARALLEL
@reports(show_scores)
def eval_command(
    engine: Path,
    baseline: Path | None,
    text: Path | None,
    retrieval: Path | None,
    windows: int,
    window_tokens: int,
    every: int,
    whole: bool,
    report: Path | None,
    threads: int | None,
    device: str | None,
    gpu_memory_utilization: float,
    tensor_parallel_size: int,
    **drawn: int,
) -> Result:
    """Measure an engine: perplexity, line retrieval, and agreement with the
    uncompressed model.

    Agreement (share of equal next tokens) and KL need --baseline; what was not asked
    for is null. --suite asks more of it: line retrieval at every length and depth, code
    completion and continuations, and shows it all beside the baseline; its questions
    are made for the engine's own tokenizer, its texts come from --text.
    """
    _check_usage(text, retrieval, whole, report)
    from kvlathe.evaluation.evaluate import evaluate

    text = (text or DATA / "eval_text.jsonl") if whole else text
    # A baseline is there at the same time.
    share = gpu_memory_utilization / 2 if baseline else gpu_memory_utilization
    num_shards = tensor_parallel_size
    reference = None
    if baseline:
        reference = _loaded(baseline, threads, device, share, num_shards)
    llm = _loaded(engine, threads, device, share, num_shards)
    if not whole or text is None:
        scores = evaluate(
            llm, reference, text, retrieval, windows, window_tokens, every, both=True
        )
        record.keep(engine, scores, baseline)
        return scores
    from kvlathe.evaluation.suite import Exam, run_suite
    from kvlathe.evaluation.suite_page import write_page

    result = run_suite(llm, reference, text, Exam(windows, window_tokens, **drawn))
    record.keep_suite(engine, result["scores"], result["measured_on"], baseline)
    if report is not None:
        write_page(result, report, engine / REPORT_FILE)
    return result | {"report": None if report is None else str(report)}


def _loaded(
    engine: Path, threads: int | None, device: str | None, share: float, num_shards: int
) -> LLM:
    """An engine in ``share`` of the memory of ``num_shards`` GPUs, or on the CPU."""
    from kvlathe.runtime.llm import LLM

    return LLM.load(
        engine,
        threads=threads,
        device=device,
        gpu_memory_utilization=share,
        tensor_parallel_size=num_shards,
    )


def _check_usage(
    text: Path | None, retrieval: Path | None, whole: bool, report: Path | None
) -> None:
    """Raises click.UsageError for options that do not go together."""
    if text is None and retrieval is None and not whole:
        raise click.UsageError("Give --text, --retrieval or both, or --suite.")
    if whole and retrieval is not None:
        raise click.UsageError(
            "--suite makes its own questions: leave --retrieval out."
        )
    if report is not None and not whole:
        raise click.UsageError("--report goes with --suite.")


COMMANDS = (eval_command,)
