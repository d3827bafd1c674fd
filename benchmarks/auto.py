"""The frontier: bytes against accuracy of ``auto`` and of every method that one
sequence can score, in one table.

    python benchmarks/auto.py [--model DIR] [--windows 8] [--window-tokens 1024]
    [--every 3] [--device cuda] [--plot F]
                               [--engine 0.8 ...] [--no-frontier [--at 0.8 ...]]

Plans are scored by the torch decoder as an engine computes them on a one-page grid
(tests/export/attention/test_sealed.py); ``--engine`` builds, loads and measures
``auto`` at a ratio as a user would (``--no-frontier``: those ratios and those of
``--at`` alone). Bytes: all pages of a sequence of 3,072 tokens, scales and the hot page
included (the mean over the last page), against the uncompressed cache in 16 bit.
``auto`` is measured on the end of the calibration text, on exercises and, with
``--questions``, on questions that are not asked here. ``shuffled``: the same forms
dealt to other heads. One table, what each target costs in bytes, and one JSON line.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
import torch
from accuracy import DATA, ROOT, Remembering
from methods import CONTEXT

from kvlathe.base.console import print_table
from kvlathe.engines import cache
from kvlathe.engines.build import build
from kvlathe.engines.planning import calibrated
from kvlathe.engines.request import BuildRequest
from kvlathe.evaluation.evaluate import evaluate
from kvlathe.export.bases.basis import Basis
from kvlathe.export.folding.fold import decoder_from
from kvlathe.export.methods.assignment import Priced
from kvlathe.export.methods.composition import CacheSettings, compose
from kvlathe.export.methods.options import Options
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.report.curve import Sizes, accuracy_curve
from kvlathe.export.search.exams import TorchOracle, read_exam
from kvlathe.export.search.measured import Sources, plan_of, price, variant
from kvlathe.export.search.sealed import reading
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.memory import bytes_left
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.llm import LLM
from kvlathe.tasks import tasks
from kvlathe.tasks.metrics import Sums

FORM = CacheSettings(16)
RATIOS = (0.7, 0.75, 0.8, 0.82, 0.84, 0.86, 0.88, 0.9, 0.91, 0.92)
SHUFFLED = (0.8, 0.86)
CUTS = (0.1, 0.2, 0.3, 0.4, 0.5)
CODED = (
    "hack:bits=8",
    "hack:bits=4",
    "hack:bits=2",
    "kivi:bits=4",
    "kivi:bits=2",
    "kvquant:bits=4",
)
COMPOSED = (
    (0.75, "fdc+hack:bits=4"),
    (0.8, "fdc+hack:bits=4"),
    (0.85, "fdc+hack:bits=4"),
    (0.88, "fdc+hack:bits=2"),
)
COLUMNS = ("method", "asked", "bytes left", "perplexity ratio", "retrieval", "kl")
TARGETS = (("perplexity ratio", 1.01), ("perplexity ratio", 1.03), ("retrieval", 0.99))
Made = tuple[CompressionPlan, Basis]


@dataclass(frozen=True)
class Bench:
    checkpoint: Checkpoint
    windows: list[list[int]]
    questions: list[tasks.Question]
    device: str

    @cached_property
    def _known(self) -> list[npt.NDArray[np.float32]]:
        oracle = self.whole
        with torch.device(self.device):
            return [self._logits(oracle, window) for window in self.windows]

    @cached_property
    def whole(self) -> TorchOracle:
        spec = self.checkpoint.spec
        return self.oracle(
            compose(
                "none",
                spec.shape,
                spec.rope is not None,
                None,
                Options(),
                CacheSettings(32),
            )
        )

    def oracle(self, made: Made) -> TorchOracle:
        return TorchOracle(
            reading(decoder_from(self.checkpoint, *made)).to(self.device)
        )

    def _logits(
        self, oracle: TorchOracle, ids: Sequence[int]
    ) -> npt.NDArray[np.float32]:
        return oracle.logits(ids, range(len(ids) - 1))

    def row(self, method: str, asked: float | None, made: Made) -> dict[str, Any]:
        oracle, all_known, sums, base = self.oracle(made), self._known, Sums(), Sums()
        with torch.device(self.device):
            for window, known in zip(self.windows, all_known, strict=True):
                targets = np.array(window[1:])
                sums += Sums.of(self._logits(oracle, window), targets, known)
                base += Sums.of(known, targets)
            right = [tasks.answers(oracle, question) for question in self.questions]
        found = {
            "method": method,
            "asked": asked,
            "bytes left": bytes_left(CacheLayout(made[0]), CONTEXT),
            "perplexity ratio": sums.perplexity / base.perplexity,
            "retrieval": float(np.mean(right)),
            "kl": sums.kl / sums.tokens,
        }
        click.echo(json.dumps(found), err=True)
        return found


def measured_rows(
    bench: Bench, found: Priced, ratios: Sequence[float]
) -> Iterator[dict[str, Any]]:
    plans = variant("auto", found, FORM)
    for ratio in ratios:
        if plans.least <= ratio <= plans.most:
            yield bench.row("auto", ratio, plans.at(ratio))


def shuffled_rows(
    bench: Bench, found: Priced, ratios: Sequence[float]
) -> Iterator[dict[str, Any]]:
    shape = bench.checkpoint.spec.shape
    numbers = 2 * shape.layers * shape.kv_heads * shape.head_dim
    whole = 2 * numbers * found.grid.tokens
    for ratio in ratios:
        choice = found.chosen(int((1 - ratio) * whole))
        dealt = choice.shuffled(np.random.default_rng(0))
        yield bench.row("auto, shuffled", ratio, plan_of("auto", found, dealt, FORM))


def other_rows(bench: Bench, found: Priced) -> Iterator[dict[str, Any]]:
    """Single methods, then what compositions reach; low-rank ones on the same text
    statistics."""
    spec, stats = bench.checkpoint.spec, found.grid.stats

    def made(request: str, ratio: float | None, **options: Any) -> Made:  # noqa: ANN401
        asked = Options(compression_ratio=ratio, **options)
        return compose(request, spec.shape, spec.rope is not None, stats, asked, FORM)

    for cut in CUTS:
        yield bench.row("fdc", cut, made("fdc", cut))
        yield bench.row("zack", cut, made("zack", cut))
        yield bench.row("fdc, balanced", cut, made("fdc", cut, basis="balanced"))
    for request in CODED:
        yield bench.row(request, None, made(request, None))
    for ratio, request in COMPOSED:
        yield bench.row(
            request + ", balanced", ratio, made(request, ratio, basis="balanced")
        )


def engine_rows(
    bench: Bench, ratios: Sequence[float], asked: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    model = bench.checkpoint.path
    with tempfile.TemporaryDirectory() as scratch:
        plain = Remembering(
            LLM.load(build(BuildRequest(model, Path(scratch) / "none", kv_bits=32)))
        )
        for ratio in ratios:
            request = BuildRequest(
                model,
                Path(scratch) / str(ratio),
                "auto",
                compression_ratio=ratio,
                target_len=3072,
                kv_bits=16,
            )
            llm = LLM.load(build(request))
            found = evaluate(
                llm,
                plain,
                DATA / "eval_text.jsonl",
                DATA / "line_retrieval.jsonl",
                **asked,
            )
            row = {
                "perplexity ratio": found["perplexity_ratio"],
                "retrieval": found["retrieval_exact_match"],
            }
            row |= {
                "method": "auto, engine",
                "asked": ratio,
                "bytes left": bytes_left(llm.layout, CONTEXT),
                "kl": found["kl"],
            }
            click.echo(json.dumps(row), err=True)
            yield row


def fewest(
    rows: list[dict[str, Any]], metric: str, needed: float, baseline: float
) -> float | None:
    """The fewest bytes left among rows that meet a target (retrieval: as a share of the
    uncompressed)."""
    enough = [
        row["bytes left"]
        for row in rows
        if (
            row[metric] <= needed
            if metric != "retrieval"
            else row[metric] >= needed * baseline
        )
    ]
    return min(enough, default=None)


def targets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    baseline = next(row["retrieval"] for row in rows if row["method"] == "none")
    single = [
        row for row in rows if "auto" not in row["method"] and "+" not in row["method"]
    ]
    composed = [row for row in rows if "+" in row["method"]]
    found = []
    for metric, needed in TARGETS:
        ours, theirs, both = (
            fewest(kind, metric, needed, baseline)
            for kind in (
                [row for row in rows if row["method"] == "auto"],
                single,
                composed,
            )
        )
        gain = None if ours is None or theirs is None else theirs / ours
        found.append(
            {
                "target": f"{metric} {needed}",
                "auto": ours,
                "best single": theirs,
                "composed": both,
                "gain": gain,
            }
        )
    return found


def chart(rows: list[dict[str, Any]]) -> str:
    """The frontier as a page; bytes in units of the uncompressed 16-bit cache."""
    points = [
        {
            "removed": 1 - x["bytes left"],
            "score": 1 / x["perplexity ratio"],
            "of": x["method"].partition(":")[0],
        }
        for x in rows[1:]
    ]
    curve = {
        "metric": "perplexity, uncompressed over compressed",
        "baseline": 1.0,
        "of": "auto",
        "points": points,
    }
    right = [
        {**point, "score": x["retrieval"]}
        for point, x in zip(points, rows[1:], strict=True)
    ]
    answers = {
        "metric": "retrieval",
        "baseline": rows[0]["retrieval"],
        "of": "auto",
        "points": right,
    }
    colours = "--ink:#1b2423;--muted:#5d6b69;--grid:#e3e8e6;--page:#fff;--key:#1f7a74;--value:#d0873a"
    drawn = "".join(
        str(accuracy_curve(x, Sizes(1.0))).replace("curve-", f"{i}-")
        for i, x in enumerate((curve, answers))
    )
    return (
        f"<!doctype html><meta charset=utf-8><style>:root{{{colours}}}</style>{drawn}"
    )


@click.command()
@click.option(
    "--model", type=click.Path(path_type=Path), default=ROOT / "models" / "lathe-5m"
)
@click.option("--windows", default=8, show_default=True)
@click.option("--window-tokens", default=1024, show_default=True)
@click.option("--every", default=3, show_default=True)
@click.option(
    "--device", default="cpu", show_default=True, help="Where plans are scored."
)
@click.option(
    "--engine",
    "ratios",
    multiple=True,
    type=float,
    help="Ratios to measure through the exported engine too.",
)
@click.option(
    "--frontier/--no-frontier",
    default=True,
    help="Measure more than the ratios of --engine.",
)
@click.option(
    "--at",
    multiple=True,
    type=float,
    help="Ratios of auto, where not all are measured.",
)
@click.option(
    "--paired",
    is_flag=True,
    help="Only the number formats that the GPU kernels read (not of --engine).",
)
@click.option(
    "--questions",
    "asked_too",
    is_flag=True,
    help="Price two of three questions of the retrieval file, too.",
)
@click.option(
    "--target-len",
    default=3072,
    show_default=True,
    help="Tokens of the sequence whose bytes are counted.",
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    help="Write the frontier as an HTML page.",
)
def main(
    model: Path,
    device: str,
    ratios: tuple[float, ...],
    frontier: bool,
    at: tuple[float, ...],
    paired: bool,
    asked_too: bool,
    target_len: int,
    plot: Path | None,
    **asked: int,
) -> None:
    """Measure the frontier of bytes against accuracy."""
    checkpoint = Checkpoint(model)
    encoder, text, questions = (
        tasks.FolderEncoder(model),
        DATA / "calibration_text.jsonl",
        DATA / "line_retrieval.jsonl",
    )
    documents = tasks.encode_documents(
        encoder, tasks.read_texts(DATA / "eval_text.jsonl")
    )
    windows = tasks.windows(
        documents, encoder.eos_id, asked["windows"], asked["window_tokens"]
    )
    bench = Bench(
        checkpoint,
        windows,
        tasks.read_questions(questions, encoder, asked["every"]),
        device,
    )
    stats = calibrated(checkpoint, str(text))
    exams = [read_exam(checkpoint, "perplexity", text, None)]
    if asked_too:
        exams.append(read_exam(checkpoint, "retrieval", None, questions))
    form = dataclasses.replace(FORM, paired=paired, windowed=not paired)
    sources = Sources(exams, target_len)
    found = price(checkpoint, stats, form, sources, cache.curves_folder())
    spec = checkpoint.spec
    none = compose("none", spec.shape, spec.rope is not None, None, Options(), FORM)
    wanted = RATIOS if frontier else sorted({*at, *ratios})
    rows = [bench.row("none", None, none), *measured_rows(bench, found, wanted)]
    rows += list(
        shuffled_rows(bench, found, [ratio for ratio in SHUFFLED if ratio in wanted])
    )
    if frontier:
        rows += list(other_rows(bench, found))
    rows += list(engine_rows(bench, ratios, asked))
    goals = targets(rows)
    title = f"{model.name}: bytes of 3,072 tokens against 16 bit"
    print_table(title, COLUMNS, [[row[name] for name in COLUMNS] for row in rows])
    print_table(
        "fewest bytes left", list(goals[0]), [list(goal.values()) for goal in goals]
    )
    if plot is not None:
        plot.write_text(chart(rows), "utf-8")
    print(
        json.dumps(
            {
                "benchmark": "auto",
                "model": model.name,
                **asked,
                "rows": rows,
                "targets": goals,
            }
        )
    )


if __name__ == "__main__":
    main()
