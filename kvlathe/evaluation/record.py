"""Scores of ``kvlathe eval``, kept with the engine: evaluation.json, and the accuracy
section of report.html."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from markupsafe import escape

from kvlathe.base.console import cell
from kvlathe.plan import manifest as manifests
from kvlathe.plan.manifest import EVALUATION_FILE, REPORT_FILE, Manifest

log = logging.getLogger(__name__)
BLOCK = re.compile(r"<!--measured-->.*?<!--/measured-->", re.DOTALL)
"""The place in report.html that shows the scores."""
Sources = Mapping[str, Any]
"""Facts of an evaluation about its texts and questions."""
SCORES = {
    "perplexity_ratio": "perplexity ratio, lower is better",
    "perplexity": "perplexity",
    "agreement": "agreement: share of equal next tokens",
    "retrieval_exact_match": "line retrieval: share of exact answers",
}
"""Scores that are shown, in this order: score -> its name."""
OF_ITSELF = {"perplexity_ratio": 1.0, "agreement": 1.0}
"""Scores of the uncompressed engine beside itself."""

OF_SUITE = {
    ("text", "perplexity"): "perplexity",
    ("text", "agreement with the baseline"): "agreement",
    ("line retrieval", "exact match"): "retrieval_exact_match",
}
"""The rows of the suite's table that are scores too, by task and metric."""


def keep(folder: Path, result: Mapping[str, object], baseline: Path | None) -> None:
    """Keep what ``evaluate`` returned in the engine's folder.

    A process that is killed in here leaves an engine that loads. A folder that cannot
    be written stays as it is, and the log says so.
    """
    manifest = manifests.read(folder)
    measured = {name: result.get(name) for name in SCORES}
    scores = {k: float(v) for k, v in measured.items() if isinstance(v, int | float)}
    when = datetime.now(UTC).isoformat(timespec="seconds")
    beside = None if baseline is None else baseline.resolve().name
    of_baseline = {} if beside is None else baseline_scores(result)
    record = {
        "plan_digest": manifest.plan_digest,
        "measured": when,
        "baseline": beside,
        "scores": scores,
        "baseline_scores": of_baseline,
        "measured_on": result["measured_on"],
    }
    texts = {EVALUATION_FILE: json.dumps(record, indent=1) + "\n"}
    page = folder / REPORT_FILE
    on = measured_on(cast(Sources, result["measured_on"]))
    told = Told(on, questions_of(cast(Sources, result["measured_on"])), beside, when)
    block = block_of(scores, of_baseline, told)
    try:
        if page.is_file():
            texts[REPORT_FILE] = BLOCK.sub(lambda _: block, page.read_text("utf-8"))
        manifests.replace_files(folder, texts)
    except OSError as error:
        log.warning("the scores are not kept in %s: %s", folder, error.strerror)


def baseline_scores(result: Mapping[str, object]) -> dict[str, float]:
    """The uncompressed engine's scores, where they were measured."""
    found = dict(OF_ITSELF)
    for name in SCORES:
        value = result.get(f"{name}_baseline")
        if isinstance(value, int | float) and name not in OF_ITSELF:
            found[name] = float(value)
    own, ratio = result.get("perplexity"), result.get("perplexity_ratio")
    if isinstance(own, int | float) and isinstance(ratio, int | float):
        found.setdefault("perplexity", own / ratio)
    return found


def keep_suite(
    folder: Path,
    table: Sequence[Mapping[str, object]],
    measured_on: object,
    baseline: Path | None,
) -> None:
    """``keep`` for the rows of ``run_suite``'s ``scores``."""
    result: dict[str, object] = {"measured_on": measured_on}
    for row in table:
        name = OF_SUITE.get((str(row["task"]), str(row["metric"])))
        if name is not None:
            result[name] = row["engine"]
            result[f"{name}_baseline"] = row.get("baseline")
        if name == "perplexity":
            result["perplexity_ratio"] = row["ratio"]
    keep(folder, result, baseline)


def measured_on(sources: Sources) -> str:
    """The ``measured_on`` of an evaluation or a suite as a person would say it."""
    said = []
    if text := sources if "windows" in sources else sources.get("text"):
        said.append(
            f"{text['windows']} windows of {text['window_tokens']} tokens of {text['file']}"
        )
    if asked := sources.get("retrieval"):
        step = f" (one in {asked['every']})" if asked["every"] > 1 else ""
        said.append(
            f"{asked['questions']} questions of {asked['file']}{step}, {asked['too_long']} more too long"
        )
    if "questions" in sources:
        said.append(f"{sources['questions']} questions of line retrieval")
    return "; ".join(said)


def questions_of(sources: Sources) -> int:
    """The number of questions of line retrieval that an evaluation asked."""
    asked = sources.get("retrieval") or sources
    return int(asked.get("questions", 0))


@dataclass(frozen=True, slots=True)
class Told:
    """What a person is told beside the scores: the text they were measured ``on``, the
    number of ``questions``, the baseline's name (None: there was none), ``when``."""

    on: str
    questions: int
    baseline: str | None
    when: str


@dataclass(frozen=True, slots=True)
class Kept:
    """The scores of an engine, and in words what they were measured on."""

    scores: dict[str, float] = field(default_factory=dict)
    measured_on: str = ""


def read(folder: Path, manifest: Manifest) -> Kept:
    """Read the scores that were kept of this engine; empty where there are none, or
    where they are of another plan."""
    try:
        record = json.loads((folder / EVALUATION_FILE).read_text("utf-8"))
        if record["plan_digest"] != manifest.plan_digest:
            return Kept()
        scores = record["scores"]
        known = {name: float(scores[name]) for name in SCORES if name in scores}
        return Kept(known, measured_on(record["measured_on"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Kept()


def block_of(
    scores: Mapping[str, float], baseline: Mapping[str, float], told: Told
) -> str:
    """The scores as HTML, beside those of the ``baseline``, between the marks that a
    later evaluation looks for."""
    rows = ""
    for score, name in SCORES.items():
        if score not in scores:
            continue
        if score == "retrieval_exact_match" and told.questions:
            name += f", of {told.questions:,} questions"
        beside = cell(baseline[score]) if score in baseline else "not measured"
        rows += f"<tr><td>{name}</td>"
        rows += (
            f'<td class="n">{cell(scores[score])}</td><td class="n">{beside}</td></tr>'
        )
    head = '<tr><th></th><th class="n">this engine</th><th class="n">uncompressed</th></tr>'
    named = f", beside {escape(told.baseline)}" if told.baseline else ""
    said = f"Measured by <code>kvlathe eval</code> on {told.when[:10]}{named}, on {escape(told.on)}."
    table = f'<table>{head}{rows}</table><p class="note">{said}</p>'
    return f"<!--measured-->{table}<!--/measured-->"
