"""Public benchmarks of engines, beside the uncompressed engine of the same model.

    python -m benchmarks.real build MODEL ENGINES [--row ROW ...] [-- FLAGS OF kvlathe build]
    python -m benchmarks.real ruler CHECKPOINT SAMPLES --length 4096 --count 100
    python -m benchmarks.real humaneval CHECKPOINT SAMPLES [--behind 8192]
    python -m benchmarks.real answers CHECKPOINT SAMPLES --new 2000
    python -m benchmarks.real ask ENGINES SAMPLES RESULTS [--row ROW ...]
    python -m benchmarks.real perplexity ENGINES RESULTS --length 2048 --length 8192
    python -m benchmarks.real tables RESULTS ... [--keep FILE] [--page PAGE]

MODEL is what ``kvlathe build --model`` takes, CHECKPOINT a folder with a tokenizer: an
engine's does, too. Contexts are compressed before their questions are known. Every
record is appended to RESULTS as it is measured; what is there is not asked again.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import click

from benchmarks.real import answers as long_answers
from benchmarks.real import humaneval as code_problems
from benchmarks.real import perplexity as texts
from benchmarks.real import results as store
from benchmarks.real import ruler as long_contexts
from benchmarks.real import samples as asked
from benchmarks.real import tables
from benchmarks.real.asking import Asker
from benchmarks.real.engines import ROWS, build, folder_of
from benchmarks.real.results import References, Results
from benchmarks.real.samples import Sample
from benchmarks.real.scoring import score
from benchmarks.support.commands import DATA
from kvlathe.base.errors import KvlatheError
from kvlathe.runtime.llm import LLM

PATH = click.Path(path_type=Path)
row_option = click.option(
    "--row", "rows", multiple=True, default=ROWS, help="By default, all."
)

Command = TypeVar("Command", bound=Callable[..., None])


def loading_options(command: Command) -> Command:
    """Give a command what an engine is loaded with."""
    threads = click.option("--threads", type=int)
    return threads(click.option("--cache-bytes", type=int)(command))


@click.group(help=(__doc__ or "").partition("\n")[0])
def main() -> None:
    pass


@main.command("build")
@click.argument("model")
@click.argument("engines", type=PATH)
@row_option
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def build_rows(
    model: str, engines: Path, rows: tuple[str, ...], flags: tuple[str, ...]
) -> None:
    """Build the engine of every row that has none yet."""
    for row in rows:
        started = time.perf_counter()
        refused = build(model, engines, row, flags)
        click.echo(f"{row}: {refused or f'{time.perf_counter() - started:.0f} s'}")


@main.command("ruler")
@click.argument("checkpoint", type=PATH)
@click.argument("samples", type=PATH)
@click.option("--length", default=4096, show_default=True)
@click.option("--count", default=100, show_default=True, help="Samples a task.")
@click.option("--seed", default=0, show_default=True)
@click.option("--chat", is_flag=True, help="As turns of the chat template.")
@click.option("--task", "tasks", multiple=True, default=tuple(long_contexts.NEW))
def ruler_samples(
    checkpoint: Path,
    samples: Path,
    length: int,
    count: int,
    seed: int,
    chat: bool,
    tasks: tuple[str, ...],
) -> None:
    """Write RULER's samples, by lm-evaluation-harness' own generators."""
    made = long_contexts.samples(checkpoint, length, count, seed, chat, list(tasks))
    asked.write(samples, made)


@main.command("humaneval")
@click.argument("checkpoint", type=PATH)
@click.argument("samples", type=PATH)
@click.option("--behind", default=0, help="Tokens of other code before a problem.")
def humaneval_samples(checkpoint: Path, samples: Path, behind: int) -> None:
    """Write HumanEval's 164 problems as samples."""
    asked.write(samples, code_problems.samples(checkpoint, behind))


@main.command("answers")
@click.argument("checkpoint", type=PATH)
@click.argument("samples", type=PATH)
@click.option("--new", default=2000, show_default=True)
def answer_samples(checkpoint: Path, samples: Path, new: int) -> None:
    """Write prompts of long answers as samples."""
    asked.write(samples, long_answers.samples(checkpoint, new))


@main.command("ask")
@click.argument("engines", type=PATH)
@click.argument("samples", type=PATH)
@click.argument("results", type=PATH)
@row_option
@loading_options
@click.option("--count", type=int, help="Only the first samples of each task.")
@click.option("--seconds", type=float, help="Begin nothing after so many seconds.")
@click.option("--beside", type=PATH, help="Results that have the row none.")
def ask(
    engines: Path,
    samples: Path,
    results: Path,
    rows: tuple[str, ...],
    count: int | None,
    seconds: float | None,
    beside: Path | None,
    **loading: int | None,
) -> None:
    """Answer samples by the engine of every row, and score them. The first samples of
    all tasks come first, so that a run that is cut off has some of each."""
    wanted = [s for s in asked.read(samples) if count is None or s.number < count]
    wanted.sort(key=lambda sample: sample.number)
    found = Results(results)
    references = store.uncompressed(found, Results(beside) if beside else found)
    until = math.inf if seconds is None else time.monotonic() + seconds
    for row in rows:
        if not folder_of(engines, row).exists():
            click.echo(f"{row} has no engine in {engines}", err=True)
            continue
        left = [s for s in wanted if (row, s.task, s.number) not in found.known]
        if left and time.monotonic() < until:
            with _loaded(engines, row, loading) as llm:
                _answer(Asker(llm), row, left, found, references, until)
        _say(found, row)


def _answer(
    asker: Asker,
    row: str,
    left: list[Sample],
    found: Results,
    references: References,
    until: float,
) -> None:
    """Record the answers to samples that have none yet, as they come."""
    for sample, answer in asker.answers(left):
        first = sample.check == "parting" and row == store.UNCOMPRESSED
        if first:
            references[sample.task, sample.number] = tuple(answer.ids)
        reference = references.get((sample.task, sample.number), ())
        record = store.Record(
            *(row, sample.task, sample.number),
            score=score(sample, answer.text, answer.ids, reference),
            bits=round(answer.bits, 4),
            tokens=answer.tokens,
            text=answer.text,
            ids=reference if first else (),
        )
        found.append(record)
        if time.monotonic() > until:
            return


@main.command("perplexity")
@click.argument("engines", type=PATH)
@click.argument("results", type=PATH)
@row_option
@click.option("--length", "lengths", multiple=True, default=(2048, 8192, 32768))
@click.option("--count", default=8, show_default=True, help="Windows of each length.")
@click.option("--text", type=PATH, default=DATA / "eval_text.jsonl")
@loading_options
def perplexity(
    engines: Path,
    results: Path,
    rows: tuple[str, ...],
    lengths: tuple[int, ...],
    count: int,
    text: Path,
    **loading: int | None,
) -> None:
    """Measure the loss of text behind contexts of every length that an engine takes."""
    found = Results(results)
    for row in rows:
        if not folder_of(engines, row).exists():
            continue
        with _loaded(engines, row, loading) as llm:
            for length in lengths:
                if length <= llm.limits.max_input_len:
                    _windows(Asker(llm), row, found, text, length, count)
        _say(found, row)


def _windows(
    asker: Asker, row: str, found: Results, text: Path, length: int, count: int
) -> None:
    """Record the loss of windows that have none yet."""
    task = f"text@{length}"
    for number, window in enumerate(texts.windows(asker.llm, text, length, count)):
        if (row, task, number) in found.known:
            continue
        saved = asker.compact(window[: texts.prompt_of(window)])
        bits = round(asker.bits(length, saved), 4)
        loss = texts.loss(asker.llm, window)
        found.append(store.Record(row, task, number, loss, bits, length))


@main.command("tables")
@click.argument("results", type=PATH, nargs=-1, required=True)
@click.option("--keep", type=PATH, help="Write the cells here, without texts.")
@click.option("--page", type=PATH, help="Put the tables between its marks.")
@click.option("--model", default="model", help="Its name, for --keep.")
def show_tables(
    results: tuple[Path, ...], keep: Path | None, page: Path | None, model: str
) -> None:
    """Print tables of records (.jsonl) or of kept cells (.json)."""
    cells: list[store.Cell] = []
    for path in results:
        if path.suffix == ".json":
            model, known = store.load(path)
            cells += known
        else:
            cells += store.cells(store.Results(path).records)
    if keep:
        store.save(keep, model, cells)
    found = tables.sections(cells)
    for name, table in found.items():
        click.echo(f"{model} {name}\n{table}\n")
    if page:
        click.echo(f"{page}: {', '.join(tables.write(page, model, found))}")


def _loaded(engines: Path, row: str, loading: Mapping[str, int | None]) -> LLM:
    """The engine of a row. Only plans that compact contexts keep prefixes."""
    return LLM.load(
        folder_of(engines, row),
        threads=loading["threads"],
        cache_bytes=loading["cache_bytes"],
        share_prefixes="kvzip" in row,
        verify=False,
    )


def _say(found: Results, row: str) -> None:
    """One JSON line for each cell of a row."""
    for cell in store.cells(found.records):
        if cell.row == row:
            click.echo(store.said(cell))


if __name__ == "__main__":
    try:
        main(prog_name="python -m benchmarks.real")
    except KvlatheError as error:
        sys.exit(str(error))
