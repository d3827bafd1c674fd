"""Records of a benchmark, appended as they come, and the cells of tables made of them.

A run that was cut off goes on where it was: what has a record is not asked again.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

UNCOMPRESSED = "none"


@dataclass(frozen=True, slots=True)
class Record:
    """The outcome of one sample. ``bits``: of a cached number at the sample's length,
    everything in the pages counted. ``tokens``: cached at the end. ``text``: the
    answer's. ``ids``: its tokens, kept where others are compared with them."""

    row: str
    task: str
    number: int
    score: float
    bits: float
    tokens: int
    text: str = ""
    ids: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[str, str, int]:
        return self.row, self.task, self.number


class Results:
    """A file of records, one a line.

    >>> results = Results(tmp_path / "smollm2.jsonl")
    >>> results.append(Record("none", "vt@4096", 0, 0.8, 16.0, 4096))
    >>> ("none", "vt@4096", 0) in Results(tmp_path / "smollm2.jsonl").known
    True
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records = _read(path)
        self.known = {record.key: record for record in self.records}

    def append(self, record: Record) -> None:
        """Write a record now: what was measured outlives the run."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        torn = self.path.exists() and self.path.read_bytes()[-1:] not in (b"", b"\n")
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n" * torn + json.dumps(dataclasses.asdict(record)) + "\n")
        self.records.append(record)
        self.known[record.key] = record


def _read(path: Path) -> list[Record]:
    """The records of a file. A line that a kill cut off is none."""
    records: list[Record] = []
    if not path.exists():
        return records
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        records.append(Record(**row | {"ids": tuple(row.get("ids", ()))}))
    return records


References = dict[tuple[str, int], tuple[int, ...]]
"""Task and number of a sample -> the tokens of its uncompressed answer."""


def uncompressed(*sources: Results) -> References:
    """The answers' tokens that records of the uncompressed engine keep."""
    return {
        (record.task, record.number): record.ids
        for source in sources
        for record in source.records
        if record.row == UNCOMPRESSED and record.ids
    }


@dataclass(frozen=True, slots=True)
class Cell:
    """The scores of one row in one task, by sample, and the mean bits of a number."""

    row: str
    task: str
    bits: float
    scores: dict[int, float]


def cells(records: Iterable[Record]) -> list[Cell]:
    """A cell for each row and task, in the order in which they came."""
    grouped: dict[tuple[str, str], dict[int, Record]] = defaultdict(dict)
    for record in records:
        grouped[record.row, record.task][record.number] = record
    return [
        Cell(
            row,
            task,
            sum(record.bits for record in own.values()) / len(own),
            {number: own[number].score for number in sorted(own)},
        )
        for (row, task), own in grouped.items()
    ]


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean of ``count`` values and its standard error, which is NaN for one value."""

    value: float
    error: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        count = len(values)
        mean = math.fsum(values) / count
        if count < 2:
            return cls(mean, math.nan, count)
        squares = math.fsum((value - mean) ** 2 for value in values)
        return cls(mean, math.sqrt(squares / (count - 1) / count), count)


def average(means: Sequence[Mean]) -> Mean:
    """The mean over tasks, each of which counts alike; errors of tasks are
    independent."""
    value = math.fsum(mean.value for mean in means) / len(means)
    variance = math.fsum(mean.error**2 for mean in means)
    return Mean(value, math.sqrt(variance) / len(means), sum(m.count for m in means))


def differences(cell: Cell, reference: Cell) -> list[float]:
    """Scores less those of ``reference``, on the samples that both have: what all
    samples share goes out of the error."""
    both = cell.scores.keys() & reference.scores.keys()
    return [cell.scores[number] - reference.scores[number] for number in sorted(both)]


def said(cell: Cell) -> str:
    """A cell as a line of JSON, which has no NaN."""
    mean = Mean.of(list(cell.scores.values()))
    known = None if math.isnan(mean.error) else round(mean.error, 4)
    words = {"row": cell.row, "task": cell.task, "bits": round(cell.bits, 2)}
    words |= {"score": round(mean.value, 4), "error": known, "samples": mean.count}
    return json.dumps(words)


def save(path: Path, model: str, found: Sequence[Cell]) -> None:
    """Write cells as JSON, one a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(dataclasses.asdict(cell)) for cell in found]
    body = ",\n".join(lines)
    head = json.dumps({"model": model})[:-1]
    path.write_text(f'{head}, "cells": [\n{body}\n]}}\n', encoding="utf-8")


def load(path: Path) -> tuple[str, list[Cell]]:
    """The model's name and the cells of a file that ``save`` wrote."""
    read = json.loads(path.read_text(encoding="utf-8"))
    found: list[Cell] = []
    for row in read["cells"]:
        scores = {int(number): score for number, score in row["scores"].items()}
        found.append(Cell(row["row"], row["task"], row["bits"], scores))
    return read["model"], found
