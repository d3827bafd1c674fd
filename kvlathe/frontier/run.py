"""The whole frontier: every candidate measured, the plan to take, a picture and a
page."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kvlathe.base import console, machine
from kvlathe.base.console import log, progress
from kvlathe.base.errors import KvlatheError
from kvlathe.base.hub import model_name
from kvlathe.base.package import DATA
from kvlathe.engines.build import build
from kvlathe.engines.folder import sigterm_interrupts
from kvlathe.export.methods.compression import parse
from kvlathe.frontier import page
from kvlathe.frontier.measure import (
    UNCOMPRESSED,
    Exam,
    Measuring,
    Options,
    kept_at,
    key_of,
)
from kvlathe.frontier.points import Bound, Candidate, Point, choose, questions_every

Result = dict[str, object]
DATA_FILE, PLOT_FILE, PAGE_FILE = "frontier.json", "frontier.png", "frontier.html"
POINTS = "points"
"""Folder of what was measured, a file a plan."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Options of the measurement, and the loss that a plan may have."""

    text: Path | None = None
    retrieval: Path | None = None
    windows: int = 8
    window_tokens: int = 2048
    questions: int = 50
    bound: float = 1.01
    jobs: int = 1


def frontier(
    candidates: Sequence[Candidate], options: Options, asked: Asked, strict: bool
) -> Result:
    """Measure ``candidates`` beside the uncompressed engine, and write frontier.json,
    frontier.png and frontier.html into ``options.output``.

    ``strict``: a candidate that no model can have is refused at once; else it becomes a
    row that says why. Raises KvlatheError.
    """
    exam = _exam(options, asked)
    wanted = list(dict.fromkeys((UNCOMPRESSED, *candidates)))
    refused: dict[Candidate, Point] = {}
    paths: dict[Candidate, Path] = {}
    for candidate in wanted:
        try:
            key = key_of(candidate, options, exam)
        except KvlatheError as error:
            if strict or candidate == UNCOMPRESSED:
                raise
            refused[candidate] = Point.refused(candidate, error)
            continue
        paths[candidate] = options.output / POINTS / f"{key}.json"
    measured = _all_measured(paths, options, exam, asked.jobs)
    points = [(refused | measured)[candidate] for candidate in wanted]
    return _told(points, options, exam, asked.bound)


def _exam(options: Options, asked: Asked) -> Exam:
    """Files and sizes, defaults written out."""
    text = asked.text or DATA / "eval_text.jsonl"
    retrieval = asked.retrieval or DATA / "line_retrieval.jsonl"
    if not text.is_file():
        raise KvlatheError(f"{text} cannot be read", "there is no such file")
    every = questions_every(retrieval, asked.questions)
    sizes = (asked.windows, asked.window_tokens, every)
    return Exam(text, retrieval, *sizes, options.target_len)


# -- measuring -------------------------------------------------------------------------
def _all_measured(
    paths: dict[Candidate, Path], options: Options, exam: Exam, jobs: int
) -> dict[Candidate, Point]:
    """Points of all candidates: those that were kept, and the rest measured now.
    Nothing is built where all are there."""
    found: dict[Candidate, Point] = {}
    for candidate, path in paths.items():
        point = kept_at(path)
        if point is not None:
            found[candidate] = point
    missing = [candidate for candidate in paths if candidate not in found]
    if found:
        log.info("%d of %d plans were measured before", len(found), len(paths))
    if not missing:
        return found
    options.output.mkdir(parents=True, exist_ok=True)
    with (
        sigterm_interrupts(),
        tempfile.TemporaryDirectory(dir=options.output, prefix="engines-") as scratch,
    ):
        baseline = Path(scratch) / "uncompressed"
        build(options.config(UNCOMPRESSED, baseline))
        found |= _measured(Measuring(options, exam, baseline), missing, paths, jobs)
    return found


def _measured(
    measuring: Measuring,
    missing: Sequence[Candidate],
    paths: dict[Candidate, Path],
    jobs: int,
) -> dict[Candidate, Point]:
    """Measure all. With several ``jobs`` the first candidate of each compression goes
    alone: what it calibrates and prices is kept, and the others find it."""
    first, others = list(missing), list[Candidate]()
    if jobs > 1:
        first, others = _pioneers(missing)
    found: dict[Candidate, Point] = {}
    for candidate in progress(first, "measuring plans"):
        log.info("measuring %s", candidate.name)
        found[candidate] = measuring.point(candidate, paths[candidate])
    if not others:
        return found
    each = machine.cores() // jobs
    shared = dataclasses.replace(measuring.options, threads=max(1, each))
    measuring = dataclasses.replace(measuring, options=shared)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, spawn, _say_from, (console.log.level,)) as pool:
        kept = [paths[candidate] for candidate in others]
        shown = progress(
            pool.map(measuring.point, others, kept), "measuring plans", len(others)
        )
        found |= zip(others, shown, strict=True)
    return found


def _pioneers(
    candidates: Sequence[Candidate],
) -> tuple[list[Candidate], list[Candidate]]:
    """Split candidates: those that calibrate or price what others share, and the
    rest."""
    first: list[Candidate] = []
    others: list[Candidate] = []
    seen: set[str] = set()
    for candidate in candidates:
        name = parse(candidate.compression).methods[0].name
        (others if name in seen else first).append(candidate)
        seen.add(name)
    return first, others


def _say_from(level: int) -> None:
    """A process that measures logs as this one does."""
    console.setup({10: "debug", 20: "info", 30: "warning"}.get(level, "error"))


# -- telling ---------------------------------------------------------------------------
def _told(points: list[Point], options: Options, exam: Exam, bound: float) -> Result:
    """The result, and the files that show it."""
    allowed = Bound(bound, points[0])
    chosen = choose(points, allowed)
    rows: list[Result] = []
    for point in points:
        rows.append(point.to_json() | {"within": allowed.holds(point)})
    output = options.output
    candidate = Candidate(chosen.compression, chosen.ratio)
    result: Result = {
        "model": model_name(options.model),
        "tokens": points[0].tokens,
        "bound": bound,
        "points": rows,
        "chosen": chosen.name,
        "command": options.command(candidate),
        "measured_on": _measured_on(exam),
        "data": str(output / DATA_FILE),
        "plot": str(output / PLOT_FILE),
        "page": str(output / PAGE_FILE),
    }
    output.mkdir(parents=True, exist_ok=True)
    page.write(result, points, allowed, chosen)
    (output / DATA_FILE).write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    return result


def _measured_on(exam: Exam) -> Result:
    return {
        "text": exam.text.name,
        "windows": exam.windows,
        "window tokens": exam.window_tokens,
        "retrieval": exam.retrieval.name,
        "one question in": exam.every,
    }
