"""Tables of the results, in Markdown: scores with their standard errors, and beside
each the difference from the uncompressed cache on the same samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.real.results import (
    UNCOMPRESSED,
    Cell,
    Mean,
    average,
    differences,
)
from kvlathe.base.errors import KvlatheError

Line = list[str]
RULER = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "fwe", "cwe")


def percent(mean: Mean, signed: bool = False) -> str:
    """``43.0 ± 5.1``: in percent."""
    sign = "+" if signed else ""
    said = f"{100 * mean.value:{sign}.1f}"
    return said if math.isnan(mean.error) else f"{said} ± {100 * mean.error:.1f}"


def size_of(task: str) -> int:
    """The number behind a task's @; 0 without one."""
    return int(task.partition("@")[2] or 0)


class Table:
    """The cells of one model, looked up by row and task."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self.cells = {(cell.row, cell.task): cell for cell in cells}
        self.rows = list(dict.fromkeys(cell.row for cell in cells))

    def tasks(self, wanted: Callable[[str], bool]) -> list[str]:
        """The tasks whose name, before the @, is wanted."""
        found = dict.fromkeys(task for _, task in self.cells)
        return [task for task in found if wanted(task.partition("@")[0])]

    def difference(self, row: str, task: str) -> Mean | None:
        """The mean difference from the uncompressed cache, where both have samples."""
        own = self.cells.get((row, task))
        other = self.cells.get((UNCOMPRESSED, task))
        found = differences(own, other) if own and other else []
        return Mean.of(found) if found else None

    def bits(self, row: str, tasks: Sequence[str]) -> str:
        found = [self.cells[row, t].bits for t in tasks if (row, t) in self.cells]
        return f"{sum(found) / len(found):.2f}" if found else ""


def ruler(table: Table, length: int) -> list[Line]:
    """A line for each row that has all of the tasks measured at ``length``."""
    here = [task for task in table.tasks(RULER.__contains__) if size_of(task) == length]
    tasks = sorted(here, key=lambda task: RULER.index(task.partition("@")[0]))
    names = [task.partition("@")[0] for task in tasks]
    lines = [["row", "bits", *names, "mean", "less uncompressed", "samples"]]
    for row in table.rows:
        found = [table.cells[row, t] for t in tasks if (row, t) in table.cells]
        if len(found) < len(tasks):
            continue
        means = [Mean.of(list(cell.scores.values())) for cell in found]
        beside = [table.difference(row, task) for task in tasks]
        known = [mean for mean in beside if mean is not None]
        whole = average(means)
        less = percent(average(known), True) if len(known) == len(tasks) else ""
        shown = [percent(mean) for mean in means]
        count = str(whole.count)
        lines.append(
            [f"`{row}`", table.bits(row, tasks), *shown, percent(whole), less, count]
        )
    return lines


def one_task(table: Table, task: str) -> list[Line]:
    """Passed programs, or answers' tokens before they part, as shares."""
    lines = [["row", "bits", "score", "less uncompressed", "samples"]]
    for row in table.rows:
        if cell := table.cells.get((row, task)):
            mean = Mean.of(list(cell.scores.values()))
            beside = table.difference(row, task)
            less = percent(beside, True) if beside else ""
            shown = [percent(mean), less, str(mean.count)]
            lines.append([f"`{row}`", table.bits(row, [task]), *shown])
    return lines


def texts(table: Table, tasks: Sequence[str]) -> list[Line]:
    """Ratios of perplexities: the mean difference of losses is its logarithm."""
    tasks = sorted(tasks, key=size_of)
    lines = [["row", *(f"{size_of(task):,} tokens" for task in tasks), "bits"]]
    for row in table.rows:
        shown: list[str] = []
        for task in tasks:
            beside = table.difference(row, task)
            shown.append("" if beside is None else _ratio(beside))
        if any(shown):
            lines.append([f"`{row}`", *shown, table.bits(row, tasks[-1:])])
    return lines


def _ratio(loss: Mean) -> str:
    ratio = math.exp(loss.value)
    said = f"x{ratio:.4f}"
    return said if math.isnan(loss.error) else f"{said} ± {ratio * loss.error:.4f}"


def parted(table: Table, task: str, lengths: Sequence[int]) -> list[Line]:
    """Of the answers, those that are still the uncompressed ones after so many tokens.
    ``task``: answer@N; a score is the share of its N tokens before they part."""
    whole = size_of(task)
    heads = [f"same after {length:,}" for length in lengths if length <= whole]
    lines = [["row", "bits", *heads, "tokens before they part", "answers"]]
    for row in table.rows:
        cell = table.cells.get((row, task))
        if cell is None or row == UNCOMPRESSED:
            continue
        tokens = [round(score * whole) for score in cell.scores.values()]
        shares = [
            f"{sum(count >= length for count in tokens)} of {len(tokens)}"
            for length in lengths
            if length <= whole
        ]
        mean = Mean.of(tokens)
        shown = f"{mean.value:.0f} ± {mean.error:.0f}"
        counted = str(len(tokens))
        lines.append([f"`{row}`", table.bits(row, [task]), *shares, shown, counted])
    return lines


def markdown(lines: Sequence[Line]) -> str:
    """A table of Markdown; the first line is its head."""
    head, *body = [f"| {' | '.join(line)} |" for line in lines]
    rule = "|" + "---|" * len(lines[0])
    return "\n".join([head, rule, *body])


LENGTHS = (64, 128, 256, 512, 1024, 2000)


def sections(cells: Sequence[Cell]) -> dict[str, str]:
    """Every table that the cells give, by its name."""
    table = Table(cells)
    found: dict[str, list[Line]] = {}
    for length in sorted({size_of(t) for t in table.tasks(RULER.__contains__)}):
        found[f"ruler-{length}"] = ruler(table, length)
    for task in table.tasks("humaneval".__eq__):
        found[task.replace("@", "-")] = one_task(table, task)
    if tasks := table.tasks("text".__eq__):
        found["text"] = texts(table, tasks)
    for task in table.tasks("answer".__eq__):
        found[task.replace("@", "-")] = parted(table, task, LENGTHS)
    return {name: markdown(lines) for name, lines in found.items() if len(lines) > 1}


def write(page: Path, model: str, tables: dict[str, str]) -> list[str]:
    """Put tables between the marks of a page, ``<!-- MODEL TABLE -->`` and
    ``<!-- end -->``. The names of those that it has. Raises KvlatheError for a mark
    without an end."""
    text = page.read_text(encoding="utf-8")
    written: list[str] = []
    for name, table in tables.items():
        mark, end = f"<!-- {model} {name} -->\n", "<!-- end -->"
        before, found, rest = text.partition(mark)
        if not found:
            continue
        _, ended, after = rest.partition(end)
        if not ended:
            raise KvlatheError(
                f"{page} cannot be written",
                f"'{mark.strip()}' has no end",
                f"write '{end}' behind the table",
            )
        text = f"{before}{mark}{table}\n{end}{after}"
        written.append(name)
    page.write_text(text, encoding="utf-8")
    return written
